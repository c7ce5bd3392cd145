"""Reads what the snapshot servers of a snapshot's holders have to plan with, several at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.checkpoint.snapshot.memory.messages import RankHolder, ReadPlan
from keepstep.checkpoint.snapshot.server.plan_outbox import PlanOutbox

_PARALLEL_SERVERS = 8

# How long to wait for one server. Its agent begins the attempt within moments; its thread may be at
# work on a chunk of an attempt that was given up, or remove older checkpoints.
_SERVER_LIMIT_S = 600.0

Stop = Callable[[], bool]
"""Whether the attempt is given up."""


class HolderServers:
    """Reads from the servers of all holders.

    Args:
        own: what this node's server has.
        connect: connects to another node's.
    """

    def __init__(self, own: PlanOutbox, connect: Callable[[str], SnapshotClient]) -> None:
        self._own = own
        self._connect = connect

    def read_all(self, holders: Sequence[RankHolder], request: ReadPlan, stop: Stop) -> list[bytes]:
        """Return what each holder's server has; after a failure all give up.

        A server begins with itself, so that not all ask the same one at the same time.

        Raises:
            SnapshotUnavailable: a server is gone, refused, or did not come to this stage in time;
                or the attempt is given up.
        """
        first = next((n for n, holder in enumerate(holders) if holder.address is None), 0)
        has_failed = threading.Event()

        def is_over() -> bool:
            return has_failed.is_set() or stop()

        def read(number: int) -> bytes:
            address = holders[number].address
            if is_over():
                raise _given_up()
            if address is None:
                return _read_one("this node", self._own.read_plan, request, is_over)
            with closing(self._connect(address)) as server:
                return _read_one(address, server.read_plan, request, is_over)

        with ThreadPoolExecutor(_PARALLEL_SERVERS) as pool:
            order = [*range(first, len(holders)), *range(first)]
            futures = {number: pool.submit(read, number) for number in order}
            done, pending = wait(futures.values(), return_when=FIRST_EXCEPTION)
            if pending:
                has_failed.set()
            for future in done:
                future.result()
            return [futures[number].result() for number in range(len(holders))]


def _read_one(
    address: str, read: Callable[[ReadPlan], bytes | None], request: ReadPlan, is_over: Stop
) -> bytes:
    deadline_s = time.monotonic() + _SERVER_LIMIT_S
    while (message := read(request)) is None:
        if is_over():
            raise _given_up()
        if time.monotonic() > deadline_s:
            raise SnapshotUnavailable(
                f"the snapshot server at {address} did not plan its share within "
                f"{_SERVER_LIMIT_S:.0f} s: its node is slow, or its agent has not begun to store "
                "the snapshot"
            )
    return message


def _given_up() -> SnapshotUnavailable:
    return SnapshotUnavailable("this attempt was given up, or its generation is over")
