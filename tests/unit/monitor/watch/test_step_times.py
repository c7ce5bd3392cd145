"""Claims about durations of steps, the timeline of one step, and delays between ranks."""

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keepstep.monitor.records import (
    RECORD,
    Communicator,
    Ending,
    Flag,
    Kind,
    Operation,
    Phase,
    RankRecords,
)
from keepstep.monitor.telemetry.record_history import ChangedRecords
from keepstep.monitor.watch.matrices import delays, present_waits
from keepstep.monitor.watch.step_times import (
    RankProgress,
    StepTable,
    heat_map,
    newest_step,
    stand_still_in,
    timeline,
    typical_step_s,
)


def phase(code: Phase, step: int, began_s: float, ended_s: float) -> np.ndarray:
    record = np.zeros(1, RECORD)
    record["kind"], record["code"], record["step"], record["number"] = Kind.PHASE, code, step, step
    record["enqueued_s"], record["ended_s"] = began_s, ended_s
    return record


def operation(
    number: int,
    began_s: float,
    ended_s: float,
    code: Operation = Operation.ALL_REDUCE,
    peer: int = -1,
) -> np.ndarray:
    record = np.zeros(1, RECORD)
    record["kind"], record["code"], record["number"], record["peer"] = (
        Kind.OPERATION,
        code,
        number,
        peer,
    )
    record["step"], record["communicator"] = 1, 7
    record["enqueued_s"], record["ended_s"] = began_s, ended_s
    return record


def feed(table: StepTable, record: np.ndarray, ended_before_s: float = 0.0) -> None:
    table.feed(ChangedRecords(record, np.array([ended_before_s])))


def test_step_that_is_done_again_has_the_duration_of_its_last_attempt() -> None:
    table = StepTable(8)
    feed(table, phase(Phase.STEP, 3, 10.0, 12.0))
    feed(table, phase(Phase.STEP, 3, 20.0, 20.5))
    assert table.seconds([3], Phase.STEP)[0] == 0.5


def test_phase_that_is_prolonged_is_not_counted_twice() -> None:
    table = StepTable(8)
    feed(table, phase(Phase.STEP, 1, 10.0, 11.0))
    feed(table, phase(Phase.STEP, 1, 10.0, 11.5), ended_before_s=11.0)
    assert table.seconds([1], Phase.STEP)[0] == 1.5


def test_table_keeps_the_newest_steps_and_has_no_values_of_others() -> None:
    table = StepTable(4)
    for step in range(1, 8):
        feed(table, phase(Phase.STEP, step, step, step + 0.25))
    feed(table, phase(Phase.FORWARD, 2, 2.0, 2.1))  # Too late: its slot was reused.
    seconds = table.seconds([2, 4, 7, 9], Phase.STEP)
    assert [math.isnan(value) for value in seconds] == [True, False, False, True]


def test_heat_map_groups_neighbours_in_rows_and_shows_the_slowest() -> None:
    tables = {rank: StepTable(16) for rank in range(5)}
    for rank, table in tables.items():
        for step in range(1, 4):
            feed(table, phase(Phase.STEP, step, step, step + (2.0 if rank == 3 else 1.0)))
    shown = heat_map(tables, columns=2, rows=3)
    assert shown.steps == (2, 3)
    assert shown.rows == ((0, 1), (2, 3), (4,))
    assert shown.seconds.tolist() == [[1, 1], [2, 2], [1, 1]]
    assert np.isnan(heat_map(tables, 2, 3, Phase.CHECKPOINT).seconds).all()
    assert typical_step_s(tables) == 2.0
    assert typical_step_s({}) is None


def rank_records(
    rank: int, *records: np.ndarray, read_at_s: float = 100.0, offset_s: float = 0.0
) -> RankRecords:
    return RankRecords(rank, "node-a", np.concatenate(records), read_at_s, offset_s=offset_s)


