"""Opens the arrays of a tree that Orbax saved, by TensorStore: OCDBT or folders, Zarr v2 or v3.

TensorStore decodes; here is what it does not decide. It fills chunks that are not there, so an
array that lacks some is refused unless the tree was saved without the chunks of zeros. Metadata
beyond `_MOST_METADATA_NBYTES` is not read, a store that refers to files that are not there or to a
node twice is refused, and so are chunks larger than the files can have, and links out of the
folder.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from keepstep.checkpoint.convert.read.arrays import ComputedArray, Values
from keepstep.checkpoint.convert.read.files import ForeignFiles, damaged
from keepstep.checkpoint.convert.read.pieces import ForeignTensor, Piece
from keepstep.checkpoint.errors import CheckpointMissing, FormatUnsupported
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import TensorSpec
from keepstep.checkpoint.format.stored.files import FileStorage
from keepstep.checkpoint.format.stored.storage import Storage

if TYPE_CHECKING:
    from keepstep.checkpoint.format.stored.objects import ObjectStorage

MANIFEST = "manifest.ocdbt"

_MOST_METADATA_NBYTES = 2**24
# Nodes of OCDBT's tree, so that each chunk is found without reading them again.
_CACHE_NBYTES = 2**27
# Chunks of zeros that old versions did not store, of one array.
_MOST_ABSENT_CHUNKS = 2**16
# What Orbax cuts larger arrays to; and bytes that a byte of zstd can stand for: a block of four
# bytes has at most 128 KiB.
_LARGEST_USUAL_NBYTES = 2**31
_MOST_RATIO = 2**15
# Chunks that are decoded one at a time: a chunk is decoded whole, whatever part of it is wanted.
_LARGE_NBYTES = 2**26
_ONE_LARGE = threading.Lock()


@dataclass(frozen=True)
class OrbaxArrays:
    """The arrays of one tree, by the names that Orbax gives them.

    Attributes:
        files: of the tree's folder.
        array_names: the arrays that the tree's metadata names.
        is_ocdbt: whether all arrays are in one OCDBT store, not in folders.
        is_v3: whether they are Zarr v3, not v2.
        stores_all: whether each chunk was stored, also those of zeros.
    """

    files: ForeignFiles
    array_names: Collection[str]
    is_ocdbt: bool
    is_v3: bool
    stores_all: bool

    def unnamed(self) -> Iterator[str]:
        """Yield the arrays that the metadata does not name."""
        for key in sorted(self._keys):
            name = key.removesuffix(f"/{self._metadata_name}")
            if name != key and name not in self.array_names:
                yield name

    def open(self, name: str) -> ForeignTensor | str | None:
        """Return an array; its data type, if that cannot be stored; None if there is none.

        Raises:
            CheckpointMissing: a chunk is not there.
            CheckpointDamaged: its metadata is not what Zarr has.
            FormatUnsupported: TensorStore cannot open it.
        """
        start = f"{name}/" if name else ""
        key = f"{start}{self._metadata_name}"
        if key not in self._keys:
            return None
        location = f"{self.files.url}/{key}"
        dtype = self._dtype(key, location)
        try:
            itemsize = numpy_dtype(dtype).itemsize
        except ValueError:
            return dtype[:80]
        store = self._open_zarr(start, location)
        shape = tuple(store.shape)
        chunk = store.chunk_layout.write_chunk.shape or ()
        grid = [math.ceil(n / m) for n, m in zip(shape, chunk, strict=True)]
        self._check_chunks(name, math.prod(grid), chunk, location)
        nbytes = math.prod(chunk) * itemsize
        self._check_chunk_size(nbytes, location)
        array_location = f"{self.files.url}/{name}"

        def read(box: Box, into: Values) -> None:
            with _ONE_LARGE if nbytes > _LARGE_NBYTES else nullcontext():
                into[...] = _result(self.files, array_location, store[box.slices].read, nbytes)

        pieces = []
        for place in itertools.product(*map(range, grid)):
            offset = tuple(p * n for p, n in zip(place, chunk, strict=True))
            inside = tuple(
                min(n, extent - at) for n, extent, at in zip(chunk, shape, offset, strict=True)
            )
            box = Box(offset, inside)
            pieces.append(Piece(box, ComputedArray(dtype, array_location, box, read)))
        return ForeignTensor(TensorSpec(dtype, shape), tuple(pieces))

    def _open_zarr(self, start: str, location: str) -> Any:
        import tensorstore

        specification = {
            "driver": "zarr3" if self.is_v3 else "zarr",
            "fill_missing_data_reads": not self.stores_all,
            # What was read when it was opened is not asked for again.
            "recheck_cached_data": "open",
        }
        store = self._store / start
        try:
            return _wait(
                self.files, lambda: tensorstore.open(specification, kvstore=store, read=True)
            )
        except (ValueError, OSError) as error:
            raise FormatUnsupported(
                f"{location}: TensorStore cannot open the array: {error}; copy the file again if "
                "it is damaged, or save the array in a form that TensorStore reads"
            ) from None

    def _dtype(self, key: str, location: str) -> str:
        """Return the data type's name: as NumPy has it, or as Zarr does if NumPy lacks it."""
        if self.is_ocdbt:
            data = _result(self.files, location, lambda: self._store.read(key)).value
        else:
            data = self.files.read(key, _MOST_METADATA_NBYTES)
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise damaged(location, f"it is no JSON: {str(error)[:200]}") from None
        name = (
            content.get("data_type" if self.is_v3 else "dtype") if isinstance(content, dict) else 0
        )
        if not isinstance(name, str):
            raise FormatUnsupported(f"{location}: its data type is no name")
        try:
            return np.dtype(name).name
        except (TypeError, ValueError, SyntaxError):
            return name

    def _check_chunks(self, name: str, count: int, chunk: tuple[int, ...], location: str) -> None:
        """Refuse an array that lacks chunks, before any is looked for: there may be 2**60."""
        absent = count - self._key_counts[name] + 1
        if absent > (0 if self.stores_all else _MOST_ABSENT_CHUNKS):
            raise CheckpointMissing(
                f"{location}: the array has {count} chunks of shape {chunk}, and "
                f"{max(count - absent, 0)} are there; copy all files of the checkpoint"
            )

    def _check_chunk_size(self, nbytes: int, location: str) -> None:
        """Refuse chunks that all files together cannot have: TensorStore would end the process."""
        if nbytes > _LARGEST_USUAL_NBYTES:
            stored = sum(self.files.file(name).nbytes for name in self.files.names)
            if nbytes > stored * _MOST_RATIO:
                raise damaged(location, f"a chunk of {nbytes} bytes cannot be in {stored} bytes")

    @property
    def _metadata_name(self) -> str:
        return "zarr.json" if self.is_v3 else ".zarray"

    @cached_property
    def _store(self) -> Any:
        """The key-value store that has the arrays."""
        import tensorstore

        files, storage = self.files, self.files.storage
        files.check_links()
        base: dict[str, Any]
        if isinstance(storage, FileStorage):
            context = tensorstore.Context()
            base = {"driver": "file", "path": f"{storage.root}/{files.directory}"}
        else:
            storage = _objects(storage)
            context = storage.context
            base = (storage.store / files.directory).spec().to_json()
        if self.is_ocdbt:
            if files.file(MANIFEST).nbytes > _MOST_METADATA_NBYTES:
                raise damaged(self._manifest, f"it has more than {_MOST_METADATA_NBYTES} bytes")
            cache = {"total_bytes_limit": _CACHE_NBYTES}
            base = {"driver": "ocdbt", "base": base, "cache_pool": cache}
        store = _result(
            files, self._manifest, lambda: tensorstore.KvStore.open(base, context=context)
        )
        if self.is_ocdbt:
            self._check_data_files(store.base)
        return store

    @property
    def _manifest(self) -> str:
        return f"{self.files.url}/{MANIFEST}"

    def _check_data_files(self, base: Any) -> None:
        """Refuse a store that refers to files that are not there, or to a node of itself twice."""
        import tensorstore

        def dump(node: str | None) -> Any:
            return _result(self.files, self._manifest, lambda: tensorstore.ocdbt.dump(base, node))

        roots = [version["root"] for version in dump(None)["versions"][-1:]]
        pending = [root["location"] for root in roots if "location" in root]
        seen = set()
        while pending:
            location = pending.pop()
            if location in seen:
                raise damaged(self._manifest, f"its tree has the node {location} twice")
            seen.add(location)
            self._check_file(location)
            for entry in dump(location)["entries"]:
                if "indirect_value" in entry:
                    self._check_file(entry["indirect_value"])
                elif "location" in entry:
                    pending.append(entry["location"])

    def _check_file(self, location: str) -> None:
        """Refuse the place of a node or value in a file that is not there."""
        _, directory, path, _, _ = location.split(":")
        self.files.check_name(unquote(f"{directory}{path}"))

    @cached_property
    def _keys(self) -> frozenset[str]:
        if not self.is_ocdbt:
            return frozenset(self.files.names)
        listed = _result(self.files, self._manifest, self._store.list)
        return frozenset(key.decode(errors="replace") for key in listed)

    @cached_property
    def _key_counts(self) -> Counter[str]:
        """Count the keys of each array: those of its chunks, and one of its metadata."""
        counts: Counter[str] = Counter()
        for key in self._keys:
            # A name may have slashes, so that the one that is known is not the first part.
            at = len(key)
            while (at := key.rfind("/", 0, at)) > 0 and key[:at] not in self.array_names:
                pass
            counts[key[: max(at, 0)]] += 1
        return counts


def _result(files: ForeignFiles, location: str, start: Callable[[], Any], nbytes: int = 0) -> Any:
    """Return what TensorStore reads."""
    try:
        return _wait(files, start, nbytes)
    except (ValueError, OSError) as error:
        if str(error).startswith("NOT_FOUND"):
            raise CheckpointMissing(
                f"{location}: {error}; copy all files of the checkpoint"
            ) from None
        raise damaged(location, f"TensorStore cannot read it: {error}") from None


def _wait(files: ForeignFiles, start: Callable[[], Any], nbytes: int = 0) -> Any:
    if isinstance(files.storage, FileStorage):
        return start().result()
    return _objects(files.storage).wait(start, nbytes)


def _objects(storage: Storage) -> ObjectStorage:
    from keepstep.checkpoint.format.stored.objects import ObjectStorage

    if not isinstance(storage, ObjectStorage):
        raise FormatUnsupported(
            f"{storage.url}: Orbax's checkpoints are read from a path, s3:// or gs://; copy it to "
            "one of them"
        )
    return storage
