"""Reads the leaves of a tree that Orbax saved: the `_METADATA` of an item, and its arrays.

The metadata has each leaf's path as a list of keys. Orbax names the leaf's array by the keys with
dots between them, which says nothing where keys have dots; so paths come from the list alone.
Named tuples are mappings there, and lists and tuples have numbers as keys.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from keepstep.checkpoint.convert.read.arrays import Array, FileArray, MemoryArray
from keepstep.checkpoint.convert.read.files import Extent, ForeignFiles, damaged
from keepstep.checkpoint.convert.read.hugging_face import read_json_object
from keepstep.checkpoint.convert.read.orbax_chunks import StoredChunk, UnopenedFile, Value, fill_of
from keepstep.checkpoint.convert.read.orbax_ocdbt import MANIFEST, InlineValue, read_ocdbt
from keepstep.checkpoint.convert.read.orbax_zarr import ArrayMetadata, parse_v2, parse_v3
from keepstep.checkpoint.convert.read.pieces import ForeignTensor, Piece
from keepstep.checkpoint.errors import CheckpointMissing
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import TensorSpec

METADATA = "_METADATA"
STRINGS = "_strings.json"

Path = tuple[str, ...]

_EMPTY = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple"})
_MOST_METADATA_NBYTES = 2**24
_MOST_DEPTH = 200
# What Orbax cuts larger arrays to.
_LARGEST_USUAL_NBYTES = 2**31
# Bytes that a byte of zstd can stand for: a block of four bytes has at most 128 KiB.
_MOST_RATIO = 2**15
# Chunks of zeros that old versions did not store, of all arrays of one item.
_MOST_ABSENT_CHUNKS = 2**16
_MOST_ABSENT_NBYTES = 2**30


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a tree.

    Attributes:
        path: its keys.
        kind: what Orbax calls its type: `jax.Array`, `np.ndarray`, `scalar`, `string`, `None`, ...
    """

    path: Path
    kind: str

    @property
    def array_name(self) -> str:
        """The name that Orbax gives its array."""
        return ".".join(self.path)

    @property
    def is_empty(self) -> bool:
        """Whether it stands for a container without content, or for None."""
        return self.kind in _EMPTY


class _Arrays(Protocol):
    """The keys of the arrays of one item, in whatever store they are."""

    def value(self, key: str) -> Value | None:
        """Return the value of a key, to be read at once; None if there is none."""
        ...

    def chunk(self, key: str, nbytes: int | None) -> Value | UnopenedFile | None:
        """Return the value of a chunk; `nbytes` is its size, if that is known."""
        ...

    def names(self) -> Iterator[str]:
        """Yield all keys."""
        ...


@dataclass(frozen=True, slots=True)
class _Ocdbt:
    values: Mapping[str, Extent | InlineValue]

    def value(self, key: str) -> Value | None:
        return self.values.get(key)

    def chunk(self, key: str, nbytes: int | None) -> Value | UnopenedFile | None:
        return self.values.get(key)

    def names(self) -> Iterator[str]:
        return iter(self.values)


@dataclass(frozen=True, slots=True)
class _Plain:
    files: ForeignFiles

    def value(self, key: str) -> Value | None:
        return self.files.file(key).whole if key in self.files else None

    def chunk(self, key: str, nbytes: int | None) -> Value | UnopenedFile | None:
        if key not in self.files:
            return None
        if nbytes is None:
            return UnopenedFile(self.files, key)
        # Whether the file has so many bytes is seen when they are read.
        return self.files.file_of_size(key, nbytes).whole

    def names(self) -> Iterator[str]:
        return iter(self.files.names)


