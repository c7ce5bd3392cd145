"""Runs one script on several simulated ranks through production's `Job`, with kills and joins.

Each rank is a thread, of which one runs at a time; a seed says which. What is simulated is what a
job stands on: collectives, snapshots, the generation. A collective of a generation must be the same
on all ranks. It breaks at each rank that has not left it when a rank of the generation is gone.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn, cast

from keepstep.elastic.data.position import Position
from keepstep.elastic.trainer.job import Job
from keepstep.elastic.trainer.mesh_rule import MeshRule
from keepstep.elastic.trainer.process_groups import ProcessGroups
from keepstep.elastic.worker.messages import Assignment
from keepstep.elastic.worker.session import Session
from tests.sim.rules import must

PEER_GONE = "gloo: Connection closed by peer"
_MOST_GENERATIONS = 60


def mixed(*parts: object) -> str:
    """Return a number that all parts determine, as text."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


class Gone(BaseException):
    """Ends a simulated process."""


@dataclass(frozen=True)
class Snapshot:
    """The state of all ranks after a step."""

    position: Position = field(default_factory=Position)
    weights: str = "weights"
    extra: str = "extra"


@dataclass
class Meeting:
    """A collective that ranks have come to: what they bring, by rank."""

    label: tuple[object, ...]
    brought: dict[int, int] = field(default_factory=dict)


class Process:
    """One process of a rank: its thread, its job, and the state that a script changes."""

    def __init__(self, cluster: Cluster, rank: int, script: Callable[[Process], None]) -> None:
        self.cluster = cluster
        self.rank = rank
        self.generation = 0
        self.drained = False
        self.result: tuple[str, str] | None = None
        self.is_over = False
        self.awaits: Callable[[], bool] = lambda: True
        self.count = 0
        self.weights = self.extra = ""
        self._turn = threading.Semaphore(0)
        self._script = script
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.job = Job(
            session=cast(Session, _Agent(self)),
            groups=ProcessGroups("cpu", None),
            build=lambda _: cast(Any, None),
            mesh=MeshRule(),
            checkpoint=None,
            start_from=None,
            snapshot_every=1,
            seed=0,
            compare_replicas_every=None,
            on_divergence="report",
        )
        job = self.job
        job._state = job._steps._state = job._guards._state = cast(Any, _State(self))
        job._steps._replicas = cast(Any, SimpleNamespace(run_if_due=lambda *_, **__: None))

    def run(self) -> None:
        """Let it run until it waits or ends."""
        self._turn.release()
        self.cluster.back.acquire()

    def wait(self, condition: Callable[[], bool] = lambda: True) -> None:
        """Let others run, until it is this one's turn and a condition holds."""
        self.awaits = condition
        self.cluster.back.release()
        self._turn.acquire()
        if self.cluster.is_over or self.cluster.must_die(self):
            raise Gone

    def meet(self, *label: object, brings: int = 1) -> int:
        """Run a collective; return the least of what the ranks bring."""
        generation, number = self.generation, self.count
        self.count += 1
        self.wait()
        if self.cluster.is_broken(generation):
            raise RuntimeError(PEER_GONE)
        meeting = self.cluster.meetings[generation].setdefault(number, Meeting(label))
        must(
            meeting.label == label,
            f"collective {number} of generation {generation} is {meeting.label} on ranks "
            f"{sorted(meeting.brought)} and {label} on rank {self.rank}",
        )
        meeting.brought[self.rank] = brings
        is_met = lambda: len(meeting.brought) == self.cluster.size  # noqa: E731
        self.wait(lambda: is_met() or self.cluster.is_broken(generation))
        is_lost = self.cluster.is_broken(generation) and self.cluster.random.random() < 0.5
        if not is_met() or is_lost:
            raise RuntimeError(PEER_GONE)
        return min(meeting.brought.values())

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self.cluster.is_over:
                with self.job:
                    self._script(self)
                self.result = self.weights, self.extra
        except Gone:
            self.cluster.note_gone(self)
        except BaseException as error:  # noqa: BLE001 - the test's
            self.cluster.errors.append(error)
        self.is_over = True
        self.cluster.back.release()


