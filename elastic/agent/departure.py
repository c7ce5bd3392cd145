"""Whether this node is to leave the job in good order, and since when."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("keepstep")


class Departure:
    """Begun by a signal or an eviction, at most once.

    Attributes:
        since_s: since when, in monotonic seconds; None if the node is not to leave.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.since_s: float | None = None

    def begin(self, reason: str) -> None:
        """Begin to leave, unless that has begun already."""
        if self.since_s is None:
            log.warning("%s", reason)
            self.since_s = time.monotonic()
            self._wake()
