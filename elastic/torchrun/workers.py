"""Supervises the workers of one node that torchrun starts and ends.

A `TorchrunWorker` is what `Worker` is, of a process that is no child of this code: it comes by a
socket once its script has called `keepstep.attach`. The processes of other scripts never come.
torchrun says when all have ended, by asking for the next round; until then `restart_is_due` asks it
to end them. Its --max-restarts counts their failures, so that those are here of kind `restart`,
which no budget of the job counts.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from keepstep.elastic.agent.supervisor import Worker, WorkerEvent
from keepstep.elastic.agent.worker_group import WorkerGroup
from keepstep.elastic.rendezvous.records import FailureKind
from keepstep.elastic.worker.messages import (
    PROTOCOL,
    AbortOrdered,
    AgentMessage,
    Assignment,
    CloseGeneration,
    Command,
    CommandKind,
)
from keepstep.monitor.progress import ProgressBoard
from keepstep.transport import StreamConnection

COMMAND = Command(CommandKind.SCRIPT, "the script")
_ASK_S = 5.0
"""How long a process that has connected may take to say its rank."""
_CREDENTIALS = struct.Struct("3i")


class TorchrunWorker(Worker):
    """One worker of a generation, whose process may come later, or never.

    Args:
        assignment: its place in the generation.
        on_event: as for `Worker`.
    """

    def __init__(self, assignment: Assignment, on_event: Callable[[WorkerEvent], None]) -> None:
        agent_end, self._worker_end = socket.socketpair()
        super().__init__(
            StreamConnection.over_pair(agent_end, PROTOCOL.server, "a worker process"),
            ProgressBoard.create("worker"),
            on_event,
        )
        self.assignment = assignment
        self.is_warm = True

    @property
    def can_write(self) -> bool:
        """Whether it may still write in its generation: its process waits for its end."""
        return self.is_alive

    async def take_process(self, asking: socket.socket, pid: int) -> None:
        """Give a process the connection and the board that were made for it.

        Args:
            asking: the process is at its other end.
            pid: the process's id.
        """
        socket.send_fds(asking, [b"."], [self._worker_end.fileno(), self.board.descriptor])
        self._worker_end.close()
        with suppress(ProcessLookupError):  # It has ended already, and torchrun says so.
            self._begin(pid)
        assert self.assignment is not None
        await self.assign(self.assignment, None)

    def end(self, code: int) -> None:
        """Take note that torchrun has ended the process, or has found that it ended."""
        self._worker_end.close()
        if self.is_alive:
            self.is_stopping = True
            self._note_exit(code)

    async def stop(self, grace_s: float) -> None:
        """Ask torchrun to end the process, and return when it has."""
        self.is_stopping = True
        await self._exited.wait()
        self.close()

    def _kill_all(self) -> None:
        if self.pid:
            super()._kill_all()

    def _reap(self) -> None:
        """Take note of the exit, unless torchrun has reaped the process and knows more."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        with suppress(ChildProcessError):
            ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None and self.is_alive:
                is_exit = ended.si_code == os.CLD_EXITED
                self._note_exit(ended.si_status if is_exit else -ended.si_status)
        os.close(self._pidfd)


@dataclass(frozen=True, slots=True)
class Place:
    """This node's place in a round.

    Attributes:
        generation: the round's number.
        rank: of this node.
        size: number of nodes.
        store_host, store_port: where the round's torch store is served, by rank 0.
        listening: the socket at which this node serves it, which the owner closes; None: another
            node does.
    """

    generation: int
    rank: int
    size: int
    store_host: str
    store_port: int
    listening: socket.socket | None


