"""Claims about tensors that cannot be stored or filled: they are refused by name, before anything.

Every way to save asks the same function; the cases go through the public `save` and `load`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.utils._mode_utils import no_dispatch

from keepstep import checkpoint
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.live.storable import may_overlap
from tests.adaptive_timeouts import patient


class Opaque(torch.Tensor):
    """Is made of other tensors, and does not say of which."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(str(func))


class Watched(torch.Tensor):
    """Has memory of its own, and sees its operations."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_dispatch():
            return func(*args, **(kwargs or {}))


def test_tensor_of_a_subclass_with_memory_of_its_own_is_stored(tmp_path: Path) -> None:
    kept = torch.Tensor._make_subclass(Watched, torch.arange(4.0))
    checkpoint.save(str(tmp_path), {"x": kept}, step=1)
    restored = torch.zeros(4)
    checkpoint.load(str(tmp_path), {"x": restored})
    assert restored.tolist() == [0, 1, 2, 3]


def _freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


UNSTORABLE: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested_jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "Opaque": lambda: Opaque(torch.zeros(4, dtype=torch.int8)),
    "not initialized": lambda: nn.LazyLinear(2).weight,
    "meta": lambda: torch.ones(3, device="meta"),
    "freed": _freed,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNSTORABLE)
def test_what_cannot_be_stored_is_refused_by_name_before_anything_is_written(
    kind: str, tmp_path: Path
) -> None:
    state = {"a": torch.ones(2), "s": {"b": UNSTORABLE[kind]()}}
    with pytest.raises(LayoutMismatch, match=f"^s/b.*{kind.partition('_')[0]}"):
        checkpoint.save(str(tmp_path), state, step=1)
    with pytest.raises(LayoutMismatch, match=r"^s/b"):
        checkpoint.save(str(tmp_path), state, step=1, block=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNSTORABLE)
def test_what_cannot_be_filled_is_refused_by_name_before_anything_is_filled(
    kind: str, tmp_path: Path
) -> None:
    checkpoint.save(str(tmp_path), {"a": torch.ones(2), "b": torch.ones(3)}, step=1)
    live = torch.zeros(2)
    with pytest.raises(LayoutMismatch, match=r"^b"):
        checkpoint.load(str(tmp_path), {"a": live, "b": UNSTORABLE[kind]()})
    assert live.tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(set(UNSTORABLE) - {"not initialized", "meta"}))
def test_an_optimizer_slot_that_cannot_be_stored_is_refused_by_name(
    kind: str, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.bias]["momentum_buffer"] = UNSTORABLE[kind]()
    with pytest.raises(LayoutMismatch, match=r"^optim/bias/momentum_buffer: "):
        checkpoint.save(str(tmp_path), {"model": model, "optimizer": optimizer}, step=1)


def test_a_lazy_module_is_refused_by_name_at_save_and_load(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    with pytest.raises(LayoutMismatch, match=r"^model/1\.weight: is not initialized"):
        checkpoint.save(str(tmp_path), state, step=1)
    checkpoint.save(str(tmp_path), {"model": nn.Linear(2, 2)}, step=1)
    with pytest.raises(LayoutMismatch, match=r"^model/1\.weight: is not initialized"):
        checkpoint.load(str(tmp_path), state)


@pytest.mark.parametrize(
    "state",
    [
        {"v": "\ud800"},
        {"v": ["a", {"b": "\udfff"}]},
        {"v": [{"\ud800": 1}]},
        {"\ud800": torch.ones(2)},
        {"\ud800": 1},
    ],
)
def test_half_of_a_surrogate_pair_is_refused_before_anything_is_overwritten(
    state: dict[str, Any], tmp_path: Path
) -> None:
    live = torch.zeros(2)
    with pytest.raises(LayoutMismatch, match=r"'\\ud.*half of a surrogate pair"):
        checkpoint.save(str(tmp_path), {"a": live, **state}, step=1)
    assert not list(tmp_path.iterdir())
    checkpoint.save(str(tmp_path), {"a": torch.ones(2), "v": 1}, step=1)
    with pytest.raises(LayoutMismatch, match=r"'\\ud.*half of a surrogate pair"):
        checkpoint.load(str(tmp_path), {"a": live, **state}, strict=False)
    assert live.tolist() == [0, 0]


def test_half_of_a_surrogate_pair_among_options_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["name"] = "\ud800"
    with pytest.raises(LayoutMismatch, match=r"'name'.*half of a surrogate pair"):
        checkpoint.save(str(tmp_path), {"model": model, "optimizer": optimizer}, step=1)
    with pytest.raises(LayoutMismatch, match=r"config.*half of a surrogate pair"):
        checkpoint.save(str(tmp_path), {"model": model}, step=1, config={"name": "\ud800"})


class Masked(nn.Module):
    """Has a buffer whose elements are the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.register_buffer("mask", torch.ones(1).expand(4))


