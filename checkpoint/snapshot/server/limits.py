"""Limits how fast background work moves bytes, so that the training's traffic comes first.

A limiter reads no clock and does not sleep: the caller passes the time and waits.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Bytes per second that one node may use; 0 is no limit.

    Restoring state after a failure has no limit, for the training waits for it.

    Args:
        exchange: sending to other nodes for parity and for checkpoints.
        storage: writing checkpoints.
    """

    exchange: int = 0
    storage: int = 0


class RateLimiter:
    """Spreads bytes over time. Thread-safe."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._reserved_until_s = 0.0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, now_s: float) -> float:
        """Reserve time for so many bytes; return the seconds to wait before moving them."""
        if not self._bytes_per_s:
            return 0.0
        with self._lock:
            due_s = max(now_s, self._reserved_until_s)
            self._reserved_until_s = due_s + nbytes / self._bytes_per_s
            return due_s - now_s
