"""Claims about measuring a node: what cannot be read leaves the rest as it is."""

import os

import psutil
import pytest

from keepstep.monitor.node.probes import NodeProbe


@pytest.mark.parametrize("error", [NotImplementedError("no file"), PermissionError("denied")])
@pytest.mark.parametrize("unreadable", ["cpu_freq", "disk_io_counters"])
def test_metric_that_cannot_be_read_leaves_the_others(
    unreadable: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise error

    monkeypatch.setattr(psutil, unreadable, refuse)
    probe = NodeProbe("node-a")
    metrics = probe.sample({3: os.getpid()})
    probe.close()
    assert [(process.rank, process.pid) for process in metrics.processes] == [(3, os.getpid())]
    assert metrics.memory_total > 0
    assert (metrics.cpu_hz if unreadable == "cpu_freq" else metrics.disk_latency_s) == 0.0
