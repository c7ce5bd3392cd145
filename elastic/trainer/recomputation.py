"""Finds out which of two differing replicas computed wrongly, by computing the steps again. Pure.

Two replicas that differ have no majority. If the job returns to the last state in which they were
equal and computes the same steps with the same ranks, the replica that was right gets what it got
before, and the other one does not. This needs a computation that gives the same bits twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contradiction:
    """One rank's state after a step at which the replicas differed.

    Attributes:
        step: after which step.
        world_size: the number of ranks that had computed it.
        content: the digest of this rank's state.
    """

    step: int
    world_size: int
    content: str


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The result of computing the steps again for one group of replicas.

    Attributes:
        wrong: ranks that held something else before.
        is_repeated: whether any rank held the same before; if not, nothing is shown about anyone.
    """

    wrong: tuple[int, ...]
    is_repeated: bool


def step_to_repeat(contradictions: Sequence[Contradiction | None], world_size: int) -> int:
    """Return the step after which replicas differed and are to be compared again; 0 for none.

    Args:
        contradictions: what each rank remembers.
        world_size: the number of ranks now: with another one the sums differ in their last bits.
    """
    return max(
        (found.step for found in contradictions if found and found.world_size == world_size),
        default=0,
    )


def judge(
    ranks: Sequence[int],
    contradictions: Sequence[Contradiction | None],
    step: int,
    contents: Sequence[str],
) -> Recomputation | None:
    """Compare a group of replicas with what the same ranks held after the same step before.

    Args:
        ranks: the replicas.
        contradictions: what each rank of the job remembers, by rank.
        step: the step that was computed again.
        contents: digests of what the ranks hold now, by rank.

    Returns:
        None if nothing can be concluded: they differ again, or were equal before.
    """
    right = contents[ranks[0]]
    before = {
        rank: found.content
        for rank in ranks
        if (found := contradictions[rank]) is not None and found.step == step
    }
    if any(contents[rank] != right for rank in ranks) or len(set(before.values())) < 2:
        return None
    wrong = tuple(rank for rank, content in before.items() if content != right)
    return Recomputation(wrong, is_repeated=len(wrong) < len(before))
