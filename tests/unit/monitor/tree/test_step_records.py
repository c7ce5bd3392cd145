"""Claims about the records of some steps: which are sent, what they show, and how they merge."""

from dataclasses import replace

import numpy as np

from keepstep.monitor.records import RECORD, Ending, Kind, Phase
from keepstep.monitor.telemetry.record_history import RankState
from keepstep.monitor.tree.step_records import (
    NO_RECORDS,
    HeldSteps,
    held_steps,
    merge_steps,
    select_steps,
    with_missing,
)

STATE = RankState(
    rank=0,
    node="node-a",
    pid=11,
    incarnation="first",
    is_alive=True,
    ending=Ending.NONE,
    read_at_s=9.0,
    progress_at_s=9.0,
)


def lane(kind: Kind, steps: list[int], first_position: int = 0) -> np.ndarray:
    """Return records of these steps, from a position of the lane on."""
    records = np.zeros(len(steps), RECORD)
    records["kind"], records["code"], records["step"] = kind, Phase.FORWARD, steps
    records["stamp"] = 2 * (np.arange(len(steps)) + first_position) + 2
    return records


def ring(marks: list[int], operations: list[int], first: int = 0) -> np.ndarray:
    return np.concatenate([lane(Kind.PHASE, marks, first), lane(Kind.OPERATION, operations, first)])


def test_selection_has_the_steps_and_shows_how_far_the_rank_is() -> None:
    records = ring([0, *range(1, 30)], [0, *range(1, 30)])
    selected = select_steps(records, 10, 12)
    assert np.unique(selected["step"]).tolist() == [0, 1, 10, 11, 12, 29]
    assert held_steps(selected) == HeldSteps(1, 29)


def test_step_whose_first_records_were_overwritten_is_not_held() -> None:
    records = ring([7, 7, 8, 9], [7, 8, 9], first=100)
    assert held_steps(select_steps(records, 1, 2)) == HeldSteps(8, 9)


def test_lane_that_was_overwritten_further_decides() -> None:
    records = np.concatenate(
        [lane(Kind.PHASE, [2, 3, 4, 5]), lane(Kind.OPERATION, [4, 5], first_position=50)]
    )
    assert held_steps(select_steps(records, 3, 4)) == HeldSteps(5, 5)


def test_ring_of_a_worker_that_resumed_holds_nothing_before() -> None:
    assert held_steps(select_steps(ring([0, 95, 96], [0, 0, 96]), 90, 96)) == HeldSteps(95, 96)


def test_job_whose_first_collective_is_late_holds_its_first_steps() -> None:
    assert held_steps(select_steps(ring([1, 2, 3], [3]), 1, 3)) == HeldSteps(1, 3)


def test_ring_without_records_holds_nothing() -> None:
    assert held_steps(select_steps(np.empty(0, RECORD), 1, 2)) == HeldSteps(0, 0)


def test_of_a_rank_that_two_daemons_have_the_living_one_counts() -> None:
    dead = replace(STATE, is_alive=False, created_at_s=2.0)
    moved = replace(STATE, node="node-b", created_at_s=1.0)
    part = replace(NO_RECORDS, ranks=((dead, ring([1], [])),))
    other = replace(NO_RECORDS, ranks=((moved, ring([2], [])),), missing={"u": "why"})
    merged = merge_steps([part, other])
    assert [(state.node, records["step"].tolist()) for state, records in merged.ranks] == [
        ("node-b", [2])
    ]
    assert with_missing(merged, "http://rack") == {"http://rack, u": "why"}


def test_dead_ranks_of_an_earlier_launch_of_another_size_are_left_out() -> None:
    earlier = replace(STATE, rank=3, is_alive=False, world_size=4, created_at_s=1.0)
    current = replace(STATE, world_size=2, created_at_s=2.0)
    parts = [replace(NO_RECORDS, ranks=((state, ring([1], [])),)) for state in (earlier, current)]
    assert merge_steps(parts).present == (0,)
