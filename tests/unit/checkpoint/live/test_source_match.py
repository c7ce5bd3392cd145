"""Claims about what fills a live tensor: padded tensors, masters, and further names."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint import Descriptions, Scale
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage

LOGICAL = (10, 3)
PADDED = Descriptions(padding={"embed.weight": LOGICAL})


def new_url() -> str:
    return f"memory://{uuid.uuid4().hex}"


class Mixed(torch.optim.Optimizer):
    """SGD with momentum that keeps parameters in float32, as mixed-precision optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.25})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                if "master_param" not in state and parameter.dtype != torch.float32:
                    state["master_param"] = parameter.detach().float()
                state["momentum"].mul_(0.9).add_(torch.rand_like(state["momentum"]))
                master = state.get("master_param", parameter)
                master.sub_(state["momentum"], alpha=group["lr"])
                if master is not parameter:
                    parameter.copy_(master)


def trained(
    rows: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[nn.ModuleDict, Mixed]:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"embed": nn.Embedding(rows, 3)}).to(dtype)
    optimizer = Mixed(model.parameters())
    optimizer.step()
    return model, optimizer


def stored_state(rows: int, dtype: torch.dtype = torch.float32) -> tuple[str, Any, Any]:
    model, optimizer = trained(rows, seed=0, dtype=dtype)
    url = new_url()
    state = {"model": model, "optimizer": optimizer}
    checkpoint.save(url, state, step=1, descriptions=PADDED)
    weight = model["embed"].weight
    return url, weight.detach(), optimizer.state[weight]


@pytest.mark.parametrize("is_fresh", [True, False])
@pytest.mark.parametrize("rows", [10, 12, 20])
def test_a_tensor_that_is_padded_otherwise_is_filled_as_far_as_it_is_not_padding(
    rows: int, is_fresh: bool
) -> None:
    url, weight, slots = stored_state(16)
    model, optimizer = trained(rows, seed=1)
    if is_fresh:
        optimizer = Mixed(model.parameters())
    live = model["embed"].weight
    padding = live.detach()[10:].clone()
    checkpoint.load(url, {"model": model, "optimizer": optimizer}, descriptions=PADDED)
    assert torch.equal(live[:10], weight[:10])
    assert torch.equal(live[10:], padding)
    momentum = optimizer.state[live]["momentum"]
    assert torch.equal(momentum[:10], slots["momentum"][:10])
    assert not momentum[10:].any()


def test_the_same_padding_is_filled_too() -> None:
    """Values that were trained there continue."""
    url, weight, slots = stored_state(16)
    model, optimizer = trained(16, seed=1)
    checkpoint.load(url, {"model": model, "optimizer": optimizer}, descriptions=PADDED)
    live = model["embed"].weight
    assert torch.equal(live, weight)
    assert torch.equal(optimizer.state[live]["momentum"], slots["momentum"])


@pytest.mark.parametrize("is_fresh", [True, False])
def test_padding_of_a_master_is_that_of_its_parameter(is_fresh: bool) -> None:
    """Zeros there would become the parameter's at the next step."""
    url, _, slots = stored_state(16, torch.bfloat16)
    model, optimizer = trained(20, seed=1, dtype=torch.bfloat16)
    live = model["embed"].weight
    master = optimizer.state[live]["master_param"]
    if is_fresh:
        optimizer, master = Mixed(model.parameters()), live.detach().float()
    padding = master[10:].clone()
    checkpoint.load(url, {"model": model, "optimizer": optimizer}, descriptions=PADDED)
    loaded = optimizer.state[live]["master_param"]
    assert torch.equal(loaded[:10], slots["master_param"][:10])
    assert torch.equal(loaded[10:], padding)


