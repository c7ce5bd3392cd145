"""Implements torchrun's rendezvous over the job's generations in etcd.

torchrun calls from its own thread and blocks; `TorchrunNode` runs on an event loop in another one.
Each round has a torch store of its own, which the agent of rank 0 serves, and from which torchrun
numbers the workers; a round is entered once all of its nodes have reached that store. Until then an
agent of torchrun would wait for a lost node's entry in it, and look at nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from signal import SIGTERM
from typing import Any, TypeVar

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.snapshot.isal import isal
from keepstep.elastic.agent.node_name import own_node_name
from keepstep.elastic.agent.own_host import own_host
from keepstep.elastic.errors import ElasticError, StoreUnavailable, UsageError
from keepstep.elastic.store.credentials import Credentials
from keepstep.elastic.store.etcd import EtcdStore
from keepstep.elastic.torchrun.command_line import local_workers
from keepstep.elastic.torchrun.node import TorchrunNode
from keepstep.elastic.torchrun.rounds import Closed, TimedOut, result_of
from keepstep.elastic.torchrun.settings import Settings, parse_settings
from keepstep.elastic.torchrun.workers import Place
from keepstep.log_format import log_to_stderr_unless_configured
from keepstep.private_files import NotPrivate, run_directory

log = logging.getLogger("keepstep")

T = TypeVar("T")

_CONNECT_S = 10.0
_STORE_CONNECT_S = 5.0
_STORE_TIMEOUT_S = 300.0
"""How long an agent waits for an entry of the torch store, as torchrun's own back ends have it."""
_ENTERED = "keepstep/entered"
_POLL_S, _MOST_POLL_S = 0.005, 0.1


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the rendezvous of a job; nothing is connected to before the first round.

    Raises:
        ValueError: an option is missing, unknown or invalid.
    """
    log_to_stderr_unless_configured()
    try:
        settings = parse_settings(
            parameters.endpoint,
            parameters.run_id,
            (parameters.min_nodes, parameters.max_nodes),
            parameters.local_addr,
            parameters.config,
            os.environ,
            local_workers(parameters.run_id),
        )
        if settings.policy.parity:
            # Else the first failure that needs it would be the first to say that it is missing.
            isal()
    except (UsageError, CheckpointError) as error:
        raise ValueError(str(error)) from None
    if settings.workers is None:
        log.warning(
            "nothing is kept in memory: how many workers torchrun starts here is not on its "
            "command line; give --rdzv-conf nproc=N"
        )
    return KeepstepRendezvous(settings)


class KeepstepRendezvous(RendezvousHandler):
    """The rendezvous of one torchrun agent. See `RendezvousHandler` for what torchrun calls."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._thread: _LoopThread | None = None
        self._node: TorchrunNode | None = None
        self._etcd: EtcdStore | None = None
        self._held = ExitStack()
        self._place: Place | None = None
        self._watch: asyncio.Task[None] | None = None
        self._reported = 0

    def get_backend(self) -> str:
        """Return the name of this back end."""
        return "keepstep"

    def get_run_id(self) -> str:
        """Return the job's name."""
        return self._settings.job

    @property
    def use_agent_store(self) -> bool:
        """Let workers use the round's torch store: it is another one in each round."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next round; the workers of the last one have ended."""
        self._place = None
        with _torch_errors():
            while True:
                place = self._next_place()
                store = _unless_over(partial(self._entered_store, place),
                                     partial(self._may_enter, place))  # fmt: skip
                if store is not None:
                    break
        self._place = place
        return RendezvousInfo(
            store,
            place.rank,
            place.size,
            RendezvousStoreInfo(place.store_host, place.store_port),
        )

    def _next_place(self) -> Place:
        node = self._node or self._start()
        match self._run(node.enter()):
            case Closed(reason):
                raise RendezvousClosedError(f"job {self._settings.job}: {reason}")
            case TimedOut(reason):
                raise RendezvousTimeoutError(f"job {self._settings.job}: {reason}")
            case place:
                return place

    def num_nodes_waiting(self) -> int:
        """Return a number above 0 if the workers have to be started again, in another round."""
        place = self._place
        reason = self._reason_to_restart(place) if place is not None else ""
        if place is not None and reason and place.generation != self._reported:
            self._reported = place.generation
            log.warning("the workers here are stopped: %s", reason)
        return int(bool(reason))

    def is_closed(self) -> bool:
        """Return whether the job has ended."""
        return self._node is not None and self._run(self._node.has_ended())

    def set_closed(self) -> None:
        """End the job for all nodes."""
        if self._node is not None:
            self._run(self._node.end_job(result_of(self._node.name, None)))

    def shutdown(self) -> bool:
        """End the job for all nodes if this node takes part in it, and leave it.

        After success it returns once the workers of all nodes have finished.
        """
        # torchrun calls this while the error that ends its agent, if any, is on its way.
        error = sys.exception()
        try:
            if self._node is not None and self._place is not None:
                self._run(self._node.finish(self._place.generation, error))
            self._leave()
        except ElasticError as failed:
            log.warning("this node has not left job %s in order: %s", self._settings.job, failed)
            return False
        return True

    def _start(self) -> TorchrunNode:
        """Connect to etcd, and open the ports of this node."""
        settings = self._settings
        self._thread = _LoopThread()
        # After SIGTERM torchrun does not call `shutdown`. Not by `atexit`, which comes after the
        # end of executors, and with them of `asyncio.to_thread`.
        threading._register_atexit(self._leave_at_exit)  # type: ignore[attr-defined]
        credentials = Credentials.for_address(settings.coordinator, settings.environment)
        host = own_host(settings.coordinator, settings.local_addr)
        try:
            name = self._held.enter_context(own_node_name(settings.job))
            directory = self._held.enter_context(run_directory())
            self._etcd = self._run(
                EtcdStore.connect(
                    settings.coordinator, deadline_s=_CONNECT_S, credentials=credentials
                )
            )
            self._node = self._run(TorchrunNode.open(settings, self._etcd, name, host, directory))
        except (NotPrivate, OSError) as error:
            raise UsageError(f"this node cannot be named, or reached by others: {error}") from error
        os.environ.update(self._node.environment)
        if settings.notices != "off":
            self._run(self._follow_notices())
        return self._node

    async def _follow_notices(self) -> None:
        from keepstep.elastic.cloud.watch import start_watch

        # torchrun's own answer to SIGTERM: its workers end, and this node leaves the job.
        self._watch = start_watch(
            self._settings.notices, self._settings.grace_s, partial(os.kill, os.getpid(), SIGTERM)
        )

    def _leave_at_exit(self) -> None:
        try:
            self._leave()
        except ElasticError as error:
            log.warning("the lease of this node ends by itself: %s", error)

    def _leave(self) -> None:
        """Leave the job; the others go on, unless it was ended before."""
        self._place = None
        if self._thread is None:
            return
        if self._watch is not None:
            self._thread.call(self._watch.cancel)
        if self._node is not None:
            self._run(self._node.leave())
            for name in self._node.environment:
                os.environ.pop(name, None)
        if self._etcd is not None:
            self._run(self._etcd.close())
        self._thread.stop()
        self._held.close()
        self._thread = self._node = self._etcd = self._watch = None

    def _reason_to_restart(self, place: Place) -> str:
        return self._run(self._node.reason_to_restart(place.generation)) if self._node else ""

    def _may_enter(self, place: Place) -> bool:
        return not self._reason_to_restart(place)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._thread is not None, "started before"
        return self._thread.run(work)

    def _entered_store(self, place: Place) -> Store | None:
        """Return the round's torch store once all nodes have reached it; None if it ends before."""
        store = self._store_of(place)
        return store if store is not None and self._have_all_entered(place, store) else None

    def _store_of(self, place: Place) -> Store | None:
        """Serve the round's torch store, or connect to it; None if the round ends before.

        Raises:
            UsageError: it cannot be reached for as long as a round may take to come about.
        """
        timeout = timedelta(seconds=_STORE_CONNECT_S)
        host, port = place.store_host, place.store_port
        if place.listening is not None:
            descriptor = place.listening.detach()
            return TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=timeout,
                master_listen_fd=descriptor,
            )  # fmt: skip
        until_s = time.monotonic() + self._settings.policy.quorum_timeout_s
        while self._may_enter(place):
            try:
                return TCPStore(host, port, is_master=False, timeout=timeout)
            except DistError as error:
                if time.monotonic() >= until_s:
                    raise UsageError(
                        f"the torch store of the round cannot be reached at {host}:{port} "
                        f"({error}); see whether a firewall is in between, and give each node "
                        "--local-addr with an address that others reach"
                    ) from None
        return None

    def _have_all_entered(self, place: Place, store: Store) -> bool:
        """Wait until all nodes of a round have reached its store; False if it ends before."""
        pause_s = _POLL_S
        try:
            store.add(_ENTERED, 1)
            while self._may_enter(place):
                if store.add(_ENTERED, 0) >= place.size:
                    store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
                    return True
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_POLL_S)
        except DistError as error:
            log.debug("the torch store of round %d is gone: %s", place.generation, error)
        return False


def _unless_over(act: Callable[[], T | None], goes_on: Callable[[], bool]) -> T | None:
    """Return what a function returns; None if it has not returned when something is over.

    It runs in a thread of its own, which is then left behind: the kernel of a frozen machine still
    accepts connections, and a torch store waits for the first answers without a limit.
    """
    future: Future[T | None] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=run, name="keepstep-torch-store", daemon=True).start()
    while goes_on():
        with suppress(TimeoutError):
            return future.result(_MOST_POLL_S)
    return None


@contextmanager
def _torch_errors() -> Iterator[None]:
    """Raise errors as those that torchrun knows."""
    try:
        yield
    except StoreUnavailable as error:
        raise RendezvousConnectionError(str(error)) from None
    except ElasticError as error:
        raise RendezvousStateError(str(error)) from None


class _LoopThread:
    """A thread that runs an event loop until `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="keepstep-rendezvous", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result.

        A signal whose handler raises ends the wait, and the coroutine with it.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def call(self, function: Callable[[], object]) -> None:
        """Let the loop call a function soon."""
        self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
