"""Claims about slots that are tensor subclasses, as torchao's: stored as what they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint.errors import LayoutMismatch
from tests.adaptive_timeouts import patient


class Blocks(torch.Tensor):
    """Looks like float32; holds codes and scales of rows, and knows few operations."""

    codes: torch.Tensor
    scales: torch.Tensor
    signed: bool

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=torch.float32
        )
        return made

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> None:
        self.codes, self.scales, self.signed = codes, scales, signed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], [self.signed, (torch.float32,)]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Self:
        signed, (dtype,) = context
        assert (dtype, size, stride) == (torch.float32, inner["codes"].shape, (3, 1))
        return cls(inner["codes"], inner["scales"], signed)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scales, args[0].signed)
        raise NotImplementedError(str(func))


class Rowwise(torch.optim.SGD):
    """Keeps a slot that is quantized by rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            slots = self.state[parameter]
            held = slots.get("sum")
            before = 0 if held is None else held.codes * held.scales[:, None]
            total = before + parameter.grad
            scales = total.abs().amax(1).clamp(min=1e-9) / 127
            slots["sum"] = Blocks((total / scales[:, None]).round().to(torch.int8), scales, True)
            parameter -= 0.1 * slots["sum"].codes * scales[:, None]


def trained(steps: int, optimizer_class: type[torch.optim.Optimizer] = Rowwise) -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Linear(3, 4, bias=False)
    optimizer = optimizer_class(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    state = {"model": model, "optimizer": optimizer}
    _train(state, steps)
    return state


def _train(state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.arange(3.0)).square().sum().backward()
        state["optimizer"].step()


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_an_optimizer_whose_slots_are_made_of_tensors_resumes_exactly(
    steps_before: int, block: bool, tmp_path: Path
) -> None:
    saved, loaded = trained(4), trained(steps_before)
    handle = checkpoint.save(str(tmp_path), saved, step=4, block=block)  # type: ignore[call-overload]
    if handle is not None:
        handle.wait(patient(60))
    checkpoint.load(str(tmp_path), loaded)
    slot = loaded["optimizer"].state[loaded["model"].weight]["sum"]
    assert (type(slot), slot.signed) == (Blocks, True)
    _train(saved, 3)
    _train(loaded, 3)
    assert torch.equal(saved["model"].weight, loaded["model"].weight)


def test_a_slot_of_another_package_is_refused_by_name(tmp_path: Path) -> None:
    state = trained(1, torch.optim.AdamW)
    parameter = state["model"].weight
    codes = torch.zeros(4, 3, dtype=torch.int8)
    state["optimizer"].state[parameter]["exp_avg"] = Blocks(codes, torch.ones(4), True)
    with pytest.raises(LayoutMismatch, match=r"^optim/weight/exp_avg: a .*\.Blocks cannot be"):
        checkpoint.save(str(tmp_path), state, step=1)
    assert not list(tmp_path.iterdir())


def test_a_class_that_is_not_there_any_more_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(str(tmp_path), trained(1), step=1)
    monkeypatch.delattr(f"{__name__}.Blocks")
    with pytest.raises(LayoutMismatch, match=r"Blocks', which is no such class of tests"):
        checkpoint.load(str(tmp_path), trained(0))


def quantized(value: int, *, signed: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4))
    codes = torch.full((4, 3), value, dtype=torch.int8)
    blocks = Blocks(codes, torch.full((4,), float(value)), signed)
    model[0].weight = nn.Parameter(blocks, requires_grad=False)
    return model


def test_a_weight_that_is_made_of_tensors_is_stored_and_filled_as_these(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path), {"model": quantized(7)}, step=1)
    loaded = quantized(1)
    checkpoint.load(str(tmp_path), {"model": loaded})
    weight = loaded[0].weight  # type: ignore[index]
    assert (weight.codes.unique().item(), weight.scales.unique().item()) == (7, 7.0)


def test_a_weight_that_is_made_otherwise_is_refused_before_anything_is_filled(
    tmp_path: Path,
) -> None:
    checkpoint.save(str(tmp_path), {"model": quantized(7)}, step=1)
    loaded = quantized(1, signed=False)
    with pytest.raises(LayoutMismatch, match=r"^model/0\.weight: is a tensor of .*Blocks.*False"):
        checkpoint.load(str(tmp_path), {"model": loaded})
    assert loaded[0].weight.codes.unique().item() == 1  # type: ignore[index]
    with pytest.raises(LayoutMismatch, match=r"model/0\.weight: missing in the source"):
        checkpoint.load(str(tmp_path), {"model": nn.Sequential(nn.Linear(3, 4))})
