"""Tests of loading into states that do not fit, or fit only with an option."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.source import BoxRequest, TensorSpec, slots_in
from keepstep.checkpoint.live.allocation import allocate
from tests.integration.checkpoint.tied import trained


class Claimed:
    """A source that claims these tensors and has nothing to read."""

    step = 1

    def __init__(self, tensors: Mapping[str, TensorSpec]) -> None:
        self.tensors = tensors
        self.documents: Mapping[str, Json] = {}

    def slots(self, parameters: Collection[str]) -> Mapping[str, Mapping[str, TensorSpec]]:
        return slots_in(self.tensors, parameters)

    def known_keys(self) -> Collection[str]:
        return self.tensors.keys()

    def read(self, requests: Sequence[BoxRequest]) -> None:
        raise AssertionError("nothing is read before all slots are there")


class Averaging(torch.optim.Optimizer):
    """Averages gradients, and counts steps in a plain number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=0, average=torch.zeros_like(parameter))
                state["step"] += 1
                state["average"].lerp_(parameter.grad, 1 / state["step"])
                parameter.sub_(state["average"] * group["lr"])


def step(optimizer: torch.optim.Optimizer, *parameters: nn.Parameter) -> None:
    """Do a step in which only these parameters have gradients."""
    optimizer.zero_grad()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_state_that_does_not_fit_is_listed_by_name_and_left_unchanged(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path), {"model": nn.Linear(3, 2)}, step=1)
    other = nn.ModuleDict({"extra": nn.Linear(1, 1)})
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(
        LayoutMismatch, match=r"model/extra.weight, .*: missing.*model/bias, .*: in the source"
    ):
        checkpoint.load(str(tmp_path), {"model": other})
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    wide = nn.Linear(3, 4)
    with pytest.raises(LayoutMismatch, match=r"model/weight: the source holds float32 \(2, 3\)"):
        checkpoint.load(str(tmp_path), {"model": wide}, strict=False)
    with pytest.raises(LayoutMismatch, match="model expects bfloat16"):
        checkpoint.load(str(tmp_path), {"model": nn.Linear(3, 2).bfloat16()})


@pytest.mark.parametrize("value", [object(), {1, 2}, [torch.zeros(1)]])
def test_a_value_that_cannot_be_stored_is_refused_by_name(tmp_path: Path, value: object) -> None:
    with pytest.raises(LayoutMismatch, match="odd"):
        checkpoint.save(str(tmp_path), {"odd": value}, step=1)


