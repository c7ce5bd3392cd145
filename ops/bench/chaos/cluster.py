"""Runs the job of one seed: agents, monitor daemons, the coordinator, storage and the network.

Where the machine permits it every node, every etcd member and this process have a network namespace
each, connected by the switch of `switched_network`. A node's processes can be in a memory control
group of their own. All processes carry a mark in their environment, by which `leftovers` finds
those that outlive the job, whatever session or parent they have.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from examples.local_cluster import LocalCluster
from keepstep.elastic.store.ports import ReservedPort
from ops.bench.chaos.coordinator import MEMBERS, Coordinator
from ops.bench.chaos.machine import MemoryGroup
from ops.bench.chaos.schedule import NODES, Ability, JobPlan
from ops.bench.chaos.storage import Files, Objects
from ops.bench.switched_network import DEVICE, Network, address, enter, enter_open

ROOT = Path(__file__).parents[3]
WORKER = ROOT / "ops" / "bench" / "chaos_worker.py"
MARK = "KEEPSTEP_CHAOS"
NAMES = tuple("abcdefgh"[:NODES])
JOB = "chaos"
PACE_S = 0.1
ENDLESS = 10**6
_CLIENT_PORT, _PEER_PORT, _MONITOR_PORT = 2379, 2380, 8433


class Places:
    """Places of nodes, etcd members and this process in the network.

    With a network, places 0 to NODES - 1 are nodes', then come the members', then this process's.
    """

    def __init__(self, network: Network | None) -> None:
        self.network = network
        self._ports: dict[tuple[int, int], ReservedPort] = {}

    def host(self, place: int) -> str:
        """Return the address at which a place is reached."""
        return address(place) if self.network is not None else "127.0.0.1"

    def endpoint(self, place: int, port: int) -> str:
        """Return HOST:PORT of a server at a place; its port is another one without a network."""
        if self.network is not None:
            return f"{address(place)}:{port}"
        if (place, port) not in self._ports:
            self._ports[place, port] = ReservedPort()
        return f"127.0.0.1:{self._ports[place, port].number}"

    def prefix(self, place: int) -> list[str]:
        """Return the beginning of the command of a process at a place."""
        if self.network is None:
            return []
        return ["nsenter", f"--net=/var/run/netns/{self.network.namespaces[place]}", "--"]

    def close(self) -> None:
        """End the reservations of ports."""
        for port in self._ports.values():
            port.close()


class ChaosCluster(LocalCluster):
    """The job, and everything that it runs on.

    Args:
        directory: for logs, records, data of the coordinator and of the storage.
        plan: the job.
        abilities: what the machine permits.
        lease_ttl_s: as for `keepstep run --lease-ttl`.
        members: how many members the coordinator has.
    """

    def __init__(
        self,
        directory: Path,
        plan: JobPlan,
        abilities: Collection[Ability],
        lease_ttl_s: float,
        members: int = MEMBERS,
    ) -> None:
        self.directory, self.plan, self._abilities = directory, plan, abilities
        self._lease_ttl_s = lease_ttl_s
        self._members = members
        self.own_place = NODES + members
        self.records = directory / "records"
        self.runtime = directory / "runtime"
        self.mark = uuid.uuid4().hex
        self._stack = ExitStack()
        self._memory_groups: dict[str, MemoryGroup] = {}
        self._monitors: dict[str, subprocess.Popen[bytes]] = {}
        self.steps = ENDLESS
        super().__init__(
            JOB, [], nnodes=plan.nnodes, workers=plan.workers, log=directory / "agents",
            # The first generation waits for all nodes, however slowly they start.
            last_call_s=20.0, store="",
        )  # fmt: skip

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._kill_marked)
            for folder in (self.records, self.runtime, self.directory / "workers"):
                folder.mkdir(parents=True, exist_ok=True)
            self.runtime.chmod(0o700)
            network = None
            if Ability.NETWORK in self._abilities:
                network = stack.enter_context(Network(self.own_place + 1))
                own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
                stack.callback(_return_to, own)
                enter(network.namespaces[self.own_place])
            self.places = Places(network)
            stack.callback(self.places.close)
            self.storage = self._start_storage()
            stack.callback(self.storage.close)
            self.coordinator = Coordinator(
                self.directory / "etcd",
                [
                    (
                        self.places.endpoint(NODES + member, _CLIENT_PORT),
                        self.places.endpoint(NODES + member, _PEER_PORT),
                    )
                    for member in range(self._members)
                ],
                [self.places.prefix(NODES + member) for member in range(self._members)],
                self.environment(),
            )
            stack.callback(self.coordinator.close)
            self.coordinator.start_missing()
            if Ability.MEMORY_GROUP in self._abilities:
                for node in NAMES:
                    self._memory_groups[node] = MemoryGroup(node)
            stack.callback(self._kill_marked)
            self._stack = stack.pop_all()
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end_monitors()
        super().__exit__(kind, error, trace)
        self._stack.close()
        for group in self._memory_groups.values():
            group.remove()

    @property
    def url(self) -> str:
        """The coordinator's URL."""
        return self.coordinator.url

    def environment(self) -> dict[str, str]:
        """Return the environment of all of the job's processes."""
        environment = {
            **os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
            "TMPDIR": str(self.runtime), "XDG_RUNTIME_DIR": str(self.runtime),
            "KEEPSTEP_SECRET": "0" * 64,
        }  # fmt: skip
        if self.places.network is not None:
            environment["GLOO_SOCKET_IFNAME"] = DEVICE
        return environment

    def start(self, node: str, *options: str) -> None:
        """Start a node's agent."""
        place = NAMES.index(node)
        command = self.command(
            node, "--lease-ttl", str(self._lease_ttl_s), "--spares", str(self.plan.spares),
            "--local-addr", self.places.host(place), "--max-restarts", "20", "--monitor",
            "--grace", "300", "--redirects", "3", "--log-dir", str(self.directory / "workers"),
            *options,
        )  # fmt: skip
        self.agents[node] = self._popen(node, command, f"agents/{node}.log")

    def command(self, node: str, *options: str) -> list[str]:
        """Return the command line of a node's agent."""
        return [*super().command(node, *options), *self.script()]

    def script(self) -> list[str]:
        """Return the training script and its arguments."""
        script_options = {
            "log": str(self.records), "steps": self.steps, "pace_s": PACE_S,
            "checkpoint": self.storage.url, "every": self.plan.checkpoint_every,
            "dropout": self.plan.dropout,
        }  # fmt: skip
        return [str(WORKER), json.dumps(script_options)]

    def start_monitor(self, node: str) -> None:
        """Start a node's monitor daemon. The first node's is the root of the tree."""
        place = NAMES.index(node)
        options = [
            "--node", node, "--host", self.places.host(place),
            "--port", self.places.endpoint(place, _MONITOR_PORT).rpartition(":")[2],
        ]  # fmt: skip
        if node == NAMES[0]:
            for other in range(1, NODES):
                options += ["--child", f"http://{self.places.endpoint(other, _MONITOR_PORT)}"]
            options += ["--store", self.url]
        else:
            options.append("--relay")
        command = [sys.executable, "-P", "-m", "keepstep", "monitor", "--job", JOB, *options]
        self._monitors[node] = self._popen(node, command, f"monitors/{node}.log")

    def monitor_of(self, node: str) -> psutil.Process:
        """Return a node's monitor daemon."""
        return psutil.Process(self._monitors[node].pid)

    def dead_monitors(self) -> list[str]:
        """Return the nodes whose daemon has ended."""
        return [node for node, daemon in self._monitors.items() if daemon.poll() is not None]

    def end_monitors(self) -> None:
        """End all daemons as a user does."""
        for daemon in self._monitors.values():
            if daemon.poll() is None:
                daemon.send_signal(signal.SIGCONT)
                daemon.terminate()
        for daemon in self._monitors.values():
            try:
                daemon.wait(120)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._monitors.clear()

    def memory_group(self, node: str) -> MemoryGroup:
        """Return the memory control group of a node's processes."""
        return self._memory_groups[node]

    def processes_of(self, node: str) -> list[psutil.Process]:
        """Return a node's agent and its descendants."""
        try:
            agent = psutil.Process(self.agents[node].pid)
            return [agent, *agent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def marked_processes(self) -> list[psutil.Process]:
        """Return all processes of the job, whatever session or parent they have."""
        marked = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    marked.append(process)
            except psutil.Error:
                continue
        return marked

    def run_in(self, node: str, command: list[str], log: str) -> subprocess.Popen[bytes]:
        """Run another process on a node."""
        return self._popen(node, command, log)

    def _popen(self, node: str, command: list[str], log: str) -> subprocess.Popen[bytes]:
        path = self.directory / log
        path.parent.mkdir(exist_ok=True)
        prefix = self.places.prefix(NAMES.index(node))
        if node in self._memory_groups:
            enter_group = 'echo $$ > "$1"; shift; exec "$@"'
            group = str(self._memory_groups[node].processes)
            prefix = ["sh", "-c", enter_group, "sh", group, *prefix]
        environment = {**self.environment(), **self.storage.environment}
        with path.open("ab") as output:
            return subprocess.Popen(
                [*prefix, *command], stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            )  # fmt: skip

    def _start_storage(self) -> Files | Objects:
        if self.plan.has_objects:
            return Objects(self.places.host(self.own_place))
        has_file_system = Ability.FILE_SYSTEM in self._abilities
        image = self.directory / "disk.img" if has_file_system else None
        return Files(self.directory / "disk", image)

    def _kill_marked(self) -> None:
        for process in self.marked_processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(self.marked_processes(), timeout=30)


def _return_to(namespace: int) -> None:
    """Move this thread back into a network namespace."""
    enter_open(namespace)
    os.close(namespace)
