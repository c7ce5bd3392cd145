"""Runs keepstep jobs of two nodes with a worker each on this machine, and strikes their workers.

Each node has an agent of its own, since a node has at most as many workers as GPUs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).with_name("keepstep_worker.py")
_NODES = ("a", "b")
_POLL_S = 0.01
_LOG_CHARACTERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A worker's progress: the newest completed step, 0 before the first, and its process."""

    step: int = 0
    process: int = 0


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """A job that runs.

    Args:
        name: the job's name.
        directory: where its workers and agents write.
        agents: of its nodes.
    """

    name: str
    directory: Path
    agents: Sequence[subprocess.Popen[bytes]]

    def progress(self, rank: int) -> Progress:
        """Return what the worker of a rank has written last."""
        try:
            return Progress(**json.loads((self.directory / f"rank-{rank}.json").read_text()))
        except (OSError, ValueError):
            return Progress()

    def strike(
        self, rank: int, number: signal.Signals, step: int, deadline_s: float
    ) -> Progress | None:
        """Send a signal to the worker of a rank at a step or later; return what it had reached.

        Returns None if it does not get there in time, or the job ends before.
        """
        reached = self._wait_for(rank, lambda progress: progress.step >= step, deadline_s)
        return reached if reached is not None and send(reached.process, number) else None

    def recovery_s(self, rank: int, process: int, deadline_s: float) -> float | None:
        """Wait for a step of a rank by another process than this one; return how long that took.

        Returns None if there is none in time, or the job ends before.
        """
        began_s = time.monotonic()
        reached = self._wait_for(rank, lambda found: found.process not in (0, process), deadline_s)
        return None if reached is None else round(time.monotonic() - began_s, 2)

    def wait(self, deadline_s: float) -> list[int | None]:
        """Wait for the agents; return their exit statuses, None for one that runs still."""
        statuses: list[int | None] = []
        for agent in self.agents:
            try:
                statuses.append(agent.wait(max(0.0, deadline_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                statuses.append(None)
        return statuses

    def end(self) -> Mapping[str, Any]:
        """Return what rank 0 wrote at its end; nothing if it did not get there."""
        path = self.directory / "end.json"
        found: Mapping[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def show(self) -> None:
        """Print the end of what agents and workers printed."""
        for log in sorted(self.directory.glob("*.log")):
            text = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
            print(f"--- {self.name} {log.name}\n{text}")

    def _wait_for(
        self, rank: int, is_reached: Callable[[Progress], bool], deadline_s: float
    ) -> Progress | None:
        while time.monotonic() < deadline_s:
            if all(agent.poll() is not None for agent in self.agents):
                return None
            progress = self.progress(rank)
            if is_reached(progress):
                return progress
            time.sleep(_POLL_S)
        return None


@contextmanager
def running_job(
    kind: str,
    directory: Path,
    arguments: Sequence[str],
    *,
    environment: Callable[[int], Mapping[str, str]],
    options: Sequence[str] = (),
) -> Iterator[ElasticJob]:
    """Run a job, and kill its agents at the end. A coordinator starts by itself.

    Args:
        kind: its name among the jobs of this check.
        directory: created for the files of its workers and agents.
        arguments: of the worker, after the directory.
        environment: variables of a node's agent and workers, besides this process's own.
        options: of `keepstep run`.
    """
    name = f"gpu-check-{os.getpid()}-{kind}"
    directory.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    agents: list[subprocess.Popen[bytes]] = []
    try:
        for number, node in enumerate(_NODES):
            command = [
                sys.executable, "-m", "keepstep", "run", "--rdzv-endpoint", endpoint,
                "--nnodes", str(len(_NODES)), "--nproc-per-node", "1", "--node", node,
                "--job", name, *options, str(_WORKER), str(directory), *arguments,
            ]  # fmt: skip
            with (directory / f"{node}.log").open("wb") as log:
                agent = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment(number)},
                )
            agents.append(agent)
        yield ElasticJob(name, directory, agents)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def send(process: int, number: signal.Signals) -> bool:
    """Send a signal to a process; return whether it is there."""
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return False
    return True
