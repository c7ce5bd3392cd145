"""Claims about the import of Flight Recorder dumps."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monitor.errors import DumpUnreadable
from monitor.records import DTYPES, Communicator, Flag, Operation
from monitor.telemetry.flight_recorder import read_dumps

Write = Callable[[Path, Any], None]


def as_json(path: Path, told: Any) -> None:
    path.write_text(json.dumps(told))


def as_pickle(path: Path, told: Any) -> None:
    path.write_bytes(pickle.dumps(told, protocol=2))


def entry(number: int, name: str, **changes: Any) -> dict[str, Any]:
    """Return an entry as NCCL's process group writes them."""
    return {
        "record_id": number, "pg_id": 1, "process_group": ("7", "mesh_pp"), "collective_seq_id": number, "p2p_seq_id": 0,
        "op_id": number, "profiling_name": f"nccl:{name}", "time_created_ns": 10**18 + number * 10**9,
        "input_sizes": [[3, 4]], "input_dtypes": ["BFloat16"], "output_sizes": [[6, 4]], "output_dtypes": ["BFloat16"],
        "state": "completed", "time_discovered_started_ns": 10**18 + number * 10**9 + 125 * 10**6,
        "time_discovered_completed_ns": 10**18 + number * 10**9 + 250 * 10**6,
        "retired": True, "timeout_ms": 600000, "is_p2p": False, **changes,
    }  # fmt: skip


def dump(*entries: dict[str, Any], version: str = "2.10") -> dict[str, Any]:
    return {
        "version": version,
        "pg_config": {"7": {"name": "7", "desc": "mesh_pp", "ranks": "[4, 6]"}},
        "pg_status": {},
        "entries": list(entries),
    }


def hung(number: int, name: str, **changes: Any) -> dict[str, Any]:
    times = {"time_discovered_started_ns": None, "time_discovered_completed_ns": None}
    return entry(number, name, state="scheduled", retired=False, **times, **changes)


@pytest.mark.parametrize("write", [as_json, as_pickle])
def test_hang_is_found_in_dumps_of_either_form(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "nccl_trace_rank_4", dump(entry(1, "_all_gather_base"), hung(2, "all_reduce")))
    write(tmp_path / "nccl_trace_rank_6", dump(entry(1, "_all_gather_base")))
    job = read_dumps([tmp_path])
    group = Communicator.of("7", (4, 6))
    assert job.communicators == {group.identity: group}
    first, second = job.ranks[4].records
    assert first.tolist()[1:] == (
        1, Operation.ALL_GATHER, DTYPES.index("bfloat16"), 0, group.identity, 1, 24, -1, 0, 1e9 + 1, 1e9 + 1.125, 1e9 + 1.25,
    )  # fmt: skip
    assert (second["code"], second["ended_s"], second["started_s"]) == (Operation.ALL_REDUCE, 0.0, 1e9 + 2)
    assert job.ranks[6].records["number"].tolist() == [1]
    assert job.ranks[4].node != job.ranks[6].node


def test_entries_are_put_in_the_order_of_the_calls(tmp_path: Path) -> None:
    as_json(tmp_path / "rank4.json", dump(entry(3, "barrier"), entry(1, "broadcast"), entry(2, "all_reduce_barrier")))
    records = read_dumps([tmp_path / "rank4.json"]).ranks[4].records
    assert records["code"].tolist() == [Operation.BROADCAST, Operation.BARRIER, Operation.BARRIER]
    assert records["nbytes"].tolist() == [24, 0, 0]


def test_sends_and_receives_name_the_global_rank_and_count_by_pair(tmp_path: Path) -> None:
    names = ["send 0->1", "recv 0<-1", "send 0->1"]
    as_json(tmp_path / "r4", dump(*(entry(i, name, is_p2p=True) for i, name in enumerate(names, 1))))
    records = read_dumps([tmp_path / "r4"]).ranks[4].records
    assert records[["code", "peer", "number"]].tolist() == [
        (Operation.SEND, 6, 1), (Operation.RECEIVE, 6, 1), (Operation.SEND, 6, 2),
    ]  # fmt: skip


def test_end_that_is_not_told_is_marked(tmp_path: Path) -> None:
    retired = entry(1, "x", state="scheduled", time_discovered_started_ns=0, time_discovered_completed_ns=0)
    as_json(tmp_path / "r4", dump(retired))
    (record,) = read_dumps([tmp_path / "r4"]).ranks[4].records
    assert record["code"] == Operation.OTHER
    assert record["ended_s"] == record["enqueued_s"]
    assert record["flags"] == Flag.UNOBSERVED


def test_group_that_no_dump_describes_is_who_uses_it(tmp_path: Path) -> None:
    for rank in (2, 5):
        as_json(tmp_path / f"r{rank}", dump(entry(1, "barrier", process_group=["9", "mine"])))
    (group,) = read_dumps([tmp_path]).communicators.values()
    assert (group.name, group.ranks) == ("9", (2, 5))


class Trap:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.mkdir, ("trapped",)  # type: ignore[return-value]


def test_pickle_that_asks_to_run_something_is_refused_and_does_not_run(
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
        (json.dumps(dump({"record_id": 1, "process_group": ["7", ""]})).encode(), "cannot be read"),
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
