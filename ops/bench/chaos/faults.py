"""Injects faults into a running job: one function for each kind in `schedule.KINDS`.

`inject` begins a fault; `Injected.end` ends it: processes continue, links are whole again, members
and nodes return. A fault never waits for the job, except that `join_in_recovery` waits until the
job has begun to recover, and those that crash the job wait until it has stored something.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import open_storage
from ops.bench.chaos.cluster import NAMES, ChaosCluster
from ops.bench.chaos.progress import Patience, Watcher
from ops.bench.chaos.schedule import NODES, Fault
from ops.bench.chaos.storage import Files, Objects, RequestFault, damage

_REMOUNT_S = 20.0
_HOG = (
    "import sys, time; block = bytearray(int(sys.argv[1])); "
    "block[::4096] = bytes(len(block[::4096])); time.sleep(600)"
)


@dataclass(slots=True)
class Injected:
    """A fault that has begun.

    Attributes:
        end: ends it.
        stored_floor: the step of the checkpoint that the job can resume from, if the fault leaves
            nothing else; None if the kind's promise says enough.
        leaving: nodes whose agents are to end with the status of SIGTERM, and then to return.
    """

    end: Callable[[], None] = lambda: None
    stored_floor: int | None = None
    leaving: tuple[str, ...] = ()


@dataclass(slots=True)
class Harm:
    """The parts of a job that faults act on."""

    cluster: ChaosCluster
    watcher: Watcher
    patience: Patience
    notes: list[str] = field(default_factory=list)
    """The faults that could not be injected, in words."""

    def inject(self, fault: Fault) -> Injected:
        """Begin a fault of the schedule."""
        act: Callable[[Fault], Injected] = getattr(self, f"_{fault.kind}")
        return act(fault)

    # Processes of nodes.

    def _worker_kill(self, fault: Fault) -> Injected:
        _send(signal.SIGKILL, self._workers(fault.node)[:1])
        return Injected()

    def _two_workers_kill(self, fault: Fault) -> Injected:
        first, second = self._workers(fault.node)[:1], self._workers(fault.other)[:1]
        _send(signal.SIGKILL, [*first, *second])
        return Injected()

    def _worker_stop(self, fault: Fault) -> Injected:
        return _stopped(self._workers(fault.node)[:1])

    def _agent_kill(self, fault: Fault) -> Injected:
        node = NAMES[fault.node]
        agent = self.cluster.agents.pop(node)
        # Its helpers end with it, by themselves.
        agent.kill()
        agent.wait()
        return Injected(end=lambda: self.cluster.start(node))

    def _node_kill(self, fault: Fault) -> Injected:
        node = NAMES[fault.node]
        self.cluster.kill(node)
        return Injected(end=lambda: self.cluster.start(node))

    def _agent_stop(self, fault: Fault) -> Injected:
        return _stopped(self.cluster.processes_of(NAMES[fault.node])[:1])

    def _node_stop(self, fault: Fault) -> Injected:
        return _stopped(self.cluster.processes_of(NAMES[fault.node]))

    def _snapshot_server_kill(self, fault: Fault) -> Injected:
        _send(signal.SIGKILL, self._snapshot_servers(fault.node))
        return Injected()

    def _snapshot_server_stop(self, fault: Fault) -> Injected:
        return _stopped(self._snapshot_servers(fault.node))

    def _monitor_kill(self, fault: Fault) -> Injected:
        node = NAMES[fault.node]
        _send(signal.SIGKILL, [self.cluster.monitor_of(node)])
        return Injected(end=lambda: self.cluster.start_monitor(node))

    def _monitor_stop(self, fault: Fault) -> Injected:
        return _stopped([self.cluster.monitor_of(NAMES[fault.node])])

    # The coordinator.

    def _member_kill(self, fault: Fault) -> Injected:
        self.cluster.coordinator.kill(fault.node)
        return Injected(end=self.cluster.coordinator.start_missing)

    def _member_stop(self, fault: Fault) -> Injected:
        self.cluster.coordinator.stop(fault.node)
        return Injected(end=lambda: self.cluster.coordinator.resume(fault.node))

    def _coordinator_away(self, _: Fault) -> Injected:
        coordinator = self.cluster.coordinator
        coordinator.kill(*coordinator.members)
        return Injected(end=coordinator.start_missing)

    def _coordinator_stop(self, _: Fault) -> Injected:
        coordinator = self.cluster.coordinator
        coordinator.stop(*coordinator.members)
        return Injected(end=lambda: coordinator.resume(*coordinator.members))

    def _coordinator_lost(self, _: Fault) -> Injected:
        """Kill all members and delete their data: the next ones know nothing of the job."""
        self.cluster.coordinator.lose()

        def end() -> None:
            self.cluster.coordinator.start_missing()
            self.watcher.restart()

        return Injected(end=end)

    # The network: places of nodes come first, then those of etcd's members.

    def _member_cut(self, fault: Fault) -> Injected:
        return self._linked(self._all_of(NODES + fault.node), both=True, cut=True)

    def _coordinator_cut(self, fault: Fault) -> Injected:
        return self._linked(self._to_members(fault.node), both=True, cut=True)

    def _coordinator_unreachable(self, _: Fault) -> Injected:
        return self._linked(self._to_members(*range(NODES)), both=True, cut=True)

    def _requests_lost(self, _: Fault) -> Injected:
        return self._linked(self._to_members(*range(NODES)), both=False, cut=True)

    def _answers_lost(self, _: Fault) -> Injected:
        links = [(member, node) for node, member in self._to_members(*range(NODES))]
        return self._linked(links, both=False, cut=True)

    def _node_cut(self, fault: Fault) -> Injected:
        return self._linked(self._all_of(fault.node), both=True, cut=True)

    def _link_cut(self, fault: Fault) -> Injected:
        return self._linked([(fault.node, fault.other)], both=True, cut=True)

    def _link_cut_one_way(self, fault: Fault) -> Injected:
        return self._linked([(fault.node, fault.other)], both=False, cut=True)

    def _link_delay(self, fault: Fault) -> Injected:
        delay_s = 0.02 + 0.2 * fault.strength
        return self._linked(self._among_job(fault.node), both=True, delay_s=delay_s)

    def _link_loss(self, fault: Fault) -> Injected:
        lost = 0.02 + 0.28 * fault.strength
        return self._linked(self._among_job(fault.node), both=True, lost=lost)

    def _to_members(self, *nodes: int) -> list[tuple[int, int]]:
        """Return the links from nodes to every member of the coordinator."""
        members = self.cluster.coordinator.members
        return [(node, NODES + member) for node in nodes for member in members]

    def _among_job(self, node: int) -> list[tuple[int, int]]:
        """Return the links from a node to all others and to the coordinator."""
        others = [other for other in range(NODES) if other != node]
        return [*((node, other) for other in others), *self._to_members(node)]

    def _all_of(self, place: int) -> list[tuple[int, int]]:
        """Return the links from a place to every other one, this process's included."""
        return [(place, other) for other in range(self.cluster.own_place + 1) if other != place]

    # Storage.

    def _disk_full(self, _: Fault) -> Injected:
        storage = self._files()
        assert storage.file_system is not None
        filler = storage.file_system.folder / "filler"
        with filler.open("wb", buffering=0) as file:
            free = os.statvfs(file.fileno())
            # A checkpoint may take some of it meanwhile.
            with suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize * 15 // 16)
            file.seek(0, os.SEEK_END)
            for nbytes in (1 << 20, 1 << 12):
                try:
                    while True:
                        file.write(bytes(nbytes))
                except OSError:
                    continue  # Full for this size.
        return Injected(end=filler.unlink)

    def _disk_read_only(self, _: Fault) -> Injected:
        file_system = self._files().file_system
        assert file_system is not None
        until_s = time.monotonic() + _REMOUNT_S
        # The kernel refuses while a file is open for writing.
        while not file_system.set_writable(False):
            if time.monotonic() > until_s:
                self.notes.append("the disk was always written to, and not made read-only")
                return Injected()
            time.sleep(0.01)
        return Injected(end=lambda: _must(file_system.set_writable(True)))

    def _disk_stall(self, fault: Fault) -> Injected:
        file_system = self._files().file_system
        assert file_system is not None
        thawing = file_system.freeze(fault.seconds)
        return Injected(end=lambda: _must(thawing.wait() == 0))

    def _objects_refused(self, _: Fault) -> Injected:
        return self._requests(RequestFault.REFUSE)

    def _objects_stall(self, _: Fault) -> Injected:
        return self._requests(RequestFault.STALL)

    def _objects_slow(self, fault: Fault) -> Injected:
        return self._requests(RequestFault.SLOW, delay_s=0.2 + 1.5 * fault.strength)

    def _objects_torn(self, _: Fault) -> Injected:
        return self._requests(RequestFault.TEAR)

    # Nodes that leave and join, and the whole job.

    def _node_term(self, fault: Fault) -> Injected:
        return self._preempted(NAMES[fault.node])

    def _all_term(self, _: Fault) -> Injected:
        return self._preempted(*NAMES)

    def _node_group_term(self, fault: Fault) -> Injected:
        return self._preempted_with_helpers(NAMES[fault.node])

    def _all_group_term(self, _: Fault) -> Injected:
        return self._preempted_with_helpers(*NAMES)

    def _join_in_recovery(self, fault: Fault) -> Injected:
        """Kill a node, let it join again, and kill a worker once a generation admits it."""
        node = NAMES[fault.node]
        before = self.watcher.view.generation_number
        self.cluster.kill(node)
        self.patience.wait_until(
            "the generation ends after a node was killed",
            lambda: self.watcher.view.generation_number > before or self.watcher.view.is_closing,
        )
        self.cluster.start(node)
        self.patience.wait_until(
            f"node {node} is in a generation again",
            lambda: (
                (generation := self.watcher.view.generation) is not None
                and generation.generation > before
                and generation.member(node) is not None
            ),
        )
        _send(signal.SIGKILL, self._workers(fault.other)[:1])
        return Injected()

    def _job_crash(self, _: Fault) -> Injected:
        self._wait_for_checkpoints(1)
        floor = list_steps(open_storage(self.cluster.storage.url))[0].step
        self._kill_all()
        return Injected(end=self._start_all, stored_floor=floor)

    def _job_and_coordinator_crash(self, _: Fault) -> Injected:
        """Kill everything except the storage; the new coordinator knows nothing of the job."""
        self._wait_for_checkpoints(1)
        floor = list_steps(open_storage(self.cluster.storage.url))[0].step
        self._kill_all()
        self.cluster.coordinator.lose()
        self.cluster.coordinator.start_missing()
        self.watcher.restart()
        return Injected(end=self._start_all, stored_floor=floor)

    def _checkpoint_damaged(self, fault: Fault) -> Injected:
        self._wait_for_checkpoints(2)
        self._kill_all()
        url = self.cluster.storage.url
        newest, older, *_ = list_steps(open_storage(url))
        damaged = damage(url, newest.directory, fault.strength)
        self.notes.append(f"deleted {damaged}")
        return Injected(end=self._start_all, stored_floor=older.step)

    def _memory_pressure(self, fault: Fault) -> Injected:
        """Let the kernel kill a process of a node, as it has less memory than it uses."""
        node = NAMES[fault.node]
        group = self.cluster.memory_group(node)
        nbytes = 48 << 20
        group.squeeze(nbytes // 2)
        hog = self.cluster.run_in(node, [sys.executable, "-c", _HOG, str(nbytes)], "hog.log")

        def end() -> None:
            group.release()
            hog.kill()
            hog.wait()

        return Injected(end=end)

    def _workers(self, node: int) -> list[psutil.Process]:
        """Return the workers of a node that train, none if it has none now."""
        workers = self.cluster.workers_of(NAMES[node])
        return workers[: self.cluster.plan.workers] if workers else []

    def _snapshot_servers(self, node: int) -> list[psutil.Process]:
        return self.cluster.snapshot_servers_of(NAMES[node])

    def _files(self) -> Files:
        assert isinstance(self.cluster.storage, Files)
        return self.cluster.storage

    def _requests(self, kind: RequestFault, delay_s: float = 0.0) -> Injected:
        assert isinstance(self.cluster.storage, Objects)
        proxy = self.cluster.storage.proxy
        proxy.set(kind, delay_s)
        return Injected(end=lambda: proxy.set(RequestFault.NONE))

    def _linked(
        self,
        links: list[tuple[int, int]],
        *,
        both: bool,
        delay_s: float = 0.0,
        lost: float = 0.0,
        cut: bool = False,
    ) -> Injected:
        network = self.cluster.places.network
        assert network is not None
        directed = [*links, *((receiver, sender) for sender, receiver in links if both)]
        for sender, receiver in directed:
            network.link(sender, receiver, delay_s=delay_s, lost=lost, cut=cut)

        def end() -> None:
            for sender, receiver in directed:
                network.link(sender, receiver)

        return Injected(end=end)

    def _preempted(self, *nodes: str) -> Injected:
        for node in nodes:
            self.cluster.terminate(node)
        return self._leaving(nodes)

    def _preempted_with_helpers(self, *nodes: str) -> Injected:
        """Send SIGTERM to every process of nodes at once, as systemd and Slurm do."""
        processes = [process for node in nodes for process in self.cluster.processes_of(node)]
        _send(signal.SIGTERM, processes)
        return self._leaving(nodes)

    def _leaving(self, nodes: tuple[str, ...]) -> Injected:
        def end() -> None:
            for node in nodes:
                self.cluster.start(node)

        return Injected(end=end, leaving=nodes)

    def _wait_for_checkpoints(self, count: int) -> None:
        self.patience.wait_until(
            f"{count} checkpoints are stored",
            lambda: len(list_steps(open_storage(self.cluster.storage.url))) >= count,
        )

    def _kill_all(self) -> None:
        # All agents at once: none of them notices the death of another.
        _send(
            signal.SIGKILL,
            [process for node in NAMES for process in self.cluster.processes_of(node)],
        )
        for node in NAMES:
            self.cluster.agents.pop(node).wait()

    def _start_all(self) -> None:
        for node in NAMES:
            self.cluster.start(node)


def _send(number: signal.Signals, processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _stopped(processes: list[psutil.Process]) -> Injected:
    _send(signal.SIGSTOP, processes)
    return Injected(end=lambda: _send(signal.SIGCONT, processes))


def _must(succeeded: bool) -> None:
    if not succeeded:
        raise RuntimeError("the file system does not become writable again")