def test_what_is_stored_without_padding_is_loaded_into_padding_and_back() -> None:
    plain, _ = trained(10, seed=0)
    url = new_url()
    checkpoint.save(url, {"model": plain}, step=1)
    padded, _ = trained(16, seed=1)
    checkpoint.load(url, {"model": padded}, descriptions=PADDED)
    assert torch.equal(padded["embed"].weight[:10], plain["embed"].weight)
    url = new_url()
    checkpoint.save(url, {"model": padded}, step=1, descriptions=PADDED)
    back, _ = trained(10, seed=2)
    checkpoint.load(url, {"model": back})
    assert torch.equal(back["embed"].weight, plain["embed"].weight)


@pytest.mark.parametrize(
    ("rows", "descriptions", "message"),
    [
        (20, Descriptions(), r"the source holds float32 \(16, 3\), the model expects .*\(20, 3\)"),
        (20, Descriptions(padding={"embed.weight": (11, 3)}), r"expects float32 \(20, 3\)"),
        (
            16,
            Descriptions(padding={"embed.weight": (11, 3)}),
            r"logical shape \(10, 3\), and to be",
        ),
    ],
)
def test_other_logical_shapes_are_refused_by_name(
    rows: int, descriptions: Descriptions, message: str
) -> None:
    url, *_ = stored_state(16)
    model, _ = trained(rows, seed=1)
    with pytest.raises(LayoutMismatch, match=rf"model/embed\.weight: .*{message}"):
        checkpoint.load(url, {"model": model}, descriptions=descriptions)


@pytest.mark.parametrize("shape", [(17, 3), (10, 4), (10,), (10, 3, 1), (-1, 3)])
def test_a_logical_shape_that_does_not_fit_is_refused_by_name(shape: tuple[int, ...]) -> None:
    model, _ = trained(16, seed=0)
    descriptions = Descriptions(padding={"*.weight": shape})
    with pytest.raises(LayoutMismatch, match=r"padding: model/embed\.weight"):
        checkpoint.save(new_url(), {"model": model}, step=1, descriptions=descriptions)


def test_a_matrix_of_another_meaning_is_not_taken_for_a_padded_slot() -> None:
    """Such as a preconditioner over a padded dimension."""

    def state(rows: int) -> dict[str, torch.Tensor]:
        shapes = {"model/embed.weight": (rows, 3), "optim/embed.weight/left": (rows, rows)}
        return {key: torch.ones(shape) for key, shape in shapes.items()}

    url = new_url()
    checkpoint.save(url, state(16), step=1, descriptions=PADDED)
    with pytest.raises(LayoutMismatch, match=r"optim/embed\.weight/left: the source holds"):
        checkpoint.load(url, state(20), descriptions=PADDED)


def test_a_parameter_of_the_masters_type_is_filled_from_the_master() -> None:
    url, weight, slots = stored_state(10, torch.bfloat16)
    assert StoredCheckpoint.open(open_storage(url)).documents["masters"] == {
        "model/embed.weight": {"slot": "master_param", "dtype": "float32"}
    }
    model, _ = trained(10, seed=1)
    optimizer = Mixed(model.parameters())
    checkpoint.load(url, {"model": model, "optimizer": optimizer})
    live = model["embed"].weight
    assert torch.equal(live, slots["master_param"])
    assert not torch.equal(live, weight.float())
    assert optimizer.state[live].keys() == {"momentum"}


def test_a_parameter_of_the_stored_type_or_a_third_one_does_not_take_the_master() -> None:
    url, weight, _ = stored_state(10, torch.bfloat16)
    same, _ = trained(10, seed=1, dtype=torch.bfloat16)
    checkpoint.load(url, {"model": same})
    assert torch.equal(same["embed"].weight, weight)
    wider, _ = trained(10, seed=1, dtype=torch.float64)
    with pytest.raises(LayoutMismatch, match="the source holds bfloat16"):
        checkpoint.load(url, {"model": wider})
    checkpoint.load(url, {"model": wider}, convert=True)
    assert torch.equal(wider["embed"].weight, weight.double())


