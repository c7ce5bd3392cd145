"""Writes a checkpoint of any source in the universal format, part by part, so that it can go on.

The name of the attempt depends on what is converted, and into which tensors, so a conversion that
was interrupted is taken up by the next one of the same, and by no other. It reads what the parts
written before should have: if values of the source have changed meanwhile, they are written again.

A part is written by whoever is asked to, in this process or in another one, and what is known of it
is noted next to it. So processes share nothing but the storage.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from itertools import chain, count

import numpy as np

from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointExists,
    CheckpointMissing,
)
from keepstep.checkpoint.format.content_check import content_of
from keepstep.checkpoint.format.layout.boxes import Box, Entry, Json, ShardIndex
from keepstep.checkpoint.format.layout.content_digest import DIGEST, digest_document, sum_of
from keepstep.checkpoint.format.layout.documents import PROVENANCE, release_of
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import BoxRequest, Source, TensorSpec
from keepstep.checkpoint.format.stored.chunking import CHUNK_NBYTES, Chunk, plan_chunks
from keepstep.checkpoint.format.stored.manifest import Manifest, StoredObject
from keepstep.checkpoint.format.stored.metadata import StoredMetadata
from keepstep.checkpoint.format.stored.object_names import MANIFEST, Attempt, StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import Storage, open_storage
from keepstep.checkpoint.format.stored.stored_json import decode, encode, encode_strict
from keepstep.checkpoint.format.stored.writer import (
    PARALLEL_WRITES,
    commit,
    contents,
    is_closed,
    manifest_of,
    write_part,
)
from keepstep.checkpoint.format.stored.zarr_metadata import required_features

PART_NBYTES = 256 * 2**20
"""About how much is written at once; so much is written again after an interruption."""

THREAD_NBYTES = 3 * CHUNK_NBYTES
"""A chunk as it is read, once more as it is written, and what its reads of the source need."""

Report = Callable[[int], None]


class Task(StrEnum):
    """An action on a part."""

    WRITE = "write"
    CHECK = "check"


Run = Callable[[Task, Sequence[int]], None]
"""Does a task for the parts of some numbers, all of them or, after an error, fewer."""


@dataclass(frozen=True, slots=True)
class _WrittenPart:
    """An attempt's record of a durable part: its listing, its contents' hash."""

    listing: StoredObject
    content: int

    def encode(self) -> bytes:
        return encode({"listing": self.listing.to_json(), "content": self.content})

    @classmethod
    def decode(cls, data: bytes, where: str) -> _WrittenPart:
        noted = decode(data, where)
        try:
            if not isinstance(noted["content"], int):
                raise TypeError(f"content {noted['content']!r:.99}")
            return cls(StoredObject.from_json(noted["listing"]), noted["content"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{where} does not note what was written: {error!r}; remove it, and convert again"
            ) from error


@dataclass(frozen=True, slots=True)
class _Notes:
    """The files that an attempt has until it is committed: what was written, and when."""

    storage: Storage
    directory: str

    def written(self, number: int) -> _WrittenPart | None:
        """Return what is noted of a part; None for nothing."""
        name = self._name(number, "converted")
        try:
            return _WrittenPart.decode(self.storage.read(name), f"{self.storage.url}/{name}")
        except CheckpointMissing:
            return None

    def write(self, number: int, part: _WrittenPart) -> None:
        """Note durably that a part is written."""
        name = self._name(number, "converted")
        self.storage.write(name, [part.encode()])
        self.storage.flush([name])

    def show_life(self, number: int) -> None:
        """Change the objects of the attempt: else garbage collection deletes it after a while."""
        name = self._name(number, "checked")
        if self.storage.exists(name):
            self.storage.delete(name)
        else:
            self.storage.write(name, [encode({})])

    def delete(self, numbers: Iterable[int]) -> None:
        """Forget what was written: the next conversion writes these parts again."""
        for number in numbers:
            self.storage.delete(self._name(number, "converted"))
            self.storage.delete(self._name(number, "checked"))

    def saved_at(self, now: datetime) -> str:
        """Return when this attempt was first about to be committed, which is noted.

        So whoever commits it writes the same documents: those of a committed one never change.
        """
        saved_at = now.astimezone(UTC).isoformat(timespec="seconds")
        try:
            self.storage.create(self._time_name, encode({"saved_at": saved_at}))
        except CheckpointExists:
            # If it is gone meanwhile, another conversion has committed this attempt.
            with suppress(CheckpointMissing):
                where = f"{self.storage.url}/{self._time_name}"
                saved_at = str(decode(self.storage.read(self._time_name), where)["saved_at"])
        return saved_at

    def delete_time(self) -> None:
        """Forget when the attempt was about to be committed."""
        self.storage.delete(self._time_name)

    @property
    def _time_name(self) -> str:
        return f"{self.directory}/saved-at.json"

    def _name(self, number: int, what: str) -> str:
        return f"{self.directory}/{number:06d}-{what}.json"


class UniversalParts:
    """The parts of one conversion. Every process that has the same source has the same parts.

    Args:
        source: what to write; of generation 0.
        url: where to write.
        attempt_name: the attempt that writes; see `attempt_for`.
        memory_nbytes: how much memory tensors may take.
        part_nbytes: about how many bytes of tensors a part has; None for `PART_NBYTES`.

    Raises:
        CheckpointError: the memory is too little.
    """

    def __init__(
        self,
        source: Source,
        url: str,
        *,
        attempt_name: str,
        memory_nbytes: int,
        part_nbytes: int | None = None,
    ) -> None:
        self._threads = min(PARALLEL_WRITES, memory_nbytes // THREAD_NBYTES)
        if self._threads < 1:
            raise CheckpointError(
                f"a conversion needs {THREAD_NBYTES / 2**20:.0f} MiB of memory at least, "
                f"{memory_nbytes / 2**20:.0f} are given; give more"
            )
        self._source = source
        self._url = url
        self.part_nbytes = part_nbytes or PART_NBYTES
        self.stored = StoredStep.of(source.step, 0)
        self.attempt = Attempt(self.stored, attempt_name)
        self.storage = open_storage(url)
        self.notes = _Notes(self.storage, f"{self.attempt.directory}/parts")
        self.plan = plan_chunks(list(_parts(source.tensors, self.part_nbytes)))

    @property
    def numbers(self) -> range:
        """The numbers of all parts."""
        return range(len(self.plan.chunks))

    def write(self, number: int, report: Report) -> None:
        """Write a part durably, unless it was written before from a source of the same content.

        Args:
            report: called with the bytes of tensors that are done, from several threads.

        Raises:
            CheckpointExists: the target has this step already.
            CheckpointError: a read or a write failed.
        """
        if self._was_written(number, report):
            self.notes.show_life(number)
            return

        def read_box(key: str, box: Box) -> np.ndarray:
            values = np.empty((*box.shape, self._itemsize(key)), np.uint8)
            self._source.read([BoxRequest(key, box, values.reshape(-1).data)])
            report(values.nbytes)
            return values

        part = write_part(
            self.storage, self.attempt, self.plan, [number], read_box,
            name=number, threads=self._threads, with_content=True,
        )  # fmt: skip
        listing = StoredObject(part.name, part.nbytes, part.crc32c)
        self.notes.write(number, _WrittenPart(listing, part.content))

    def check(self, number: int, report: Report) -> None:
        """Read a part that was written, and compare it with what was read of the source.

        All parts have to be written.

        Args:
            report: called with the bytes of tensors that were read.

        Raises:
            CheckpointDamaged: it is something else, or cannot be read.
        """
        if self._content(self._checked, number, report) != self._written[number].content:
            raise CheckpointDamaged(
                f"{self._url}: part {number} of step {self.stored.step} is not what was read of "
                "the source, although each object is as it was written; look at the memory of this "
                "machine, and convert again"
            )
        self.notes.show_life(number)

    def commit(self, documents: Mapping[str, Json]) -> None:
        """Make the checkpoint visible, with these documents. All parts have to be checked.

        If this attempt has been committed already, as by a conversion that ended before it knew, or
        by another one of the same, nothing is written.

        Raises:
            CheckpointExists: the target has this step already.
            CheckpointDamaged: the documents contradict the tensors.
            CheckpointError: a write failed.
        """
        content = digest_document(sum_of(part.content for part in self._written.values()))
        metadata = self._metadata({**documents, DIGEST: content})
        StoredCheckpoint.of(self.storage, metadata)
        listings = [part.listing for part in self._written.values()]
        if not self._is_committed(listings):
            required = required_features(self.plan.tensors)
            commit(self.storage, self.attempt, listings, metadata.objects, required)
        self.notes.delete(self.numbers)
        self.notes.delete_time()

    def _is_committed(self, listings: Sequence[StoredObject]) -> bool:
        """Return whether this attempt is the committed one."""
        path = f"{self.stored.directory}/{MANIFEST}"
        try:
            manifest = Manifest.decode(self.storage.read(path), f"{self.storage.url}/{path}")
        except CheckpointMissing:
            return False
        if manifest.attempt != self.attempt.name or not set(listings) <= set(manifest.objects):
            raise CheckpointExists(
                f"{self._url}: step {self.stored.step} is committed already and is never "
                "overwritten; convert to another URL"
            )
        return True

    @cached_property
    def _written(self) -> dict[int, _WrittenPart]:
        """The records of the parts, once all of them are written."""
        parts = {number: self.notes.written(number) for number in self.numbers}
        missing = [number for number, part in parts.items() if part is None]
        if missing:
            raise CheckpointError(
                f"{self._url}: part {missing[0]} of the conversion is gone; does another one of "
                "the same checkpoint run? convert again"
            )
        return {number: part for number, part in parts.items() if part is not None}

    @cached_property
    def _checked(self) -> StoredCheckpoint:
        """The checkpoint as a reader will see it, which nobody does before the manifest."""
        return StoredCheckpoint.of(self.storage, self._metadata({}))

    def _metadata(self, documents: Mapping[str, Json]) -> StoredMetadata:
        listings = [part.listing for part in self._written.values()]
        objects = contents(
            self.stored, listings, self.plan.tensors, self.plan.chunk_parts(),
            encode_strict(dict(documents)),
        )  # fmt: skip
        required = required_features(self.plan.tensors)
        manifest = manifest_of(self.attempt, listings, objects, required).encode()
        return StoredMetadata(stored=self.stored, manifest=manifest, objects=objects)

    def _was_written(self, number: int, report: Report) -> bool:
        """Return whether a part was written before, and the source still has its contents."""
        part = self.notes.written(number)
        if part is None or self._content(self._source, number, lambda nbytes: None) != part.content:
            return False
        report(sum(map(self._nbytes, self.plan.chunks[number])))
        return True

    def _content(self, source: Source, number: int, report: Report) -> int:
        """Return the sum of the hashes of a part's chunks, as a source has them."""
        total, batch, nbytes = 0, list[Chunk](), 0
        for chunk in self.plan.chunks[number]:
            if batch and nbytes + self._nbytes(chunk) > CHUNK_NBYTES:
                total = sum_of((total, content_of(source, batch)))
                report(nbytes)
                batch, nbytes = [], 0
            batch.append(chunk)
            nbytes += self._nbytes(chunk)
        total = sum_of((total, content_of(source, batch)))
        report(nbytes)
        return total

    def _nbytes(self, chunk: Chunk) -> int:
        return chunk.box.size * self._itemsize(chunk.key)

    def _itemsize(self, key: str) -> int:
        return numpy_dtype(self.plan.tensors[key].dtype).itemsize


