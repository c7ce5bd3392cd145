"""Parses the metadata of Zarr arrays that Orbax writes: shape, grid of chunks, and codecs.

Pure. Zarr v2 with zstd or without compression, and Zarr v3 with one shard per chunk. What Zarr has
beyond that (filters, other codecs) is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.checkpoint.convert.read.files import damaged
from keepstep.checkpoint.errors import FormatUnsupported
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype

_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 2**60
_NUMPY_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}


@dataclass(frozen=True, slots=True)
class Shards:
    """Describes the inner chunks of a chunk, which has an index of their places.

    Attributes:
        shape: of an inner chunk.
        compression: of an inner chunk, as in `Encoding`.
        has_checksum: whether a checksum follows each inner chunk.
        index_has_checksum: whether a checksum follows the index.
        index_is_first: whether the index is at the chunk's beginning, not at its end.
    """

    shape: tuple[int, ...]
    compression: str | None
    has_checksum: bool
    index_has_checksum: bool
    index_is_first: bool


@dataclass(frozen=True, slots=True)
class Encoding:
    """Describes how the elements of a chunk are stored.

    Attributes:
        compression: None, `zstd` or `gzip`.
        has_checksum: whether a crc32c follows.
        shards: if the chunk has inner chunks; then the others are without meaning.
    """

    compression: str | None = None
    has_checksum: bool = False
    shards: Shards | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the bytes are the elements, in C order."""
        return self == Encoding()


@dataclass(frozen=True, slots=True)
class ArrayMetadata:
    """One array.

    Attributes:
        dtype: as `checkpoint.format.layout.dtypes` names it; or as Zarr does, if that cannot be
            stored.
        shape: number of elements in each dimension.
        chunk: shape of a chunk; those at the edges are stored in full too.
        encoding: of each chunk.
        fill: what the elements of a chunk are that is not there.
        key_start: what a chunk's key begins with.
        separator: between the numbers of a chunk's key.
    """

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    encoding: Encoding
    fill: Json
    key_start: str
    separator: str

    @property
    def can_be_stored(self) -> bool:
        """Whether the data type is one of keepstep's format."""
        try:
            numpy_dtype(self.dtype)
        except ValueError:
            return False
        return True

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks in each dimension."""
        return tuple(-(-n // m) if n else 0 for n, m in zip(self.shape, self.chunk, strict=True))

    @property
    def chunk_nbytes(self) -> int:
        """Size of a chunk's elements in bytes."""
        return math.prod(self.chunk) * numpy_dtype(self.dtype).itemsize

    def chunk_key(self, place: Sequence[int]) -> str:
        """Return the key of the chunk at a place of the grid."""
        numbers = self.separator.join(map(str, place))
        if not self.key_start:
            return numbers or "0"
        return f"{self.key_start}{self.separator}{numbers}" if numbers else self.key_start


def parse_v2(content: Mapping[str, Any], location: str) -> ArrayMetadata:
    """Return what a `.zarray` says.

    Raises:
        CheckpointDamaged: it is none, or absurd.
        FormatUnsupported: it needs what is not read here.
    """
    if content.get("zarr_format") != 2:
        raise damaged(location, "it is no metadata of a Zarr v2 array")
    if content.get("filters") or content.get("order", "C") != "C":
        raise FormatUnsupported(f"{location}: Zarr v2 with filters, or in order F, is not read")
    compressor = content.get("compressor")
    compression = None
    if compressor is not None:
        compression = _text(compressor, "id", location)
        if compression not in ("zstd", "gzip"):
            raise FormatUnsupported(
                f"{location}: chunks compressed by {compression[:40]!r} are not read; zstd and "
                "gzip are"
            )
    return ArrayMetadata(
        dtype=_dtype_v2(content.get("dtype"), location),
        **_shapes(content.get("shape"), content.get("chunks"), location),
        encoding=Encoding(compression),
        fill=content.get("fill_value"),
        key_start="",
        separator=_separator(content.get("dimension_separator", "."), location),
    )


def parse_v3(content: Mapping[str, Any], location: str) -> ArrayMetadata:
    """Return what a `zarr.json` says.

    Raises:
        CheckpointDamaged: it is none, or absurd.
        FormatUnsupported: it needs what is not read here.
    """
    if content.get("zarr_format") != 3 or content.get("node_type") != "array":
        raise damaged(location, "it is no metadata of a Zarr v3 array")
    grid = _mapping(content, "chunk_grid", location)
    keys = content.get("chunk_key_encoding", {"name": "default"})
    if grid.get("name") != "regular" or not isinstance(keys, dict):
        raise FormatUnsupported(f"{location}: only regular grids of chunks are read")
    if keys.get("name") not in ("default", "v2"):
        raise FormatUnsupported(f"{location}: its keys of chunks are in no encoding that is known")
    is_default = keys["name"] == "default"
    options = keys.get("configuration", {})
    separator = options.get("separator") if isinstance(options, dict) else None
    dtype = content.get("data_type")
    if not isinstance(dtype, str):
        raise FormatUnsupported(f"{location}: its data type is no name")
    shapes = _shapes(
        content.get("shape"),
        _mapping(grid, "configuration", location).get("chunk_shape"),
        location,
    )
    return ArrayMetadata(
        dtype=dtype,
        **shapes,
        encoding=_encoding(content.get("codecs"), shapes["chunk"], location),
        fill=content.get("fill_value"),
        key_start="c" if is_default else "",
        separator=_separator(separator or ("/" if is_default else "."), location),
    )


