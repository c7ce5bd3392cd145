"""Listings of a stored checkpoint: the data objects of a writer, and which part lists a chunk.

Pure. Whatever was read from storage is checked here before it is used.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.stored.object_names import PACKS, is_object_name
from keepstep.checkpoint.format.stored.stored_json import decode, encode, is_count


@dataclass(frozen=True, slots=True)
class ChunkObject:
    """A chunk that is an object of its own.

    `checksums` are the crc32c of its cells in C order, 4 bytes each, little endian; a cell beyond
    the tensor's edge has none. `sizes` are their sizes with their checksums, in the same
    encoding; empty if the cells are not compressed, for all of them then have the same.
    """

    name: str
    nbytes: int
    checksums: bytes
    sizes: bytes = b""

    @property
    def key(self) -> str:
        """The chunk's tensor, if the name is that of a chunk."""
        return self.name.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """A chunk in a pack: its tensor's key, its place in the grid, its cells' checksums."""

    key: str
    place: tuple[int, ...]
    checksums: bytes


@dataclass(frozen=True, slots=True)
class Pack:
    """An object with chunks of several tensors, one after the other."""

    name: str
    nbytes: int
    chunks: tuple[PackedChunk, ...]


DataObject = ChunkObject | Pack


def encode_numbers(numbers: Sequence[int]) -> bytes:
    """Return numbers, such as checksums, as 4 bytes each, little endian."""
    return struct.pack(f"<{len(numbers)}I", *numbers)


def decode_numbers(data: bytes) -> tuple[int, ...]:
    """Return what `encode_numbers` was given."""
    return struct.unpack(f"<{len(data) // 4}I", data)


def encode_part(objects: Sequence[DataObject]) -> bytes:
    """Return the listing of the data objects that one writer wrote, as JSON."""
    return encode(
        [
            [
                item.name,
                item.nbytes,
                _as_text(item.checksums),
                *([_as_text(item.sizes)] if item.sizes else []),
            ]
            if isinstance(item, ChunkObject)
            else [
                item.name,
                item.nbytes,
                [
                    [chunk.key, list(chunk.place), _as_text(chunk.checksums)]
                    for chunk in item.chunks
                ],
            ]
            for item in objects
        ]
    )


def decode_part(data: bytes, where: str) -> tuple[DataObject, ...]:
    """Parse what `encode_part` returned.

    Raises:
        CheckpointDamaged: the data has another form.
    """
    listing = decode(data, where)
    try:
        return tuple(_parse_object(*item) for item in listing)
    except (TypeError, ValueError) as error:
        raise CheckpointDamaged(f"{where} is not a listing: {error}; load an older step") from error


def _parse_object(name: Json, nbytes: Json, content: Json, sizes: Json = "") -> DataObject:
    if not (is_object_name(name) and is_count(nbytes)):
        raise ValueError(f"not an object's entry: {name!r:.200}")
    if not name.startswith(f"{PACKS}/"):
        return ChunkObject(name, nbytes, _parse_numbers(content), _parse_numbers(sizes))
    if not isinstance(content, list) or sizes:
        raise ValueError(f"{name}: chunks {content!r:.200}, sizes {sizes!r:.200}")
    chunks: list[PackedChunk] = []
    for key, place, checksums in content:
        if not isinstance(key, str):
            raise ValueError(f"{name}: key {key!r:.200}")
        if not (isinstance(place, list) and all(map(is_count, place))):
            raise ValueError(f"{name}: chunk {place!r:.200} of {key!r:.200}")
        chunks.append(PackedChunk(key, tuple(place), _parse_numbers(checksums)))
    return Pack(name, nbytes, tuple(chunks))


def _as_text(numbers: bytes) -> str:
    return base64.b64encode(numbers).decode()


def _parse_numbers(content: Json) -> bytes:
    numbers = base64.b64decode(content, validate=True)
    if len(numbers) % 4:
        raise ValueError(f"numbers {content!r:.200}")
    return numbers


def encode_chunk_parts(parts: Mapping[str, Sequence[int]]) -> bytes:
    """Return the document that tells which part lists each chunk.

    Args:
        parts: for each tensor, the number of the part of each of its chunks, in C order.
    """
    return encode(
        {
            key: numbers[0] if len(set(numbers)) == 1 else _as_text(encode_numbers(numbers))
            for key, numbers in sorted(parts.items())
            if numbers
        }
    )


def decode_chunk_parts(data: bytes, where: str) -> dict[str, int | tuple[int, ...]]:
    """Parse what `encode_chunk_parts` returned: one number where all chunks are in one part.

    Raises:
        CheckpointDamaged: the data has another form.
    """
    content = decode(data, where)
    if not isinstance(content, dict):
        raise CheckpointDamaged(
            f"{where} does not tell which part lists a chunk; load an older step"
        )
    return {key: parse_chunk_parts(numbers, where) for key, numbers in content.items()}


def parse_chunk_parts(numbers: Json, where: str) -> int | tuple[int, ...]:
    """Parse a member of what `encode_chunk_parts` returned: one number if it is that of all chunks.

    Raises:
        CheckpointDamaged: it has another form.
    """
    if is_count(numbers):
        return int(numbers)
    try:
        packed = base64.b64decode(numbers, validate=True)
        return struct.unpack(f"<{len(packed) // 4}I", packed)
    except (TypeError, ValueError, struct.error) as error:
        raise CheckpointDamaged(
            f"{where} does not tell which part lists a chunk: {error}; load an older step"
        ) from error