def test_quantized_tensor_is_not_converted_without_its_scales() -> None:
    """Its elements alone are other numbers: 448 where the weight has 4."""
    scales = {"model/fc.weight": Scale("model/fc.scale", block_shape=(2, 2), dtype="bfloat16")}
    weight = torch.tensor([[448.0, 1.0], [2.0, 4.0]])
    quantized = {
        "model/fc.weight": weight.to(torch.float8_e4m3fn),
        "model/fc.scale": torch.tensor([0.01]),
    }
    plain = {"model/fc.weight": weight.bfloat16(), "model/fc.scale": torch.tensor([1.0])}
    described = Descriptions(scales=scales)
    url = new_url()
    checkpoint.save(url, quantized, step=1, descriptions=described)
    for strict in (True, False):
        with pytest.raises(
            LayoutMismatch, match=r"fc.weight.* bfloat16|with scales in model/fc.sc"
        ):
            checkpoint.load(url, plain, strict=strict)
    with pytest.raises(LayoutMismatch, match=r"the model expects bfloat16 \(3, 2\)"):
        checkpoint.load(url, {**plain, "model/fc.weight": torch.ones(3, 2).bfloat16()})
    checkpoint.load(url, quantized)
    # The model has its scales beside it, too.
    checkpoint.load(url, plain, convert=True, descriptions=described)
    assert plain["model/fc.scale"].item() == pytest.approx(0.01)
    checkpoint.save(url, plain, step=2)
    with pytest.raises(LayoutMismatch, match=r"in the model, with scales in model/fc.scale"):
        checkpoint.load(url, quantized, convert=True, descriptions=described)
    wider = {"model/fc.scale": torch.zeros(1, dtype=torch.float64)}
    checkpoint.load(url, wider, strict=False, convert=True)
    assert wider["model/fc.scale"].item() == pytest.approx(0.01)


def test_other_names_of_master_slots_are_told() -> None:
    state = {
        "model/fc.weight": torch.ones(2, 2, dtype=torch.bfloat16),
        "optim/fc.weight/fp32": torch.full((2, 2), 1.001),
    }
    url = new_url()
    checkpoint.save(url, state, step=1, descriptions=Descriptions(master_slots=["fp32"]))
    into = {"model/fc.weight": torch.zeros(2, 2)}
    checkpoint.load(url, into)
    assert torch.equal(into["model/fc.weight"], state["optim/fc.weight/fp32"])


class Transposed(nn.Module):
    """An embedding that is the transpose of a head, in the same memory.

    A module's own parameters come before those of modules in it: the head has the first name.
    """

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Parameter(self.embed.weight.t() if is_tied else torch.zeros(3, 5))