def attempt_for(url: str, step: int, origin: str) -> str:
    """Return the name of the attempt that a conversion goes on with, or begins.

    An abandoned one, or one whose checkpoint was removed, can never be committed.

    Args:
        origin: identifies what is converted, how, and the tensors that are written.
    """
    storage, stored = open_storage(url), StoredStep.of(step, 0)
    first = f"convert-{hashlib.blake2b(origin.encode(), digest_size=8).hexdigest()}"
    names = chain([first], (f"{first}-{number}" for number in count(2)))
    return next(name for name in names if not is_closed(storage, Attempt(stored, name)))


def write_universal(
    parts: UniversalParts,
    documents: Mapping[str, Json],
    *,
    run: Run,
    converted_from: str,
    now: datetime,
) -> None:
    """Write a checkpoint in the universal format, and verify it before anybody sees it.

    Args:
        run: writes, then checks, the parts of these numbers: in this process, or in several.
        converted_from: the source's format, in words.
        now: the time, to note when the checkpoint was written.

    Raises:
        CheckpointExists: the target has this step already.
        CheckpointError: a read or a write failed, or what was written is not what was read.
    """
    run(Task.WRITE, parts.numbers)
    try:
        run(Task.CHECK, parts.numbers)
        provenance = {
            "keepstep": release_of("keepstep"),
            "torch": release_of("torch"),
            "world_size": 1,
            "saved_at": parts.notes.saved_at(now),
            "converted_from": converted_from,
        }
        parts.commit({**documents, PROVENANCE: provenance})
    except CheckpointDamaged:
        # Without their notes, the next conversion writes the parts again.
        parts.notes.delete(parts.numbers)
        raise


