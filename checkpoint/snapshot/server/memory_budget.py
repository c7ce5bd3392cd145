"""Decides how much memory the node can still give to snapshots and parity.

What the system calls available shrinks only when memory is written. So buffers that were given and
are not written yet count as taken: else each of several ranks would be given what is there once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from keepstep.available_memory import available_nbytes
from keepstep.checkpoint.snapshot.arena import Arena


class MemoryBudget:
    """The memory of one node's snapshot server. Thread-safe.

    Args:
        read_available_nbytes: returns what the system has left.
    """

    def __init__(self, read_available_nbytes: Callable[[], int] = available_nbytes) -> None:
        self._read_available_nbytes = read_available_nbytes
        self._arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
        # Held while somebody decides on what is left and takes it.
        self._lock = threading.RLock()

    @contextmanager
    def admission(self) -> Iterator[Callable[[], int]]:
        """Yield what returns the bytes that can be given, which it asks the system for.

        Nobody else is given any while the context lasts.
        """
        with self._lock:
            yield self._left_nbytes

    def create(self, nbytes: int) -> Arena:
        """Create a buffer, which counts as taken from now on."""
        with self._lock:
            arena = Arena.create(nbytes)
            self._arenas.add(arena)
            return arena

    def _left_nbytes(self) -> int:
        given = sum(arena.unwritten_nbytes for arena in self._arenas)
        return self._read_available_nbytes() - given
