"""Reading a checkpoint: which steps are there, and any boxes of one of them, every byte verified.

Only a directory with a manifest is a checkpoint. A cell is read whole, for its checksum covers it whole, verified while it is in the
processor's cache, and copied from there to where it is wanted.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property

import crc32c
import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointMissing, LayoutMismatch
from keepstep.checkpoint.layout.boxes import Box, Json
from keepstep.checkpoint.layout.dtypes import numpy_dtype
from keepstep.checkpoint.layout.source import BoxRequest, TensorSpec
from keepstep.checkpoint.stored.cell_index import CellIndex, Span, runs
from keepstep.checkpoint.stored.chunking import Cell, Chunk, StoredTensor, cells_over, chunks_over
from keepstep.checkpoint.stored.format import (
    DOCUMENTS,
    MANIFEST,
    ROOT,
    DataObject,
    Manifest,
    StoredStep,
    array_metadata,
    decode,
    decode_part,
    encode,
    parse_root,
)
from keepstep.checkpoint.stored.storage import Storage, open_storage

# Threads mostly wait for storage; many small tensors need many reads under way.
_PARALLEL_READS = 8
_PREFETCHED_RUNS = 16


@dataclass(frozen=True, slots=True)
class _Target:
    """A request's memory, as an array of its box's shape with a last axis of one element's bytes."""

    box: Box
    values: npt.NDArray[np.uint8]

    def take(self, start: Sequence[int], cell: npt.NDArray[np.uint8]) -> None:
        """Copy what is wanted of a cell that begins at `start`."""
        source: list[slice] = []
        into: list[slice] = []
        # No boxes here: this runs for every cell.
        for begin, extent, offset, whole in zip(start, cell.shape, self.box.offset, self.box.shape):  # noqa: B905
            first, last = max(begin, offset), min(begin + extent, offset + whole)
            source.append(slice(first - begin, last - begin))
            into.append(slice(first - offset, last - offset))
        self.values[tuple(into)] = cell[tuple(source)]


class _Scratch(threading.local):
    """Memory of each thread to read into, the same again and again: fresh memory would have to be made, page by page."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return this many bytes, which whoever takes next in this thread gets as well."""
        if self._memory.size < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes]


_TargetsBySpan = Mapping[Span, Sequence[Sequence[_Target]]]
"""What a reader wants: for each cell of a span, the requests that overlap it."""


def list_steps(url: str) -> tuple[StoredStep, ...]:
    """Return the committed checkpoints at a URL, newest first; none if there is nothing."""
    found = map(StoredStep.parse, open_storage(url).directories_with(MANIFEST))
    return tuple(
        sorted((step for step in found if step), key=lambda s: (s.step, s.generation), reverse=True)
    )


def newest(url: str) -> StoredStep | None:
    """Return the newest committed checkpoint at a URL, if there is any."""
    return next(iter(list_steps(url)), None)


