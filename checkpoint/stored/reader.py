"""Reader of stored checkpoints: lists the committed steps, and reads boxes of one, verified.

Only a directory with a manifest is a checkpoint. A cell is always read completely, because its
checksum covers all of it; it is verified while it is in the processor's cache, and copied from
there to the requests' memory.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cached_property

import crc32c
import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMissing,
    LayoutMismatch,
)
from keepstep.checkpoint.layout.boxes import Box, Json
from keepstep.checkpoint.layout.described import check_described
from keepstep.checkpoint.layout.dtypes import numpy_dtype
from keepstep.checkpoint.layout.source import BoxRequest, TensorSpec, slots_in
from keepstep.checkpoint.layout.wrapper_names import StoredNames
from keepstep.checkpoint.stored.cell_codec import CHECKSUM_NBYTES, decompress
from keepstep.checkpoint.stored.cell_index import CellIndex, Span, runs
from keepstep.checkpoint.stored.chunking import Cell, Chunk, StoredTensor, cells_over, chunks_over
from keepstep.checkpoint.stored.listings import DataObject, decode_chunk_parts, decode_part
from keepstep.checkpoint.stored.manifest import Manifest, StoredObject
from keepstep.checkpoint.stored.object_names import (
    CHUNKS,
    DOCUMENTS,
    MANIFEST,
    NEWEST,
    ROOT,
    StoredStep,
)
from keepstep.checkpoint.stored.storage import Storage, open_storage
from keepstep.checkpoint.stored.stored_json import decode, encode
from keepstep.checkpoint.stored.strict_json import from_strict_json
from keepstep.checkpoint.stored.zarr_metadata import parse_root, required_features

# Threads mostly wait for storage; many small tensors need many concurrent reads.
_PARALLEL_READS = 8
_PREFETCHED_RUNS = 16


@dataclass(frozen=True, slots=True)
class _Target:
    """A request's memory: an array of its box's shape with a last axis of an element's bytes."""

    box: Box
    values: npt.NDArray[np.uint8]

    def copy_from(self, start: Sequence[int], cell: npt.NDArray[np.uint8]) -> None:
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


class _Buffer:
    """Memory that is reused: new memory is mapped page by page."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def of_size(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the memory, cut to this size; the next call returns it too."""
        if self._memory.size < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes]


class _ReadBuffers(threading.local):
    """What each thread reads into, and what it decompresses a cell into."""

    def __init__(self) -> None:
        self.read = _Buffer()
        self.decompressed = _Buffer()


