"""Claims about what is collected of steps over several answers, and about clocks."""

import math
from dataclasses import replace

import pytest

from keepstep.monitor.cli.options import StepRange
from keepstep.monitor.cli.step_recording import StepRecording, lost_text, unix_offsets
from keepstep.monitor.records import Ending
from keepstep.monitor.telemetry.clocks import ClockOffset
from keepstep.monitor.tree.step_records import NO_RECORDS, select_steps
from keepstep.monitor.tree.summary import NodeFacts, Summary
from tests.unit.monitor.tree.test_step_records import STATE, ring


def answer(recording: StepRecording, *newest: int, first: int = 1, ended: bool = False) -> Summary:
    """Return an answer of ranks that are in these steps."""
    ranks = tuple(
        (
            replace(STATE, rank=rank, ending=Ending.FINISHED if ended else Ending.NONE),
            select_steps(
                ring(list(range(first, step + 1)), [], first - 1),
                max(recording.steps.first, recording.complete),
                recording.steps.last,
            ),
        )
        for rank, step in enumerate(newest)
    )
    return replace(NO_RECORDS, ranks=ranks)


def test_step_is_complete_once_every_living_rank_is_in_a_later_one() -> None:
    recording = StepRecording(StepRange(3, 5))
    for newest, complete in (((2, 2), 2), ((4, 5), 3), ((6, 5), 4), ((9, 7), 5)):
        recording.add(answer(recording, *newest))
        assert recording.complete == complete
    assert recording.lost == {}
    (one, other) = recording.traced({"node-a": 2.0})
    assert one.records["step"].tolist() == other.records["step"].tolist() == [3, 4, 5]
    assert one.to_unix_s == 2.0


def test_job_that_has_ended_is_over_and_its_last_step_complete() -> None:
    recording = StepRecording(StepRange(3, 9))
    recording.add(answer(recording, 5, 5, ended=True))
    assert (recording.is_over, recording.complete, recording.newest) == (True, 5, 5)


def test_steps_that_were_overwritten_before_they_were_asked_for_are_named() -> None:
    recording = StepRecording(StepRange(3, 8))
    recording.add(answer(recording, 9, 9, first=5))
    assert recording.lost == {0: StepRange(3, 5), 1: StepRange(3, 5)}
    assert recording.held_from == 6
    assert lost_text(recording.lost) == ["steps 3 to 5 of ranks 0, 1"]


def test_steps_that_were_collected_may_be_overwritten_later() -> None:
    recording = StepRecording(StepRange(1, 8))
    recording.add(answer(recording, 5))
    recording.add(answer(recording, 9, first=4))
    assert recording.lost == {}
    assert recording.traced({})[0].records["step"].tolist() == list(range(1, 9))


def facts(node: str, wall_s: float, monotonic_s: float) -> NodeFacts:
    return NodeFacts(node, {}, wall_s, monotonic_s, 0.0)


def test_aligned_nodes_share_the_wall_clock_of_the_one_known_best() -> None:
    nodes = {
        "a": facts("a", 1000.0, 10.0),
        "b": facts("b", 1007.0, 110.0),  # Its wall clock is 7 s fast.
        "c": facts("c", 1000.5, 0.5),
    }
    clocks = {"a": ClockOffset(0.0, 0.0), "b": ClockOffset(-100.0, 1e-4)}
    offsets, unaligned = unix_offsets(nodes, clocks | {"c": ClockOffset(0.0, math.inf)})
    assert offsets == pytest.approx({"a": 990.0, "b": 890.0, "c": 1000.0})
    assert unaligned == {"c"}
