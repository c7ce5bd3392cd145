"""Maintenance of stored checkpoints: summary, removal, garbage collection, copy, comparison.

Removal takes two steps, so that readers of a checkpoint can finish: `remove` notes the time and
deletes the manifest, after which there is no such checkpoint; `collect_garbage` later deletes what
no manifest has named for some time, including what writers left when they died.
"""

from __future__ import annotations

import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointExists,
    CheckpointMissing,
)
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.content_digest import OF_ONE_SAVE
from keepstep.checkpoint.format.layout.documents import PROVENANCE
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.format.stored.chunking import StoredTensor
from keepstep.checkpoint.format.stored.listings import DataObject
from keepstep.checkpoint.format.stored.manifest import Manifest
from keepstep.checkpoint.format.stored.object_names import (
    MANIFEST,
    NEWEST,
    PROBE_PREFIX,
    REMOVED,
    ROOT,
    Attempt,
    StoredStep,
)
from keepstep.checkpoint.format.stored.pruning import GRACE_S, Disposal, Note, dispose, names_crc
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import noted_newest
from keepstep.checkpoint.format.stored.storage import Storage
from keepstep.checkpoint.format.stored.stored_json import encode, encode_strict
from keepstep.checkpoint.format.stored.writer import commit
from keepstep.checkpoint.format.stored.zarr_metadata import array_metadata

VALUES_DIFFER = "values"
"""How `compare` describes a tensor whose elements alone have changed."""