def run_here(parts: UniversalParts, report: Report) -> Run:
    """Return what writes and checks parts in this process, one after the other."""

    def run(task: Task, numbers: Sequence[int]) -> None:
        for number in numbers:
            execute(parts, task, number, report)

    return run


def execute(parts: UniversalParts, task: Task, number: int, report: Report) -> None:
    """Do one part's task. Raises what `UniversalParts.write` and `check` do."""
    if task == Task.WRITE:
        parts.write(number, report)
    else:
        parts.check(number, report)


def _parts(tensors: Mapping[str, TensorSpec], part_nbytes: int) -> Iterator[ShardIndex]:
    """Yield what each part holds: tensors in order, large ones cut along their first dimension."""
    entries: list[Entry] = []
    nbytes = 0
    for key, spec in tensors.items():
        for box in _cut(spec, part_nbytes):
            size = box.size * numpy_dtype(spec.dtype).itemsize
            if entries and nbytes + size > part_nbytes:
                yield ShardIndex(nbytes, tuple(entries), {})
                entries, nbytes = [], 0
            entries.append(
                Entry(
                    key=key,
                    dtype=spec.dtype,
                    global_shape=spec.shape,
                    box=box,
                    byte_offset=nbytes,
                    nbytes=size,
                )
            )
            nbytes += size
    yield ShardIndex(nbytes, tuple(entries), {})


def _cut(spec: TensorSpec, part_nbytes: int) -> Iterator[Box]:
    """Yield boxes of about a part's size, which cover a tensor."""
    whole = Box.whole(spec.shape)
    if not spec.shape or not whole.size:
        yield whole
        return
    row = math.prod(spec.shape[1:]) * numpy_dtype(spec.dtype).itemsize
    rows = max(1, part_nbytes // row)
    for first in range(0, spec.shape[0], rows):
        count = min(rows, spec.shape[0] - first)
        yield Box((first, *whole.offset[1:]), (count, *spec.shape[1:]))
