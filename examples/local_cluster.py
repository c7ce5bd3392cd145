"""Runs several "nodes" on one machine: a coordinator, and agents that can be killed.

The demo, the tests and the benchmarks use it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from keepstep.elastic.cli.follow import views
from keepstep.elastic.rendezvous.view import Keys, View
from keepstep.elastic.store.address import Access, Address, parse_address
from keepstep.elastic.store.credentials import coordinator_secret
from keepstep.elastic.store.embedded import EmbeddedEtcd
from keepstep.elastic.store.etcd import EtcdStore

_QUIET_S = 1.0


class JobOver(Exception):
    """The awaited condition cannot come true any more: every agent has ended."""


class LocalCluster:
    """A coordinator and any number of agents of one job; the end of the context kills them all.

    Args:
        job: name of the job.
        script: path of the training script, and its arguments.
        nnodes: as for `keepstep run --nnodes`.
        workers: number of workers per node.
        log: directory for the agents' output.
        last_call_s: seconds that the first generation waits for further nodes.
        store: URL of a running coordinator; None: start one.
        spares: processes that each node keeps warm to replace a worker.
    """

    def __init__(
        self,
        job: str,
        script: Sequence[str],
        *,
        nnodes: str,
        workers: int,
        log: Path,
        last_call_s: float = 1.0,
        store: str | None = None,
        spares: int = 1,
    ) -> None:
        self.job = job
        self._script = list(script)
        self._nnodes = nnodes
        self._workers = workers
        self._log = log
        self._last_call_s = last_call_s
        self._spares = spares
        self._etcd = EmbeddedEtcd(_own_secret()) if store is None else None
        self._url = store or ""
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self._log.mkdir(parents=True, exist_ok=True)
        if self._etcd is not None:
            self._etcd.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in list(self.agents):
            self.kill(node)
        if self._etcd is not None:
            self._etcd.stop()

    @property
    def url(self) -> str:
        """The coordinator's URL."""
        return self._url if self._etcd is None else self._etcd.url

    @property
    def etcd_pid(self) -> int:
        """The process id of the coordinator that was started."""
        assert self._etcd is not None, "the coordinator was not started here"
        return self._etcd.pid

    def start(self, node: str, *options: str) -> None:
        """Start a node's agent; its output goes to `<log>/<node>.log`."""
        with (self._log / f"{node}.log").open("ab") as output:
            self.agents[node] = subprocess.Popen(
                self.command(node, *options),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def command(self, node: str, *options: str) -> list[str]:
        """Return the command line of a node's agent."""
        return [
            sys.executable, "-P", "-m", "keepstep", "run",
            "--store", self.url, "--job", self.job, "--node", node,
            "--nnodes", self._nnodes, "--nproc-per-node", str(self._workers),
            "--spares", str(self._spares),
            "--rdzv-conf", f"last_call_timeout={self._last_call_s}",
            # The end of the context leaves nothing.
            "--keep-state", "0",
            *options, *self._script,
        ]  # fmt: skip

    def kill(self, node: str) -> float:
        """Kill an agent and its descendants with SIGKILL; return the time in monotonic seconds."""
        agent = self.agents.pop(node)
        tree = process_tree(agent.pid)
        at_s = time.monotonic()
        for process in tree:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        agent.wait()
        return at_s

    def workers_of(self, node: str) -> list[psutil.Process]:
        """Return a node's worker processes, spares included, oldest first."""
        workers = self._processes_of(node, "keepstep.elastic.worker.bootstrap")
        return sorted(workers, key=lambda process: (process.create_time(), process.pid))

    def snapshot_server_of(self, node: str) -> psutil.Process:
        """Return a node's snapshot server."""
        return self.snapshot_servers_of(node)[0]

    def snapshot_servers_of(self, node: str) -> list[psutil.Process]:
        """Return a node's snapshot server, none while it is replaced."""
        return self._processes_of(node, "keepstep.checkpoint.snapshot.server.server")

    def _processes_of(self, node: str, module: str) -> list[psutil.Process]:
        return [
            process
            for process in process_tree(self.agents[node].pid)
            if module in " ".join(_arguments(process))
        ]

    def wait(self, node: str, timeout_s: float) -> int:
        """Wait for an agent's end and return its exit status."""
        return self.agents[node].wait(timeout_s)

    def terminate(self, node: str) -> None:
        """Send an agent a preemption notice (SIGTERM)."""
        self.agents[node].send_signal(signal.SIGTERM)

    def wait_until(self, condition: Callable[[View], bool], timeout_s: float) -> View:
        """Follow the job's state until a condition holds; return that view.

        Raises:
            TimeoutError: it did not hold in time; the message has the agents' last output.
            JobOver: it did not hold while there was a job; likewise.
        """
        try:
            return asyncio.run(self._follow(condition, timeout_s))
        except TimeoutError:
            raise TimeoutError(
                f"not within {timeout_s:.0f} s; output of the agents:\n{self.output()}"
            ) from None

    async def _follow(self, condition: Callable[[View], bool], timeout_s: float) -> View:
        client = await EtcdStore.connect(parse_address(self.url))
        following = views(client, Keys(self.job))
        next_view = asyncio.ensure_future(anext(following))
        view: View | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    # Before the pause at the end, in which nothing changes.
                    is_settled = self.is_over and view is not None and not view.nodes
                    if (await asyncio.wait({next_view}, timeout=_QUIET_S))[0]:
                        view = next_view.result()
                        if condition(view):
                            return view
                        next_view = asyncio.ensure_future(anext(following))
                    elif is_settled:
                        raise JobOver(
                            f"all agents have ended, and what was waited for has not come or was "
                            f"missed; their output:\n{self.output()}"
                        )
        finally:
            next_view.cancel()
            await asyncio.wait({next_view})
            await client.close()

    @property
    def is_over(self) -> bool:
        """Return whether agents were started, and all of them have ended or were killed."""
        return bool(self.agents) and all(agent.poll() is not None for agent in self.agents.values())

    def output(self) -> str:
        """Return the end of every agent's output."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-20_000:]}"
            for path in sorted(self._log.glob("*.log"))
        )


def _own_secret() -> bytes:
    """Return the secret that this user's commands authenticate themselves with on this machine."""
    return coordinator_secret(Address(("127.0.0.1:0",), Access.SECRET), os.environ)


def read_steps(directory: Path) -> list[dict[str, float]]:
    """Return the lines that `examples/train.py --log` wrote for all ranks, in the order of time."""
    lines = [
        json.loads(line)
        for path in directory.glob("rank-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted(lines, key=lambda line: line["at_s"])


def process_tree(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants; none if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def script(name: str, *arguments: str) -> list[str]:
    """Return the command line of one of the example scripts."""
    return [os.fspath(Path(__file__).parent / name), *arguments]
