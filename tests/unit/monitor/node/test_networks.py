"""Claims about the measures of a node's network: which interfaces, in which units."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from keepstep.monitor.node.networks import NetworkProbe


def counters(sent: int, received: int = 0, errors: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        bytes_sent=sent, bytes_recv=received, errin=errors, errout=0, dropin=errors, dropout=0
    )


def test_devices_are_measured_and_bridges_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net" / "eth0" / "device").mkdir(parents=True)
    (tmp_path / "net" / "docker0").mkdir()
    seen = {"lo": counters(9), "eth0": counters(1000, 4000, 2), "docker0": counters(7)}
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: seen)
    probe = NetworkProbe(tmp_path)
    (first,) = probe.sample(10.0)
    assert (first.name, first.sent_nbytes, first.received_nbytes) == ("eth0", 1000, 4000)
    assert (first.errors, first.sent_per_s) == (4, 0.0)
    seen["eth0"] = counters(3000, 4500, 2)
    (second,) = probe.sample(12.0)
    assert (second.sent_per_s, second.received_per_s) == (1000.0, 250.0)


def test_interfaces_of_a_container_are_measured_though_they_are_no_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {"lo": counters(9), "eth0": counters(5), "unused": counters(0)}
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: seen)
    assert [nic.name for nic in NetworkProbe(tmp_path).sample(10.0)] == ["eth0"]


def test_rdma_ports_are_measured_in_bytes_though_they_count_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: {})
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1" / "counters"
    port.mkdir(parents=True)
    for name, value in (("port_xmit_data", 250), ("port_rcv_data", 500), ("symbol_error", 3)):
        (port / name).write_text(f"{value}\n")
    (tmp_path / "infiniband" / "broken" / "ports" / "1" / "counters").mkdir(parents=True)
    (nic,) = NetworkProbe(tmp_path).sample(10.0)
    assert nic.name == "mlx5_0:1"
    assert (nic.sent_nbytes, nic.received_nbytes, nic.errors) == (1000, 2000, 3)
