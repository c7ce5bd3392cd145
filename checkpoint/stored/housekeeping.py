"""Keeping a place with many checkpoints in order: removing, collecting what is left, copying and comparing.

Removing is done in two steps, so that whoever reads a checkpoint can finish: `remove` takes its manifest away and notes when, upon which
it is a checkpoint no more; `collect_garbage` deletes what has been none for some time, leftovers of writers that died among it.
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


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A checkpoint in numbers: bytes and objects in all, tensors and their elements."""

    stored: StoredStep
    nbytes: int
    objects: int
    tensors: int
    elements: int


def summarize(source: StoredCheckpoint) -> CheckpointSummary:
    """Count what a checkpoint consists of, from its listings."""
    data = source.cell_index.objects
    own_metadata = [key for key, tensor in source.stored_tensors.items() if not tensor.is_packed]
    nbytes = sum(item.nbytes for item in data) + sum(
        item.nbytes for item in source.manifest.objects
    )
    objects = len(data) + len(source.manifest.objects) + len(own_metadata) + 1
    elements = sum(
        int(np.prod(tensor.shape, dtype=np.int64)) for tensor in source.stored_tensors.values()
    )
    return CheckpointSummary(source.stored, nbytes, objects, len(source.stored_tensors), elements)


def remove(url: str, stored: StoredStep, *, now: float) -> None:
    """Make a checkpoint none, at once; `collect_garbage` deletes its bytes later.

    Args:
        url: where it is.
        stored: which one.
        now: wall-clock seconds.

    Raises:
        CheckpointError: it is not there.
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
    """Delete directories that are no checkpoints and have not been for `grace_s` seconds; return their names.

    A directory without a manifest may be one that a writer is filling now: it is noted when it is first seen here, and deleted by a
    later call, if it is still none by then. With `grace_s=0` it is deleted at once: only where nobody writes.

    Args:
        url: where to look.
        now: wall-clock seconds.
        grace_s: how long readers and writers may take to finish.
    """
    storage = open_storage(url)
    names = storage.names()
    marked = [
        directory
        for directory, _, leaf in (name.partition("/") for name in names)
        if leaf == REMOVED
    ]
    noted = {
        directory: at_s
        for directory in marked
        if (at_s := _noted(storage, f"{directory}/{REMOVED}")) is not None
    }
    fresh, doomed = find_garbage(names, noted, now=now, grace_s=grace_s)
    for directory in fresh:
        storage.write(f"{directory}/{REMOVED}", [encode({"at_s": now})])
    for directory in doomed:
        storage.delete_directory(directory)
    return doomed


def _noted(storage: Storage, mark: str) -> float | None:
    try:
        return float(json.loads(storage.read(mark))["at_s"])
    except (CheckpointMissing, ValueError, KeyError, TypeError):
        return None  # Taken away by a writer since, or cut short by a crash: as if seen for the first time.


def copy(
    source: StoredCheckpoint, url: str, report: Callable[[int], None] = lambda nbytes: None
) -> StoredStep:
    """Copy a checkpoint to another URL, verifying every byte; it is complete there when this returns.

    Args:
        source: what to copy.
        url: where to.
        report: hears of bytes copied.

    Raises:
        CheckpointDamaged: the source is damaged; the copy is then not committed.
        CheckpointExists: the place has another checkpoint of this step and generation, which is not touched.
    """
    target = open_storage(url)
    directory = source.stored.directory
    manifest = source.manifest.encode()
    committed = f"{directory}/{MANIFEST}"
    if target.exists(committed) and target.read(committed, len(manifest)) != manifest:
        raise CheckpointExists(
            f"{url}: {directory} is there already, with other content, and is never overwritten; copy to another URL"
        )
    target.delete(f"{directory}/{REMOVED}")  # For the same reason as in `write_part`.

    def data(item: DataObject) -> str:
        content = source.storage.read(f"{directory}/{item.name}", item.nbytes)
        check_object(source, item, content)
        target.write(f"{directory}/{item.name}", [content])
        report(len(content))
        return item.name

    def plain(name: str) -> str:
        target.write(f"{directory}/{name}", [source.verified(name)])
        return name

    with ThreadPoolExecutor(_PARALLEL_COPIES) as pool:
        names = list(pool.map(data, source.cell_index.objects))
    names += [plain(name) for name in (ROOT, DOCUMENTS, *source.manifest.part_names())]
    for key, tensor in source.stored_tensors.items():
        if not tensor.is_packed:
            name = f"{key}/{ROOT}"
            target.write(f"{directory}/{name}", [encode(array_metadata(key, tensor))])
            names.append(name)
    target.flush([f"{directory}/{name}" for name in names])
    target.create(committed, manifest)
    return source.stored


def check_object(source: StoredCheckpoint, item: DataObject, content: bytes) -> None:
    """Compare a data object's bytes with its listing.

    Raises:
        CheckpointDamaged: they are not what was written.
    """
    view = memoryview(content)
    end = 0
    for span in source.cell_index.spans_of_object(item):
        end = span.offset + span.nbytes
        if not span.is_intact(view[span.offset : end]):
            break
    else:
        if end == len(content) == item.nbytes:
            return
    raise CheckpointDamaged(
        f"{source.storage.url}/{source.stored.directory}/{item.name} is not what was written; load an older step"
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """What two checkpoints do not share: tensors of one only, of both with other contents (and how), and documents."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: Mapping[str, str]
    documents: tuple[str, ...]