class Twice(nn.Module):
    """An embedding that is the head, by another name."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = self.embed.weight if is_tied else nn.Parameter(torch.zeros(5, 3))


@pytest.mark.parametrize(
    ("kind", "document"),
    [(Transposed, {"name": "head", "transposed": True}), (Twice, "head")],
)
def test_tied_weights_are_stored_once_and_fill_all_their_names(
    kind: Callable[..., Any], document: object
) -> None:
    model, url = kind(is_tied=True), new_url()
    checkpoint.save(url, {"model": model}, step=1)
    source = StoredCheckpoint.open(open_storage(url))
    assert source.documents["model/tied"] == {"embed.weight": document}
    assert source.tensors.keys() == {"model/head"}
    for is_tied in (True, False):
        loaded = kind(is_tied=is_tied)
        checkpoint.load(url, {"model": loaded})
        assert torch.equal(loaded.embed.weight, model.embed.weight)
        assert torch.equal(loaded.head, model.head)


class Tied(nn.Module):
    """An embedding and a head of the same weights, in either order."""

    def __init__(
        self,
        first: str,
        second: str,
        *,
        is_transposed: bool = False,
        shape: tuple[int, int] = (5, 3),
    ) -> None:
        super().__init__()
        weight = nn.Parameter(torch.rand(shape))
        self.register_parameter(first, weight)
        self.register_parameter(second, nn.Parameter(weight.t()) if is_transposed else weight)


def adam(model: nn.Module, names: list[str], *, lr: float, is_fresh: bool) -> torch.optim.Adam:
    parameters = [model.get_parameter(name) for name in names]
    optimizer = torch.optim.Adam(parameters, lr=lr)
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    if not is_fresh:
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_fresh", [False, True])
def test_optimizer_state_of_tied_weights_is_found_by_whichever_name_comes_first(
    is_fresh: bool, is_transposed: bool
) -> None:
    saved = Tied("embed", "head", is_transposed=is_transposed)
    optimizer = adam(saved, ["embed"], lr=0.5, is_fresh=False)
    optimizer.state[saved.embed]["count"] = 3
    url = new_url()
    checkpoint.save(url, {"model": saved, "optimizer": optimizer}, step=1)
    live = Tied("head", "embed", is_transposed=is_transposed)
    if is_transposed:
        live = Tied("head", "embed", is_transposed=True, shape=(3, 5))
    fresh = adam(live, ["head"], lr=0.1, is_fresh=is_fresh)
    checkpoint.load(url, {"model": live, "optimizer": fresh})
    assert torch.equal(live.embed, saved.embed)
    before, after = optimizer.state[saved.embed], fresh.state[live.head]
    assert after["step"] == before["step"]
    assert after["count"] == 3
    assert fresh.param_groups[0]["lr"] == 0.5
    for slot in ("exp_avg", "exp_avg_sq"):
        expected = before[slot].t() if is_transposed else before[slot]
        assert torch.equal(after[slot], expected)


def test_a_slot_of_the_transpose_that_has_another_shape_is_refused_by_name() -> None:
    saved = Tied("embed", "head", is_transposed=True)
    optimizer = adam(saved, ["embed"], lr=0.5, is_fresh=False)
    optimizer.state[saved.embed]["rows"] = torch.ones(5)
    url = new_url()
    checkpoint.save(url, {"model": saved, "optimizer": optimizer}, step=1)
    live = Tied("head", "embed", is_transposed=True, shape=(3, 5))
    fresh = adam(live, ["head"], lr=0.1, is_fresh=True)
    with pytest.raises(LayoutMismatch, match=r"optim/head/rows: is a slot of shape \(5,\)"):
        checkpoint.load(url, {"model": live, "optimizer": fresh})


def test_weights_that_are_no_longer_tied_do_not_share_state() -> None:
    """One of them takes it, by its name; the gradients of the other were never apart."""
    saved, url = Twice(is_tied=True), new_url()
    optimizer = adam(saved, ["head"], lr=0.5, is_fresh=False)
    checkpoint.save(url, {"model": saved, "optimizer": optimizer}, step=1)
    live = Twice(is_tied=False)
    fresh = adam(live, ["head", "embed.weight"], lr=0.1, is_fresh=True)
    state = {"model": live, "optimizer": fresh}
    with pytest.raises(LayoutMismatch, match=r"optim/embed\.weight: .* without optimizer state"):
        checkpoint.load(url, state)
    checkpoint.load(url, state, strict=False)
    assert torch.equal(fresh.state[live.head]["exp_avg"], optimizer.state[saved.head]["exp_avg"])
    assert not fresh.state[live.embed.weight]


def test_slots_of_a_transposed_name_are_its_own() -> None:
    model, url = Transposed(is_tied=True), new_url()
    optimizer = Mixed(model.parameters())
    optimizer.step()
    checkpoint.save(url, {"model": model, "optimizer": optimizer}, step=1)
    loaded = Transposed(is_tied=True)
    fresh = Mixed(loaded.parameters())
    checkpoint.load(url, {"model": loaded, "optimizer": fresh})
    for name in ("embed.weight", "head"):
        before, after = model.get_parameter(name), loaded.get_parameter(name)
        assert torch.equal(fresh.state[after]["momentum"], optimizer.state[before]["momentum"])
