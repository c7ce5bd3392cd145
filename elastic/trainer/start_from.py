"""Begins a job from a checkpoint that is not its own: of another run, or of another tool.

The checkpoint fills the module and, unless the module alone is wanted, what it has of optimizers
and schedulers. Data begin at their beginning, and random numbers with the job's seed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from keepstep.checkpoint.api import load_state
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.descriptions import Descriptions
from keepstep.checkpoint.format.stored.urls import url_text
from keepstep.checkpoint.ranks.control_group import CONTROL_GROUPS
from keepstep.checkpoint.ranks.fill_state import LoadOptions
from keepstep.elastic.data.json_values import from_json_value
from keepstep.elastic.errors import UsageError

_TRAINER = "trainer"
_VALUES = "values"
_ONE_SCHEDULER = ("scheduler", "lr_scheduler")
_SCHEDULERS = "lr_schedulers"
_PROGRESS = "last_epoch"
_RATES = ("lr", "initial_lr")


@dataclass(frozen=True, slots=True)
class StartFrom:
    """The checkpoint that a job begins from if it has none of its own.

    Attributes:
        url: of another job's checkpoint, or of another tool's in any format that `keepstep ckpt
            convert` reads. The format may come before it, as in `deepspeed:/path`, if the files do
            not tell.
        only: "model": take the module alone, and begin at step 0; None: also what the checkpoint
            has of optimizers and schedulers, and its step.
        rules: how tensors get the module's names and shapes from those of the checkpoint: a file of
            rules, or FAMILY:FROM:TO of a preset, as `llama:megatron:live`; None if they have them.
            They have to fit all of the checkpoint, also what is not taken.
        config: the model's configuration, for rules; None for that of the checkpoint.

    Raises:
        UsageError: `only` is neither.
    """

    url: str
    only: Literal["model"] | None = None
    rules: str | None = None
    config: Mapping[str, Json] | None = None

    @classmethod
    def of(cls, given: str | os.PathLike[str] | StartFrom | None) -> StartFrom | None:
        """Return what `join` was given, with a URL alone as all of a checkpoint; None for none."""
        if given is None or isinstance(given, StartFrom):
            return given
        return cls(url_text(given)) if given else None

    def __post_init__(self) -> None:
        if self.only not in (None, "model"):
            raise UsageError(f'StartFrom(only={self.only!r}): give "model", or leave it out')


@dataclass(frozen=True, slots=True)
class Begun:
    """The start of a job: the number of completed steps, and the state's origin."""

    step: int
    source: str


def begin_from(
    start: StartFrom,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[LRScheduler],
    descriptions: Descriptions,
) -> Begun:
    """Fill a job's state from a checkpoint; all ranks call it together.

    Tensors of another data type are converted, for the job says which type it wants.

    Args:
        start: the checkpoint.
        model: the module; the checkpoint must have all of its names and no others.
        optimizers: the optimizers; what the checkpoint has of them is taken.
        schedulers: their schedulers, one for each optimizer or none; those that the checkpoint has
            no state of start from their beginning, with the learning rates that the job gives.
        descriptions: as for `checkpoint.load`.

    Raises:
        CheckpointMissing: there is no such checkpoint, or no such file of rules.
        RulesInvalid: the rules do not fit the checkpoint.
        LayoutMismatch: it does not fit the module.
        CheckpointDamaged: stored bytes were changed or lost, or files contradict each other.
    """
    state: dict[str, object] = {"model": model}
    if start.only is None:
        state |= {f"optimizer {number}": each for number, each in enumerate(optimizers)}
    rates = [[_rates(group) for group in optimizer.param_groups] for optimizer in optimizers]
    options = LoadOptions(
        convert=True,
        descriptions=descriptions,
        rules=start.rules,
        config=start.config,
        optimizers_may_start_empty=True,
    )
    loaded = load_state(start.url, state, options, CONTROL_GROUPS.of())
    if start.only is not None:
        return Begun(0, f"start_from ({loaded.format_name}, the model)")
    for number, scheduler in enumerate(schedulers):
        own = scheduler.state_dict()
        stored = scheduler_state(loaded.documents, number, len(schedulers), own)
        if stored is not None:
            scheduler.load_state_dict(stored)
            continue
        # A schedule that starts over computes from the job's rates, not from what was left of them.
        for group, given in zip(optimizers[number].param_groups, rates[number], strict=True):
            _set_rates(group, given)
    return Begun(loaded.step, f"start_from ({loaded.format_name}, step {loaded.step})")


def _rates(group: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(group[name]) for name in _RATES if name in group}


def _set_rates(group: dict[str, Any], rates: Mapping[str, float]) -> None:
    for name, rate in rates.items():
        if isinstance(group.get(name), torch.Tensor):
            # A compiled or captured optimizer reads this tensor.
            group[name].fill_(rate)
        else:
            group[name] = rate


def scheduler_state(
    documents: Mapping[str, Json], number: int, count: int, own: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return what a checkpoint has of a scheduler's state, with the rest as it is. Pure.

    Args:
        documents: those of the checkpoint.
        number: which of the job's schedulers it is.
        count: how many the job has.
        own: the scheduler's state.

    Returns:
        None if the checkpoint does not say how far the scheduler was.
    """
    trainer = documents.get(_TRAINER)
    if isinstance(trainer, Mapping) and number < len(trainer.get("schedulers", ())):
        stored: dict[str, Any] = from_json_value(trainer["schedulers"][number], own)
        # Another kind of scheduler has names that this one does not know.
        return {**own, **{name: value for name, value in stored.items() if name in own}}
    values = documents.get(_VALUES, {})
    found = _in_values(values, number, count)
    common = {name: from_json_value(value) for name, value in found.items() if name in own}
    return {**own, **common} if _PROGRESS in common else None


def _in_values(values: Mapping[str, Json], number: int, count: int) -> Mapping[str, Json]:
    """Return a scheduler's state as training scripts and their tools name it; empty without."""
    listed: Json = values.get(_SCHEDULERS)
    if isinstance(listed, list) and number < len(listed) and isinstance(listed[number], Mapping):
        return dict(listed[number])
    for name in _ONE_SCHEDULER if count == 1 else ():
        prefix = f"{name}/"
        found = {
            key.removeprefix(prefix): value
            for key, value in values.items()
            if key.startswith(prefix)
        }
        if found:
            return found
    return {}
