"""Describes 1-D tensors of live state that hold a range of a larger tensor's elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.distributed.tensor import DTensor

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.fragments import boxes_of_range
from keepstep.checkpoint.live.tensors import LiveTensor, offset_nbytes


@dataclass(frozen=True, slots=True, eq=False)
class FlatFragment:
    """A 1-D tensor that is a range of the elements of a larger one, flattened in C order.

    For frameworks that keep parameters in flat buffers of their own, such as DeepSpeed's ZeRO: put
    it into the state to save or load in place of a tensor.

    Args:
        tensor: this rank's elements, contiguous; none if it has no part of the larger tensor.
        shape: shape of the larger tensor.
        start: the place in the flattened larger tensor of this rank's first element.
    """

    tensor: torch.Tensor
    shape: Sequence[int]
    start: int = 0

    def __post_init__(self) -> None:
        tensor = self.tensor
        if isinstance(tensor, DTensor) or tensor.dim() != 1 or not tensor.is_contiguous():
            raise LayoutMismatch(
                f"a flat fragment is a 1-D, contiguous tensor of this rank, not a "
                f"{type(tensor).__name__} of shape {tuple(tensor.shape)}; pass tensor.view(-1)"
            )
        try:
            boxes_of_range(self.shape, self.start, self.start + tensor.numel())
        except ValueError as error:
            raise LayoutMismatch(f"{error}; correct the flat fragment's shape or start") from error

    def describe(self, key: str) -> tuple[LiveTensor, ...]:
        """Return the boxes that it consists of, of the tensor `key`."""
        return describe_range(
            key, tuple(self.shape), self.start, self.tensor.detach(), owner=self.tensor
        )


def describe_range(
    key: str, shape: tuple[int, ...], start: int, flat: torch.Tensor, *, owner: torch.Tensor
) -> tuple[LiveTensor, ...]:
    """Return the boxes of a tensor that a flat tensor holds; one empty box if it holds nothing.

    Args:
        key: the tensor's name.
        shape: its global shape.
        start: the place in the flattened tensor of the first element that is held.
        flat: the elements, 1-D and contiguous; it shares the memory of `owner`.
        owner: as in `LiveTensor`.
    """
    boxes = boxes_of_range(shape, start, start + flat.numel())
    if not boxes:
        return empty_box(key, shape, flat)
    ends = accumulate(box.size for box in boxes)
    pieces = [
        (box, flat[end - box.size : end].view(box.shape))
        for box, end in zip(boxes, ends, strict=True)
    ]
    return tuple(
        LiveTensor(key, shape, box, data, owner, offset_nbytes(data, owner)) for box, data in pieces
    )


def empty_box(key: str, shape: tuple[int, ...], like: torch.Tensor) -> tuple[LiveTensor, ...]:
    """Return a box without elements: this rank knows the tensor and holds nothing of it.

    A scalar has no such box: nothing is returned for it.
    """
    if not shape:
        return ()
    nothing = (0,) * len(shape)
    return (LiveTensor(key, shape, Box(nothing, nothing), like.new_empty(nothing)),)
