"""Copies tensors into mapped buffers: on the host past its caches, from a GPU by its own stream.

A GPU copies without the host, and in parallel with its kernels, only into page-locked memory; so a
buffer is locked once, when it is first used. Locking takes time for each page, and holds locks of
the driver that delay launches: the pages get their memory before, in parallel, and are huge where
the system has huge pages.

The current device in CUDA belongs to a thread. In a new thread it is the first GPU, and using it
there would make a context on it for every worker of the node: `bind` comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from keepstep.checkpoint.live.streaming_copy import copy_tensors
from keepstep.checkpoint.snapshot.arena import Arena

Tensors = Sequence[torch.Tensor]

_LOCK_ERRORS = {
    1: "the memory is not mapped",
    2: "the system has no memory to lock",
    304: "the operating system refused to lock it; see `ulimit -l`",
    712: "it is locked already",
    801: "it is mapped for reading only, or the platform cannot lock it",
}


class StateCopies(Protocol):
    """Copies from the state's device. Except for `mark`, one thread at a time calls it."""

    def bind(self) -> None:
        """Prepare the calling thread."""
        ...

    def mark(self) -> object:
        """Return a mark after all work that the calling thread has queued on the device."""
        ...

    def lock(self, number: int, arena: Arena) -> None:
        """Prepare a mapped buffer as a target.

        Raises:
            RuntimeError: the device cannot write to it directly.
        """
        ...

    def unlock(self, number: int) -> None:
        """Release a buffer, before it is unmapped."""
        ...

    def close(self) -> None:
        """Release all buffers."""
        ...

    def begin(self, targets: Tensors, sources: Tensors, after: object) -> Callable[[], None]:
        """Begin to copy each source into its target, as far as the device can without the host.

        Args:
            targets: views of a locked buffer.
            sources: tensors of the same shapes and dtypes.
            after: the mark after which their values are the state.

        Returns:
            A function that does the rest, in any bound thread, and returns when all is done. It
            raises as this does.

        Raises:
            RuntimeError: the device has failed.
        """
        ...


def copies_from(device: torch.device) -> StateCopies:
    """Return the copier for a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


class HostCopies:
    """Copies memory of the host by calls that do not hold the GIL."""

    def bind(self) -> None:
        """Nothing is needed."""

    def mark(self) -> object:
        """Return nothing: the host's calls are synchronous."""
        return None

    def lock(self, number: int, arena: Arena) -> None:
        """Nothing is needed."""

    def unlock(self, number: int) -> None:
        """Nothing is needed."""

    def close(self) -> None:
        """Nothing is needed."""

    def begin(self, targets: Tensors, sources: Tensors, after: object) -> Callable[[], None]:
        """Return a function that copies each source into its target."""
        return partial(copy_tensors, targets, sources)


class CudaCopies:
    """Copies from a GPU on a side stream of low priority, in parallel with the next step's kernels.

    A target that is not contiguous as its source is costs memory of the GPU for a contiguous copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._locked: dict[int, int] = {}

    def bind(self) -> None:
        """Make the state's device the calling thread's."""
        torch.cuda.set_device(self._device)

    def mark(self) -> object:
        """Return an event after all work in the calling thread's current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def lock(self, number: int, arena: Arena) -> None:
        """Page-lock a mapped buffer, once.

        Raises:
            RuntimeError: CUDA refuses.
        """
        if number in self._locked:
            return
        arena.populate()
        pointer = arena.bytes.ctypes.data
        code = int(torch.cuda.cudart().cudaHostRegister(pointer, arena.nbytes, 0))
        if code != 0:
            why = _LOCK_ERRORS.get(code, "see the CUDA runtime's list of errors")
            raise RuntimeError(
                f"{arena.nbytes} bytes of snapshot memory could not be page-locked: CUDA error "
                f"{code} ({why})"
            )
        self._locked[number] = pointer

    def unlock(self, number: int) -> None:
        """Release a buffer's pages. If the context is gone, so is the lock: errors say no more."""
        pointer = self._locked.pop(number, None)
        if pointer is not None:
            torch.cuda.cudart().cudaHostUnregister(pointer)

    def close(self) -> None:
        """Release the pages of all buffers."""
        for number in tuple(self._locked):
            self.unlock(number)

    def begin(self, targets: Tensors, sources: Tensors, after: object) -> Callable[[], None]:
        """Queue the copies from the device; return a function that does the rest and waits.

        A thread of its own would have to wait for the GIL to queue each.

        Raises:
            RuntimeError: the device has failed.
        """
        assert isinstance(after, torch.cuda.Event), "a mark of `mark`"
        # Waiting for the default kind of event takes a core for as long as the copy takes.
        done = torch.cuda.Event(blocking=True)
        others = []
        try:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(after)
                for target, source in zip(targets, sources, strict=True):
                    if source.device == self._device:
                        target.copy_(source, non_blocking=True)
                    else:
                        others.append((target, source))
        except BaseException:
            done.record(self._stream)
            done.synchronize()
            raise
        done.record(self._stream)
        return partial(self._finish, done, sources, others)

    def _finish(
        self,
        done: torch.cuda.Event,
        sources: Tensors,
        others: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Copy tensors of other devices, and wait; `sources` live until the stream has read them.

        Copies from another GPU are ordered by that one's streams, so the host waits for them.
        """
        try:
            host = [pair for pair in others if pair[1].device.type == "cpu"]
            # In few calls: each needs the GIL again, and optimizers have many small ones.
            copy_tensors([target for target, _ in host], [source for _, source in host])
            for target, source in others:
                if source.device.type != "cpu":
                    target.copy_(source, non_blocking=False)
        finally:
            done.synchronize()