def test_an_expanded_buffer_is_refused_at_save_and_before_a_load_fills_anything(
    tmp_path: Path,
) -> None:
    with pytest.raises(LayoutMismatch, match=r"^model/mask: several elements"):
        checkpoint.save(str(tmp_path), {"model": Masked()}, step=1)
    clean = Masked()
    clean.mask = torch.ones(4)
    nn.init.ones_(clean.w)
    checkpoint.save(str(tmp_path), {"model": clean, "x": torch.ones(1).expand(3)}, step=1)
    live = {"model": Masked(), "x": torch.zeros(3)}
    with pytest.raises(LayoutMismatch, match=r"^model/mask: several elements"):
        checkpoint.load(str(tmp_path), live)
    w, x = torch.zeros(2), torch.zeros(1).expand(3)
    with pytest.raises(LayoutMismatch, match=r"^x: several elements"):
        checkpoint.load(str(tmp_path), {"model/w": w, "x": x}, strict=False)
    assert (w.tolist(), live["x"].tolist()) == ([0, 0], [0, 0, 0])  # type: ignore[attr-defined]


ONE_ELEMENT: list[Callable[[], torch.Tensor]] = [
    lambda: torch.arange(4.0)[::5],
    lambda: torch.arange(11.0).reshape(1, 11)[:, 3],
    lambda: torch.arange(30.0).reshape(6, 5)[::7, ::9],
    lambda: torch.ones(4, 0)[::2],
    lambda: torch.full((1, 3), 1j)[:, 1].conj(),
]


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("make", ONE_ELEMENT)
def test_a_view_of_one_element_is_saved_and_filled_with_any_stride(
    make: Callable[[], torch.Tensor], block: bool, tmp_path: Path
) -> None:
    saved, loaded = make(), torch.zeros_like(make(), memory_format=torch.preserve_format)
    handle = checkpoint.save(str(tmp_path), {"x": saved}, step=1, block=block)  # type: ignore[call-overload]
    if handle is not None:
        handle.wait(patient(60))
    view = make()
    view.zero_()
    for target in (loaded, view):
        checkpoint.load(str(tmp_path), {"x": target})
        assert torch.equal(target, saved)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=4),
)
def test_elements_that_are_the_same_memory_are_never_taken_for_others(
    dimensions: list[tuple[int, int]],
) -> None:
    shape, stride = [n for n, _ in dimensions], [n for _, n in dimensions]
    places = torch.arange(200).as_strided(shape, stride).flatten().tolist()
    if len(set(places)) < len(places):
        assert may_overlap(torch.empty(200).as_strided(shape, stride))


@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_slices_of_permuted_tensors_are_not_taken_for_the_same_memory(
    order: list[int], steps: list[int]
) -> None:
    tensor = torch.empty(3, 4, 2, 5).permute(order)
    assert not may_overlap(tensor[tuple(slice(None, None, step) for step in steps)])
