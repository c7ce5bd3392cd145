"""Frees process groups that were left, without letting anything wait for gloo's threads.

A thread of gloo that begins to send in the moment in which its connection ends is not woken before
the group's own limit (PyTorch 2.13), and a group's destructor waits for its threads. Whoever drops
the last reference to such a group is held as long.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable

import torch.distributed as dist

# A group without such a thread is freed at once.
_FREED_WITHIN_S = 1.0
# The local name, and the argument of `getrefcount`.
_OWN_REFERENCES = 2


class RetiredGroups:
    """Holds groups that were left until nothing else refers to them. Not thread-safe."""

    def __init__(self) -> None:
        self._groups: list[dist.ProcessGroup] = []

    def retire(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Hold groups, so that no other thread drops the last reference to them."""
        self._groups += groups

    def free(self) -> None:
        """Free what nothing else refers to any more; what cannot end is left to a daemon thread."""
        unused: list[dist.ProcessGroup] = []
        held: list[dist.ProcessGroup] = []
        while self._groups:
            group = self._groups.pop()
            (unused if sys.getrefcount(group) <= _OWN_REFERENCES else held).append(group)
            del group
        self._groups = held
        if not unused:
            return
        # The list is the thread's alone once this returns.
        freeing = threading.Thread(target=unused.clear, name="keepstep-frees-groups", daemon=True)
        freeing.start()
        freeing.join(_FREED_WITHIN_S)
