"""Reads cells of a checkpoint's objects into the memory of those that want them, verified.

A cell is always read completely, because its checksum covers all of it; it is verified while it is
in the processor's cache, and copied from there to the requests' memory. Cells are tiles, so they
seldom lie in one piece of that memory, and cannot be read into it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointMissing
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.integers import round_up
from keepstep.checkpoint.format.stored.cell_codec import CHECKSUM_NBYTES, decompress
from keepstep.checkpoint.format.stored.cell_index import Span, runs
from keepstep.checkpoint.format.stored.chunking import StoredTensor
from keepstep.checkpoint.format.stored.storage import Storage
from keepstep.checkpoint.format.stored.transfer_memory import BLOCK_NBYTES, TransferMemory

Bytes = npt.NDArray[np.uint8]

Result = TypeVar("Result")

PARALLEL_READS = 8
"""How many threads read; they mostly wait for storage, and many small tensors need many reads."""

_PARALLEL_LARGE_READS = 3
"""How many do if all reads are large and go past the page cache: each needs a large page."""

_PREFETCHED_RUNS = 16

_LARGE_READ_NBYTES = 2**20
"""The size from which on a read may go past the page cache."""


@dataclass(frozen=True, slots=True)
class Target:
    """A request's memory: an array of its box's shape with a last axis of an element's bytes."""

    box: Box
    values: Bytes

    def copy_from(self, start: Sequence[int], cell: Bytes) -> None:
        """Copy the part of a cell that the box overlaps; the cell begins at element `start`."""
        source: list[slice] = []
        target: list[slice] = []
        # No Box objects and no check of lengths: this runs for every cell.
        for begin, cell_extent, offset, box_extent in zip(  # noqa: B905
            start, cell.shape, self.box.offset, self.box.shape
        ):
            first = max(begin, offset)
            last = min(begin + cell_extent, offset + box_extent)
            source.append(slice(first - begin, last - begin))
            target.append(slice(first - offset, last - offset))
        self.values[tuple(target)] = cell[tuple(source)]


TargetsBySpan = Mapping[Span, Sequence[Sequence[Target]]]
"""For each cell of a span, the requests that overlap it."""


class ReadRecord:
    """The statistics of one checkpoint's reads. Thread-safe.

    Attributes:
        nbytes: the bytes that were read.
        may_go_past_cache: whether the file system has not refused yet to read past the cache.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.nbytes = 0
        self.may_go_past_cache = True

    def add(self, nbytes: int) -> None:
        """Count bytes that were read."""
        with self._lock:
            self.nbytes += nbytes


class _ReadBuffers(threading.local):
    """Each thread's buffers, for reading and for decompressing a cell."""

    def __init__(self) -> None:
        self.read = TransferMemory()
        self.decompressed = TransferMemory()


