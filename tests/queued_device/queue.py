"""The queue of a device: the host enqueues operations and goes on; one thread runs them in order.

An operation that raises stops nothing: a GPU has nobody to tell. What it raised is raised at the
next `synchronize`, as a device's error is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

Operation = Callable[[], object]


class DeviceQueue:
    """A device's operations. Its thread ends with the process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Operation] = deque()
        self._is_running = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run_all, name="device", daemon=True)
        self._thread.start()

    def enqueue(self, operation: Operation) -> None:
        """Run an operation after all that were enqueued before; return at once."""
        with self._changed:
            self._waiting.append(operation)
            self._changed.notify_all()

    def synchronize(self) -> None:
        """Block until the queue is empty.

        Raises:
            BaseException: what an operation has raised since the last call.
        """
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_running)
            error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def length(self) -> int:
        """How many operations have not ended: how far the host is ahead."""
        with self._changed:
            return len(self._waiting) + self._is_running

    def _run_all(self) -> None:
        # The host has counted the writes when it enqueued them.
        with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
            while True:
                with self._changed:
                    self._is_running = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: bool(self._waiting))
                    operation = self._waiting.popleft()
                    self._is_running = True
                try:
                    operation()
                except BaseException as error:  # noqa: BLE001 - raised by `synchronize`
                    with self._changed:
                        self._error = self._error or error


DEVICE = DeviceQueue()
