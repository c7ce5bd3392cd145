"""Compares a source's tensors for live ones that share some of their elements.

Examples are a fused weight and a slice of it under a name of its own, or a buffer that views a
weight. They are filled one after the other, so that the last one wins: the source has to have the
same elements for all. Tensors that are one memory as a whole are compared by
`keepstep.checkpoint.live.tied_names`, without filling anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.source import Source
from keepstep.checkpoint.live.fills import Fill, fill

_ALIGNMENT = 16
"""Alignment, in bytes, of memory that is viewed as elements of any data type."""


def check_overlaps(fills: Sequence[Fill], source: Source) -> None:
    """Check that tensors that share elements have equal ones in the source.

    They are filled in a copy of their memory first. It reads them twice.

    Raises:
        LayoutMismatch: they are not; the message names one whose elements another would replace.
    """
    for overlapping in _overlapping(fills):
        filled = _in_a_copy(overlapping)
        fill(filled, source)
        for item, copied in zip(overlapping, filled, strict=True):
            alone = replace(item, tensor=replace(item.tensor, data=item.tensor.data.clone()))
            fill([alone], source)
            if not torch.equal(_bits(copied.tensor.data), _bits(alone.tensor.data)):
                names = ", ".join(other.tensor.key for other in overlapping if other is not item)
                raise LayoutMismatch(
                    f"{item.tensor.key}: shares elements with {names} here, and differs from it in "
                    "the source; give it memory of its own with .clone(), or load one of them"
                )


def _overlapping(fills: Sequence[Fill]) -> Iterator[list[Fill]]:
    """Yield the fills whose memory overlaps that of others, in disjoint groups."""

    def storage(item: Fill) -> int:
        return item.tensor.data.untyped_storage().data_ptr()

    nonempty = [item for item in fills if item.tensor.data.numel() and storage(item)]
    for _, sharing in groupby(sorted(nonempty, key=storage), key=storage):
        group: list[Fill] = []
        end = 0
        for item in sorted(sharing, key=lambda item: _span(item.tensor.data)):
            begins, ends = _span(item.tensor.data)
            if group and begins >= end:
                yield from _of_several_views(group)
                group, end = [], 0
            group.append(item)
            end = max(end, ends)
        yield from _of_several_views(group)


def _of_several_views(group: list[Fill]) -> Iterator[list[Fill]]:
    """Yield a group unless all its members are the same memory as a whole."""
    views = {
        (data.data_ptr(), data.dtype, data.shape, data.stride())
        for data in (item.tensor.data for item in group)
    }
    if len(views) > 1:
        yield group


def _span(data: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's elements begin and end in its storage, in bytes."""
    itemsize = data.element_size()
    begin = int(data.storage_offset()) * itemsize
    steps = zip(data.shape, data.stride(), strict=True)
    return begin, begin + (sum((extent - 1) * stride for extent, stride in steps) + 1) * itemsize


def _in_a_copy(overlapping: Sequence[Fill]) -> list[Fill]:
    """Return fills of a copy of these fills' memory, shared in the same way."""
    spans = [_span(item.tensor.data) for item in overlapping]
    begin = min(start for start, _ in spans) // _ALIGNMENT * _ALIGNMENT
    end = max(end for _, end in spans)
    memory = torch.empty(0, dtype=torch.uint8, device=overlapping[0].tensor.data.device)
    memory.set_(overlapping[0].tensor.data.untyped_storage(), begin, (end - begin,), (1,))
    copy = torch.zeros(-(-(end - begin) // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8)
    copy = copy.to(memory.device)
    copy[: end - begin] = memory
    return [
        replace(item, tensor=replace(item.tensor, data=_view_of(copy, item.tensor.data, begin)))
        for item in overlapping
    ]


def _view_of(copy: torch.Tensor, data: torch.Tensor, begin: int) -> torch.Tensor:
    """Return a tensor's view of a copy of its memory, which begins at `begin`."""
    offset = (data.storage_offset() * data.element_size() - begin) // data.element_size()
    return copy.view(data.dtype).as_strided(data.shape, data.stride(), offset)


def _bits(data: torch.Tensor) -> torch.Tensor:
    return data.detach().contiguous().reshape(-1).view(torch.uint8)
