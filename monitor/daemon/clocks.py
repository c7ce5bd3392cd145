"""How far nodes' clocks are off the job's, on the way down the tree: the root measures, and who makes digests needs to know.

The job's clock is the root's own. Where nothing could be measured yet, how far a node's newest news lie behind tells roughly: good enough to
say since when something holds, and no good for comparing one node's times with another's, so its error is infinite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from monitor.errors import ProtocolViolation

RESTARTED_S = 5.0
"""A node whose news seem to lie further ahead or behind than they did, by more than news are ever late, has another clock."""


@dataclass(frozen=True, slots=True)
class Clock:
    """What to add to a node's monotonic clock to have the job's, and how far that may be off, in seconds."""

    offset_s: float
    error_s: float


def agreed(
    here: str,
    reference: str,
    measured: Mapping[str, Clock],
    known: Mapping[str, Clock],
    behind_s: Mapping[str, float],
) -> dict[str, Clock]:
    """Return each node's clock: as measured now, else as it was known, else as far as its news lie behind.

    Args:
        here: the node whose clock is the job's.
        reference: the node to whose clock `measured` refers: `here`, or, where this one runs no ranks, any other.
        measured: what could be measured now.
        known: what was, aged.
        behind_s: for each other node that runs ranks, how far its newest news lie behind by the clock here.
    """

    def still(node: str) -> bool:
        # A machine that was started anew counts from nothing.
        return node in known and abs(known[node].offset_s - behind_s[node]) < RESTARTED_S

    clocks = {}
    shift_s = 0.0
    if reference != here:
        shift_s = known[reference].offset_s if still(reference) else behind_s[reference]
    for node in behind_s:
        if node in measured:
            clocks[node] = Clock(measured[node].offset_s + shift_s, measured[node].error_s)
        else:
            clocks[node] = known[node] if still(node) else Clock(behind_s[node], math.inf)
    return {**clocks, here: Clock(0.0, 0.0)}


def encode_clocks(clocks: Mapping[str, Clock]) -> bytes:
    """Return clocks by node as JSON."""
    told = {
        node: [clock.offset_s, clock.error_s if math.isfinite(clock.error_s) else None]
        for node, clock in clocks.items()
    }
    return json.dumps(told).encode()


def decode_clocks(data: bytes) -> dict[str, Clock]:
    """Return what `encode_clocks` made bytes of.

    Raises:
        ProtocolViolation: it is something else.
    """
    try:
        told = json.loads(data)
        parts = {str(node): (float(offset_s), error_s) for node, (offset_s, error_s) in told.items()}
        if not all(math.isfinite(part) for offset_s, error_s in parts.values() for part in (offset_s, error_s or 0.0)):
            raise ProtocolViolation("these are no clocks: an offset or its error is not a finite number")
        clocks = {
            node: Clock(offset_s, math.inf if error_s is None else float(error_s))
            for node, (offset_s, error_s) in parts.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ProtocolViolation(f"these are no clocks: {error}") from error
    if any(clock.error_s < 0 for clock in clocks.values()):
        raise ProtocolViolation("these are no clocks: an error is negative")
    return clocks
