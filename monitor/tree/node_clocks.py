"""How far nodes' clocks are off the job's, on the way down the tree: the root measures, and who makes digests needs to know.

The job's clock is the root's own. Where nothing could be measured yet, how far a node's newest news lie behind tells roughly: good enough to
say since when something holds, and no good for comparing one node's times with another's, so its error is infinite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from keepstep.monitor.errors import ProtocolViolation
from keepstep.monitor.telemetry.clocks import DRIFT

RESTARTED_S = 5.0
"""A node whose news seem to lie further ahead or behind than they did, by more than news are ever late, has another clock."""

_SHARE = 0.01
_AT_LEAST_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class NodeClock:
    """What to add to a node's monotonic clock to have the job's, and how far that may be off, in seconds."""

    offset_s: float
    error_s: float


class NodeClocks:
    """What is known of the nodes' clocks.

    Args:
        here: the node whose clock is the job's.
    """

    def __init__(self, here: str) -> None:
        self._here = here
        self._told: Mapping[str, NodeClock] = {}
        self._told_at_s = 0.0
        self._behind_s: dict[str, float] = {}

    def of(self, node: str, now_s: float) -> NodeClock:
        """Return how far a node's clock is off the job's: as told last, and less sure with time."""
        clock = self._told.get(node, NodeClock(0.0, math.inf))
        return NodeClock(clock.offset_s, clock.error_s + DRIFT * (now_s - self._told_at_s))

    def update(self, clocks: Mapping[str, NodeClock], now_s: float) -> None:
        """Take these to be the nodes' clocks from now on."""
        self._told, self._told_at_s = clocks, now_s

    def record_delay(self, node: str, delay_s: float) -> None:
        """Note by how much news of a node that runs ranks lie behind the clock here."""
        before_s = self._behind_s.get(node, delay_s)
        # The promptest tell best.
        self._behind_s[node] = (
            min(delay_s, before_s) if abs(delay_s - before_s) < RESTARTED_S else delay_s
        )

    def keep_only(self, nodes: Collection[str]) -> None:
        """Forget how far news of other nodes lie behind."""
        for node in set(self._behind_s) - set(nodes):
            del self._behind_s[node]

    def resolve(
        self, reference: str, measured: Mapping[str, NodeClock], now_s: float
    ) -> dict[str, NodeClock]:
        """Return each node's clock: as measured now, else as it was known, else as far as its news lie behind; nothing if there is no other node.

        Args:
            reference: the node to whose clock `measured` refers: this one, or, where it runs no ranks, any other.
            measured: what could be measured now.
            now_s: the clock here.
        """
        if not self._behind_s:
            return {}
        if reference != self._here and reference not in self._behind_s:
            # It has left meanwhile, and what refers to it says nothing of the clock here.
            reference, measured = self._here, {}
        clocks = {self._here: NodeClock(0.0, 0.0)}
        shift_s = 0.0 if reference == self._here else self._kept(reference, now_s).offset_s
        for node in self._behind_s:
            if node in measured:
                clocks[node] = NodeClock(measured[node].offset_s + shift_s, measured[node].error_s)
            else:
                clocks[node] = self._kept(node, now_s)
        return clocks

    def _kept(self, node: str, now_s: float) -> NodeClock:
        rough = NodeClock(self._behind_s[node], math.inf)
        known = self.of(node, now_s) if node in self._told else rough
        # A machine that was started anew counts from nothing.
        return known if abs(known.offset_s - rough.offset_s) < RESTARTED_S else rough


def pause_s(every_s: float, took_s: float, *, is_complete: bool) -> float:
    """Return how long to wait before clocks are measured again, in seconds.

    Args:
        every_s: as it was asked for; a fifth of that while some node's clock could not be measured.
        took_s: processor time that measuring takes: seconds for thousands of ranks, which then is done less often, but once a minute.
        is_complete: whether all could be measured.
    """
    return max(every_s if is_complete else every_s / 5, min(took_s / _SHARE, _AT_LEAST_EVERY_S))


def encode_clocks(clocks: Mapping[str, NodeClock]) -> bytes:
    """Return clocks by node as JSON."""
    told = {
        node: [clock.offset_s, clock.error_s if math.isfinite(clock.error_s) else None]
        for node, clock in clocks.items()
    }
    return json.dumps(told).encode()


def decode_clocks(data: bytes) -> dict[str, NodeClock]:
    """Return what `encode_clocks` made bytes of.

    Raises:
        ProtocolViolation: it is something else.
    """
    try:
        told = json.loads(data)
        parts = {
            str(node): (float(offset_s), error_s) for node, (offset_s, error_s) in told.items()
        }
        if not all(
            math.isfinite(part)
            for offset_s, error_s in parts.values()
            for part in (offset_s, error_s or 0.0)
        ):
            raise ProtocolViolation(
                "these are no clocks: an offset or its error is not a finite number"
            )
        clocks = {
            node: NodeClock(offset_s, math.inf if error_s is None else float(error_s))
            for node, (offset_s, error_s) in parts.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ProtocolViolation(f"these are no clocks: {error}") from error
    if any(clock.error_s < 0 for clock in clocks.values()):
        raise ProtocolViolation("these are no clocks: an error is negative")
    return clocks
