"""Claims about which snapshots stay in memory."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.errors import SnapshotInvariantViolated, SnapshotUnavailable
from keepstep.checkpoint.snapshot.memory.snapshot_table import (
    ShardBuffer,
    SnapshotId,
    SnapshotTable,
    abandon,
    adopt,
    begin,
    check_change,
    check_table,
    commit,
    complete_adoption,
    discard,
    fence,
    has_buffer,
    open_generation,
    pin,
    seal,
    unpin,
)

PLENTY = 2**40


def taken(table: SnapshotTable, step: int, generation: int = 1, rank: int = 0) -> SnapshotTable:
    table, _ = begin(table, SnapshotId(generation, step), rank, 100, PLENTY)
    return seal(table, SnapshotId(generation, step), rank)


def test_second_snapshot_waits_until_the_first_is_committed() -> None:
    table = taken(open_generation(SnapshotTable(), 1), 1)
    with pytest.raises(SnapshotUnavailable, match="step 1 is sealed and not committed"):
        begin(table, SnapshotId(1, 2), 0, 100, PLENTY)
    _, held = begin(commit(table, SnapshotId(1, 1)), SnapshotId(1, 2), 0, 100, PLENTY)
    assert held.capacity == 100


def test_older_generation_can_neither_begin_nor_seal() -> None:
    table, _ = begin(open_generation(SnapshotTable(), 1), SnapshotId(1, 1), 0, 100, PLENTY)
    table = open_generation(table, 2)
    with pytest.raises(SnapshotUnavailable, match="current one is 2"):
        begin(table, SnapshotId(1, 2), 0, 100, PLENTY)
    with pytest.raises(SnapshotUnavailable):
        seal(table, SnapshotId(1, 1), 0)


def test_shard_is_refused_before_any_generation_is_open() -> None:
    with pytest.raises(SnapshotUnavailable, match="current one is 0"):
        begin(SnapshotTable(), SnapshotId(1, 1), 0, 100, PLENTY)


def test_fenced_generation_keeps_what_is_sealed_and_seals_nothing_more() -> None:
    table = commit(taken(open_generation(SnapshotTable(), 1), 1), SnapshotId(1, 1))
    table, _ = begin(table, SnapshotId(1, 2), 0, 100, PLENTY)
    table = fence(table, 1)
    with pytest.raises(SnapshotUnavailable, match="may be garbage"):
        seal(table, SnapshotId(1, 2), 0)
    with pytest.raises(SnapshotUnavailable, match="may be garbage"):
        begin(table, SnapshotId(1, 3), 0, 100, PLENTY)
    assert table.sealed() == {SnapshotId(1, 1): {0}}
    table = taken(open_generation(table, 2), 1, generation=2)
    assert SnapshotId(2, 1) in table.sealed()
    assert SnapshotId(2, 1) in fence(table, 1).sealed()


def test_memory_is_refused_before_the_node_runs_out() -> None:
    table = open_generation(SnapshotTable(), 1)
    enough = 2**30 + 2**26
    with pytest.raises(SnapshotUnavailable, match="needs 1024 MiB and the node has 1088 MiB left"):
        begin(table, SnapshotId(1, 1), 0, 2**30, enough - 1)
    begin(table, SnapshotId(1, 1), 0, 2**30, enough)


def test_a_snapshot_is_kept_until_it_is_unpinned_as_often_as_pinned() -> None:
    table = commit(taken(open_generation(SnapshotTable(), 1), 1), SnapshotId(1, 1))
    table = pin(pin(table, SnapshotId(1, 1)), SnapshotId(1, 1))
    table = commit(taken(table, 2), SnapshotId(1, 2))
    table = unpin(table, SnapshotId(1, 1))
    assert (SnapshotId(1, 1), 0) in table.shards
    assert (SnapshotId(1, 1), 0) not in unpin(table, SnapshotId(1, 1)).shards


@pytest.mark.parametrize(("unpinned", "kept"), [(1, 2), (2, 1)])
def test_what_is_unpinned_leaves_other_pins_as_they_are(unpinned: int, kept: int) -> None:
    table = open_generation(SnapshotTable(), 1)
    for step in (1, 2):
        table = commit(taken(table, step), SnapshotId(1, step))
        table = pin(table, SnapshotId(1, step))
    table = unpin(table, SnapshotId(1, unpinned))
    assert table.pinned == {SnapshotId(1, kept): 1}
    assert set(table.sealed()) == {SnapshotId(1, kept), SnapshotId(1, 2)}


def test_an_adopted_shard_is_no_part_of_what_the_node_sealed_and_its_memory_is_given_back() -> None:
    table = commit(taken(open_generation(SnapshotTable(), 1), 4), SnapshotId(1, 4))
    table, _ = adopt(open_generation(table, 2), SnapshotId(1, 4), 7, 2**22, PLENTY)
    with pytest.raises(SnapshotUnavailable, match="here already"):
        adopt(table, SnapshotId(1, 4), 7, 2**22, PLENTY)
    table = complete_adoption(table, SnapshotId(1, 4), 7)
    assert table.sealed() == {SnapshotId(1, 4): {0}}
    table = commit(taken(table, 4, generation=2), SnapshotId(2, 4))
    assert table.nbytes == 200


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_buffer_is_used_again_only_for_a_shard_that_fits_it(first: int, second: int) -> None:
    table, old = begin(open_generation(SnapshotTable(), 1), SnapshotId(1, 1), 0, first, PLENTY)
    table = open_generation(table, 2)
    assert table.free == {old.buffer: first}
    _, new = begin(table, SnapshotId(2, 2), 0, second, PLENTY)
    assert new.capacity >= second
    assert (new.buffer == old.buffer) == (second <= first)


def test_a_shard_that_is_being_rebuilt_keeps_its_buffer_whatever_is_freed() -> None:
    lost = SnapshotId(1, 4)
    table = commit(taken(open_generation(SnapshotTable(), 1), 4), lost)
    table, adopted = adopt(open_generation(table, 2), lost, 7, 100, PLENTY)
    table = discard(open_generation(table, 3), lost)
    table = commit(taken(table, 5, generation=3), SnapshotId(3, 5))
    _, other = begin(table, SnapshotId(3, 6), 0, 100, PLENTY)
    assert other.buffer != adopted.buffer
    assert table.shards[lost, 7] == adopted
    assert (lost, 7) not in complete_adoption(table, lost, 7).shards, "it is older than the commit"
    assert adopted.buffer in abandon(table, lost, 7).free


def test_a_change_that_loses_a_shard_that_is_being_rebuilt_is_refused() -> None:
    lost = SnapshotId(1, 4)
    table, _ = adopt(open_generation(SnapshotTable(), 2), lost, 7, 100, PLENTY)
    with pytest.raises(SnapshotInvariantViolated, match="being rebuilt"):
        check_change(table, replace(table, shards={}))


def test_an_older_generation_or_commit_that_comes_late_changes_nothing() -> None:
    table = commit(taken(open_generation(SnapshotTable(), 3), 7, generation=3), SnapshotId(3, 7))
    assert open_generation(table, 3) is table
    assert open_generation(table, 2) is table
    assert commit(table, SnapshotId(3, 6)) == table
    assert commit(table, SnapshotId(2, 9)) == table


@pytest.mark.parametrize("nbytes", [99, 100, 101])
def test_a_free_buffer_is_given_again_only_if_it_is_large_enough(nbytes: int) -> None:
    table = commit(taken(open_generation(SnapshotTable(), 1), 1), SnapshotId(1, 1))
    table = commit(taken(table, 2), SnapshotId(1, 2))
    assert list(table.free.values()) == [100]
    table, held = begin(table, SnapshotId(1, 3), 0, nbytes, PLENTY)
    assert held.capacity == max(nbytes, 100)
    assert (held.buffer in (1, 2)) == (nbytes <= 100)


def test_a_snapshot_that_cannot_be_committed_is_given_up_only_on_request() -> None:
    table = taken(open_generation(SnapshotTable(), 1), 1)
    table, _ = begin(table, SnapshotId(1, 2), 0, 100, PLENTY, discard_uncommitted=True)
    assert table.sealed() == {}
    assert discard(taken(open_generation(SnapshotTable(), 1), 1), SnapshotId(1, 1)).shards == {}


def test_what_a_generation_does_not_resume_from_leaves_its_buffer_to_the_next_snapshot() -> None:
    """Another rank had not sealed it: it can never be committed, and kept a third buffer."""
    table = commit(taken(open_generation(SnapshotTable(), 1), 1), SnapshotId(1, 1))
    table = taken(table, 2)
    table = commit(open_generation(table, 2), SnapshotId(1, 1))
    table, _ = begin(table, SnapshotId(2, 1), 0, 100, 0)
    assert table.nbytes == 200


def test_what_the_next_generation_may_resume_from_is_kept_until_that_is_known() -> None:
    table = commit(taken(open_generation(SnapshotTable(), 1), 1), SnapshotId(1, 1))
    table = pin(table, SnapshotId(1, 1))
    table = open_generation(taken(table, 2), 2)
    table = unpin(table, SnapshotId(1, 1))
    assert (SnapshotId(1, 2), 0) in commit(table, SnapshotId(1, 2)).shards


def test_tables_that_break_an_invariant_are_refused() -> None:
    table = taken(open_generation(SnapshotTable(), 1), 1)
    first = SnapshotId(1, 1), 0
    shared = {**table.shards, (SnapshotId(1, 1), 1): table.shards[first]}
    with pytest.raises(SnapshotInvariantViolated, match="a buffer belongs to one shard"):
        check_table(replace(table, shards=shared))
    with pytest.raises(SnapshotInvariantViolated, match="a buffer belongs to one shard"):
        check_table(replace(table, free={1: 100}))
    second = {**table.shards, (SnapshotId(1, 2), 0): ShardBuffer(2, 100, sealed=True)}
    with pytest.raises(SnapshotInvariantViolated, match="one sealed snapshot at most"):
        check_table(replace(table, shards=second, next_buffer=3))
    moved = replace(table, shards={first: ShardBuffer(2, 100, sealed=True)}, next_buffer=3)
    with pytest.raises(SnapshotInvariantViolated, match="stays in its buffer"):
        check_change(table, moved)
    with pytest.raises(SnapshotInvariantViolated, match="stays in its buffer"):
        check_change(table, replace(table, shards={}))
    check_change(table, replace(table, shards={}), discarded=[first])
    committed = commit(table, SnapshotId(1, 1))
    with pytest.raises(SnapshotInvariantViolated, match="never go back"):
        check_change(committed, replace(committed, committed=SnapshotId(1, 0)))
    with pytest.raises(SnapshotInvariantViolated, match="never go back"):
        check_change(committed, replace(committed, generation=0))


def two_committed(ranks: Sequence[int] = (0,)) -> SnapshotTable:
    """Return a table in which ranks have two buffers each, of which one is free."""
    table = open_generation(SnapshotTable(), 1)
    for step in (1, 2):
        for rank in ranks:
            table = taken(table, step, rank=rank)
        table = commit(table, SnapshotId(1, step))
    return table


@given(st.lists(st.permutations([0, 1, 2, 3]), min_size=4, max_size=12))
def test_a_rank_is_given_its_own_older_buffer_in_whatever_order_ranks_seal(
    orders: list[list[int]],
) -> None:
    """It has mapped it, and a worker with a GPU has page-locked it."""
    table = open_generation(SnapshotTable(), 1)
    used: dict[int, list[int]] = {rank: [] for rank in range(4)}
    for step, order in enumerate(orders):
        snapshot = SnapshotId(1, step)
        for rank in order:
            table, held = begin(table, snapshot, rank, 100, PLENTY, mapped=used[rank])
            table = seal(table, snapshot, rank)
            used[rank].append(held.buffer)
        table = commit(table, snapshot)
    for buffers in used.values():
        assert buffers == [buffers[step % 2] for step in range(len(orders))]


def test_a_fence_is_never_lowered() -> None:
    table = fence(fence(open_generation(SnapshotTable(), 2), 2), 1)
    with pytest.raises(SnapshotUnavailable, match="may be garbage"):
        begin(table, SnapshotId(2, 1), 0, 100, PLENTY)


def test_a_shard_is_sealed_once_and_only_after_it_was_begun() -> None:
    table = open_generation(SnapshotTable(), 1)
    with pytest.raises(SnapshotUnavailable, match="was not begun"):
        seal(table, SnapshotId(1, 1), 0)
    table = taken(table, 1)
    with pytest.raises(SnapshotUnavailable, match="was not begun"):
        seal(table, SnapshotId(1, 1), 0)
    assert abandon(table, SnapshotId(1, 1), 0) is table, "what is sealed is not abandoned"
    assert abandon(table, SnapshotId(1, 2), 0) is table
    with pytest.raises(SnapshotUnavailable, match="step 2 of generation 1 is not held here"):
        pin(table, SnapshotId(1, 2))


def test_a_committed_snapshot_is_not_begun_again() -> None:
    table = commit(taken(open_generation(SnapshotTable(), 1), 1), SnapshotId(1, 1))
    with pytest.raises(SnapshotUnavailable, match="that of step 1 is sealed"):
        begin(table, SnapshotId(1, 1), 0, 100, PLENTY)


@pytest.mark.parametrize(
    ("free", "nbytes", "used"),
    [
        ([99, 100, 101], 100, 100),
        ([99], 100, None),
        ([2 * 100 + 2**20], 100, 2 * 100 + 2**20),
        # So much larger than the shard that another one may need it.
        ([2 * 100 + 2**20 + 1], 100, None),
        ([2**21 + 300, 2**20], 100, 2**20),
    ],
)
def test_a_shard_is_given_the_smallest_free_buffer_that_is_not_much_too_large(
    free: list[int], nbytes: int, used: int | None
) -> None:
    buffers = dict(enumerate(free, 1))
    table = SnapshotTable(generation=1, free=buffers, next_buffer=len(free) + 1)
    assert has_buffer(table, nbytes) == (used is not None)
    # Only new memory needs to be there.
    available = 0 if used is not None else PLENTY
    table, held = begin(table, SnapshotId(1, 1), 0, nbytes, available)
    assert held.capacity == (used or nbytes)
    assert held.buffer == (free.index(used) + 1 if used is not None else len(free) + 1)
    left = sorted(capacity for capacity in free if capacity != used)
    # With new memory, what is too small for this job is given back.
    assert sorted(table.free.values()) == [c for c in left if used is not None or c >= nbytes]
    assert table.nbytes == held.capacity + sum(table.free.values())


def test_two_buffers_a_rank_are_kept_the_smallest_ones() -> None:
    table = taken(taken(open_generation(SnapshotTable(), 1), 1), 1, rank=1)
    table = replace(table, free={7: 300, 8: 200, 9: 400, 10: 100}, next_buffer=11)
    table = commit(table, SnapshotId(1, 1))
    assert dict(table.free) == {8: 200, 10: 100}
    empty = replace(SnapshotTable(), free={1: 100}, next_buffer=2)
    assert commit(empty, SnapshotId(1, 1)).free == {1: 100}


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
    table, step = open_generation(SnapshotTable(), 1), 0
    for kind, rank in schedule:
        before = {k: h for k, h in table.shards.items() if h.sealed and k[0] == table.committed}
        snapshot = SnapshotId(table.generation, step)
        if kind in ("take", "begin"):
            step += 1
            snapshot = SnapshotId(table.generation, step)
            try:
                table, _ = begin(table, snapshot, rank, 100, PLENTY)
            except SnapshotUnavailable:
                continue  # The last one is not committed yet.
            if kind == "take":
                table = seal(table, snapshot, rank)
        elif kind == "abandon":
            table = abandon(table, snapshot, rank)
        elif kind == "commit" and table.sealed():
            table = commit(table, max(table.sealed()))
            before = {}
        elif kind == "pin" and table.sealed() and not table.pinned:
            table = pin(table, max(table.sealed()))
        elif kind == "unpin":
            for pinned in table.pinned:
                table = unpin(table, pinned)
            before = {}
        elif kind == "generation":
            table = open_generation(table, table.generation + 1)
            table = commit(table, max(table.sealed(), default=SnapshotId(table.generation, -1)))
            before = {}
        for key, held in before.items():
            assert table.shards[key] == held
        buffers = [held.buffer for held in table.shards.values()] + list(table.free)
        assert len(buffers) == len(set(buffers))
        # Two ranks, two buffers each, and one more each while something is pinned or freshly
        # unpinned.
        assert table.nbytes <= 100 * 2 * 3 + 100 * 2
