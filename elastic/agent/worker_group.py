"""The workers of one node: who runs, who is spare, and how far they are with entering, running and draining a generation.

No coordinator and no snapshot server in here: the agent tells the worker group what to do and reads from it how things stand. Every change calls
`wake`, upon which the agent looks again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from keepstep.elastic.agent.supervisor import (
    Worker,
    WorkerExit,
    WorkerReport,
    describe_exit,
    worker_environment,
)
from keepstep.elastic.errors import JobFailed
from keepstep.elastic.rendezvous.records import Failure, FailureKind, Generation, Member
from keepstep.elastic.worker.bootstrap import Command
from keepstep.elastic.worker.channel import Message
from keepstep.elastic.worker.session import Assignment

log = logging.getLogger("keepstep")

_PHASES = ("ready", "restored", "stepped")
_TERM_GRACE_S = 2.0
_SILENT_SETTLE_S = 10.0
_WARM_UP_FAILURES = 3


class WorkerGroup:
    """The worker processes of one node. `stop` ends all of them."""

    def __init__(
        self,
        command: Command,
        size: int,
        spares: int,
        environment: Mapping[str, str],
        wake: Callable[[], None],
    ) -> None:
        self._command = command
        self._size = size
        self._spares = spares
        self._environment = worker_environment(environment, size)
        self._wake = wake
        self._idle: list[Worker] = []
        self._idle_failures = 0
        self._stopping: set[asyncio.Task[None]] = set()
        self._draining = False
        self._entered_s = 0.0
        self._reports: dict[str, dict[int, Message]] = {}
        self._snapshot_intervals: dict[int, tuple[int, float]] = {}
        self._newest_step = 0
        self._member: Member | None = None
        self.generation = 0
        self.workers: dict[int, Worker] = {}
        self.failure: Failure | None = None
        self.drain_until_s: float | None = None
        self.checkpoint_url: str | None = None
        self.checkpoint_every: int | None = None
        self.snapshot_every = 0
        """After how many steps its workers have chosen to take snapshots; 0 if they were told."""
        self.snapshot_cost_s = 0.0

    @property
    def warm(self) -> bool:
        """Whether as many processes are ready as a generation needs."""
        return sum(worker.warm for worker in self._idle) >= self._size

    @property
    def done(self) -> bool:
        """Whether every worker of the generation has exited with success."""
        return len(self.workers) == self._size and all(w.code == 0 for w in self.workers.values())

    @property
    def running(self) -> bool:
        """Whether every worker has completed a step, or runs a script that does not report."""
        settled = time.monotonic() > self._entered_s + _SILENT_SETTLE_S
        return bool(self.workers) and all(
            rank in self._reports["stepped"] if worker.joined else settled
            for rank, worker in self.workers.items()
        )

    @property
    def finishing(self) -> bool:
        """Whether every worker has done its last step and waits for it to be safe."""
        return bool(self.workers) and all(w.finishing is not None for w in self.workers.values())

    @property
    def step(self) -> int:
        """The newest step that any worker has completed in this generation, dead ones included."""
        for worker in self.workers.values():
            self._read_progress(worker)
        return self._newest_step

    @property
    def restored_from(self) -> str:
        """Where the workers' state came from."""
        said = self._reports.get("restored", {}).values()
        return ", ".join(
            sorted({name for message in said for name in message["source"].split(", ")})
        )

    def times(self) -> dict[str, float]:
        """Wall-clock seconds at which the last worker reached each phase, for the phases that all have reached."""
        found = {
            phase: max(message["at_s"] for message in self._reports[phase].values())
            for phase in _PHASES
            if self.workers and len(self._reports.get(phase, {})) == len(self.workers)
        }
        if "restored" in found:
            found["resumed_step"] = max(
                message["step"] for message in self._reports["restored"].values()
            )
        return found

    def warm_up(self) -> None:
        """Have as many processes warm up as a generation needs, so that they are ready when the node's peers are.

        Raises:
            JobFailed: they end again and again before they are warm.
        """
        if self._idle_failures >= _WARM_UP_FAILURES:
            raise JobFailed(
                "worker processes end while they warm up; what they printed is above. Is PyTorch installed?"
            )
        while len(self._idle) < self._size:
            self._idle.append(self._start())

    def start_spares(self) -> None:
        """Start spare processes until there are as many as asked for, once the generation is at work."""
        if self.running and self._idle_failures < _WARM_UP_FAILURES and not self.finishing:
            while len(self._idle) < self._spares:
                self._idle.append(self._start())

    async def enter(
        self,
        generation: Generation,
        member: Member,
        descriptor: int | None,
        server: str,
        secret: str,
        job: str,
        max_restarts: int,
        failures_per_s: float,
    ) -> None:
        """Assign every worker of the node to its rank; those that drained go on, the others are replaced by spares."""
        self._begin(generation.generation)
        self._member = member
        node_rank = generation.members.index(member)
        for local_rank in range(self._size):
            worker = self.workers.get(local_rank)
            if worker is None or not worker.alive or not worker.drained:
                worker = self._idle.pop(0) if self._idle else self._start()
                self.workers[local_rank] = worker
            assignment = Assignment(
                generation=generation.generation,
                node=member.node,
                rank=member.first_rank + local_rank,
                world_size=generation.world_size,
                local_rank=local_rank,
                local_world_size=member.nproc,
                node_rank=node_rank,
                node_count=len(generation.members),
                store_host=generation.store_host,
                store_port=generation.store_port,
                server=server,
                secret=secret,
                job=job,
                max_restarts=max_restarts,
                resume=generation.resume,
                failures_per_s=failures_per_s,
            )
            await worker.assign(assignment, descriptor if local_rank == 0 else None)

    async def enter_as_spare(self, generation: int) -> None:
        """End all workers: the node has no place in this generation, but may have one in the next."""
        self._begin(generation)
        await self._end(list(self.workers.values()), _TERM_GRACE_S)
        self.workers.clear()
        self.warm_up()

    async def drain(self, abort: bool, limit_s: float) -> bool:
        """Have every worker stop writing; True once none can write any more.

        Args:
            abort: something broke: do not wait for the end of the step.
            limit_s: seconds after which workers that have not drained are killed.
        """
        until_s = time.monotonic() + limit_s
        if not self._draining or (
            abort and self.drain_until_s is not None and until_s < self.drain_until_s
        ):
            self._draining = True
            self.drain_until_s = until_s
            for worker in self.workers.values():
                if worker.joined:
                    await worker.send(
                        {"type": "closing", "generation": self.generation, "abort": abort}
                    )
                elif worker.alive and not worker.stopping:
                    self._end_soon(worker, _TERM_GRACE_S)
        assert self.drain_until_s is not None
        if time.monotonic() >= self.drain_until_s:
            for worker in self.workers.values():
                if worker.alive and not worker.drained and not worker.stopping:
                    log.warning(
                        "rank %s did not stop in %.0f s: killed", self._rank(worker), limit_s
                    )
                    self._end_soon(worker, 0.0)
        drained = all(not worker.alive or worker.drained for worker in self.workers.values())
        if drained:
            self.drain_until_s = None
        return drained

    async def broadcast(self, message: Message) -> None:
        """Send a message to every worker that has joined."""
        for worker in self.workers.values():
            if worker.joined and worker.alive:
                await worker.send(message)

    def restart(self, rank: int, reason: str) -> None:
        """Kill a rank's worker; what follows is what follows any crash.

        Does nothing if it is not there, was killed before, or has drained: then it is not the one that hung.
        """
        if self._member is None or rank not in self._member.ranks:
            return
        worker = self.workers.get(rank - self._member.first_rank)
        if (
            worker is None
            or not worker.alive
            or worker.stopping
            or worker.drained
            or worker.kill_reason
        ):
            return
        log.warning("rank %d is restarted: %s", rank, reason)
        worker.kill(reason)

    def fail(self, reason: str) -> None:
        """Record a failure of the node that is no worker's fault."""
        self._record_failure(Failure(FailureKind.WORKER, reason, time.time()))

    async def stop(self, grace_s: float) -> None:
        """End every process, spares too."""
        workers = [*self.workers.values(), *self._idle]
        self.workers, self._idle = {}, []
        await self._end(workers, grace_s)
        await asyncio.gather(*self._stopping)

    def _begin(self, generation: int) -> None:
        self.generation = generation
        self._entered_s = time.monotonic()
        self._reports = {phase: {} for phase in _PHASES}
        self._snapshot_intervals.clear()
        self._newest_step = 0
        self._draining = False
        self.drain_until_s = None
        self.failure = None

    def _start(self) -> Worker:
        return Worker.start(self._command, self._environment, self._on_worker_event)

    def _end_soon(self, worker: Worker, grace_s: float) -> None:
        task = asyncio.create_task(worker.stop(grace_s))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    @staticmethod
    async def _end(workers: list[Worker], grace_s: float) -> None:
        await asyncio.gather(*(worker.stop(grace_s) for worker in workers))

    def _rank(self, worker: Worker) -> int | None:
        return worker.assignment.rank if worker.assignment else None

    def _on_worker_event(self, report: WorkerReport | WorkerExit) -> None:
        match report:
            case WorkerReport(worker, message):
                self._on_message(worker, message)
            case WorkerExit(worker, code):
                self._on_exit(worker, code)
        self._wake()

    def _on_message(self, worker: Worker, message: Message) -> None:
        what = message["type"]
        if what == "warm":
            worker.warm = True
        elif what == "joined":
            worker.joined = True
            self.checkpoint_url = message["checkpoint_url"]
            self.checkpoint_every = message["checkpoint_every"]
            if self._draining:
                # It was being ended as a script that does not report; that goes on.
                log.debug("rank %s joined while its generation drains", self._rank(worker))
        elif what == "finishing":
            worker.finishing = message["step"]
        elif what == "failed":
            worker.traceback, worker.fatal = message["traceback"], message.get("fatal", False)
        elif what == "restart":
            worker.traceback = message["reason"]
            self._record_failure(
                Failure(
                    FailureKind.PEER,
                    f"rank {self._rank(worker)} starts over: {message['reason']}",
                    time.time(),
                )
            )
        elif message.get("generation") == self.generation:
            if what == "drained":
                worker.drained = True
            elif what == "broken":
                self._record_failure(
                    Failure(
                        FailureKind.PEER,
                        f"rank {self._rank(worker)}: {message['error']}",
                        time.time(),
                    )
                )
            elif what == "snapshot_interval":
                # The slowest to want one decides for all.
                self._snapshot_intervals[worker.pid] = (message["every"], message["cost_s"])
                self.snapshot_every, self.snapshot_cost_s = max(self._snapshot_intervals.values())
            elif what in _PHASES and worker.assignment is not None:
                self._reports[what][worker.assignment.local_rank] = message

    def _on_exit(self, worker: Worker, code: int) -> None:
        if worker in self._idle:
            self._idle.remove(worker)
            worker.close()
            if not worker.stopping:
                self._idle_failures += 1
                log.warning("a worker process %s while it warmed up", describe_exit(code))
            return
        self._read_progress(worker)
        if not worker.stopping and code != 0:
            where = f"rank {self._rank(worker)} on {self._member.node if self._member else '?'}"
            text = f"{where} {f'was restarted: {worker.kill_reason}' if worker.kill_reason else describe_exit(code)}"
            if worker.traceback:
                text = f"{text}\n{worker.traceback.rstrip()}"
            kind = FailureKind.FATAL if worker.fatal else FailureKind.WORKER
            self._record_failure(Failure(kind, text, time.time(), self._rank(worker)))
        worker.close()

    def _read_progress(self, worker: Worker) -> None:
        progress = worker.board.read()
        if progress is not None and progress.generation == self.generation:
            self._newest_step = max(self._newest_step, progress.step)

    def _record_failure(self, failure: Failure) -> None:
        """Keep the first failure of a generation, but let a worker's failure stand before a broken collective."""
        if self.failure is None or (
            self.failure.kind is FailureKind.PEER and failure.kind is not FailureKind.PEER
        ):
            self.failure = failure
