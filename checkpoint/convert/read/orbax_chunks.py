"""Decodes chunks of Zarr arrays when a box of them is read.

A compressed chunk is decoded whole, whatever part of it is wanted: as large as Orbax made it, which
is what one process had of the array. Of chunks beyond 64 MiB one is decoded at a time.
"""

from __future__ import annotations

import itertools
import math
import threading
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import crc32c
import numpy as np

from keepstep.checkpoint.convert.read.arrays import Values, view_of
from keepstep.checkpoint.convert.read.files import Extent, ForeignFiles, damaged
from keepstep.checkpoint.convert.read.orbax_ocdbt import InlineValue
from keepstep.checkpoint.convert.read.orbax_zarr import ArrayMetadata, Shards
from keepstep.checkpoint.convert.read.orbax_zstd import decompress
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype

_LARGE_NBYTES = 2**26
_ONE_LARGE = threading.Lock()
_CHECKSUM_NBYTES = 4
_INDEX_NBYTES = 16
_ABSENT = 2**64 - 1
_MOST_STORED_NBYTES = 2**40


@dataclass(frozen=True, slots=True)
class UnopenedFile:
    """A file that is a chunk. Its size is asked for when it is read: there may be very many."""

    files: ForeignFiles
    name: str

    @property
    def location(self) -> str:
        """URL of the file, for error messages."""
        return f"{self.files.url}/{self.name}"

    def opened(self) -> Extent:
        """Return all bytes of the file."""
        return self.files.file(self.name).whole


Value = Extent | InlineValue


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunk:
    """The elements in a box of a chunk, as an `Array`.

    Attributes:
        value: the chunk's bytes.
        metadata: of the array that the chunk belongs to.
        box: the part of the chunk; chunks at an array's edge reach beyond it.
    """

    value: Value | UnopenedFile
    metadata: ArrayMetadata
    box: Box

    @property
    def dtype(self) -> str:
        """See `Array.dtype`."""
        return self.metadata.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Array.shape`."""
        return self.box.shape

    @property
    def location(self) -> str:
        """See `Array.location`."""
        return self.value.location

    def narrow(self, box: Box) -> StoredChunk:
        """See `Array.narrow`."""
        offset = tuple(a + b for a, b in zip(self.box.offset, box.offset, strict=True))
        return StoredChunk(self.value, self.metadata, Box(offset, box.shape))

    def read_into(self, box: Box, into: Values) -> None:
        """See `Array.read_into`."""
        wanted = self.narrow(box).box
        value = self.value.opened() if isinstance(self.value, UnopenedFile) else self.value
        shards = self.metadata.encoding.shards
        is_large = self.metadata.chunk_nbytes > _LARGE_NBYTES
        try:
            with _ONE_LARGE if is_large else nullcontext():
                if shards is None:
                    encoding = self.metadata.encoding
                    self._copy(
                        value, encoding.compression, encoding.has_checksum, self.metadata.chunk,
                        wanted, into,
                    )  # fmt: skip
                else:
                    self._copy_inner(value, shards, wanted, into)
        except (ValueError, zlib.error) as error:
            raise damaged(value.location, f"a chunk cannot be decoded: {error}") from None

    def _copy(
        self,
        value: Value,
        compression: str | None,
        has_checksum: bool,
        shape: tuple[int, ...],
        wanted: Box,
        into: Values,
    ) -> None:
        """Copy a box of one chunk or inner chunk."""
        dtype = numpy_dtype(self.metadata.dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        data = value.read(_MOST_STORED_NBYTES)
        if has_checksum:
            data, checksum = data[:-_CHECKSUM_NBYTES], data[-_CHECKSUM_NBYTES:]
            if crc32c.crc32c(data).to_bytes(_CHECKSUM_NBYTES, "little") != checksum:
                raise ValueError("its checksum does not match its bytes")
        raw = np.dtype(f"V{dtype.itemsize}")
        decoded = _decoded(data, compression, nbytes).view(raw).reshape(shape)
        into.view(raw)[...] = view_of(decoded, wanted)

    def _copy_inner(self, value: Value, shards: Shards, wanted: Box, into: Values) -> None:
        """Copy a box of a chunk from the inner chunks that have parts of it."""
        grid = tuple(n // m for n, m in zip(self.metadata.chunk, shards.shape, strict=True))
        index = _index(value, shards, math.prod(grid))
        for place, inner in _places(shards.shape, wanted):
            offset, nbytes = map(int, index[np.ravel_multi_index(place, grid) if grid else 0])
            start = tuple(p * n for p, n in zip(place, shards.shape, strict=True))
            target = view_of(into, inner.within(wanted))
            if (offset, nbytes) == (_ABSENT, _ABSENT):
                target[...] = fill_of(self.metadata, value.location)
                continue
            part = value.part(offset, nbytes)
            within = inner.within(Box(start, shards.shape))
            self._copy(part, shards.compression, shards.has_checksum, shards.shape, within, target)


def fill_of(metadata: ArrayMetadata, location: str) -> Values:
    """Return the element that stands where an array has no chunk.

    Raises:
        CheckpointDamaged: the metadata has something else.
    """
    fill = metadata.fill
    if fill is None:
        fill = 0
    elif isinstance(fill, str):
        fill = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(fill, fill)
    try:
        if not isinstance(fill, int | float):
            raise ValueError(f"{str(fill)[:80]} is no number")
        return np.asarray(fill).astype(numpy_dtype(metadata.dtype))
    except (ValueError, OverflowError) as error:
        raise damaged(location, f"what it is filled with cannot be: {error}") from None


def _places(shape: tuple[int, ...], wanted: Box) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Yield the places of inner chunks that have elements of a box, and the parts of it there."""
    ranges = [
        range(start // n, (start + extent - 1) // n + 1)
        for start, extent, n in zip(wanted.offset, wanted.shape, shape, strict=True)
    ]
    for place in itertools.product(*ranges):
        start = tuple(p * n for p, n in zip(place, shape, strict=True))
        inner = Box(start, shape).intersect(wanted)
        assert inner is not None
        yield place, inner


def _index(value: Value, shards: Shards, count: int) -> Values:
    """Return the places of inner chunks in a chunk's bytes: an offset and a size of each."""
    checksum_nbytes = _CHECKSUM_NBYTES if shards.index_has_checksum else 0
    nbytes = count * _INDEX_NBYTES + checksum_nbytes
    if nbytes > value.nbytes:
        raise ValueError(f"{count} inner chunks cannot be in {value.nbytes} bytes")
    offset = 0 if shards.index_is_first else value.nbytes - nbytes
    data = value.part(offset, nbytes).read(nbytes)
    if checksum_nbytes:
        data, checksum = data[:-checksum_nbytes], data[-checksum_nbytes:]
        if crc32c.crc32c(data).to_bytes(checksum_nbytes, "little") != checksum:
            raise ValueError("the checksum of its index does not match")
    return np.frombuffer(data, "<u8").reshape(count, 2)


def _decoded(data: bytes, compression: str | None, nbytes: int) -> Values:
    """Return the bytes of the elements.

    Raises:
        ValueError: they are not of this size.
    """
    if compression == "zstd":
        data = decompress(data)
    if compression == "gzip":
        data = zlib.decompressobj(wbits=31).decompress(data, nbytes + 1)
    if len(data) != nbytes:
        raise ValueError(f"it has {len(data)} bytes or more, and its elements have {nbytes}")
    return np.frombuffer(data, np.uint8)
