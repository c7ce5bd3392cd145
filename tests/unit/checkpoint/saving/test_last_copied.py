"""Claims about what the next save may copy before it captures a state."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from keepstep.checkpoint.layout.boxes import Box
from keepstep.checkpoint.live.tensors import LiveTensor, describe
from keepstep.checkpoint.saving.last_copied import LastCopied

CPU = torch.device("cpu")
SIZE = 2**18


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(SIZE))


def test_tensors_are_found_again_in_their_memory() -> None:
    owner = parameter()
    tensors = [describe("a", owner)]
    last = LastCopied.of(tensors, CPU)
    assert last is not None
    with torch.no_grad():
        owner.mul_(2)
    sources = last.sources()
    assert sources is not None
    assert sources.data[0].data_ptr() == owner.data_ptr()
    assert not sources.data[0].requires_grad
    assert sources.are(tensors)


Change = Callable[[nn.Parameter], object]

GIVEN_OTHER_MEMORY: dict[str, Change] = {
    "other values": lambda owner: setattr(owner, "data", torch.zeros(SIZE)),
    "a larger size": lambda owner: setattr(owner, "data", torch.zeros(2 * SIZE)),
    "none": lambda owner: owner.data.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("change", GIVEN_OTHER_MEMORY)
def test_a_tensor_with_other_memory_is_not_copied_early(change: str) -> None:
    """What it had may be freed."""
    owner = parameter()
    last = LastCopied.of([describe("a", owner)], CPU)
    assert last is not None
    with torch.no_grad():
        GIVEN_OTHER_MEMORY[change](owner)
    assert last.sources() is None


CHANGED_SINCE: dict[str, Callable[[nn.Parameter], LiveTensor]] = {
    "written": lambda owner: describe("a", owner.detach().add_(1)),
    "another": lambda _: describe("a", parameter()),
    "reshaped": lambda owner: describe("a", owner.detach().view(2, -1)),
    "of another type": lambda owner: describe("a", owner.detach().view(torch.int32)),
    "without an owner": lambda owner: LiveTensor("a", (SIZE,), Box.whole((SIZE,)), owner.detach()),
}


@pytest.mark.parametrize("change", CHANGED_SINCE)
def test_an_early_copy_does_not_count_if_the_state_has_changed(change: str) -> None:
    owner = parameter()
    tensors = [describe("a", owner)]
    last = LastCopied.of(tensors, CPU)
    assert last is not None
    sources = last.sources()
    assert sources is not None
    assert sources.are(tensors)
    assert not sources.are([CHANGED_SINCE[change](owner)])


def test_what_the_user_drops_is_freed() -> None:
    owner = parameter()
    last = LastCopied.of([describe("a", owner)], CPU)
    memory = weakref.ref(owner.untyped_storage())
    del owner
    assert memory() is None
    assert last is not None
    assert last.sources() is None


class Managed(nn.Parameter):
    """As FSDP1's parameters, of which only FSDP1 knows when they have memory."""


def part(owner: torch.Tensor) -> LiveTensor:
    half = SIZE // 2
    return LiveTensor("a", (SIZE,), Box((half,), (half,)), owner[half:], owner, 4 * half)


def inferred() -> LiveTensor:
    with torch.inference_mode():
        return describe("a", torch.ones(SIZE))


NEVER_EARLY: dict[str, Callable[[], LiveTensor]] = {
    "of a subclass": lambda: describe("a", Managed(torch.ones(SIZE))),
    "a part of a tensor": lambda: part(torch.ones(SIZE)),
    "without a version": inferred,
    "small": lambda: describe("a", torch.ones(16)),
}


@pytest.mark.parametrize("kind", NEVER_EARLY)
def test_others_are_never_copied_early(kind: str) -> None:
    assert LastCopied.of([NEVER_EARLY[kind]()], CPU) is None
