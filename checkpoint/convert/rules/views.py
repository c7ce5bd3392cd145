"""Maps elements of a source tensor to elements of a target tensor.

Pure. A view is a grid of elements that is regular in both tensors: an offset in each, and axes that
step through both at once. Boxes, transposed boxes, one layer of a stacked tensor, interleaved query
groups and the rows of a rotary permutation are one view each, whatever their size.

Views compose: a view of a view of a tensor is a few views of that tensor, computed from the numbers
alone. So two conversions in a row are planned as one, and no data exists in between.

Invariant: along every dimension of either tensor the axes nest, each stepping over all that the
finer ones reach. No element occurs twice then, and the composition of nesting views nests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from keepstep.checkpoint.format.layout.boxes import Box


@dataclass(frozen=True, slots=True)
class Axis:
    """Steps through both tensors at once: `extent` elements, a stride in elements of a dimension.

    A stride counts elements along its dimension, not elements of the flattened tensor.
    """

    extent: int
    target_dim: int
    target_stride: int
    source_dim: int
    source_stride: int

    @property
    def swapped(self) -> Axis:
        """The same axis with source and target exchanged."""
        return Axis(
            self.extent, self.source_dim, self.source_stride, self.target_dim, self.target_stride
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Elements of a target tensor, and the elements of a source tensor that they are copies of.

    Element (i0, i1, ...) of the grid lies, in dimension d of the target, at `target_offset[d]` plus
    the sum of i * target_stride over the axes with target_dim d, and likewise in the source.

    Args:
        source: name of the source tensor; None where the target is to hold zeros.
        target_offset: the first element, one number per dimension of the target.
        source_offset: the same in the source.
        axes: the grid; none for a single element.
    """

    source: str | None
    target_offset: tuple[int, ...]
    source_offset: tuple[int, ...]
    axes: tuple[Axis, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(axis.extent for axis in self.axes)

    @property
    def target_box(self) -> Box:
        """The smallest box of the target that contains all elements of the view."""
        extents = [1] * len(self.target_offset)
        for axis in self.axes:
            extents[axis.target_dim] += (axis.extent - 1) * axis.target_stride
        return Box(self.target_offset, tuple(extents))

    @property
    def source_box(self) -> Box:
        """The smallest box of the source that contains all elements of the view."""
        return self.inverted(None).target_box

    @property
    def is_same_box(self) -> bool:
        """Whether the elements are one box, which lies in both tensors at the same place."""
        return self.target_offset == self.source_offset and all(
            axis.target_dim == axis.source_dim and axis.target_stride == axis.source_stride == 1
            for axis in self.axes
        )

    def inverted(self, source: str | None) -> View:
        """Return the view that fills this one's source from its target, named `source`."""
        return View(
            source=source,
            target_offset=self.source_offset,
            source_offset=self.target_offset,
            axes=_normal(axis.swapped for axis in self.axes),
        )

    def clipped(self, box: Box) -> tuple[View, ...]:
        """Return views of the elements that lie in a box of the target, in its coordinates."""
        if not box.size:
            return ()
        return compose(box_view(None, box, box), self)

    def within(self, most: int) -> Iterator[View]:
        """Yield views that are this one together, whose boxes in the source are small.

        Args:
            most: how many elements a box may have; one at least.
        """
        pending = [self]
        while pending:
            view = pending.pop()
            box = view.source_box
            if box.size <= most or not view.axes:
                yield view
                continue
            # In the dimension with the largest gaps; without any, in the outermost one, where the
            # halves are runs of the source.
            filled = [1] * len(box.shape)
            for axis in view.axes:
                filled[axis.source_dim] *= axis.extent
            dim = min(
                (axis.source_dim for axis in view.axes), key=lambda d: (filled[d] / box.shape[d], d)
            )
            axis = max(
                (axis for axis in view.axes if axis.source_dim == dim),
                key=lambda a: (a.extent - 1) * a.source_stride,
            )
            pending += reversed(_halves(view, axis))


def _halves(view: View, axis: Axis) -> tuple[View, View]:
    """Return the two views that a view is when one of its axes is cut in the middle."""
    others = [other for other in view.axes if other is not axis]
    cut = axis.extent // 2
    target_offset, source_offset = list(view.target_offset), list(view.source_offset)
    target_offset[axis.target_dim] += cut * axis.target_stride
    source_offset[axis.source_dim] += cut * axis.source_stride
    first, second = replace(axis, extent=cut), replace(axis, extent=axis.extent - cut)
    return (
        make_view(view.source, view.target_offset, view.source_offset, [*others, first]),
        make_view(view.source, target_offset, source_offset, [*others, second]),
    )


def make_view(
    source: str | None,
    target_offset: Sequence[int],
    source_offset: Sequence[int],
    axes: Iterator[Axis] | Sequence[Axis],
) -> View:
    """Return a view with as few axes as describe it; extents are 1 or more."""
    return View(
        source=source,
        target_offset=tuple(target_offset),
        source_offset=tuple(source_offset),
        axes=_normal(axes),
    )


def box_view(source: str | None, target: Box, box: Box) -> View:
    """Return the view that copies a box, which is not empty, to another of the same shape."""
    assert target.shape == box.shape, "boxes differ in shape"
    return make_view(
        source,
        target.offset,
        box.offset,
        [Axis(extent, dim, 1, dim, 1) for dim, extent in enumerate(box.shape)],
    )


def compose(outer: View, inner: View) -> tuple[View, ...]:
    """Return views from the inner one's source straight to the outer one's target.

    Args:
        outer: fills a target from a tensor in the middle.
        inner: fills part of the tensor in the middle.

    Returns:
        Views of the outer elements that the inner view provides; together they are all of these,
        each once.
    """
    # Names that change and nothing else are most of what there is to compose.
    if inner.is_same_box and _contains(inner.target_box, outer.source_box):
        return (replace(outer, source=inner.source),)
    if outer.is_same_box and _contains(outer.source_box, inner.target_box):
        return (inner,)
    matches: list[list[_Match]] = []
    for dim in range(len(outer.source_offset)):
        found = list(
            _matches(
                outer.source_offset[dim],
                tuple(_digits(axis.swapped for axis in outer.axes if axis.source_dim == dim)),
                inner.target_offset[dim],
                tuple(_digits(axis for axis in inner.axes if axis.target_dim == dim)),
            )
        )
        if not found:
            return ()
        matches.append(found)
    views = []
    for combination in itertools.product(*matches):
        target_offset, source_offset = list(outer.target_offset), list(inner.source_offset)
        for match in combination:
            for dim, shift in match.upper_shifts:
                target_offset[dim] += shift
            for dim, shift in match.lower_shifts:
                source_offset[dim] += shift
        axes = [axis for match in combination for axis in match.axes]
        views.append(make_view(inner.source, target_offset, source_offset, axes))
    return tuple(views)


def _contains(outer: Box, inner: Box) -> bool:
    return all(
        start <= at and at + extent <= start + size
        for start, size, at, extent in zip(
            outer.offset, outer.shape, inner.offset, inner.shape, strict=True
        )
    )


@dataclass(frozen=True, slots=True)
class _Digit:
    """An axis seen from one dimension of the tensor in the middle.

    `stride` counts there; `other_dim` and `other_stride` say what a step is in the outer tensor.
    """

    extent: int
    stride: int
    other_dim: int
    other_stride: int


@dataclass(frozen=True, slots=True)
class _Match:
    """The common part of two sequences of digits.

    The shifts move the first element, as (dimension, elements), in the tensor that the upper digits
    lead to and in the one that the lower digits lead to; axes have the upper one as their target.
    """

    upper_shifts: tuple[tuple[int, int], ...] = ()
    lower_shifts: tuple[tuple[int, int], ...] = ()
    axes: tuple[Axis, ...] = ()

    @property
    def swapped(self) -> _Match:
        return _Match(self.lower_shifts, self.upper_shifts, tuple(a.swapped for a in self.axes))

    def shifted(self, upper: _Digit | None, upper_steps: int, lower: _Digit | None, lower_steps: int
                ) -> _Match:  # fmt: skip
        upper_shift = ((upper.other_dim, upper_steps * upper.other_stride),) if upper else ()
        lower_shift = ((lower.other_dim, lower_steps * lower.other_stride),) if lower else ()
        return _Match(self.upper_shifts + upper_shift, self.lower_shifts + lower_shift, self.axes)


def _digits(axes: Iterator[Axis]) -> list[_Digit]:
    """Return digits in the target dimension of these axes, coarsest first."""
    digits = [
        _Digit(axis.extent, axis.target_stride, axis.source_dim, axis.source_stride)
        for axis in axes
    ]
    return sorted(digits, key=lambda digit: -digit.stride)


def _span(digits: tuple[_Digit, ...]) -> int:
    """Return how many places there are from the first element to the last, both counted."""
    return 1 + sum((digit.extent - 1) * digit.stride for digit in digits)


def _matches(
    upper_start: int, upper: tuple[_Digit, ...], lower_start: int, lower: tuple[_Digit, ...]
) -> Iterator[_Match]:
    """Yield what two sequences of digits along one dimension have in common, each place once."""
    distance = lower_start - upper_start
    if distance >= _span(upper) or -distance >= _span(lower):
        return
    if not upper and not lower:
        yield _Match()
        return
    if not upper or (lower and lower[0].stride > upper[0].stride):
        for match in _matches(lower_start, lower, upper_start, upper):
            yield match.swapped
        return
    coarse, rest = upper[0], upper[1:]
    if lower and lower[0].stride == coarse.stride:
        yield from _aligned_matches(upper_start, upper, lower_start, lower)
        return
    fine = lower[0] if lower else None
    if fine is not None and coarse.stride % fine.stride == 0:
        # The lower digit is cut where blocks begin; then both have a digit of this stride.
        steps = coarse.stride // fine.stride
        head = -(distance // fine.stride) % steps
        if fine.extent - head >= 2 * steps:
            for skipped, digits in _cut(fine, steps, head):
                start = lower_start + skipped * fine.stride
                for match in _matches(upper_start, upper, start, digits + lower[1:]):
                    yield match.shifted(None, 0, fine, skipped)
            return
    # Each block of the coarsest digit that reaches into the lower digits, by itself.
    first = max(0, -((_span(rest) - 1 - distance) // coarse.stride))
    last = min(coarse.extent - 1, (distance + _span(lower) - 1) // coarse.stride)
    for index in range(first, last + 1):
        start = upper_start + index * coarse.stride
        for match in _matches(start, rest, lower_start, lower):
            yield match.shifted(coarse, index, None, 0)


def _aligned_matches(
    upper_start: int, upper: tuple[_Digit, ...], lower_start: int, lower: tuple[_Digit, ...]
) -> Iterator[_Match]:
    """Yield the matches of two sequences whose coarsest digits have one stride."""
    (above, upper_rest), (below, lower_rest) = (upper[0], upper[1:]), (lower[0], lower[1:])
    stride, distance = above.stride, lower_start - upper_start
    # Block i above meets block j below; which ones do depends on i - j alone.
    least = -((_span(upper_rest) - 1 - distance) // stride)
    most = (distance + _span(lower_rest) - 1) // stride
    for lead in range(least, most + 1):
        first, stop = max(0, lead), min(above.extent, below.extent + lead)
        if first >= stop:
            continue
        start = upper_start + lead * stride
        for match in _matches(start, upper_rest, lower_start, lower_rest):
            moved = match.shifted(above, first, below, first - lead)
            if stop - first > 1:
                axis = Axis(
                    stop - first,
                    above.other_dim,
                    above.other_stride,
                    below.other_dim,
                    below.other_stride,
                )
                moved = replace(moved, axes=(axis, *moved.axes))
            yield moved


def _cut(digit: _Digit, steps: int, head: int) -> Iterator[tuple[int, tuple[_Digit, ...]]]:
    """Yield a digit cut into two or more blocks of `steps` steps.

    Each item is the steps before it and its digits: the first few steps, which are no block, the
    blocks, and the rest.
    """
    blocks, tail = divmod(digit.extent - head, steps)
    if head:
        yield 0, (replace(digit, extent=head),)
    coarse = _Digit(blocks, digit.stride * steps, digit.other_dim, digit.other_stride * steps)
    yield head, (coarse, replace(digit, extent=steps))
    if tail:
        yield head + blocks * steps, (replace(digit, extent=tail),)


def _normal(axes: Iterator[Axis] | Sequence[Axis]) -> tuple[Axis, ...]:
    """Return axes in one order, without those of one element, and joined where they continue."""
    ordered = sorted(
        (axis for axis in axes if axis.extent != 1),
        key=lambda axis: (axis.target_dim, -axis.target_stride),
    )
    joined: list[Axis] = []
    for axis in ordered:
        outer = joined[-1] if joined else None
        if (
            outer is not None
            and (outer.target_dim, outer.source_dim) == (axis.target_dim, axis.source_dim)
            and outer.target_stride == axis.extent * axis.target_stride
            and outer.source_stride == axis.extent * axis.source_stride
        ):
            joined[-1] = replace(axis, extent=outer.extent * axis.extent)
        else:
            joined.append(axis)
    return tuple(joined)