class CellReads:
    """Reads the cells of one checkpoint.

    Args:
        storage: what has its objects.
        directory: the directory that has them.
        tensors: its tensors by the keys that they are stored under.
        record: what reads have found so far.
        past_cache: read large pieces past the system's memory, where the storage does so: it costs
            less, and who reads them after this finds nothing there.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        tensors: Mapping[str, StoredTensor],
        record: ReadRecord,
        *,
        past_cache: bool = False,
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._tensors = tensors
        self._record = record
        self._is_past_cache = past_cache and storage.reads_past_cache
        self._buffers = _ReadBuffers()

    def read(self, targets_by_span: TargetsBySpan) -> None:
        """Read spans into the memory of requests; adjacent spans are read together.

        Raises:
            CheckpointDamaged: what is stored is not what was written. The memory is undefined then.
        """
        ordered = list(runs(targets_by_span))
        with ThreadPoolExecutor(self._threads_for(ordered)) as pool:
            futures = []
            for number, run in enumerate(ordered):
                # A run is prefetched before the runs ahead of it have all been read, so that the
                # device is never idle.
                following = number + _PREFETCHED_RUNS
                ahead = ordered[following] if following < len(ordered) else None
                futures.append(pool.submit(self._fetch, run, targets_by_span, ahead))
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()

    def verify(self, spans: Iterable[Span], report: Callable[[int], None]) -> None:
        """Read spans and check them; `report` gets the number of bytes after each read.

        Raises:
            CheckpointDamaged: what is stored is not what was written.
        """
        ordered = list(runs(spans))
        with ThreadPoolExecutor(self._threads_for(ordered)) as pool:
            futures = {pool.submit(self._fetch, run, {}, None): run for run in ordered}
            try:
                for future in as_completed(futures):
                    future.result()
                    report(sum(span.nbytes for span in futures[future]))
            finally:
                for future in futures:
                    future.cancel()

    def read_into(self, name: str, buffers: Sequence[memoryview], offset: int) -> int:
        """Read bytes of an object, as `Storage.read_into`.

        Raises:
            CheckpointDamaged: there is no such object, or no object can have this offset.
        """
        nbytes = self._of_object(
            name, offset, lambda path: self._storage.read_into(path, buffers, offset)
        )
        self._record.add(nbytes)
        return nbytes

    def _of_object(self, name: str, offset: int, read: Callable[[str], Result]) -> Result:
        """Return what `read` returns of an object's path.

        Raises:
            CheckpointDamaged: there is no such object, or no object can have this offset.
        """
        try:
            return read(f"{self._directory}/{name}")
        except CheckpointMissing:
            raise CheckpointDamaged(
                f"{self._location(name)} is missing; load an older step"
            ) from None
        except OverflowError:
            raise CheckpointDamaged(
                f"{self._location(name)}: byte {offset} is beyond the end of any object; load an "
                "older step"
            ) from None

    def _goes_past_cache(self, run: Sequence[Span]) -> bool:
        return (
            self._is_past_cache
            and self._record.may_go_past_cache
            and _nbytes(run) >= _LARGE_READ_NBYTES
        )

    def _threads_for(self, ordered: Sequence[Sequence[Span]]) -> int:
        """Return how many threads read these runs: small reads wait for storage more often."""
        others = sum(not self._goes_past_cache(run) for run in ordered)
        return min(PARALLEL_READS, _PARALLEL_LARGE_READS + others)

    def _read_run(self, run: Sequence[Span]) -> memoryview:
        """Return the bytes of a run, as many as there are, until this thread reads the next one."""
        name, first, nbytes = run[0].object_name, run[0].offset, _nbytes(run)
        if self._goes_past_cache(run):
            skipped = first % BLOCK_NBYTES
            whole_nbytes = round_up(skipped + nbytes, BLOCK_NBYTES)
            memory = self._memory_for(run, whole_nbytes)
            count = self._of_object(
                name,
                first,
                lambda path: self._storage.read_past_cache(path, memory, first - skipped),
            )
            if count is not None:
                self._record.add(count)
                return memory[skipped : min(count, skipped + nbytes)]
            self._record.may_go_past_cache = False
        memory = self._memory_for(run, nbytes)
        return memory[: self.read_into(name, [memory], first)]

    def _memory_for(self, run: Sequence[Span], nbytes: int) -> memoryview:
        try:
            return self._buffers.read.of_size(nbytes)[:nbytes].data
        except (MemoryError, OverflowError, ValueError) as error:
            # Metadata may claim cells of any size. That memory is short is no damage: nobody is to
            # go on from an older step because of it, or to remove this one.
            if isinstance(error, MemoryError) and self._holds(run[0], _nbytes(run)):
                raise CheckpointError(
                    f"{self._location(run[0].object_name)}: no memory for {nbytes} bytes of "
                    f"{run[0].key}; free some, or raise the limit of this process"
                ) from None
            raise CheckpointDamaged(
                f"{self._location(run[0].object_name)}: {nbytes} bytes of {run[0].key} cannot be "
                "read at once; load an older step"
            ) from None

    def _holds(self, span: Span, nbytes: int) -> bool:
        """Whether an object is as long as the metadata claims."""
        try:
            return (
                self._storage.size(f"{self._directory}/{span.object_name}") >= span.offset + nbytes
            )
        except CheckpointMissing:
            return False

    def _fetch(
        self,
        run: Sequence[Span],
        targets_by_span: TargetsBySpan,
        ahead: Sequence[Span] | None,
    ) -> None:
        """Read adjacent spans of one object, verify them, and give the requests their cells.

        Args:
            run: the spans.
            targets_by_span: the requests that need them; spans without any are only verified.
            ahead: the spans to prefetch.
        """
        if ahead is not None and not self._goes_past_cache(ahead):
            name = f"{self._directory}/{ahead[0].object_name}"
            self._storage.prefetch(name, ahead[0].offset, _nbytes(ahead))
        data = self._read_run(run)
        end = 0
        for span in run:
            piece = data[end : end + span.nbytes]
            end += span.nbytes
            if data.nbytes < end:
                raise CheckpointDamaged(
                    f"{self._location(span.object_name)} ends before byte {run[0].offset + end}, "
                    f"within the data of {span.key}; load an older step"
                )
            if not span.is_intact(piece):
                raise CheckpointDamaged(
                    f"{self._location(span.object_name)}: the data of {span.key} does not match "
                    "its checksum, its bytes were changed; load an older step"
                )
            self._copy_cells(span, piece, targets_by_span.get(span))

    def _copy_cells(
        self,
        span: Span,
        data: memoryview,
        targets_of_cells: Sequence[Sequence[Target]] | None,
    ) -> None:
        """Copy a span's cells to the requests that overlap them; without any, only decode them.

        Raises:
            CheckpointDamaged: a cell cannot be decoded.
        """
        tensor = self._tensors[span.key]
        if targets_of_cells is None and tensor.compression is None:
            return
        shape = (*tensor.cell, numpy_dtype(tensor.dtype).itemsize)
        end = 0
        for number, (place, size) in enumerate(zip(span.places, span.sizes, strict=True)):
            cell = np.frombuffer(data[end : end + size - CHECKSUM_NBYTES], np.uint8)
            end += size
            if tensor.compression is not None:
                cell = self._decompressed(span, cell)
            start = [position * extent for position, extent in zip(place, tensor.cell, strict=True)]
            for target in targets_of_cells[number] if targets_of_cells is not None else ():
                target.copy_from(start, cell.reshape(shape))

    def _decompressed(self, span: Span, cell: Bytes) -> Bytes:
        nbytes = self._tensors[span.key].cell_nbytes
        into = self._buffers.decompressed.of_size(nbytes)[:nbytes]
        try:
            decompress(cell, into)
        except ValueError as error:
            raise CheckpointDamaged(
                f"{self._location(span.object_name)}: the data of {span.key} matches its checksum "
                f"and cannot be decompressed: {error}; load an older step"
            ) from error
        return into

    def _location(self, name: str) -> str:
        return f"{self._storage.url}/{self._directory}/{name}"


def _nbytes(run: Sequence[Span]) -> int:
    return sum(span.nbytes for span in run)