class TorchrunWorkers(WorkerGroup):
    """The workers of one node.

    Args:
        node: the node's name.
        size: how many workers a generation has on this node.
        wake: called after every change.

    Attributes:
        entered: set when `take_place` has something to return.
    """

    def __init__(self, node: str, size: int, wake: Callable[[], None]) -> None:
        super().__init__(COMMAND, size, 0, {}, wake)
        self._node = node
        self._place: Place | None = None
        self.entered = asyncio.Event()

    @property
    def warm(self) -> bool:
        """Whether a generation can begin: torchrun starts its processes then."""
        return True

    @property
    def is_draining(self) -> bool:
        """Whether the generation ends here."""
        return self._is_draining

    @property
    def restart_is_due(self) -> bool:
        """Whether torchrun is to end the workers, and to ask for the next round.

        Not while a script that has failed still ends by itself: torchrun counts that failure.
        """
        alive = [worker for worker in self.workers.values() if worker.is_alive]
        return bool(alive) and all(
            worker.is_stopping or (self._is_draining and worker.has_drained) for worker in alive
        )

    def warm_up(self) -> None:
        """Start nothing: torchrun does."""

    def start_spares(self) -> None:
        """Start nothing: torchrun does."""

    async def enter(
        self, assignments: Sequence[Assignment], store_descriptor: int | None = None
    ) -> None:
        """Let torchrun start the workers of a new generation; those of the last one have ended."""
        first = assignments[0]
        self._begin(first.generation)
        self.workers = {
            local_rank: TorchrunWorker(assignment, self._on_worker_event)
            for local_rank, assignment in enumerate(assignments)
        }
        listening = None
        if store_descriptor is not None:
            listening = socket.socket(fileno=os.dup(store_descriptor))
        self._drop_place()
        self._place = Place(
            generation=first.generation,
            rank=first.node_rank,
            size=first.node_count,
            store_host=first.store_host,
            store_port=first.store_port,
            listening=listening,
        )
        self.entered.set()

    def take_place(self) -> Place | None:
        """Return the place in a generation that was entered since the last call, if any."""
        place, self._place = self._place, None
        self.entered.clear()
        return place

    def worker_of(self, rank: int) -> TorchrunWorker | None:
        """Return the worker of a rank whose process has not come; None if there is none."""
        return next(
            (
                worker
                for worker in self.workers.values()
                if isinstance(worker, TorchrunWorker)
                and worker.rank == rank
                and worker.is_alive
                and not worker.pid
            ),
            None,
        )

    def end(self, code: int, up_to: int | None = None) -> None:
        """Take note that all processes have ended; a code above 0: one of them has failed.

        Args:
            code: their exit status.
            up_to: the newest generation of which torchrun had started any; None: the present one.
        """
        alive = [worker for worker in self.workers.values() if worker.is_alive]
        for worker in alive:
            assert isinstance(worker, TorchrunWorker)
            assert worker.assignment is not None
            generation = worker.assignment.generation
            if up_to is not None and generation > up_to:
                continue
            if code and generation == self.generation and not self._is_draining:
                self._record_failure(FailureKind.RESTART, f"workers on {self._node} have failed")
            worker.end(code)
        self._wake()

    async def broadcast(self, message: AgentMessage) -> None:
        """Send a message to every worker that has attached; the order to abort ends all."""
        await super().broadcast(message)
        if isinstance(message, AbortOrdered):
            self._end_by_torchrun()

    async def stop(self, grace_s: float) -> None:
        """Return when torchrun has ended all workers."""
        await asyncio.gather(*(worker.stop(grace_s) for worker in self.workers.values()))
        self.workers = {}
        self._drop_place()

    async def _begin_drain(self, *, abort: bool) -> None:
        for worker in self.workers.values():
            if worker.has_joined and worker.is_alive:
                await worker.send(CloseGeneration(generation=self.generation, aborts=abort))
        # Those that have not attached do not drain, and torchrun ends all of them or none.
        has_attached = all(worker.has_joined for worker in self.workers.values())
        if not has_attached or (abort and not self.awaits_abort_order):
            self._end_by_torchrun()

    def _end_by_torchrun(self) -> None:
        for worker in self.workers.values():
            worker.is_stopping |= not worker.is_ending

    def _note_exit(self, worker: Worker, code: int, place: str = "") -> bool:
        return code != 0 and super()._note_exit(worker, code, place)

    def _record_failure(
        self, kind: FailureKind, message: str, rank: int | None = None, error: str = ""
    ) -> None:
        if kind in (FailureKind.WORKER, FailureKind.FATAL):
            kind = FailureKind.RESTART
            if self.failure is not None and self.failure.kind is FailureKind.PEER:
                self.failure = None  # A cause replaces it, as in any group.
        super()._record_failure(kind, message, rank)

    def _drop_place(self) -> None:
        place, self._place = self._place, None
        if place is not None and place.listening is not None:
            place.listening.close()


class WorkerSocket:
    """The socket at which processes ask for the connections of their ranks. `close` ends it.

    Args:
        path: in a private directory.
        workers: whose processes they are.
    """

    def __init__(self, path: Path, workers: TorchrunWorkers) -> None:
        self._workers = workers
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(str(path))
        self._listening.listen(1024)
        self._listening.setblocking(False)
        self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """Stop listening."""
        self._serving.cancel()
        await asyncio.wait([self._serving])
        self._listening.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as answering:
            while True:
                asking, _ = await loop.sock_accept(self._listening)
                answering.create_task(self._answer(asking))

    async def _answer(self, asking: socket.socket) -> None:
        """Answer one process; one that is not expected finds the connection closed."""
        with asking, suppress(OSError, TimeoutError, ValueError):
            pid, uid, _ = _CREDENTIALS.unpack(
                asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            async with asyncio.timeout(_ASK_S):
                rank = int(await asyncio.get_running_loop().sock_recv(asking, 64))
            worker = self._workers.worker_of(rank)
            if uid == os.getuid() and worker is not None:
                await worker.take_process(asking, pid)
