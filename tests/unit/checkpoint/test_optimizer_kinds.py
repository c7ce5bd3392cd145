"""Claims about optimizers that keep more than a tensor or a number of each parameter.

`ops/bench/optimizer_sweep.py` claims the same of every optimizer of two libraries.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from keepstep import checkpoint
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.live.capture import LiveStateReader

Parameters = Iterable[nn.Parameter]


class OfEachParameter(Optimizer):
    """Adds to each parameter what `update` returns, given its slots."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": 0.1, "coefficients": ((1.0, 2.0), 3)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * self.update(parameter, group))

    def update(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError


class WithCount(SGD):
    """Its rate depends on a number that only its `state_dict` has."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.param_groups[0]["lr"] = 0.01 * self.count
        super().step()


class Around(Optimizer):
    """Averages with what parameters were, around another optimizer, as Lookahead does."""

    def __init__(self, parameters: Parameters) -> None:
        self.inner = AdamW(parameters, lr=0.01)
        self.slow = {
            parameter: parameter.detach().clone()
            for group in self.inner.param_groups
            for parameter in group["params"]
        }
        self.state = {}  # type: ignore[assignment]
        self.defaults = self.inner.defaults
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.steps = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        slow = {(0, number): value.clone() for number, value in enumerate(self.slow.values())}
        return {"slow": slow, "inner": self.inner.state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.slow = dict(zip(self.slow, state_dict["slow"].values(), strict=True))
        self.steps = state_dict["steps"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.steps += 1
        if self.steps % 3 == 0:
            for parameter, slow in self.slow.items():
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


class WithBase(SGD):
    """Has the state of another optimizer beside its own, as SAM has."""

    def __init__(self, parameters: Parameters) -> None:
        own = list(parameters)
        super().__init__(own, lr=0.01, momentum=0.9)
        self.base = AdamW(own, lr=0.01)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base": self.base.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base.load_state_dict(state_dict["base"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.base.step()


class KeyedByNoParameter(OfEachParameter):
    """Keeps a number and tensors for all parameters in `state`, as MADGRAD and SPAM do."""

    def update(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state: dict[Any, Any] = self.state
        state["steps"] = state.get("steps", 0) + 1
        norms = state.setdefault("norms", {"sum": torch.zeros(2, dtype=torch.float64), 3: "x"})
        assert parameter.grad is not None
        norms["sum"] += parameter.grad.norm().double()
        return parameter.grad / norms["sum"].sum().float() / state["steps"]


class GroupTensors(OfEachParameter):
    """Makes tensors in its groups at the first step, as Prodigy and D-Adaptation do."""

    def update(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        total = group.setdefault("total", torch.zeros(1, dtype=torch.float64))
        several = group.setdefault("several", torch.zeros(2, 3))
        count = group.setdefault("count", torch.tensor(0))
        assert parameter.grad is not None
        total.add_(parameter.grad.norm())
        several.add_(total.float())
        count.add_(1)
        return parameter.grad / several.sum() / count


class Projection:
    """An object that an optimizer keeps of a parameter, as GaLore does."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix
        self.uses = 0


class Nested(OfEachParameter):
    """Keeps lists, mappings, tuples, queues and objects of tensors, as SOAP and Shampoo do."""

    def update(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert parameter.grad is not None
        grad, state = parameter.grad, self.state[parameter]
        if not state:
            state["factors"] = [torch.eye(grad.shape[0]), None, (torch.ones(2), "left")]
            state["by dimension"] = {0: torch.zeros(grad.shape[0]), "1": []}
            state["last"] = deque([torch.zeros_like(grad)], maxlen=3)
            state["projection"] = Projection(torch.randn(grad.shape[0], 3).t())
        state["factors"][0].add_(grad.reshape(grad.shape[0], -1).norm())
        state["factors"][2][0].add_(1)
        state["by dimension"][0].add_(grad.sum())
        state["by dimension"]["1"].append(grad.norm())
        state["last"].append(grad.clone())
        state["projection"].uses += 1
        projected = state["projection"].matrix @ state["factors"][0] * state["projection"].uses
        scale = projected.norm() + state["by dimension"][0].norm() + state["factors"][2][0].sum()
        return sum(state["last"]) / scale + torch.stack(state["by dimension"]["1"]).sum()


class Transposed(OfEachParameter):
    """Keeps a matrix whose elements lie in the order of columns, as a decomposition returns it."""

    def update(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert parameter.grad is not None
        basis = self.state[parameter].setdefault("basis", torch.randn(5, 7).t())
        assert basis.stride() == (1, 7)
        return parameter.grad * basis.sum()


class Rounded(SGD):
    """Keeps state in half precision, which its `state_dict` has in full: it computes tensors."""

    def state_dict(self) -> dict[str, Any]:
        told = super().state_dict()
        told["state"] = {
            number: {"momentum_buffer": slots["momentum_buffer"] * 2}
            for number, slots in told["state"].items()
        }
        return told

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {
            number: {"momentum_buffer": slots["momentum_buffer"] / 2}
            for number, slots in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})


class Hooked(SGD):
    """Has hooks that put a number into what is saved, and take it out."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, lr=0.01)
        self.seen = 0
        self.register_state_dict_post_hook(lambda own, told: {**told, "seen": own.seen})
        self.register_load_state_dict_pre_hook(self._take)

    def _take(self, own: Optimizer, told: dict[str, Any]) -> None:
        self.seen = told["seen"]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen += 1
        self.param_groups[0]["lr"] = 0.01 * self.seen
        super().step()


KINDS: dict[str, Callable[[Parameters], Optimizer]] = {
    "a number of its own": lambda p: WithCount(p, lr=0.01, momentum=0.9),
    "around another": Around,
    "with another beside it": WithBase,
    "keyed by no parameter": KeyedByNoParameter,
    "tensors in groups": GroupTensors,
    "nested": Nested,
    "other strides": Transposed,
    "computed": lambda p: Rounded(p, lr=0.01, momentum=0.9),
    "hooked": Hooked,
    "a rate that is a tensor": lambda p: AdamW(p, lr=torch.tensor(0.01), foreach=False),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def made(kind: str) -> dict[str, Any]:
    model = network()
    return {"model": model, "optimizer": KINDS[kind](model.parameters())}


def train(state: dict[str, Any], steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        state["optimizer"].zero_grad()
        state["model"](torch.randn(3, 4)).pow(2).mean().backward()
        state["optimizer"].step()


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for (name, expected), got in zip(
        one["model"].named_parameters(), other["model"].parameters(), strict=True
    ):
        assert torch.equal(expected, got), name


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_goes_on_as_if_it_had_not_stopped(kind: str, tmp_path: Path) -> None:
    straight, stopped, resumed = made(kind), made(kind), made(kind)
    train(straight, range(8))
    train(stopped, range(4))
    checkpoint.save(str(tmp_path), stopped, step=4)
    checkpoint.load(str(tmp_path), resumed)
    train(resumed, range(4, 8))
    assert_equal(straight, resumed)


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_that_has_gone_on_returns_to_what_was_saved(kind: str, tmp_path: Path) -> None:
    straight, returned = made(kind), made(kind)
    train(straight, range(8))
    train(returned, range(4))
    checkpoint.save(str(tmp_path), returned, step=4)
    train(returned, range(20, 25))
    checkpoint.load(str(tmp_path), returned)
    train(returned, range(4, 8))
    assert_equal(straight, returned)


@pytest.mark.parametrize("kind", KINDS)
def test_later_captures_have_what_changed_since_the_first(kind: str, tmp_path: Path) -> None:
    """Snapshots of a job are taken by one reader, step by step."""
    state = made(kind)
    reader = LiveStateReader(state["model"], [state["optimizer"]])
    for step in range(3):
        train(state, range(step, step + 1))
        captured = reader.capture()
        anew = LiveStateReader(state["model"], [state["optimizer"]]).capture()
        assert captured.documents == anew.documents
        assert [t.key for t in captured.tensors] == [t.key for t in anew.tensors]
        for one, other in zip(captured.tensors, anew.tensors, strict=True):
            assert torch.equal(one.data, other.data), one.key


def test_tensors_in_groups_keep_data_type_and_shape(tmp_path: Path) -> None:
    stopped, resumed = made("tensors in groups"), made("tensors in groups")
    train(stopped, range(2))
    checkpoint.save(str(tmp_path), stopped, step=2)
    checkpoint.load(str(tmp_path), resumed)
    for name in ("total", "several", "count"):
        (expected, got) = (s["optimizer"].param_groups[0][name] for s in (stopped, resumed))
        assert torch.equal(expected, got)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)


def test_tensor_in_a_group_is_filled_in_place(tmp_path: Path) -> None:
    """A compiled or captured step reads this tensor."""
    state = made("a rate that is a tensor")
    rate = state["optimizer"].param_groups[0]["lr"]
    checkpoint.save(str(tmp_path), state, step=0)
    rate.fill_(7)
    checkpoint.load(str(tmp_path), state)
    assert state["optimizer"].param_groups[0]["lr"] is rate
    assert rate == torch.tensor(0.01)


def test_tuples_of_a_group_come_back_as_tuples(tmp_path: Path) -> None:
    stopped, resumed = made("nested"), made("nested")
    stopped["optimizer"].param_groups[0]["made later"] = ((1, 2), [3, (4.5,)])
    checkpoint.save(str(tmp_path), stopped, step=0)
    checkpoint.load(str(tmp_path), resumed)
    (group,) = resumed["optimizer"].param_groups
    assert group["coefficients"] == ((1.0, 2.0), 3)
    assert group["made later"] == ((1, 2), [3, (4.5,)])


def refusal(state: dict[str, Any], path: Path) -> str:
    with pytest.raises(LayoutMismatch) as refused:
        checkpoint.save(str(path), state, step=1)
    assert not list(path.iterdir())
    return str(refused.value)


def test_what_cannot_be_stored_is_refused_by_its_name(tmp_path: Path) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    weight = model[0].weight  # type: ignore[index]
    state = {"model": model, "optimizer": optimizer}
    optimizer.state[weight]["draws"] = [1, torch.Generator()]
    assert "optim/0.weight/draws[1]: a value of type torch" in refusal(state, tmp_path)
    optimizer.state[weight] = {"chosen": lambda: None}
    assert "optim/0.weight/chosen: a value of type function" in refusal(state, tmp_path)
    optimizer.state[weight] = {"path": {"of": tmp_path}}
    assert "optim/0.weight/path['of']: a value of type pathlib" in refusal(state, tmp_path)
    optimizer.state[weight] = {"rows": [torch.eye(2).to_sparse()]}
    assert "optim/0.weight/rows[0]" in refusal(state, tmp_path)
    optimizer.state[weight] = torch.zeros(2)
    assert "no slots by name" in refusal(state, tmp_path)
    del optimizer.state[weight]
    optimizer.state["k"] = tmp_path  # type: ignore[index]
    assert "state_dict['state']['k']: a value of type pathlib" in refusal(state, tmp_path)
    del optimizer.state["k"]  # type: ignore[arg-type]
    optimizer.param_groups[0]["large"] = torch.zeros(2**20)
    assert "'large'" in refusal(state, tmp_path)


def test_optimizer_without_groups_is_refused(tmp_path: Path) -> None:
    class Bare(Optimizer):
        def __init__(self) -> None:
            pass

    assert "Bare has no param_groups" in refusal(
        {"model": network(), "optimizer": Bare()}, tmp_path
    )


def test_rest_is_refused_where_the_parameters_are_in_another_order(tmp_path: Path) -> None:
    stopped = made("around another")
    train(stopped, range(2))
    checkpoint.save(str(tmp_path), stopped, step=2)
    model = network()
    resumed = {"model": model, "optimizer": Around([*model.parameters()][::-1])}
    with pytest.raises(LayoutMismatch, match=r"here 2.bias is where 0.weight was"):
        checkpoint.load(str(tmp_path), resumed)


def test_rest_is_refused_by_an_optimizer_that_does_not_take_it(tmp_path: Path) -> None:
    stopped = made("a number of its own")
    train(stopped, range(2))
    checkpoint.save(str(tmp_path), stopped, step=2)
    model = network()
    plain = {"model": model, "optimizer": SGD(model.parameters(), lr=0.01, momentum=0.9)}
    with pytest.raises(LayoutMismatch, match="'count', which SGD does not take"):
        checkpoint.load(str(tmp_path), plain)


def test_rest_that_the_checkpoint_lacks_is_refused(tmp_path: Path) -> None:
    model = network()
    plain = {"model": model, "optimizer": SGD(model.parameters(), lr=0.01, momentum=0.9)}
    train(plain, range(2))
    checkpoint.save(str(tmp_path), plain, step=2)
    with pytest.raises(LayoutMismatch, match="state_dict"):
        checkpoint.load(str(tmp_path), made("a number of its own"))


def test_failed_load_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    stopped = made("keyed by no parameter")
    train(stopped, range(2))
    checkpoint.save(str(tmp_path), stopped, step=2)
    resumed = made("keyed by no parameter")
    resumed["another"] = torch.zeros(3)
    with pytest.raises(LayoutMismatch, match="another"):
        checkpoint.load(str(tmp_path), resumed)
    assert not resumed["optimizer"].state


def test_integer_steps_become_what_this_release_has(tmp_path: Path) -> None:
    """Releases of PyTorch before 1.12 had integers; `Adam.__setstate__` makes tensors of them."""
    model, old = network(), network()
    state = {"model": old, "optimizer": AdamW(old.parameters(), lr=0.01)}
    train(state, range(3))
    for slots in state["optimizer"].state.values():  # type: ignore[attr-defined]
        slots["step"] = int(slots["step"])
    checkpoint.save(str(tmp_path), state, step=3)
    for fresh in (True, False):
        resumed = {"model": model, "optimizer": AdamW(model.parameters(), lr=0.01)}
        if not fresh:
            train(resumed, range(1))
        checkpoint.load(str(tmp_path), resumed)
        steps = [
            slots["step"]
            for slots in resumed["optimizer"].state.values()  # type: ignore[attr-defined]
        ]
        assert all(torch.equal(step, torch.tensor(3.0)) for step in steps)
        train(resumed, range(3, 5))


def test_number_of_the_live_optimizer_is_filled_from_a_tensor(tmp_path: Path) -> None:
    stopped, resumed = (
        {"model": m, "optimizer": AdamW(m.parameters())} for m in (network(), network())
    )
    train(stopped, range(3))
    train(resumed, range(1))
    checkpoint.save(str(tmp_path), stopped, step=3)
    for slots in resumed["optimizer"].state.values():  # type: ignore[attr-defined]
        slots["step"] = 1
    checkpoint.load(str(tmp_path), resumed)
    for slots in resumed["optimizer"].state.values():  # type: ignore[attr-defined]
        assert torch.equal(slots["step"], torch.tensor(3.0))


def test_slots_keep_their_data_type_where_parameters_have_another(tmp_path: Path) -> None:
    """Torch's `load_state_dict` would convert them to that of the parameters."""
    states = []
    for _ in range(2):
        model = network().to(torch.bfloat16)
        states.append({"model": model, "optimizer": WithCount(model.parameters(), lr=0.01)})
    stopped, resumed = states
    stopped["optimizer"].state[stopped["model"][0].weight]["exact"] = torch.tensor([1 / 3])  # type: ignore[attr-defined,index]
    checkpoint.save(str(tmp_path), stopped, step=1)
    checkpoint.load(str(tmp_path), resumed)
    got = resumed["optimizer"].state[resumed["model"][0].weight]["exact"]  # type: ignore[attr-defined,index]
    assert torch.equal(got, torch.tensor([1 / 3]))


def test_objects_of_other_packages_are_not_made(tmp_path: Path) -> None:
    stopped = made("nested")
    train(stopped, range(1))
    captured = LiveStateReader(stopped["model"], [stopped["optimizer"]]).capture()
    encoded = captured.documents["optim/scalars"]["0.weight/projection"]
    assert encoded["$object"]["class"].endswith(":Projection")

    class Elsewhere(AdamW):
        __module__ = "another_package.optimizers"

    model = network()
    optimizer = Elsewhere(model.parameters())
    optimizer.state[model[0].weight]["projection"] = Projection(torch.eye(2))  # type: ignore[index]
    assert "Projection cannot be stored" in refusal(
        {"model": model, "optimizer": optimizer}, tmp_path
    )
