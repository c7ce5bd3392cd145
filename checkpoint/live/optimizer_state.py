"""Where an optimizer keeps this rank's state.

`ZeroRedundancyOptimizer` gives each parameter to one rank, whose inner optimizer has its state; the
outer one lists all parameters and has no state.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch


def slots_of(optimizer: Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the slots of the parameters that this rank updates; missing ones are made on access.

    Raises:
        LayoutMismatch: the optimizer has no state before it has done some steps.
    """
    state: dict[torch.Tensor, dict[str, Any]] = _inner(optimizer).state
    return state


def local_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups with the parameters only that this rank updates.

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
