"""Asks the snapshot servers of a snapshot's holders, several at a time, to plan a checkpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.snapshot.memory.messages import (
    PlanPending,
    PlanReply,
    PlanRequest,
    RankHolder,
)

_PARALLEL_SERVERS = 8

# How long to wait for one planner. Its agent begins the attempt within moments; its server may be
# at work on a chunk of an attempt that was given up.
_PLANNER_LIMIT_S = 120.0

Stop = Callable[[], bool]
"""Whether the attempt is given up."""

_Result = TypeVar("_Result")
_ReplyT = TypeVar("_ReplyT", bound=PlanReply)


class PlanServer(Protocol):
    """A snapshot server, as others plan with it: a `SnapshotClient`, or this one's own answers."""

    def answer_plan(self, request: PlanRequest) -> tuple[PlanReply, bytes | bytearray]:
        """Return the reply to a request, and its payload. Raises CheckpointError."""

    def close(self) -> None:
        """End the connection."""


@dataclass(frozen=True, slots=True)
class HolderServer:
    """The server of one holder, for one thread.

    Attributes:
        number: the holder's number in the task.
        holder: its address, and its ranks.
        server: the connection to it.
        is_over: whether to give up.
    """

    number: int
    holder: RankHolder
    server: PlanServer
    is_over: Stop

    def ask(
        self, request: PlanRequest, *expected: type[_ReplyT]
    ) -> tuple[_ReplyT, bytes | bytearray]:
        """Return the reply to a request and its payload, once it is no longer pending.

        Raises:
            SnapshotUnavailable: the server is gone, refused, or did not plan its share in time; or
                the attempt is given up.
        """
        deadline_s = time.monotonic() + _PLANNER_LIMIT_S
        reply, payload = self.server.answer_plan(request)
        while isinstance(reply, PlanPending):
            if self.is_over():
                raise _given_up()
            if time.monotonic() > deadline_s:
                raise SnapshotUnavailable(
                    f"the snapshot server at {self.holder.address} did not plan its share within "
                    f"{_PLANNER_LIMIT_S:.0f} s: its node is slow, or its agent has not begun to "
                    "store the snapshot"
                )
            reply, payload = self.server.answer_plan(request)
        if not isinstance(reply, expected):
            raise SnapshotUnavailable(
                f"the snapshot server at {self.holder.address} answered {type(request).__name__} "
                f"by {type(reply).__name__}; run one version of keepstep on all nodes"
            )
        return reply, payload

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise SnapshotUnavailable where what the server sent cannot be read."""
        try:
            yield
        except (
            msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError, RecursionError
        ) as error:  # fmt: skip
            raise SnapshotUnavailable(
                f"the snapshot server at {self.holder.address} sent a plan that cannot be read "
                f"({error!r:.200}); run one version of keepstep on all nodes"
            ) from error


class HolderServers:
    """Asks the servers of all holders.

    Args:
        own: this node's server.
        connect: connects to another node's.
    """

    def __init__(self, own: PlanServer, connect: Callable[[str], PlanServer]) -> None:
        self._own = own
        self._connect = connect

    def of_all(
        self, holders: Sequence[RankHolder], read: Callable[[HolderServer], _Result], stop: Stop
    ) -> list[_Result]:
        """Return what `read` returns for each holder, in any order; after a failure all give up.

        A server begins with itself, so that not all ask the same one at the same time.
        """
        first = next((n for n, holder in enumerate(holders) if holder.address is None), 0)
        has_failed = threading.Event()

        def is_over() -> bool:
            return has_failed.is_set() or stop()

        def read_one(number: int) -> _Result:
            if is_over():
                raise _given_up()
            holder = holders[number]
            if holder.address is None:
                return read(HolderServer(number, holder, self._own, is_over))
            server = self._connect(holder.address)
            try:
                return read(HolderServer(number, holder, server, is_over))
            finally:
                server.close()

        if len(holders) == 1:
            return [read_one(0)]
        with ThreadPoolExecutor(_PARALLEL_SERVERS) as pool:
            order = [*range(first, len(holders)), *range(first)]
            futures = [pool.submit(read_one, number) for number in order]
            done, pending = wait(futures, return_when=FIRST_EXCEPTION)
            if pending:
                has_failed.set()
            for future in done:
                future.result()
            return [future.result() for future in futures]


def _given_up() -> SnapshotUnavailable:
    return SnapshotUnavailable("this attempt was given up, or its generation is over")
