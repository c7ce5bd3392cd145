"""Compares what ranks seal right after they have restored with what they restored from.

Every rank takes a snapshot as soon as it has restored, at the same step. Whatever this node has of
the snapshot that it restored from must have the same bytes there, in any layout. Until that is
known the new snapshot is not protected, so it is not committed and the older one stays.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.boxes import Entry, ShardIndex
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.arena import Bytes, box_bytes
from keepstep.checkpoint.snapshot.memory.messages import RestoreChecked
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory
from keepstep.processes import yield_to_training

log = logging.getLogger("keepstep")

_TILE_NBYTES = 4 * 2**20
_MAX_THREADS = 8
_MAX_REPORTED = 8
_RETRY_S = 0.1

# A user's own object may load its state in a form of its own.
_MUST_BE_EQUAL = ("model/", "optim/", "rank/")


@dataclass(frozen=True, slots=True)
class _Shard:
    """A sealed shard in this node's memory."""

    index: ShardIndex
    entries: Mapping[str, tuple[Entry, ...]]
    memory: Bytes


class RestoreCheck:
    """Owns the threads that compare; `close` ends them.

    Args:
        memory: the node's snapshots.
        on_checked: called on such a thread with the outcome, if anything could be compared.
    """

    def __init__(
        self, memory: SnapshotMemory, on_checked: Callable[[RestoreChecked], None]
    ) -> None:
        self._memory = memory
        self._on_checked = on_checked
        self._passed: SnapshotId | None = None
        self._stop_requested = threading.Event()
        self._checking = ThreadPoolExecutor(
            1, thread_name_prefix="keepstep-restored", initializer=yield_to_training
        )

    def is_unchecked(self, snapshot: SnapshotId) -> bool:
        """Whether a sealed snapshot may be wrongly restored: nobody may resume from it.

        From the moment on at which it is sealed, also before `check_first` is called.
        """
        return snapshot != self._passed and self._is_of_restored(snapshot)

    def check_first(self, snapshot: SnapshotId, then: Callable[[SnapshotId], None]) -> None:
        """Call `then` with a sealed snapshot, once it is known not to be wrongly restored.

        Args:
            snapshot: what all of the node's ranks have sealed.
            then: called at once if they have not just restored; otherwise on another thread, and
                not at all if the bytes differ, or `stop` comes first: the snapshot is forgotten
                then, so that nobody resumes from it, and what it was restored from is kept.
        """
        if not self._is_of_restored(snapshot):
            self._passed = snapshot
            then(snapshot)
            return
        restored = self._memory.committed
        self._stop_requested = threading.Event()
        self._checking.submit(self._check, restored, snapshot, then, self._stop_requested)

    def _is_of_restored(self, snapshot: SnapshotId) -> bool:
        """Whether a snapshot was taken of what ranks have just restored, and can be compared."""
        restored = self._memory.committed
        return (
            restored.step == snapshot.step
            and restored.generation < snapshot.generation
            and bool(self._memory.held_ranks(restored))
        )

    def stop(self) -> None:
        """Give up what is under way: its generation is over."""
        self._stop_requested.set()

    def close(self) -> None:
        """End what is under way, and the threads."""
        self.stop()
        self._checking.shutdown()

    def _check(
        self,
        restored: SnapshotId,
        sealed: SnapshotId,
        then: Callable[[SnapshotId], None],
        stop: threading.Event,
    ) -> None:
        checked = self._outcome(restored, sealed, stop)
        if checked is None or checked.is_wrong or stop.is_set():
            # Sealed by all, it would be the newest to resume from.
            self._memory.discard(sealed)
        else:
            self._passed = sealed
        if checked is None or stop.is_set():
            return
        if checked.nbytes or checked.differing:
            self._on_checked(checked)
        if not checked.is_wrong:
            then(sealed)

    def _outcome(
        self, restored: SnapshotId, sealed: SnapshotId, stop: threading.Event
    ) -> RestoreChecked | None:
        """Compare; None if that is given up, or the new snapshot was discarded meanwhile."""
        try:
            self._memory.pin(restored)
        except SnapshotUnavailable:
            return RestoreChecked(snapshot=sealed, nbytes=0, differing=(), is_wrong=False)
        try:
            return self._compare_at_last(restored, sealed, stop)
        except SnapshotUnavailable as error:
            if stop.is_set() or not self._memory.held_ranks(sealed):
                return None
            log.error("what was restored of step %d cannot be compared: %s", sealed.step, error)
            return RestoreChecked(
                snapshot=sealed, nbytes=0, differing=("an index of a shard",), is_wrong=True
            )
        finally:
            self._memory.unpin(restored)

    def _compare_at_last(
        self, restored: SnapshotId, sealed: SnapshotId, stop: threading.Event
    ) -> RestoreChecked | None:
        """Compare, again while that fails; None if it is given up.

        What is not known to be right is not protected, so nothing wrong is committed; but nothing
        else would be either.
        """
        is_reported = False
        while not stop.is_set():
            try:
                return self._compare(restored, sealed, stop)
            except SnapshotUnavailable:
                raise
            except Exception as error:  # noqa: BLE001 - nobody else would learn of it
                if not is_reported:
                    is_reported = True
                    log.warning(
                        "what was restored of step %d is not checked yet, trying again: %r",
                        sealed.step,
                        error,
                    )
            stop.wait(_RETRY_S)
        return None

    def _compare(
        self, restored: SnapshotId, sealed: SnapshotId, stop: threading.Event
    ) -> RestoreChecked:
        with self._memory.pinned(sealed):
            olds = list(self._readable(restored))
            parts = [
                (entry, shard.memory)
                for shard in (self._shard(sealed, r) for r in self._memory.held_ranks(sealed))
                for entry in shard.index.entries
            ]

            def compare(part: tuple[Entry, Bytes]) -> tuple[int, bool]:
                if stop.is_set():
                    return 0, True
                try:
                    return _compare_entry(*part, olds)
                except (ValueError, IndexError) as error:
                    raise SnapshotUnavailable(
                        f"{part[0].key} does not lie where its index says ({error}); the memory of "
                        "the index is damaged"
                    ) from error

            threads = min(_MAX_THREADS, os.cpu_count() or 1)
            with ThreadPoolExecutor(threads, thread_name_prefix="keepstep-compare") as pool:
                outcomes = list(pool.map(compare, parts))
        differing = [
            entry.key
            for (entry, _), (_, is_equal) in zip(parts, outcomes, strict=True)
            if not is_equal
        ]
        differing.sort(key=lambda key: not key.startswith(_MUST_BE_EQUAL))
        return RestoreChecked(
            snapshot=sealed,
            nbytes=sum(nbytes for nbytes, _ in outcomes),
            differing=tuple(differing[:_MAX_REPORTED]),
            is_wrong=any(key.startswith(_MUST_BE_EQUAL) for key in differing),
        )

    def _readable(self, snapshot: SnapshotId) -> Iterator[_Shard]:
        """Yield what can be compared with of an older snapshot."""
        for rank in self._memory.held_ranks(snapshot):
            try:
                yield self._shard(snapshot, rank)
            except SnapshotUnavailable as error:
                # The ranks had read it before: what they have sealed may be the last good copy.
                log.warning("rank %d's shard is not compared with: %s", rank, error)

    def _shard(self, snapshot: SnapshotId, rank: int) -> _Shard:
        index = self._memory.index(snapshot, rank)
        return _Shard(index, index.by_key, self._memory.memory(snapshot, rank).bytes)


