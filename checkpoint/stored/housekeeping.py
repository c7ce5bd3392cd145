"""Maintenance of stored checkpoints: summary, removal, garbage collection, copy, comparison.

Removal takes two steps, so that readers of a checkpoint can finish: `remove` notes the time and
deletes the manifest, after which the directory is no longer a checkpoint; `collect_garbage` later
deletes directories that have not been checkpoints for some time, including those that writers left
when they died.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointExists,
    CheckpointMissing,
)
from keepstep.checkpoint.layout.boxes import Box
from keepstep.checkpoint.layout.dtypes import numpy_dtype
from keepstep.checkpoint.layout.source import BoxRequest
from keepstep.checkpoint.stored.chunking import StoredTensor
from keepstep.checkpoint.stored.format import (
    DOCUMENTS,
    MANIFEST,
    REMOVED,
    ROOT,
    DataObject,
    StoredStep,
    array_metadata,
    encode,
)
from keepstep.checkpoint.stored.pruning import GRACE_S, find_garbage
from keepstep.checkpoint.stored.reader import StoredCheckpoint, list_steps
from keepstep.checkpoint.stored.storage import Storage, open_storage

_PARALLEL_COPIES = 8
_COMPARED_NBYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """The size of a checkpoint: total bytes, objects, tensors and elements of tensors."""

    stored: StoredStep
    nbytes: int
    objects: int
    tensors: int
    elements: int


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
    )


def remove(url: str, stored: StoredStep, *, now: float) -> None:
    """Remove a checkpoint from the list at once; `collect_garbage` deletes its bytes later.

    Args:
        url: the URL that has the checkpoint.
        stored: the checkpoint to remove.
        now: wall-clock seconds.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    storage = open_storage(url)
    if stored not in list_steps(url):
        raise CheckpointError(
            f"{url}: there is no checkpoint {stored.directory}; see `keepstep ckpt ls`"
        )
    storage.write(f"{stored.directory}/{REMOVED}", [encode({"at_s": now})])
    storage.flush([f"{stored.directory}/{REMOVED}"])
    storage.delete(f"{stored.directory}/{MANIFEST}")


def collect_garbage(url: str, *, now: float, grace_s: float = GRACE_S) -> tuple[str, ...]:
    """Delete directories that have not been checkpoints for `grace_s` seconds; return their names.

    A writer may be filling a directory without a manifest now: the first call that finds it notes
    the time, and a later call deletes it if it still has no manifest. `grace_s=0` deletes it at
    once, which is safe only while no process writes.

    Args:
        url: the URL to clean up.
        now: wall-clock seconds.
        grace_s: how long readers and writers may take to finish.
    """
    storage = open_storage(url)
    names = storage.names()
    with_note = [
        directory
        for directory, _, leaf in (name.partition("/") for name in names)
        if leaf == REMOVED
    ]
    noted = {
        directory: at_s
        for directory in with_note
        if (at_s := _read_note(storage, f"{directory}/{REMOVED}")) is not None
    }
    to_note, to_delete = find_garbage(names, noted, now=now, grace_s=grace_s)
    for directory in to_note:
        storage.write(f"{directory}/{REMOVED}", [encode({"at_s": now})])
    for directory in to_delete:
        storage.delete_directory(directory)
    return to_delete


def _read_note(storage: Storage, name: str) -> float | None:
    """Return the wall-clock time in a `removed.json`, or None if it is missing or damaged."""
    try:
        return float(json.loads(storage.read(name))["at_s"])
    except (CheckpointMissing, ValueError, KeyError, TypeError):
        # A writer deleted it meanwhile, or a crash cut it short: treated as not yet noted.
        return None


