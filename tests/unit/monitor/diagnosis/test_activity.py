"""Tests since when a process has done nothing."""

from dataclasses import replace

import pytest

from keepstep.monitor.diagnosis.activity import QuietProcess, follow_processes
from keepstep.monitor.diagnosis.metrics import GpuMetrics, NodeMetrics, ProcessSample
from keepstep.monitor.diagnosis.thresholds import HangThresholds

NODES = {0: "a", 1: "b"}


def sample(at_s: float, cpu_s: float = 0.0, io_nbytes: int = 0, pid: int = 7) -> ProcessSample:
    return ProcessSample(0, pid, at_s, cpu_s, io_nbytes)


def follow(*samples: ProcessSample, gpus: tuple[GpuMetrics, ...] = ()) -> QuietProcess:
    past: dict[int, QuietProcess] = {}
    for one in samples:
        metrics = {"a": NodeMetrics("a", one.at_s, gpus=gpus, processes=(one,))}
        past = follow_processes(past, metrics, NODES, HangThresholds())
    return past[0]


def test_process_that_does_nothing_is_quiet_since_the_first_sample() -> None:
    assert follow(sample(10.0), sample(15.0), sample(20.0)).quiet_s == 10.0


def test_few_wake_ups_are_nothing() -> None:
    assert follow(sample(10.0), sample(15.0, 0.2, 40_000)).quiet_s == 5.0


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(sample(20.0, cpu_s=0.3), id="processor"),
        pytest.param(sample(20.0, io_nbytes=100_000), id="bytes"),
        pytest.param(sample(20.0, cpu_s=-1.0), id="a child has ended"),
        pytest.param(sample(20.0, pid=8), id="another process"),
    ],
)
def test_process_that_does_something_is_not_quiet(last: ProcessSample) -> None:
    assert follow(sample(10.0), sample(15.0), last).quiet_s == 0.0
    later = replace(last, at_s=30.0)
    assert follow(sample(10.0), sample(15.0), last, later).quiet_s == 10.0


def test_repeated_sample_changes_nothing() -> None:
    assert follow(sample(10.0), sample(15.0), sample(15.0)).quiet_s == 5.0


@pytest.mark.parametrize(("ranks", "quiet_s"), [((0,), 0.0), ((1,), 5.0), ((), 5.0), (None, 0.0)])
def test_kernels_on_a_gpu_that_the_rank_uses_or_may_use_count(
    ranks: tuple[int, ...] | None, quiet_s: float
) -> None:
    gpus = (GpuMetrics(0, busy_share=1.0, ranks=ranks),)
    assert follow(sample(10.0), sample(15.0), gpus=gpus).quiet_s == quiet_s


def test_rank_is_forgotten_when_it_is_no_longer_sampled_on_its_node() -> None:
    metrics = {"a": NodeMetrics("a", 1.0, processes=(sample(1.0),))}
    past = follow_processes({}, metrics, NODES, HangThresholds())
    assert list(past) == [0]
    assert follow_processes(past, metrics, {0: "b"}, HangThresholds()) == {}
    assert follow_processes(past, {"a": NodeMetrics("a", 2.0)}, NODES, HangThresholds()) == {}
