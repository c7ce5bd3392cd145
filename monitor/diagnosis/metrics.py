"""Judges nodes' metrics: throttled processors, memory that runs out, device errors.

A daemon fills in `NodeMetrics` from psutil, cgroup `cpu.stat` and NVML. Counters are as their
sources give them, since boot or since the counter began; differences to the reading before are
taken here. Times are by the node's clock.

Denied processor time or a hot GPU does no harm until a rank is slow by it: such findings only
explain slow ranks, and are not verdicts. Findings on memory and device errors are verdicts.
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
    """One node at one moment. 0 means "not known" unless stated otherwise.

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
    """State of one node between calls.

    Args:
        readings: its last readings (at most `sustained` + 1), oldest first.
        ecc_at_first: uncorrectable errors of each GPU at the first reading.
        xids_at_first: number of Xids of each GPU at the first reading.
    """

    readings: tuple[NodeMetrics, ...]
    ecc_at_first: Mapping[int, int]
    xids_at_first: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class NodeFindings:
    """Findings on nodes.

    Args:
        verdicts: on memory and devices.
        throttled: for nodes whose ranks may be slow because of it, the reason.
    """

    verdicts: tuple[Verdict, ...]
    throttled: Mapping[str, str]


def judge_nodes(
    metrics: Mapping[str, NodeMetrics],
    past: Mapping[str, NodeMetricsHistory],
    nodes: Mapping[int, str],
    now_s: float,
    thresholds: NodeThresholds,
) -> tuple[dict[str, NodeMetricsHistory], NodeFindings]:
    """Add readings, one per node, and return what holds.

    Repeated readings are ignored.
    """
    next_histories: dict[str, NodeMetricsHistory] = {}
    for name, reading in metrics.items():
        history_before = past.get(name) or NodeMetricsHistory(
            (), _counts(reading, "ecc_uncorrected"), _xid_counts(reading)
        )
        readings = history_before.readings
        if not readings or reading.at_s > readings[-1].at_s:
            readings = (*readings, reading)[-(thresholds.sustained + 1) :]
        next_histories[name] = NodeMetricsHistory(
            readings, history_before.ecc_at_first, history_before.xids_at_first
        )
    clocks = _usual_clocks(metrics)
    verdicts: list[Verdict] = []
    throttled: dict[str, str] = {}
    for name, history in sorted(next_histories.items()):
        verdicts.extend(_device_errors(name, history, nodes, now_s, thresholds))
        verdicts.extend(_memory(name, history, nodes, now_s, thresholds))
        reason = _throttled(history, clocks, thresholds)
        if reason:
            throttled[name] = reason
    return next_histories, NodeFindings(tuple(verdicts), throttled)


def _counts(reading: NodeMetrics, name: str) -> dict[int, int]:
    """Return a counter of each GPU."""
    return {gpu.index: int(getattr(gpu, name)) for gpu in reading.gpus}


def _xid_counts(reading: NodeMetrics) -> dict[int, int]:
    return {gpu.index: len(gpu.xids) for gpu in reading.gpus}


def _usual_clocks(metrics: Mapping[str, NodeMetrics]) -> tuple[float, float]:
    """Return the median clock of processors and of busy GPUs over the nodes.

    0.0 with fewer than three to compare.
    """
    processors = [reading.cpu_hz for reading in metrics.values() if reading.cpu_hz > 0]
    devices = [
        gpu.clock_hz
        for reading in metrics.values()
        for gpu in reading.gpus
        if gpu.clock_hz > 0 and gpu.busy_share > 0.5
    ]
    return (
        float(np.median(processors)) if len(processors) >= 3 else 0.0,
        float(np.median(devices)) if len(devices) >= 3 else 0.0,
    )