def copy(
    source: StoredCheckpoint, url: str, report: Callable[[int], None] = lambda nbytes: None
) -> StoredStep:
    """Copy a checkpoint to another URL, and verify every byte; the copy is durable on return.

    Args:
        source: the checkpoint to copy.
        url: the URL to copy to.
        report: called with the number of bytes after each object, from several threads.

    Raises:
        CheckpointDamaged: the source is damaged; the copy is then not committed.
        CheckpointExists: the target has another checkpoint of this step and generation, which is
            not touched.
    """
    target = open_storage(url)
    directory = source.stored.directory
    manifest = source.manifest.encode()
    committed = f"{directory}/{MANIFEST}"
    if target.exists(committed) and target.read(committed, len(manifest)) != manifest:
        raise CheckpointExists(
            f"{url}: {directory} exists already, with other content, and is never overwritten; "
            "copy to another URL"
        )
    target.delete(f"{directory}/{REMOVED}")  # For the same reason as in `write_part`.

    def copy_data_object(item: DataObject) -> str:
        content = source.storage.read(f"{directory}/{item.name}", item.nbytes)
        check_object(source, item, content)
        target.write(f"{directory}/{item.name}", [content])
        report(len(content))
        return item.name

    def copy_listed_object(name: str) -> str:
        target.write(f"{directory}/{name}", [source.verified(name)])
        return name

    with ThreadPoolExecutor(_PARALLEL_COPIES) as pool:
        names = list(pool.map(copy_data_object, source.cell_index.objects))
    names += [copy_listed_object(name) for name in (ROOT, DOCUMENTS, *source.manifest.part_names())]
    for key, tensor in source.stored_tensors.items():
        if not tensor.is_packed:
            name = f"{key}/{ROOT}"
            target.write(f"{directory}/{name}", [encode(array_metadata(key, tensor))])
            names.append(name)
    target.flush([f"{directory}/{name}" for name in names])
    target.create(committed, manifest)
    return source.stored


def check_object(source: StoredCheckpoint, item: DataObject, content: bytes) -> None:
    """Check a data object's bytes against its listing.

    Raises:
        CheckpointDamaged: the bytes are not what was written.
    """
    if not _matches_listing(source, item, memoryview(content)):
        raise CheckpointDamaged(
            f"{source.storage.url}/{source.stored.directory}/{item.name} is not what was written; "
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
    `documents` are the names of documents that differ.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: Mapping[str, str]
    documents: tuple[str, ...]


def compare(first: StoredCheckpoint, second: StoredCheckpoint) -> Difference:
    """Compare two checkpoints tensor by tensor.

    Tensors that both store in the same chunks and cells are compared by checksums, others by
    values.
    """
    before, after = first.stored_tensors, second.stored_tensors
    changed: dict[str, str] = {}
    for key in sorted(before.keys() & after.keys()):
        old, new = before[key], after[key]
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            changed[key] = f"{old.dtype} {list(old.shape)} -> {new.dtype} {list(new.shape)}"
        elif not _is_equal(key, first, second):
            changed[key] = "values"
    names = first.documents.keys() | second.documents.keys()
    documents = sorted(n for n in names if first.documents.get(n) != second.documents.get(n))
    return Difference(
        only_first=tuple(sorted(before.keys() - after.keys())),
        only_second=tuple(sorted(after.keys() - before.keys())),
        changed=changed,
        documents=tuple(documents),
    )


def _is_equal(key: str, first: StoredCheckpoint, second: StoredCheckpoint) -> bool:
    tensor = first.stored_tensors[key]
    if tensor == second.stored_tensors[key]:
        return _checksums(first, key) == _checksums(second, key)
    return all(_values(first, key, box) == _values(second, key, box) for box in _slabs(tensor))


def _checksums(source: StoredCheckpoint, key: str) -> list[int]:
    return [crc for span in source.cell_index.spans_of_tensor(key) for crc in span.checksums]


def _slabs(tensor: StoredTensor) -> list[Box]:
    """Return boxes of bounded size that partition a tensor."""
    if not tensor.shape:
        return [Box((), ())]
    row_shape = tensor.shape[1:]
    row_nbytes = int(np.prod(row_shape, dtype=np.int64)) * numpy_dtype(tensor.dtype).itemsize
    rows = max(1, _COMPARED_NBYTES // max(1, row_nbytes))
    return [
        Box((start, *(0 for _ in row_shape)), (min(rows, tensor.shape[0] - start), *row_shape))
        for start in range(0, tensor.shape[0], rows)
    ]


def _values(source: StoredCheckpoint, key: str, box: Box) -> bytes:
    into = bytearray(box.size * numpy_dtype(source.stored_tensors[key].dtype).itemsize)
    source.read([BoxRequest(key, box, memoryview(into))])
    return bytes(into)


def metric_of(source: StoredCheckpoint, name: str) -> float | None:
    """Return the number of this name that was saved beside the tensors, or None if there is none.

    Args:
        source: the checkpoint.
        name: the value's name in the document `values`.
    """
    value = source.documents.get("values", {}).get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