_PARALLEL_COPIES = 8
_COMPARED_NBYTES = 64 * 2**20
# Unfinished objects that writers of checkpoints leave next to them. Other tools, and conversions to
# a file, write next to checkpoints too.
_LEFTOVERS = re.compile(
    rf"(?:{re.escape(NEWEST)}|{re.escape(REMOVED)}|{PROBE_PREFIX}[0-9a-f]{{32}})"
    r"\.[0-9a-f]{12}\.unfinished"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """The size of a checkpoint: total bytes, objects, tensors and elements of tensors.

    Attributes:
        stored: which checkpoint it is.
        nbytes: bytes of all objects.
        objects: how many objects.
        tensors: how many tensors.
        elements: elements of all tensors.
        saved_at: when it was captured, in ISO 8601; None if it does not say.
        loss: the number that was saved as `loss`; None without one.
    """

    stored: StoredStep
    nbytes: int
    objects: int
    tensors: int
    elements: int
    saved_at: str | None
    loss: float | None


def summarize(source: StoredCheckpoint) -> CheckpointSummary:
    """Return the size of a checkpoint, from its listings."""
    data = source.cell_index.objects
    own_metadata = [key for key, tensor in source.stored_tensors.items() if not tensor.is_packed]
    nbytes = sum(item.nbytes for item in data) + sum(
        item.nbytes for item in source.manifest.objects
    )
    objects = len(data) + len(source.manifest.objects) + len(own_metadata) + 1
    elements = sum(
        int(np.prod(tensor.shape, dtype=np.int64)) for tensor in source.stored_tensors.values()
    )
    return CheckpointSummary(
        stored=source.stored,
        nbytes=nbytes,
        objects=objects,
        tensors=len(source.stored_tensors),
        elements=elements,
        saved_at=_saved_at(source),
        loss=metrics_of(source).get("loss"),
    )


def _saved_at(source: StoredCheckpoint) -> str | None:
    origin = source.documents.get(PROVENANCE)
    time_text = origin.get("saved_at") if isinstance(origin, dict) else None
    return time_text if isinstance(time_text, str) else None


def remove(storage: Storage, stored: StoredStep, *, now: float) -> None:
    """Remove a checkpoint from the list at once; `collect_garbage` deletes its bytes later.

    Args:
        storage: has the checkpoint.
        stored: the checkpoint to remove.
        now: wall-clock seconds.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    # Not by a list of all: on object stores that is as long as everything under the URL.
    if not storage.exists(f"{stored.directory}/{MANIFEST}"):
        raise CheckpointError(
            f"{storage.url}: there is no checkpoint {stored.directory}; see `keepstep ckpt ls`"
        )
    directory = _named_directory(storage, stored)
    if directory is not None:
        note_name = f"{directory}/{REMOVED}"
        present = _objects_of_directories(stored, storage.names(f"{stored.directory}/"))
        names = [name for name in present.get(directory, []) if name != note_name]
        storage.write(note_name, [Note(now, names_crc(names), is_closed=True).encode()])
        storage.flush([note_name])
    storage.delete(f"{stored.directory}/{MANIFEST}")
    if noted_newest(storage) == stored:
        storage.delete(NEWEST)


def collect_garbage(storage: Storage, *, now: float, grace_s: float = GRACE_S) -> tuple[str, ...]:
    """Delete attempts that no manifest names, and removed checkpoints.

    It also deletes what writers that died have left next to the checkpoints.

    A writer may be at work on an attempt. So the first call that finds it notes the time; a later
    one closes it, if nothing was added for `grace_s` seconds; another one deletes it, as long after
    that. A removed checkpoint is closed already. `grace_s=0` deletes everything that no manifest
    names at once, which is safe only while no process writes.

    Args:
        storage: what to clean up.
        now: wall-clock seconds.
        grace_s: how long readers and writers may take to finish.

    Returns:
        The directories, and the names of objects next to them.
    """
    names, unfinished = storage.names(), storage.unfinished()
    by_step: dict[StoredStep, list[str]] = defaultdict(list)
    for name in (*names, *unfinished):
        stored = StoredStep.parse(name.partition("/")[0])
        if stored is not None:
            by_step[stored].append(name)
    deleted: list[str] = []
    for stored, objects_of_step in sorted(by_step.items(), key=lambda item: item[0].directory):
        by_directory = _objects_of_directories(stored, objects_of_step)
        for directory, objects in sorted(by_directory.items()):
            has_deleted = _collect(
                storage,
                f"{directory}/{REMOVED}",
                objects,
                is_kept=partial(_is_named, storage, stored, directory),
                empty=partial(_delete_in, storage, directory),
                delete=partial(_delete, storage, stored, directory),
                now=now,
                grace_s=grace_s,
            )
            deleted += [directory] if has_deleted else []
    leftovers = [name for name in unfinished if _LEFTOVERS.fullmatch(name)]
    noted = [REMOVED] if REMOVED in names else []

    def delete_all(names: Sequence[str]) -> None:
        for name in names:
            storage.delete(name)

    if (leftovers or noted) and _collect(
        storage,
        REMOVED,
        [*leftovers, *noted],
        is_kept=lambda: False,
        empty=delete_all,
        delete=delete_all,
        now=now,
        grace_s=grace_s,
    ):
        deleted += leftovers
    return tuple(deleted)


def _collect(
    storage: Storage,
    note_name: str,
    objects: Sequence[str],
    *,
    is_kept: Callable[[], bool],
    empty: Callable[[Sequence[str]], None],
    delete: Callable[[Sequence[str]], None],
    now: float,
    grace_s: float,
) -> bool:
    """Note, close, or delete objects that belong together; return whether any were deleted.

    Args:
        storage: where they are.
        note_name: the name of the note about them.
        objects: their names; the note's as well, if there is one.
        is_kept: whether they may be of use.
        empty: deletes all of them but the note, given their names.
        delete: deletes all of them, given their names.
        now: wall-clock seconds.
        grace_s: as for `collect_garbage`.
    """
    if is_kept():
        return False
    note = _read_note(storage, note_name) if note_name in objects else None
    others = [name for name in objects if name != note_name]
    match dispose(others, note, now=now, grace_s=grace_s):
        case Disposal.DELETE | Disposal.EMPTY as disposal:
            # Looked at again: the attempt may have been committed since.
            if is_kept():
                return False
            if disposal is Disposal.DELETE:
                delete(objects)
            else:
                # The note is there at any moment: a writer may awake, and this may be cut off.
                empty(others)
                storage.write(note_name, [Note(now, names_crc(()), True).encode()])
            return bool(others)
        case Disposal.NOTE | Disposal.CLOSE as disposal:
            is_closed = disposal is Disposal.CLOSE or (note is not None and note.is_closed)
            storage.write(note_name, [Note(now, names_crc(others), is_closed).encode()])
        case Disposal.KEEP:
            pass
    return False


def _objects_of_directories(stored: StoredStep, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the objects of each attempt at a step, by directory, without the manifest.

    What a writer that died has left of a manifest is in the step's own directory.
    """
    objects: dict[str, list[str]] = defaultdict(list)
    for name in names:
        first, separator, _ = name.removeprefix(f"{stored.directory}/").partition("/")
        if separator and Attempt.is_directory(first):
            objects[f"{stored.directory}/{first}"].append(name)
        elif first != MANIFEST:
            objects[stored.directory].append(name)
    return objects


def _named_directory(storage: Storage, stored: StoredStep) -> str | None:
    """Return the directory that a step's manifest names; None if it cannot be read.

    Raises:
        CheckpointMissing: there is no manifest.
    """
    path = f"{stored.directory}/{MANIFEST}"
    try:
        return Manifest.decode(storage.read(path), f"{storage.url}/{path}").directory
    except CheckpointMissing:
        raise
    except CheckpointError:
        return None


def _is_named(storage: Storage, stored: StoredStep, directory: str) -> bool:
    """Return whether a step's manifest names a directory, or may do so."""
    try:
        named = _named_directory(storage, stored)
    except CheckpointMissing:
        return False
    # What a manifest that cannot be read names is not known.
    return named in (None, directory)


def _delete(storage: Storage, stored: StoredStep, directory: str, names: Sequence[str]) -> None:
    if directory != stored.directory:
        storage.delete_directory(directory)
    else:
        # Attempts have directories next to these objects, which are deleted on their own.
        _delete_in(storage, directory, names)


def _delete_in(storage: Storage, directory: str, names: Sequence[str]) -> None:
    """Delete these objects of a directory, and all of the directories in it that they are in."""
    leaves = {name.removeprefix(f"{directory}/") for name in names}
    for child in sorted({leaf.partition("/")[0] for leaf in leaves}):
        if child in leaves:
            storage.delete(f"{directory}/{child}")
        else:
            storage.delete_directory(f"{directory}/{child}")


def _read_note(storage: Storage, name: str) -> Note | None:
    """Return a note, or None if it is damaged, or was deleted meanwhile."""
    try:
        return Note.decode(storage.read(name))
    except CheckpointMissing:
        return None


def copy(
    source: StoredCheckpoint, target: Storage, report: Callable[[int], None] = lambda nbytes: None
) -> StoredStep:
    """Copy a checkpoint to another storage, and verify every byte; the copy is durable on return.

    Args:
        source: the checkpoint to copy.
        target: where to copy it to.
        report: called with the number of bytes after each object, from several threads.

    Raises:
        CheckpointDamaged: the source is damaged; the copy is then not committed. Or the target has
            a copy already, which is damaged.
        CheckpointExists: the target has another checkpoint of this step and generation, which is
            not touched.
    """
    attempt = Attempt(source.stored, uuid.uuid4().hex)
    for key in source.stored_tensors:
        source.cell_index.check_listed(key)
    committed = f"{source.stored.directory}/{MANIFEST}"
    if target.exists(committed):
        existing = Manifest.decode(target.read(committed), f"{target.url}/{committed}")
        if existing.objects == source.manifest.objects:
            stored = source.stored
            StoredCheckpoint.open(target, stored.step, stored.generation).verify(report)
            return stored
        raise CheckpointExists(
            f"{target.url}: {source.stored.directory} exists already, with other content, and is "
            "never overwritten; copy to another URL"
        )

    def copy_data_object(item: DataObject) -> str:
        content = source.storage.read(f"{source.directory}/{item.name}", item.nbytes)
        check_object(source, item, content)
        target.write(f"{attempt.directory}/{item.name}", [content])
        report(len(content))
        return item.name

    with ThreadPoolExecutor(_PARALLEL_COPIES) as pool:
        names = list(pool.map(copy_data_object, source.cell_index.objects))
    parts = [entry for entry in source.manifest.objects if entry.is_part]
    documents = {entry.name: source.verified(entry.name) for entry in parts} | {
        f"{key}/{ROOT}": encode(array_metadata(key, tensor))
        for key, tensor in source.stored_tensors.items()
        if not tensor.is_packed
    }
    for name, content in documents.items():
        target.write(f"{attempt.directory}/{name}", [content])
    target.flush([f"{attempt.directory}/{name}" for name in (*names, *documents)])
    others = {
        entry.name: source.verified(entry.name)
        for entry in source.manifest.objects
        if not entry.is_part
    }
    commit(target, attempt, parts, others, source.manifest.required)
    return source.stored


def check_object(source: StoredCheckpoint, item: DataObject, content: bytes) -> None:
    """Check a data object's bytes against its listing.

    Raises:
        CheckpointDamaged: the bytes are not what was written.
    """
    if not _matches_listing(source, item, memoryview(content)):
        raise CheckpointDamaged(
            f"{source.storage.url}/{source.directory}/{item.name} is not what was written; "
            "load an older step"
        )


def _matches_listing(source: StoredCheckpoint, item: DataObject, content: memoryview) -> bool:
    end = 0
    for span in source.cell_index.spans_of_object(item):
        end = span.offset + span.nbytes
        if not span.is_intact(content[span.offset : end]):
            return False
    return end == content.nbytes == item.nbytes


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences between two checkpoints.

    `changed` maps the tensors that both have, with other contents, to a description of the change;
    `documents` are the names of documents that differ, other than the provenance and the digest.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: Mapping[str, str]
    documents: tuple[str, ...]


def compare(first: StoredCheckpoint, second: StoredCheckpoint) -> Difference:
    """Compare two checkpoints tensor by tensor.

    Tensors that both store in the same chunks and cells are compared by checksums, others by
    values; compressed ones by both, for the same values may be compressed to other bytes.
    """
    before, after = first.stored_tensors, second.stored_tensors
    changed: dict[str, str] = {}
    for key in sorted(before.keys() & after.keys()):
        old, new = before[key], after[key]
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            changed[key] = f"{old.dtype} {list(old.shape)} -> {new.dtype} {list(new.shape)}"
        elif not _is_equal(key, first, second):
            changed[key] = VALUES_DIFFER
    return Difference(
        only_first=tuple(sorted(before.keys() - after.keys())),
        only_second=tuple(sorted(after.keys() - before.keys())),
        changed=changed,
        documents=differing_documents(first.documents, second.documents),
    )


def differing_documents(first: Mapping[str, Json], second: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the sorted names of documents that differ, except those that every save changes."""

    def text(documents: Mapping[str, Json], name: str) -> bytes:
        # As JSON: NaN, the loss of a diverged run, does not equal itself. A document without
        # content says what its absence says.
        return encode_strict(documents.get(name) or None)

    names = sorted((first.keys() | second.keys()) - OF_ONE_SAVE)
    return tuple(name for name in names if text(first, name) != text(second, name))


def _is_equal(key: str, first: StoredCheckpoint, second: StoredCheckpoint) -> bool:
    tensor = first.stored_tensors[key]
    if tensor == second.stored_tensors[key]:
        is_same = _checksums(first, key) == _checksums(second, key)
        if is_same or tensor.compression is None:
            return is_same
    return all(_values(first, key, box) == _values(second, key, box) for box in _slabs(tensor))


def _checksums(source: StoredCheckpoint, key: str) -> list[int]:
    return [crc for span in source.cell_index.spans_of_tensor(key) for crc in span.checksums]


def _slabs(tensor: StoredTensor) -> Iterator[Box]:
    """Yield boxes of bounded size that partition a tensor."""
    if not tensor.shape:
        yield Box((), ())
        return
    row_shape = tensor.shape[1:]
    row_nbytes = int(np.prod(row_shape, dtype=np.int64)) * numpy_dtype(tensor.dtype).itemsize
    rows = max(1, _COMPARED_NBYTES // max(1, row_nbytes))
    for start in range(0, tensor.shape[0], rows):
        yield Box(
            (start, *(0 for _ in row_shape)), (min(rows, tensor.shape[0] - start), *row_shape)
        )


def _values(source: StoredCheckpoint, key: str, box: Box) -> bytes:
    into = bytearray(box.size * numpy_dtype(source.stored_tensors[key].dtype).itemsize)
    source.read([BoxRequest(key, box, memoryview(into))])
    return bytes(into)


def metrics_of(source: StoredCheckpoint) -> dict[str, float]:
    """Return the numbers that were saved with the tensors, by name."""
    return {
        name: float(value)
        for name, value in source.documents.get("values", {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
