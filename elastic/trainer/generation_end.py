"""Recognizes errors that the end of a generation has caused, and reports them to the agent."""

from __future__ import annotations

from keepstep.checkpoint.errors import RankFailed, SnapshotUnavailable
from keepstep.elastic.worker.messages import Broken
from keepstep.elastic.worker.peer_failure import is_peer_failure, text_of
from keepstep.elastic.worker.session import Session

_FENCED_S = 2.0
"""How long a node may refuse copies before its ranks learn that the generation closes."""


def is_from_generation_end(session: Session, generation: int, error: BaseException) -> bool:
    """Return whether the end of a generation has caused an error, and not the training code."""
    if not session.is_managed or not isinstance(error, Exception):
        return False
    if is_peer_failure(error) or session.is_closing(generation):
        return True
    is_elsewhere = isinstance(error, SnapshotUnavailable | RankFailed)
    return is_elsewhere and session.wait_for_closing(generation, _FENCED_S)


def report_broken(
    session: Session, generation: int, error: BaseException, *, awaits_order: bool
) -> None:
    """Report what has ended a generation, unless the agent has ended it for that already.

    Args:
        session: with the agent.
        generation: the one that is over here.
        error: what has ended it.
        awaits_order: this rank aborts only by order: where the generation closes in good order,
            the report alone makes the agent drain by abort.
    """
    is_awaited = awaits_order and not session.is_aborting(generation)
    if is_awaited or not session.is_closing(generation):
        cause = text_of(error).partition("\n")[0] or type(error).__name__
        session.report(Broken(generation=generation, error=cause))
