"""Taking a node's measures: /proc by psutil, the cgroup, and NVIDIA's management library where it is there.

Whatever cannot be read is 0 in the result, as `NodeMetrics` says, never an error: a monitor without a thermometer is still a monitor. What
changes slowly or costs a millisecond to read is read less often than twice a second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from keepstep.monitor.diagnosis.metrics import GpuMetrics, NodeMetrics
from keepstep.monitor.node import cgroups
from keepstep.monitor.node.gpu import GpuProbe

_EVERY_S = 0.9
_SLOW_EVERY_S = 5.0


class NodeProbe:
    """Measures this node. Shares and latencies are over the time since the last sample; the first has none. `close` when done."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._cgroups: dict[int, cgroups.CgroupFiles] = {}
        self._gpus = GpuProbe.open()
        self._busy: tuple[float, float] | None = None
        self._disk: tuple[int, float] | None = None
        self._sampled: NodeMetrics | None = None
        self._cpu_hz = 0.0
        self._devices: tuple[GpuMetrics, ...] = ()
        self._slow_due_s = 0.0

    def sample(self, workers: Mapping[int, int]) -> NodeMetrics:
        """Return the measures as they are now; what is about a cgroup, of the workers' (process id by rank), not of the monitor's own.

        More than about once a second the last sample is given again.
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
            frequency = psutil.cpu_freq()
            self._cpu_hz = float(frequency.current) * 1e6 if frequency else 0.0
            self._devices = self._gpus.sample() if self._gpus is not None else ()
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
            throttled_s=max((cgroups.throttled_s(group) or 0.0 for group in groups), default=0.0),
            cpu_hz=self._cpu_hz,
            memory_total=total,
            memory_available=available,
            swap_used=int(psutil.swap_memory().used),
            disk_latency_s=self._disk_latency_s(),
            gpus=self._devices,
            stopped_ranks=tuple(sorted(rank for rank, pid in workers.items() if _is_stopped(pid))),
        )

    def close(self) -> None:
        """Let go of the management library."""
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
        told = psutil.disk_io_counters()
        if told is None:
            return 0.0
        requests, spent_s = (
            int(told.read_count + told.write_count),
            float(told.read_time + told.write_time) / 1e3,
        )
        before, self._disk = self._disk, (requests, spent_s)
        if before is None or requests <= before[0]:
            return 0.0
        return max(0.0, (spent_s - before[1]) / (requests - before[0]))


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (FileNotFoundError, ProcessLookupError):
        return False
