"""Claims about which data types are converted into which."""

from pathlib import Path

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.dtypes import is_convertible


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("float32", "bfloat16"), ("bfloat16", "float64"), ("float32", "float8_e4m3fn"),
        ("int64", "float32"), ("uint8", "int16"), ("bool", "int8"), ("float32", "complex64"),
        ("complex128", "complex64"), ("int32", "int64"),
    ],
)  # fmt: skip
def test_values_are_converted_where_only_rounding_is_lost(source: str, target: str) -> None:
    assert is_convertible(source, target)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("complex64", "float32"), ("float32", "int64"), ("float32", "bool"), ("int64", "int8"),
        ("int8", "uint8"), ("uint8", "int8"), ("int8", "bool"), ("float4_e2m1fn_x2", "float32"),
        ("float32", "float4_e2m1fn_x2"),
    ],
)  # fmt: skip
def test_a_fraction_a_sign_or_an_imaginary_part_is_not_dropped(source: str, target: str) -> None:
    assert not is_convertible(source, target)


def test_load_refuses_a_conversion_that_loses_values_by_name(tmp_path: Path) -> None:
    url = str(tmp_path)
    checkpoint.save(url, {"x": torch.tensor([300.0, float("nan")])}, step=1)
    kept = torch.zeros(2, dtype=torch.int8)
    with pytest.raises(LayoutMismatch, match=r"x: the source holds float32 .* expects int8"):
        checkpoint.load(url, {"x": kept}, convert=True)
    assert kept.tolist() == [0, 0]
