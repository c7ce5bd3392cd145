"""Copies live tensors into memory that is shared with another process, and kept for the next copy.

A thread copies, by calls that do not hold the GIL: meanwhile the ranks can agree. Copies from a GPU
into page-locked memory are queued by the caller; the thread waits for them. The first copy pays for
the memory: its pages are made before they are written.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial

import torch

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.layout.boxes import Entry
from keepstep.checkpoint.live.packing import signature_of, views_over
from keepstep.checkpoint.live.state_copies import StateCopies, copies_from
from keepstep.checkpoint.live.tensors import LiveTensor
from keepstep.checkpoint.snapshot.arena import Arena

_NUMBER = 0


class SharedBuffer:
    """One buffer, mapped here and by the process that gets its descriptor. `close` frees it.

    A thread copies, from the first copy until `close`; `close`, `reserve` and the next copy wait
    for it.
    """

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._copies: StateCopies = copies_from(self._device)
        self._arena: Arena | None = None
        self._entries: tuple[Entry, ...] = ()
        self._views: list[torch.Tensor] = []
        self._copying: Future[None] | None = None
        self._queue: queue.SimpleQueue[Callable[[], None] | None] | None = None

    @property
    def nbytes(self) -> int:
        """The buffer's size."""
        return 0 if self._arena is None else self._arena.nbytes

    @property
    def descriptor(self) -> int:
        """The buffer's file, to be mapped by another process; the buffer owns it."""
        assert self._arena is not None, "memory is reserved before"
        return self._arena.descriptor

    def fits(self, nbytes: int, device: torch.device) -> bool:
        """Whether copies of this size from this device have a place in the present buffer."""
        return self._arena is not None and self._arena.nbytes >= nbytes and device == self._device

    def reserve(
        self, nbytes: int, device: torch.device, available_nbytes: Callable[[], int]
    ) -> bool:
        """Make the buffer ready for copies of this size from this device.

        Args:
            nbytes: the most bytes of a copy.
            device: of the tensors.
            available_nbytes: returns the memory that the system has left.

        Returns:
            Whether it is a new buffer, with another descriptor.

        Raises:
            CheckpointError: memory is short.
            RuntimeError: the device cannot copy into it.
        """
        if self.fits(nbytes, device):
            return False
        self.close()
        left_nbytes = available_nbytes()
        if nbytes > left_nbytes:
            raise CheckpointError(
                f"{nbytes} bytes of memory are needed to copy this rank's tensors, and the system "
                f"has {left_nbytes} left; save with block=True, or use more ranks"
            )
        copies, arena = copies_from(device), Arena.create(nbytes)
        try:
            arena.populate()
            copies.lock(_NUMBER, arena)
        except BaseException:
            # Kept, it would pass for a buffer whose descriptor the other process has.
            copies.close()
            arena.close()
            raise
        self._device, self._copies, self._arena = device, copies, arena
        return True

    def begin_copy(self, tensors: Sequence[LiveTensor], entries: tuple[Entry, ...]) -> Future[None]:
        """Begin to copy tensors to their places, after all earlier work on their device.

        Returns:
            A future that is done with the copy; its exception is a RuntimeError if the device has
            failed.

        Raises:
            RuntimeError: the device has failed, or the system starts no thread.
        """
        assert self._arena is not None, "memory is reserved before"
        self._await_copy()
        if entries is not self._entries:
            self._views = views_over(self._arena, entries, signature_of(tensors))
            self._entries = entries
        sources, done = [tensor.data for tensor in tensors], Future[None]()
        if self._queue is None:
            tasks = queue.SimpleQueue[Callable[[], None] | None]()
            # It may wait for a device that never answers, which must not keep the process alive.
            threading.Thread(
                target=_perform, args=(tasks,), name="keepstep-copy", daemon=True
            ).start()
            self._queue = tasks
        mark = self._copies.mark()
        with torch.inference_mode():
            finish = self._copies.begin(self._views, sources, mark)
        self._queue.put(partial(_finish, self._copies, finish, done))
        self._copying = done
        return done

    def put(self, offset: int, data: memoryview) -> None:
        """Copy bytes to this offset, where nothing else is copied."""
        assert self._arena is not None, "memory is reserved before"
        self._arena.buffer[offset : offset + data.nbytes] = data

    def close(self) -> None:
        """Free the memory, once the other process has released it too."""
        self._await_copy()
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None
        self._entries, self._views = (), []
        self._copies.close()
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    def _await_copy(self) -> None:
        """Wait until nothing is written to the memory; the caller looks at the outcome."""
        if self._copying is not None:
            wait([self._copying])
            self._copying = None


def _perform(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Run one task after the other, until there is None. It keeps no task while it waits."""
    while (task := tasks.get()) is not None:
        task()
        del task


def _finish(copies: StateCopies, finish: Callable[[], None], done: Future[None]) -> None:
    try:
        copies.bind()
        # The caller may have made the views in this mode; then they can be written in no other.
        with torch.inference_mode():
            finish()
    except BaseException as error:  # noqa: BLE001 - the thread's edge: the result raises it
        done.set_exception(error)
    else:
        done.set_result(None)
