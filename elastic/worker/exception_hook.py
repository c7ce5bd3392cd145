"""Keeps `sys.excepthook` right while process groups come and go.

PyTorch adds "[rankN]: " to Python's display of an exception each time that a default group is
created, and never removes it. A process of a job has one group to warm up, and another one, as
another rank, in each generation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TypeAlias

Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@contextmanager
def kept_hook() -> Iterator[None]:
    """Leave the hook as it is, whatever sets another one meanwhile."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before


class RankPrefix:
    """The prefix of the newest default group of a process, instead of one of each."""

    def __init__(self) -> None:
        self._added: Hook | None = None
        self._below: Hook = sys.excepthook

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Remove the last group's prefix, and create the next group meanwhile.

        A hook that the script has set since then stays, above the older prefix.
        """
        if sys.excepthook is self._added:
            sys.excepthook = self._below
        below = sys.excepthook
        try:
            yield
        finally:
            if sys.excepthook is not below:
                self._added, self._below = sys.excepthook, below
