"""What a node's own figures say: a processor denied or slowed down, memory running out, a device that errs.

`NodeMetrics` is what a daemon fills in from psutil, cgroup `cpu.stat` and NVML. Counters are as their sources give them, since boot or
since the counter began; differences are taken here, against the reading before. Times are by the node's clock.

Denied processor time or a hot GPU harms nobody until a rank is slow by it: such findings explain slow ranks, and are no verdicts by
themselves. Memory and device errors are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from keepstep.monitor.diagnosis.subjects import node_subject
from keepstep.monitor.diagnosis.thresholds import NodeThresholds
from keepstep.monitor.verdicts import Advice, Syndrome, Verdict


@dataclass(frozen=True, slots=True)
class GpuMetrics:
    """One accelerator, from NVML.

    Args:
        index: on its node.
        celsius: temperature of the core.
        clock_hz: of the streaming multiprocessors, now.
        power_watts: now.
        memory_used: bytes.
        memory_total: bytes.
        ecc_uncorrected: volatile double-bit errors, a counter.
        ecc_corrected: volatile single-bit errors, a counter.
        xids: codes of the Xid errors seen since the daemon began.
        busy_share: 0 to 1; clocks of idle devices fall by themselves and are not judged.
    """

    index: int
    celsius: float = 0.0
    clock_hz: float = 0.0
    power_watts: float = 0.0
    memory_used: int = 0
    memory_total: int = 0
    ecc_uncorrected: int = 0
    ecc_corrected: int = 0
    xids: tuple[int, ...] = ()
    busy_share: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeMetrics:
    """One node at one moment. 0 stands for "not known" where nothing else is said.

    Args:
        node: its name, as in RankRecords.
        at_s: when this was read, by the node's monotonic clock.
        cpu_share: share of all processors in use, 0 to 1.
        load: runnable processes over the last minute (`getloadavg`), not divided by processors.
        throttled_s: `throttled_usec` of cgroup v2 `cpu.stat` in seconds, a counter.
        cpu_hz: current frequency, mean over processors.
        memory_total: bytes; of the cgroup, if that is less than the machine's.
        memory_available: bytes that can be had without swapping.
        swap_used: bytes.
        disk_latency_s: mean time of a request since the reading before.
        gpus: its accelerators.
        stopped_ranks: ranks whose process is stopped (state T).
    """

    node: str
    at_s: float
    cpu_share: float = 0.0
    load: float = 0.0
    throttled_s: float = 0.0
    cpu_hz: float = 0.0
    memory_total: int = 0
    memory_available: int = 0
    swap_used: int = 0
    disk_latency_s: float = 0.0
    gpus: tuple[GpuMetrics, ...] = ()
    stopped_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeMetricsHistory:
    """What is remembered of one node: its last readings (at most `sustained` + 1), the oldest first, and its errors at first sight."""

    readings: tuple[NodeMetrics, ...]
    ecc_at_first: Mapping[int, int]
    xids_at_first: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class NodeFindings:
    """Verdicts, and for nodes whose ranks may be slow because of it, why."""

    verdicts: tuple[Verdict, ...]
    throttled: Mapping[str, str]


def judge_nodes(
    metrics: Mapping[str, NodeMetrics],
    past: Mapping[str, NodeMetricsHistory],
    nodes: Mapping[int, str],
    now_s: float,
    thresholds: NodeThresholds,
) -> tuple[dict[str, NodeMetricsHistory], NodeFindings]:
    """Take in readings, one a node, repeated ones among them, and return what stands."""
    following: dict[str, NodeMetricsHistory] = {}
    for name, reading in metrics.items():
        known = past.get(name) or NodeMetricsHistory(
            (), _counts(reading, "ecc_uncorrected"), _xid_counts(reading)
        )
        readings = known.readings
        if not readings or reading.at_s > readings[-1].at_s:
            readings = (*readings, reading)[-(thresholds.sustained + 1) :]
        following[name] = NodeMetricsHistory(readings, known.ecc_at_first, known.xids_at_first)
    clocks = _usual_clocks(metrics)
    verdicts: list[Verdict] = []
    throttled: dict[str, str] = {}
    for name, one in sorted(following.items()):
        verdicts.extend(_device_errors(name, one, nodes, now_s, thresholds))
        verdicts.extend(_memory(name, one, nodes, now_s, thresholds))
        reason = _throttled(one, clocks, thresholds)
        if reason:
            throttled[name] = reason
    return following, NodeFindings(tuple(verdicts), throttled)


def _counts(reading: NodeMetrics, name: str) -> dict[int, int]:
    return {gpu.index: int(getattr(gpu, name)) for gpu in reading.gpus}


def _xid_counts(reading: NodeMetrics) -> dict[int, int]:
    return {gpu.index: len(gpu.xids) for gpu in reading.gpus}


def _usual_clocks(metrics: Mapping[str, NodeMetrics]) -> tuple[float, float]:
    """Return the median clock of processors and of busy GPUs over the nodes; 0.0 with fewer than three to compare."""
    processors = [one.cpu_hz for one in metrics.values() if one.cpu_hz > 0]
    devices = [
        gpu.clock_hz
        for one in metrics.values()
        for gpu in one.gpus
        if gpu.clock_hz > 0 and gpu.busy_share > 0.5
    ]
    return (
        float(np.median(processors)) if len(processors) >= 3 else 0.0,
        float(np.median(devices)) if len(devices) >= 3 else 0.0,
    )


def _throttled(
    past: NodeMetricsHistory, clocks: tuple[float, float], thresholds: NodeThresholds
) -> str:
    """Return why a node is held back, sustained over its last readings; empty if it is not."""
    if len(past.readings) < thresholds.sustained:
        return ""
    recent = past.readings[-thresholds.sustained :]
    if len(past.readings) > thresholds.sustained:
        pairs = list(zip(past.readings[:-1], past.readings[1:], strict=True))
        shares = [
            (after.throttled_s - before.throttled_s) / (after.at_s - before.at_s)
            for before, after in pairs
        ]
        if min(shares) > thresholds.throttled_share:
            return f"its cgroup was denied the processor {min(shares):.0%} of the time (cpu.stat)"
    if clocks[0] and all(0 < one.cpu_hz < thresholds.clock_ratio * clocks[0] for one in recent):
        return f"its processors run at {recent[-1].cpu_hz / 1e9:.2f} GHz, other nodes' at {clocks[0] / 1e9:.2f}"
    for gpu in recent[-1].gpus:
        same = [other for one in recent for other in one.gpus if other.index == gpu.index]
        if all(other.celsius >= thresholds.gpu_celsius for other in same):
            return f"GPU {gpu.index} is at {gpu.celsius:.0f} degrees Celsius"
        slow = thresholds.clock_ratio * clocks[1]
        if clocks[1] and all(
            0 < other.clock_hz < slow and other.busy_share > 0.5 for other in same
        ):
            return f"GPU {gpu.index} runs at {gpu.clock_hz / 1e6:.0f} MHz, others at {clocks[1] / 1e6:.0f}"
    return ""


def _device_errors(
    name: str,
    past: NodeMetricsHistory,
    nodes: Mapping[int, str],
    now_s: float,
    thresholds: NodeThresholds,
) -> list[Verdict]:
    told = []
    for gpu in past.readings[-1].gpus:
        more = gpu.ecc_uncorrected - past.ecc_at_first.get(gpu.index, 0)
        if more > 0:
            told.append(f"GPU {gpu.index} has {more} new uncorrectable memory errors")
        codes = [
            code
            for code in gpu.xids[past.xids_at_first.get(gpu.index, 0) :]
            if code in thresholds.bad_xids
        ]
        if codes:
            told.append(f"GPU {gpu.index} reports Xid {', '.join(map(str, sorted(set(codes))))}")
    if not told:
        return []
    subject = node_subject(name, nodes)
    return [
        Verdict(subject, Syndrome.DEVICE_ERROR, now_s, tuple(told), 0.95, 0.0, Advice.REPLACE_NODE)
    ]


def _memory(
    name: str,
    past: NodeMetricsHistory,
    nodes: Mapping[int, str],
    now_s: float,
    thresholds: NodeThresholds,
) -> list[Verdict]:
    readings = [one for one in past.readings if one.memory_total > 0]
    if len(readings) < thresholds.sustained:
        return []
    last = readings[-1]
    shares = [one.memory_available / one.memory_total for one in readings[-thresholds.sustained :]]
    told = ""
    if max(shares) < thresholds.memory_share:
        told = f"{last.memory_available / 2**20:.0f} MiB of memory are left, {shares[-1]:.1%}"
    elif max(shares) < thresholds.memory_low_share and last.at_s > readings[0].at_s:
        rate = (readings[0].memory_available - last.memory_available) / (
            last.at_s - readings[0].at_s
        )
        falling = all(
            after.memory_available < before.memory_available for before, after in pairwise(readings)
        )
        if falling and last.memory_available / rate < thresholds.memory_horizon_s:
            told = f"memory shrinks by {rate / 2**20:.0f} MiB a second and is gone in {last.memory_available / rate:.0f} s"
    if not told:
        return []
    return [
        Verdict(
            node_subject(name, nodes), Syndrome.MEMORY_SHORT, now_s, (told,), 0.9, 0.0, Advice.ALERT
        )
    ]