def progress(rank_records: RankRecords) -> RankProgress:
    """Return how far a rank is, as its step table says."""
    table = StepTable(64)
    table.feed(ChangedRecords(rank_records.records, np.zeros(len(rank_records.records))))
    return RankProgress(
        step=int(rank_records.records["step"].max()),
        last_step=table.last_step,
        last_step_s=table.last_step_s,
        last_ended_s=table.last_ended_s,
        read_at_s=rank_records.read_at_s,
    )


def test_step_to_show_has_ended_unless_the_next_is_stuck() -> None:
    steps = [phase(Phase.STEP, 4, 9.0, 10.0), phase(Phase.STEP, 5, 10.0, 0.0)]
    ranks = [progress(rank_records(rank, *steps, read_at_s=11.0)) for rank in range(2)]
    assert newest_step(ranks) == 4
    stuck = [progress(rank_records(rank, *steps, read_at_s=30.0)) for rank in range(2)]
    assert newest_step(stuck) == 5
    assert newest_step([]) is None


def test_step_of_a_stopped_rank_is_shown_with_the_open_operations_of_others() -> None:
    culprit = rank_records(
        1, phase(Phase.STEP, 42, 9.0, 10.0), phase(Phase.STEP, 43, 10.0, 0.0), read_at_s=30.0
    )
    done = [
        phase(Phase.STEP, 42, 9.0, 10.0),
        phase(Phase.STEP, 43, 10.0, 11.0),
        phase(Phase.STEP, 44, 11.0, 0.0),
    ]
    waiting = operation(7, 11.5, 0.0)
    waiting["step"] = 44
    ranks = {
        0: rank_records(0, *done, waiting, read_at_s=30.0),
        1: culprit,
        2: rank_records(2, *done, waiting, read_at_s=30.0),
    }
    living = [progress(ranks[0]), progress(ranks[2])]
    assert newest_step([*living, progress(culprit)]) == 43
    assert stand_still_in([*living, progress(culprit)], 43)
    spans = timeline(ranks, {}, 43, limit=9, include_later_open=True)
    assert [(span.name, span.end_s) for span in spans[0]] == [
        ("step", 11.0),
        ("step", None),
        ("all reduce", None),
    ]
    assert [(span.name, span.end_s) for span in spans[1]] == [("step", None)]
    # A rank that ended normally, or died long ago, is not the cause; one that just died may be.
    ended = progress(rank_records(3, phase(Phase.STEP, 7, 1.0, 2.0)))
    for last in (
        replace(ended, ending=Ending.FINISHED, is_alive=False),
        replace(ended, is_alive=False),
    ):
        assert newest_step([*living, progress(culprit), last]) == 43
    assert newest_step([*living, replace(progress(culprit), is_alive=False)]) == 43


def test_timeline_keeps_the_longest_operations_and_shifts_clocks() -> None:
    ended = [operation(n, 1.0 + n, 1.0 + n + 0.001 * n) for n in range(1, 30)]
    still_open = operation(30, 50.0, 0.0)
    spans = timeline(
        {0: rank_records(0, *ended, still_open, phase(Phase.STEP, 1, 1.0, 0.0), offset_s=5.0)},
        {},
        1,
        limit=3,
    )[0]
    assert [span.facts["number"] for span in spans if span.kind == "operation"] == [28, 29, 30]
    assert spans[-1].end_s is None
    assert spans[-1].begin_s == 55.0
    assert spans[0].name == "step"


def test_timeline_shows_no_open_operation_where_the_end_cannot_be_seen() -> None:
    unseen, waiting = operation(1, 1.0, 0.0), operation(2, 2.0, 0.0)
    unseen["flags"] = Flag.UNOBSERVED
    spans = timeline({0: rank_records(0, unseen, waiting)}, {}, 1, limit=9)[0]
    assert [span.end_s for span in spans] == [1.0, None]
    assert [span.facts.get("end") for span in spans] == ["not observed", None]


def on_device(record: np.ndarray, started_s: float) -> np.ndarray:
    record["flags"], record["started_s"] = Flag.DEVICE_TIMES | Flag.LAUNCHED, started_s
    return record


