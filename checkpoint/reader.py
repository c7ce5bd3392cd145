"""Reading a checkpoint: which steps are there, and any boxes of one of them, every byte verified.

Only a directory with a manifest is a checkpoint. A cell is read whole, for its checksum covers it whole;
where it fills a part of the caller's memory that lies in one piece, it is read straight into that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property

import crc32c
import numpy as np
import numpy.typing as npt

from checkpoint.chunking import Cell, Chunk, StoredTensor, cells_over, chunks_over
from checkpoint.directory import Directory, Span, runs
from checkpoint.dtypes import numpy_dtype
from checkpoint.errors import CheckpointDamaged, CheckpointMissing, LayoutMismatch
from checkpoint.format import (
    DOCUMENTS,
    MANIFEST,
    ROOT,
    DataObject,
    Manifest,
    StoredStep,
    array_metadata,
    chunk_name,
    decode,
    decode_part,
    encode,
    parse_root,
)
from checkpoint.layout import Box, Json
from checkpoint.source import BoxRequest, TensorSpec
from checkpoint.storage import Storage, open_storage

# Threads mostly wait for storage; many small tensors need many reads under way.
_PARALLEL_READS = 16

_Uses = dict[Span, tuple[Box, Sequence[BoxRequest]]]
"""What a reader wants: for each cell that it needs, the cell's box and the requests that overlap it."""


