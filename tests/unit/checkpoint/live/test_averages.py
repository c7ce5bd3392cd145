"""Claims about averages inside a module: they say what they are averages of, if that is known."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from keepstep import checkpoint
from keepstep.checkpoint import Average, Descriptions
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.live.averages import averages_in


class Other(nn.Sequential):
    """A class with parameters of the same names."""


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def with_average() -> nn.ModuleDict:
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    return nn.ModuleDict({"net": model, "ema": average})


def test_an_average_is_described_and_restored() -> None:
    torch.manual_seed(0)
    model = with_average()
    for _ in range(2):
        nn.init.normal_(model["net"][0].weight)
        model["ema"].update_parameters(model["net"])
    url = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(url, {"model": model}, step=1)
    assert StoredCheckpoint.open(open_storage(url)).documents["averages"] == {
        f"model/ema.module.{name}": {"of": f"model/net.{name}", "count": "model/ema.n_averaged"}
        for name in ("0.weight", "0.bias", "1.weight", "1.bias")
    }
    loaded = with_average()
    checkpoint.load(url, {"model": loaded})
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module)  # type: ignore[return-value]


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": compiled,
    "checkpointing": checkpoint_wrapper,
    "data parallelism": nn.DataParallel,
}


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("what", ["the module", "a part of it", "the average", "the whole"])
def test_an_average_of_wrapped_modules_is_described_without_their_names(
    wrapper: str, what: str
) -> None:
    wrap, model = WRAPPED[wrapper], net()
    average: nn.Module = AveragedModel(model)
    if what == "a part of it":
        model[0] = wrap(model[0])
    parts = nn.ModuleDict({
        "net": wrap(model) if what == "the module" else model,
        "ema": wrap(average) if what == "the average" else average,
    })  # fmt: skip
    whole = wrap(parts) if what == "the whole" else parts
    url = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(url, {"model": whole}, step=1)
    assert StoredCheckpoint.open(open_storage(url)).documents["averages"] == {
        f"model/ema.module.{name}": {"of": f"model/net.{name}", "count": "model/ema.n_averaged"}
        for name in ("0.weight", "0.bias", "1.weight", "1.bias")
    }


class Transposed(nn.Module):
    """A head that is the transpose of an embedding, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Parameter(self.embed.weight.t())


def test_an_average_of_what_is_not_stored_does_not_refuse_the_save() -> None:
    """`embed.weight` is stored as the head, and the copy of it is stored for itself."""
    model = Transposed()
    state = {"model": nn.ModuleDict({"net": model, "ema": AveragedModel(model)})}
    url = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(url, state, step=1)
    source = StoredCheckpoint.open(open_storage(url))
    assert "model/ema.module.embed.weight" in source.tensors
    assert "model/net.embed.weight" not in source.tensors
    assert source.documents["averages"] == {
        "model/ema.module.head": {"of": "model/net.head", "count": "model/ema.n_averaged"}
    }
    told = Descriptions(averages={"ema.module.head": Average("net.embed.weight")})
    with pytest.raises(LayoutMismatch, match=r"net\.embed\.weight"):
        checkpoint.save(url, state, step=2, descriptions=told)


@pytest.mark.parametrize(
    "modules",
    [
        {},
        {"net": Other(nn.Linear(3, 2), nn.BatchNorm1d(2))},
        {"net": nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))},
        {"one": net(), "other": net()},
        {"another_average": AveragedModel(net())},
    ],
    ids=["nothing", "another class", "other shapes", "two of them", "only averages"],
)
def test_what_an_average_is_of_is_not_guessed(modules: dict[str, nn.Module]) -> None:
    assert averages_in(nn.ModuleDict({"ema": AveragedModel(net()), **modules})) == {}


def test_a_model_that_is_an_average_itself_says_nothing() -> None:
    assert averages_in(AveragedModel(net())) == {}