def test_operation_of_a_device_is_shown_from_when_it_begins_there() -> None:
    records = [on_device(operation(1, 1.0, 3.0), 2.5), on_device(operation(2, 1.1, 0.0), 0.0)]
    spans = timeline({0: rank_records(0, *records)}, {}, 1, limit=9)[0]
    assert [(span.begin_s, span.end_s) for span in spans] == [(1.1, None), (2.5, 3.0)]
    assert spans[1].facts["queued_us"] == 1_500_000


def test_rank_whose_device_is_late_is_waited_for_though_its_host_called_first() -> None:
    ranks = {
        0: rank_records(0, on_device(operation(1, 1.0, 3.0), 2.0)),
        1: rank_records(1, on_device(operation(1, 0.5, 3.0), 2.75)),
    }
    assert delays(ranks, 2).waiting[0, 1] == 0.75


def test_late_rank_is_a_column_of_waiting_times_and_a_slow_message_is_a_cell() -> None:
    late = {
        0: rank_records(0, operation(1, 1.0, 2.1), operation(5, 3.0, 3.4, Operation.SEND, 1)),
        1: rank_records(1, operation(1, 1.5, 2.1), operation(5, 3.1, 3.4, Operation.RECEIVE, 0)),
        2: rank_records(2, operation(1, 2.0, 2.1)),
    }
    matrices = delays(late, rows=8)
    assert np.allclose(matrices.waiting[:, 2], [1.0, 0.5, np.nan], equal_nan=True)
    assert matrices.waiting[0, 1] == 0.0
    assert math.isclose(matrices.transfer[0, 1], 0.3)
    assert np.isnan(matrices.transfer).sum() == 8
    assert delays({}, 8).waiting.shape == (0, 0)


def test_present_waits_are_for_those_that_have_not_come_however_late_others_were_before() -> None:
    earlier = [operation(1, 1.0 + 0.5 * rank, 3.0) for rank in range(3)]
    ranks = {
        0: rank_records(0, earlier[0], operation(2, 4.0, 0.0)),
        # Rank 1 was never late before, and has not come now.
        1: rank_records(1, earlier[1]),
        2: rank_records(2, earlier[2], operation(2, 6.0, 0.0)),
    }
    read_at_s = ranks[0].read_at_s
    world = {7: Communicator(7, "world", (0, 1, 2))}
    waits = present_waits(ranks, world, ((0,), (1,), (2,)))
    expected = np.full((3, 3), np.nan)
    expected[0, 1], expected[2, 1] = read_at_s - 4.0, read_at_s - 6.0
    assert np.allclose(waits, expected, equal_nan=True)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(0, 2), st.integers(1, 4), st.booleans(),
            st.floats(1.0, 9.0),
        ),
        max_size=40,
        unique_by=lambda message: message[:4],
    )
)  # fmt: skip
def test_messages_are_paired_by_their_number(
    messages: list[tuple[int, int, int, bool, float]],
) -> None:
    records: dict[int, list[np.ndarray]] = {rank: [] for rank in range(3)}
    began_s: dict[tuple[int, int, int], dict[bool, float]] = {}
    for source, target, number, is_receive, at_s in messages:
        code = Operation.RECEIVE if is_receive else Operation.SEND
        rank, peer = (target, source) if is_receive else (source, target)
        records[rank].append(operation(number, at_s, 10.0, code, peer))
        began_s.setdefault((source, target, number), {})[is_receive] = at_s
    took_s: dict[tuple[int, int], list[float]] = {}
    for (source, target, _), sides in began_s.items():
        if len(sides) == 2:
            took_s.setdefault((source, target), []).append(10.0 - max(sides.values()))
    ranks = {
        rank: rank_records(rank, *rows) if rows else RankRecords(rank, "a", np.zeros(0, RECORD), 1)
        for rank, rows in records.items()
    }
    transfer = delays(ranks, rows=8).transfer
    for source in range(3):
        for target in range(3):
            expected = took_s.get((source, target))
            assert np.isclose(
                transfer[source, target], np.mean(expected) if expected else np.nan, equal_nan=True
            )
