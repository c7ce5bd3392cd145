"""Claims about tensors that a module's state_dict computes: the module gets them back, or nobody.

Each kind goes through `save` and `load`, and through the state of a job, which lies in memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.live.flat_parameters import unmanaged_containers
from tests.adaptive_timeouts import patient


class WithExtraState(nn.Linear):
    """Packs what it knows into bytes, as many as that takes, as Transformer Engine does."""

    history: tuple[float, ...] = ()

    def get_extra_state(self) -> torch.Tensor:
        if not self.history:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(pickle.dumps(self.history)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.history = pickle.loads(state.numpy().tobytes()) if state.numel() else ()


class KeptExtraState(nn.Linear):
    """Returns a tensor of its own as extra state, and derives another from what it gets."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.table, self.total = torch.zeros(3), 0.0

    def get_extra_state(self) -> torch.Tensor:
        return self.table

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.table, self.total = state.clone(), float(state.sum())


class Cast(nn.Linear):
    """Saves its weight in another data type."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach().to(torch.bfloat16)


def hooked(save: Callable[[Any], Any], load: Callable[[Any], Any]) -> type[nn.Linear]:
    """Return a layer whose weight hooks convert on the way out and in."""

    class Hooked(nn.Linear):
        def __init__(self, rows: int, columns: int) -> None:
            super().__init__(rows, columns)
            self.register_state_dict_post_hook(
                lambda _, state, prefix, __: state.update(
                    {prefix + "weight": save(state[prefix + "weight"])}
                )
            )
            self.register_load_state_dict_pre_hook(
                lambda _, state, prefix, *__: state.update(
                    {prefix + "weight": load(state[prefix + "weight"])}
                )
            )

    return Hooked


Transposed = hooked(lambda weight: weight.detach().t().contiguous(), lambda weight: weight.t())
"""Saves a copy that is transposed."""

TransposedView = hooked(lambda weight: weight.detach().t(), lambda weight: weight.t())
"""Saves a view of its memory that is transposed."""


class Quantized(nn.Module):
    """Holds codes and a scale, and saves what they stand for."""

    codes: torch.Tensor
    scale: torch.Tensor

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(columns, rows, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(()))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "dequantized"] = self.codes * self.scale

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        values = state[prefix + "dequantized"]
        self.scale.copy_(values.abs().max() / 127)
        self.codes.copy_((values / self.scale).round().to(torch.int8))


class Packed(nn.Module):
    """Has one buffer, and saves slices of it by names."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.zeros(rows + columns))
        self.rows = rows

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "first"] = self.packed.detach()[: self.rows]
        destination[prefix + "second"] = self.packed.detach()[self.rows :]


