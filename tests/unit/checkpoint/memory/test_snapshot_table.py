"""Claims about which snapshots stay in memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.memory.snapshot_table import (
    Shelf,
    Snapshot,
    abandon,
    adopt,
    begin,
    commit,
    complete_adoption,
    open_generation,
    pin,
    seal,
    unpin,
)

PLENTY = 2**40


def taken(shelf: Shelf, step: int, generation: int = 1, rank: int = 0) -> Shelf:
    shelf, _ = begin(shelf, Snapshot(generation, step), rank, 100, PLENTY)
    return seal(shelf, Snapshot(generation, step), rank)


def test_second_snapshot_waits_until_the_first_is_committed() -> None:
    shelf = taken(open_generation(Shelf(), 1), 1)
    with pytest.raises(SnapshotUnavailable, match="step 1 is sealed and not committed"):
        begin(shelf, Snapshot(1, 2), 0, 100, PLENTY)
    _, held = begin(commit(shelf, Snapshot(1, 1)), Snapshot(1, 2), 0, 100, PLENTY)
    assert held.capacity == 100


def test_older_generation_can_neither_begin_nor_seal() -> None:
    shelf, _ = begin(open_generation(Shelf(), 1), Snapshot(1, 1), 0, 100, PLENTY)
    shelf = open_generation(shelf, 2)
    with pytest.raises(SnapshotUnavailable, match="current one is 2"):
        begin(shelf, Snapshot(1, 2), 0, 100, PLENTY)
    with pytest.raises(SnapshotUnavailable):
        seal(shelf, Snapshot(1, 1), 0)


def test_memory_is_refused_before_the_node_runs_out() -> None:
    with pytest.raises(SnapshotUnavailable, match="MiB left"):
        begin(open_generation(Shelf(), 1), Snapshot(1, 1), 0, 2**30, 2**30)


def test_a_snapshot_is_kept_until_it_is_unpinned_as_often_as_pinned() -> None:
    shelf = commit(taken(open_generation(Shelf(), 1), 1), Snapshot(1, 1))
    shelf = pin(pin(shelf, Snapshot(1, 1)), Snapshot(1, 1))
    shelf = commit(taken(shelf, 2), Snapshot(1, 2))
    shelf = unpin(shelf, Snapshot(1, 1))
    assert (Snapshot(1, 1), 0) in shelf.shards
    assert (Snapshot(1, 1), 0) not in unpin(shelf, Snapshot(1, 1)).shards


def test_an_adopted_shard_is_no_part_of_what_the_node_sealed_and_its_memory_is_given_back() -> None:
    shelf = commit(taken(open_generation(Shelf(), 1), 4), Snapshot(1, 4))
    shelf, _ = adopt(open_generation(shelf, 2), Snapshot(1, 4), 7, 2**22, PLENTY)
    with pytest.raises(SnapshotUnavailable, match="here already"):
        adopt(shelf, Snapshot(1, 4), 7, 2**22, PLENTY)
    shelf = complete_adoption(shelf, Snapshot(1, 4), 7)
    assert shelf.sealed() == {Snapshot(1, 4): {0}}
    shelf = commit(taken(shelf, 4, generation=2), Snapshot(2, 4))
    assert shelf.nbytes == 200


events = st.lists(
    st.tuples(
        st.sampled_from(["take", "begin", "abandon", "commit", "pin", "unpin", "generation"]),
        st.integers(0, 1),
    ),
    max_size=60,
)


@given(events)
def test_committed_shards_are_never_overwritten_and_memory_stays_bounded(
    schedule: list[tuple[str, int]],
) -> None:
    shelf, step = open_generation(Shelf(), 1), 0
    for kind, rank in schedule:
        before = {k: h for k, h in shelf.shards.items() if h.sealed and k[0] == shelf.committed}
        snapshot = Snapshot(shelf.generation, step)
        if kind in ("take", "begin"):
            step += 1
            snapshot = Snapshot(shelf.generation, step)
            try:
                shelf, _ = begin(shelf, snapshot, rank, 100, PLENTY)
            except SnapshotUnavailable:
                continue  # The last one is not committed yet.
            if kind == "take":
                shelf = seal(shelf, snapshot, rank)
        elif kind == "abandon":
            shelf = abandon(shelf, snapshot, rank)
        elif kind == "commit" and shelf.sealed():
            shelf = commit(shelf, max(shelf.sealed()))
            before = {}
        elif kind == "pin" and shelf.sealed() and not shelf.pinned:
            shelf = pin(shelf, max(shelf.sealed()))
        elif kind == "unpin":
            for one in shelf.pinned:
                shelf = unpin(shelf, one)
            before = {}
        elif kind == "generation":
            shelf = open_generation(shelf, shelf.generation + 1)
            shelf = commit(shelf, max(shelf.sealed(), default=Snapshot(shelf.generation, -1)))
            before = {}
        for key, held in before.items():
            assert shelf.shards[key] == held
        buffers = [held.buffer for held in shelf.shards.values()] + list(shelf.free)
        assert len(buffers) == len(set(buffers))
        # Two ranks, two buffers each, and one more each while something is pinned or freshly unpinned.
        assert shelf.nbytes <= 100 * 2 * 3 + 100 * 2
