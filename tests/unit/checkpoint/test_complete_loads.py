"""Claims about completeness: a strict load that succeeds has taken and filled all, by name."""

from __future__ import annotations

import copy
import logging
import uuid
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint.dcp import Reader, Writer
from keepstep.checkpoint.errors import LayoutMismatch
from tests.examples import examples
from tests.unit.checkpoint.thread_ranks import ThreadRanks


def new_url() -> str:
    return f"memory://{uuid.uuid4().hex}"


@dataclass(frozen=True)
class Shape:
    """Names what a state consists of: weights, ties, the optimizer's parameters, the rest.

    `tied` maps a weight to the one that it is. `values` has tensors (of one number), JSON and
    mappings.
    """

    weights: frozenset[str]
    tied: Mapping[str, str]
    optimized: tuple[str, ...] | None
    updated: frozenset[str]
    kind: str
    values: Mapping[str, Any]


NAMES = ("a", "b", "c")
LEAVES = st.sampled_from([0, 1.5, None, "text", [1, {}], "tensor"])
TREES = st.recursive(LEAVES, lambda t: st.dictionaries(st.sampled_from("xyz"), t, max_size=2))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    weights = draw(st.frozensets(st.sampled_from(NAMES), min_size=1))
    ordered = sorted(weights)
    tied = {name: ordered[0] for name in ordered[1:] if draw(st.sampled_from((False, False, True)))}
    own = [name for name in ordered if name not in tied]
    members = st.permutations(own).map(tuple)
    optimized = draw(st.one_of(st.none(), members, members, members.map(lambda m: m[:-1])))
    return Shape(
        weights=weights,
        tied=tied,
        optimized=optimized or None,
        updated=draw(st.frozensets(st.sampled_from(own))),
        kind=draw(st.sampled_from(("adam", "momentum", "plain"))),
        values=draw(st.dictionaries(st.sampled_from(("at", "best")), TREES, max_size=2)),
    )


def changed(draw: st.DrawFn, shape: Shape) -> Shape:
    """Return a shape with some parts of another one."""
    other = draw(shapes())
    parts = draw(st.sets(st.sampled_from(("model", "kind", "values")), max_size=2))
    if "model" in parts:
        shape = Shape(**{**vars(other), "kind": shape.kind, "values": shape.values})
    if "kind" in parts:
        shape = Shape(**{**vars(shape), "kind": other.kind})
    if "values" in parts:
        shape = Shape(**{**vars(shape), "values": other.values})
    return shape


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Shape, Shape]:
    saved = draw(shapes())
    return saved, changed(draw, saved)