class OrbaxTree:
    """A tree in a folder.

    Attributes:
        leaves: in the order of the metadata.
        custom_metadata: what the user noted with it; None for nothing.
    """

    def __init__(self, files: ForeignFiles) -> None:
        """Read the metadata of a folder.

        Raises:
            CheckpointMissing: a file is not there.
            CheckpointDamaged: files contradict themselves or each other.
        """
        self._files = files
        self._where = f"{files.url}/{METADATA}"
        content = read_json_object(files, METADATA)
        self.custom_metadata: Json = content.get("custom_metadata")
        self.leaves = tuple(_leaves(content.get("tree_metadata"), self._where))
        self._is_v3 = content.get("use_zarr3") is True
        self._stores_all = content.get("store_array_data_equal_to_fill_value") is True
        is_ocdbt = content.get("use_ocdbt")
        self.is_ocdbt = MANIFEST in files if is_ocdbt is None else is_ocdbt is True
        self._absent_chunks = self._absent_nbytes = 0

    @cached_property
    def _arrays(self) -> _Arrays:
        return _Ocdbt(read_ocdbt(self._files)) if self.is_ocdbt else _Plain(self._files)

    @cached_property
    def _key_counts(self) -> Counter[str]:
        """Count the keys of each array: those of its chunks, and one of its metadata."""
        names = {leaf.array_name for leaf in self.leaves}
        counts: Counter[str] = Counter()
        for key in self._arrays.names():
            # A name may have slashes, so that the one that is known is not the first part.
            at = len(key)
            while (at := key.rfind("/", 0, at)) > 0:
                if key[:at] in names:
                    counts[key[:at]] += 1
                    break
            else:
                counts[""] += 1
        return counts

    def unnamed_arrays(self) -> Iterator[str]:
        """Yield the arrays that the metadata does not name."""
        leaf_name = f"/{self._metadata_name}"
        names = {leaf.array_name for leaf in self.leaves}
        for key in self._arrays.names():
            name = key.removesuffix(leaf_name)
            if name != key and name not in names:
                yield name

    @property
    def _metadata_name(self) -> str:
        return "zarr.json" if self._is_v3 else ".zarray"

    def array(self, leaf: Leaf) -> ForeignTensor | str | None:
        """Return a leaf's array; the data type, if that cannot be stored; None if it has none.

        Raises:
            CheckpointMissing: a chunk is not there.
            CheckpointDamaged: its metadata contradicts itself, or the chunks that are there.
            FormatUnsupported: its chunks are in a codec that is not read.
        """
        start = f"{leaf.array_name}/" if leaf.path else ""
        key = f"{start}{self._metadata_name}"
        value = self._arrays.value(key)
        if value is None:
            return None
        location = f"{self._files.url}/{key}"
        try:
            content = json.loads(value.read(_MOST_METADATA_NBYTES))
        except (ValueError, RecursionError) as error:
            raise damaged(location, f"it is no JSON: {str(error)[:200]}") from None
        if not isinstance(content, dict):
            raise damaged(location, "it is no JSON object")
        metadata = (parse_v3 if self._is_v3 else parse_v2)(content, location)
        if not metadata.can_be_stored:
            return metadata.dtype[:80]
        pieces = tuple(self._pieces(start, metadata, location))
        return ForeignTensor(TensorSpec(metadata.dtype, metadata.shape), pieces)

    def _pieces(self, start: str, metadata: ArrayMetadata, location: str) -> Iterator[Piece]:
        count = math.prod(metadata.grid)
        absent = count - self._key_counts[start.removesuffix("/")] + 1
        if absent > (0 if self._stores_all else _MOST_ABSENT_CHUNKS):
            # Said before any chunk is looked for: a few bytes of metadata can tell of 2**60.
            raise CheckpointMissing(
                f"{location}: the array has {count} chunks of shape {metadata.chunk}, and "
                f"{max(count - absent, 0)} are there; copy all files of the checkpoint"
            )
        # As far as chunks are plain, their size is known.
        nbytes = metadata.chunk_nbytes if metadata.encoding.is_plain else None
        for place in itertools.product(*map(range, metadata.grid)):
            offset = tuple(p * n for p, n in zip(place, metadata.chunk, strict=True))
            box = Box(
                offset,
                tuple(
                    min(n, extent - first)
                    for n, extent, first in zip(metadata.chunk, metadata.shape, offset, strict=True)
                ),
            )
            key = f"{start}{metadata.chunk_key(place)}"
            value = self._arrays.chunk(key, nbytes)
            if value is None:
                yield Piece(box, self._absent(box, key, metadata))
            else:
                yield Piece(box, _chunk_array(value, metadata, box.shape))

    def _absent(self, box: Box, key: str, metadata: ArrayMetadata) -> Array:
        """Return the elements of a chunk that is not there: as old versions left out zeros."""
        location = f"{self._files.url}/{key}"
        if self._stores_all:
            raise CheckpointMissing(
                f"{location}: the chunk is not there; copy all files of the checkpoint"
            )
        self._absent_chunks += 1
        self._absent_nbytes += box.size * numpy_dtype(metadata.dtype).itemsize
        if self._absent_chunks > _MOST_ABSENT_CHUNKS or self._absent_nbytes > _MOST_ABSENT_NBYTES:
            raise damaged(location, "this chunk and far too many others are not there")
        values = fill_of(metadata, location)
        return MemoryArray(metadata.dtype, np.broadcast_to(values, box.shape), location)

    def string(self, leaf: Leaf) -> str | None:
        """Return a leaf's text, which is in a file of all texts; None if it is not there.

        Raises:
            CheckpointDamaged: the file is no JSON object.
        """
        content: Any = self._strings
        for key in leaf.array_name.split("/"):
            content = content.get(key) if isinstance(content, dict) else None
        return content if isinstance(content, str) else None

    @cached_property
    def _strings(self) -> Mapping[str, Json]:
        return read_json_object(self._files, STRINGS) if STRINGS in self._files else {}


