"""The first seals after a restore are compared with the restored snapshot, in any layout."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.format.layout.boxes import Box, Entry
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.messages import RestoreChecked
from keepstep.checkpoint.snapshot.server.restore_check import RestoreCheck
from tests.adaptive_timeouts import patient
from tests.unit.checkpoint.snapshot.server.sealed import open_memory, seal_bytes

OLD, NEW = SnapshotId(1, 7), SnapshotId(2, 7)
LENGTH = 4096


class Node:
    """A node's memory, its check, and what came of it."""

    def __init__(self) -> None:
        self.memory = open_memory(generation=1)
        self.outcomes: queue.Queue[RestoreChecked] = queue.Queue()
        self.passed: queue.Queue[SnapshotId] = queue.Queue()
        self.check = RestoreCheck(self.memory, self.outcomes.put)

    def seal(
        self,
        snapshot: SnapshotId,
        rank: int,
        values: np.ndarray,
        first: int,
        key: str,
        dtype: str = "uint8",
    ) -> None:
        """Seal a shard of elements `first` and up of a tensor of `LENGTH` bytes."""
        box = Box((first,), values.shape)
        entry = Entry(
            key=key, dtype=dtype, global_shape=(LENGTH,), box=box, byte_offset=0,
            nbytes=values.nbytes,
        )  # fmt: skip
        seal_bytes(self.memory, snapshot, rank, [entry], values.tobytes(), commit=False)

    def seal_two_boxes(self, snapshot: SnapshotId, values: np.ndarray, first: int) -> None:
        """Seal a shard of the first and of the last elements of a tensor of `LENGTH` bytes."""
        boxes = [Box((0,), (first,)), Box((first,), (LENGTH - first,))]
        entries = [
            Entry(
                key="model/w", dtype="uint8", global_shape=(LENGTH,), box=box,
                byte_offset=box.offset[0], nbytes=box.size,
            )
            for box in boxes
        ]  # fmt: skip
        seal_bytes(self.memory, snapshot, 0, entries, values.tobytes(), commit=False)

    def seal_tensors(self, snapshot: SnapshotId, values: np.ndarray, keys: Sequence[str]) -> None:
        """Seal a shard of whole tensors of `LENGTH` bytes, which all have the same values."""
        entries = [
            Entry(
                key=key, dtype="uint8", global_shape=(LENGTH,), box=Box((0,), (LENGTH,)),
                byte_offset=number * LENGTH, nbytes=LENGTH,
            )
            for number, key in enumerate(keys)
        ]  # fmt: skip
        shard = values.tobytes() * len(keys)
        seal_bytes(self.memory, snapshot, 0, entries, shard, commit=False)

    def outcome(self) -> RestoreChecked:
        """Check the new snapshot to the end."""
        self.check.check_first(NEW, self.passed.put)
        checked = self.outcomes.get(timeout=patient(60))
        self.check.close()
        return checked

    def close(self) -> None:
        self.check.close()
        self.memory.close()


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.close()


VALUES = np.arange(LENGTH).astype(np.uint8)


def restored(node: Node, values: np.ndarray, key: str = "model/w") -> RestoreChecked:
    """Restore these values where `VALUES` were sealed; return the outcome."""
    node.seal(OLD, 0, VALUES, 0, key)
    node.memory.commit(OLD)
    node.memory.open_generation(2)
    node.seal(NEW, 0, values, 0, key)
    return node.outcome()


def test_a_rightly_restored_state_is_equal_and_passes(node: Node) -> None:
    assert restored(node, VALUES) == RestoreChecked(
        snapshot=NEW, nbytes=LENGTH, differing=(), is_wrong=False
    )
    assert node.passed.get_nowait() == NEW


