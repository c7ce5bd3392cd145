"""Reading a checkpoint: which steps are there, and any boxes of one of them, every byte verified.

Only a directory with a manifest is a checkpoint. A chunk is read whole, for its checksum covers it whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import crc32c
import numpy as np

from checkpoint.chunking import StoredTensor, chunks_of
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
from checkpoint.layout import Box, Json
from checkpoint.source import BoxRequest, TensorSpec
from checkpoint.storage import Storage, open_storage, verify

_PARALLEL_READS = 8


def list_steps(url: str) -> tuple[StoredStep, ...]:
    """Return the committed checkpoints at a URL, newest first; none if there is nothing."""
    found = set()
    for name in open_storage(url).names("step-"):
        directory, _, rest = name.partition("/")
        step = StoredStep.parse(directory)
        if step is not None and rest == MANIFEST:
            found.add(step)
    return tuple(sorted(found, key=lambda s: (s.step, s.generation), reverse=True))


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """One committed checkpoint, as a `Source`. Made by `open`."""

    storage: Storage
    stored: StoredStep
    manifest: Manifest
    stored_tensors: Mapping[str, StoredTensor]
    documents: Mapping[str, Json]

    @classmethod
    def open(cls, url: str, step: int | None = None) -> StoredCheckpoint:
        """Open a step, or the newest.

        Raises:
            CheckpointMissing: it is not there.
            CheckpointDamaged: its metadata is not what was written.
        """
        steps = list_steps(url)
        chosen = next((stored for stored in steps if step in (None, stored.step)), None)
        if chosen is None:
            what = "checkpoint" if step is None else f"checkpoint of step {step}"
            have = ", ".join(str(stored.step) for stored in steps[:8]) or "none"
            raise CheckpointMissing(f"{url}: there is no {what} (steps there: {have})")
        storage = open_storage(url)
        manifest_name = f"{chosen.directory}/{MANIFEST}"
        manifest = Manifest.decode(storage.read(manifest_name), manifest_name)
        root = _verified(storage, chosen, manifest, ROOT)
        documents = _verified(storage, chosen, manifest, DOCUMENTS)
        return cls(
            storage,
            chosen,
            manifest,
            parse_root(root, f"{chosen.directory}/{ROOT}"),
            decode(documents, f"{chosen.directory}/{DOCUMENTS}"),
        )

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.stored.step

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor."""
        return {key: TensorSpec(tensor.dtype, tensor.shape) for key, tensor in self.stored_tensors.items()}

    def objects(self) -> Mapping[str, StoredObject]:
        """Return every chunk's entry by name, from the verified listings.

        Raises:
            CheckpointDamaged: a listing is not what was written.
        """
        found = {}
        for name in self.manifest.part_names():
            listing = decode(_verified(self.storage, self.stored, self.manifest, name), name)
            for item in listing:
                entry = StoredObject.from_json(item)
                found[entry.name] = entry
        return found

    def read(self, requests: Sequence[BoxRequest]) -> None:
        """See `Source.read`. Each chunk is read once, whoever needs parts of it."""
        objects = self.objects()
        wanted: dict[tuple[str, tuple[int, ...]], list[BoxRequest]] = defaultdict(list)
        boxes: dict[tuple[str, tuple[int, ...]], Box] = {}
        for request in requests:
            tensor = self.stored_tensors.get(request.key)
            if tensor is None:
                raise LayoutMismatch(f"{request.key}: not in {self.storage.url}, step {self.step}")
            for chunk in chunks_of(request.key, tensor.shape, tensor.chunk):
                if chunk.box.intersect(request.box) is not None:
                    wanted[chunk.key, chunk.place].append(request)
                    boxes[chunk.key, chunk.place] = chunk.box

        def one(name: tuple[str, tuple[int, ...]]) -> None:
            key, place = name
            tensor = self.stored_tensors[key]
            values = self._chunk(key, place, objects)
            itemsize = numpy_dtype(tensor.dtype).itemsize
            array = values.reshape(*tensor.chunk, itemsize)
            for request in wanted[name]:
                common = boxes[name].intersect(request.box)
                assert common is not None, "only chunks that overlap a request are read"
                target = np.frombuffer(request.into, np.uint8).reshape(*request.box.shape, itemsize)
                target[common.within(request.box).slices] = array[common.within(boxes[name]).slices]

        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            for future in [pool.submit(one, name) for name in wanted]:
                future.result()

    def _chunk(
        self, key: str, place: tuple[int, ...], objects: Mapping[str, StoredObject]
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        name = chunk_name(key, place)
        where = f"{self.storage.url}/{self.stored.directory}/{name}"
        entry = objects.get(name)
        if entry is None:
            raise CheckpointDamaged(f"{where}: {key} needs this chunk and no listing has it; load an older step")
        try:
            data = self.storage.read(f"{self.stored.directory}/{name}")
        except CheckpointMissing:
            raise CheckpointDamaged(f"{where}: this chunk of {key} is gone; load an older step") from None
        payload = memoryview(data)[:-4]
        verify(data, entry.nbytes, entry.crc32c, crc32c.crc32c(payload), where)
        return np.frombuffer(payload, np.uint8)


def _verified(storage: Storage, step: StoredStep, manifest: Manifest, name: str) -> bytes:
    where = f"{storage.url}/{step.directory}/{name}"
    entry = manifest.find(name)
    if entry is None:
        raise CheckpointDamaged(f"{where} is not in the manifest; load an older step")
    try:
        data = storage.read(f"{step.directory}/{name}")
    except CheckpointMissing:
        raise CheckpointDamaged(f"{where} is gone; load an older step") from None
    verify(data, entry.nbytes, entry.crc32c, crc32c.crc32c(data), where)
    return data
