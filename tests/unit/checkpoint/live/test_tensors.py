"""Tests of the data types of live tensors: which are stored, by which name, and which refused."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.dtypes import is_in_zarr, numpy_dtype
from keepstep.checkpoint.live.tensors import (
    describe,
    dtype_name,
    local_of,
    placed_like,
    torch_dtype,
)

STORED = (
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex64, torch.complex128,
)  # fmt: skip


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_a_stored_dtype_keeps_its_name_and_size(dtype: torch.dtype) -> None:
    name = dtype_name(dtype)
    assert f"torch.{name}" == str(dtype)
    assert torch_dtype(name) is dtype
    assert numpy_dtype(name).itemsize == dtype.itemsize
    assert numpy_dtype(name).name == (name if is_in_zarr(name) else "uint8")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(2, dtype=torch.complex32),
        torch.empty(2, dtype=torch.bits8),
        torch.empty(2, dtype=torch.bits1x8),
        torch.empty(2, dtype=torch.uint4),
        torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_a_tensor_of_any_other_dtype_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(
        LayoutMismatch, match=rf"^model/w: {tensor.dtype} cannot be stored; convert the tensor or"
    ):
        _ = describe("model/w", tensor).dtype


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_shard_is_placed_as_pytorch_places_a_tensor_like_another(
    placement: Placement, rank: int, dtype: torch.dtype
) -> None:
    mesh = DeviceMesh("cpu", torch.arange(3), _init_backend=False, _rank=rank)
    shape = (4, 5)  # Shards are uneven, and the last one of four rows over three is empty.
    shards = torch.empty(shape).chunk(3, placement.dim) if isinstance(placement, Shard) else []
    missing = torch.empty(0, 5) if placement == Shard(0) else torch.empty(shape)
    local = shards[rank] if rank < len(shards) else missing
    tensor = DTensor.from_local(
        local.contiguous(), mesh, [placement], run_check=False, shape=torch.Size(shape),
        stride=(5, 1),
    ).requires_grad_()  # fmt: skip
    expected = torch.zeros_like(tensor, dtype=dtype, requires_grad=False)
    assert isinstance(expected, DTensor)
    placed = placed_like(tensor, torch.zeros_like(local_of(tensor), dtype=dtype))
    assert placed.dtype == dtype
    assert placed._spec == expected._spec
    assert not placed.requires_grad
    assert torch.equal(local_of(placed), local_of(expected))
    assert placed.stride() == expected.stride()