def _compare_entry(entry: Entry, memory: Bytes, olds: Sequence[_Shard]) -> tuple[int, bool]:
    """Compare one box of a tensor with what older shards have of it.

    Replicas may differ, as the statistics of batch normalization do: what is held several times
    needs to be equal once, element by element, for it may have been read in pieces.

    Returns the number of bytes compared, and whether all of them are equal.
    """
    nbytes = 0
    differs = False
    for other, other_memory in _entries_of(entry.key, olds):
        if (other.dtype, other.global_shape) != (entry.dtype, entry.global_shape):
            return nbytes, False
        box = entry.box.intersect(other.box)
        if box is None:
            continue
        new_bytes = box_bytes(entry, memory, box)
        nbytes += new_bytes.nbytes
        is_equal = _are_equal(new_bytes, box_bytes(other, other_memory, box))
        if is_equal and box == entry.box:
            return nbytes, True
        differs = differs or not is_equal
    return nbytes, not differs or _equals_some_replica(entry, memory, olds)


def _equals_some_replica(entry: Entry, memory: Bytes, olds: Sequence[_Shard]) -> bool:
    """Whether every element that older shards have is equal in at least one of them."""
    is_held = np.zeros(entry.box.shape, bool)
    is_equal = np.zeros(entry.box.shape, bool)
    for other, other_memory in _entries_of(entry.key, olds):
        box = entry.box.intersect(other.box)
        if box is None:
            continue
        part = box.within(entry.box).slices
        one, two = box_bytes(entry, memory, box), box_bytes(other, other_memory, box)
        is_held[part] = True
        is_equal[part] |= (one == two).all(axis=-1)
    return bool(np.array_equal(is_held, is_equal))


def _entries_of(key: str, shards: Sequence[_Shard]) -> Iterator[tuple[Entry, Bytes]]:
    """Yield every box of a tensor that shards have, each with the memory that it lies in."""
    for shard in shards:
        for entry in shard.entries.get(key, ()):
            yield entry, shard.memory


def _are_equal(one: Bytes, other: Bytes) -> bool:
    """Whether two arrays of one shape have the same bytes; compared in tiles that fit a cache."""
    if one.nbytes <= _TILE_NBYTES:
        return bool(np.array_equal(one, other))
    if not (one.flags.c_contiguous and other.flags.c_contiguous):
        return all(_are_equal(a, b) for a, b in zip(one, other, strict=True))
    one, other = one.reshape(-1), other.reshape(-1)
    return all(
        np.array_equal(one[start : start + _TILE_NBYTES], other[start : start + _TILE_NBYTES])
        for start in range(0, one.nbytes, _TILE_NBYTES)
    )
