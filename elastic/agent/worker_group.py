"""Runs the workers of one node: starts, assigns, drains, replaces and ends them, and keeps spares.

It knows no coordinator and no snapshot server: the agent decides what it does and reads how far it
is. It calls `wake` after every change, upon which the agent looks again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from keepstep.checkpoint.format.layout.retention import Retention
from keepstep.elastic.agent.fork_server_process import ForkServerProcess
from keepstep.elastic.agent.phase_reports import PhaseReports
from keepstep.elastic.agent.supervisor import (
    Worker,
    WorkerEvent,
    WorkerExit,
    WorkerReport,
    describe_exit,
    worker_environment,
)
from keepstep.elastic.errors import JobFailed
from keepstep.elastic.rendezvous.failure_budget import BEFORE_FIRST_STEP
from keepstep.elastic.rendezvous.records import (
    Failure,
    FailureKind,
    LoadedCheckpoint,
    ReplicaComparison,
)
from keepstep.elastic.rendezvous.standstill import NodeProgress
from keepstep.elastic.worker.messages import (
    AgentMessage,
    Assignment,
    Broken,
    CloseGeneration,
    Command,
    Drained,
    Exiting,
    Failed,
    Finishing,
    GenerationReport,
    ImportModules,
    Joined,
    Ready,
    ReplicasCompared,
    RestartRequested,
    Restored,
    SnapshotIntervalChosen,
    Stepped,
    Stored,
    Warm,
    WorkerMessage,
)

log = logging.getLogger("keepstep")

_TERM_GRACE_S = 2.0
_ENTRY_S = 600.0
_ENTRY_S_PER_RANK = 0.1
"""How long the ranks may take from `join` until they have entered their process groups."""
_ABORT_S = 20.0
"""Seconds that a worker may take to abort by order and check its device; it ends itself before."""
_SETTLE_S = 10.0
"""After this time a script that reports no steps is taken to run."""
_MAX_WARM_UP_FAILURES = 3


class WorkerGroup:
    """The worker processes of one node. `stop` ends all of them.

    Args:
        command: what the workers run.
        size: how many workers a generation has on this node.
        spares: how many more processes to keep warm while it runs.
        environment: the workers' environment.
        wake: called after every change.
        fork_server: what forks the workers; None: each is started as a program.

    Attributes:
        generation: the generation that was entered last; 0 before the first.
        workers: the generation's workers by local rank, those that have ended included.
        failure: why the node's part of the generation cannot go on; None while it can.
        checkpoint_url: where the script stores checkpoints; None: nowhere, or not known yet.
        checkpoint_every: steps between checkpoints; 0: as often as loses least.
        checkpoint_compression: how they are compressed; None: not at all.
        checkpoint_retention: which of them are kept; None: all.
        snapshot_every: steps between snapshots that the workers have chosen; 0: the user chose.
        snapshot_cost_s: what such a snapshot costs.
        term_grace_s: seconds that a script which has not joined has from SIGTERM to SIGKILL.
    """

    def __init__(
        self,
        command: Command,
        size: int,
        spares: int,
        environment: Mapping[str, str],
        wake: Callable[[], None],
        fork_server: ForkServerProcess | None = None,
    ) -> None:
        self._command = command
        self._size = size
        self._spares = spares
        self._environment = worker_environment(environment, size)
        self._wake = wake
        self._fork_server = fork_server
        self._idle: list[Worker] = []
        self._warm_up_failures = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._unkillable: JobFailed | None = None
        self._is_draining = False
        self._restarts_script = False
        self._modules: tuple[str, ...] = ()
        self._entered_s = self._joined_s = 0.0
        self._phases = PhaseReports()
        self._snapshot_intervals: dict[int, SnapshotIntervalChosen] = {}
        self._newest_step = 0
        self._first_step_s: float | None = None
        self.generation = 0
        self.workers: dict[int, Worker] = {}
        self.failure: Failure | None = None
        self._drain_until_s: float | None = None
        self.replica_comparison: ReplicaComparison | None = None
        self.checkpoint_url: str | None = None
        self.checkpoint_every: int | None = None
        self.checkpoint_compression: Literal["zstd"] | None = None
        self.checkpoint_retention: Retention | None = None
        self.rank_multiple = 1
        self.max_ranks = 0
        self.fitting_ranks = ""
        self.awaits_abort_order = False
        self.snapshot_every = 0
        self.snapshot_cost_s = 0.0
        self.term_grace_s = _TERM_GRACE_S

    @property
    def warm(self) -> bool:
        """Whether as many processes are warm as a generation needs."""
        return sum(worker.is_warm for worker in self._idle) >= self._size

    @property
    def done(self) -> bool:
        """Whether every worker of the generation has exited with success."""
        return len(self.workers) == self._size and all(w.code == 0 for w in self.workers.values())

    @property
    def running(self) -> bool:
        """Whether every worker has completed a step, or runs a script that does not report."""
        has_settled = time.monotonic() > self._entered_s + _SETTLE_S
        return bool(self.workers) and all(
            self._phases.has_stepped(local_rank) if worker.has_joined else has_settled
            for local_rank, worker in self.workers.items()
        )

    @property
    def finishing(self) -> bool:
        """Whether every worker has done its last step and waits until that is safe."""
        return bool(self.workers) and all(
            worker.finishing_step is not None for worker in self.workers.values()
        )

    @property
    def step(self) -> int:
        """The newest step that a worker has completed in this generation, dead ones included."""
        for worker in self.workers.values():
            self._read_progress(worker)
        return self._newest_step

    @property
    def progress(self) -> NodeProgress | None:
        """How far the workers are; None while they may take any time for what they do.

        That is while some have no state yet, or are past their last step, and while they drain.
        """
        newest = [
            progress
            for worker in self.workers.values()
            if worker.is_alive and worker.finishing_step is None
            for progress in (worker.board.read(),)
            if progress is not None and progress.generation == self.generation
        ]
        is_over = self._is_draining or self.failure is not None
        if is_over or not newest or len(newest) < len(self.workers):
            return None
        return NodeProgress(
            progressed_s=max(progress.at_s for progress in newest),
            has_stepped=any(map(self._phases.has_stepped, self.workers)),
            first_step_s=self._first_step_s,
        )

    @property
    def restored_from(self) -> str:
        """Where the workers' state came from, comma-separated."""
        return self._phases.restored_from

    @property
    def loaded(self) -> LoadedCheckpoint | None:
        """The checkpoint that rank 0 has resumed from, with its neighbours, if it runs here."""
        return self._phases.loaded

    @property
    def drain_until_s(self) -> float | None:
        """When workers that have not drained are killed next; None while none drains."""
        return min((until_s for _, until_s in self._undrained()), default=None)

    @property
    def entry_until_s(self) -> float | None:
        """When the workers must have entered their process groups; None: they have, or may not."""
        awaited = self._entering()
        if not awaited or self._is_draining or self.failure is not None:
            return None
        ranks = awaited[0].assignment.world_size if awaited[0].assignment is not None else 0
        return max(self._entered_s, self._joined_s) + _ENTRY_S + _ENTRY_S_PER_RANK * ranks

    def times(self) -> Mapping[str, float]:
        """Return when the last worker reached each phase; see `PhaseReports.times`."""
        return self._phases.times(len(self.workers))

    def warm_up(self) -> None:
        """Start as many idle processes as a generation needs.

        Before the first generation, so that they are warm when the node's peers are; and on
        standby, so that they can take a lost node's place at once.

        Raises:
            JobFailed: they end again and again before they are warm.
        """
        if self._warm_up_failures >= _MAX_WARM_UP_FAILURES:
            raise JobFailed(
                "worker processes end while they warm up; what they printed is above. "
                "Is PyTorch installed, and every module of --preload?"
            )
        while len(self._idle) < self._size:
            self._idle.append(self._start())

    def start_spares(self) -> None:
        """Start spare processes until there are as many as configured, once the workers run."""
        has_warmed_up = self._warm_up_failures < _MAX_WARM_UP_FAILURES
        if self.running and has_warmed_up and not self.finishing:
            # Where each recovery runs the script again, each worker's successor waits warm.
            wanted = max(self._spares, self._size) if self._restarts_script else self._spares
            while len(self._idle) < wanted:
                self._idle.append(self._start())

    async def enter(
        self, assignments: Sequence[Assignment], store_descriptor: int | None = None
    ) -> None:
        """Assign the node's workers to their ranks of a new generation.

        Workers that have drained go on; the others are replaced by spares or new processes.

        Args:
            assignments: one for each worker, by local rank.
            store_descriptor: the listening socket of the generation's torch store, for the worker
                of local rank 0, if it is to serve the store.
        """
        self._tell_of_new_beginning()
        self._begin(assignments[0].generation)
        for local_rank, assignment in enumerate(assignments):
            worker = self.workers.get(local_rank)
            if worker is not None and worker.is_ending and worker.is_alive:
                # Its exit will be no failure of this generation.
                self._end_soon(worker, 0.0)
            if worker is None or not worker.is_reusable:
                worker = self._idle.pop(0) if self._idle else self._start()
                self.workers[local_rank] = worker
            await worker.assign(assignment, store_descriptor if local_rank == 0 else None)

    def _tell_of_new_beginning(self) -> None:
        """Log that the script restarts, which users do not expect of a recovery."""
        if self.workers and not any(worker.has_joined for worker in self.workers.values()):
            log.warning(
                "%s has not called keepstep.join: it begins at its start", self._command.target
            )

    async def enter_as_spare(self, generation: int) -> None:
        """End all workers: the node has no place in this generation, but may have one later."""
        self._begin(generation)
        await _stop_all(self.workers.values(), _TERM_GRACE_S)
        self.workers.clear()
        self.warm_up()

    async def end_drained(self) -> None:
        """End workers that have drained: the job is paused, and others may use their devices."""
        for worker in self.workers.values():
            self._read_progress(worker)
        await _stop_all(self.workers.values(), _TERM_GRACE_S)
        self.workers.clear()

    async def drain(self, *, abort: bool, limit_s: float) -> bool:
        """Make every worker stop writing; return whether none can write any more.

        Called again and again until then, and possibly afterwards.

        Args:
            abort: something broke, so that the end of the step is not waited for.
            limit_s: seconds after which workers that have not drained are killed.

        Raises:
            JobFailed: a worker cannot be killed, so that this node never drains.
        """
        if self._unkillable is not None:
            raise self._unkillable
        until_s = time.monotonic() + limit_s
        is_sooner = self._drain_until_s is not None and until_s < self._drain_until_s
        if not self._is_draining or (abort and is_sooner):
            self._is_draining = True
            self._drain_until_s = until_s
            await self._begin_drain(abort=abort)
        self._kill_undrained()
        has_drained = not any(worker.can_write for worker in self.workers.values())
        if has_drained:
            self._drain_until_s = None
        return has_drained

    async def broadcast(self, message: AgentMessage) -> None:
        """Send a message to every worker whose script has joined."""
        for worker in self.workers.values():
            if worker.has_joined and worker.is_alive:
                await worker.send(message)

    async def tell_stored(self, step: int, generation: int) -> None:
        """Tell every worker whose script has joined which step is in storage, unless it knows.

        Args:
            step: the step; -1 if none is.
            generation: the one whose snapshot it is; 0 if it is no one's of this launch.
        """
        for worker in self.workers.values():
            if worker.has_joined and worker.is_alive and worker.stored != (step, generation):
                worker.stored = (step, generation)
                await worker.send(Stored(step=step, generation=generation))

    def restart(self, rank: int, reason: str) -> None:
        """Kill a rank's worker; what follows is what follows any crash.

        Does nothing unless the worker `may_restart`.
        """
        worker = self.may_restart(rank)
        if worker is not None:
            log.warning("rank %d is restarted: %s", rank, reason)
            worker.kill(reason)

    def may_restart(self, rank: int) -> Worker | None:
        """Return the worker of a rank, if it may be the one that is to be restarted.

        One that is gone, is being ended already, or has drained is not the one that hung.
        """
        worker = next((w for w in self.workers.values() if w.rank == rank), None)
        if worker is None or not worker.can_write or worker.is_stopping or worker.kill_reason:
            return None
        return worker

    def stand_still(self, message: str) -> None:
        """Record that no worker has gone on for too long.

        Args:
            message: the evidence; its first line is the reason in short.
        """
        self._record_failure(FailureKind.STANDSTILL, message)

    def check_entry(self) -> None:
        """Record a failure if workers have not entered their process groups in time.

        Whether a rank that they wait for lives is what its own agent knows. What no agent sees is
        that they all wait: the bootstrap of NCCL has no limit of its own.
        """
        until_s = self.entry_until_s
        if until_s is not None and time.monotonic() >= until_s:
            late = [w.rank for w in self._entering()]
            waited_s = time.monotonic() - self._entered_s
            self._record_failure(
                FailureKind.PEER,
                f"rank {late[0]} has not entered its process groups in {waited_s:.0f} s; a rank "
                "elsewhere may not have called keepstep.join yet",
            )

    def fail(self, reason: str) -> None:
        """Record a failure of the node that is no worker's fault."""
        self._record_failure(FailureKind.WORKER, reason)

    async def stop(self, grace_s: float) -> None:
        """End every process, spares too.

        Raises:
            JobFailed: one cannot be killed.
        """
        workers = [*self.workers.values(), *self._idle]
        self.workers, self._idle = {}, []
        await _stop_all(workers, grace_s)
        await asyncio.gather(*self._tasks)

    def forget(self) -> None:
        """Begin again, for a job in which the node has taken no part; after `stop`."""
        self._begin(0)
        self._first_step_s = None

    def _begin(self, generation: int) -> None:
        self.generation = generation
        self._entered_s = time.monotonic()
        self._phases = PhaseReports()
        self._snapshot_intervals.clear()
        self._newest_step = 0
        self._is_draining = False
        self._drain_until_s = None
        self.failure = None
        self.replica_comparison = None

    def _start(self) -> Worker:
        return Worker.start(
            self._command, self._environment, self._on_worker_event, self._fork_server
        )

    def _import_modules(self, worker: Worker) -> None:
        """Let an idle worker import what the script will, so that the job need not wait for it."""
        if self._modules and worker.is_warm and worker in self._idle:
            self._run_soon(worker.send(ImportModules(modules=self._modules)))

    async def _begin_drain(self, *, abort: bool) -> None:
        for worker in self.workers.values():
            if worker.has_joined:
                await worker.send(CloseGeneration(generation=self.generation, aborts=abort))
            elif worker.is_alive and not worker.is_stopping and not worker.is_ending:
                self._end_soon(worker, self.term_grace_s)

    def _entering(self) -> list[Worker]:
        """Return the workers whose scripts have joined, and that are not in the groups yet."""
        return [
            worker
            for local_rank, worker in self.workers.items()
            if worker.has_joined and self._is_entering(local_rank)
        ]

    def _is_entering(self, local_rank: int) -> bool:
        """Whether a worker may be where nothing but its end can end it.

        Creating a communicator of NCCL waits for all ranks, and cannot be aborted.
        """
        worker = self.workers[local_rank]
        return worker.can_write and not self._phases.has_entered(local_rank)

    def _kill_undrained(self) -> None:
        """Kill the workers whose time to drain is over."""
        now_s = time.monotonic()
        for worker, until_s in self._undrained():
            if now_s >= until_s:
                log.warning("rank %s did not stop in time: killed", worker.rank)
                self._end_soon(worker, 0.0)

    def _undrained(self) -> list[tuple[Worker, float]]:
        """Return the workers that have not drained and are not being ended, and their limits."""
        if self._drain_until_s is None:
            return []
        ordered_s = self._drain_until_s + (_ABORT_S if self.awaits_abort_order else 0.0)
        return [
            (worker, self._drain_until_s if self._is_entering(local_rank) else ordered_s)
            for local_rank, worker in self.workers.items()
            if worker.can_write and not worker.is_stopping
        ]

    def _end_soon(self, worker: Worker, grace_s: float) -> None:
        self._run_soon(self._end(worker, grace_s))

    def _run_soon(self, action: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, worker: Worker, grace_s: float) -> None:
        try:
            await worker.stop(grace_s)
        except JobFailed as failed:
            self._unkillable = failed
            self._wake()

    def _on_worker_event(self, event: WorkerEvent) -> None:
        match event:
            case WorkerReport(worker, message):
                self._on_message(worker, message)
            case WorkerExit(worker, code):
                self._on_exit(worker, code)
        self._wake()

    def _on_message(self, worker: Worker, message: WorkerMessage) -> None:
        match message:
            case GenerationReport() if message.generation != self.generation:
                return  # The generation that it concerns is over.
            case Warm():
                self._warm_up_failures = 0
                worker.is_warm = True
                self._import_modules(worker)
            case Joined():
                worker.has_joined = True
                self._joined_s = time.monotonic()
                self.checkpoint_url = message.checkpoint_url
                self.checkpoint_every = message.checkpoint_every
                self.checkpoint_compression = message.checkpoint_compression
                self.checkpoint_retention = message.checkpoint_retention
                self.rank_multiple = message.rank_multiple
                self.max_ranks = message.max_ranks
                self.fitting_ranks = message.fitting_ranks
                self.awaits_abort_order = message.awaits_abort_order
                self._restarts_script = message.restarts_script
                if message.modules:
                    self._modules = message.modules
                    for idle in self._idle:
                        self._import_modules(idle)
                if self._is_draining:
                    # It is being ended as a script that does not report; that goes on.
                    log.debug("rank %s joined while its generation drains", worker.rank)
            case Finishing(step=step):
                worker.finishing_step = step
            case Failed():
                # Its exit may be long in coming: until then what runs at exit runs.
                worker.is_ending = True
                self._note_failed_script(worker, message)
            case Exiting(status=status, place=place):
                worker.is_ending = self._note_exit(worker, status, place) or worker.is_ending
            case RestartRequested(reason=reason):
                worker.asks_replacement = True
                kind = FailureKind.RESTART if message.is_for_script else FailureKind.PEER
                self._record_failure(kind, f"rank {worker.rank} starts over: {reason}")
            case Drained(ends=ends):
                worker.has_drained = True
                # Its exit is no failure, and it enters no other generation.
                worker.asks_replacement |= ends
                worker.is_ending |= ends
            case Broken(error=error):
                self._record_failure(FailureKind.PEER, f"rank {worker.rank}: {error}")
            case ReplicasCompared(comparison=comparison):
                self._note_comparison(comparison)
            case SnapshotIntervalChosen():
                self._snapshot_intervals[worker.pid] = message
                self._choose_snapshot_interval()
            case Ready() | Restored() | Stepped():
                if isinstance(message, Restored) and worker.rank == 0:
                    self._log_restored(message)
                if worker.assignment is not None:
                    self._phases.add(worker.assignment.local_rank, message)
                self._note_first_step()

    def _note_first_step(self) -> None:
        times = self.times()
        if "restored" in times and "stepped" in times:
            took_s = times["stepped"] - times["restored"]
            self._first_step_s = max(self._first_step_s or 0.0, took_s)

    def _note_failed_script(self, worker: Worker, message: Failed) -> None:
        # What a script raises when its agent ends it is no failure, and what breaks in it with a
        # lost peer is not its own.
        if worker.is_stopping:
            return
        text = _describe_failed_script(worker, message)
        if message.is_peer:
            self._record_failure(FailureKind.PEER, text)
            return
        kind = FailureKind.FATAL if message.is_fatal else FailureKind.WORKER
        self._record_failure(kind, text, worker.rank, error=self._identify(worker, message))

    def _log_restored(self, restored: Restored) -> None:
        url = f" ({self.checkpoint_url})" if "storage" in restored.source else ""
        if restored.step:
            log.info("goes on after step %d, from %s%s", restored.step, restored.source, url)

    def _note_comparison(self, comparison: ReplicaComparison) -> None:
        """Keep the newest comparison, and until the generation ends who has to be replaced."""
        known = self.replica_comparison
        if known is not None and known.to_replace and not comparison.to_replace:
            comparison = replace(
                comparison,
                to_replace=known.to_replace,
                finding=comparison.finding or known.finding,
            )
        self.replica_comparison = comparison

    def _choose_snapshot_interval(self) -> None:
        """Take the longest interval that a worker has chosen: it decides for all."""
        self.snapshot_every, self.snapshot_cost_s = max(
            (chosen.every, chosen.cost_s) for chosen in self._snapshot_intervals.values()
        )

    def _on_exit(self, worker: Worker, code: int) -> None:
        if worker in self._idle:
            self._idle.remove(worker)
            if worker.is_warm and not worker.is_stopping:
                log.warning(
                    "an idle worker process %s; another one takes its place", describe_exit(code)
                )
            elif not worker.is_stopping:
                self._warm_up_failures += 1
                log.warning("a worker process %s while it warmed up", describe_exit(code))
        else:
            self._read_progress(worker)
            self._note_exit(worker, code)
        worker.close()

    def _note_exit(self, worker: Worker, code: int, place: str = "") -> bool:
        """Record that a worker ends if that is a failure; return whether it is.

        It is one with any status but 0, and with 0 before the job is done: its peers wait for it.

        Args:
            worker: the worker.
            code: its exit status, negative for a signal.
            place: the script's line that called `sys.exit`.
        """
        is_known = worker.is_stopping or worker.asks_replacement or worker.is_ending
        is_early = worker.has_joined and worker.finishing_step is None
        if is_known or (code == 0 and not is_early):
            return False
        text, error = _describe_exit(worker, code), ""
        if worker.has_joined and code >= 0 and not worker.kill_reason:
            text += f" after step {max(0, self._step_under_way(worker) - 1)}"
            text += f", by sys.exit at {place}" if place else ""
            if place or code == 0:
                error = self._when(f"exit with status {code} at {place}", worker)
        if code == 0:
            text += "; the job is not done: to end it early, call job.stop() and leave the loop"
        self._record_failure(FailureKind.WORKER, text, worker.rank, error=error)
        return True

    def _read_progress(self, worker: Worker) -> None:
        progress = worker.board.read()
        if progress is not None and progress.generation == self.generation:
            self._newest_step = max(self._newest_step, progress.step)

    def _identify(self, worker: Worker, failed: Failed) -> str:
        """Return what an error that comes again has in common with this one; "" if unknown."""
        return self._when(failed.place, worker) if failed.place else ""

    def _when(self, event: str, worker: Worker) -> str:
        step = self._step_under_way(worker)
        return f"{event}, in step {step}" if step else f"{event}, {BEFORE_FIRST_STEP}"

    def _step_under_way(self, worker: Worker) -> int:
        """Return the step that a worker was in, or was about to begin; 0: before the first one."""
        progress = worker.board.read()
        has_begun = progress is not None and progress.generation == self.generation
        return progress.step + 1 if progress and has_begun else 0

    def _record_failure(
        self, kind: FailureKind, message: str, rank: int | None = None, error: str = ""
    ) -> None:
        """Keep the first failure of a generation; a worker's failure replaces another one.

        A collective breaks at every rank when one worker fails, and the cause is what counts.
        """
        if self.failure is None or (kind.is_cause and not self.failure.kind.is_cause):
            self.failure = Failure(
                kind=kind, message=message, at_s=time.time(), rank=rank, error=error
            )


def _describe_failed_script(worker: Worker, failed: Failed) -> str:
    text = f"rank {worker.rank} on {_node_of(worker)}: {failed.error}"
    return f"{text}\n{failed.traceback}".rstrip()


def _describe_exit(worker: Worker, code: int) -> str:
    how = f"was restarted: {worker.kill_reason}" if worker.kill_reason else describe_exit(code)
    return f"rank {worker.rank} on {_node_of(worker)} {how}"


def _node_of(worker: Worker) -> str:
    return "?" if worker.assignment is None else worker.assignment.node


async def _stop_all(workers: Iterable[Worker], grace_s: float) -> None:
    """End workers, all of them before the first that cannot be killed is reported."""
    ended = await asyncio.gather(
        *(worker.stop(grace_s) for worker in workers), return_exceptions=True
    )
    for error in ended:
        if error is not None:
            raise error
