"""Runs schedules of faults against a job on the queued device, and counts what came of them.

The kinds of fault:

- "kill": a worker is killed.
- "lost": in a step that a snapshot is taken of, the last data of a collective never arrive at a
  rank, whose peers go on; then a peer is killed that has sealed the step. Whoever aborts the rank
  without a fence makes it seal garbage that completes the snapshot.
- "entry": a worker is killed, and a rank of the next generation ends before it has entered it, so
  that its peers wait where nothing but their end can end them.
- "build": a worker is killed, and another one while its peer is inside `build`, where then a call
  fails in no way that tells why.
- "slow": an operation of the device takes half a second.
- "hang": the host of a rank goes no further; the monitor has to find it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from examples.local_cluster import LocalCluster
from keepstep.elastic.rendezvous.view import View
from keepstep.monitor.node.stacks import dump

SCRIPT = Path(__file__).parent / "train.py"
ROOT = Path(__file__).parents[2]
_NODES = ("a", "b")
_LEARNT_STEPS = 80


@dataclass(slots=True)
class Outcome:
    """The outcome of the schedules of one job."""

    schedules: int = 0
    recovered: int = 0
    replaced_processes: int = 0
    hangs: int = 0
    hangs_found: int = 0
    recovery_s: list[float] = field(default_factory=list)
    poisoned_sealed: int = 0
    poisoned_resumed: int = 0


def draw(seed: int, count: int, weights: dict[str, int]) -> Sequence[tuple[str, int]]:
    """Return kinds of faults and the ranks that they strike."""
    drawn = random.Random(seed)
    kinds = drawn.choices(tuple(weights), tuple(weights.values()), k=count)
    return [(kind, drawn.randrange(len(_NODES))) for kind in kinds]


class QueuedJob:
    """A job of two nodes with one worker each; `strike` makes one of them fail.

    Args:
        running: the cluster, whose agents this starts.
        log: the directory that the script records in.
        limit_s: how long to wait for anything.
    """

    def __init__(self, running: LocalCluster, log: Path, limit_s: float) -> None:
        self._running = running
        self._log = log
        self._limit_s = limit_s
        self.outcome = Outcome()

    def start(self, *options: str) -> None:
        """Start both agents, and wait until the job makes steps."""
        for node in _NODES:
            # Faults follow each other sooner than a job makes the progress that it is asked for.
            self._running.start(node, "--max-restarts", "1000", *options)
        self._wait_for_steps(1)

    def strike(self, kind: str, rank: int) -> None:
        """Make a rank fail, and wait until the job makes steps again."""
        generation = self._view().generation_number
        if kind == "hang":
            # The monitor judges a rank's silence by how long its steps took before.
            self._wait_for_steps(generation, _LEARNT_STEPS)
        before = self._workers()
        self.outcome.schedules += 1
        began_s = time.monotonic()
        if kind in ("entry", "build"):
            (self._log / f"{kind}-{rank}").touch()
            self._worker_of(1 - rank).kill()
            if kind == "build":
                building = self._log / f"building-{rank}"
                self._wait_for("call of build", building.exists)
                building.unlink()
                self._worker_of(1 - rank).kill()
        elif kind == "kill":
            self._worker_of(rank).kill()
        else:
            (self._log / f"{kind}-{rank}").touch()
        if kind == "lost":
            self._wait_until_the_peer_waits(generation, rank)
            self._worker_of(1 - rank).kill()
        ends = {"slow": 0, "entry": 2, "build": 2}.get(kind, 1)
        if kind == "hang":
            self.outcome.hangs += 1
        self._wait_for_steps(generation + ends)
        if kind == "hang":
            self.outcome.hangs_found += 1
        if kind != "slow":
            self.outcome.recovery_s.append(time.monotonic() - began_s)
        self.outcome.recovered += 1
        self.outcome.replaced_processes += len(before - self._workers())

    def finish(self) -> None:
        """End the job, and count the garbage that its ranks recorded."""
        (self._log / "finish").touch()
        for node in _NODES:
            status = self._running.wait(node, self._limit_s)
            if status != 0:
                raise RuntimeError(f"{node} ended with {status}\n{self._running.output()}")
        self.count_garbage()

    def count_garbage(self) -> None:
        """Count the garbage that was sealed until now, and that was resumed from."""
        lines = list(self._lines())
        self.outcome.poisoned_sealed = sum("sealed_garbage" in line for line in lines)
        # A step that begins on garbage yields garbage. In the generation that was aborted that is
        # what the device leaves; in a later one it was resumed from.
        first_garbage: dict[int, int] = {}
        first_step: dict[int, int] = {}
        for line in lines:
            if "step" in line:
                number = line["generation"]
                first_step[number] = min(first_step.get(number, line["step"]), line["step"])
                if line["is_garbage"]:
                    first_garbage[number] = min(
                        first_garbage.get(number, line["step"]), line["step"]
                    )
        self.outcome.poisoned_resumed = sum(
            first_garbage.get(number) == step for number, step in first_step.items()
        )

    def _view(self) -> View:
        return self._running.wait_until(lambda view: view.generation is not None, self._limit_s)

    def _worker_of(self, rank: int) -> psutil.Process:
        """Return the process of a rank: of a node's workers, the oldest is no spare."""
        generation = self._view().generation
        assert generation is not None
        node = next(member.node for member in generation.members if rank in member.ranks)
        return self._running.workers_of(node)[0]

    def _workers(self) -> set[int]:
        return {self._running.workers_of(node)[0].pid for node in _NODES}

    def _lines(self) -> Iterator[dict[str, Any]]:
        for path in self._log.glob("rank-*.jsonl"):
            for text in path.read_text().splitlines(keepends=True):
                # A process that was killed may have written part of a line.
                if text.endswith("}\n"):
                    yield json.loads(text)

    def _wait_for_steps(self, generation: int, count: int = 3) -> None:
        """Wait until every rank has computed `count` steps in a generation from this one on."""

        def is_reached() -> bool:
            steps = [
                (line["rank"], line["step"], line["generation"])
                for line in self._lines()
                if line.get("generation", 0) >= generation and "step" in line
            ]
            newest = max((number for _, _, number in steps), default=0)
            return all(
                sum((rank, number) == (at, newest) for at, _, number in steps) >= count
                for rank in range(len(_NODES))
            )

        self._wait_for(f"steps in generation {generation}", is_reached)

    def _wait_until_the_peer_waits(self, generation: int, rank: int) -> None:
        """Wait until a rank's peer has computed and sealed one step more than the rank."""

        def newest(of: int) -> int:
            return max(
                line["step"]
                for line in self._lines()
                if line["rank"] == of and line["generation"] == generation and "step" in line
            )

        self._wait_for("a result to be lost", lambda: not (self._log / f"lost-{rank}").exists())
        self._wait_for("the peer to compute it", lambda: newest(1 - rank) == newest(rank) + 1)
        # The copy of so small a state takes less than a millisecond; the seal is not seen here.
        settled_s = time.monotonic() + 0.3
        self._wait_for("the peer to seal it", lambda: time.monotonic() > settled_s)

    def _wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + self._limit_s
        while not condition():
            if time.monotonic() > until_s:
                raise TimeoutError(
                    f"no {what} within {self._limit_s:.0f} s\n{self._running.output()}\n"
                    # Which of the ranks waits, and for what.
                    + "\n".join(json.dumps(asyncio.run(dump(pid))) for pid in self._workers())
                )
            if any(agent.poll() is not None for agent in self._running.agents.values()):
                raise RuntimeError(f"an agent has ended\n{self._running.output()}")
            time.sleep(0.02)
