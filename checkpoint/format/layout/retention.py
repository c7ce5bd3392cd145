"""Defines the retention of checkpoints, for users and messages. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The checkpoints to keep; others are removed.

    Attributes:
        last: how many of the newest; 0 counts as 1.
        every: also those whose step is a multiple of this; None: no others.
        behind: also the newest one that is at least this many steps older than the newest of all,
            since a job may have to go on from it after a rejected step; 0: no other.
    """

    last: int = 1
    every: int | None = None
    behind: int = 0
