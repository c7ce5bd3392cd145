"""Judges nodes' metrics: throttled processors, memory that runs out, device errors.

A daemon fills in `NodeMetrics` from psutil, cgroup `cpu.stat` and NVML. Counters are as their
sources give them, since boot or since the counter began; differences to the reading before are
taken here. Times are by the node's clock.

Denied processor time or a hot GPU does no harm until a rank is slow by it: such findings only
explain slow ranks, and are not verdicts. Findings on memory and device errors are verdicts.

Errors of a device are events; the verdict on them ends some time after the last. Errors that the
device has contained are reported, and call for another node only if they repeat: the driver has
remapped the row, and the job continues after a restart of the process at most. Devices that no
process of the job uses are not judged.
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
        xids: codes of the newest Xid errors seen since the daemon began, oldest first.
        earlier_xids: how many it saw before those.
        busy_share: 0 to 1; clocks of idle devices fall by themselves and are not judged.
        ranks: ranks whose processes use it; None if that is not known.
        power_limit_watts: at which it lowers its clocks.
        memory_celsius: temperature of the device memory (HBM).
        memory_busy_share: share of time in which device memory was read or written, 0 to 1.
        remapped_rows: rows of device memory that spare ones have replaced, a counter.
        nvlink_sent_nbytes: data sent over all NVLinks, a counter.
        nvlink_received_nbytes: likewise.
        nvlink_errors: errors of all NVLinks, those too that were corrected by sending again, a
            counter.
        nvlink_sent_per_s: bytes per second since the sample before.
        nvlink_received_per_s: likewise.
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
    earlier_xids: int = 0
    busy_share: float = 0.0
    ranks: tuple[int, ...] | None = None
    power_limit_watts: float = 0.0
    memory_celsius: float = 0.0
    memory_busy_share: float = 0.0
    remapped_rows: int = 0
    nvlink_sent_nbytes: int = 0
    nvlink_received_nbytes: int = 0
    nvlink_errors: int = 0
    nvlink_sent_per_s: float = 0.0
    nvlink_received_per_s: float = 0.0

    @property
    def xid_count(self) -> int:
        """The number of Xid errors seen since the daemon began."""
        return self.earlier_xids + len(self.xids)


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """Counters of one worker's process and its descendants at one moment.

    Args:
        rank: the worker's.
        pid: its process.
        at_s: when this was read, by the node's monotonic clock.
        cpu_s: processor seconds used so far.
        io_nbytes: bytes read and written so far, by system calls and from and to disks.
    """

    rank: int
    pid: int
    at_s: float
    cpu_s: float
    io_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NicMetrics:
    """One network interface.

    Args:
        name: of the interface, or of an RDMA device and its port.
        sent_nbytes: a counter.
        received_nbytes: a counter.
        errors: packets with errors and dropped ones, of a port errors of its link; a counter.
        sent_per_s: bytes per second since the sample before.
        received_per_s: likewise.
    """

    name: str
    sent_nbytes: int
    received_nbytes: int
    errors: int = 0
    sent_per_s: float = 0.0
    received_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeMetrics:
    """One node at one moment. 0 means "not known" unless stated otherwise.

    Args:
        node: its name, as in RankRecords.
        at_s: when this was read, by the node's monotonic clock.
        cpu_share: share of all processors in use, 0 to 1.
        load: runnable processes over the last minute (`getloadavg`), not divided by processors.
        throttled_s: processor seconds that the workers' cgroup was denied so far, summed over
            processors: `throttled_usec` of cgroup v2 `cpu.stat`.
        cgroup_cpu_s: processor seconds that this cgroup had so far, summed too.
        cpu_hz: current frequency, mean over processors.
        memory_total: bytes; of the cgroup, if that is less than the machine's.
        memory_available: bytes that can be had without swapping.
        swap_used: bytes.
        disk_latency_s: mean time of a request since the reading before.
        gpus: its accelerators.
        stopped_ranks: ranks whose process is stopped (state T).
        processes: the newest sample of each worker's process; some are older than `at_s`.
        nics: its network interfaces.
    """

    node: str
    at_s: float
    cpu_share: float = 0.0
    load: float = 0.0
    throttled_s: float = 0.0
    cgroup_cpu_s: float = 0.0
    cpu_hz: float = 0.0
    memory_total: int = 0
    memory_available: int = 0
    swap_used: int = 0
    disk_latency_s: float = 0.0
    gpus: tuple[GpuMetrics, ...] = ()
    stopped_ranks: tuple[int, ...] = ()
    processes: tuple[ProcessSample, ...] = ()
    nics: tuple[NicMetrics, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceError:
    """An error of a device.

    Args:
        at_s: of the reading that showed it first, by the node's clock.
        gpu: index of the device.
        xid: its code; 0 for uncorrectable memory errors, which are counted.
    """

    at_s: float
    gpu: int
    xid: int = 0


@dataclass(frozen=True, slots=True)
class NodeMetricsHistory:
    """State of one node between calls.

    Args:
        readings: its last readings (at most `sustained` + 1), oldest first.
        errors: of its devices since the first reading, oldest first, as long as they matter.
        used: devices that processes of the job use or used.
    """

    readings: tuple[NodeMetrics, ...]
    errors: tuple[DeviceError, ...] = ()
    used: frozenset[int] = frozenset()


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
    next_histories = {
        name: _with_reading(past.get(name) or NodeMetricsHistory(()), reading, thresholds)
        for name, reading in metrics.items()
    }
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


def _with_reading(
    history: NodeMetricsHistory, reading: NodeMetrics, thresholds: NodeThresholds
) -> NodeMetricsHistory:
    """Return the history with one more reading, unless it is repeated."""
    if history.readings and reading.at_s <= history.readings[-1].at_s:
        return history
    # Errors before the first reading are old: the job began, or runs, in spite of them.
    new = _new_errors(history.readings[-1], reading) if history.readings else ()
    return NodeMetricsHistory(
        readings=(*history.readings, reading)[-(thresholds.sustained + 1) :],
        errors=tuple(
            error
            for error in (*history.errors, *new)
            if reading.at_s - error.at_s < thresholds.error_window_s
        )[-thresholds.errors_kept :],
        used=history.used | {gpu.index for gpu in reading.gpus if gpu.ranks},
    )


def _new_errors(before: NodeMetrics, after: NodeMetrics) -> tuple[DeviceError, ...]:
    """Return the errors of devices that came between two readings."""
    earlier_gpus = {gpu.index: gpu for gpu in before.gpus}
    errors: list[DeviceError] = []
    for gpu in after.gpus:
        old = earlier_gpus.get(gpu.index, gpu)
        if gpu.ecc_uncorrected > old.ecc_uncorrected:
            errors.append(DeviceError(after.at_s, gpu.index))
        codes = gpu.xids[max(0, old.xid_count - gpu.earlier_xids) :]
        errors += [DeviceError(after.at_s, gpu.index, code) for code in codes]
    return tuple(errors)


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
        share = min(_denied_share(*pair) for pair in pairwise(history.readings))
        if share > thresholds.throttled_share:
            return f"its cgroup was denied {share:.0%} of the processor time it needed (cpu.stat)"
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


def _denied_share(before: NodeMetrics, after: NodeMetrics) -> float:
    """Return which share of the processor time that a cgroup needed it was denied.

    The kernel sums both times over processors, so their ratio, unlike that to the time that has
    passed, does not depend on how many there are. 0.0 if the time that it had is not known.
    """
    denied_s = after.throttled_s - before.throttled_s
    had_s = after.cgroup_cpu_s - before.cgroup_cpu_s
    return denied_s / (denied_s + had_s) if denied_s > 0 and had_s > 0 else 0.0


def _device_errors(
    name: str,
    history: NodeMetricsHistory,
    nodes: Mapping[int, str],
    now_s: float,
    thresholds: NodeThresholds,
) -> list[Verdict]:
    """Return a verdict on recent errors of the devices that the job uses, or may use."""
    evidence: list[str] = []
    condemned = False
    newest = history.readings[-1]
    oldest_s = newest.at_s
    for gpu in newest.gpus:
        is_used = gpu.index in history.used
        errors = [error for error in history.errors if error.gpu == gpu.index]
        fatal = [error for error in errors if error.xid in thresholds.fatal_xids]
        contained = [
            error for error in errors if not error.xid or error.xid in thresholds.contained_xids
        ]
        counted = sorted([*fatal, *contained], key=lambda error: error.at_s)
        is_over = not counted or newest.at_s - counted[-1].at_s >= thresholds.error_held_s
        if is_over or not (is_used or gpu.ranks is None):
            continue
        oldest_s = min(oldest_s, counted[0].at_s)
        # Where it is not known who uses a device, it may be another job's.
        condemned |= is_used and (bool(fatal) or len(contained) >= thresholds.contained_limit)
        if memory_errors := sum(not error.xid for error in contained):
            evidence.append(
                f"GPU {gpu.index} had uncorrectable memory errors {memory_errors} times"
            )
        if codes := sorted({error.xid for error in counted if error.xid}):
            evidence.append(f"GPU {gpu.index} reports Xid {', '.join(map(str, codes))}")
        if not fatal:
            evidence.append(
                f"GPU {gpu.index} has contained them and works on; reset it when the job pauses"
            )
    if not evidence:
        return []
    return [
        Verdict(
            subject=node_subject(name, nodes),
            syndrome=Syndrome.DEVICE_ERROR,
            since_s=now_s - (newest.at_s - oldest_s),
            evidence=tuple(evidence),
            confidence=0.95 if condemned else 0.8,
            cost_s_per_step=0.0,
            advice=Advice.REPLACE_NODE if condemned else Advice.ALERT,
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
