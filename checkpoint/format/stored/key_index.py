"""Index of a checkpoint's arrays by key: which bytes of `zarr.json` and `chunks.json` tell of each.

Pure. Both objects have a member for each array, in order of keys. The index divides the keys into
blocks, and has for each block the range of its members in either object, with a checksum: a reader
of some arrays reads and parses the blocks that have them. Whatever was read from storage is checked
here before it is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import crc32c

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.names import check_keys
from keepstep.checkpoint.format.stored.object_names import INDEX
from keepstep.checkpoint.format.stored.stored_json import decode, encode, is_count

INDEXED_NBYTES = 2**20
"""Root metadata of fewer bytes have no index: they are about four blocks."""

_BLOCK_NBYTES = 2**18
# About what an array has in the root metadata, and a chunk in `chunks.json`.
_ARRAY_NBYTES, _CHUNK_NBYTES = 900, 6


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Some bytes of an object: their offset, how many they are, and their crc32c."""

    offset: int
    nbytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class BlockedJson:
    """A JSON object whose members come in blocks, and the range of each block's members.

    The bytes of a range, between braces, are a JSON object with the block's members.
    """

    data: bytes
    ranges: tuple[ByteRange, ...]

    @classmethod
    def of(cls, before: bytes, blocks: Sequence[Mapping[str, Json]], after: bytes) -> BlockedJson:
        """Return the object of these blocks of members, which others may enclose.

        Args:
            before: what comes before the first member.
            blocks: the members; a block may have none.
            after: what comes after the last member.
        """
        pieces, ranges = [before], []
        offset, is_first = len(before), True
        for block in blocks:
            members = encode(dict(block))[1:-1]
            if members and not is_first:
                pieces.append(b",")
                offset += 1
            ranges.append(ByteRange(offset, len(members), crc32c.crc32c(members)))
            pieces.append(members)
            offset += len(members)
            is_first = is_first and not members
        return cls(b"".join([*pieces, after]), tuple(ranges))


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """The keys of a checkpoint's arrays in blocks, and where their members are.

    Attributes:
        blocks: the keys of each block; ascending over all blocks.
        arrays: for each block, the range of its arrays' members in the root metadata.
        chunks: for each block, the range of its members in `chunks.json`.
        numbers: the number of the block that has each key, in order of the keys.
    """

    blocks: tuple[tuple[str, ...], ...]
    arrays: tuple[ByteRange, ...]
    chunks: tuple[ByteRange, ...]
    numbers: Mapping[str, int]

    @classmethod
    def of(
        cls,
        blocks: Sequence[Sequence[str]],
        arrays: Sequence[ByteRange],
        chunks: Sequence[ByteRange],
    ) -> KeyIndex:
        """Return an index of blocks with these ranges."""
        numbers = {key: number for number, keys in enumerate(blocks) for key in keys}
        return cls(tuple(map(tuple, blocks)), tuple(arrays), tuple(chunks), numbers)

    def encode(self) -> bytes:
        """Return the index as JSON."""
        return encode(
            [
                [keys, _to_json(arrays), _to_json(chunks)]
                for keys, arrays, chunks in zip(self.blocks, self.arrays, self.chunks, strict=True)
            ]
        )

    @classmethod
    def decode(cls, data: bytes, where: str) -> KeyIndex:
        """Parse what `encode` returned.

        Raises:
            CheckpointDamaged: the data has another form.
        """
        content = decode(data, where)
        try:
            if not isinstance(content, list):
                raise ValueError(f"blocks {content!r:.200}")
            blocks = [_keys(keys) for keys, _, _ in content]
            keys = [key for block in blocks for key in block]
            if any(first >= second for first, second in itertools.pairwise(keys)):
                raise ValueError("its keys are not in ascending order")
            check_keys(keys)
            if any(key.partition("/")[0] == INDEX for key in keys):
                raise ValueError(f"a tensor is named {INDEX}")
            arrays = [_range(arrays) for _, arrays, _ in content]
            chunks = [_range(chunks) for _, _, chunks in content]
            # Else a few bytes could have a reader parse all of an object for every block.
            for ranges in (arrays, chunks):
                if any(a.offset + a.nbytes > b.offset for a, b in itertools.pairwise(ranges)):
                    raise ValueError("its ranges are not one after the other")
            return cls.of(blocks, arrays, chunks)
        except (TypeError, ValueError) as error:
            raise CheckpointDamaged(
                f"{where} is not an index of arrays: {error}; load an older step"
            ) from error


def blocks_of(keys: Sequence[str], chunk_count: Callable[[str], int]) -> list[list[str]]:
    """Return ascending keys in blocks of about the same size of what tells of them.

    Args:
        keys: the keys of all arrays.
        chunk_count: returns how many chunks an array has.
    """
    blocks: list[list[str]] = []
    room = 0
    for key in keys:
        if room <= 0:
            blocks.append([])
            room = _BLOCK_NBYTES
        blocks[-1].append(key)
        room -= _ARRAY_NBYTES + _CHUNK_NBYTES * chunk_count(key)
    return blocks


def _to_json(part: ByteRange) -> Json:
    return [part.offset, part.nbytes, part.crc32c]


def _range(data: Any) -> ByteRange:
    offset, nbytes, checksum = data
    if not (is_count(offset) and is_count(nbytes) and is_count(checksum) and checksum < 2**32):
        raise ValueError(f"range {data!r:.200}")
    return ByteRange(offset, nbytes, checksum)


def _keys(data: Any) -> list[str]:
    if not (isinstance(data, list) and data and all(isinstance(key, str) for key in data)):
        raise ValueError(f"keys {data!r:.200}")
    return data
