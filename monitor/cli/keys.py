"""Reads single keys from the terminal, next to what is shown there."""

from __future__ import annotations

import asyncio
import os
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager


class Keys:
    """Keys as they are pressed.

    Args:
        descriptor: of the terminal; None: there is none, and no key is ever pressed.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._pressed: asyncio.Queue[str] = asyncio.Queue()

    @property
    def has_any(self) -> bool:
        """Whether the input is a terminal."""
        return self._descriptor is not None

    async def next(self, timeout_s: float) -> str:
        """Return the next key; "" if none is pressed in time."""
        try:
            return await asyncio.wait_for(self._pressed.get(), timeout_s)
        except TimeoutError:
            return ""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read keys while the context lasts, without waiting for the end of a line."""
        descriptor = self._descriptor
        if descriptor is None:
            yield
            return
        before = termios.tcgetattr(descriptor)
        loop = asyncio.get_running_loop()
        # By default it drops what was typed since the last context.
        tty.setcbreak(descriptor, termios.TCSANOW)
        loop.add_reader(descriptor, self._read, descriptor)
        try:
            yield
        finally:
            loop.remove_reader(descriptor)
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def _read(self, descriptor: int) -> None:
        for key in os.read(descriptor, 64).decode(errors="replace"):
            self._pressed.put_nowait(key)
