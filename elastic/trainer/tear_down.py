"""Aborts process groups whose collectives run on a device, checks the device, and frees groups.

Aborting a communicator of NCCL may wait for the device, and so for the kernels of other
communicators: aborted one after the other, they could wait for each other for ever. So all are
aborted at once, each in a thread of its own (as NVIDIA's resiliency extension does it; PyTorch's
own abort of all groups goes one by one, pytorch #119797).

NCCL forbids an abort while a thread is inside one of its calls. Where the worker is
recorded, the number of such threads is known, and an abort waits for them, but not for long: one of
them may be what waits for a lost peer.

An abort also waits for CUDA graphs that hold a collective of the communicator, so the thread that
holds these must drop them meanwhile: it starts a `GroupAbort`, drops them, and waits.

A thread of gloo that begins to send in the moment in which its connection ends is not woken before
the group's own limit (PyTorch 2.13), and a group's destructor waits for its threads. Whoever drops
the last reference to such a group is held as long: `RetiredGroups` lets nothing wait for it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from keepstep.elastic.errors import ProcessUnusable
from keepstep.elastic.worker.peer_failure import text_of

ABORT_LIMIT_S = 10.0
"""After this time an abort is given up, and with it the process."""
_CHECK_LIMIT_S = 10.0
_CALLS_LIMIT_S = 1.0
_POLL_S = 0.001
# A group that no thread of gloo holds is freed at once.
_FREED_WITHIN_S = 1.0
# The local name, and the argument of `getrefcount`.
_OWN_REFERENCES = 2


class GroupAbort:
    """The abort of process groups, in threads that begin at once. `wait` ends them or raises.

    Args:
        groups: what to abort.
        device: the device that their collectives run on.
        calls_inside: returns how many threads are inside a call of a back end.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        calls_inside: Callable[[], int],
    ) -> None:
        self._calls_inside = calls_inside
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(
                target=self._abort, args=(group, device), name="keepstep-abort", daemon=True
            )
            for group in groups
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, limit_s: float = ABORT_LIMIT_S) -> None:
        """Wait until every group is aborted.

        Raises:
            ProcessUnusable: one is not within `limit_s` seconds, or its abort failed.
        """
        until_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        unfinished = sum(thread.is_alive() for thread in self._threads)
        if unfinished:
            raise ProcessUnusable(
                f"{unfinished} of {len(self._threads)} process groups did not abort within "
                f"{limit_s:.0f} s; does a CUDA graph live that holds their collectives? "
                "State(release=...) can drop it"
            )
        if self._errors:
            raise ProcessUnusable(f"a process group could not be aborted: {self._errors[0]}")

    def _abort(self, group: dist.ProcessGroup, device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            until_s = time.monotonic() + _CALLS_LIMIT_S
            while self._calls_inside() and time.monotonic() < until_s:
                time.sleep(_POLL_S)
            group.abort()
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self._errors.append(f"{type(error).__name__}: {text_of(error)}")


def check_device(device: torch.device, limit_s: float = _CHECK_LIMIT_S) -> None:
    """Check that a device has ended all its work and takes more.

    Twice: the first call drains what was queued, the second shows that the context still works.
    Errors of a device that stay (an illegal address, a memory error) look like a peer's failure by
    their text.

    Raises:
        ProcessUnusable: it has failed, or does not answer within `limit_s` seconds, which may be
            the time that ordinary work takes.
    """
    if device.type != "cuda":
        return
    errors: list[str] = []

    def synchronize() -> None:
        try:
            torch.cuda.set_device(device)
            for _ in range(2):
                torch.cuda.synchronize(device)
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(text_of(error).partition("\n")[0])

    thread = threading.Thread(target=synchronize, name="keepstep-device-check", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise ProcessUnusable(
            f"{device} did not end its work within {limit_s:.0f} s after the abort"
        )
    if errors:
        raise ProcessUnusable(f"{device} has failed: {errors[0]}", is_fault=True)


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
