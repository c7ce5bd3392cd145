"""Calls functions in threads that may never return, and says how long each took.

An abort, a synchronize or an initialization may block for ever; a check has to see that, and go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch


class BackgroundCall:
    """A function's call in a daemon thread, which a process that ends leaves behind.

    Args:
        function: what to call; its exception is kept in `error`.
        device: index of the GPU that the thread uses; None: it uses none. A thread without one
            that is set would make a context on the first GPU.
    """

    def __init__(self, function: Callable[[], object], device: int | None) -> None:
        self._function = function
        self._device = device
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.error: Exception | None = None
        self.took_s = 0.0

    def start(self) -> BackgroundCall:
        """Begin the call."""
        self._thread.start()
        return self

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; return whether the call has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        began_s = time.monotonic()
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._function()
        except Exception as error:  # noqa: BLE001 - the waiting thread looks at it
            self.error = error
        self.took_s = time.monotonic() - began_s


def described(error: BaseException | None) -> str:
    """Return an exception's type and the first line of its message; empty for none."""
    if error is None:
        return ""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
