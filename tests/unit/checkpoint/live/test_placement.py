"""Tests of local_box: placements alone determine a rank's box, as torch splits tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.part_table import Part, PartTable
from keepstep.checkpoint.live.placement import local_box, local_boxes_of_parts


def piece(tensor: torch.Tensor, axis: int, parts: int, number: int) -> torch.Tensor:
    """Split as torch does: `chunk`, and an empty tensor for ranks without a chunk."""
    pieces = torch.chunk(tensor, parts, dim=axis)
    return pieces[number] if number < len(pieces) else tensor.narrow(axis, 0, 0)


@given(
    st.tuples(st.integers(0, 13), st.integers(1, 7)),
    st.tuples(st.integers(1, 5), st.integers(1, 3)),
    st.tuples(*(st.sampled_from([Replicate(), Shard(0), Shard(1), Shard(-1)]) for _ in range(2))),
)
def test_plain_placements_split_left_to_right(shape, mesh, placements) -> None:
    tensor = torch.arange(shape[0] * shape[1]).reshape(shape)
    for coordinate in itertools.product(*map(range, mesh)):
        local = tensor
        for placement, parts, number in zip(placements, mesh, coordinate, strict=True):
            if isinstance(placement, Shard):
                local = piece(local, placement.dim, parts, number)
        box = local_box(shape, mesh, coordinate, placements)
        assert torch.equal(tensor[box.slices].reshape(-1), local.reshape(-1))


@given(st.integers(0, 23), st.integers(1, 4), st.integers(1, 4))
def test_fsdp_over_tensor_parallelism_splits_the_tensor_parallel_shards(
    rows: int, fsdp_ranks: int, tp_ranks: int
) -> None:
    tensor = torch.arange(rows)
    placements = (_StridedShard(0, split_factor=tp_ranks), Shard(0))
    for d, t in itertools.product(range(fsdp_ranks), range(tp_ranks)):
        box = local_box((rows,), (fsdp_ranks, tp_ranks), (d, t), placements)
        shard = piece(piece(tensor, 0, tp_ranks, t), 0, fsdp_ranks, d)
        assert torch.equal(tensor[box.slices], shard)


def torch_split(indices: torch.Tensor, placement: Shard | _StridedShard, parts: int, number: int):
    """Split as the placements' definition does, from left to right."""
    factor = getattr(placement, "split_factor", 1)
    return torch.cat([piece(piece(indices, 0, factor, n), 0, parts, number) for n in range(factor)])


one_axis = st.tuples(
    st.one_of(
        st.just(Shard(0)),
        st.sampled_from([1, 2, 3, 4]).map(lambda factor: _StridedShard(0, split_factor=factor)),
    ),
    st.integers(1, 4),
)


@given(st.lists(one_axis, min_size=1, max_size=3), st.integers(0, 3), st.data())
def test_any_split_factor_gives_the_rows_that_a_rank_holds_or_is_refused(
    axes: list[tuple[Shard | _StridedShard, int]], multiple: int, data: st.DataObject
) -> None:
    """With sizes that every split divides: FSDP and the definition differ in others."""
    rows = multiple * math.prod(n * getattr(p, "split_factor", 1) for p, n in axes)
    mesh = [parts for _, parts in axes]
    coordinate = [data.draw(st.integers(0, parts - 1)) for parts in mesh]
    held = torch.arange(rows)
    for (placement, parts), number in zip(axes, coordinate, strict=True):
        held = torch_split(held, placement, parts, number)
    expected = held.tolist()
    placements = [placement for placement, _ in axes]
    if expected != list(range(expected[0], expected[0] + len(expected)) if expected else ()):
        with pytest.raises(LayoutMismatch, match="several pieces"):
            local_box((rows,), mesh, coordinate, placements)
        return
    box = local_box((rows,), mesh, coordinate, placements)
    assert torch.arange(rows)[box.slices].tolist() == expected


def test_fsdp_over_two_axes_of_model_parallelism_splits_what_both_made() -> None:
    """Tensor parallelism is applied first, then the axis beside it, then FSDP."""
    placements = (_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0))
    boxes = {
        coordinate: local_box((16,), (2, 2, 2), coordinate, placements).offset[0]
        for coordinate in itertools.product(range(2), repeat=3)
    }
    assert boxes == {(d, c, t): 8 * t + 4 * c + 2 * d for d, c, t in boxes}


def test_a_strided_shard_whose_other_axis_was_gathered_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="several pieces"):
        local_box((8,), (2, 2), (0, 1), (_StridedShard(0, split_factor=2), Replicate()))


def test_every_rank_holds_all_of_a_scalar() -> None:
    assert local_box((), (4,), (3,), (Replicate(),)) == Box((), ())


def test_a_pending_sum_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="redistribute it first"):
        local_box((4,), (2,), (0,), (Partial(),))


QKV = PartTable(1, (Part("q", 8), Part("k", 4, 4), Part("v", 4, 4)), groups=2)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.integers(1, 3))
def test_fsdp_over_sliced_parts_splits_what_each_rank_has_of_them(
    tp_ranks: int, fsdp_ranks: int, row_ranks: int
) -> None:
    """On a mesh of three axes: rows, FSDP over the fused dimension, and tensor parallelism."""
    whole = torch.arange(3 * QKV.extent).reshape(3, QKV.extent)
    placements = (Shard(0), _StridedShard(1, split_factor=tp_ranks), Shard(-1))
    mesh = (row_ranks, fsdp_ranks, tp_ranks)
    shape = (3, QKV.local_extent(tp_ranks) * tp_ranks)
    for coordinate in itertools.product(*map(range, mesh)):
        slices = [
            whole[:, held.global_offset : held.global_offset + held.extent]
            for held in QKV.pieces(tp_ranks, coordinate[2])
        ]
        rows = piece(whole, 0, row_ranks, coordinate[0])
        slices = [piece(part, 0, row_ranks, coordinate[0]) for part in slices]
        expected = piece(torch.cat(slices, dim=1), 1, fsdp_ranks, coordinate[1])
        boxes = local_boxes_of_parts(shape, mesh, coordinate, placements, table=QKV, mesh_axis=2)
        found = [whole[box.slices].reshape(len(rows), -1) for box in boxes if box.size]
        assert bool(found) == bool(expected.numel())
        assert not found or torch.equal(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize(
    ("placements", "columns", "message"),
    [
        ((Shard(1), Shard(1)), 16, "before tensor parallelism slices its parts"),
        ((Replicate(), Shard(1)), 20, "they have 16 elements together"),
    ],
)
def test_parts_that_are_not_sliced_first_or_have_another_size_are_refused(
    placements: tuple[Shard | Replicate, ...], columns: int, message: str
) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        local_boxes_of_parts((3, columns), (2, 2), (0, 0), placements, table=QKV, mesh_axis=1)
