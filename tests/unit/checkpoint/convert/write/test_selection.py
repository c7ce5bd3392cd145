"""Tests of what a conversion takes of a checkpoint, and of how it rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from keepstep.checkpoint.convert.write import selection
from keepstep.checkpoint.convert.write.selection import Selection, rounded
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.quantized import FLOATS
from keepstep.checkpoint.format.layout.source import BoxRequest, TensorSpec
from keepstep.checkpoint.live.tensors import torch_dtype


class InMemory:
    """A source of a few tensors."""

    step = 3

    def __init__(self, tensors: dict[str, torch.Tensor], documents: dict[str, Any]) -> None:
        self.values = tensors
        self.documents = documents

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return {
            key: TensorSpec(str(value.dtype).removeprefix("torch."), tuple(value.shape))
            for key, value in self.values.items()
        }

    def slots(self, parameters: object) -> dict[str, dict[str, TensorSpec]]:
        raise NotImplementedError

    def known_keys(self) -> list[str]:
        raise NotImplementedError

    def read(self, requests: Sequence[BoxRequest]) -> None:
        for request in requests:
            box = self.values[request.key][request.box.slices].contiguous()
            request.into[:] = box.reshape(-1).view(torch.uint8).numpy().data


def source() -> InMemory:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(7, 5, generator=generator) * 1e-3
    return InMemory(
        {
            "optim/w/exp_avg": weights.clone(),
            "model/w": weights,
            "model/ids": torch.arange(5),
        },
        {"optim/groups": [1], "config": {"heads": 2}, "saved/digest": {"chunks": "0"}},
    )


def read(selected: Selection, key: str, box: Box) -> torch.Tensor:
    spec = selected.tensors[key]
    into = torch.empty(box.shape, dtype=torch_dtype(spec.dtype))
    selected.read([BoxRequest(key, box, into.reshape(-1).view(torch.uint8).numpy().data)])
    return into


@pytest.mark.parametrize("dtype", FLOATS)
def test_models_are_rounded_as_pytorch_rounds_and_optimizers_are_not(dtype: str) -> None:
    whole = source()
    selected = Selection(whole=whole, model_dtype=dtype)
    box = Box((2, 1), (4, 3))
    expected = whole.values["model/w"][box.slices].to(torch_dtype(dtype))
    assert torch.equal(read(selected, "model/w", box), expected)
    assert torch.equal(
        read(selected, "optim/w/exp_avg", box), whole.values["optim/w/exp_avg"][box.slices]
    )
    assert torch.equal(read(selected, "model/ids", Box((0,), (5,))), torch.arange(5))


def test_what_is_not_selected_is_named() -> None:
    selected = Selection(whole=source(), only_model=True)
    assert list(selected.tensors) == ["model/ids", "model/w"]
    assert selected.documents == {"config": {"heads": 2}}
    assert selected.left_out() == ["optim/groups", "optim/w/exp_avg"]


def test_everything_else_is_selected_but_a_digest_of_the_former_chunks() -> None:
    selected = Selection(whole=source())
    assert selected.left_out() == []
    assert selected.documents == {"optim/groups": [1], "config": {"heads": 2}}


def masters_of(dtype: str) -> dict[str, object]:
    return {"slot": "master_param", "dtype": dtype}


def test_only_masters_that_are_still_wider_are_called_masters() -> None:
    whole = InMemory(
        {
            "model/narrow": torch.zeros(2, dtype=torch.bfloat16),
            "optim/narrow/master_param": torch.zeros(2),
            "model/wide": torch.zeros(2, dtype=torch.bfloat16),
            "optim/wide/master_param": torch.zeros(2, dtype=torch.float64),
        },
        {"masters": {"model/narrow": masters_of("float32"), "wide": masters_of("float64")}},
    )
    for dtype, matched in (
        (None, []),
        ("float16", []),
        ("float32", ["model/narrow"]),
        ("float64", ["model/narrow", "wide"]),
    ):
        selected = Selection(whole=whole, model_dtype=dtype)
        assert selected.matched_masters() == matched, dtype
        wider = {n: e for n, e in whole.documents["masters"].items() if n not in matched}
        assert selected.documents == ({"masters": wider} if wider else {}), dtype
        assert selected.masters == whole.documents["masters"]
        assert selected.left_out() == []
    selected = Selection(whole=whole, model_dtype="float32", only_model=True)
    assert selected.documents == selected.masters == {}
    assert selected.matched_masters() == []
    assert "masters" in selected.left_out()


def test_a_data_type_that_rounds_nothing_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="int8"):
        Selection(whole=source(), model_dtype="int8")


def bfloat16_of(value: float) -> float:
    """Round by fractions: to the nearest of a sign and 8 bits, ties to even."""
    if value == 0 or not math.isfinite(value):
        return value
    exponent = max(math.frexp(value)[1] - 8, -133)
    nearest = round(Fraction(value) / Fraction(2) ** exponent) * Fraction(2) ** exponent
    return float(nearest) if abs(nearest) < 2**128 else math.copysign(math.inf, value)


@given(
    st.floats()
    | st.builds(
        lambda high, low, sign, exponent: math.ldexp(
            sign * (1 + high * 2**-8 + low * 2**-45), exponent
        ),
        st.integers(0, 255), st.integers(-3, 3), st.sampled_from([-1, 1]),
        st.integers(-140, 127),
    )
)  # fmt: skip
@example(1 + 2**-8 + 2**-40)
@example(-(1 + 3 * 2**-8 - 2**-40))
@example(2.0**-134 + 2.0**-180)
@example(2.0**128 - 2.0**119)
def test_float64_becomes_the_nearest_bfloat16(value: float) -> None:
    (result,) = rounded(np.array([value]), "bfloat16").astype(np.float64)
    assert result == bfloat16_of(value) or (math.isnan(result) and math.isnan(value))


def test_a_large_box_is_rounded_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_ROUNDED_NBYTES", 24)
    whole = source()
    box = Box((2, 1), (4, 3))
    expected = whole.values["model/w"][box.slices].bfloat16()
    assert torch.equal(
        read(Selection(whole=whole, model_dtype="bfloat16"), "model/w", box), expected
    )