def test_a_tensor_learning_rate_and_changed_groups_are_restored_by_name(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    groups = [
        {"params": [model.weight], "lr": torch.tensor(0.5)},
        {"params": [model.bias], "lr": 0.25},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    checkpoint.save(str(tmp_path), {"model": model, "optimizer": optimizer}, step=1)
    groups = [
        {"params": [model.bias], "lr": 1.0},
        {"params": [model.weight], "lr": torch.tensor(1.0)},
    ]
    fresh = torch.optim.SGD(groups, momentum=0.1)
    checkpoint.load(str(tmp_path), {"model": model, "optimizer": fresh})
    assert [float(group["lr"]) for group in fresh.param_groups] == [0.25, 0.5]
    assert [group["momentum"] for group in fresh.param_groups] == [0.9, 0.9]
    one_group = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(LayoutMismatch, match="different options"):
        checkpoint.load(str(tmp_path), {"model": model, "optimizer": one_group})


@pytest.mark.parametrize(("saved", "loaded"), [(10, 16), (16, 10)])
def test_a_vocabulary_may_be_padded_to_another_size(
    tmp_path: Path, saved: int, loaded: int
) -> None:
    def trained_with(rows: int) -> tuple[nn.Module, torch.optim.AdamW]:
        model = nn.Sequential(nn.Embedding(rows, 4), nn.Linear(4, rows))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return model, optimizer

    model, optimizer = trained_with(saved)
    checkpoint.save(str(tmp_path), {"model": model, "optimizer": optimizer}, step=1)
    other = trained_with(loaded)[0]
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    names = ["0.weight", "1.weight", "1.bias"]
    with pytest.raises(LayoutMismatch, match=r"resize=\[\.\.\.\]"):
        checkpoint.load(str(tmp_path), {"model": other}, resize=names[:2])
    checkpoint.load(str(tmp_path), {"model": other, "optimizer": fresh}, resize=names)
    common = min(saved, loaded)
    for before, after in zip(model.parameters(), other.parameters(), strict=True):
        slots = [
            (optimizer.state[before][slot], fresh.state[after][slot])
            for slot in ("exp_avg", "exp_avg_sq")
        ]
        for old, new in [(before, after), *slots]:
            assert torch.equal(old[:common], new[:common])
            assert not new[common:].any()
        assert fresh.state[after]["step"] == 1


def test_a_load_that_fails_leaves_a_new_optimizer_without_state(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    checkpoint.save(str(tmp_path), {"model": model, "optimizer": optimizer}, step=1)
    wider = nn.ModuleDict({"embedding": nn.Embedding(11, 7)})
    fresh = torch.optim.AdamW(wider.parameters())
    with pytest.raises(LayoutMismatch):
        checkpoint.load(str(tmp_path), {"model": wider, "optimizer": fresh}, strict=False)
    assert not fresh.state
    wider["embedding"].weight.grad = torch.ones(11, 7)
    fresh.step()


@pytest.mark.parametrize("slot", ["step", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize(
    "impossible",
    [TensorSpec("float4_e2m1fn", (2,)), TensorSpec("float32", (2**50,))],
    ids=["a dtype torch lacks", "far too large"],
)
def test_a_slot_that_cannot_be_allocated_leaves_no_other_slots(
    slot: str, impossible: TensorSpec
) -> None:
    model = nn.Linear(3, 2)
    fresh = torch.optim.Adam(model.parameters())
    tensors = {
        f"optim/{name}/{adam_slot}": TensorSpec(
            "float32", () if adam_slot == "step" else tuple(parameter.shape)
        )
        for name, parameter in model.named_parameters()
        for adam_slot in ("step", "exp_avg", "exp_avg_sq")
    }
    with pytest.raises(LayoutMismatch, match=r"float4_e2m1fn|too much"):
        allocate(model, [fresh], Claimed({**tensors, f"optim/bias/{slot}": impossible}))
    assert not fresh.state
    step(fresh, *model.parameters())


@pytest.mark.parametrize("steps", [0, 7])
def test_a_load_that_fails_after_scalars_were_restored_leaves_the_previous_state(
    tmp_path: Path, steps: int
) -> None:
    model = nn.ModuleDict({"first": nn.Linear(3, 2), "last": nn.Linear(2, 3)})
    first, last = model["first"], model["last"]
    two_groups = [{"params": [last.weight]}, {"params": [last.bias], "lr": 0.2}]
    saved = Averaging([{"params": list(first.parameters())}, *two_groups])
    step(saved, *model.parameters())
    checkpoint.save(str(tmp_path), {"model": model, "optimizer": saved}, step=1)
    # The second group does not fit; the load fails after it restored the first one's scalars.
    loaded = Averaging([{"params": list(first.parameters())}, {"params": list(last.parameters())}])
    for _ in range(steps):
        step(loaded, first.weight)
    with pytest.raises(LayoutMismatch, match="different options"):
        checkpoint.load(str(tmp_path), {"model": model, "optimizer": loaded})
    step_counts = {
        name: loaded.state[parameter]["step"]
        for name, parameter in model.named_parameters()
        if parameter in loaded.state
    }
    assert step_counts == ({"first.weight": steps} if steps else {})
    step(loaded, *model.parameters())


@pytest.mark.parametrize("elements", [2**28, 2**60])
def test_a_slot_far_too_large_for_its_parameter_is_refused_before_it_is_allocated(
    elements: int,
) -> None:
    """A damaged source may claim any shape; every rank would allocate all of it."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    source = Claimed({"optim/weight/table": TensorSpec("float32", (elements,))})
    with pytest.raises(LayoutMismatch, match=r"optim/weight/table.*too much for a parameter"):
        allocate(model, [optimizer], source)
    assert not optimizer.state


@pytest.mark.parametrize("shape", [(), (256,), (2, 2), (128, 128)])
def test_slots_of_other_shapes_than_the_parameter_are_allocated(shape: tuple[int, ...]) -> None:
    """Such as tables of quantized optimizers, and Shampoo's preconditioners."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    allocate(model, [optimizer], Claimed({"optim/weight/table": TensorSpec("float32", shape)}))
    assert optimizer.state[model.weight]["table"].shape == shape


def test_numbers_that_are_one_here_must_be_equal_in_the_source(tmp_path: Path) -> None:
    """As the steps are of all parameters in a flat parameter."""

    def steps(first: torch.Tensor, second: torch.Tensor) -> dict[str, Any]:
        return {"optim": {"a": {"step": first}, "b": {"step": second}}}

    shared = torch.zeros(())
    checkpoint.save(str(tmp_path), steps(torch.tensor(5.0), torch.tensor(5.0)), step=1)
    checkpoint.load(str(tmp_path), steps(shared, shared))
    assert shared == 5
    checkpoint.save(str(tmp_path), steps(torch.tensor(6.0), torch.tensor(7.0)), step=2)
    with pytest.raises(LayoutMismatch, match="are one number in this optimizer"):
        checkpoint.load(str(tmp_path), steps(shared, shared))
    assert shared == 5


def test_numbers_of_several_data_types_that_are_one_here_are_compared(tmp_path: Path) -> None:
    def steps(first: torch.Tensor, second: torch.Tensor) -> dict[str, Any]:
        return {"optim": {"a": {"step": first}, "b": {"step": second}}}

    shared = torch.zeros(())
    checkpoint.save(str(tmp_path), steps(torch.tensor(5.0), torch.tensor(5)), step=1)
    checkpoint.load(str(tmp_path), steps(shared, shared), convert=True)
    assert shared == 5
    checkpoint.save(str(tmp_path), steps(torch.tensor(6.0), torch.tensor(7)), step=2)
    with pytest.raises(LayoutMismatch, match=r"but 6\.0 and 7 in the source"):
        checkpoint.load(str(tmp_path), steps(shared, shared), convert=True)
