"""Assembles tensors from pieces: boxes of the global tensor, each with the array that has it.

Pure. Invariant: the pieces of a `ForeignTensor` are disjoint and cover it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keepstep.checkpoint.convert.read.arrays import Array, FileArray
from keepstep.checkpoint.convert.read.files import damaged
from keepstep.checkpoint.format.layout.boxes import Box, overlapping
from keepstep.checkpoint.format.layout.fragments import boxes_of_range
from keepstep.checkpoint.format.layout.source import TensorSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor, and the array of the box's shape that has its elements."""

    box: Box
    array: Array


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A global tensor and its pieces. Made by `assembled`."""

    spec: TensorSpec
    pieces: tuple[Piece, ...]


def whole(array: Array) -> ForeignTensor:
    """Return the tensor that one array has."""
    return ForeignTensor(
        TensorSpec(array.dtype, array.shape), (Piece(Box.whole(array.shape), array),)
    )


def assembled(key: str, spec: TensorSpec, pieces: Iterable[Piece]) -> ForeignTensor:
    """Return a tensor, once its pieces are shown to be disjoint and to cover it.

    Pieces without elements are dropped: ranks write them where there are more ranks than rows.

    Raises:
        CheckpointDamaged: they contradict each other or the tensor; the message names the files.
    """
    full = tuple(piece for piece in pieces if piece.box.size)
    for piece in full:
        _check_piece(key, spec, piece)
    boxes = [piece.box for piece in full]
    if overlap := overlapping(boxes):
        # Equal boxes are two objects: identity tells them apart.
        first, second = (
            next(piece for piece in full if piece.box is box).array.location for box in overlap
        )
        raise damaged(
            first,
            f"it has {_described(overlap[0])} of {key}, and {second} has "
            f"{_described(overlap[1])}, which overlaps it",
        )
    total, present = Box.whole(spec.shape).size, sum(box.size for box in boxes)
    if total != present:
        where = full[0].array.location if full else key
        raise damaged(
            where,
            f"{key} has shape {spec.shape}, {total} elements, and only {present} of them are in "
            f"the checkpoint's files ({len(full)} pieces)",
        )
    return ForeignTensor(spec, full)


def first_of_each_box(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return the pieces without those that have the box of an earlier one: replicas."""
    distinct: dict[Box, Piece] = {}
    for piece in pieces:
        distinct.setdefault(piece.box, piece)
    return tuple(distinct.values())


def pieces_of_range(shape: Sequence[int], start: int, elements: FileArray) -> tuple[Piece, ...]:
    """Return the pieces of a tensor that a one-dimensional array has as consecutive elements.

    So FSDP1 and ZeRO keep parameters: flattened, and cut without regard to rows.

    Args:
        shape: the tensor's shape.
        start: position of the array's first element in the flattened tensor.
        elements: the elements; those behind the tensor's end are padding, cut off by the caller.

    Raises:
        ValueError: the tensor has fewer elements.
    """
    pieces = []
    position = 0
    for box in boxes_of_range(shape, start, start + elements.size):
        part = elements.flat_range(position, position + box.size)
        pieces.append(Piece(box, part.reshaped(box.shape)))
        position += box.size
    return tuple(pieces)


def _check_piece(key: str, spec: TensorSpec, piece: Piece) -> None:
    if piece.array.shape != piece.box.shape or piece.array.dtype != spec.dtype:
        raise damaged(
            piece.array.location,
            f"it has {piece.array.dtype} of shape {piece.array.shape} for {_described(piece.box)} "
            f"of {key}, which is {spec.dtype} of shape {spec.shape}",
        )
    if len(piece.box.shape) != len(spec.shape) or any(
        offset + extent > most
        for offset, extent, most in zip(piece.box.offset, piece.box.shape, spec.shape, strict=True)
    ):
        raise damaged(
            piece.array.location,
            f"it has {_described(piece.box)} of {key}, which lies outside its shape {spec.shape}",
        )


def _described(box: Box) -> str:
    return f"the block of shape {box.shape} at {box.offset}"