class _ReadCount:
    """Counts bytes that threads read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.nbytes = 0

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


_TargetsBySpan = Mapping[Span, Sequence[Sequence[_Target]]]
"""For each cell of a span, the requests that overlap it."""


def list_steps(url: str) -> tuple[StoredStep, ...]:
    """Return the committed checkpoints at a URL, newest first."""
    return _steps_after(open_storage(url), "")


def newest(url: str) -> StoredStep | None:
    """Return the newest committed checkpoint at a URL, or None if there is none.

    Its cost does not grow with what else is stored there, as that of `list_steps` does: writers
    note what they have committed, and only what comes after it is listed.
    """
    storage = open_storage(url)
    noted = noted_newest(storage)
    if noted is not None:
        later = _steps_after(storage, noted.directory)
        if later:
            return later[0]
        if storage.exists(f"{noted.directory}/{MANIFEST}"):
            return noted
    return next(iter(_steps_after(storage, "")), None)


def _steps_after(storage: Storage, directory: str) -> tuple[StoredStep, ...]:
    """Return the committed checkpoints whose directories come after this name, newest first."""
    parsed = map(StoredStep.parse, storage.directories_with(MANIFEST, after=directory))
    steps = (step for step in parsed if step is not None)
    return tuple(sorted(steps, key=lambda s: (s.step, s.generation), reverse=True))


def noted_newest(storage: Storage) -> StoredStep | None:
    """Return the checkpoint that was noted as the newest; a later one may have been committed."""
    try:
        content = decode(storage.read(NEWEST), NEWEST)
    except CheckpointError:
        return None
    directory = content.get("directory") if isinstance(content, dict) else None
    return StoredStep.parse(directory) if isinstance(directory, str) else None


class _Listings:
    """The writers' listings of a checkpoint, each read when a chunk that it has is needed.

    Args:
        index: where the listed objects are added.
        names: the listings' names by number.
        chunk_parts: for each tensor, the number of the listing that has its chunks; None where
            nothing tells, as in formats 1 and 2.
        read: reads a listing.
    """

    def __init__(
        self,
        index: CellIndex,
        names: Mapping[int, str],
        chunk_parts: Mapping[str, int | tuple[int, ...]] | None,
        read: Callable[[str], tuple[DataObject, ...]],
    ) -> None:
        self._index = index
        self._names = names
        self._chunk_parts = chunk_parts
        self._read = read
        self._lock = threading.Lock()
        self._added: set[int] = set()

    @property
    def numbers(self) -> Collection[int]:
        """The numbers of all listings."""
        return self._names.keys()

    def index_for(self, boxes: Sequence[tuple[str, Box]]) -> CellIndex:
        """Return an index that has all chunks that overlap these boxes of tensors.

        Raises:
            CheckpointDamaged: a listing is not what was written, or none has one of the chunks.
        """
        index = self.index_of(self.numbers_for(boxes))
        for key in {key for key, _ in boxes}:
            if self._chunk_parts is None or isinstance(self._chunk_parts.get(key), int):
                index.check_listed(key)
        return index

    def missing_for(self, boxes: Sequence[tuple[str, Box]]) -> list[int]:
        """Return the numbers of the listings that `index_for` would read. Raises as it does."""
        return self._missing(self.numbers_for(boxes))

    def numbers_for(self, boxes: Sequence[tuple[str, Box]]) -> Collection[int]:
        """Return the numbers of the listings that have the chunks that overlap these boxes.

        Raises:
            CheckpointDamaged: it is not known which listing has one of the chunks.
        """
        if self._chunk_parts is None:
            return self.numbers
        needed: set[int] = set()
        for key, box in boxes:
            tensor = self._index.tensors[key]
            numbers = self._chunk_parts.get(key)
            if isinstance(numbers, int):
                needed.add(numbers)
                continue
            # Checked before the chunks are gone over: a few bytes may claim any number of them.
            if len(numbers or ()) != math.prod(tensor.grid):
                raise CheckpointDamaged(
                    f"{self._index.where}{CHUNKS} has {len(numbers or ())} chunks of {key}, which "
                    f"has {math.prod(tensor.grid)}; load an older step"
                )
            for chunk in chunks_over(key, tensor.shape, tensor.chunk, box):
                assert numbers is not None, "a tensor with chunks has numbers, checked above"
                needed.add(numbers[tensor.position_of(chunk.place)])
        return needed

    def index_of(self, numbers: Collection[int]) -> CellIndex:
        """Return an index that has the listings of these numbers.

        Raises:
            CheckpointDamaged: a listing is missing, or is not what was written.
        """
        with self._lock:
            missing = self._missing(numbers)
            with ThreadPoolExecutor(_PARALLEL_READS) as pool:
                listings = pool.map(lambda number: self._read(self._names[number]), missing)
                for number, objects in zip(missing, listings, strict=True):
                    self._index.add(objects)
                    self._added.add(number)
            return self._index

    def _missing(self, numbers: Collection[int]) -> list[int]:
        missing = sorted(set(numbers) - self._added)
        if unknown := [number for number in missing if number not in self._names]:
            raise CheckpointDamaged(
                f"{self._index.where}{CHUNKS} names part {unknown[0]}, which the manifest does "
                "not have; load an older step"
            )
        return missing


@dataclass(frozen=True, slots=True)
class StoredMetadata:
    """The objects of a checkpoint that say which tensors and documents it has.

    Attributes:
        stored: the checkpoint.
        manifest: its manifest, as it is stored.
        objects: contents of objects that the manifest lists, by name; they match their checksums.
    """

    stored: StoredStep
    manifest: bytes
    objects: Mapping[str, bytes]

    @classmethod
    def read(
        cls,
        url: str,
        step: int | None = None,
        generation: int | None = None,
        *,
        has_chunks: bool = False,
    ) -> StoredMetadata:
        """Read what `StoredCheckpoint.of` needs.

        Args:
            url: as for `StoredCheckpoint.open`.
            step: as for `StoredCheckpoint.open`.
            generation: as for `StoredCheckpoint.open`.
            has_chunks: read what is needed to find chunks as well, if the format has it.

        Raises:
            CheckpointMissing: there is no such checkpoint.
            CheckpointDamaged: its metadata is not what was written.
            CheckpointTooNew: it has a newer format than this release reads.
        """
        storage = open_storage(url)
        chosen = _choose(url, step, generation)
        try:
            content = storage.read(f"{chosen.directory}/{MANIFEST}")
        except CheckpointMissing:
            raise _missing(url, step) from None
        manifest = _decode_manifest(url, chosen, content)
        names = [ROOT, DOCUMENTS]
        if has_chunks and manifest.find(CHUNKS) is not None:
            names.append(CHUNKS)
        with ThreadPoolExecutor(len(names)) as pool:
            contents = pool.map(lambda name: _verified(storage, manifest, name), names)
            return cls(chosen, content, dict(zip(names, contents, strict=True)))


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """One committed checkpoint, as a `Source`. Made by `open`, or by `of` from what was read."""

    storage: Storage
    stored: StoredStep
    manifest: Manifest
    stored_tensors: Mapping[str, StoredTensor]
    documents: Mapping[str, Json]
    _read_count: _ReadCount = field(default_factory=_ReadCount, compare=False, repr=False)
    _stored_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    _held: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def open(
        cls, url: str, step: int | None = None, generation: int | None = None
    ) -> StoredCheckpoint:
        """Open a checkpoint.

        Args:
            url: the URL that has it.
            step: its step; None for the newest.
            generation: its generation; None for the newest of the step.

        Raises:
            CheckpointMissing: there is no such checkpoint.
            CheckpointDamaged: its metadata is not what was written.
            CheckpointTooNew: it has a newer format than this release reads.
        """
        return cls.of(url, StoredMetadata.read(url, step, generation))

    @classmethod
    def of(cls, url: str, metadata: StoredMetadata) -> StoredCheckpoint:
        """Return the checkpoint that has this metadata. Raises as `open` does."""
        manifest = _decode_manifest(url, metadata.stored, metadata.manifest)
        where = f"{url}/{manifest.directory}"
        tensors = parse_root(metadata.objects[ROOT], f"{where}/{ROOT}")
        if unnamed := set(required_features(tensors)) - set(manifest.required):
            raise CheckpointDamaged(
                f"{where}/{ROOT} needs {', '.join(sorted(unnamed))}, which the manifest does not "
                "require; load an older step"
            )
        documents = decode(metadata.objects[DOCUMENTS], f"{where}/{DOCUMENTS}")
        try:
            if manifest.attempt is not None:
                documents = from_strict_json(documents)
        except RecursionError:
            raise CheckpointDamaged(f"{where}/{DOCUMENTS} is nested too deep") from None
        if not isinstance(documents, dict):
            raise CheckpointDamaged(f"{where}/{DOCUMENTS} is not a JSON object; load an older step")
        specs = {key: TensorSpec(tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
        try:
            check_described(documents, specs)
        except ValueError as error:
            raise CheckpointDamaged(f"{where}/{DOCUMENTS}: {error}; load an older step") from error
        return cls(
            storage=open_storage(url),
            stored=metadata.stored,
            manifest=manifest,
            stored_tensors=tensors,
            documents=documents,
            _held={name: data for name, data in metadata.objects.items() if name == CHUNKS},
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
        return {
            key: TensorSpec(tensor.dtype, tensor.shape)
            for key, tensor in self.stored_tensors.items()
        }

    def named_for(self, parameters: Collection[str]) -> StoredCheckpoint:
        """Return the checkpoint with its tensors named as those of a model with these parameters.

        Older releases stored some names of wrappers, such as `DistributedDataParallel`, as well.
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
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            names = list(self.manifest.part_names().values())
            return dict(zip(names, pool.map(self._read_part, names), strict=True))

    @property
    def cell_index(self) -> CellIndex:
        """The index of all cells, from all verified listings.

        Raises:
            CheckpointDamaged: a listing is not what was written.
        """
        return self._listings.index_of(self._listings.numbers)

    def locate(self, boxes: Sequence[tuple[str, Box]]) -> CellIndex:
        """Return an index that finds the cells of these boxes of tensors.

        It reads the listings that it needs and that were not read before.

        Raises:
            CheckpointDamaged: a listing is not what was written, or none has one of the chunks.
        """
        return self._listings.index_for([(self._stored_key(key), box) for key, box in boxes])

    def missing_listings(self, boxes: Sequence[tuple[str, Box]]) -> list[int]:
        """Return the numbers of the listings that `locate` would read. Raises as it does."""
        return self._listings.missing_for([(self._stored_key(key), box) for key, box in boxes])

    def hold(self, entry: StoredObject, content: bytes) -> None:
        """Take a listing that another rank has read, so that it is not read here when needed.

        Args:
            entry: its entry in the manifest.
            content: what the other rank has read.

        Raises:
            CheckpointDamaged: they do not match.
        """
        _check(self._location(entry.name), entry, content)
        self._held[entry.name] = content

    @cached_property
    def _listings(self) -> _Listings:
        chunk_parts = None
        if self.manifest.find(CHUNKS) is not None:
            chunk_parts = decode_chunk_parts(self._take(CHUNKS), self._location(CHUNKS))
        index = CellIndex(self._tensors_as_stored, self._location(""))
        return _Listings(index, self.manifest.part_names(), chunk_parts, self._read_part)

    @cached_property
    def _tensors_as_stored(self) -> Mapping[str, StoredTensor]:
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
        """Bytes of tensors, with their checksums, that this object has read from storage."""
        return self._read_count.nbytes

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

    def read(self, requests: Sequence[BoxRequest]) -> None:
        """See `Source.read`. Each cell is read once for all requests, adjacent ones together."""
        wanted: dict[tuple[str, tuple[int, ...]], tuple[Chunk, dict[Cell, list[_Target]]]] = {}
        for request in requests:
            if request.key not in self.stored_tensors:
                raise LayoutMismatch(f"{request.key}: not in {self.storage.url}, step {self.step}")
        index = self.locate([(request.key, request.box) for request in requests])
        for request in requests:
            tensor = self.stored_tensors[request.key]
            shape = (*request.box.shape, numpy_dtype(tensor.dtype).itemsize)
            target = _Target(request.box, np.frombuffer(request.into, np.uint8).reshape(shape))
            key = self._stored_key(request.key)
            for chunk in chunks_over(key, tensor.shape, tensor.chunk, request.box):
                _, cells = wanted.setdefault((chunk.key, chunk.place), (chunk, defaultdict(list)))
                for cell in cells_over(tensor, chunk, request.box):
                    cells[cell].append(target)
        targets_by_span: dict[Span, list[list[_Target]]] = {}
        for chunk, cells in wanted.values():
            ordered = sorted(cells)
            targets = (cells[cell] for cell in ordered)
            for span in index.find(chunk, ordered):
                targets_by_span[span] = list(itertools.islice(targets, len(span.places)))
        buffers = _ReadBuffers()
        ordered_runs = list(runs(targets_by_span))
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            futures = []
            for number, run in enumerate(ordered_runs):
                # A run is prefetched before the runs ahead of it have all been read, so that the
                # device is never idle.
                ahead = (
                    ordered_runs[number + _PREFETCHED_RUNS]
                    if number + _PREFETCHED_RUNS < len(ordered_runs)
                    else None
                )
                futures.append(pool.submit(self._fetch, run, targets_by_span, buffers, ahead))
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()

    def verify(self, report: Callable[[int], None] = lambda nbytes: None) -> None:
        """Read every byte and check it against the checksums.

        Args:
            report: called with the number of bytes after each read.

        Raises:
            CheckpointDamaged: an object is not as it was written.
        """
        buffers, index = _ReadBuffers(), self.cell_index
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            futures = {
                pool.submit(self._fetch, run, {}, buffers, None): run for run in runs(index.spans())
            }
            try:
                for future in as_completed(futures):
                    future.result()
                    report(sum(span.nbytes for span in futures[future]))
            finally:
                for future in futures:
                    future.cancel()
        for item in index.objects:
            # A read past the object's recorded end must return nothing.
            if self._read(item.name, [memoryview(bytearray(1))], item.nbytes):
                raise CheckpointDamaged(
                    f"{self._location(item.name)} is longer than the {item.nbytes} bytes in its "
                    "listing; load an older step"
                )
        for entry in self.manifest.objects:
            if not entry.is_part:
                self.verified(entry.name)
        root = decode(self.verified(ROOT), self._location(ROOT))
        nodes = root["consolidated_metadata"]["metadata"]
        for key, tensor in self.stored_tensors.items():
            name = f"{key}/{ROOT}"
            if not tensor.is_packed and self._read_object(name) != encode(nodes[key]):
                raise CheckpointDamaged(f"{self._location(name)} was changed; load an older step")

    def verified(self, name: str) -> bytes:
        """Return the content of an object that the manifest lists, checked against its entry.

        Raises:
            CheckpointDamaged: the object is not what was written.
        """
        return _verified(self.storage, self.manifest, name)

    def _fetch(
        self,
        run: Sequence[Span],
        targets_by_span: _TargetsBySpan,
        buffers: _ReadBuffers,
        ahead: Sequence[Span] | None,
    ) -> None:
        """Read adjacent spans of one object, verify them, and copy them to the targets.

        Args:
            run: the spans.
            targets_by_span: the requests that need them; spans without any are only verified.
            buffers: where to read into.
            ahead: the spans to prefetch.

        Raises:
            CheckpointDamaged: the object is missing, too short, or was changed.
        """
        if ahead is not None:
            name = f"{self.directory}/{ahead[0].object_name}"
            self.storage.prefetch(name, ahead[0].offset, sum(span.nbytes for span in ahead))
        nbytes = sum(span.nbytes for span in run)
        try:
            data = buffers.read.of_size(nbytes)
        except (MemoryError, OverflowError, ValueError):
            # Metadata may claim cells of any size.
            raise CheckpointDamaged(
                f"{self._location(run[0].object_name)}: {nbytes} bytes of {run[0].key} cannot be "
                "read at once; load an older step"
            ) from None
        count = self._read(run[0].object_name, [data.data], run[0].offset)
        end = 0
        for span in run:
            piece = data[end : end + span.nbytes]
            end += span.nbytes
            if count < end:
                raise CheckpointDamaged(
                    f"{self._location(span.object_name)} ends at byte {run[0].offset + count}, "
                    f"within the data of {span.key}; load an older step"
                )
            if not span.is_intact(piece.data):
                raise CheckpointDamaged(
                    f"{self._location(span.object_name)}: the data of {span.key} does not match "
                    "its checksum, its bytes were changed; load an older step"
                )
            is_compressed = self._tensors_as_stored[span.key].compression is not None
            if span in targets_by_span or is_compressed:
                self._copy_cells(span, piece, targets_by_span.get(span), buffers)

    def _copy_cells(
        self,
        span: Span,
        data: npt.NDArray[np.uint8],
        targets_of_cells: Sequence[Sequence[_Target]] | None,
        buffers: _ReadBuffers,
    ) -> None:
        """Copy a span's cells to the requests that overlap them; without any, only decode them.

        Raises:
            CheckpointDamaged: a cell cannot be decoded.
        """
        tensor = self._tensors_as_stored[span.key]
        shape = (*tensor.cell, numpy_dtype(tensor.dtype).itemsize)
        end = 0
        for number, (place, size) in enumerate(zip(span.places, span.sizes, strict=True)):
            cell = data[end : end + size - CHECKSUM_NBYTES]
            end += size
            if tensor.compression is not None:
                cell = self._decompressed(span, cell, buffers)
            start = [position * extent for position, extent in zip(place, tensor.cell, strict=True)]
            for target in targets_of_cells[number] if targets_of_cells is not None else ():
                target.copy_from(start, cell.reshape(shape))

    def _decompressed(
        self, span: Span, cell: npt.NDArray[np.uint8], buffers: _ReadBuffers
    ) -> npt.NDArray[np.uint8]:
        into = buffers.decompressed.of_size(self._tensors_as_stored[span.key].cell_nbytes)
        try:
            decompress(cell, into)
        except ValueError as error:
            raise CheckpointDamaged(
                f"{self._location(span.object_name)}: the data of {span.key} matches its checksum "
                f"and cannot be decompressed: {error}; load an older step"
            ) from error
        return into

    def _read(self, name: str, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            count = self.storage.read_into(f"{self.directory}/{name}", buffers, offset)
            self._read_count.add(count)
            return count
        except CheckpointMissing:
            raise CheckpointDamaged(
                f"{self._location(name)} is missing; load an older step"
            ) from None
        except OverflowError:
            raise CheckpointDamaged(
                f"{self._location(name)}: byte {offset} is beyond the end of any object; load an "
                "older step"
            ) from None

    def _read_object(self, name: str) -> bytes:
        try:
            return self.storage.read(f"{self.directory}/{name}")
        except CheckpointMissing:
            raise CheckpointDamaged(
                f"{self._location(name)} is missing; load an older step"
            ) from None

    def _location(self, name: str) -> str:
        return f"{self.storage.url}/{self.directory}/{name}"


def _choose(url: str, step: int | None, generation: int | None) -> StoredStep:
    """Return the newest checkpoint of this step and generation, if these are given.

    Raises:
        CheckpointMissing: there is none.
    """
    if step is not None and generation is not None:
        try:
            return StoredStep(step, generation)
        except ValueError:
            raise _missing(url, step) from None
    if step is None and generation is None:
        chosen = newest(url)
    else:
        matching = (
            stored
            for stored in list_steps(url)
            if step in (None, stored.step) and generation in (None, stored.generation)
        )
        chosen = next(matching, None)
    if chosen is None:
        raise _missing(url, step)
    return chosen


def _missing(url: str, step: int | None) -> CheckpointMissing:
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    present = ", ".join(str(stored.step) for stored in list_steps(url)[:8]) or "none"
    return CheckpointMissing(f"{url}: there is no {wanted} (steps there: {present})")


def _verified(storage: Storage, manifest: Manifest, name: str) -> bytes:
    where = f"{storage.url}/{manifest.directory}/{name}"
    entry = manifest.find(name)
    if entry is None:
        raise CheckpointDamaged(f"{where} is not in the manifest; load an older step")
    try:
        data = storage.read(f"{manifest.directory}/{name}", entry.nbytes)
    except CheckpointMissing:
        raise CheckpointDamaged(f"{where} is missing; load an older step") from None
    _check(where, entry, data)
    return data


def _check(where: str, entry: StoredObject, data: bytes) -> None:
    """Check an object's content against its entry in the manifest."""
    if len(data) != entry.nbytes:
        raise CheckpointDamaged(
            f"{where} has {len(data)} bytes, not the {entry.nbytes} in the manifest; "
            "load an older step"
        )
    if crc32c.crc32c(data) != entry.crc32c:
        raise CheckpointDamaged(
            f"{where} does not match its checksum, its bytes were changed; load an older step"
        )


def _decode_manifest(url: str, stored: StoredStep, content: bytes) -> Manifest:
    where = f"{url}/{stored.directory}/{MANIFEST}"
    manifest = Manifest.decode(content, where)
    if (manifest.step, manifest.generation) != (stored.step, stored.generation):
        raise CheckpointDamaged(
            f"{where} belongs to step {manifest.step}, generation {manifest.generation}; "
            "was it copied here? load an older step"
        )
    return manifest
