"""What the ranks that load or save together do alike: one fails, all fail; one falls back, all do.

Every rank must make the same calls in the same order, as for `keepstep.checkpoint.collective`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from keepstep.checkpoint.collective import all_gather_json, rank
from keepstep.checkpoint.errors import CheckpointDamaged, RankFailed
from keepstep.checkpoint.layout.boxes import Json
from keepstep.checkpoint.stored.format import StoredStep
from keepstep.checkpoint.stored.reader import list_steps, newest

log = logging.getLogger("keepstep")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Result]):
    """What was loaded: from which checkpoint, and which newer ones are damaged."""

    stored: StoredStep
    result: Result
    damaged: tuple[StoredStep, ...]


def agreed_steps(url: str) -> tuple[StoredStep, ...]:
    """Return the committed checkpoints at a URL, newest first, as rank 0 sees them.

    So all ranks load the same one even if a new one appears now.
    """
    steps = on_all_ranks(lambda: list_steps(url) if rank() == 0 else ())
    listed = all_gather_json([[stored.step, stored.generation] for stored in steps])[0]
    return tuple(StoredStep(step, generation) for step, generation in listed)


def newest_first(url: str) -> Iterator[StoredStep]:
    """Yield the committed checkpoints at a URL, newest first, as rank 0 sees them.

    The older ones are listed only when one after the newest is asked for: the list grows with what
    is stored. All ranks must ask for as many.
    """
    found = on_all_ranks(lambda: newest(url) if rank() == 0 else None)
    first = all_gather_json([found.step, found.generation] if found is not None else None)[0]
    if first is None:
        return
    yield (chosen := StoredStep(*first))
    yield from (
        stored
        for stored in agreed_steps(url)
        if (stored.step, stored.generation) < (chosen.step, chosen.generation)
    )


def load_newest_intact(
    url: str, steps: Iterable[StoredStep], load: Callable[[StoredStep], Result]
) -> Loaded[Result]:
    """Load the first of these checkpoints that no rank finds damaged.

    Args:
        url: the URL that has them.
        steps: the checkpoints to try, in this order.
        load: loads one; it raises CheckpointDamaged on all ranks or on none, as what is wrapped in
            `on_all_ranks` does.

    Raises:
        CheckpointDamaged: all of them are damaged; the message names the reason of each.
        CheckpointError: whatever else `load` raises.
    """
    damaged: list[StoredStep] = []
    reasons: list[str] = []
    for stored in steps:
        if reasons and rank() == 0:
            log.warning("%s: loading the checkpoint before it", reasons[-1])
        try:
            return Loaded(stored, load(stored), tuple(damaged))
        except CheckpointDamaged as error:
            damaged.append(stored)
            reasons.append(f"step {stored.step}: {error}")
    raise CheckpointDamaged(
        f"{url}: none of {len(damaged)} checkpoints is intact; " + "; ".join(reasons)
    )


def on_all_ranks(act: Callable[[], Result]) -> Result:
    """Run a function on every rank; if it fails on any rank, all ranks raise, for the same reason.

    See `on_all_ranks_gathering`.
    """
    return on_all_ranks_gathering(act, lambda _: None)[0]


def on_all_ranks_gathering(
    act: Callable[[], Result], share: Callable[[Result], Json]
) -> tuple[Result, list[Json]]:
    """Run a function on every rank, and gather what `share` returns for each rank's result.

    Args:
        act: the function to run.
        share: returns the part of the result that every rank gets.

    Returns:
        This rank's result, and what all ranks share, in the order of ranks.

    Raises:
        CheckpointDamaged: the function failed because of damage on some ranks, and did not fail
            otherwise on any. So all ranks decide alike whether to fall back.
        RankFailed: the function failed on another rank; its message is that of the first such
            rank. A rank that failed in this way itself raises its own error.
    """
    own_error: Exception | None = None
    result: Result | None = None
    outcome: dict[str, Json] = {}
    try:
        result = act()
        outcome = {"shared": share(result)}
    except Exception as error:  # noqa: BLE001 - other ranks wait for this one's outcome
        own_error = error
        outcome = {"error": str(error), "damaged": isinstance(error, CheckpointDamaged)}
    outcomes = all_gather_json(outcome)
    failures = {failed: outcome for failed, outcome in enumerate(outcomes) if "error" in outcome}
    if not failures:
        return cast(Result, result), [outcome["shared"] for outcome in outcomes]
    is_damage = all(failure["damaged"] for failure in failures.values())
    if own_error is not None and isinstance(own_error, CheckpointDamaged) == is_damage:
        raise own_error
    failed_rank, failure = next(
        (failed, failure) for failed, failure in failures.items() if failure["damaged"] == is_damage
    )
    raise (CheckpointDamaged if is_damage else RankFailed)(
        f"rank {failed_rank}: {failure['error']}"
    ) from own_error
