"""How fast what runs beside the training may move bytes, so that the training's own traffic comes first. Pure."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Bytes a second that one node may spend; 0 is as fast as it goes.

    `exchange`: sending to other nodes for parity and for checkpoints. `storage`: writing checkpoints.
    Restoring state after a failure has no limit, for the training waits for it.
    """

    exchange: int = 0
    storage: int = 0


class RateLimiter:
    """Spreads bytes over time; several threads may draw on it."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._spent_until_s = 0.0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, now_s: float) -> float:
        """Take so many bytes, and return the seconds from now on to wait before moving them."""
        if not self._bytes_per_s:
            return 0.0
        with self._lock:
            due_s = max(now_s, self._spent_until_s)
            self._spent_until_s = due_s + nbytes / self._bytes_per_s
            return due_s - now_s
