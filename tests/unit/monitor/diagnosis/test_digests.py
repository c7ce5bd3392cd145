"""Tests digests of overlapping readings, lost records and partial steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.monitor.diagnosis.digest import (
    EMPTY_DIGEST_STATE,
    RecordBatch,
    _channel_keys,
    _unread,
    digest,
)
from keepstep.monitor.diagnosis.history import NOTHING, deviations
from keepstep.monitor.diagnosis.mismatches import first_mismatch
from keepstep.monitor.diagnosis.robust import median_by, spread
from keepstep.monitor.diagnosis.steps import Window, collect
from keepstep.monitor.diagnosis.tables import COLLECTIVE, fold_collectives, split_whole
from keepstep.monitor.diagnosis.thresholds import SlowThresholds
from keepstep.monitor.records import Flag, Operation, Phase
from tests.unit.monitor.diagnosis.trace_text import Trace, parse

TWO = """
node a: 0
node b: 1
communicator world: 0 1
steps {steps} every 1.0
data_wait            0.05-0.15  0.05-0.10
world all_reduce 4k  0.30-0.50  0.40-0.50
read 12.0
"""


def read(trace: Trace, at_s: float, since_s: float, memory=EMPTY_DIGEST_STATE):
    job = trace.job(at_s, since_s)
    return digest(job.ranks.values(), job.communicators, memory)


def test_own_time_runs_from_the_end_of_one_operation_to_the_call_of_the_next() -> None:
    _, result = read(parse(TWO.format(steps="1-6")), 12.0, -1.0)
    assert result.steps["step"].tolist() == [2, 2, 3, 3, 4, 4, 5, 5]
    np.testing.assert_allclose(result.steps["own_s"], [0.8, 0.9] * 4)
    np.testing.assert_allclose(result.steps["duration_s"], [1.0] * 8)
    np.testing.assert_allclose(result.steps["data_s"], [0.1, 0.05] * 4)


def test_overlapping_asynchronous_operations_are_counted_once() -> None:
    trace = Trace({0: "a"}, {}, {"world": (0,)})
    for step in range(1, 5):
        trace.operation(
            0, "world", Operation.ALL_REDUCE, step + 0.2, step + 0.6, step=step, asynchronous=True
        )
        trace.operation(
            0, "world", Operation.ALL_REDUCE, step + 0.3, step + 0.5, step=step, asynchronous=True
        )
        trace.operation(
            0, "world", Operation.ALL_REDUCE, step + 0.55, step + 0.7, step=step, asynchronous=True
        )
    _, result = read(trace, 9.0, -1.0)
    np.testing.assert_allclose(result.steps["own_s"], 0.5)


def test_transfer_time_is_the_duration_at_the_last_rank_to_arrive() -> None:
    _, result = read(parse(TWO.format(steps="1-6")), 12.0, -1.0)
    np.testing.assert_allclose(result.transfers["sum_s"], 0.1)
    assert set(result.last_arrivals["rank"].tolist()) == {1}


def test_steps_with_records_lost_unread_are_left_out() -> None:
    trace = parse(TWO.format(steps="1-12"))
    memory, first = read(trace, 4.0, -1.0)
    # The next reading finds only what ended after 8.2: stamps show that there was more.
    _, second = read(trace, 12.0, 8.2, memory)
    assert first.steps["step"].max() == 3
    assert second.steps["step"].min() == 10
    for result in (first, second):
        np.testing.assert_allclose(result.steps["duration_s"], 1.0)


def test_increments_are_reported_once() -> None:
    trace = parse(TWO.format(steps="1-6"))
    memory, _ = read(trace, 12.0, -1.0)
    _, again = read(trace, 12.0, -1.0, memory)
    for table in (
        again.steps,
        again.transfers,
        again.collectives,
        again.last_arrivals,
        again.measures,
    ):
        assert len(table) == 0
    assert again.frontiers["entered"].tolist() == [6, 6]


def test_frontier_tells_what_was_called_from_what_the_device_has_begun() -> None:
    trace = parse("""
node a: 0
communicator world: 0
steps 1-3 every 1.0
world all_reduce 4k  0.10+0.30-0.40
step 4 at 3.0
world all_reduce 4k  0.10+0.30-?
world all_reduce 4k  0.12+?-?
world all_reduce 4k  0.14+?-?
""")
    _, result = read(trace, 9.0, -1.0)
    (row,) = result.frontiers
    assert (row["entered"], row["began"], row["ended"]) == (6, 4, 3)
    assert (row["open"], row["open_s"]) == (4, 3.30)
    assert (row["queued"], row["queued_s"]) == (5, 3.12)
    # The last one was read before it was launched.
    trace.rows[0][5][1]["flags"] = Flag.DEVICE_TIMES
    (row,) = read(trace, 9.0, -1.0)[1].frontiers
    assert (row["entered"], row["began"], row["open"], row["queued"]) == (6, 4, 4, 5)
    trace.rows[0][5][1]["flags"] = Flag.DEVICE_TIMES | Flag.LAUNCHED
    # The open operation ends, and the next begins.
    trace.rows[0][3][1]["ended_s"] = trace.rows[0][4][1]["started_s"] = 9.5
    (row,) = read(trace, 10.0, -1.0)[1].frontiers
    assert (row["began"], row["ended"], row["open"], row["queued"]) == (5, 4, 5, 6)


def test_operations_whose_end_cannot_be_seen_are_read_once() -> None:
    trace = parse("""
