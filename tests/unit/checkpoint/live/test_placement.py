"""Tests of local_box: placements alone determine a rank's box, as torch splits tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Box
from keepstep.checkpoint.live.placement import local_box


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


def test_every_rank_holds_all_of_a_scalar() -> None:
    assert local_box((), (4,), (3,), (Replicate(),)) == Box((), ())


def test_a_pending_sum_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="redistribute it first"):
        local_box((4,), (2,), (0,), (Partial(),))
