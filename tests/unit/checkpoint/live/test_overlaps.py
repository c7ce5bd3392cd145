"""Claims about live tensors that share some of their elements, when they are filled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint.errors import LayoutMismatch

Views = Callable[[torch.Tensor], dict[str, torch.Tensor]]

SHARING: dict[str, Views] = {
    "slices": lambda memory: {"a": memory[:6], "b": memory[2:]},
    "another shape": lambda memory: {"a": memory, "b": memory.view(2, 4)},
    "transposed": lambda memory: {"a": memory.view(2, 4), "b": memory.view(2, 4).t()},
    "columns that meet": lambda memory: {
        "a": memory.view(2, 4)[:, :3],
        "b": memory.view(2, 4)[:, 2:],
    },
    "another data type": lambda memory: {"a": memory, "b": memory.view(torch.int32)},
    "one of two dtypes": lambda memory: {"a": memory[:1], "b": memory.view(torch.int16)[1:3]},
}


@pytest.mark.parametrize("name", SHARING)
def test_tensors_that_share_elements_are_filled_only_if_the_source_has_the_same(
    name: str, tmp_path: Path
) -> None:
    """The last one that was filled won, and the load said nothing."""
    views = SHARING[name]
    stored = views(torch.arange(8.0) + 1)
    checkpoint.save(str(tmp_path), {key: view.clone() for key, view in stored.items()}, step=1)
    memory = torch.zeros(8)
    checkpoint.load(str(tmp_path), views(memory))
    assert all(torch.equal(view, stored[key]) for key, view in views(memory).items())
    different = {"a": stored["a"].clone(), "b": torch.full_like(stored["b"], 77)}
    checkpoint.save(str(tmp_path), different, step=2)
    memory = torch.zeros(8)
    for strict in (True, False):
        with pytest.raises(LayoutMismatch, match=r"a: shares elements with b here"):
            checkpoint.load(str(tmp_path), views(memory), strict=strict)
        assert not memory.any()


def test_tensors_beside_each_other_in_one_memory_are_filled(tmp_path: Path) -> None:
    state = {"a": torch.full((2, 2), 1.0), "b": torch.full((2, 2), float("nan"))}
    checkpoint.save(str(tmp_path), state, step=1)
    memory = torch.zeros(2, 4)
    checkpoint.load(str(tmp_path), {"a": memory[:, :2], "b": memory[:, 2:]})
    assert torch.equal(memory[:, :2], state["a"])
    assert memory[:, 2:].isnan().all()


class Fused(nn.Module):
    """Has a fused weight, and a part of it as a buffer of its own or as a view."""

    def __init__(self, *, is_view: bool) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(6, 3))
        part = self.qkv.detach()[:2]
        self.register_buffer("query", part if is_view else part.clone() + 1)


def test_buffer_that_views_a_weight_is_refused_what_differs_from_it(tmp_path: Path) -> None:
    saved, loaded = Fused(is_view=True), Fused(is_view=True)
    checkpoint.save(str(tmp_path), {"model": saved}, step=1)
    checkpoint.load(str(tmp_path), {"model": loaded})
    assert torch.equal(loaded.qkv, saved.qkv)
    checkpoint.save(str(tmp_path), {"model": Fused(is_view=False)}, step=2)
    with pytest.raises(LayoutMismatch, match=r"model/q\w+: shares elements with model/q\w+ here"):
        checkpoint.load(str(tmp_path), {"model": loaded})
    assert torch.equal(loaded.qkv, saved.qkv)
