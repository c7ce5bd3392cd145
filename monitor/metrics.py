"""A node's measures as its monitor takes them: the values, no more. `monitor.probes` takes them, diagnosis reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuMetrics:
    """One GPU of a node. None: the device or its driver does not tell.

    Args:
        index: as NVML counts.
        temperature_celsius: of the chip.
        clock_mhz: of the multiprocessors, now.
        clock_max_mhz: the most they may have.
        memory_used_nbytes: in use.
        memory_total_nbytes: there is.
        utilization: share of time with a kernel running, 0 to 1.
        power_watts: drawn now.
        is_throttled: whether heat or power holds the clock down.
        ecc_uncorrected: double-bit errors since the driver was loaded.
        ecc_corrected: single-bit errors since then.
        xid: last critical Xid error since the monitor started; 0: none.
    """

    index: int
    temperature_celsius: float | None = None
    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    memory_used_nbytes: int | None = None
    memory_total_nbytes: int | None = None
    utilization: float | None = None
    power_watts: float | None = None
    is_throttled: bool | None = None
    ecc_uncorrected: int | None = None
    ecc_corrected: int | None = None
    xid: int = 0


@dataclass(frozen=True, slots=True)
class NodeMetrics:
    """One node. Counters count since boot or since the cgroup was made; None: not told there.

    Args:
        taken_at_s: node's monotonic clock.
        cpus: processors that the node may use.
        cpu_share: share of them in use since the last reading, 0 to 1.
        throttled_s: seconds, in total, that the workers' cgroup was denied the processor by its quota; the largest, of several.
        cpu_mhz: mean clock.
        cpu_max_mhz: the most it may be.
        load: runnable processes, mean of a minute.
        memory_total_nbytes: there is; where the workers' cgroup has a limit that is nearer, that limit.
        memory_available_nbytes: can still be had without swapping.
        swap_used_nbytes: swapped out.
        disk_latency_s: mean time of a disk request since the last reading.
        gpus: by index.
    """

    taken_at_s: float
    cpus: int = 0
    cpu_share: float | None = None
    throttled_s: float | None = None
    cpu_mhz: float | None = None
    cpu_max_mhz: float | None = None
    load: float | None = None
    memory_total_nbytes: int | None = None
    memory_available_nbytes: int | None = None
    swap_used_nbytes: int | None = None
    disk_latency_s: float | None = None
    gpus: tuple[GpuMetrics, ...] = ()
