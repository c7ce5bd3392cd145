"""Agrees on what all ranks load: the same checkpoints, in the same order, and the same names."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import Storage
from keepstep.checkpoint.ranks.control_group import ControlGroup

log = logging.getLogger("keepstep")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Result]):
    """The result of a load: its checkpoint, and the newer ones that are damaged."""

    stored: StoredStep
    result: Result
    damaged: tuple[StoredStep, ...]


def check_same(given: Sequence[Mapping[str, Json]], group: ControlGroup, together: str) -> None:
    """Check that all ranks have given the same arguments.

    Args:
        given: each rank's arguments, of the same names.
        group: the ranks.
        together: what all ranks do together, for the message.

    Raises:
        CheckpointError: a rank has given another one than rank 0.
    """
    for number, own in enumerate(given):
        for name, first in given[0].items():
            if own[name] != first:
                raise CheckpointError(
                    f"rank {group.global_ranks[number]} gives {name}={own[name]!r}, and rank "
                    f"{group.global_ranks[0]} {name}={first!r}; all ranks {together}"
                )


def agreed_steps(storage: Storage, group: ControlGroup) -> tuple[StoredStep, ...]:
    """Return the committed checkpoints in a storage, newest first, as rank 0 sees them.

    So all ranks load the same one even if a new one appears now.
    """
    (listed,) = group.broadcast(
        lambda: [json.dumps([[s.step, s.generation] for s in list_steps(storage)]).encode()]
    )
    return tuple(StoredStep(step, generation) for step, generation in json.loads(bytes(listed)))


def older_steps(storage: Storage, than: StoredStep, group: ControlGroup) -> Iterator[StoredStep]:
    """Yield the committed checkpoints before this one, newest first, as rank 0 sees them.

    They are listed when the first one is asked for: the list grows with what is stored. All ranks
    must ask for as many.
    """
    yield from (
        stored
        for stored in agreed_steps(storage, group)
        if (stored.step, stored.generation) < (than.step, than.generation)
    )


def load_newest_intact(
    url: str,
    steps: Iterable[StoredStep],
    load: Callable[[StoredStep], Result],
    group: ControlGroup,
) -> Loaded[Result]:
    """Load the first of these checkpoints that no rank finds damaged.

    Args:
        url: the URL that has them.
        steps: the checkpoints to try, in this order.
        load: loads one; it raises CheckpointDamaged on all ranks or on none, as what is wrapped in
            `run_on_all_ranks` does.
        group: the ranks.

    Raises:
        CheckpointDamaged: all of them are damaged; the message names the reason of each.
        CheckpointError: whatever else `load` raises.
    """
    damaged: list[StoredStep] = []
    reasons: list[str] = []
    for stored in steps:
        if reasons and group.rank == 0:
            log.warning("%s: loading the checkpoint before it", reasons[-1])
        try:
            return Loaded(stored, load(stored), tuple(damaged))
        except CheckpointDamaged as error:
            damaged.append(stored)
            reasons.append(f"step {stored.step}: {error}")
    raise CheckpointDamaged(
        f"{url}: none of {len(damaged)} checkpoints is intact; " + "; ".join(reasons)
    )


def union_of_all_ranks(texts: Iterable[str], group: ControlGroup) -> set[str]:
    """Return the texts that any rank has.

    Most ranks have the same ones, as the names of a model, or one of a few lists, as stages have:
    each list is sent once, so that no rank receives as much as all ranks have.
    """
    union = set(texts)
    own = json.dumps(sorted(union)).encode()
    digests = group.gather(hashlib.blake2b(own, digest_size=16).hexdigest())
    lists = dict.fromkeys(digests)
    if len(lists) > 1:
        for digest in lists:
            (content,) = group.broadcast(lambda: [own], source=digests.index(digest))
            union.update(json.loads(bytes(content)))
    return union