@pytest.mark.parametrize("key", ["model/w", "optim/w/exp_avg", "rank/00000/rng/cpu"])
def test_one_wrong_byte_is_named_and_does_not_pass(node: Node, key: str) -> None:
    wrong = VALUES.copy()
    wrong[LENGTH // 2] ^= 1
    checked = restored(node, wrong, key)
    assert (checked.differing, checked.is_wrong) == ((key,), True)
    assert node.passed.empty()


def test_bytes_of_another_data_type_are_wrong(node: Node) -> None:
    node.seal(OLD, 0, VALUES, 0, "model/w")
    node.memory.commit(OLD)
    node.memory.open_generation(2)
    node.seal(NEW, 0, VALUES, 0, "model/w", "int8")
    assert node.outcome().is_wrong


@pytest.mark.parametrize("wrong_byte", [None, 0, 999, 1000, LENGTH - 1])
def test_every_byte_of_a_tensor_larger_than_a_tile_is_compared(
    node: Node, wrong_byte: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep.checkpoint.snapshot.server.restore_check._TILE_NBYTES", 1000)
    values = VALUES.copy()
    if wrong_byte is not None:
        values[wrong_byte] ^= 1
    assert restored(node, values).is_wrong == (wrong_byte is not None)


def test_what_must_be_equal_is_named_first_and_eight_are_named_at_most(node: Node) -> None:
    keys = [f"extra/own/{number}" for number in range(9)] + ["model/w"]
    for snapshot, values in ((OLD, VALUES), (NEW, VALUES[::-1].copy())):
        node.seal_tensors(snapshot, values, keys)
        if snapshot == OLD:
            node.memory.commit(OLD)
            node.memory.open_generation(2)
    checked = node.outcome()
    assert checked.is_wrong
    assert checked.differing == ("model/w", *keys[:7])


@pytest.mark.parametrize("wrong_byte", [None, 0, LENGTH - 1])
def test_every_box_of_a_tensor_is_compared(node: Node, wrong_byte: int | None) -> None:
    node.seal_two_boxes(OLD, VALUES, 1000)
    node.memory.commit(OLD)
    node.memory.open_generation(2)
    restored = VALUES.copy()
    if wrong_byte is not None:
        restored[wrong_byte] ^= 1
    node.seal_two_boxes(NEW, restored, 3000)
    checked = node.outcome()
    assert (checked.nbytes, checked.is_wrong) == (LENGTH, wrong_byte is not None)


@pytest.mark.parametrize(
    ("pieces", "is_wrong"),
    [((0,), False), ((1,), False), ((0, 1), False), ((1, 0), False), ((0, 1, 2), True)],
)
def test_what_replicas_held_differently_is_right_if_it_is_one_of_theirs(
    node: Node, pieces: tuple[int, ...], is_wrong: bool
) -> None:
    """As running statistics are; a layout may also read a part of each."""
    replicas = [VALUES, VALUES + np.uint8(1), VALUES + np.uint8(2)]
    for rank in (0, 1):
        node.seal(OLD, rank, replicas[rank], 0, "model/norm.running_mean")
    node.memory.commit(OLD)
    node.memory.open_generation(2)
    cuts = np.array_split(np.arange(LENGTH), len(pieces))
    values = np.concatenate([replicas[piece][cut] for piece, cut in zip(pieces, cuts, strict=True)])
    node.seal(NEW, 0, values, 0, "model/norm.running_mean")
    checked = node.outcome()
    assert checked.nbytes == (1 if pieces == (0,) else 2) * LENGTH
    assert checked.is_wrong == is_wrong
    assert node.passed.empty() == is_wrong


def test_equal_replicas_of_a_node_are_each_compared_with_one_of_those_before(node: Node) -> None:
    """Each was compared with all: for eight replicas the state was read 64 times."""
    for rank in range(8):
        node.seal(OLD, rank, VALUES, 0, "model/w")
    node.memory.commit(OLD)
    node.memory.open_generation(2)
    for rank in range(8):
        node.seal(NEW, rank, VALUES, 0, "model/w")
    assert node.outcome().nbytes == 8 * LENGTH


def test_a_users_own_object_that_differs_is_named_and_passes(node: Node) -> None:
    """Its `load_state_dict` may keep the state in another form."""
    checked = restored(node, VALUES[::-1].copy(), "extra/average/w")
    assert (checked.differing, checked.is_wrong) == (("extra/average/w",), False)
    assert node.passed.get_nowait() == NEW


@pytest.mark.parametrize("step", [OLD.step - 1, OLD.step + 1])
def test_snapshots_of_other_steps_pass_at_once(node: Node, step: int) -> None:
    node.seal(OLD, 0, VALUES, 0, "model/w")
    node.memory.commit(OLD)
    node.memory.open_generation(2)
    other = SnapshotId(2, step)
    node.seal(other, 0, VALUES, 0, "model/w")
    node.check.check_first(other, node.passed.put)
    assert node.passed.get_nowait() == other
    assert node.outcomes.empty()


def test_a_snapshot_that_is_gone_does_not_pass(node: Node) -> None:
    node.seal(OLD, 0, VALUES, 0, "model/w")
    node.memory.commit(OLD)
    node.memory.open_generation(2)
    node.check.check_first(NEW, node.passed.put)  # Nothing of it is sealed.
    node.check.close()
    assert node.passed.empty()
    assert node.outcomes.empty()


@given(
    old=st.lists(st.integers(1, LENGTH - 1), unique=True, max_size=4),
    new=st.lists(st.integers(1, LENGTH - 1), unique=True, max_size=4),
    held=st.integers(0, 4),
    wrong=st.integers(0, LENGTH - 1),
)
def test_in_any_layout_a_byte_is_checked_if_the_node_holds_it(
    old: list[int], new: list[int], held: int, wrong: int
) -> None:
    node = Node()
    values = VALUES.copy()
    values[wrong] ^= 1
    expected_nbytes, is_held = 0, False
    old_cuts, new_cuts = [0, *sorted(old), LENGTH], [0, *sorted(new), LENGTH]
    for rank, (first, last) in enumerate(pairwise(old_cuts)):
        if rank <= held:
            node.seal(OLD, rank, VALUES[first:last], first, "model/w")
            expected_nbytes += last - first
            is_held |= first <= wrong < last
    node.memory.commit(OLD)
    node.memory.open_generation(2)
    for rank, (first, last) in enumerate(pairwise(new_cuts)):
        node.seal(NEW, rank, values[first:last], first, "model/w")
    checked = node.outcome()
    assert checked.is_wrong == is_held
    assert node.passed.empty() == is_held
    if not is_held:
        assert checked.nbytes == expected_nbytes
    node.close()


def test_comparison_that_fails_is_done_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing that the thread raised was seen, and no later step would have been committed."""
    compare, failures = node.check._compare, iter(["no thread", "no thread"])

    def fail_twice(*arguments: Any) -> RestoreChecked:
        for failure in failures:
            raise RuntimeError(failure)
        return compare(*arguments)

    monkeypatch.setattr(node.check, "_compare", fail_twice)
    wrong = VALUES.copy()
    wrong[0] ^= 1
    assert restored(node, wrong).is_wrong
    assert node.passed.empty()
    assert caplog.messages == [
        "what was restored of step 7 is not checked yet, trying again: RuntimeError('no thread')"
    ]


def seal_both(node: Node) -> None:
    """Seal and commit the older snapshot, and seal the same bytes in the next generation."""
    node.seal(OLD, 0, VALUES, 0, "model/w")
    node.memory.commit(OLD)
    node.memory.open_generation(2)
    node.seal(NEW, 0, VALUES, 0, "model/w")


@pytest.mark.parametrize("damaged", [b"{", b"4096}]"])
def test_snapshot_whose_index_is_damaged_is_wrong(
    node: Node, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    """Passed over, it would never be protected, and no later step would be committed."""
    seal_both(node)
    index = node.memory.index_range(NEW, 0).view
    index[bytes(index).rindex(damaged)] ^= 1
    assert node.outcome().is_wrong
    assert node.passed.empty()
    assert node.memory.held_ranks(NEW) == ()
    (message,) = caplog.messages
    assert message.startswith("what was restored of step 7 cannot be compared: ")


def test_damage_of_the_older_index_does_not_condemn_what_was_restored(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """The ranks had read it before: theirs may be the last good copy."""
    seal_both(node)
    node.memory.index_range(OLD, 0).view[0] ^= 1
    node.check.check_first(NEW, node.passed.put)
    assert node.passed.get(timeout=patient(60)) == NEW
    (message,) = caplog.messages
    assert message.startswith("rank 0's shard is not compared with: ")


@pytest.mark.parametrize("is_given_up", [False, True])
def test_snapshot_is_unchecked_until_it_is_known_to_be_right(
    node: Node, monkeypatch: pytest.MonkeyPatch, is_given_up: bool
) -> None:
    """Its generation may end before that, and the next one must not resume from it."""
    seal_both(node)
    compare, may_compare = node.check._compare, threading.Event()

    def compare_late(*arguments: Any) -> RestoreChecked:
        may_compare.wait(patient(60))
        return compare(*arguments)

    monkeypatch.setattr(node.check, "_compare", compare_late)
    assert node.check.is_unchecked(NEW)
    node.check.check_first(NEW, node.passed.put)
    assert node.check.is_unchecked(NEW)
    assert not node.check.is_unchecked(OLD)
    if is_given_up:
        node.check.stop()
    may_compare.set()
    if not is_given_up:
        assert node.passed.get(timeout=patient(60)) == NEW
    node.check.close()
    assert node.passed.empty()
    assert node.check.is_unchecked(NEW) == is_given_up
    assert node.memory.held_ranks(NEW) == (() if is_given_up else (0,))
    assert node.memory.held_ranks(OLD) == (0,)


def test_wrongly_restored_snapshot_is_forgotten(node: Node) -> None:
    """Its generation is newer than that of the snapshot it came from, so it would be taken."""
    assert restored(node, VALUES ^ 1).is_wrong
    assert node.memory.held_ranks(NEW) == ()
    assert node.memory.held_ranks(OLD) == (0,)
