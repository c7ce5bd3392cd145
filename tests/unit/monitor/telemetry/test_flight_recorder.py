"""Claims about the import of Flight Recorder dumps."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.monitor.errors import DumpUnreadable
from keepstep.monitor.records import DTYPES, Communicator, Flag, Operation
from keepstep.monitor.telemetry.flight_recorder import read_dumps
from tests.unit.monitor.telemetry.dumps import Write, as_json, as_pickle, dump, entry, hung


@pytest.mark.parametrize("write", [as_json, as_pickle])
def test_dumps_of_both_formats_are_read(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "nccl_trace_rank_4", dump(entry(1, "_all_gather_base"), hung(2, "all_reduce")))
    write(tmp_path / "nccl_trace_rank_6", dump(entry(1, "_all_gather_base")))
    job = read_dumps([tmp_path])
    group = Communicator.of("7 (mesh_pp)", (4, 6))
    assert job.communicators == {group.identity: group}
    first, second = job.ranks[4].records
    assert first.tolist()[1:] == (
        1, Operation.ALL_GATHER, DTYPES.index("bfloat16"), 0, group.identity, 1, 24, -1, 0,
        1e9 + 1, 1e9 + 1.125, 1e9 + 1.25,
    )  # fmt: skip
    assert (second["code"], second["ended_s"], second["started_s"]) == (
        Operation.ALL_REDUCE,
        0.0,
        1e9 + 2,
    )
    assert job.ranks[6].records["number"].tolist() == [1]
    assert job.ranks[4].node != job.ranks[6].node


def test_entries_are_sorted_by_the_order_of_the_calls(tmp_path: Path) -> None:
    as_json(
        tmp_path / "rank4.json",
        dump(entry(3, "barrier"), entry(1, "broadcast"), entry(2, "all_reduce_barrier")),
    )
    records = read_dumps([tmp_path / "rank4.json"]).ranks[4].records
    assert records["code"].tolist() == [Operation.BROADCAST, Operation.BARRIER, Operation.BARRIER]
    assert records["nbytes"].tolist() == [24, 0, 0]


def test_sends_and_receives_have_a_global_peer_and_are_numbered_by_pair(tmp_path: Path) -> None:
    names = ["send 0->1", "recv 0<-1", "send 0->1"]
    as_json(
        tmp_path / "r4", dump(*(entry(i, name, is_p2p=True) for i, name in enumerate(names, 1)))
    )
    records = read_dumps([tmp_path / "r4"]).ranks[4].records
    assert records[["code", "peer", "number"]].tolist() == [
        (Operation.SEND, 6, 1), (Operation.RECEIVE, 6, 1), (Operation.SEND, 6, 2),
    ]  # fmt: skip


def test_end_that_is_not_recorded_is_flagged_as_unobserved(tmp_path: Path) -> None:
    retired = entry(
        1, "x", state="scheduled", time_discovered_started_ns=0, time_discovered_completed_ns=0
    )
    as_json(tmp_path / "r4", dump(retired))
    (record,) = read_dumps([tmp_path / "r4"]).ranks[4].records
    assert record["code"] == Operation.OTHER
    assert record["ended_s"] == record["enqueued_s"]
    assert record["flags"] == Flag.UNOBSERVED


def test_group_that_no_dump_describes_consists_of_the_ranks_that_use_it(tmp_path: Path) -> None:
    for rank in (2, 5):
        as_json(tmp_path / f"r{rank}", dump(entry(1, "barrier", process_group=["9", "extra"])))
    (group,) = read_dumps([tmp_path]).communicators.values()
    assert (group.name, group.ranks) == ("9 (extra)", (2, 5))


class Trap:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.mkdir, ("trapped",)  # type: ignore[return-value]


def test_pickle_that_would_run_code_is_refused_and_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    as_pickle(tmp_path / "r4", {**dump(), "extra": Trap()})
    with pytest.raises(DumpUnreadable, match="mkdir: do not trust it"):
        read_dumps([tmp_path / "r4"])
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "damaged"),
        (b"{", "damaged"),
        (b"not a dump at all", "damaged"),
        (b"{}", "damaged"),
        (json.dumps(dump(version="3.0")).encode(), "3.0"),
        (json.dumps(dump(entry(-1, "all_reduce"))).encode(), "cannot be read"),
        (json.dumps(dump({"nothing": 1})).encode(), "damaged"),
        (pickle.dumps(dump(entry(1, "all_reduce")))[:200], "damaged"),
        (pickle.dumps([1, 2]), "damaged"),
    ],
)
def test_damaged_dump_is_refused(tmp_path: Path, data: bytes, complaint: str) -> None:
    (tmp_path / "r4").write_bytes(data)
    with pytest.raises(DumpUnreadable, match=complaint):
        read_dumps([tmp_path / "r4"])


def test_file_without_a_rank_and_two_of_one_rank_are_refused(tmp_path: Path) -> None:
    as_json(tmp_path / "trace", dump())
    with pytest.raises(DumpUnreadable, match="rank's number"):
        read_dumps([tmp_path / "trace"])
    for name in ("a4", "b4"):
        as_json(tmp_path / name, dump())
    with pytest.raises(DumpUnreadable, match="one set"):
        read_dumps([tmp_path / "a4", tmp_path / "b4"])


def test_groups_without_a_common_rank_may_have_one_name(tmp_path: Path) -> None:
    """The groups of a device mesh, which `split_group` creates, have one name."""
    for rank, ranks in ((0, "[0, 1]"), (1, "[0, 1]"), (2, "[2, 3]"), (3, "[2, 3]")):
        as_pickle(
            tmp_path / f"r{rank}",
            {**dump(entry(1, "all_reduce")), "pg_config": {"7": {"ranks": ranks}}},
        )
    job = read_dumps([tmp_path])
    assert sorted(group.ranks for group in job.communicators.values()) == [(0, 1), (2, 3)]
    assert job.ranks[0].records["communicator"] != job.ranks[2].records["communicator"]


def test_parts_of_a_coalesced_operation_have_its_progress(tmp_path: Path) -> None:
    names = ["send 0->1", "recv 0<-1"]
    parts = [
        hung(i, name, is_p2p=True, p2p_seq_id=1, collective_seq_id=0)
        for i, name in enumerate(names, 1)
    ]
    coalesced = entry(3, "coalesced", is_p2p=True, p2p_seq_id=1, collective_seq_id=0)
    collectives = [hung(i, "_all_gather_base", collective_seq_id=1) for i in (4, 5)]
    end = entry(6, "coalesced", collective_seq_id=1)
    as_pickle(
        tmp_path / "r4",
        dump(*parts, coalesced, *collectives, end, hung(7, "all_reduce", collective_seq_id=2)),
    )
    records = read_dumps([tmp_path / "r4"]).ranks[4].records
    assert records[["code", "number", "ended_s"]].tolist() == [
        (Operation.SEND, 1, 1e9 + 3.25),
        (Operation.RECEIVE, 1, 1e9 + 3.25),
        (Operation.ALL_GATHER, 1, 1e9 + 6.25),
        (Operation.ALL_REDUCE, 2, 0.0),
    ]


def test_messages_are_matched_though_buffers_wrapped_around(tmp_path: Path) -> None:
    sends = [entry(number, "send 0->1", is_p2p=True) for number in range(90, 94)]
    receives = [entry(number, "recv 1<-0", is_p2p=True) for number in range(1, 10)]
    as_pickle(tmp_path / "r4", dump(*sends, hung(94, "send 0->1", is_p2p=True)))
    as_pickle(tmp_path / "r6", dump(*receives, hung(10, "recv 1<-0", is_p2p=True)))
    job = read_dumps([tmp_path])
    assert job.ranks[4].records["number"].tolist() == [6, 7, 8, 9, 10]
    assert job.ranks[6].records["number"].tolist() == list(range(1, 11))


def test_error_names_the_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DumpUnreadable, match="r7 cannot be read: No such file"):
        read_dumps([tmp_path / "r7"])
    with pytest.raises(DumpUnreadable, match="no dump"):
        read_dumps([tmp_path])
