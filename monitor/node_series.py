"""A node's measures on their way out: as JSON between daemons, and as series for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from monitor.metrics import GpuMetrics, NodeMetrics


@dataclass(frozen=True, slots=True)
class Series:
    """One field as a series: its name, what it says, what to multiply by to have base units, and whether it only grows."""

    field: str
    name: str
    help: str
    factor: float = 1.0
    is_counter: bool = False


NODE_SERIES = (
    Series("cpu_share", "keepstep_node_cpu_usage_ratio", "Share of the node's processors in use."),
    Series(
        "throttled_s",
        "keepstep_node_cpu_throttled_seconds",
        "Time for which the workers' cgroup was denied the processor.",
        is_counter=True,
    ),
    Series("cpu_mhz", "keepstep_node_cpu_frequency_hertz", "Mean clock of the processors.", 1e6),
    Series("load", "keepstep_node_load1", "Runnable processes, mean of a minute."),
    Series("memory_total_nbytes", "keepstep_node_memory_size_bytes", "Memory there is."),
    Series("memory_available_nbytes", "keepstep_node_memory_available_bytes", "Memory that can be had."),
    Series("swap_used_nbytes", "keepstep_node_swap_used_bytes", "Memory swapped out."),
    Series("disk_latency_s", "keepstep_node_disk_request_duration_seconds", "Mean time of a disk request."),
)
GPU_SERIES = (
    Series("temperature_celsius", "keepstep_gpu_temperature_celsius", "Temperature of the chip."),
    Series("clock_mhz", "keepstep_gpu_clock_hertz", "Clock of the multiprocessors.", 1e6),
    Series("memory_used_nbytes", "keepstep_gpu_memory_used_bytes", "Device memory in use."),
    Series("memory_total_nbytes", "keepstep_gpu_memory_size_bytes", "Device memory there is."),
    Series("utilization", "keepstep_gpu_utilization_ratio", "Share of time with a kernel running."),
    Series("power_watts", "keepstep_gpu_power_watts", "Power drawn."),
    Series("is_throttled", "keepstep_gpu_throttled", "Whether heat or power holds the clock down."),
    Series(
        "ecc_uncorrected",
        "keepstep_gpu_ecc_uncorrected_errors",
        "Memory errors that could not be corrected.",
        is_counter=True,
    ),
    Series("ecc_corrected", "keepstep_gpu_ecc_corrected_errors", "Memory errors that were corrected.", is_counter=True),
    Series("xid", "keepstep_gpu_last_xid", "Last critical Xid error; 0 for none."),
)


def node_series(metrics: NodeMetrics, job: str, node: str) -> Iterator[Metric]:
    """Yield the measures of a node and its GPUs; what is not known is left out."""
    yield from _families(NODE_SERIES, {"job": job, "node": node}, [({}, metrics)])
    devices = [({"gpu": str(gpu.index)}, gpu) for gpu in metrics.gpus]
    yield from _families(GPU_SERIES, {"job": job, "node": node}, devices)


def metrics_to_json(metrics: NodeMetrics) -> dict[str, Any]:
    """Return the measures as JSON."""
    return asdict(metrics)


def metrics_from_json(told: Mapping[str, Any]) -> NodeMetrics:
    """Return what `metrics_to_json` told.

    Raises:
        TypeError: it is something else.
    """
    gpus = tuple(GpuMetrics(**gpu) for gpu in told.get("gpus", ()))
    return NodeMetrics(**{**told, "gpus": gpus})


def _families(
    series: tuple[Series, ...], common: Mapping[str, str], told: list[tuple[dict[str, str], Any]]
) -> Iterator[Metric]:
    for one in series:
        samples = [
            (labels, value) for labels, source in told if (value := getattr(source, one.field, None)) is not None
        ]
        if not samples:
            continue
        names = [*common, *samples[0][0]]
        family = (CounterMetricFamily if one.is_counter else GaugeMetricFamily)(one.name, one.help, labels=names)
        for labels, value in samples:
            family.add_metric([*common.values(), *labels.values()], float(value) * one.factor)
        yield family