class Cluster:
    """The ranks of one job.

    Args:
        size: how many ranks.
        script: what each process runs.
        seed: of what runs next, and of what a kill leaves.
        kills: by the number of turns after which it dies, a rank.
        joins: numbers of turns after which the generation ends in good order.
        snapshot_every: steps between snapshots.
    """

    def __init__(
        self,
        size: int,
        script: Callable[[Process], None],
        seed: int,
        kills: Mapping[int, int] | None = None,
        joins: Sequence[int] = (),
        snapshot_every: int = 1,
    ) -> None:
        self.size = size
        self.script = script
        self.random = random.Random(seed)
        self.back = threading.Semaphore(0)
        self.is_over = False
        self.errors: list[BaseException] = []
        self.meetings: dict[int, dict[int, Meeting]] = defaultdict(dict)
        self.snapshot_every = snapshot_every
        self.closing: set[int] = set()
        self.restarts: list[str] = []
        self.generation = 1
        self.resume = Snapshot()
        self._kills = dict(kills or {})
        self._joins = set(joins)
        self._turn = 0
        self._left: set[int] = set()
        self._taken: list[tuple[Snapshot, set[int]]] = [(Snapshot(), set(range(size)))]
        self._processes = {rank: Process(self, rank, script) for rank in range(size)}

    def run(self) -> tuple[str, str]:
        """Run the job to its end; return weights and extra state, equal on all ranks."""
        try:
            while not all(process.result for process in self._processes.values()):
                self._take_turn()
                if self.errors:
                    raise self.errors[0]
        finally:
            self.is_over = True
            for process in self._processes.values():
                if not process.is_over:
                    process.run()
        results = {process.result for process in self._processes.values()}
        must(len(results) == 1, f"ranks end with different states: {results}")
        (result,) = results
        assert result is not None
        return result

    def must_die(self, process: Process) -> bool:
        """Whether it is time for a process to be killed."""
        due = [turn for turn, rank in self._kills.items() if turn <= self._turn]
        mine = [turn for turn in due if self._kills[turn] == process.rank]
        for turn in mine:
            del self._kills[turn]
        return bool(mine)

    def is_broken(self, generation: int) -> bool:
        """Whether a rank of a generation is gone."""
        return generation < self.generation or bool(self._left)

    def note_gone(self, process: Process) -> None:
        """Note that a process has ended."""
        self._left.add(process.rank)

    def leave(self, process: Process) -> None:
        """Note that a process has drained."""
        process.drained = True
        self._left.add(process.rank)

    def take(self, process: Process, snapshot: Snapshot) -> None:
        """Take a rank's part of a snapshot."""
        for taken, ranks in self._taken:
            if taken == snapshot:
                ranks.add(process.rank)
                return
        must(
            all(one.position.step != snapshot.position.step or one == snapshot
                for one, ranks in self._taken if len(ranks) == self.size),
            f"step {snapshot.position.step} has two states",
        )  # fmt: skip
        self._taken.append((snapshot, {process.rank}))

    def is_complete(self, step: int) -> bool:
        """Whether the snapshot of a step is complete."""
        return any(one.position.step == step and len(of) == self.size for one, of in self._taken)

    def _take_turn(self) -> None:
        self._turn += 1
        if any(turn <= self._turn for turn in self._joins):
            self._joins = {turn for turn in self._joins if turn > self._turn}
            self.closing.add(self.generation)
        self._open_next()
        ready = [p for p in self._processes.values() if not p.is_over and p.awaits()]
        must(bool(ready), f"nobody can go on in generation {self.generation}")
        self.random.choice(ready).run()

    def _open_next(self) -> None:
        # One that has ended well is not there for a rank that starts again.
        gone = [p for p in self._processes.values() if p.is_over]
        if not all(p in gone or p.drained for p in self._processes.values()):
            return
        complete = [one for one, ranks in self._taken if len(ranks) == self.size]
        # The newest may not be committed when a rank dies.
        if gone and len(complete) > 1 and self.random.random() < 0.5:
            complete.pop()
        self.resume = complete[-1]
        self._taken = [(one, set(range(self.size))) for one in complete]
        self.generation += 1
        must(self.generation < _MOST_GENERATIONS, f"restarted for ever: {self.restarts[-3:]}")
        self._left.clear()
        for process in gone:
            self._processes[process.rank] = Process(self, process.rank, self.script)
        for process in self._processes.values():
            process.drained = False


