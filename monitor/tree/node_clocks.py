"""Keeps the offsets of the nodes' clocks from the job's clock, and encodes them for the daemons.

The root measures the offsets and sends them down the tree, because digests, which need them, are
made where the rings are. The job's clock is the root's own. Where no offset could be measured yet,
the least delay of a node's reports is used instead: good enough to date a verdict, but not to
compare the times of two nodes, so its error is infinite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec

from keepstep.monitor.errors import ProtocolViolation
from keepstep.monitor.telemetry.clocks import DRIFT, ClockOffset

RESTARTED_S = 5.0
"""A delay that changes by more than this, which reports never vary by, shows a restarted clock."""

_Offset = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
_Error = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_CPU_SHARE = 0.01
_AT_LEAST_EVERY_S = 60.0
_SAME_CLOCK = ClockOffset(0.0, 0.0)


class NodeClocks:
    """Holds the known offsets of the nodes' clocks.

    Args:
        reference_node: the node whose clock is the job's.
    """

    def __init__(self, reference_node: str) -> None:
        self._reference_node = reference_node
        self._known: Mapping[str, ClockOffset] = {}
        self._known_at_s = 0.0
        self._delays_s: dict[str, float] = {}

    def of(self, node: str, now_s: float) -> ClockOffset:
        """Return a node's newest known offset; its error grows with time."""
        clock = self._known.get(node, ClockOffset(0.0, math.inf))
        return ClockOffset(clock.offset_s, clock.error_s + DRIFT * (now_s - self._known_at_s))

    def update(self, clocks: Mapping[str, ClockOffset], now_s: float) -> None:
        """Replace the known offsets."""
        self._known, self._known_at_s = clocks, now_s

    def record_delay(self, node: str, delay_s: float) -> None:
        """Record by how much a report of a node that runs ranks is behind the clock here."""
        before_s = self._delays_s.get(node, delay_s)
        # The least delay is the closest to the offset.
        self._delays_s[node] = (
            min(delay_s, before_s) if abs(delay_s - before_s) < RESTARTED_S else delay_s
        )

    def keep_only(self, nodes: Collection[str]) -> None:
        """Drop the delays of all other nodes."""
        for node in set(self._delays_s) - set(nodes):
            del self._delays_s[node]

    def resolve(
        self, reference: str, measured: Mapping[str, ClockOffset], now_s: float
    ) -> dict[str, ClockOffset]:
        """Return each node's offset: as measured now, else as known before, else from its delay.

        Returns an empty dictionary if there is no other node.

        Args:
            reference: node to whose clock `measured` refers: this one, or, if it runs no ranks,
                any other.
            measured: the offsets that could be measured now.
            now_s: the clock here.
        """
        if not self._delays_s:
            return {}
        if reference != self._reference_node and reference not in self._delays_s:
            # The node has left meanwhile; offsets from its clock do not relate to the clock here.
            reference, measured = self._reference_node, {}
        clocks = {self._reference_node: _SAME_CLOCK}
        shift_s = (
            0.0
            if reference == self._reference_node
            else self._known_or_delay(reference, now_s).offset_s
        )
        for node in self._delays_s:
            if node in measured:
                clocks[node] = ClockOffset(
                    measured[node].offset_s + shift_s, measured[node].error_s
                )
            else:
                clocks[node] = self._known_or_delay(node, now_s)
        return clocks

    def _known_or_delay(self, node: str, now_s: float) -> ClockOffset:
        from_delay = ClockOffset(self._delays_s[node], math.inf)
        measured = self.of(node, now_s) if node in self._known else from_delay
        # The monotonic clock of a rebooted machine starts again at zero.
        is_same_boot = abs(measured.offset_s - from_delay.offset_s) < RESTARTED_S
        return measured if is_same_boot else from_delay


def pause_s(every_s: float, took_s: float, *, is_complete: bool) -> float:
    """Return how many seconds to wait before clocks are measured again.

    Args:
        every_s: the configured period; a fifth of it while some node's clock could not be measured.
        took_s: processor time of a measurement: seconds for thousands of ranks, which are measured
            less often therefore, but at least once a minute.
        is_complete: whether all clocks could be measured.
    """
    period_s = every_s if is_complete else every_s / 5
    return max(period_s, min(took_s / _CPU_SHARE, _AT_LEAST_EVERY_S))


def encode_clocks(clocks: Mapping[str, ClockOffset]) -> bytes:
    """Return offsets by node as JSON; an infinite error is null."""
    fields = {
        node: [clock.offset_s, clock.error_s if math.isfinite(clock.error_s) else None]
        for node, clock in clocks.items()
    }
    return json.dumps(fields).encode()


def decode_clocks(data: bytes) -> dict[str, ClockOffset]:
    """Return the offsets that `encode_clocks` encoded.

    Raises:
        ProtocolViolation: the bytes are not such JSON, or a number is not valid.
    """
    try:
        fields = msgspec.json.decode(data, type=dict[str, tuple[_Offset, _Error | None]])
    # RecursionError: nesting deeper than the interpreter's stack allows.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolViolation(f"invalid clock offsets: {error}") from error
    return {
        node: ClockOffset(offset_s, math.inf if error_s is None else error_s)
        for node, (offset_s, error_s) in fields.items()
    }
