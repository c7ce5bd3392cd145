"""Compares the parts of a job and a checkpoint other than the model and the optimizers.

Pure. Such parts may be added to a job, or taken from it: what goes on without its state is named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.completeness import shortened


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
