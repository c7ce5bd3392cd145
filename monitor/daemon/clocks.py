"""How far nodes' clocks are off the job's, on the way down the tree: the root measures, and who makes digests needs to know."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from monitor.errors import ProtocolViolation


@dataclass(frozen=True, slots=True)
class Clock:
    """What to add to a node's monotonic clock to have the job's, and how far that may be off, in seconds."""

    offset_s: float
    error_s: float


def encode_clocks(clocks: Mapping[str, Clock]) -> bytes:
    """Return clocks by node as JSON."""
    return json.dumps({node: [clock.offset_s, clock.error_s] for node, clock in clocks.items()}).encode()


def decode_clocks(data: bytes) -> dict[str, Clock]:
    """Return what `encode_clocks` made bytes of.

    Raises:
        ProtocolViolation: it is something else.
    """
    try:
        told = json.loads(data)
        clocks = {str(node): Clock(float(offset_s), float(error_s)) for node, (offset_s, error_s) in told.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ProtocolViolation(f"these are no clocks: {error}") from error
    if not all(math.isfinite(clock.offset_s) and 0 <= clock.error_s < math.inf for clock in clocks.values()):
        raise ProtocolViolation("these are no clocks: an offset or its error is not a finite number")
    return clocks
