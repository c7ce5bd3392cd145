"""Runs a job of two nodes under keepstep, torchrun or torchft, for goodput.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import psutil
import torch.distributed as dist

from examples.local_cluster import LocalCluster

WORKER = Path(__file__).with_name("goodput_worker.py")
NODES, WORKERS = 2, 2


class Contender(Protocol):
    """A job of `NODES` nodes; the end of the context kills all of it."""

    def __enter__(self) -> Self:
        """Start whatever coordinates the nodes."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill all processes."""
        ...

    def start(self, node: int) -> None:
        """Start a node."""
        ...

    def kill(self, node: int) -> None:
        """Kill all processes of a node."""
        ...

    def tend(self) -> list[int]:
        """Start what the launcher of a real job would; return the nodes that have ended."""
        ...


class Keepstep:
    """A job under `keepstep run`."""

    def __init__(self, directory: Path) -> None:
        self._cluster = LocalCluster(
            "goodput", [str(WORKER), "keepstep", str(directory)],
            nnodes=f"1:{NODES}", workers=WORKERS, log=directory / "agents",
        )  # fmt: skip

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cluster.__exit__(kind, error, trace)

    def start(self, node: int) -> None:
        self._cluster.start(f"node-{node}")

    def kill(self, node: int) -> None:
        self._cluster.kill(f"node-{node}")

    def tend(self) -> list[int]:
        return [
            int(name.removeprefix("node-"))
            for name, agent in self._cluster.agents.items()
            if agent.poll() is not None
        ]


class Processes:
    """Processes by node, with their descendants, and others that coordinate them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._of_node: dict[int, dict[str, subprocess.Popen[bytes]]] = defaultdict(dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in list(self._of_node):
            self.kill(node)

    def run(self, node: int, name: str, command: Sequence[str], **environment: str) -> None:
        """Start a process of a node; its output goes to a file of its name."""
        with (self._directory / f"{name}.log").open("ab") as output:
            self._of_node[node][name] = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **environment},
            )  # fmt: skip

    def kill(self, node: int) -> None:
        for process in self._of_node.pop(node, {}).values():
            kill_tree(process.pid)
            process.wait()

    def ended(self) -> list[tuple[int, str]]:
        """Return the nodes and names of processes that have ended by themselves."""
        return [
            (node, name)
            for node, processes in self._of_node.items()
            for name, process in processes.items()
            if process.poll() is not None
        ]


class Torchrun(Processes):
    """A job under torchrun, whose rendezvous is held by this process, so that any node may die."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(self, node: int) -> None:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{NODES}",
            "--nproc-per-node", str(WORKERS), "--max-restarts", "1000", "--monitor-interval", "0.1",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._store.port}",
            # The default is 30.
            "--rdzv-conf", "is_host=0,last_call_timeout=1",
            "--rdzv-id", "goodput", "--local-addr", "127.0.0.1",
            str(WORKER), "torchrun", str(self._directory),
        ]  # fmt: skip
        self.run(node, f"node-{node}", command)

    def tend(self) -> list[int]:
        return [node for node, _ in self.ended()]


class Torchft(Processes):
    """A job of torchft: a replica group for each worker, started again whenever it ends."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._lighthouse_port, self._attempts = free_port(), 0

    def __enter__(self) -> Self:
        lighthouse = shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent))
        if lighthouse is None:
            raise RuntimeError("torchft is not installed: pip install '.[bench]'")
        options = [
            "--bind", f"127.0.0.1:{self._lighthouse_port}",
            "--min_replicas", "1", "--join_timeout_ms", "1000",
        ]  # fmt: skip
        self.run(-1, "lighthouse", [lighthouse, *options])
        return self

    def start(self, node: int) -> None:
        for number in range(node * WORKERS, (node + 1) * WORKERS):
            self._start_group(number)

    def _start_group(self, number: int) -> None:
        self.run(
            number // WORKERS, f"group-{number}",
            [sys.executable, str(WORKER), "torchft", str(self._directory)],
            REPLICA_GROUP_ID=str(number), NUM_REPLICA_GROUPS=str(NODES * WORKERS),
            RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
            TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{self._lighthouse_port}",
        )  # fmt: skip

    def tend(self) -> list[int]:
        for node, name in self.ended():
            if node < 0:
                raise RuntimeError("torchft's lighthouse has ended")
            self._start_group(int(name.removeprefix("group-")))
        return []


CONTENDERS: dict[str, type[Keepstep | Torchrun | Torchft]] = {
    "keepstep": Keepstep,
    "torchrun": Torchrun,
    "torchft": Torchft,
}


def free_port() -> int:
    """Return a port that nobody uses now."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    return int(port)


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants with SIGKILL."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