@dataclass(frozen=True)
class StoredCheckpoint:
    """One committed checkpoint, as a `Source`. Made by `open`."""

    storage: Storage
    stored: StoredStep
    manifest: Manifest
    stored_tensors: Mapping[str, StoredTensor]
    documents: Mapping[str, Json]

    @classmethod
    def open(
        cls, url: str, step: int | None = None, generation: int | None = None
    ) -> StoredCheckpoint:
        """Open a step, or the newest; of several generations of it that one, or the newest.

        Raises:
            CheckpointMissing: it is not there.
            CheckpointDamaged: its metadata is not what was written.
        """
        steps = list_steps(url)
        fitting = (
            s for s in steps if step in (None, s.step) and generation in (None, s.generation)
        )
        chosen = next(fitting, None)
        if chosen is None:
            what = "checkpoint" if step is None else f"checkpoint of step {step}"
            have = ", ".join(str(stored.step) for stored in steps[:8]) or "none"
            raise CheckpointMissing(f"{url}: there is no {what} (steps there: {have})")
        storage = open_storage(url)
        where = f"{url}/{chosen.directory}"
        manifest = Manifest.decode(
            storage.read(f"{chosen.directory}/{MANIFEST}"), f"{where}/{MANIFEST}"
        )
        if (manifest.step, manifest.generation) != (chosen.step, chosen.generation):
            raise CheckpointDamaged(
                f"{where}/{MANIFEST} belongs to step {manifest.step}, generation {manifest.generation}; "
                "was it copied here? load an older step"
            )
        tensors = parse_root(_verified(storage, chosen, manifest, ROOT), f"{where}/{ROOT}")
        documents = decode(_verified(storage, chosen, manifest, DOCUMENTS), f"{where}/{DOCUMENTS}")
        if not isinstance(documents, dict):
            raise CheckpointDamaged(f"{where}/{DOCUMENTS} is not a JSON object; load an older step")
        return cls(storage, chosen, manifest, tensors, documents)

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.stored.step

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor."""
        return {
            key: TensorSpec(tensor.dtype, tensor.shape)
            for key, tensor in self.stored_tensors.items()
        }

    @cached_property
    def cell_index(self) -> CellIndex:
        """Where every cell lies, from the verified listings.

        Raises:
            CheckpointDamaged: a listing is not what was written.
        """
        objects: list[DataObject] = []
        for name in self.manifest.part_names():
            where = f"{self.storage.url}/{self.stored.directory}/{name}"
            objects += decode_part(_verified(self.storage, self.stored, self.manifest, name), where)
        return CellIndex.of(
            self.stored_tensors, objects, f"{self.storage.url}/{self.stored.directory}/"
        )

    def read(self, requests: Sequence[BoxRequest]) -> None:
        """See `Source.read`. Each cell is read once, whoever needs parts of it; neighbours in one go."""
        wanted: dict[tuple[str, tuple[int, ...]], tuple[Chunk, dict[Cell, list[_Target]]]] = {}
        for request in requests:
            tensor = self.stored_tensors.get(request.key)
            if tensor is None:
                raise LayoutMismatch(f"{request.key}: not in {self.storage.url}, step {self.step}")
            shape = (*request.box.shape, numpy_dtype(tensor.dtype).itemsize)
            target = _Target(request.box, np.frombuffer(request.into, np.uint8).reshape(shape))
            for chunk in chunks_over(request.key, tensor.shape, tensor.chunk, request.box):
                _, cells = wanted.setdefault((chunk.key, chunk.place), (chunk, defaultdict(list)))
                for cell in cells_over(tensor, chunk, request.box):
                    cells[cell].append(target)
        uses: dict[Span, list[list[_Target]]] = {}
        for chunk, cells in wanted.values():
            ordered = sorted(cells)
            targets = (cells[cell] for cell in ordered)
            for span in self.cell_index.find(chunk, ordered):
                uses[span] = list(itertools.islice(targets, len(span.places)))
        scratch = _Scratch()
        ordered_runs = list(runs(uses))
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            futures = []
            for number, run in enumerate(ordered_runs):
                # Told before the last of those ahead of it is read, so that the device always has something to do.
                ahead = (
                    ordered_runs[number + _PREFETCHED_RUNS]
                    if number + _PREFETCHED_RUNS < len(ordered_runs)
                    else None
                )
                futures.append(pool.submit(self._fetch, run, uses, scratch, ahead))
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()

    def verify(self, report: Callable[[int], None] = lambda nbytes: None) -> None:
        """Read every byte and compare it with what was written; `report` hears of the bytes done.

        Raises:
            CheckpointDamaged: something is not as it was written.
        """
        scratch = _Scratch()
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            futures = {
                pool.submit(self._fetch, run, {}, scratch, None): run
                for run in runs(self.cell_index.spans())
            }
            try:
                for future in as_completed(futures):
                    future.result()
                    report(sum(span.nbytes for span in futures[future]))
            finally:
                for future in futures:
                    future.cancel()
        for item in self.cell_index.objects:
            # A byte more than there should be must not be there.
            if self._read(item.name, [memoryview(bytearray(1))], item.nbytes):
                raise CheckpointDamaged(
                    f"{self._location(item.name)} is longer than the manifest says; load an older step"
                )
        for key, tensor in self.stored_tensors.items():
            name = f"{key}/{ROOT}"
            if not tensor.is_packed and self._read_object(name) != encode(
                array_metadata(key, tensor)
            ):
                raise CheckpointDamaged(f"{self._location(name)} was changed; load an older step")

    def verified(self, name: str) -> bytes:
        """Return an object that the manifest names, checked against it.

        Raises:
            CheckpointDamaged: it is not what was written.
        """
        return _verified(self.storage, self.stored, self.manifest, name)

    def _fetch(
        self,
        run: Sequence[Span],
        uses: _TargetsBySpan,
        scratch: _Scratch,
        ahead: Sequence[Span] | None,
    ) -> None:
        """Read neighbouring spans of one object, and copy from them what they are needed for; `ahead` are read soon."""
        if ahead is not None:
            name = f"{self.stored.directory}/{ahead[0].object_name}"
            self.storage.prefetch(name, ahead[0].offset, sum(span.nbytes for span in ahead))
        data = scratch.take(sum(span.nbytes for span in run))
        count = self._read(run[0].object_name, [data.data], run[0].offset)
        end = 0
        for span in run:
            piece = data[end : end + span.nbytes]
            end += span.nbytes
            if count < end:
                raise CheckpointDamaged(
                    f"{self._location(span.object_name)} ends at byte {run[0].offset + count}, within what it holds of "
                    f"{span.key}; load an older step"
                )
            if not span.is_intact(piece.data):
                raise CheckpointDamaged(
                    f"{self._location(span.object_name)}: what it holds of {span.key} does not match its checksum, its bytes "
                    "were changed; load an older step"
                )
            if span in uses:
                self._copy_cells(span, piece, uses[span])

    def _copy_cells(
        self, span: Span, data: npt.NDArray[np.uint8], uses: Sequence[Sequence[_Target]]
    ) -> None:
        """Copy a span's cells to where they are wanted."""
        tensor = self.stored_tensors[span.key]
        shape = (*tensor.cell, numpy_dtype(tensor.dtype).itemsize)
        stride = span.payload_nbytes + 4
        for number, (place, targets) in enumerate(zip(span.places, uses, strict=True)):
            cell = data[number * stride : number * stride + span.payload_nbytes].reshape(shape)
            start = [position * extent for position, extent in zip(place, tensor.cell, strict=True)]
            for target in targets:
                target.take(start, cell)

    def _read(self, name: str, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            return self.storage.read_into(f"{self.stored.directory}/{name}", buffers, offset)
        except CheckpointMissing:
            raise CheckpointDamaged(f"{self._location(name)} is gone; load an older step") from None

    def _read_object(self, name: str) -> bytes:
        try:
            return self.storage.read(f"{self.stored.directory}/{name}")
        except CheckpointMissing:
            raise CheckpointDamaged(f"{self._location(name)} is gone; load an older step") from None

    def _location(self, name: str) -> str:
        return f"{self.storage.url}/{self.stored.directory}/{name}"


def _verified(storage: Storage, step: StoredStep, manifest: Manifest, name: str) -> bytes:
    where = f"{storage.url}/{step.directory}/{name}"
    entry = manifest.find(name)
    if entry is None:
        raise CheckpointDamaged(f"{where} is not in the manifest; load an older step")
    try:
        data = storage.read(f"{step.directory}/{name}", entry.nbytes)
    except CheckpointMissing:
        raise CheckpointDamaged(f"{where} is gone; load an older step") from None
    if len(data) != entry.nbytes:
        raise CheckpointDamaged(
            f"{where} has {len(data)} bytes, the manifest says {entry.nbytes}; load an older step"
        )
    if crc32c.crc32c(data) != entry.crc32c:
        raise CheckpointDamaged(
            f"{where} does not match its checksum, its bytes were changed; load an older step"
        )
    return data
