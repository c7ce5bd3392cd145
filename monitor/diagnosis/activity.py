"""Follows what processes do: processor time, bytes read and written, kernels on their GPUs.

A worker that others wait for may hang, or compile, compute and write. The difference shows in its
process, from outside: one that hangs does nothing. Samples are taken where the process is
(`keepstep.monitor.node.processes`), and come in as counters with their times; this module concludes
since when each process has done nothing. A process that spins, in a loop or in a driver, cannot be
distinguished from one that works: it counts as busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.monitor.diagnosis.metrics import NodeMetrics, ProcessSample
from keepstep.monitor.diagnosis.thresholds import HangThresholds


@dataclass(frozen=True, slots=True)
class QuietProcess:
    """Since when the process of a rank has done nothing.

    Args:
        sample: the newest.
        since_s: the time of the sample from which on it has done nothing, by its node's clock; that
            of `sample` if it was busy since the one before.
    """

    sample: ProcessSample
    since_s: float

    @property
    def quiet_s(self) -> float:
        """For how long it has done nothing, up to the newest sample."""
        return self.sample.at_s - self.since_s


def follow_processes(
    past: Mapping[int, QuietProcess],
    metrics: Mapping[str, NodeMetrics],
    nodes: Mapping[int, str],
    thresholds: HangThresholds,
) -> dict[int, QuietProcess]:
    """Return since when each rank's process has done nothing, after new samples.

    Args:
        past: as returned by the last call.
        metrics: the newest of each node; repeated samples are ignored.
        nodes: each rank's node: samples of a rank from other nodes are ignored.
        thresholds: what counts as doing nothing.
    """
    quiet: dict[int, QuietProcess] = {}
    for name, reading in metrics.items():
        for sample in reading.processes:
            if nodes.get(sample.rank) != name:
                continue
            before = past.get(sample.rank)
            if before is None or before.sample.pid != sample.pid:
                quiet[sample.rank] = QuietProcess(sample, sample.at_s)
            elif sample.at_s <= before.sample.at_s:
                quiet[sample.rank] = before
            elif _is_quiet(before.sample, sample, thresholds) and not _uses_gpu(
                reading, sample.rank, thresholds
            ):
                quiet[sample.rank] = QuietProcess(sample, before.since_s)
            else:
                quiet[sample.rank] = QuietProcess(sample, sample.at_s)
    return quiet


def _is_quiet(before: ProcessSample, after: ProcessSample, thresholds: HangThresholds) -> bool:
    """Return whether a process did nothing between two samples.

    Counters fall when a child process has ended that was not waited for: that is no standstill.
    """
    took_s = after.at_s - before.at_s
    cpu_s, nbytes = after.cpu_s - before.cpu_s, after.io_nbytes - before.io_nbytes
    return (
        0 <= cpu_s <= thresholds.quiet_cpu_share * took_s
        and 0 <= nbytes <= thresholds.quiet_io_rate * took_s
    )


def _uses_gpu(reading: NodeMetrics, rank: int, thresholds: HangThresholds) -> bool:
    """Return whether kernels run on a GPU that a rank uses, or may use."""
    return any(
        gpu.busy_share > thresholds.quiet_gpu_share
        for gpu in reading.gpus
        if gpu.ranks is None or rank in gpu.ranks
    )