def _throttled(
    history: NodeMetricsHistory, clocks: tuple[float, float], thresholds: NodeThresholds
) -> str:
    """Return why a node is slow, sustained over its last readings; empty if it is not."""
    if len(history.readings) < thresholds.sustained:
        return ""
    recent = history.readings[-thresholds.sustained :]
    if len(history.readings) > thresholds.sustained:
        pairs = list(zip(history.readings[:-1], history.readings[1:], strict=True))
        shares = [
            (after.throttled_s - before.throttled_s) / (after.at_s - before.at_s)
            for before, after in pairs
        ]
        if min(shares) > thresholds.throttled_share:
            return f"its cgroup was denied the processor {min(shares):.0%} of the time (cpu.stat)"
    if clocks[0] and all(
        0 < reading.cpu_hz < thresholds.clock_ratio * clocks[0] for reading in recent
    ):
        return (
            f"its processors run at {recent[-1].cpu_hz / 1e9:.2f} GHz, "
            f"other nodes' at {clocks[0] / 1e9:.2f} GHz"
        )
    for gpu in recent[-1].gpus:
        same_gpu = [
            other for reading in recent for other in reading.gpus if other.index == gpu.index
        ]
        if all(other.celsius >= thresholds.gpu_celsius for other in same_gpu):
            return f"GPU {gpu.index} is at {gpu.celsius:.0f} degrees Celsius"
        slow = thresholds.clock_ratio * clocks[1]
        if clocks[1] and all(
            0 < other.clock_hz < slow and other.busy_share > 0.5 for other in same_gpu
        ):
            return (
                f"GPU {gpu.index} runs at {gpu.clock_hz / 1e6:.0f} MHz, "
                f"others at {clocks[1] / 1e6:.0f} MHz"
            )
    return ""


def _device_errors(
    name: str,
    history: NodeMetricsHistory,
    nodes: Mapping[int, str],
    now_s: float,
    thresholds: NodeThresholds,
) -> list[Verdict]:
    """Return a verdict on new uncorrectable memory errors and Xids of the device."""
    evidence = []
    for gpu in history.readings[-1].gpus:
        new_errors = gpu.ecc_uncorrected - history.ecc_at_first.get(gpu.index, 0)
        if new_errors > 0:
            evidence.append(f"GPU {gpu.index} has {new_errors} new uncorrectable memory errors")
        codes = [
            code
            for code in gpu.xids[history.xids_at_first.get(gpu.index, 0) :]
            if code in thresholds.bad_xids
        ]
        if codes:
            evidence.append(
                f"GPU {gpu.index} reports Xid {', '.join(map(str, sorted(set(codes))))}"
            )
    if not evidence:
        return []
    subject = node_subject(name, nodes)
    return [
        Verdict(
            subject=subject,
            syndrome=Syndrome.DEVICE_ERROR,
            since_s=now_s,
            evidence=tuple(evidence),
            confidence=0.95,
            cost_s_per_step=0.0,
            advice=Advice.REPLACE_NODE,
        )
    ]


def _memory(
    name: str,
    history: NodeMetricsHistory,
    nodes: Mapping[int, str],
    now_s: float,
    thresholds: NodeThresholds,
) -> list[Verdict]:
    """Return a verdict on memory that is nearly used up, or soon will be."""
    readings = [reading for reading in history.readings if reading.memory_total > 0]
    if len(readings) < thresholds.sustained:
        return []
    last = readings[-1]
    shares = [
        reading.memory_available / reading.memory_total
        for reading in readings[-thresholds.sustained :]
    ]
    sentence = ""
    if max(shares) < thresholds.memory_share:
        sentence = f"{last.memory_available / 2**20:.0f} MiB of memory are left, {shares[-1]:.1%}"
    elif max(shares) < thresholds.memory_low_share and last.at_s > readings[0].at_s:
        rate = (readings[0].memory_available - last.memory_available) / (
            last.at_s - readings[0].at_s
        )
        is_falling = all(
            after.memory_available < before.memory_available for before, after in pairwise(readings)
        )
        if is_falling and last.memory_available / rate < thresholds.memory_horizon_s:
            sentence = (
                f"memory shrinks by {rate / 2**20:.0f} MiB a second "
                f"and is gone in {last.memory_available / rate:.0f} s"
            )
    if not sentence:
        return []
    return [
        Verdict(
            subject=node_subject(name, nodes),
            syndrome=Syndrome.MEMORY_SHORT,
            since_s=now_s,
            evidence=(sentence,),
            confidence=0.9,
            cost_s_per_step=0.0,
            advice=Advice.ALERT,
        )
    ]
