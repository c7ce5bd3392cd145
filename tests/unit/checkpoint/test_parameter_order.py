"""Claims about which parameter gets which state of an optimizer that numbers its parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import AdamW, Optimizer

from keepstep import checkpoint
from keepstep.checkpoint.format.layout.parameter_order import LiveOrders
from tests.examples import examples

Grouping = Callable[[list[nn.Parameter]], list[dict[str, Any]]]


def model_of_equal_layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))


def trained(model: nn.Module, *optimizers: Optimizer) -> None:
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(4, 3)).pow(2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def moments(model: nn.Module, *optimizers: Optimizer) -> list[torch.Tensor]:
    return [
        optimizer.state[parameter]["exp_avg"]
        for parameter in model.parameters()
        for optimizer in optimizers
        if parameter in optimizer.state
    ]


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other) > 0
    assert all(map(torch.equal, one, other))


@settings(max_examples=examples(20))
@given(st.permutations(range(6)), st.lists(st.integers(1, 5), max_size=2))
def test_order_is_that_of_the_optimizer_that_is_filled(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], cuts: list[int]
) -> None:
    def made(seed: int) -> tuple[nn.Module, Optimizer]:
        model = model_of_equal_layers(seed)
        ordered = [list(model.parameters())[number] for number in order]
        ends = [0, *sorted(set(cuts)), 6]
        groups = [
            {"params": ordered[start:end], "weight_decay": start / 10}
            for start, end in itertools.pairwise(ends)
        ]
        return model, AdamW(groups, lr=0.1)

    (saved, optimizer), (loaded, other) = made(0), made(1)
    trained(saved, optimizer)
    path = tmp_path_factory.mktemp("run") / "run.pt"
    torch.save({"model": saved.state_dict(), "optimizer": optimizer.state_dict()}, path)
    checkpoint.load(str(path), {"model": loaded, "optimizer": other})
    assert_equal(moments(loaded, other), moments(saved, optimizer))
    assert [g["weight_decay"] for g in other.param_groups] == [
        g["weight_decay"] for g in optimizer.param_groups
    ]


def test_names_of_a_wrapper_are_taken_off_the_module_alone(tmp_path: Path) -> None:
    saved, loaded = model_of_equal_layers(0), model_of_equal_layers(1)
    optimizer, other = (AdamW([*m.parameters()][::-1]) for m in (saved, loaded))
    trained(saved, optimizer)
    wrapped = {f"module.{name}": tensor for name, tensor in saved.state_dict().items()}
    torch.save({"model": wrapped, "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    checkpoint.load(str(tmp_path / "run.pt"), {"model": loaded, "optimizer": other})
    assert_equal(moments(loaded, other), moments(saved, optimizer))


def two_optimizers(seed: int) -> tuple[nn.Module, Optimizer, Optimizer]:
    model = model_of_equal_layers(seed)
    first, *rest = list(model.parameters())
    return model, AdamW([first], lr=0.1), AdamW(rest, lr=0.2)


@pytest.mark.parametrize("names", [("one", "two"), ("two", "one")])
def test_optimizers_are_told_apart_by_name(tmp_path: Path, names: tuple[str, str]) -> None:
    saved, loaded = two_optimizers(0), two_optimizers(1)
    trained(*saved)
    told = {name: each.state_dict() for name, each in zip(names, saved[1:], strict=True)}
    told = {name: told[name] for name in ("one", "two")}
    torch.save({"model": saved[0].state_dict(), **told}, tmp_path / "run.pt")
    state = {"model": loaded[0], **dict(zip(names, loaded[1:], strict=True))}
    checkpoint.load(str(tmp_path / "run.pt"), state)
    assert_equal(moments(*loaded), moments(*saved))


@pytest.mark.parametrize("grouping", ["sizes", "shapes"])
def test_optimizer_that_was_made_otherwise_gets_nothing(
    tmp_path: Path, grouping: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved, loaded = model_of_equal_layers(0), model_of_equal_layers(1)
    optimizer = AdamW(saved.parameters())
    trained(saved, optimizer)
    torch.save(
        {"model": saved.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt"
    )
    own = list(loaded.parameters())
    groups = (
        [{"params": own[:2]}, {"params": own[2:]}]
        if grouping == "sizes"
        else [{"params": [own[1], own[0], *own[2:]]}]
    )
    other = AdamW(groups)
    state = {"model": loaded, "optimizer": other}
    checkpoint.load(str(tmp_path / "run.pt"), state, strict=False)
    assert not other.state
    told = "groups have 6 of them" if grouping == "sizes" else "state of another shape"
    assert told in caplog.text


def test_entry_is_of_the_optimizer_of_its_name_or_of_its_place() -> None:
    orders = LiveOrders({"a": [["x"]], "b": [["y"], ["z"]]})
    assert orders.order_of("b", 0, 2) == [["y"], ["z"]]
    assert orders.order_of("optimizer_states.1", 1, 2) == [["y"], ["z"]]
    assert orders.order_of("other", 0, 1) is None
    assert LiveOrders({"a": [["x"]]}).order_of("optimizer.pt", 0, 1) == [["x"]]
