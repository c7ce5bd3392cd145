"""Tests how much is kept of each rank."""

from dataclasses import replace

import numpy as np
import pytest

from keepstep.monitor.records import RECORD, Ending, Kind, Measure, Phase
from keepstep.monitor.telemetry.record_history import RankState
from keepstep.monitor.watch.rank_store import RankStore, WatchLimits

LOCAL = RankState(
    rank=0, node="here", pid=1, incarnation="i", is_alive=True, ending=Ending.NONE,
    read_at_s=1.0, progress_at_s=0.0, world_size=2,
)  # fmt: skip


def operations(count: int) -> np.ndarray:
    records = np.zeros(count, RECORD)
    records["kind"], records["stamp"] = Kind.OPERATION, 2 * np.arange(1, count + 1)
    records["number"], records["step"] = np.arange(1, count + 1), np.arange(1, count + 1) // 10
    records["enqueued_s"], records["ended_s"] = np.arange(count) + 1.0, np.arange(count) + 1.5
    return records


def kept(store: RankStore, state: RankState) -> int:
    store.merge(state, operations(5000), 1.0)
    return len(store.ranks[state.rank].records)


def test_rank_of_this_node_keeps_many_records_and_one_of_another_node_few() -> None:
    store = RankStore("here", WatchLimits())
    assert kept(store, LOCAL) == 4096
    assert kept(store, replace(LOCAL, rank=1, node="there")) == 512


@pytest.mark.parametrize("ranks", [1, 100, 2048, 16_384])
def test_ranks_of_other_nodes_share_a_fixed_memory(ranks: int) -> None:
    limits = WatchLimits()
    state = replace(LOCAL, node="there", world_size=ranks)
    count = kept(RankStore("here", limits), state)
    assert count == limits.records_of_relayed(ranks) >= 64
    # Two lanes of records and of what else is kept of each, in buffers of twice their capacity.
    assert ranks * 2 * 2 * count * (RECORD.itemsize + 16) <= limits.relayed_nbytes
    assert ranks * limits.steps_of_relayed(ranks) * 48 <= limits.relayed_nbytes


def test_dropped_ranks_are_forgotten() -> None:
    store = RankStore("here", WatchLimits())
    for rank in (0, 1):
        store.merge(replace(LOCAL, rank=rank), operations(5), 7.0)
    store.drop({0})
    assert list(store.ranks) == list(store.tables) == [1]
    assert store.received_at_s(1) == 7.0
    with pytest.raises(KeyError):
        store.received_at_s(0)


def test_new_writer_of_a_rank_is_reported() -> None:
    store = RankStore("here", WatchLimits())
    assert not store.merge(LOCAL, operations(5), 1.0)
    assert not store.merge(LOCAL, operations(5), 1.0)
    assert store.merge(replace(LOCAL, incarnation="later"), operations(5), 1.0)


def test_progress_says_how_far_each_rank_is() -> None:
    store = RankStore("here", WatchLimits())
    store.merge(LOCAL, operations(35), 1.0)
    (progress,) = store.progress()
    assert (progress.step, progress.last_step, progress.read_at_s) == (3, 0, 1.0)


@pytest.mark.parametrize(
    ("before", "after", "is_kept"), [(1, 2, True), (2, 1, False), (0, 0, False)]
)
def test_step_times_go_on_over_the_generations_of_a_job_and_not_into_another_one(
    *, before: int, after: int, is_kept: bool
) -> None:
    """After a node's loss the page showed no step from before it."""
    store = RankStore("here", WatchLimits())
    store.merge(replace(LOCAL, generation=before), steps(range(1, 11)), 1.0)
    later = replace(LOCAL, generation=after, incarnation="later", pid=2)
    store.merge(later, steps(range(10, 15)), 2.0)
    known = ~np.isnan(store.tables[0].seconds(range(1, 15), Phase.STEP))
    assert known[9:].all()
    assert known[:9].all() == is_kept


def steps(numbers: range) -> np.ndarray:
    records = np.zeros(len(numbers), RECORD)
    records["kind"], records["code"], records["step"] = Kind.PHASE, Phase.STEP, numbers
    records["stamp"] = 2 * np.arange(1, len(numbers) + 1)
    records["enqueued_s"], records["ended_s"] = np.array(numbers) + 1.0, np.array(numbers) + 1.5
    return records


def test_newest_loss_of_a_rank_is_known() -> None:
    store, records = RankStore("here", WatchLimits()), steps(range(1, 4))
    store.merge(LOCAL, records, 1.0)
    assert store.ranks[0].newest_measure(Measure.LOSS) is None
    records["kind"], records["code"], records["stamp"] = Kind.MEASURE, Measure.LOSS, (10, 12, 14)
    records["nbytes"] = np.array([3.5, 2.5, 1.5]).view(np.uint64)
    store.merge(replace(LOCAL, read_at_s=2.0), records, 2.0)
    assert store.ranks[0].newest_measure(Measure.LOSS) == 1.5
