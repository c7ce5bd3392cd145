"""Compares the parts of a job and a checkpoint other than tensors of the model and the optimizers.

Pure. Such parts may be added to a job, or taken from it: what goes on without its state is named.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.completeness import shortened

_DRIVEN = "initial_lr"
"""The option that schedulers add to the groups that they drive."""
_SCHEDULED = ("lr", "momentum", "betas")
"""Options that schedulers change."""
_OF_KIND = ("decoupled_weight_decay",)
"""Options that tell one kind of optimizer from another: Adam from AdamW."""


def check_options(
    stored: Mapping[str, Json], own: Mapping[str, Json], defaults: Collection[str], step: int
) -> None:
    """Check that a group's stored options may be those of an optimizer of the same kind.

    Releases of PyTorch add options, so that one side may have more than the other.

    Args:
        stored: the options in the checkpoint.
        own: those of the job's group.
        defaults: those that the job's optimizer knows; others are the script's or a scheduler's.
        step: the checkpoint's.

    Raises:
        LayoutMismatch: each side has an option that the other lacks, or it was of another kind.
    """
    kinds = {name for name in _OF_KIND if name in own and stored.get(name, own[name]) != own[name]}
    gone = sorted({*stored} - {*own} | kinds)
    new = sorted({*own} & {*defaults} - {*stored} | kinds)
    if gone and new:
        raise LayoutMismatch(
            f"step {step} has the state of another kind of optimizer: its options {gone[:4]} are "
            f"not those of the job's, {new[:4]}; give the optimizer with which it was saved, or "
            "begin another job from the model alone with start_from=StartFrom(url, only='model')"
        )


def differing_options(stored: Mapping[str, Json], own: Mapping[str, Json]) -> list[str]:
    """Return the options of a group that a checkpoint sets to others than the script, in words.

    Those that schedulers change are left out where one drives the group.
    """
    is_driven = _DRIVEN in own
    return [
        f"{name} {_value(stored[name])} (the script gives {_value(own[name])})"
        for name in sorted({*stored} & {*own})
        if stored[name] != own[name] and not (is_driven and name in _SCHEDULED)
    ]


def _value(value: Json) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else "another one"


def check_schedulers(stored: Collection[Json], count: int, step: int) -> None:
    """Check that a checkpoint has a state for each scheduler, and no other.

    Args:
        stored: the states.
        count: how many schedulers the job has.
        step: the checkpoint's.

    Raises:
        LayoutMismatch: it has not.
    """
    if len(stored) != count:
        raise LayoutMismatch(
            f"step {step} has the state of {len(stored)} schedulers, and the job has {count}; give "
            "State(scheduler=...) as when it was saved, or begin another job from it with "
            "start_from= and another checkpoint="
        )


def differing_schedulers(stored: Json, own: Mapping[str, Json], number: int) -> Iterator[str]:
    """Yield what a scheduler's stored state lacks, and what the scheduler does not have, in words.

    Releases of PyTorch add names, so that this is no error.
    """
    if not isinstance(stored, Mapping):
        return
    where = f"of scheduler {number}"
    if missing := sorted(own.keys() - stored.keys()):
        yield f"{shortened(missing)} {where}: not in the checkpoint, stays as it is"
    if unknown := sorted(name for name in stored if name not in own):
        yield f"{shortened(unknown)} {where}: in the checkpoint, and not known to this scheduler"


def differing_extra(
    stored: Mapping[str, Json],
    tensors: Mapping[str, Collection[str]],
    own: Mapping[str, Collection[str]],
    known: Collection[str],
) -> Iterator[str]:
    """Yield which extra objects keep their initial state, and which are lost, in words.

    Args:
        stored: the objects' states in the checkpoint; None for those that are tensors.
        tensors: the keys of these tensors, by object.
        own: the keys of the tensors of the job's objects, by object; none for other states.
        known: the keys of the checkpoint's tensors.
    """
    added = [
        name
        for name, keys in own.items()
        if (not any(key in known for key in keys) if keys else stored.get(name) is None)
    ]
    if added:
        yield f"{shortened(map(repr, added))}: not in the checkpoint, keeps its initial state"
    lost = sorted({*stored, *tensors} - own.keys())
    if lost:
        yield (
            f"{shortened(map(repr, lost))}: in the checkpoint, and not in State.extra: later "
            "checkpoints will not have it"
        )