class _Agent:
    """A process's session with its agent."""

    is_managed = True
    committed_step = stored_step = -1

    def __init__(self, process: Process) -> None:
        self._process = process
        self._cluster = process.cluster

    def report(self, _: object) -> None:
        return

    def progress(self, *_: int) -> None:
        return

    def is_closing(self, generation: int) -> bool:
        return self._cluster.is_broken(generation)

    def wait_for_closing(self, generation: int, _: float | None = None) -> bool:
        return self.is_closing(generation)

    def wait_for_assignment(self, newer_than: int) -> Assignment:
        self._process.wait(lambda: self._cluster.generation > newer_than)
        number = self._cluster.generation
        return Assignment(
            generation=number, node="a", rank=self._process.rank, world_size=self._cluster.size,
            local_rank=0, local_world_size=1, node_rank=0, node_count=1, store_host="",
            store_port=0, server="", secret="", job="job", max_restarts=3,
        )  # fmt: skip

    def wait_for_commit(self, step: int, generation: int, **_: bool) -> bool:
        is_complete = lambda: self._cluster.is_complete(step)  # noqa: E731
        self._process.wait(lambda: is_complete() or self.is_closing(generation))
        return is_complete()

    def restart_script(self, reason: str) -> NoReturn:
        self._cluster.restarts.append(reason)
        raise Gone


class _State:
    """A process's state of a generation: what `GenerationState` and `SnapshotManager` do for it."""

    source = "memory"

    def __init__(self, process: Process) -> None:
        self._process = process
        self._cluster = process.cluster
        self._stops = False
        self._taken_step = 0
        self.position = Position()
        self.snapshot_interval = SimpleNamespace(notable_change=lambda: None)
        self.training = SimpleNamespace(optimizers=())
        self.is_ending = self.is_stopping = False

    @property
    def snapshots(self) -> _State:
        return self

    @property
    def world(self) -> Any:
        rank, size = self._process.rank, self._cluster.size
        return SimpleNamespace(
            generation=self._process.generation, rank=rank, world_size=size, data_rank=rank,
            data_size=size,
        )  # fmt: skip

    def watch_aborts(self) -> None:
        return

    def enter(self, assignment: Assignment, _: Mapping[str, int]) -> None:
        process, resume = self._process, self._cluster.resume
        process.generation, process.count = assignment.generation, 0
        self.position, process.weights, process.extra = (
            resume.position,
            resume.weights,
            resume.extra,
        )
        self.is_ending = self.is_stopping = False
        self._taken_step = self.position.step
        process.job._passes.resume(self.position)
        process.meet("enter")

    def end(self, generation: int, error: BaseException | None) -> None:
        if error is None:
            self._take()
        self._cluster.leave(self._process)

    def close(self) -> None:
        return

    def begin_step(self, *, stops: bool) -> None:
        self._stops = stops

    def complete_step(self, position: Position) -> bool:
        process = self._process
        continues = process.generation not in self._cluster.closing
        self.is_stopping = not process.meet("stops", position.step, brings=not self._stops)
        self.is_ending = not process.meet("ends", position.step, brings=continues)
        return position.step % self._cluster.snapshot_every == 0

    def take_agreed(self, position: Position) -> None:
        self._take()

    def commit_final_snapshot(self, position: Position, wait: Callable[[int], bool]) -> bool:
        try:
            self._process.meet("final", position.step)
        except RuntimeError:
            return False
        self._take()
        return wait(position.step)

    def _take(self) -> None:
        """Take a snapshot, if there is none of this step: what guards change later is not in it."""
        if self._taken_step != self.position.step:
            self._taken_step = self.position.step
            process = self._process
            self._cluster.take(process, Snapshot(self.position, process.weights, process.extra))
