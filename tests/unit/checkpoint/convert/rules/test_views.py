"""Views: composed by their numbers, they say what NumPy does step by step."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.convert.rules.views import Axis, View, box_view, compose, make_view
from keepstep.checkpoint.format.layout.boxes import Box
from tests.unit.checkpoint.convert.rules.arrays import EMPTY, filled

Numbers = npt.NDArray[np.int64]


@st.composite
def factorings(draw: st.DrawFn, size: int) -> list[int]:
    """Return factors, coarsest first, whose product is a size."""
    factors = []
    while size > 1:
        factor = draw(st.sampled_from([n for n in range(2, size + 1) if size % n == 0]))
        factors.append(factor)
        size //= factor
    return factors or [1]


@st.composite
def permutations_of_rows(draw: st.DrawFn, rows: int) -> list[tuple[int, int, int]]:
    """Return (extent, stride here, stride there) of a dimension seen as a grid and permuted."""
    grid = draw(factorings(rows))
    order = draw(st.permutations(range(len(grid))))
    here = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
    turned = [grid[axis] for axis in order]
    there = {axis: math.prod(turned[place + 1 :]) for place, axis in enumerate(order)}
    return [(grid[axis], here[axis], there[axis]) for axis in range(len(grid))]


@st.composite
def views_of(draw: st.DrawFn, source_shape: tuple[int, ...]) -> tuple[tuple[int, ...], View]:
    """Return a target's shape and a view: part of the source, permuted, turned, moved apart."""
    axes = []
    source_offset = []
    target_shape = [1] * len(source_shape)
    order = draw(st.permutations(range(len(source_shape))))
    target_offset = [0] * len(source_shape)
    for dim, extent in enumerate(source_shape):
        taken = draw(st.integers(1, extent))
        first = draw(st.integers(0, extent - taken))
        source_offset.append(first)
        target_dim = order[dim]
        before, spread = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        target_offset[target_dim] = before
        target_shape[target_dim] = before + taken * spread + draw(st.integers(0, 2))
        axes += [
            Axis(count, target_dim, there * spread, dim, here)
            for count, here, there in draw(permutations_of_rows(taken))
        ]
    return tuple(target_shape), make_view("source", target_offset, source_offset, axes)


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], View]]]:
    source = tuple(draw(st.lists(st.integers(1, 24), min_size=1, max_size=2)))
    steps = []
    shape = source
    for _ in range(draw(st.integers(2, 3))):
        shape, view = draw(views_of(shape))
        steps.append((shape, view))
    return source, steps


@given(chains())
def test_composed_views_are_what_the_steps_do_one_after_the_other(
    chain: tuple[tuple[int, ...], list[tuple[tuple[int, ...], View]]],
) -> None:
    source_shape, steps = chain
    source = np.arange(math.prod(source_shape), dtype=np.int64).reshape(source_shape)
    expected = source
    composed: tuple[View, ...] = (box_view("source", *[Box.whole(source_shape)] * 2),)
    for shape, view in steps:
        expected = filled(shape, [view], {"source": expected})
        composed = tuple(part for before in composed for part in compose(view, before))
    shape = steps[-1][0]
    assert np.array_equal(filled(shape, composed, {"source": source}), expected)
    assert sum(view.size for view in composed) == np.count_nonzero(expected != EMPTY)


@given(st.data())
def test_clipped_view_is_the_part_in_the_box(data: st.DataObject) -> None:
    source_shape = tuple(data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=2)))
    shape, view = data.draw(views_of(source_shape))
    source = np.arange(math.prod(source_shape), dtype=np.int64).reshape(source_shape)
    whole = filled(shape, [view], {"source": source})
    offset = tuple(data.draw(st.integers(0, extent)) for extent in shape)
    box = Box(
        offset,
        tuple(
            data.draw(st.integers(0, extent - start))
            for extent, start in zip(shape, offset, strict=True)
        ),
    )
    clipped = filled(shape, view.clipped(box), {"source": source})
    expected = np.full(shape, EMPTY)
    expected[box.slices] = whole[box.slices]
    assert np.array_equal(clipped, expected)


@given(st.data())
def test_a_view_that_is_cut_is_the_same_view_with_small_boxes(data: st.DataObject) -> None:
    source_shape = tuple(data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=2)))
    shape, view = data.draw(views_of(source_shape))
    most = data.draw(st.integers(1, 40))
    source = np.arange(math.prod(source_shape), dtype=np.int64).reshape(source_shape)
    parts = list(view.within(most))
    assert np.array_equal(
        filled(shape, parts, {"source": source}), filled(shape, [view], {"source": source})
    )
    assert sum(part.size for part in parts) == view.size
    assert max(part.source_box.size for part in parts) <= most


def test_a_permutation_is_cut_into_runs_of_the_source() -> None:
    rows = make_view("source", (0, 0), (0, 0), [
        Axis(100, 0, 2, 0, 1), Axis(2, 0, 1, 0, 100), Axis(50, 1, 1, 1, 1),
    ])  # fmt: skip
    assert [part.source_box for part in rows.within(5000)] == [
        Box((0, 0), (100, 50)), Box((100, 0), (100, 50))
    ]  # fmt: skip


@given(st.data())
def test_inverted_view_brings_every_element_back(data: st.DataObject) -> None:
    source_shape = tuple(data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=2)))
    shape, view = data.draw(views_of(source_shape))
    source = np.arange(math.prod(source_shape), dtype=np.int64).reshape(source_shape)
    there = filled(shape, [view], {"source": source})
    back = filled(source_shape, [view.inverted("there")], {"there": there})
    moved = back != EMPTY
    assert np.count_nonzero(moved) == view.size
    assert np.array_equal(back[moved], source[moved])


def test_view_there_and_back_is_one_box_again() -> None:
    """Parts regular in both tensors stay whole: 64 heads of a rotary permutation and back."""
    rows = [Axis(64, 0, 128, 0, 128), Axis(2, 0, 64, 0, 1), Axis(64, 0, 1, 0, 2)]
    view = make_view("source", (0, 0), (0, 0), [*rows, Axis(4096, 1, 1, 1, 1)])
    whole = Box.whole((64 * 128, 4096))
    (back,) = compose(view.inverted("there"), view)
    assert back == box_view("source", whole, whole)


def test_interleaved_part_of_a_huge_tensor_is_one_view() -> None:
    fused = make_view("q", (0,), (0,), [Axis(1000, 0, 3000, 0, 1000), Axis(1000, 0, 1, 0, 1)])
    half = box_view("fused", Box((0,), (1_500_000,)), Box((0,), (1_500_000,)))
    assert len(compose(half, fused)) == 1
    cut = box_view("fused", Box((0,), (1_500_500,)), Box((500,), (1_500_500,)))
    # The end of the first group, then whole groups.
    assert sorted(part.size for part in compose(cut, fused)) == [500, 1000, 499 * 1000]
