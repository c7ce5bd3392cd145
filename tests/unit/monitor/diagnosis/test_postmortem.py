"""Tests root causes found after the fact, from dumps as NCCL writes them."""

from pathlib import Path
from typing import Any

from keepstep.monitor.diagnosis.postmortem import Postmortem, examine
from keepstep.monitor.telemetry.clocks import align
from keepstep.monitor.telemetry.flight_recorder import read_dumps
from keepstep.monitor.verdicts import Syndrome, Verdict
from tests.unit.monitor.telemetry.dumps import as_pickle, entry, hung

GROUPS = {
    "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
    "1": {"name": "1", "desc": "mesh_tp", "ranks": "[2, 3]"},
}
TENSOR_PARALLEL = {"process_group": ("1", "mesh_tp")}


def all_reduce(number: int, nbytes: int = 24, **changes: Any) -> dict[str, Any]:
    default = {"process_group": ("0", "default_pg"), "input_sizes": [[nbytes // 2]]}
    return entry(number, "all_reduce", **{**default, **changes})


def open_all_reduce(number: int, *, has_begun: bool = False, **changes: Any) -> dict[str, Any]:
    record = hung(number, "all_reduce", **{"process_group": ("0", "default_pg"), **changes})
    return (
        {**record, "time_discovered_started_ns": record["time_created_ns"] + 10**8}
        if has_begun
        else record
    )


def look(directory: Path, *dumps: list[dict[str, Any]] | None) -> Postmortem:
    for rank, entries in enumerate(dumps):
        if entries is not None:
            as_pickle(
                directory / f"nccl_trace_rank_{rank}",
                {"version": "2.4", "pg_config": GROUPS, "entries": entries},
            )
    return examine(align(read_dumps([directory])))


def only(postmortem: Postmortem) -> Verdict:
    (verdict,) = postmortem.verdicts
    return verdict


def test_rank_that_never_arrived_is_named_with_its_last_call(tmp_path: Path) -> None:
    waiting = [all_reduce(1), open_all_reduce(2)]
    postmortem = look(tmp_path, waiting, waiting, [all_reduce(1)], waiting)
    verdict = only(postmortem)
    assert (verdict.syndrome, verdict.subject.ranks) == (Syndrome.NON_COMMUNICATION_HANG, (2,))
    assert verdict.since_s == 1e9 + 2
    assert verdict.evidence == (
        "rank 2 never came to operation 2 of group 0 (default_pg), "
        "all_reduce of 24 bytes of bfloat16",
        "ranks 0, 1, 3 waited in it, the first since 2001-09-09 01:46:42.000 UTC",
        "the last call of rank 2, at 2001-09-09 01:46:41.000 UTC, is operation 1 of group 0 "
        "(default_pg), all_reduce of 24 bytes of bfloat16",
    )
    (wait,) = postmortem.waits
    assert (wait.waiting, wait.missing) == ((0, 1, 3), (2,))


def test_rank_that_waits_for_another_waiting_rank_is_not_named(tmp_path: Path) -> None:
    """Rank 3 is missing in the world because it waits for rank 2 in their own group."""
    held = [all_reduce(1), open_all_reduce(1, **TENSOR_PARALLEL)]
    waiting = [all_reduce(1), open_all_reduce(2)]
    assert only(look(tmp_path, waiting, waiting, [all_reduce(1)], held)).subject.ranks == (2,)


def test_rank_without_a_dump_is_named_if_others_wait_for_it(tmp_path: Path) -> None:
    waiting = [all_reduce(1), open_all_reduce(2)]
    postmortem = look(tmp_path, waiting, None, waiting, waiting)
    assert postmortem.missing == (1,)
    assert (only(postmortem).syndrome, only(postmortem).subject.ranks) == (
        Syndrome.DEAD_PROCESS,
        (1,),
    )


def test_rank_without_a_dump_is_listed_as_missing_if_none_waits_for_it(tmp_path: Path) -> None:
    postmortem = look(tmp_path, [all_reduce(1)], [all_reduce(1)], None, None)
    assert (postmortem.missing, postmortem.verdicts) == ((2, 3), ())


def test_first_mismatch_is_named_whatever_follows(tmp_path: Path) -> None:
    """The device of the mismatching rank is many calls behind its program."""
    matching = [all_reduce(number) for number in range(1, 4)] + [
        open_all_reduce(number) for number in range(4, 60)
    ]
    differing = [*matching[:3], open_all_reduce(4, input_sizes=[[5, 5]]), *matching[4:]]
    verdict = only(look(tmp_path, matching, differing, matching, matching))
    assert (verdict.syndrome, verdict.subject.ranks) == (Syndrome.MISMATCH, (1,))
    assert verdict.evidence[1:] == (
        "operation 4: all_reduce of 24 bytes of bfloat16 at rank 0, 2, 3",
        "operation 4: all_reduce of 50 bytes of bfloat16 at rank 1",
    )


def test_unknown_root_is_left_out_of_the_evidence(tmp_path: Path) -> None:
    differing = [entry(1, "broadcast", process_group=("0", "default_pg"))]
    verdict = only(look(tmp_path, [all_reduce(1)], [all_reduce(1)], differing, [all_reduce(1)]))
    assert verdict.evidence[2:] == (
        "operation 1: broadcast of 24 bytes of bfloat16 at rank 2",
        "it completed: its result is wrong, or it caused what happened later",
    )


def test_operation_that_all_ranks_have_begun_is_a_communication_hang(tmp_path: Path) -> None:
    stuck = [all_reduce(1), open_all_reduce(2, has_begun=True)]
    verdict = only(look(tmp_path, stuck, stuck, stuck, stuck))
    assert (verdict.syndrome, verdict.subject.ranks) == (Syndrome.COMMUNICATION_HANG, (0, 1, 2, 3))


def test_rank_whose_device_never_began_the_operation_is_named(tmp_path: Path) -> None:
    begun, queued = [open_all_reduce(1, has_begun=True)], [open_all_reduce(1)]
    verdict = only(look(tmp_path, begun, queued, begun, begun))
    assert (verdict.syndrome, verdict.subject.ranks) == (Syndrome.NON_COMMUNICATION_HANG, (1,))


def test_operation_queued_behind_a_stuck_one_is_not_the_root_cause(tmp_path: Path) -> None:
    begun = [open_all_reduce(1, has_begun=True)]
    behind = [open_all_reduce(1, has_begun=True, **TENSOR_PARALLEL), open_all_reduce(1)]
    verdict = only(look(tmp_path, begun, begun, behind, behind))
    assert (verdict.syndrome, verdict.subject.ranks) == (Syndrome.COMMUNICATION_HANG, (2, 3))


def test_rank_whose_dump_is_of_an_earlier_moment_is_not_blamed(tmp_path: Path) -> None:
    """The job moves on while ranks write their dumps one after another."""
    later = [all_reduce(number) for number in range(1, 9)] + [open_all_reduce(9)]
    postmortem = look(tmp_path, later, [all_reduce(1), open_all_reduce(2)], later, later)
    assert postmortem.verdicts == ()
    assert "rank 1 is not judged: its dump ends at operation 2" in postmortem.remarks[0]


def test_rank_whose_buffer_wrapped_is_blamed_for_a_call_missing_since(
    tmp_path: Path,
) -> None:
    waiting = [all_reduce(1), open_all_reduce(2)]
    alone = [all_reduce(number, **TENSOR_PARALLEL) for number in range(500, 520)]
    verdict = only(look(tmp_path, waiting, waiting, alone, [*alone, open_all_reduce(2)]))
    assert (verdict.syndrome, verdict.subject.ranks) == (Syndrome.NON_COMMUNICATION_HANG, (2,))


def test_late_rank_is_named_if_nothing_hangs(tmp_path: Path) -> None:
    def steps(late_s: float, clock_s: float) -> list[dict[str, Any]]:
        records = []
        for number in range(1, 41):
            begin_s, end_s = number + late_s + clock_s, number + 0.35 + clock_s
            records.append(
                all_reduce(number)
                | {
                    f"time_{event}_ns": int((10**9 + at_s) * 1e9)
                    for event, at_s in (
                        ("created", begin_s),
                        ("discovered_started", begin_s),
                        ("discovered_completed", end_s),
                    )
                }
            )
        return records

    verdict = only(
        look(tmp_path, steps(0.0, 0.0), steps(0.001, 7.0), steps(0.3, -5.0), steps(0.002, 0.0))
    )
    assert (verdict.syndrome, verdict.subject.ranks) == (Syndrome.NON_COMMUNICATION_SLOW, (2,))
    assert "arrived last at 40 of 40 collectives" in verdict.evidence[0]
