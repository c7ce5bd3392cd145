"""Encodes a node's measures: as JSON between daemons, and as series for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from keepstep.monitor.diagnosis.metrics import (
    GpuMetrics,
    NicMetrics,
    NodeMetrics,
    ProcessSample,
)


@dataclass(frozen=True, slots=True)
class Series:
    """The series of one field of a record of measures.

    Args:
        field: name in the record.
        name: of the series.
        help: its description.
        is_counter: whether the value only grows.
        hides_zero: whether 0 means "not known", and is left out.
    """

    field: str
    name: str
    help: str
    is_counter: bool = False
    hides_zero: bool = False


NODE_SERIES = (
    Series("cpu_share", "keepstep_node_cpu_usage_ratio", "Share of the node's processors in use."),
    Series(
        "throttled_s",
        "keepstep_node_cpu_throttled_seconds",
        "Processor time that the workers' cgroup was denied, summed over processors.",
        is_counter=True,
    ),
    Series(
        "cpu_hz",
        "keepstep_node_cpu_frequency_hertz",
        "Mean clock of the processors.",
        hides_zero=True,
    ),
    Series("load", "keepstep_node_load1", "Runnable processes, mean of a minute."),
    Series("memory_total", "keepstep_node_memory_size_bytes", "Total memory.", hides_zero=True),
    Series("memory_available", "keepstep_node_memory_available_bytes", "Available memory."),
    Series("swap_used", "keepstep_node_swap_used_bytes", "Memory swapped out."),
    Series(
        "disk_latency_s",
        "keepstep_node_disk_request_duration_seconds",
        "Mean time of a disk request.",
    ),
)
GPU_SERIES = (
    Series(
        "celsius", "keepstep_gpu_temperature_celsius", "Temperature of the chip.", hides_zero=True
    ),
    Series(
        "clock_hz", "keepstep_gpu_clock_hertz", "Clock of the multiprocessors.", hides_zero=True
    ),
    Series("memory_used", "keepstep_gpu_memory_used_bytes", "Device memory in use."),
    Series(
        "memory_total", "keepstep_gpu_memory_size_bytes", "Total device memory.", hides_zero=True
    ),
    Series("busy_share", "keepstep_gpu_busy_ratio", "Share of time with a kernel running."),
    Series("power_watts", "keepstep_gpu_power_watts", "Power drawn.", hides_zero=True),
    Series(
        "ecc_uncorrected",
        "keepstep_gpu_ecc_uncorrected_errors",
        "Memory errors not corrected.",
        is_counter=True,
    ),
    Series(
        "ecc_corrected",
        "keepstep_gpu_ecc_corrected_errors",
        "Memory errors corrected.",
        is_counter=True,
    ),
    Series(
        "power_limit_watts",
        "keepstep_gpu_power_limit_watts",
        "Power at which clocks are lowered.",
        hides_zero=True,
    ),
    Series(
        "memory_celsius",
        "keepstep_gpu_memory_temperature_celsius",
        "Temperature of the device memory.",
        hides_zero=True,
    ),
    Series(
        "memory_busy_share",
        "keepstep_gpu_memory_busy_ratio",
        "Share of time in which device memory was read or written.",
    ),
    Series(
        "remapped_rows",
        "keepstep_gpu_memory_remapped_rows",
        "Rows of device memory that spare ones have replaced.",
        is_counter=True,
    ),
    Series(
        "nvlink_sent_nbytes",
        "keepstep_gpu_nvlink_sent_bytes",
        "Data sent over all NVLinks.",
        is_counter=True,
        hides_zero=True,
    ),
    Series(
        "nvlink_received_nbytes",
        "keepstep_gpu_nvlink_received_bytes",
        "Data received over all NVLinks.",
        is_counter=True,
        hides_zero=True,
    ),
    Series(
        "nvlink_errors",
        "keepstep_gpu_nvlink_errors",
        "Errors of all NVLinks.",
        is_counter=True,
    ),
)
NIC_SERIES = (
    Series("sent_nbytes", "keepstep_network_sent_bytes", "Data sent.", is_counter=True),
    Series("received_nbytes", "keepstep_network_received_bytes", "Data received.", is_counter=True),
    Series(
        "errors",
        "keepstep_network_errors",
        "Packets with errors and dropped ones; errors of an RDMA port's link.",
        is_counter=True,
    ),
)


def node_series(metrics: NodeMetrics, job: str, node: str) -> Iterator[Metric]:
    """Yield the measures of a node and its GPUs; what is not known is left out."""
    yield from _families(NODE_SERIES, {"job": job, "node": node}, [({}, metrics)])
    devices = [({"gpu": str(gpu.index)}, gpu) for gpu in metrics.gpus]
    yield from _families(GPU_SERIES, {"job": job, "node": node}, devices)
    nics = [({"interface": nic.name}, nic) for nic in metrics.nics]
    yield from _families(NIC_SERIES, {"job": job, "node": node}, nics)
    if devices:
        labels = ["job", "node", "gpu"]
        xids = CounterMetricFamily(
            "keepstep_gpu_xid_errors",
            "Critical Xid errors since the monitor started.",
            labels=labels,
        )
        for gpu in metrics.gpus:
            xids.add_metric([job, node, str(gpu.index)], gpu.xid_count)
        yield xids


def metrics_to_json(metrics: NodeMetrics) -> dict[str, Any]:
    """Return the measures as JSON."""
    return asdict(metrics)


def metrics_from_json(fields: Mapping[str, Any]) -> NodeMetrics:
    """Return the measures that `metrics_to_json` encoded.

    Raises:
        TypeError, KeyError: the fields are not those of `NodeMetrics`.
    """
    gpus = tuple(GpuMetrics(**{**gpu, **_tuples(gpu)}) for gpu in fields["gpus"])
    processes = tuple(ProcessSample(**process) for process in fields["processes"])
    stopped_ranks = tuple(fields["stopped_ranks"])
    nics = tuple(NicMetrics(**nic) for nic in fields["nics"])
    decoded = {"gpus": gpus, "processes": processes, "stopped_ranks": stopped_ranks, "nics": nics}
    return NodeMetrics(**{**fields, **decoded})


def _tuples(gpu: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a GPU that JSON has as lists."""
    ranks = gpu["ranks"]
    return {"xids": tuple(gpu["xids"]), "ranks": None if ranks is None else tuple(ranks)}


def _families(
    all_series: tuple[Series, ...],
    common: Mapping[str, str],
    sources: list[tuple[dict[str, str], Any]],
) -> Iterator[Metric]:
    for series in all_series:
        samples = [
            (labels, value)
            for labels, source in sources
            if (value := getattr(source, series.field)) or not series.hides_zero
        ]
        if not samples:
            continue
        names = [*common, *samples[0][0]]
        family = (CounterMetricFamily if series.is_counter else GaugeMetricFamily)(
            series.name, series.help, labels=names
        )
        for labels, value in samples:
            family.add_metric([*common.values(), *labels.values()], float(value))
        yield family
