"""Measures a node: /proc through psutil, cgroups, and NVIDIA's management library if present.

A value that cannot be read is 0 in the result, as `NodeMetrics` defines, and never an error: the
monitor works without it. Values that change slowly or cost a millisecond to read are read less
often than twice a second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

from keepstep.monitor.diagnosis.metrics import (
    GpuMetrics,
    NicMetrics,
    NodeMetrics,
    ProcessSample,
)
from keepstep.monitor.node import cgroups
from keepstep.monitor.node.gpu import GpuProbe
from keepstep.monitor.node.networks import NetworkProbe
from keepstep.monitor.node.processes import sample_processes
from keepstep.monitor.telemetry.ring import stat_fields

_EVERY_S = 0.9
_SLOW_EVERY_S = 5.0
_UNREADABLE = (NotImplementedError, OSError)
"""Errors of psutil where /proc or /sys lacks a file, as in some containers."""


class NodeProbe:
    """Measures this node. `close` when done.

    Shares and latencies are over the time since the previous sample; the first sample has none.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._cgroups: dict[int, cgroups.CgroupFiles] = {}
        self._gpus = GpuProbe.open()
        self._networks = NetworkProbe()
        self._busy: tuple[float, float] | None = None
        self._disk: tuple[int, float] | None = None
        self._sampled: NodeMetrics | None = None
        self._cpu_hz = 0.0
        self._devices: tuple[GpuMetrics, ...] = ()
        self._nics: tuple[NicMetrics, ...] = ()
        self._processes: tuple[ProcessSample, ...] = ()
        self._slow_due_s = 0.0

    def sample(self, workers: Mapping[int, int]) -> NodeMetrics:
        """Return the current measures; within about a second, the previous sample again.

        Args:
            workers: process id of each rank; its cgroup is measured, not the monitor's own.
        """
        if self._sampled is not None and time.monotonic() - self._sampled.at_s < _EVERY_S:
            return self._sampled
        self._sampled = self._sample(workers)
        return self._sampled

    def _sample(self, workers: Mapping[int, int]) -> NodeMetrics:
        pids = set(workers.values())
        self._cgroups = {pid: self._cgroups.get(pid) or cgroups.find(pid) for pid in pids}
        groups = set(self._cgroups.values())
        now_s = time.monotonic()
        if now_s >= self._slow_due_s:
            self._slow_due_s = now_s + _SLOW_EVERY_S
            self._cpu_hz = _cpu_hz()
            self._devices = self._gpus.sample(workers, now_s) if self._gpus is not None else ()
            self._nics = self._networks.sample(now_s)
            self._processes = sample_processes(workers)
        cpu_time = max(filter(None, map(cgroups.cpu_time, groups)), default=cgroups.CpuTime())
        memory = psutil.virtual_memory()
        total, available = int(memory.total), int(memory.available)
        for group in groups:
            limit, held = cgroups.memory_limit_nbytes(group), cgroups.memory_held_nbytes(group)
            if limit is not None and held is not None and limit - held < available:
                total, available = limit, max(0, limit - held)
        return NodeMetrics(
            node=self._node,
            at_s=now_s,
            cpu_share=self._cpu_share(),
            load=float(psutil.getloadavg()[0]),
            throttled_s=cpu_time.throttled_s,
            cgroup_cpu_s=cpu_time.used_s,
            cpu_hz=self._cpu_hz,
            memory_total=total,
            memory_available=available,
            swap_used=int(psutil.swap_memory().used),
            disk_latency_s=self._disk_latency_s(),
            gpus=self._devices,
            stopped_ranks=tuple(sorted(rank for rank, pid in workers.items() if _is_stopped(pid))),
            processes=self._processes,
            nics=self._nics,
        )

    def close(self) -> None:
        """Release the management library."""
        if self._gpus is not None:
            self._gpus.close()

    def _cpu_share(self) -> float:
        times = psutil.cpu_times()
        total_s = float(sum(times[:8]))  # user to steal; guest time is in user already
        busy_s = total_s - float(times.idle) - float(times.iowait)
        before, self._busy = self._busy, (busy_s, total_s)
        if before is None or total_s <= before[1]:
            return 0.0
        return min(1.0, max(0.0, (busy_s - before[0]) / (total_s - before[1])))

    def _disk_latency_s(self) -> float:
        counters = None
        with suppress(*_UNREADABLE):
            counters = psutil.disk_io_counters()
        if counters is None:
            return 0.0
        requests = int(counters.read_count + counters.write_count)
        spent_s = float(counters.read_time + counters.write_time) / 1e3
        before, self._disk = self._disk, (requests, spent_s)
        if before is None or requests <= before[0]:
            return 0.0
        return max(0.0, (spent_s - before[1]) / (requests - before[0]))


def _cpu_hz() -> float:
    frequency = None
    with suppress(*_UNREADABLE):
        frequency = psutil.cpu_freq()
    return float(frequency.current) * 1e6 if frequency else 0.0


def _is_stopped(pid: int) -> bool:
    return stat_fields(pid)[:1] in ([b"T"], [b"t"])