def _encoding(codecs: Json, chunk: tuple[int, ...], location: str) -> Encoding:
    listed = _codecs(codecs, location)
    if [name for name, _ in listed] != ["sharding_indexed"]:
        compression, has_checksum = _compression(listed, location)
        return Encoding(compression, has_checksum)
    options = listed[0][1]
    shape = _shape(options.get("chunk_shape"), location)
    if len(shape) != len(chunk) or any(
        not inner or extent % inner for inner, extent in zip(shape, chunk, strict=False)
    ):
        raise damaged(location, f"inner chunks of shape {shape} cannot make chunks of {chunk}")
    compression, has_checksum = _compression(_codecs(options.get("codecs"), location), location)
    index, index_has_checksum = _compression(
        _codecs(options.get("index_codecs"), location), location
    )
    place = options.get("index_location", "end")
    if index is not None or place not in ("start", "end"):
        raise FormatUnsupported(f"{location}: the index of its shards is in no form that is read")
    return Encoding(
        shards=Shards(shape, compression, has_checksum, index_has_checksum, place == "start")
    )


def _compression(
    codecs: Sequence[tuple[str, Mapping[str, Any]]], location: str
) -> tuple[str | None, bool]:
    """Return what follows the codec `bytes`: a compression, and whether a checksum."""
    names = [name for name, _ in codecs]
    if names[:1] != ["bytes"] or codecs[0][1].get("endian", "little") != "little":
        raise FormatUnsupported(f"{location}: its elements are not in little-endian bytes")
    rest = names[1:]
    compression = rest.pop(0) if rest[:1] in (["zstd"], ["gzip"]) else None
    has_checksum = rest[:1] == ["crc32c"]
    if rest[has_checksum:]:
        raise FormatUnsupported(
            f"{location}: chunks in the codec {rest[-1][:40]!r} are not read; bytes, zstd, gzip, "
            "crc32c and sharding_indexed are"
        )
    return compression, has_checksum


def _codecs(codecs: Json, location: str) -> list[tuple[str, Mapping[str, Any]]]:
    if not isinstance(codecs, list) or not codecs:
        raise damaged(location, "it does not list its codecs")
    listed: list[tuple[str, Mapping[str, Any]]] = []
    for codec in codecs:
        options = codec.get("configuration", {}) if isinstance(codec, dict) else None
        if not isinstance(options, dict) or not isinstance(codec.get("name"), str):
            raise damaged(location, "a codec of it has no name")
        listed.append((codec["name"], options))
    return listed


def _dtype_v2(dtype: Json, location: str) -> str:
    """Return the data type's name: NumPy's abbreviation, or the name of what NumPy lacks."""
    if not isinstance(dtype, str) or not dtype or len(dtype) > 40:
        raise FormatUnsupported(f"{location}: its data type is no name")
    order, kind, size = dtype[0], dtype[1:2], dtype[2:]
    if order not in "<>|=":
        return dtype
    if kind not in _NUMPY_KINDS or not (size.isascii() and size.isdecimal()):
        return dtype
    if order == ">" and size != "1":
        raise FormatUnsupported(f"{location}: its elements are big-endian ({dtype})")
    return "bool" if kind == "b" else f"{_NUMPY_KINDS[kind]}{int(size) * 8}"


def _shapes(shape: Json, chunk: Json, location: str) -> dict[str, Any]:
    parsed, chunks = _shape(shape, location), _shape(chunk, location)
    if len(parsed) != len(chunks) or any(not m and n for n, m in zip(parsed, chunks, strict=False)):
        raise damaged(location, f"chunks of shape {chunks} cannot make an array of {parsed}")
    return {"shape": parsed, "chunk": chunks}


def _shape(shape: Json, location: str) -> tuple[int, ...]:
    if (
        not isinstance(shape, list)
        or len(shape) > _MOST_DIMENSIONS
        or not all(type(n) is int and 0 <= n <= _MOST_ELEMENTS for n in shape)
        or math.prod(shape) > _MOST_ELEMENTS
    ):
        raise damaged(location, f"no array or chunk has shape {str(shape)[:200]}")
    return tuple(shape)


def _separator(value: Json, location: str) -> str:
    if value not in (".", "/"):
        raise damaged(location, "the numbers of its chunks' keys are parted by neither . nor /")
    return str(value)


def _text(content: Json, name: str, location: str) -> str:
    value = content.get(name) if isinstance(content, dict) else None
    if not isinstance(value, str):
        raise damaged(location, f"its {name} is no text")
    return value


def _mapping(content: Mapping[str, Any], name: str, location: str) -> Mapping[str, Any]:
    value = content.get(name)
    if not isinstance(value, dict):
        raise damaged(location, f"its {name} is no mapping")
    return value
