"""Reader of stored checkpoints: opens one, and reads boxes of its tensors, verified."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointMissing, LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.described import check_described
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import BoxRequest, TensorSpec, slots_in
from keepstep.checkpoint.format.layout.wrapper_names import StoredNames, may_have_wrappers
from keepstep.checkpoint.format.stored.cell_index import CellIndex, Span
from keepstep.checkpoint.format.stored.cell_reads import (
    PARALLEL_READS,
    CellReads,
    ReadRecord,
    Target,
)
from keepstep.checkpoint.format.stored.chunking import (
    Cell,
    Chunk,
    StoredTensor,
    cells_over,
    chunks_over,
)
from keepstep.checkpoint.format.stored.listings import (
    DataObject,
    decode_chunk_parts,
    decode_part,
)
from keepstep.checkpoint.format.stored.manifest import Manifest
from keepstep.checkpoint.format.stored.metadata import (
    StoredMetadata,
    decode_manifest,
    read_verified,
)
from keepstep.checkpoint.format.stored.object_names import (
    CHUNKS,
    DOCUMENTS,
    ROOT,
    StoredStep,
)
from keepstep.checkpoint.format.stored.part_listings import PartListings
from keepstep.checkpoint.format.stored.storage import Storage
from keepstep.checkpoint.format.stored.stored_arrays import Specs, StoredArrays
from keepstep.checkpoint.format.stored.stored_json import decode, from_strict_json


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """One committed checkpoint, as a `Source`. Made by `open`, or by `of` from what was read."""

    storage: Storage
    stored: StoredStep
    manifest: Manifest
    stored_tensors: Mapping[str, StoredTensor]
    documents: Mapping[str, Json]
    _read_record: ReadRecord = field(default_factory=ReadRecord, compare=False, repr=False)
    _stored_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    _held: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def open(
        cls, storage: Storage, step: int | None = None, generation: int | None = None
    ) -> StoredCheckpoint:
        """Open a checkpoint.

        Args:
            storage: has it.
            step: its step; None for the newest.
            generation: its generation; None for the newest of the step.

        Raises:
            CheckpointMissing: there is no such checkpoint.
            CheckpointDamaged: its metadata is not what was written.
            CheckpointTooNew: it has a newer format than this release reads.
        """
        return cls.of(storage, StoredMetadata.read(storage, step, generation))

    @classmethod
    def of(
        cls, storage: Storage, metadata: StoredMetadata, *, rank: int = 0, world_size: int = 1
    ) -> StoredCheckpoint:
        """Return the checkpoint that has this metadata.

        Args:
            storage: has it.
            metadata: its metadata.
            rank: which of the ranks that do so with the same metadata this one is. Each checks a
                part of what the documents say of tensors, and on a failure all must raise.
            world_size: the number of these ranks.

        Raises:
            CheckpointError: as `open` does.
        """
        manifest = decode_manifest(storage, metadata.stored, metadata.manifest)
        where = f"{storage.url}/{manifest.directory}"
        tensors = StoredArrays(metadata.objects[ROOT], manifest.required, f"{where}/{ROOT}")
        documents = decode(metadata.objects[DOCUMENTS], f"{where}/{DOCUMENTS}")
        try:
            documents = from_strict_json(documents)
        except RecursionError:
            raise CheckpointDamaged(f"{where}/{DOCUMENTS} is nested too deep") from None
        if not isinstance(documents, dict):
            raise CheckpointDamaged(f"{where}/{DOCUMENTS} is not a JSON object; load an older step")
        try:
            check_described(documents, Specs(tensors), rank=rank, world_size=world_size)
        except ValueError as error:
            raise CheckpointDamaged(f"{where}/{DOCUMENTS}: {error}; load an older step") from error
        return cls(
            storage=storage,
            stored=metadata.stored,
            manifest=manifest,
            stored_tensors=tensors,
            documents=documents,
            _held={
                name: data
                for name, data in metadata.objects.items()
                if name not in (ROOT, DOCUMENTS)
            },
        )

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.stored.step

    @property
    def directory(self) -> str:
        """Name of the directory, under the URL, that has the objects: the root of Zarr's."""
        return self.manifest.directory

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor by key."""
        return Specs(self.stored_tensors)

    def named_for(self, parameters: Collection[str]) -> StoredCheckpoint:
        """Return the checkpoint with its tensors named as those of a model with these parameters.

        A conversion keeps the names of wrappers that it cannot tell from the model's own, such as
        that of `DistributedDataParallel`.
        """
        names = StoredNames.of(self.stored_tensors, parameters)
        if not names.keys:
            return self
        return replace(
            self,
            stored_tensors=names.renamed(self.stored_tensors),
            documents=names.documents(self.documents),
            _stored_keys=names.keys,
        )

    @property
    def may_be_renamed(self) -> bool:
        """Whether `named_for` may depend on the parameters' names or change a tensor's."""
        return may_have_wrappers(self.stored_tensors)

    def slots(self, parameters: Collection[str]) -> Mapping[str, Mapping[str, TensorSpec]]:
        """See `Source.slots`."""
        return slots_in(self.tensors, parameters)

    def known_keys(self) -> Collection[str]:
        """See `Source.known_keys`: all of them."""
        return self.tensors.keys()

    def parts(self) -> dict[str, tuple[DataObject, ...]]:
        """Return the data objects that each writer listed, by the listing's name.

        Raises:
            CheckpointDamaged: a listing is not what was written.
        """
        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            names = list(self.manifest.part_names().values())
            return dict(zip(names, pool.map(self._read_part, names), strict=True))

    @property
    def cell_index(self) -> CellIndex:
        """The index of all cells, from all verified listings.

        Raises:
            CheckpointDamaged: a listing is not what was written.
        """
        return self._listings.index_of(self._listings.numbers)

    def locate(self, boxes: Iterable[tuple[str, Box]]) -> CellIndex:
        """Return an index that finds the cells of these boxes of tensors.

        It reads the listings that it needs and that were not read before.

        Raises:
            CheckpointDamaged: a listing is not what was written, or none has one of the chunks.
        """
        stored = [(self._stored_key(key), box) for key, box in boxes]
        return self._listings.index_for(stored)

    @cached_property
    def _listings(self) -> PartListings:
        index = CellIndex(self._tensors_as_stored, self._location(""))
        return PartListings(
            index,
            self.manifest.part_names(),
            decode_chunk_parts(self._take(CHUNKS), self._location(CHUNKS)),
            self._read_part,
        )

    @cached_property
    def _tensors_as_stored(self) -> Mapping[str, StoredTensor]:
        if not self._stored_keys:
            return self.stored_tensors
        return {self._stored_key(key): tensor for key, tensor in self.stored_tensors.items()}

    def _stored_key(self, key: str) -> str:
        return self._stored_keys.get(key, key)

    def _read_part(self, name: str) -> tuple[DataObject, ...]:
        return decode_part(self._take(name), self._location(name))

    def _take(self, name: str) -> bytes:
        """Return an object that is parsed once: as another rank has read it, or from storage."""
        held = self._held.pop(name, None)
        return self.verified(name) if held is None else held

    @property
    def read_nbytes(self) -> int:
        """Bytes that this object has read from storage for tensors.

        These are theirs, with checksums, and what else is in the blocks that large reads begin and
        end in.
        """
        return self._read_record.nbytes

    def location(self, chunk: Chunk) -> tuple[str, int]:
        """Return the object that has a chunk, and the offset in bytes at which the chunk begins.

        Raises:
            CheckpointDamaged: no listing has the chunk.
        """
        tensor = self.stored_tensors[chunk.key]
        place = tuple(n // cell for n, cell in zip(chunk.box.offset, tensor.cell, strict=True))
        index = self.locate([(chunk.key, chunk.box)])
        stored = replace(chunk, key=self._stored_key(chunk.key))
        span = next(index.find(stored, [Cell(0, place)]))
        return span.object_name, span.offset

    def read(self, requests: Sequence[BoxRequest], *, past_cache: bool = False) -> None:
        """See `Source.read`. Each cell is read once for all requests, adjacent ones together.

        Args:
            requests: what to read.
            past_cache: leave nothing of large reads in the system's memory.
        """
        wanted: dict[tuple[str, tuple[int, ...]], tuple[Chunk, dict[Cell, list[Target]]]] = {}
        for request in requests:
            if request.key not in self.stored_tensors:
                raise LayoutMismatch(f"{request.key}: not in {self.storage.url}, step {self.step}")
        index = self.locate([(request.key, request.box) for request in requests])
        for request in requests:
            tensor = self.stored_tensors[request.key]
            shape = (*request.box.shape, numpy_dtype(tensor.dtype).itemsize)
            target = Target(request.box, np.frombuffer(request.into, np.uint8).reshape(shape))
            key = self._stored_key(request.key)
            for chunk in chunks_over(key, tensor.shape, tensor.chunk, request.box):
                _, cells = wanted.setdefault((chunk.key, chunk.place), (chunk, defaultdict(list)))
                for cell in cells_over(tensor, chunk, request.box):
                    cells[cell].append(target)
        targets_by_span: dict[Span, list[list[Target]]] = {}
        for chunk, cells in wanted.values():
            ordered = sorted(cells)
            targets = (cells[cell] for cell in ordered)
            for span in index.find(chunk, ordered):
                targets_by_span[span] = list(itertools.islice(targets, len(span.places)))
        self._reads(past_cache=past_cache).read(targets_by_span)

    def verify(self, report: Callable[[int], None] = lambda nbytes: None) -> None:
        """Read every byte and check it against the checksums.

        Args:
            report: called with the number of bytes after each read.

        Raises:
            CheckpointDamaged: an object is not as it was written.
        """
        reads, index = self._reads(past_cache=True), self.cell_index
        reads.verify(index.spans(), report)
        for item in index.objects:
            # A read past the object's recorded end must return nothing.
            if reads.read_into(item.name, [memoryview(bytearray(1))], item.nbytes):
                raise CheckpointDamaged(
                    f"{self._location(item.name)} is longer than the {item.nbytes} bytes in its "
                    "listing; load an older step"
                )
        for entry in self.manifest.objects:
            if not entry.is_part:
                self.verified(entry.name)
        arrays = StoredArrays(self.verified(ROOT), self.manifest.required, self._location(ROOT))
        for key, tensor in arrays.items():
            name = f"{key}/{ROOT}"
            if not tensor.is_packed and self._read_object(name) != arrays.encoded(key):
                raise CheckpointDamaged(f"{self._location(name)} was changed; load an older step")

    def verified(self, name: str) -> bytes:
        """Return the content of an object that the manifest lists, checked against its entry.

        Raises:
            CheckpointDamaged: the object is not what was written.
        """
        return read_verified(self.storage, self.manifest, name)

    def _reads(self, *, past_cache: bool) -> CellReads:
        return CellReads(
            self.storage,
            self.directory,
            self._tensors_as_stored,
            self._read_record,
            past_cache=past_cache,
        )

    def _read_object(self, name: str) -> bytes:
        try:
            return self.storage.read(f"{self.directory}/{name}")
        except CheckpointMissing:
            raise CheckpointDamaged(
                f"{self._location(name)} is missing; load an older step"
            ) from None

    def _location(self, name: str) -> str:
        return f"{self.storage.url}/{self.directory}/{name}"
