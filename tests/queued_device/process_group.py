"""A back end for tests that treats queued tensors as NCCL treats a GPU's, over gloo.

It models what is known of NCCL, PyTorch 2.13 and their abort; the names in brackets are those of
the tests in `test_queued_device.py` that show it:

- A collective is enqueued and returns at once; a synchronous one returns no Work
  [collective_returns_at_once_and_without_work].
- A peer that is lost raises nothing: the collective waits, and with it all that is enqueued after
  it, while the host runs ahead [lost_peer_raises_nothing].
- An abort ends the collectives that wait, raises nothing, leaves garbage in their outputs, and what
  is enqueued after them runs on it [abort_leaves_garbage_and_what_follows_runs_on_it].
- A peer that has not aborted may receive garbage from one that has, and end its collective as if
  nothing had happened [abort_may_leave_garbage_at_peers].
- A collective that is called after the abort raises [collective_after_an_abort_raises].
- The constructor waits until all ranks have come. Nothing but the end of the process ends that: no
  abort, and not the end of the store [construction_waits_for_all_ranks].

Tensors of the host go through a gloo group of their own, as in a group of "cpu:gloo,cuda:nccl".
Garbage is NaN, so that it is found wherever it gets to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils._pytree import tree_leaves, tree_map

from tests.queued_device.queue import DEVICE
from tests.queued_device.tensor import QueuedTensor, on_host

BACK_END = "queued"
_FIRST_POLL_S = 0.00005
_POLL_S = 0.005


def register(directory: Path) -> None:
    """Make "queued" a back end of this process.

    Args:
        directory: a directory that all ranks see and nobody else uses; by files in it a rank
            learns that a peer has aborted.
    """

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        return QueuedProcessGroup(store, rank, size, directory)

    dist.Backend.register_backend(BACK_END, create, devices=["cpu"])


class QueuedProcessGroup(dist.ProcessGroup):
    """A process group of queued tensors; those of the host go through gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, directory: Path) -> None:
        super().__init__(rank, size)
        self._rank = rank
        # One file for each group: all its ranks take the name that the first of them has set.
        name = store.compare_set("name", "", f"{time.monotonic_ns()}-{rank}").decode()
        self._aborts = directory / name
        self._aborts.mkdir(parents=True, exist_ok=True)
        self._is_aborted = threading.Event()
        _wait_for_all(store, rank, size)
        self._of_host = _gloo(store, "host", rank, size)
        self._of_device = _gloo(store, "device", rank, size)

    def getBackendName(self) -> str:
        return BACK_END

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._call("allreduce", tensors, (tensors,), opts or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._call("broadcast", tensors, (tensors,), opts or dist.BroadcastOptions())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._call("allgather", outputs, (outputs, inputs), opts or dist.AllgatherOptions())

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        options = opts or dist.AllgatherOptions()
        return self._call("_allgather_base", output, (output, input), options)

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        options = opts or dist.ReduceScatterOptions()
        return self._call("_reduce_scatter_base", output, (output, input), options)

    def barrier(self, opts: Any = None) -> Any:
        return self._of_host.barrier(opts or dist.BarrierOptions())

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        return self._of_host.send(tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        return self._of_host.recv(tensors, peer, tag)

    def lose_result(self, tensor: torch.Tensor) -> None:
        """Make the device wait as for a collective whose last data never arrive."""

        def wait() -> None:
            self._wait_for_abort(lambda: False)
            on_host(tensor).fill_(float("nan"))

        DEVICE.enqueue(wait)

    def abort(self) -> None:
        """End the collectives that wait, here and possibly at peers, and leave garbage."""
        (self._aborts / str(self._rank)).touch()
        self._is_aborted.set()

    def shutdown(self) -> None:
        return

    def _call(self, name: str, outputs: Any, tensors: Sequence[Any], options: Any) -> Any:
        if not any(isinstance(tensor, QueuedTensor) for tensor in tree_leaves(tensors)):
            return getattr(self._of_host, name)(*tensors, options)
        if self._is_aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._rank}.")
        host_tensors = tree_map(_unwrapped, tensors)
        host_outputs = tree_leaves(tree_map(_unwrapped, outputs))
        operation = getattr(self._of_device, name)
        DEVICE.enqueue(
            lambda: self._perform(lambda: operation(*host_tensors, options), host_outputs)
        )
        return _completed_work(outputs) if options.asyncOp else None

    def _perform(self, operation: Callable[[], Any], outputs: Sequence[torch.Tensor]) -> None:
        if not self._is_aborted.is_set():
            work = operation()
            if self._wait_for_abort(work.is_completed) and _has_succeeded(work):
                return
            # A peer was lost, if this rank and no other has aborted.
            self._wait_for_abort(lambda: False)
        for output in outputs:
            output.fill_(float("nan"))

    def _wait_for_abort(self, is_over: Callable[[], bool]) -> bool:
        """Wait until this rank aborts, or a peer has, whose garbage comes here.

        Returns:
            Whether it was over before.
        """
        pause_s = _FIRST_POLL_S
        while not is_over():
            if self._is_aborted.is_set() or any(self._aborts.iterdir()):
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)
        return True


def _has_succeeded(work: Any) -> bool:
    try:
        return bool(work.wait())
    except RuntimeError:
        return False


def _gloo(store: dist.Store, name: str, rank: int, size: int) -> dist.ProcessGroup:
    prefixed = dist.PrefixStore(name, store)
    group = dist.ProcessGroup(prefixed, rank, size)
    back_end = dist.ProcessGroupGloo(prefixed, rank, size, timedelta(days=1))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, back_end)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._set_group_name(f"queued-{name}")
    return group


def _wait_for_all(store: dist.Store, rank: int, size: int) -> None:
    """Wait until all ranks have called this, as NCCL's bootstrap does: for ever, if need be."""
    arrived = 0
    store.add("arrived", 1)
    while arrived < size:
        try:
            arrived = store.add("arrived", 0)
        except RuntimeError:
            # The store is gone. NCCL's sockets do not use it.
            threading.Event().wait()
        time.sleep(_POLL_S)


def _unwrapped(value: Any) -> Any:
    return on_host(value) if isinstance(value, QueuedTensor) else value


def _completed_work(outputs: Any) -> dist.Work:
    """Return a Work whose `wait` returns at once: what is enqueued later comes after it."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(outputs)
    return _create_work_from_future(future)