class Weights(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        for name in sorted(shape.weights):
            first = shape.tied.get(name)
            # Few values, so that those of different names may be equal.
            value = float(torch.randint(2, ()))
            self.register_parameter(
                name,
                nn.Parameter(torch.full((2,), value)) if first is None else getattr(self, first),
            )


def optimizer_of(model: nn.Module, shape: Shape) -> torch.optim.Optimizer | None:
    if shape.optimized is None:
        return None
    members = [model.get_parameter(name) for name in shape.optimized]
    lr = float(torch.randint(1, 3, ()))
    match shape.kind:
        case "adam":
            return torch.optim.Adam(members, lr=lr)
        case kind:
            return torch.optim.SGD(members, lr=lr, momentum=0.9 * (kind == "momentum"))


def made(shape: Shape, *, is_trained: bool) -> dict[str, Any]:
    model = Weights(shape)
    state: dict[str, Any] = {"model": model}
    optimizer = optimizer_of(model, shape)
    if optimizer is not None:
        state["optimizer"] = optimizer
        if is_trained:
            for name in shape.updated:
                model.get_parameter(name).grad = torch.randint(2, (2,)).float()
            optimizer.step()
    return state | {name: filled(tree) for name, tree in shape.values.items()}


def filled(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: filled(item) for name, item in tree.items()}
    return torch.randint(9, (1,)) if tree == "tensor" else copy.deepcopy(tree)


def leaves_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return all leaves by name; hyperparameters as a leaf of each parameter."""
    leaves: dict[str, Any] = {}

    def visit(name: str, value: Any) -> None:
        match value:
            case nn.Module():
                for key, tensor in value.state_dict().items():
                    leaves[f"model/{key}"] = tensor.tolist()
            case torch.optim.Optimizer():
                names = {id(p): n for n, p in state["model"].named_parameters()}
                for group in value.param_groups:
                    options = {k: v for k, v in group.items() if k != "params"}
                    for parameter in group["params"]:
                        leaves[f"optimizer/{names[id(parameter)]}/"] = options
                        for slot, kept in value.state.get(parameter, {}).items():
                            kept = kept.tolist() if isinstance(kept, torch.Tensor) else kept
                            leaves[f"optimizer/{names[id(parameter)]}/{slot}"] = kept
            case dict():
                for key, item in value.items():
                    visit(f"{name}/{key}", item)
            case torch.Tensor():
                leaves[name] = ("tensor", value.tolist())
            case _:
                leaves[name] = value

    for name, value in state.items():
        visit(name, value)
    return leaves


def under_first_names(leaves: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any] | None:
    """Return leaves with other names of weights; None if two that become one differ."""
    found: dict[str, Any] = {}
    for key, value in leaves.items():
        kind, _, rest = key.partition("/")
        if kind in ("model", "optimizer"):
            name, slash, slot = rest.partition("/")
            key = f"{kind}/{names.get(name, name)}{slash}{slot}"
        if found.setdefault(key, value) != value:
            return None
    return found


def expected_of(saved: Mapping[str, Any], saved_shape: Shape, live: Shape) -> Any:
    """Return what a complete load makes of a saved state."""
    leaves = leaves_of(saved)
    # The state of weights that were tied is that of one of them, of whichever there is.
    members = live.optimized or ()
    moved = {
        first: alias
        for alias, first in saved_shape.tied.items()
        if alias in members and live.tied.get(first, first) not in members
    }
    model = {key: value for key, value in leaves.items() if key.startswith("model/")}
    rest = {key: value for key, value in leaves.items() if not key.startswith("model/")}
    rest = under_first_names(rest, moved) or {}
    tops = {"model", *live.values} | ({"optimizer"} if live.optimized else set())
    asked = {k: v for k, v in (model | rest).items() if k.partition("/")[0] in tops}
    return under_first_names(asked, live.tied)


@settings(max_examples=examples(150))
@given(pair=pairs(), seed=st.integers(0, 99), is_trained=st.booleans())
def test_a_strict_load_that_succeeds_has_taken_and_filled_all(
    pair: tuple[Shape, Shape], seed: int, is_trained: bool
) -> None:
    saved_shape, live_shape = pair
    torch.manual_seed(seed)
    url = new_url()
    saved, live = made(saved_shape, is_trained=True), made(live_shape, is_trained=is_trained)
    checkpoint.save(url, saved, step=1)
    before = copy.deepcopy(leaves_of(live))
    refused = refusal_of(url, live)
    if refused is not None:
        event("refused")
        assert len(refused) < 1500
        assert leaves_of(live) == before
        assert saved_shape != live_shape or is_trained, refused
        return
    event("loaded")
    loaded = under_first_names(leaves_of(live), live_shape.tied)
    expected = expected_of(saved, saved_shape, live_shape)
    assert loaded is not None
    assert expected is not None
    # Parameters that were never updated have nothing but their group's options, as others have.
    for one, other in ((expected, loaded), (loaded, expected)):
        bare = {key for key in one if key.endswith("/") and not slots_in(one, key)}
        for key in bare if one is expected or live_shape.kind == "plain" else ():
            if key not in other:
                del one[key]
    assert loaded == expected


def slots_in(leaves: Mapping[str, Any], prefix: str) -> list[str]:
    return [key for key in leaves if key.startswith(prefix) and key != prefix]


def refusal_of(url: str, state: Mapping[str, Any], **options: Any) -> str | None:
    """Return why a load is refused; None if it succeeds."""
    try:
        checkpoint.load(url, state, **options)
    except LayoutMismatch as error:
        return str(error)
    return None


def adam(model: nn.Module, *names: str, is_trained: bool = False) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam([model.get_parameter(name) for name in names])
    if is_trained:
        for name in names:
            model.get_parameter(name).grad = torch.ones_like(model.get_parameter(name))
        optimizer.step()
    return optimizer


def saved_pair(*optimized: str, **values: object) -> str:
    """Return where a model of two layers, an optimizer and values are stored."""
    model, url = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), new_url()
    state: dict[str, object] = {"model": model, **values}
    if optimized:
        state["optimizer"] = adam(model, *optimized, is_trained=True)
    checkpoint.save(url, state, step=1)
    return url


def pair_for(*optimized: str, **values: object) -> dict[str, object]:
    """Return a state that is to be filled from what `saved_pair` stored."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = {"optimizer": adam(model, *optimized)} if optimized else {}
    return {"model": model, **optimizers, **values}


BOTH = ("0.weight", "1.weight")
ONE = BOTH[:1]


@pytest.mark.parametrize(
    ("of_saved", "saved", "of_live", "live", "named"),
    [
        (
            *(BOTH, {}, ONE, {}),
            "optim/1.weight/exp_avg, optim/1.weight/exp_avg_sq, optim/1.weight/step: in the source",
        ),
        (
            *(ONE, {}, BOTH, {}),
            "optim/1.weight: a parameter without optimizer state in the source",
        ),
        ((), {}, ONE, {}, "optim: the source has no optimizer state"),
        ((), {"at": {"x": 1}}, (), {"at": {}}, "at/x: a value in the source"),
        ((), {"at": {}}, (), {"at": {"x": 1}}, "at/x: a value that is missing"),
        ((), {"at": {"x": torch.ones(1)}}, (), {"at": {}}, "at/x: in the source, but not in"),
        ((), {"at": []}, (), {"at": {}}, "at: a value in the source"),
        ((), {"at": {"x": 1, "y": 2}}, (), {"at": {"x": 0}}, "at/y: a value in the source"),
        (
            *((), {"ema": {"a": torch.ones(2), "b": torch.ones(2)}}),
            *((), {"ema": {"a": torch.ones(2)}}),
            "ema/b: in the source, but not in the state",
        ),
    ],
)
def test_what_would_be_left_or_not_filled_is_refused_and_else_listed_by_name(
    of_saved: tuple[str, ...],
    saved: dict[str, object],
    of_live: tuple[str, ...],
    live: dict[str, object],
    named: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, state = saved_pair(*of_saved, **saved), pair_for(*of_live, **live)
    before = copy.deepcopy(leaves_of(state))
    assert named in (refusal_of(url, state) or "")
    assert leaves_of(state) == before
    assert refusal_of(url, state, strict=False) is None
    assert named in caplog.text


def test_names_that_a_state_does_not_ask_for_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """To load the model alone is what users do every day."""
    caplog.set_level(logging.INFO, "keepstep")
    url = saved_pair("0.weight", at={"x": 1}, ema={"w": torch.ones(2), "v": torch.ones(2)}, loss=2)
    checkpoint.load(url, pair_for())
    (line,) = [r.getMessage() for r in caplog.records if "loaded step 1" in r.getMessage()]
    assert line.endswith(
        "; not asked for: at (1 value), ema (2 tensors), loss (1 value), optim (3 tensors)"
    )


def test_messages_on_large_states_are_short() -> None:
    url, keys = new_url(), range(3000)
    checkpoint.save(url, {"a": {f"old{n}": torch.ones(1) for n in keys}}, step=1)
    refused = refusal_of(url, {"a": {f"new{n}": torch.ones(1) for n in keys}})
    assert refused is not None
    assert "a/new0, a/new1, a/new2, a/new3 and 2996 more: missing in the source" in refused
    assert "a/old0, a/old1, a/old10, a/old100 and 2996 more: in the source" in refused
    assert len(refused) < 1000


def test_mappings_that_are_no_dictionaries_are_filled_or_refused() -> None:
    url = new_url()
    checkpoint.save(url, {"at": {"epoch": 3}}, step=1)
    at = UserDict(epoch=0)
    checkpoint.load(url, {"at": at})
    assert at["epoch"] == 3
    fixed = MappingProxyType({"epoch": 0})
    assert "at/epoch: the source has another value" in (refusal_of(url, {"at": fixed}) or "")
    checkpoint.load(url, {"at": MappingProxyType({"epoch": 3})})


class LanguageModel(nn.Module):
    def __init__(self, *, is_tied: bool, is_transposed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(4, 2))
        self.head = nn.Parameter(torch.randn(2, 4) if is_transposed else torch.randn(4, 2))
        if is_tied:
            self.head = nn.Parameter(self.embed.data.t()) if is_transposed else self.embed


def write(form: str, model: nn.Module, directory: Path) -> str:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    match form:
        case "keepstep":
            checkpoint.save(str(directory), {"model": model}, step=1)
        case "torch":
            torch.save(state, directory / "a.pt")
            return str(directory / "a.pt")
        case "safetensors":
            save_file(state, directory / "a.safetensors")
            return str(directory / "a.safetensors")
        case "dcp":
            dcp.save({"model": state}, checkpoint_id=directory, no_dist=True)
    return str(directory)


@pytest.mark.parametrize("form", ["keepstep", "torch", "safetensors", "dcp"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_tensors_that_become_one_are_refused_if_they_differ(
    form: str, is_transposed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = LanguageModel(is_tied=False, is_transposed=is_transposed)
    different, equal = tmp_path / "different", tmp_path / "equal"
    different.mkdir(), equal.mkdir()
    url = write(form, saved, different)
    live = {"model": LanguageModel(is_tied=True, is_transposed=is_transposed)}
    before = live["model"].embed.clone()
    named = "model/head: differs in the source from model/embed"
    assert named in (refusal_of(url, live) or "")
    assert torch.equal(live["model"].embed, before)
    checkpoint.load(url, live, strict=False)
    assert torch.equal(live["model"].embed, saved.embed)
    assert named in caplog.text
    saved.head.data.copy_(saved.embed.data.t() if is_transposed else saved.embed.data)
    checkpoint.load(write(form, saved, equal), live)


def test_slots_of_parameters_that_become_one_are_refused_if_they_differ() -> None:
    saved, url = LanguageModel(is_tied=False), new_url()
    saved.head.data.copy_(saved.embed.data)
    optimizer = adam(saved, "embed", "head", is_trained=True)
    checkpoint.save(url, {"model": saved, "optimizer": optimizer}, step=1)
    live = LanguageModel(is_tied=True)
    state = {"model": live, "optimizer": adam(live, "embed")}
    checkpoint.load(url, state)
    optimizer.state[saved.head]["exp_avg"][1, 1] += 1
    checkpoint.save(url, {"model": saved, "optimizer": optimizer}, step=2)
    assert "optim/head/exp_avg: differs in the source" in (refusal_of(url, state) or "")


def test_names_of_one_memory_in_a_state_are_refused_if_they_differ() -> None:
    url, one = new_url(), torch.zeros(3)
    checkpoint.save(url, {"a": torch.ones(3), "b": {"c": torch.full((3,), 2.0)}}, step=1)
    refused = refusal_of(url, {"a": one, "b": {"c": one}})
    assert "b/c: differs in the source from a" in (refused or "")
    assert torch.equal(one, torch.zeros(3))


def test_stages_take_a_checkpoint_together_or_refuse_it_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = nn.ModuleDict({name: nn.Linear(1, 1) for name in "abc"})
    optimizer = adam(whole, *dict(whole.named_parameters()), is_trained=True)
    at = {"rank 0": 0, "rank 1": 1}
    checkpoint.save(str(tmp_path), {"model": whole, "optimizer": optimizer, "at": at}, step=1)

    def stage(rank: int, *names: str) -> dict[str, object]:
        model = nn.ModuleDict({name: nn.Linear(1, 1) for name in names})
        own = adam(model, *dict(model.named_parameters()))
        return {"model": model, "optimizer": own, "at": {f"rank {rank}": None}}

    played = ThreadRanks(2)
    played.patch(monkeypatch)
    states = [stage(0, "a"), stage(1, "b", "c")]
    assert played.run(lambda rank: checkpoint.load(str(tmp_path), states[rank])) == [1, 1]
    assert [state["at"] for state in states] == [{"rank 0": 0}, {"rank 1": 1}]
    assert len(states[1]["optimizer"].state) == 4  # type: ignore[attr-defined]
    states = [stage(0, "a"), stage(1, "b")]
    results = played.run(lambda rank: checkpoint.load(str(tmp_path), states[rank]))
    assert all("model/c.bias, model/c.weight: in the source" in str(r) for r in results)
    assert all("optim/c.bias/exp_avg" in str(r) for r in results)


def test_frozen_parameters_may_be_in_a_group_or_in_none() -> None:
    """They have no state but their group's, which others take."""
    url, model = new_url(), nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    checkpoint.save(url, {"model": model, "optimizer": optimizer}, step=1)
    live = nn.Linear(2, 2)
    checkpoint.load(url, {"model": live, "optimizer": adam(live, "weight")})
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
    checkpoint.save(url, {"model": model, "optimizer": torch.optim.SGD(groups)}, step=2)
    refused = refusal_of(url, {"model": live, "optimizer": torch.optim.SGD([live.weight])})
    assert "optim/bias: a parameter in the source, but of no optimizer" in (refused or "")
    bias = live.bias.requires_grad_(False)
    checkpoint.save(
        url, {"model": live, "optimizer": adam(live, "weight", is_trained=True)}, step=3
    )
    frozen = torch.optim.Adam([live.weight, bias])
    checkpoint.load(url, {"model": live, "optimizer": frozen})
    alone = torch.optim.Adam([{"params": [live.weight]}, {"params": [bias]}])
    refused = refusal_of(url, {"model": live, "optimizer": alone})
    assert "optim/bias: a parameter without optimizer state" in (refused or "")


def test_what_no_rank_asks_dcp_for_is_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such loads are no error in DCP."""
    saved = {"model": {"a": torch.ones(2), "b": torch.ones(2)}, "at": {"x": 1}, "ema": {"y": 2}}
    dcp.save(saved, storage_writer=Writer(str(tmp_path), step=1), no_dist=True)
    dcp.load({"model": saved["model"]}, storage_reader=Reader(str(tmp_path)), no_dist=True)
    assert not [r for r in caplog.records if r.name == "keepstep"]
    state = {"model": {"a": torch.zeros(2)}, "at": {"x": 0}}
    dcp.load(state, storage_reader=Reader(str(tmp_path)), no_dist=True)
    (record,) = [r for r in caplog.records if r.name == "keepstep"]
    assert record.getMessage() == (
        f"{tmp_path}: not loaded: model.b: in the checkpoint, but not in the state"
    )


def test_an_optimizer_whose_parameters_are_not_told_apart_is_refused_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = nn.Linear(2, 2)
    optimizer = torch.optim.Adam([{"params": [saved.weight]}, {"params": [saved.bias]}])
    torch.save({"model": saved.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a")
    live = nn.Linear(2, 2)
    state = {"model": live, "optimizer": torch.optim.Adam(live.parameters())}
    refused = refusal_of(str(tmp_path / "a"), state)
    assert "optimizer: left out of the source, because " in (refused or "")
    assert refusal_of(str(tmp_path / "a"), state, strict=False) is None
    assert "optimizer: left out of the source, because " in caplog.text
    checkpoint.load(str(tmp_path / "a"), {"model": live})


def test_what_another_tools_optimizer_has_beside_slots_and_groups_is_refused(
    tmp_path: Path,
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    kept = {**optimizer.state_dict(), "count": 5}
    torch.save({"model": model.state_dict(), "optimizer": kept}, tmp_path / "a")
    refused = refusal_of(str(tmp_path / "a"), {"model": model, "optimizer": optimizer})
    assert "optimizer/count: a value in the source" in (refused or "")
