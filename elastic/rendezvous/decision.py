"""Holds a leader's decision, and its state until the next one. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.elastic.rendezvous.actions import Action
from keepstep.elastic.rendezvous.records import Member


@dataclass(frozen=True, slots=True)
class LeaderState:
    """A leader's state between two decisions: its wait, and since when."""

    waiting_for: str = ""
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """A leader's decision.

    Attributes:
        leader_state: to be passed to the next decision.
        action: what to do now, if anything.
        again_at_s: when to decide again even if nothing changes, in monotonic seconds.
        message: the reason of the leader's wait, in words.
        asks: lost nodes that it waits for; if their agents have ended, it need not.
    """

    leader_state: LeaderState
    action: Action | None = None
    again_at_s: float | None = None
    message: str = ""
    asks: tuple[Member, ...] = ()


def wait(
    leader_state: LeaderState, for_what: str, now_s: float, at_most_s: float
) -> tuple[LeaderState, float]:
    """Start or continue waiting for something.

    Args:
        leader_state: as the last decision left it.
        for_what: a name of the wait; another name begins another one.
        now_s: monotonic seconds.
        at_most_s: how long to wait.

    Returns:
        The leader's new state, and until when it waits, in monotonic seconds.
    """
    if leader_state.waiting_for != for_what:
        leader_state = LeaderState(for_what, now_s)
    return leader_state, leader_state.since_s + at_most_s