def _changed(layer: nn.Module) -> nn.Module:
    """Give a layer values that a new one does not have."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    if isinstance(layer, WithExtraState):
        layer.history = (1.0, 2.5, 3.25)
    if isinstance(layer, KeptExtraState):
        layer.set_extra_state(torch.tensor([1.0, 2, 4]))
    if isinstance(layer, Quantized):
        layer.codes.copy_(torch.arange(-127, 128, 21, dtype=torch.int8)[:12].reshape(3, 4))
        layer.codes[0, 0] = -127
        layer.scale.fill_(0.5)
    return layer


def _content(layer: nn.Module) -> list[Any]:
    tensors = (*layer.parameters(), *layer.buffers())
    values = [tensor.detach().float().tolist() for tensor in tensors]
    return [
        *values,
        *(getattr(layer, name, None) for name in ("history", "total")),
        layer.table.tolist() if isinstance(layer, KeptExtraState) else None,
    ]


KINDS: list[Callable[[int, int], nn.Module]] = [
    WithExtraState, KeptExtraState, Cast, Transposed, TransposedView, Quantized, Packed,
]  # fmt: skip


def _as_loaded(make: Callable[[int, int], nn.Module]) -> list[Any]:
    """Return the content of a layer that PyTorch alone has loaded."""
    loaded = make(4, 3)
    if make is Packed:
        return _content(_changed(make(4, 3)))
    loaded.load_state_dict(_changed(make(4, 3)).state_dict())
    return _content(loaded)


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("make", KINDS)
def test_a_module_gets_what_its_state_dict_computes(
    make: Callable[[int, int], nn.Module], block: bool, tmp_path: Path
) -> None:
    saved, loaded = (nn.Sequential(nn.Linear(2, 4), make(4, 3)) for _ in range(2))
    _changed(saved[1])
    handle = checkpoint.save(str(tmp_path), {"model": saved}, step=1, block=block)  # type: ignore[call-overload]
    if handle is not None:
        handle.wait(patient(60))
    checkpoint.load(str(tmp_path), {"model": loaded})
    assert _content(loaded[1]) == _as_loaded(make)
    assert torch.equal(loaded[0].weight, saved[0].weight)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_a_wrapped_module_gets_what_its_state_dict_computes(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    saved, loaded = nn.Sequential(WithExtraState(4, 3)), nn.Sequential(WithExtraState(4, 3))
    _changed(saved[0])
    checkpoint.save(str(tmp_path), {"model": saved}, step=1)
    checkpoint.load(str(tmp_path), {"model": wrap(loaded)})
    assert _content(loaded[0]) == _content(saved[0])


def test_an_optimizer_of_a_cast_weight_resumes(tmp_path: Path) -> None:
    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _changed(Cast(4, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(2)
    checkpoint.save(str(tmp_path), {"model": model, "optimizer": optimizer}, step=1)
    other, others = trained(0)
    checkpoint.load(str(tmp_path), {"model": other, "optimizer": others})
    assert torch.equal(
        others.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    )
    assert torch.equal(other.weight, model.weight.bfloat16().float())


def test_what_a_module_does_not_take_is_an_error_that_names_it(tmp_path: Path) -> None:
    class Picky(WithExtraState):
        def set_extra_state(self, state: torch.Tensor) -> None:
            raise ValueError("of another release")

    checkpoint.save(str(tmp_path), {"model": _changed(WithExtraState(4, 3))}, step=1)
    with pytest.raises(LayoutMismatch, match=r"^model/_extra_state: .*ValueError: of another rel"):
        checkpoint.load(str(tmp_path), {"model": Picky(4, 3)})


class Described(nn.Linear):
    """Adds a tensor that it does not take back, as bitsandbytes' layers of four bits do."""

    kind = 1

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.kind"] = torch.tensor([self.kind])


def test_what_nothing_takes_back_of_a_trained_module_is_refused_at_the_save(tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatch, match=r"^model/0\.weight\.kind: computed by state_dict"):
        checkpoint.save(str(tmp_path), {"model": nn.Sequential(Described(4, 3))}, step=1)
    assert not list(tmp_path.iterdir())


def test_what_nothing_takes_back_of_a_frozen_module_has_to_be_equal(tmp_path: Path) -> None:
    def frozen(kind: int) -> nn.Sequential:
        layer = Described(4, 3).requires_grad_(requires_grad=False)
        layer.kind = kind
        return nn.Sequential(layer, nn.Linear(3, 2))

    saved, same, other = frozen(1), frozen(1), frozen(2)
    checkpoint.save(str(tmp_path), {"model": saved}, step=1)
    checkpoint.load(str(tmp_path), {"model": same})
    assert torch.equal(same[0].weight, saved[0].weight)
    before = other[1].weight.detach().clone()
    with pytest.raises(LayoutMismatch, match=r"^model/0\.weight\.kind: .*different in the source"):
        checkpoint.load(str(tmp_path), {"model": other})
    assert torch.equal(other[1].weight, before)


def test_memory_that_a_module_only_returns_is_filled_in_place(tmp_path: Path) -> None:
    """As the scales of a quantized layer, which no module has as a buffer."""

    class Scaled(nn.Linear):
        def __init__(self, value: float) -> None:
            super().__init__(4, 3)
            self.scales = torch.full((3,), value)

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "scales"] = self.scales

    checkpoint.save(str(tmp_path), {"model": Scaled(2.0)}, step=1)
    loaded = Scaled(1.0)
    checkpoint.load(str(tmp_path), {"model": loaded})
    assert loaded.scales.tolist() == [2, 2, 2]


@pytest.mark.parametrize("make", [WithExtraState, Cast, Transposed])
def test_what_a_module_computes_is_refused_where_its_state_dict_is_not_called(
    make: Callable[[int, int], nn.Module],
) -> None:
    """In a model of FSDP1's units a state_dict would gather all parameters."""
    with pytest.raises(LayoutMismatch, match=r"^model/0: .*"):
        unmanaged_containers(nn.Sequential(make(4, 3)), ())
    assert unmanaged_containers(nn.Sequential(nn.Linear(4, 3)), ()).keys() == {"0.weight", "0.bias"}
