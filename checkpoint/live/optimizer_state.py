"""Locates the state that an optimizer keeps on this rank.

`ZeroRedundancyOptimizer` gives each parameter to one rank, whose inner optimizer has its state; the
outer one lists all parameters and has no state.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch


def slots_of(optimizer: Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the slots of the parameters that this rank updates; missing ones are made on access.

    Raises:
        LayoutMismatch: the optimizer has no state before it has done some steps.
    """
    state = getattr(_inner(optimizer), "state", None)
    if not isinstance(state, dict):
        raise LayoutMismatch(
            f"{type(optimizer).__name__} has no state of its own to put slots into; pass the "
            "optimizer that it is made of, or leave it out"
        )
    return state


def parameter_slots(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Yield the parameters with slots on this rank, and the slots.

    Raises as `slots_of` does.
    """
    for parameter, slots in slots_of(optimizer).items():
        if isinstance(parameter, torch.Tensor):
            if not isinstance(slots, dict):
                raise LayoutMismatch(
                    f"{type(optimizer).__name__} keeps a {type(slots).__name__} of a parameter of "
                    f"shape {tuple(parameter.shape)}, and no slots by name, which cannot be "
                    "stored; leave the optimizer out"
                )
            yield parameter, slots


def is_divided(optimizer: Optimizer) -> bool:
    """Return whether an optimizer gives each parameter to one rank."""
    return _inner(optimizer) is not optimizer


def local_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups, with only the parameters that this rank updates.

    Raises as `slots_of` does.
    """
    groups: list[dict[str, Any]] = _inner(optimizer).param_groups
    return groups


def _inner(optimizer: Optimizer) -> Any:
    # Nobody has made an instance of a class that is not imported.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    if inner is None:
        raise LayoutMismatch(
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True has no state before its first "
            "steps; load or save after them, or pass overlap_with_ddp=False"
        )
    return inner