def list_steps(url: str) -> tuple[StoredStep, ...]:
    """Return the committed checkpoints at a URL, newest first; none if there is nothing."""
    found = map(StoredStep.parse, open_storage(url).directories_with(MANIFEST))
    return tuple(sorted((step for step in found if step), key=lambda s: (s.step, s.generation), reverse=True))


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
    def open(cls, url: str, step: int | None = None, generation: int | None = None) -> StoredCheckpoint:
        """Open a step, or the newest; of several generations of it that one, or the newest.

        Raises:
            CheckpointMissing: it is not there.
            CheckpointDamaged: its metadata is not what was written.
        """
        steps = list_steps(url)
        fitting = (s for s in steps if step in (None, s.step) and generation in (None, s.generation))
        chosen = next(fitting, None)
        if chosen is None:
            what = "checkpoint" if step is None else f"checkpoint of step {step}"
            have = ", ".join(str(stored.step) for stored in steps[:8]) or "none"
            raise CheckpointMissing(f"{url}: there is no {what} (steps there: {have})")
        storage = open_storage(url)
        where = f"{url}/{chosen.directory}"
        manifest = Manifest.decode(storage.read(f"{chosen.directory}/{MANIFEST}"), f"{where}/{MANIFEST}")
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
        return {key: TensorSpec(tensor.dtype, tensor.shape) for key, tensor in self.stored_tensors.items()}

    @cached_property
    def directory(self) -> Directory:
        """Where every cell lies, from the verified listings.

        Raises:
            CheckpointDamaged: a listing is not what was written.
        """
        objects: list[DataObject] = []
        for name in self.manifest.part_names():
            where = f"{self.storage.url}/{self.stored.directory}/{name}"
            objects += decode_part(_verified(self.storage, self.stored, self.manifest, name), where)
        return Directory.of(self.stored_tensors, objects)

    def read(self, requests: Sequence[BoxRequest]) -> None:
        """See `Source.read`. Each cell is read once, whoever needs parts of it; neighbours in one go."""
        wanted: dict[tuple[Chunk, Cell], list[BoxRequest]] = defaultdict(list)
        for request in requests:
            tensor = self.stored_tensors.get(request.key)
            if tensor is None:
                raise LayoutMismatch(f"{request.key}: not in {self.storage.url}, step {self.step}")
            for chunk in chunks_over(request.key, tensor.shape, tensor.chunk, request.box):
                for cell in cells_over(tensor, chunk, request.box):
                    wanted[chunk, cell].append(request)
        uses: _Uses = {}
        for (chunk, cell), wanting in wanted.items():
            span = self.directory.find(chunk, cell)
            if span is None:
                raise CheckpointDamaged(
                    f"{self.storage.url}/{self.stored.directory}/{chunk_name(chunk.key, chunk.place)}: {chunk.key} needs "
                    "this chunk and no listing has it; load an older step"
                )
            uses[span] = (cell.box, wanting)
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            futures = [pool.submit(self._fetch, run, uses) for run in runs(uses)]
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
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            futures = {pool.submit(self._fetch, run, {}): run for run in runs(self.directory.spans())}
            try:
                for future in as_completed(futures):
                    future.result()
                    report(sum(span.nbytes for span in futures[future]))
            finally:
                for future in futures:
                    future.cancel()
        for item in self.directory.objects:
            # A byte more than there should be must not be there.
            if self._read(item.name, [memoryview(bytearray(1))], item.nbytes):
                raise CheckpointDamaged(
                    f"{self._where(item.name)} is longer than the manifest says; load an older step"
                )
        for key, tensor in self.stored_tensors.items():
            name = f"{key}/{ROOT}"
            if not tensor.is_packed and self._whole(name) != encode(array_metadata(key, tensor)):
                raise CheckpointDamaged(f"{self._where(name)} was changed; load an older step")

    def verified(self, name: str) -> bytes:
        """Return an object that the manifest names, checked against it.

        Raises:
            CheckpointDamaged: it is not what was written.
        """
        return _verified(self.storage, self.stored, self.manifest, name)

    def _fetch(self, run: Sequence[Span], uses: _Uses) -> None:
        """Read neighbouring spans of one object, and copy from them what they are needed for."""
        buffers: list[memoryview] = []
        copies: list[tuple[Span, npt.NDArray[np.uint8]]] = []
        for span in run:
            into = self._straight(span, uses)
            if into is None:
                tensor = self.stored_tensors[span.key]
                values = np.empty((*tensor.cell, numpy_dtype(tensor.dtype).itemsize), np.uint8)
                copies.append((span, values))
                into = values.reshape(-1).data
            buffers += [into, memoryview(bytearray(len(span.trailer)))]
        count = self._read(run[0].object_name, buffers, run[0].offset)
        start = 0
        for span, payload, trailer in zip(run, buffers[::2], buffers[1::2], strict=True):
            start += span.nbytes
            if count < start:
                raise CheckpointDamaged(
                    f"{self._where(span.object_name)} ends at byte {run[0].offset + count}, within what it holds of "
                    f"{span.key}; load an older step"
                )
            if crc32c.crc32c(payload) != span.crc32c or trailer != span.trailer:
                raise CheckpointDamaged(
                    f"{self._where(span.object_name)}: what it holds of {span.key} does not match its checksum, its bytes "
                    "were changed; load an older step"
                )
        for span, values in copies:
            if span in uses:
                box, requests = uses[span]
                for common, target in _targets(box, requests, values.shape[-1]):
                    target[...] = values[common.within(box).slices]

    def _straight(self, span: Span, uses: _Uses) -> memoryview | None:
        """Return the caller's memory if the cell is one piece of it and nobody else needs the cell."""
        tensor = self.stored_tensors[span.key]
        box, requests = uses.get(span, (None, ()))
        if box is None or len(requests) != 1 or box.shape != tensor.cell:
            return None
        ((common, target),) = _targets(box, requests, numpy_dtype(tensor.dtype).itemsize)
        return target.reshape(-1).data if common == box and target.flags.c_contiguous else None

    def _read(self, name: str, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            return self.storage.read_into(f"{self.stored.directory}/{name}", buffers, offset)
        except CheckpointMissing:
            raise CheckpointDamaged(f"{self._where(name)} is gone; load an older step") from None

    def _whole(self, name: str) -> bytes:
        try:
            return self.storage.read(f"{self.stored.directory}/{name}")
        except CheckpointMissing:
            raise CheckpointDamaged(f"{self._where(name)} is gone; load an older step") from None

    def _where(self, name: str) -> str:
        return f"{self.storage.url}/{self.stored.directory}/{name}"


def _targets(box: Box, requests: Sequence[BoxRequest], itemsize: int) -> Iterator[tuple[Box, npt.NDArray[np.uint8]]]:
    """Yield what each request needs of a cell, with the part of its memory that this fills."""
    for request in requests:
        common = box.intersect(request.box)
        assert common is not None, "only cells that overlap a request are read"
        whole = np.frombuffer(request.into, np.uint8).reshape(*request.box.shape, itemsize)
        yield common, whole[common.within(request.box).slices]


def _verified(storage: Storage, step: StoredStep, manifest: Manifest, name: str) -> bytes:
    where = f"{storage.url}/{step.directory}/{name}"
    entry = manifest.find(name)
    if entry is None:
        raise CheckpointDamaged(f"{where} is not in the manifest; load an older step")
    try:
        data = storage.read(f"{step.directory}/{name}")
    except CheckpointMissing:
        raise CheckpointDamaged(f"{where} is gone; load an older step") from None
    if len(data) != entry.nbytes:
        raise CheckpointDamaged(f"{where} has {len(data)} bytes, the manifest says {entry.nbytes}; load an older step")
    if crc32c.crc32c(data) != entry.crc32c:
        raise CheckpointDamaged(f"{where} does not match its checksum, its bytes were changed; load an older step")
    return data