node a: 0
communicator world: 0
steps 1-9 every 1.0
world all_reduce 4k  0.10-!
""")
    memory, first = read(trace, 9.0, -1.0)
    (row,) = first.frontiers
    assert (row["entered"], row["began"], row["ended"]) == (9, 9, 0)
    assert (row["open"], row["queued"]) == (0, 0)
    assert not len(first.collectives)
    unread = _unread(_batch(trace, 9.0), memory.cuts)
    assert len(unread.records) == 0
    (row,) = read(trace, 9.0, -1.0, memory)[1].frontiers
    assert (row["entered"], row["open"]) == (9, 0)


def _batch(trace: Trace, at_s: float) -> RecordBatch:
    (rank,) = trace.job(at_s).ranks.values()
    return RecordBatch((rank,), rank.records, np.zeros(len(rank.records), np.int64))


def test_device_that_begins_late_arrives_late_whenever_its_host_called() -> None:
    trace = parse("""
node a: 0
node b: 1
communicator world: 0 1
steps 1-6 every 1.0
world all_reduce 4k  0.20+0.30-0.60  0.10+0.50-0.60
read 12.0
""")
    _, result = read(trace, 12.0, -1.0)
    np.testing.assert_allclose(result.transfers["sum_s"], 0.1)
    assert set(result.last_arrivals["rank"].tolist()) == {1}


def test_reading_does_not_change_the_state_that_it_was_given() -> None:
    trace = parse(TWO.format(steps="1-6"))
    memory, _ = read(trace, 4.0, -1.0)
    before = [table.tobytes() for table in (memory.cuts, memory.frontiers, memory.steps)]
    read(trace, 12.0, -1.0, memory)
    assert [table.tobytes() for table in (memory.cuts, memory.frontiers, memory.steps)] == before


def test_calls_that_were_lost_unread_are_not_compared() -> None:
    trace = Trace({0: "a", 1: "a", 2: "b"}, {}, {"world": (0, 1, 2)})
    for number in range(1, 14):
        for rank in range(3):
            # Of every call the size is another.
            trace.operation(
                rank, "world", Operation.ALL_REDUCE, number + 0.1, number + 0.2, 1024 * number
            )
    memory, _ = read(trace, 10.5, -1.0)
    job = trace.job(13.5, 9.5)
    records = job.ranks[2].records
    lost = replace(job.ranks[2], records=records[records["number"] == 13])
    _, result = digest([job.ranks[0], job.ranks[1], lost], job.communicators, memory)
    assert result.frontiers["entered"].tolist() == [13, 13, 13]
    assert first_mismatch(result.frontiers) is None
    # What was read is still compared.
    lost.records["nbytes"] = 4096
    _, result = digest([job.ranks[0], job.ranks[1], lost], job.communicators, memory)
    mismatch = first_mismatch(result.frontiers)
    assert mismatch is not None
    assert (mismatch.number, mismatch.minority) == (13, (2,))


def test_phase_is_accounted_to_the_step_of_the_next_operation() -> None:
    trace = Trace({0: "a"}, {}, {"world": (0,)})
    for step in range(1, 6):
        trace.operation(0, "world", Operation.ALL_REDUCE, step + 0.5, step + 0.6, step=step)
        if step == 2:
            trace.phase(0, Phase.CHECKPOINT, step + 0.7, step + 0.9, step)
    _, result = read(trace, 9.0, -1.0)
    assert dict(
        zip(
            result.steps["step"].tolist(),
            result.steps["checkpoint_s"].round(3).tolist(),
            strict=True,
        )
    ) == {
        2: 0,
        3: 0.2,
        4: 0,
    }


def test_collective_of_an_unknown_communicator_stays_partial() -> None:
    rows = np.zeros(3, COLLECTIVE)
    rows["arrived"] = 1
    complete, partial = split_whole(fold_collectives(rows), {})
    assert len(complete) == 0
    assert partial["arrived"].tolist() == [3]


CHANNELS = st.tuples(
    st.sampled_from([0, 1, 2**20 - 1]),
    st.sampled_from([0, 7, 2**32 - 1]),
    st.sampled_from([Operation.BARRIER, Operation.SEND, Operation.RECEIVE]),
    st.sampled_from([-1, 0, 2**20 - 1, 2**24 - 2]),
)


def keys_of(channels: list[tuple[int, int, int, int]]) -> list[int]:
    rank, communicator, code, peer = (np.array(column) for column in zip(*channels, strict=True))
    return _channel_keys(rank, communicator.astype(np.uint32), code, peer.astype(np.int32)).tolist()


@given(channels=st.lists(CHANNELS, min_size=1, max_size=40))
def test_channel_keys_are_equal_for_equal_channels_only_and_sort_like_them(
    channels: list[tuple[int, int, int, int]],
) -> None:
    # A collective's peer is its root, which is no part of the channel; collectives sort first.
    channel_of = [
        (rank, communicator, 0, 0)
        if code == Operation.BARRIER
        else (rank, communicator, code, peer)
        for rank, communicator, code, peer in channels
    ]
    keys = keys_of(channels)
    assert all(key >= 0 for key in keys)
    assert len(set(keys)) == len(set(channel_of))
    assert [channel for _, channel in sorted(zip(keys, channel_of, strict=True))] == sorted(
        channel_of
    )


@pytest.mark.parametrize(
    "channel",
    [
        (2**20, 1, Operation.BARRIER, -1),
        (-1, 1, Operation.BARRIER, -1),
        (0, 1, Operation.SEND, 2**24 - 1),
        (0, 1, Operation.SEND, -2),
    ],
)
def test_channel_out_of_range_is_rejected(channel: tuple[int, int, int, int]) -> None:
    with pytest.raises(AssertionError, match="out of range"):
        keys_of([channel])


@given(values=st.lists(st.tuples(st.integers(0, 4), st.floats(-100, 100)), min_size=1, max_size=50))
def test_medians_by_group_equal_the_median_of_each_group(values: list[tuple[int, float]]) -> None:
    keys, numbers = np.array([key for key, _ in values]), np.array([number for _, number in values])
    grouped = median_by(keys, numbers)
    assert grouped.medians.tolist() == pytest.approx(
        [float(np.median(numbers[keys == key])) for key in grouped.keys]
    )
    assert grouped.counts.sum() == len(values)


def test_spread_estimates_sigma_and_ignores_a_minority_of_outliers() -> None:
    values = np.random.default_rng(1).normal(3, 2, 10_000)
    assert spread(values) == pytest.approx(2, rel=0.05)
    values[:3000] = 1e9
    assert spread(values) < 6


def test_series_keeps_a_window_and_does_not_learn_from_deviating_subjects() -> None:
    thresholds = SlowThresholds()
    history = NOTHING
    for step in range(40):
        seconds = np.array([1.0, 1.0, 1.0, 3.0 if step >= 20 else 1.0])
        history = history.push(step, np.arange(4), seconds, thresholds.window)
        deviation = deviations(history, np.array([0, 1, 2, 3]), 1.1, thresholds)
        history = history.learn(deviation.hot, thresholds)
    assert history.steps.tolist() == list(range(30, 40))
    # Alone in its group, a subject is judged by its past, which includes only the few steps before
    # the deviation was found.
    assert deviation.hot.tolist() == [False, False, False, True]
    assert np.exp(history.past[3]) < 1.6
    assert deviation.ratio[3] == pytest.approx(3.0 / np.exp(history.past[3]))


def test_subjects_without_values_in_the_window_are_dropped() -> None:
    history = NOTHING.push(0, np.array([1, 2]), np.array([1.0, 1.0]), 2)
    for step in (1, 2):
        history = history.push(step, np.array([2]), np.array([1.0]), 2)
    assert history.keys.tolist() == [2]


def test_digests_repeated_after_a_restart_are_not_counted_twice() -> None:
    text = "node a: 0 1\nnode b: 2 3\ncommunicator world: 0 1 2 3\nsteps 1-6 every 1.0\n"
    job = parse(
        text + "world all_reduce 4k  0.30-0.50  0.40-0.50  0.40-0.50  0.45-0.50\nread 12.0"
    ).job()
    _, near = digest([job.ranks[0], job.ranks[1]], job.communicators)
    window, waiting = Window(), np.arange(4)
    for _ in range(2):
        window, count = collect(window, near, waiting, job.communicators, {}, {}, SlowThresholds())
        assert count == 0
        assert set(window.pending.collectives["arrived"].tolist()) == {2}
        assert len(window.pending.steps) == len(near.steps)
    _, far = digest([job.ranks[2], job.ranks[3]], job.communicators)
    window, count = collect(window, far, waiting, job.communicators, {}, {}, SlowThresholds())
    assert window.newest == 5
    assert np.exp(window.transfers.values).tolist() == [[pytest.approx(0.05)]] * count
