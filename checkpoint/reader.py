"""Reading a checkpoint: which steps are there, and any boxes of one of them, every byte verified.

Only a directory with a manifest is a checkpoint. A chunk is read whole, for its checksum covers it whole;
where it fills a part of the caller's memory that lies in one piece, it is read straight into that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import crc32c
import numpy as np

from checkpoint.chunking import Chunk, StoredTensor, chunks_over
from checkpoint.dtypes import numpy_dtype
from checkpoint.errors import CheckpointDamaged, CheckpointMissing, LayoutMismatch
from checkpoint.format import (
    DOCUMENTS,
    MANIFEST,
    ROOT,
    Manifest,
    StoredObject,
    StoredStep,
    chunk_name,
    decode,
    parse_root,
)
from checkpoint.layout import Json
from checkpoint.source import BoxRequest, TensorSpec
from checkpoint.storage import Storage, open_storage

# Threads mostly wait for storage; many small tensors need many reads under way.
_PARALLEL_READS = 16


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
    def objects(self) -> Mapping[str, StoredObject]:
        """Every chunk's entry by name, from the verified listings.

        Raises:
            CheckpointDamaged: a listing is not what was written.
        """
        found: dict[str, StoredObject] = {}
        for name in self.manifest.part_names():
            where = f"{self.storage.url}/{self.stored.directory}/{name}"
            listing = decode(_verified(self.storage, self.stored, self.manifest, name), where)
            if not isinstance(listing, list):
                raise CheckpointDamaged(f"{where} is not a listing; load an older step")
            found.update((entry.name, entry) for entry in map(StoredObject.from_json, listing))
        return found

    def read(self, requests: Sequence[BoxRequest]) -> None:
        """See `Source.read`. Each chunk is read once, whoever needs parts of it."""
        wanted: dict[Chunk, list[BoxRequest]] = defaultdict(list)
        for request in requests:
            tensor = self.stored_tensors.get(request.key)
            if tensor is None:
                raise LayoutMismatch(f"{request.key}: not in {self.storage.url}, step {self.step}")
            for chunk in chunks_over(request.key, tensor.shape, tensor.chunk, request.box):
                wanted[chunk].append(request)
        objects = self.objects
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            futures = [
                pool.submit(self._fill, chunk, wanting, objects.get(chunk_name(chunk.key, chunk.place)))
                for chunk, wanting in wanted.items()
            ]
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()

    def _fill(self, chunk: Chunk, requests: Sequence[BoxRequest], entry: StoredObject | None) -> None:
        """Read a chunk, and copy from it what it is needed for."""
        tensor = self.stored_tensors[chunk.key]
        itemsize = numpy_dtype(tensor.dtype).itemsize
        targets = []
        for request in requests:
            common = chunk.box.intersect(request.box)
            assert common is not None, "only chunks that overlap a request are read"
            whole = np.frombuffer(request.into, np.uint8).reshape(*request.box.shape, itemsize)
            targets.append((common, whole[common.within(request.box).slices]))
        common, target = targets[0]
        if len(targets) == 1 and common.shape == tensor.chunk and target.flags.c_contiguous:
            self._read_chunk(chunk, entry, target.reshape(-1).data)
            return
        values = np.empty((*tensor.chunk, itemsize), np.uint8)
        self._read_chunk(chunk, entry, values.reshape(-1).data)
        for common, target in targets:
            target[...] = values[common.within(chunk.box).slices]

    def _read_chunk(self, chunk: Chunk, entry: StoredObject | None, payload: memoryview) -> None:
        name = chunk_name(chunk.key, chunk.place)
        where = f"{self.storage.url}/{self.stored.directory}/{name}"
        if entry is None:
            raise CheckpointDamaged(f"{where}: {chunk.key} needs this chunk and no listing has it; load an older step")
        trailer = bytearray(4)
        try:
            nbytes = self.storage.read_into(f"{self.stored.directory}/{name}", [payload, memoryview(trailer)])
        except CheckpointMissing:
            raise CheckpointDamaged(f"{where}: this chunk of {chunk.key} is gone; load an older step") from None
        if nbytes != payload.nbytes + len(trailer) or nbytes != entry.nbytes:
            raise CheckpointDamaged(
                f"{where}: this chunk of {chunk.key} has {nbytes} bytes, the manifest says {entry.nbytes}; "
                "load an older step"
            )
        if not crc32c.crc32c(payload) == entry.crc32c == int.from_bytes(trailer, "little"):
            raise CheckpointDamaged(
                f"{where}: this chunk of {chunk.key} does not match its checksum, its bytes were changed; "
                "load an older step"
            )


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
