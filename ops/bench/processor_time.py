"""Reads how much processor time processes have used.

It wanders less than the wall clock's time where other processes use the same cores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import psutil

from examples.local_cluster import process_tree

Seconds = dict[str, float]

_ROLES: Mapping[str, str] = {
    "keepstep.elastic.worker.bootstrap": "worker",
    "keepstep.elastic.worker.fork_server": "fork_server",
    "keepstep.checkpoint.snapshot.server.server": "snapshot_server",
    "keepstep.monitor": "monitor",
}


def processor_s(processes: Iterable[psutil.Process]) -> float:
    """Return the processor seconds that processes have used since they began."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def seconds_by_role(agents: Iterable[int], etcd: int) -> Seconds:
    """Return the processor seconds of a job's processes since they began, by what they are.

    Args:
        agents: the process ids of the agents.
        etcd: that of the coordinator.
    """
    seconds: Seconds = defaultdict(float, etcd=processor_s(process_tree(etcd)))
    for agent in agents:
        for process in process_tree(agent):
            seconds[_role(process, agent)] += processor_s([process])
    return seconds


def _role(process: psutil.Process, agent: int) -> str:
    if process.pid == agent:
        return "agent"
    arguments = " ".join(process.cmdline())
    return next((role for module, role in _ROLES.items() if module in arguments), "other")
