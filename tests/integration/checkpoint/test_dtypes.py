"""Tests of data types: every one is stored bit for bit, and other readers see the same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import torch
import zarr

from keepstep import checkpoint
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.dtypes import is_in_zarr, numpy_dtype, zarr_data_type
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.live.tensors import _NAMES, as_bytes, plain

# The last one has more than 1 MiB whatever the type.
SHAPES = ((), (0,), (3, 0), (7,), (5, 3), (1201, 1013))

DTYPES = pytest.mark.parametrize("dtype", _NAMES, ids=_NAMES.get)


def noise(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of random bits, NaNs of every kind included."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype == torch.bool else 256
    count = int(np.prod(shape)) * dtype.itemsize
    data = torch.randint(0, most, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def state(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    return {f"t{number}": noise(dtype, shape, seed) for number, shape in enumerate(SHAPES)}


def check_equal(filled: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert as_bytes(plain(filled[name])) == as_bytes(plain(tensor)), name


@DTYPES
def test_a_dtype_is_stored_and_restored_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = state(dtype, seed=1)
    checkpoint.save(str(tmp_path), saved, step=1)
    StoredCheckpoint.open(open_storage(str(tmp_path))).verify()
    filled = state(dtype, seed=2)
    checkpoint.load(str(tmp_path), filled)
    check_equal(filled, saved)
    # Tensors that are not contiguous are saved, and filled, by way of a buffer.
    turned = {name: tensor.t() for name, tensor in saved.items() if tensor.dim() == 2}
    checkpoint.save(str(tmp_path), turned, step=2)
    filled = {name: noise(dtype, t.shape[::-1], seed=3).t() for name, t in turned.items()}
    checkpoint.load(str(tmp_path), filled)
    check_equal(filled, turned)


def test_every_dtype_is_saved_from_a_copy_in_shared_memory(tmp_path: Path) -> None:
    saved = {
        f"{name}.{key}": tensor
        for dtype, name in _NAMES.items()
        for key, tensor in state(dtype, seed=1).items()
    }
    checkpoint.save(str(tmp_path), saved, step=1, block=False).wait()
    filled = {
        f"{name}.{key}": tensor
        for dtype, name in _NAMES.items()
        for key, tensor in state(dtype, seed=2).items()
    }
    checkpoint.load(str(tmp_path), filled)
    check_equal(filled, saved)


@DTYPES
def test_other_readers_see_the_same_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = state(dtype, seed=1)
    checkpoint.save(str(tmp_path), saved, step=1)
    root = tmp_path / StoredCheckpoint.open(open_storage(str(tmp_path))).directory
    group = zarr.open_group(str(root), mode="r")
    for name, tensor in saved.items():
        array = group[name]
        assert isinstance(array, zarr.Array)
        assert array.dtype == numpy_dtype(_NAMES[dtype])
        assert array.shape == tuple(tensor.shape)
        assert np.asarray(array[...]).tobytes() == bytes(as_bytes(tensor)), name
    large = f"t{len(SHAPES) - 1}"
    opened = tensorstore.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(root / large)}}
    ).result()
    assert opened.dtype.name == zarr_data_type(_NAMES[dtype])
    assert opened.read().result().tobytes() == bytes(as_bytes(saved[large]))


def test_two_values_in_a_byte_are_bytes_that_name_their_type(tmp_path: Path) -> None:
    saved = {"w": noise(torch.float4_e2m1fn_x2, (3, 5), seed=1)}
    checkpoint.save(str(tmp_path), saved, step=1)
    opened = StoredCheckpoint.open(open_storage(str(tmp_path)))
    assert opened.tensors["w"].dtype == "float4_e2m1fn_x2"
    array = zarr.open_group(str(tmp_path / opened.directory), mode="r")["w"]
    assert isinstance(array, zarr.Array)
    assert array.dtype == np.uint8
    assert array.attrs["keepstep"] == {"torch_dtype": "float4_e2m1fn_x2"}


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("other", [torch.uint8, torch.float32], ids=str)
def test_two_values_in_a_byte_are_not_taken_for_numbers(
    tmp_path: Path, other: torch.dtype, convert: bool
) -> None:
    pair = [torch.float4_e2m1fn_x2, other]
    for step, (stored, live) in enumerate([pair, pair[::-1]]):
        checkpoint.save(str(tmp_path), {"w": noise(stored, (3, 5), seed=1)}, step=step)
        filled = {"w": noise(live, (3, 5), seed=2)}
        refused = f"source holds {_NAMES[stored]} .* expects {_NAMES[live]}"
        with pytest.raises(LayoutMismatch, match=refused):
            checkpoint.load(str(tmp_path), filled, convert=convert)
        check_equal(filled, {"w": noise(live, (3, 5), seed=2)})


def test_only_types_that_zarr_lacks_are_stored_as_others() -> None:
    assert [name for name in _NAMES.values() if not is_in_zarr(name)] == ["float4_e2m1fn_x2"]
