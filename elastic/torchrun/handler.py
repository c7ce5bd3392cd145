"""Implements torchrun's rendezvous over the job's generations in etcd.

torchrun calls from its own thread and blocks; the membership runs on an event loop in another one.
Each round has a torch store of its own, which the agent of rank 0 serves, and from which torchrun
numbers the workers; a round is entered once all of its nodes have reached that store. Until then an
agent of torchrun would wait for a lost node's entry in it, and look at nothing else.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
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

from keepstep.elastic.agent.node_name import own_node_name
from keepstep.elastic.agent.own_host import own_host
from keepstep.elastic.errors import ElasticError, StoreUnavailable, UsageError
from keepstep.elastic.store.credentials import Credentials
from keepstep.elastic.store.etcd import EtcdStore
from keepstep.elastic.torchrun.round_member import Place, RoundMember
from keepstep.elastic.torchrun.rounds import Closed, TimedOut, result_of
from keepstep.elastic.torchrun.settings import Settings, parse_settings
from keepstep.log_format import log_to_stderr_unless_configured
from keepstep.private_files import NotPrivate

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
        )
    except UsageError as error:
        raise ValueError(str(error)) from None
    return KeepstepRendezvous(settings)


class KeepstepRendezvous(RendezvousHandler):
    """The rendezvous of one torchrun agent. See `RendezvousHandler` for what torchrun calls."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._thread: _LoopThread | None = None
        self._member: RoundMember | None = None
        self._etcd: EtcdStore | None = None
        self._held = ExitStack()
        self._place: Place | None = None
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
            member = self._member or self._start()
            while True:
                place = self._run(member.enter())
                match place:
                    case Closed(reason):
                        raise RendezvousClosedError(f"job {self._settings.job}: {reason}")
                    case TimedOut(reason):
                        raise RendezvousTimeoutError(f"job {self._settings.job}: {reason}")
                store = _unless_over(
                    lambda place=place: self._entered_store(member, place),  # type: ignore[misc]
                    lambda place=place: member.may_enter(place.generation),  # type: ignore[misc]
                )
                if store is not None:
                    break
            self._run(member.begin_work())
        self._place = place
        return RendezvousInfo(
            store,
            place.rank,
            place.size,
            RendezvousStoreInfo(place.store_host, place.store_port),
        )

    def num_nodes_waiting(self) -> int:
        """Return a number above 0 if the workers have to be started again, in another round."""
        member, place = self._member, self._place
        if member is None or place is None:
            return 0
        waiting = member.nodes_waiting(place.generation)
        if waiting and place.generation != self._reported:
            self._reported = place.generation
            log.warning("the workers here are stopped: %s", member.reason_to_restart())
        return waiting

    def is_closed(self) -> bool:
        """Return whether the job has ended."""
        return self._member is not None and self._member.view.result is not None

    def set_closed(self) -> None:
        """End the job for all nodes."""
        if self._member is not None:
            self._run(self._member.end_job(result_of(self._member.node, None)))

    def shutdown(self) -> bool:
        """End the job for all nodes if this node takes part in it, and leave it."""
        # torchrun calls this while the error that ends its agent, if any, is on its way.
        error = sys.exception()
        try:
            if self._member is not None and self._place is not None:
                self._run(self._member.end_job(result_of(self._member.node, error)))
            self._leave()
        except ElasticError as failed:
            log.warning("this node has not left job %s in order: %s", self._settings.job, failed)
            return False
        return True

    def _start(self) -> RoundMember:
        """Connect to etcd, and open the ports of this node."""
        settings = self._settings
        self._thread = _LoopThread()
        # After SIGTERM torchrun does not call `shutdown`.
        atexit.register(self._leave_at_exit)
        credentials = Credentials.for_address(settings.coordinator, settings.environment)
        host = own_host(settings.coordinator, settings.local_addr)
        try:
            node = self._held.enter_context(own_node_name(settings.job))
            self._etcd = self._run(
                EtcdStore.connect(
                    settings.coordinator, deadline_s=_CONNECT_S, credentials=credentials
                )
            )
            self._member = self._run(RoundMember.open(settings, self._etcd, node, host))
        except (NotPrivate, OSError) as error:
            raise UsageError(f"this node cannot be named, or reached by others: {error}") from error
        return self._member

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
        if self._member is not None:
            self._run(self._member.leave())
        if self._etcd is not None:
            self._run(self._etcd.close())
        self._thread.stop()
        self._held.close()
        self._thread = self._member = self._etcd = None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._thread is not None, "started before"
        return self._thread.run(work)

    def _entered_store(self, member: RoundMember, place: Place) -> Store | None:
        """Return the round's torch store once all nodes have reached it; None if it ends before."""
        store = self._store_of(member, place)
        return store if store is not None and _have_all_entered(member, place, store) else None

    def _store_of(self, member: RoundMember, place: Place) -> Store | None:
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
        while member.may_enter(place.generation):
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


def _have_all_entered(member: RoundMember, place: Place, store: Store) -> bool:
    """Wait until all nodes of a round have reached its store; False if the round ends before."""
    pause_s = _POLL_S
    try:
        store.add(_ENTERED, 1)
        while member.may_enter(place.generation):
            if store.add(_ENTERED, 0) >= place.size:
                store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
                return True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_POLL_S)
    except DistError as error:
        log.debug("the torch store of round %d is gone: %s", place.generation, error)
    return False


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

    def stop(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