def _chunk_array(
    value: Value | UnopenedFile, metadata: ArrayMetadata, shape: tuple[int, ...]
) -> Array:
    """Return the elements of a chunk that lie in the array, which begins at the chunk's first."""
    inside = Box((0,) * len(shape), shape)
    if metadata.encoding.is_plain and isinstance(value, Extent):
        return FileArray.contiguous(value, metadata.dtype, metadata.chunk).narrow(inside)
    if metadata.chunk_nbytes > _LARGEST_USUAL_NBYTES and isinstance(value, UnopenedFile):
        # To ask for the size of each file would take long, and for these it pays.
        value = value.opened()
    if not isinstance(value, UnopenedFile) and (
        metadata.chunk_nbytes > max(value.nbytes, 1) * _MOST_RATIO
    ):
        raise damaged(
            value.location,
            f"a chunk of {metadata.chunk_nbytes} bytes cannot be in {value.nbytes} bytes",
        )
    return StoredChunk(value, metadata, inside)


def _leaves(tree: Json, where: str) -> Iterator[Leaf]:
    if not isinstance(tree, dict):
        raise damaged(where, "its tree_metadata is no mapping")
    paths: set[Path] = set()
    for name, entry in tree.items():
        keys = entry.get("key_metadata") if isinstance(entry, dict) else None
        value = entry.get("value_metadata") if isinstance(entry, dict) else None
        kind = value.get("value_type") if isinstance(value, dict) else None
        if not isinstance(keys, list) or not isinstance(kind, str) or len(keys) > _MOST_DEPTH:
            raise damaged(where, f"its entry {name[:80]} has no keys, no type, or far too many")
        path = tuple(
            key["key"] for key in keys if isinstance(key, dict) and isinstance(key.get("key"), str)
        )
        if len(path) != len(keys):
            raise damaged(where, f"its entry {name[:80]} has a key that is no text")
        if path in paths:
            raise damaged(where, f"two entries have the path {str(path)[:80]}")
        paths.add(path)
        yield Leaf(path, kind)
