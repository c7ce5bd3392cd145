"""Decides when a node leaves because of its cloud's notices. Pure.

A node leaves some time before its machine is taken, not when that is announced: maintenance may be
announced days ahead, and withdrawn. A notice after which the machine goes on, such as a live
migration or AWS's rebalance recommendation, makes no node leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

MARGIN_S = 90.0
"""How long before the latest moment to begin a hand-over: clocks differ, and AWS announces a spot
interruption two minutes ahead, of which nothing shall be lost with the default --grace."""


class Cloud(StrEnum):
    """A cloud whose notices can be read."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"


CHOICES = ("off", "auto", *(cloud.value for cloud in Cloud))
"""Whose notices to follow; `auto`: those of the cloud that the machine's firmware names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One event that a cloud has announced for this machine.

    Attributes:
        identity: tells it from the machine's other events.
        what: in words.
        at_s: before which time it does not happen, in seconds since 1970; None: at any moment.
        takes_machine: whether the machine ends or restarts.
    """

    identity: str
    what: str
    at_s: float | None = None
    takes_machine: bool = True


def leaving_time_s(notices: Iterable[Notice], lead_s: float) -> float | None:
    """Return when the node is to leave, in seconds since 1970; None: it stays.

    Args:
        notices: all that stand.
        lead_s: how long before the machine is taken.
    """
    times = [
        float("-inf") if notice.at_s is None else notice.at_s - lead_s
        for notice in notices
        if notice.takes_machine
    ]
    return min(times, default=None)


def describe_changes(
    before: Sequence[Notice], after: Sequence[Notice], lead_s: float, now_s: float
) -> list[str]:
    """Return a line for each notice that is new, has another time, or was withdrawn."""
    lines = [
        f"announces {_described(notice)}: this node {_answer(notice, lead_s, now_s)}"
        for notice in after
        if notice not in before
    ]
    standing = {notice.identity for notice in after}
    return lines + [
        f"no longer announces {_described(notice)}"
        for notice in before
        if notice.identity not in standing
    ]


def _described(notice: Notice) -> str:
    return notice.what if notice.at_s is None else f"{notice.what} at {_clock(notice.at_s)}"


def _answer(notice: Notice, lead_s: float, now_s: float) -> str:
    leaving_s = leaving_time_s([notice], lead_s)
    if leaving_s is None:
        return "stays"
    return "leaves now" if leaving_s <= now_s else f"leaves at {_clock(leaving_s)}"


def _clock(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