def compare(first: StoredCheckpoint, second: StoredCheckpoint) -> Difference:
    """Compare two checkpoints tensor by tensor: by checksums where both are cut alike, else by their values."""
    mine, theirs = first.stored_tensors, second.stored_tensors
    changed: dict[str, str] = {}
    for key in sorted(mine.keys() & theirs.keys()):
        one, other = mine[key], theirs[key]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            changed[key] = f"{one.dtype} {list(one.shape)} -> {other.dtype} {list(other.shape)}"
        elif not _is_equal(key, first, second):
            changed[key] = "values"
    names = first.documents.keys() | second.documents.keys()
    documents = sorted(n for n in names if first.documents.get(n) != second.documents.get(n))
    return Difference(
        tuple(sorted(mine.keys() - theirs.keys())),
        tuple(sorted(theirs.keys() - mine.keys())),
        changed,
        tuple(documents),
    )


def _is_equal(key: str, first: StoredCheckpoint, second: StoredCheckpoint) -> bool:
    tensor = first.stored_tensors[key]
    if tensor == second.stored_tensors[key]:
        one, other = (
            [crc for span in source.cell_index.spans_of_tensor(key) for crc in span.checksums]
            for source in (first, second)
        )
        return one == other
    return all(_values(first, key, box) == _values(second, key, box) for box in _slabs(tensor))


def _slabs(tensor: StoredTensor) -> list[Box]:
    """Return boxes of bounded size that together are a tensor."""
    if not tensor.shape:
        return [Box((), ())]
    row = int(np.prod(tensor.shape[1:], dtype=np.int64)) * numpy_dtype(tensor.dtype).itemsize
    rows = max(1, _COMPARED_NBYTES // max(1, row))
    rest = tensor.shape[1:]
    return [
        Box((start, *(0 for _ in rest)), (min(rows, tensor.shape[0] - start), *rest))
        for start in range(0, tensor.shape[0], rows)
    ]


def _values(source: StoredCheckpoint, key: str, box: Box) -> bytes:
    into = bytearray(box.size * numpy_dtype(source.stored_tensors[key].dtype).itemsize)
    source.read([BoxRequest(key, box, memoryview(into))])
    return bytes(into)


def metric_of(source: StoredCheckpoint, name: str) -> float | None:
    """Return a number that was saved beside the tensors, under `values`, if there is one of this name."""
    value = source.documents.get("values", {}).get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
