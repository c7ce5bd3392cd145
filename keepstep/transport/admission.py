"""Limits connections that have not authenticated yet, and classifies errors of `accept`. Pure.

Any client that reaches a port can connect and send nothing. Each costs a descriptor, and a thread
or task until its handshake's deadline, so their number is capped: one more drops the oldest. An
honest handshake takes milliseconds, so under a flood it is the flood's own connections that are
dropped.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from typing import Generic, TypeVar

MAX_PENDING = 64
EXHAUSTED_PAUSE_S = 0.1

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

PendingT = TypeVar("PendingT")


class PendingConnections(Generic[PendingT]):
    """The connections that have not authenticated yet, oldest first. Invariant: at most `limit`."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"at most {limit} pending connections would refuse everybody")
        self._limit = limit
        self._pending: OrderedDict[int, PendingT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, connection: PendingT) -> PendingT | None:
        """Add a connection; return the oldest one if it is to be dropped in exchange."""
        dropped = self.drop_oldest() if len(self._pending) >= self._limit else None
        self._pending[id(connection)] = connection
        return dropped

    def drop_oldest(self) -> PendingT | None:
        """Forget and return the oldest connection; None if there is none."""
        return self._pending.popitem(last=False)[1] if self._pending else None

    def discard(self, connection: PendingT) -> bool:
        """Forget a connection that authenticated or ended; return whether it was still pending."""
        return self._pending.pop(id(connection), None) is not None


def is_exhaustion(error: OSError) -> bool:
    """Whether `accept` failed for want of descriptors or memory: it is tried again after a pause.

    Any other error except that of a closed listener concerns only the incoming connection
    (accept(2) passes on network errors that were pending on it).
    """
    return error.errno in _EXHAUSTED
