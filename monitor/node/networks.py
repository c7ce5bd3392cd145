"""Measures a node's network interfaces: traffic and errors, from psutil and /sys/class/infiniband.

Traffic of RDMA (InfiniBand, RoCE) passes the kernel's network stack by, so its ports have counters
of their own; an Ethernet port with RoCE is in both lists, each with its own traffic.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from keepstep.monitor.diagnosis.metrics import NicMetrics

_SYS = Path("/sys/class")
_WORD_NBYTES = 4
"""InfiniBand's counters of data count words of four bytes."""
_PORT_ERRORS = ("symbol_error", "link_downed", "port_rcv_errors", "local_link_integrity_errors")
_MOST = 64


class NetworkProbe:
    """Measures the interfaces that carry a node's traffic.

    Args:
        sys: the directory that has `net` and `infiniband`.
    """

    def __init__(self, sys: Path = _SYS) -> None:
        self._sys = sys
        self._before: dict[str, tuple[float, int, int]] = {}

    def sample(self, now_s: float) -> tuple[NicMetrics, ...]:
        """Return the counters of every interface, and its traffic since the last sample.

        Args:
            now_s: monotonic.
        """
        found = [*self._interfaces(), *self._rdma_ports()][:_MOST]
        measured = tuple(
            NicMetrics(
                name=name,
                sent_nbytes=sent,
                received_nbytes=received,
                errors=errors,
                sent_per_s=self._rate(name, now_s, sent, 1),
                received_per_s=self._rate(name, now_s, received, 2),
            )
            for name, sent, received, errors in found
        )
        self._before = {name: (now_s, sent, received) for name, sent, received, _ in found}
        return measured

    def _rate(self, name: str, now_s: float, nbytes: int, place: int) -> float:
        before = self._before.get(name)
        if before is None or now_s <= before[0]:
            return 0.0
        return max(0.0, (nbytes - before[place]) / (now_s - before[0]))

    def _interfaces(self) -> list[tuple[str, int, int, int]]:
        """Return the devices, without bridges and the like; in a container what it has."""
        counters = {}
        with suppress(NotImplementedError, OSError):
            counters = psutil.net_io_counters(pernic=True)
        names = [name for name in sorted(counters) if name != "lo"]
        devices = [name for name in names if (self._sys / "net" / name / "device").exists()]
        return [
            (
                name,
                counters[name].bytes_sent,
                counters[name].bytes_recv,
                sum((
                    counters[name].errin, counters[name].errout,
                    counters[name].dropin, counters[name].dropout,
                )),
            )
            for name in devices or names
            if counters[name].bytes_sent or counters[name].bytes_recv
        ]  # fmt: skip

    def _rdma_ports(self) -> list[tuple[str, int, int, int]]:
        ports = []
        for directory in sorted((self._sys / "infiniband").glob("*/ports/*/counters")):
            sent = _number(directory / "port_xmit_data")
            received = _number(directory / "port_rcv_data")
            errors = sum(_number(directory / name) or 0 for name in _PORT_ERRORS)
            if sent is not None and received is not None:
                name = f"{directory.parents[2].name}:{directory.parent.name}"
                ports.append((name, _WORD_NBYTES * sent, _WORD_NBYTES * received, errors))
        return ports


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # Not every driver has every counter.
