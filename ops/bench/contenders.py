"""Runs a job of two nodes under keepstep, torchrun or torchft, for goodput.py and recovery.py."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from examples.local_cluster import LocalCluster
from keepstep.elastic.store.ports import ReservedPort
from ops.bench.processes import Processes

WORKER = Path(__file__).with_name("goodput_worker.py")
NODES, WORKERS = 2, 2


class Contender(Protocol):
    """A job of `NODES` nodes."""

    def start(self, node: int) -> None:
        """Start a node."""
        ...

    def kill(self, node: int) -> None:
        """Kill all processes of a node."""
        ...

    def tend(self) -> list[int]:
        """Start the processes as a real job's launcher would; return the nodes that have ended."""
        ...


class Keepstep:
    """A job under `keepstep run`."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

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
    """A job of torchft: a replica group for each worker, started again whenever it ends.

    Args:
        directory: of the output, and of what the worker records.
        worker: path of the script, which takes a mode and that directory.
    """

    def __init__(self, directory: Path, worker: Path) -> None:
        super().__init__(directory)
        self._worker = worker
        self._ports = ExitStack()
        self._lighthouse_port = self._reserve_port()

    def start_lighthouse(self) -> None:
        """Start the groups' coordinator, before them."""
        lighthouse = shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent))
        if lighthouse is None:
            raise RuntimeError("torchft is not installed: pip install '.[bench]'")
        options = [
            "--bind", f"127.0.0.1:{self._lighthouse_port}",
            "--min_replicas", "1", "--join_timeout_ms", "1000",
        ]  # fmt: skip
        self.run(-1, "lighthouse", [lighthouse, *options])

    def start(self, node: int) -> None:
        for number in range(node * WORKERS, (node + 1) * WORKERS):
            self.start_group(number)

    def start_group(self, number: int) -> None:
        """Start a replica group, in place of one that has ended or was killed."""
        self.run(
            number // WORKERS, f"group-{number}",
            [sys.executable, str(self._worker), "torchft", str(self._directory)],
            REPLICA_GROUP_ID=str(number), NUM_REPLICA_GROUPS=str(NODES * WORKERS),
            RANK="0", WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self._reserve_port()),
            TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{self._lighthouse_port}",
        )  # fmt: skip

    def _reserve_port(self) -> int:
        return self._ports.enter_context(ReservedPort()).number

    def tend(self) -> list[int]:
        for node, name in self.ended():
            if node < 0:
                raise RuntimeError("torchft's lighthouse has ended")
            self.start_group(int(name.removeprefix("group-")))
        return []

    def close(self) -> None:
        super().close()
        self._ports.close()


@contextmanager
def keepstep(directory: Path) -> Iterator[Keepstep]:
    with LocalCluster(
        "goodput", [str(WORKER), "keepstep", str(directory)],
        nnodes=f"1:{NODES}", workers=WORKERS, log=directory / "agents",
    ) as cluster:  # fmt: skip
        yield Keepstep(cluster)


@contextmanager
def torchrun(directory: Path) -> Iterator[Torchrun]:
    with closing(Torchrun(directory)) as job:
        yield job


@contextmanager
def torchft(directory: Path, worker: Path = WORKER) -> Iterator[Torchft]:
    with closing(Torchft(directory, worker)) as job:
        job.start_lighthouse()
        yield job


CONTENDERS: dict[str, Callable[[Path], AbstractContextManager[Contender]]] = {
    "keepstep": keepstep,
    "torchrun": torchrun,
    "torchft": torchft,
}
"""Starts the coordination of a job in a directory; the end of the context kills all of it."""
