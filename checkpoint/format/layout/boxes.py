"""Defines boxes of global tensors, and the index of the boxes that one rank's buffer holds.

Pure values. A live shard, a snapshot arena and a stored chunk are described by the same types, so
one planner (`checkpoint.format.layout.planner`) computes the reads between any two of them.

Invariants: a `Box` lies inside the tensor it belongs to; an entry's bytes are its box in C order,
little-endian.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

Json = Any
"""A tree of dict, list, str, int, float, bool and None, which `json` encodes without loss."""


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: `offset` and `shape` in elements, one number per dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(f"box offset {self.offset} and shape {self.shape} differ in rank")
        # Without generators: a planner of many ranks makes hundreds of thousands of boxes.
        if min(self.offset, default=0) < 0 or min(self.shape, default=0) < 0:
            raise ValueError(f"box has a negative offset {self.offset} or shape {self.shape}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that covers all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Number of elements; 1 for a scalar's box, 0 for an empty one."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index expression that selects this box from an array of the whole tensor."""
        return tuple(
            slice(start, start + n) for start, n in zip(self.offset, self.shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """Return the common block, or None if the two share no element."""
        starts: list[int] = []
        extents: list[int] = []
        for start, extent, other_start, other_extent in zip(
            self.offset, self.shape, other.offset, other.shape, strict=True
        ):
            first = max(start, other_start)
            count = min(start + extent, other_start + other_extent) - first
            if count <= 0:
                return None
            starts.append(first)
            extents.append(count)
        return Box(tuple(starts), tuple(extents))

    def is_within(self, outer: Box) -> bool:
        """Whether all elements of this box are in another one."""
        return len(self.shape) == len(outer.shape) and all(
            first >= outer_first and first + extent <= outer_first + outer_extent
            for first, extent, outer_first, outer_extent in zip(
                self.offset, self.shape, outer.offset, outer.shape, strict=True
            )
        )

    def within(self, outer: Box) -> Box:
        """Return this box in the coordinates of `outer`, which must contain it."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    def placed_in(self, outer: Box) -> Box:
        """Return the box that has this one's coordinates inside `outer`: undoes `within`."""
        return Box(tuple(a + b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return `within(outer).slices`, without the box between: a store asks for thousands."""
        return tuple(
            slice(start - first, start - first + n)
            for start, first, n in zip(self.offset, outer.offset, self.shape, strict=True)
        )


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes of one tensor that share elements, or None if there are none."""
    # Boxes that share no element along the axis that separates most of them need no comparison.
    axes = range(max((len(box.shape) for box in boxes), default=0))
    axis = max(axes, key=lambda n: len({box.offset[n] for box in boxes}), default=None)
    if axis is None:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    near: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offset[axis]):
        near = [
            other for other in near if other.offset[axis] + other.shape[axis] > box.offset[axis]
        ]
        for other in near:
            if box.intersect(other) is not None:
                return other, box
        near.append(box)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One box of one tensor, as contiguous C-order bytes at `byte_offset` of a rank's buffer.

    `key` is the tensor's name in the checkpoint hierarchy (`model/<fqn>`, `optim/<fqn>/<slot>`);
    `dtype` is a Zarr v3 data type name (`float32`, `bfloat16`, ...), which
    `checkpoint.format.layout.dtypes` maps to NumPy and `checkpoint.live.tensors` to
    torch.
    """

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    byte_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The contents of one rank's buffer of `nbytes` bytes.

    `documents` are the parts of the state that are not tensors, by name, as JSON (`optim/groups`,
    `data`, ...). A name is job-wide (every rank holds the same) unless it begins with
    `rank/<rank>/`.
    """

    nbytes: int
    entries: tuple[Entry, ...]
    documents: Mapping[str, Json]

    @property
    def by_key(self) -> dict[str, tuple[Entry, ...]]:
        """The entries by tensor key; a rank may hold several boxes of a tensor."""
        entries: dict[str, list[Entry]] = {}
        for entry in self.entries:
            entries.setdefault(entry.key, []).append(entry)
        return {key: tuple(boxes) for key, boxes in entries.items()}


class _Boxes(msgspec.Struct):
    nbytes: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class DecodedIndex:
    """A `ShardIndex` and the text of its boxes, for the one that is decoded after it."""

    index: ShardIndex
    boxes_text: bytes


def encode_boxes(nbytes: int, entries: Sequence[Entry]) -> bytes:
    """Return the first line of an index, which is the same while the layout is."""
    return msgspec.json.encode(_Boxes(nbytes, tuple(entries)))


def encode_index(encoded_boxes: bytes, documents: Mapping[str, Json]) -> bytes:
    """Return a `ShardIndex` as two lines of JSON text: boxes, which seldom change, and documents.

    Args:
        encoded_boxes: a result of `encode_boxes`.
        documents: as in `ShardIndex`.
    """
    encoded_documents = json.dumps(dict(documents), separators=(",", ":"))
    return encoded_boxes + b"\n" + encoded_documents.encode()


def decode_index(encoded: bytes, known: DecodedIndex | None = None) -> DecodedIndex:
    """Parse a result of `encode_index`.

    Args:
        encoded: the text.
        known: an index that may have the same boxes, which are then not parsed again.

    Raises:
        ValueError, TypeError, RecursionError: it is no such text.
    """
    boxes_text, _, encoded_documents = encoded.partition(b"\n")
    documents = dict(json.loads(encoded_documents))
    if known is not None and known.boxes_text == boxes_text:
        return DecodedIndex(replace(known.index, documents=documents), boxes_text)
    boxes = msgspec.json.decode(boxes_text, type=_Boxes)
    return DecodedIndex(ShardIndex(boxes.nbytes, boxes.entries, documents), boxes_text)
