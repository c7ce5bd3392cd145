"""What doctors found, put together, and who is named. Pure.

A node is judged against the other nodes, never against figures of a data sheet: what a job suffers from is the one that
differs. What is wrong by itself (a wrong product, a peer that does not answer, a clock far off) is a defect with one node
too.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from keepstep.monitor.preflight.link_probe import LinkResult
from keepstep.monitor.preflight.pairing import best_of, outliers
from keepstep.monitor.preflight.selftests import DiskResult, MatmulResult

CLOCK_S = 1.0
"""Leases, tokens and logs bear less than this between wall clocks."""
LEAST_SHARE = 0.20
"""A node that differs by less costs a job less than preparing another one does."""
LINK_SHARE = 0.5
"""A single link below this share of the usual rate is named: paths through a network may share capacity and differ that much."""
LATENCY_RATIO = 5.0
"""And one with so many times the usual latency: one switch more or less makes no such difference."""


@dataclass(frozen=True, slots=True)
class NodeExamination:
    """What one doctor found.

    Args:
        address: HOST:PORT under which the others know it.
        name: of its node.
        memory_rate: bytes a second.
        disk: None if the directory cannot be written to; then `errors` says why.
        matmuls: one a device.
        loopback: of its own network stack.
        links: to the peers that it measured, by address.
        errors: what failed, by what it concerns: a peer's address, or "disk".
    """

    address: str
    name: str
    memory_rate: float
    disk: DiskResult | None
    matmuls: tuple[MatmulResult, ...]
    loopback: LinkResult | None
    links: Mapping[str, LinkResult] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the examination as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> NodeExamination:
        """Return what `to_json` told.

        Raises:
            KeyError, TypeError: it is something else.
        """
        return cls(
            told["address"],
            told["name"],
            told["memory_rate"],
            DiskResult(**told["disk"]) if told["disk"] else None,
            tuple(MatmulResult(**one) for one in told["matmuls"]),
            LinkResult(**told["loopback"]) if told["loopback"] else None,
            {address: LinkResult(**link) for address, link in told["links"].items()},
            dict(told["errors"]),
        )


@dataclass(frozen=True, slots=True)
class PreflightFinding:
    """Something that should be seen to before a job starts.

    Args:
        subject: the node's name, or "NODE -> NODE" for a link.
        what: in a few words.
        evidence: a sentence with numbers.
    """

    subject: str
    what: str
    evidence: str


def judge(
    found: Sequence[NodeExamination], missing: Mapping[str, str]
) -> tuple[PreflightFinding, ...]:
    """Return who is named, and why.

    Args:
        found: one examination a node.
        missing: addresses whose doctor never answered, with the reason.
    """
    names = names_of(found)
    findings = [
        PreflightFinding(address, "does not answer", reason)
        for address, reason in sorted(missing.items())
    ]
    for one in found:
        findings += _defects(one, names, missing)
    slow: set[str] = set()
    for what, values, unit, low_is_bad in _comparable(found):
        for outlier in outliers(values, LEAST_SHARE, low_is_bad=low_is_bad):
            if what in _NETWORK:
                slow.add(outlier.name)
            value, median = _format_value(outlier.value, unit), _format_value(outlier.median, unit)
            findings.append(
                PreflightFinding(
                    names[outlier.name],
                    f"{'slow' if low_is_bad else 'long'} {what}",
                    f"{value}, the median of {len(values)} nodes is {median}; {outlier.sigmas:.0f} times the noise",
                )
            )
    return (*findings, *_single_links(found, names, slow), *_clocks(found, names))


_NETWORK = ("sending", "receiving", "latency")


def names_of(found: Sequence[NodeExamination]) -> dict[str, str]:
    """Return each address's name; with the address, where names are not unique."""
    taken = [one.name for one in found]
    return {
        one.address: one.name if taken.count(one.name) == 1 else f"{one.name} ({one.address})" for one in found
    }  # fmt: skip


def _defects(
    one: NodeExamination, names: Mapping[str, str], missing: Mapping[str, str]
) -> list[PreflightFinding]:
    findings = []
    for matmul in one.matmuls:
        if not matmul.is_right:
            findings.append(
                PreflightFinding(
                    names[one.address],
                    "wrong matrix product",
                    f"{matmul.device} multiplies wrongly",
                )
            )
        if not matmul.is_repeatable:
            sentence = f"{matmul.device} gives other bits when it multiplies the same again"
            findings.append(
                PreflightFinding(names[one.address], "product does not repeat", sentence)
            )
    for concerned, reason in one.errors.items():
        if concerned in names:
            findings.append(
                PreflightFinding(
                    f"{names[one.address]} -> {names[concerned]}", "link failed", reason
                )
            )
        elif concerned not in missing:
            findings.append(PreflightFinding(names[one.address], f"{concerned} failed", reason))
    return findings


def _rates(found: Sequence[NodeExamination]) -> dict[tuple[str, str], float]:
    """Return the rate of every link and direction that was measured."""
    rates: dict[tuple[str, str], float] = {}
    for one in found:
        for peer, link in one.links.items():
            rates[one.address, peer] = link.send_rate
            rates[peer, one.address] = link.receive_rate
    return rates


def _comparable(found: Sequence[NodeExamination]) -> list[tuple[str, dict[str, float], str, bool]]:
    """Return what nodes are compared by: what, each node's value, its unit, and whether less is worse."""
    addresses = [one.address for one in found]
    rates = _rates(found)
    latencies: dict[str, float] = {}
    for one in found:
        for peer, link in one.links.items():
            for end in (one.address, peer):
                latencies[end] = min(link.latency_s, latencies.get(end, float("inf")))
    compared: list[tuple[str, dict[str, float], str, bool]] = [
        ("memory", {one.address: one.memory_rate for one in found}, "B/s", True),
        ("disk", {one.address: one.disk.write_rate for one in found if one.disk}, "B/s", True),
        (
            "loopback",
            {one.address: one.loopback.send_rate for one in found if one.loopback},
            "B/s",
            True,
        ),
        # At its best a sick node is still slow; the best of a healthy one is not spoilt by a sick partner.
        ("sending", best_of(rates, addresses, 0), "B/s", True),
        ("receiving", best_of(rates, addresses, 1), "B/s", True),
        ("latency", latencies, "s", False),
    ]
    for device in sorted({matmul.device for one in found for matmul in one.matmuls}):
        speeds = {one.address: m.flops for one in found for m in one.matmuls if m.device == device}
        compared.append((f"matrix products on {device}", speeds, "FLOP/s", True))
    return compared


def _single_links(
    found: Sequence[NodeExamination], names: Mapping[str, str], slow: set[str]
) -> list[PreflightFinding]:
    """Name links that are slow between nodes that are not."""
    rates = {pair: rate for pair, rate in _rates(found).items() if slow.isdisjoint(pair)}
    latencies = {
        (one.address, peer): link.latency_s
        for one in found
        for peer, link in one.links.items()
        if slow.isdisjoint((one.address, peer))
    }
    findings = []
    if len(rates) > 2:
        usual = statistics.median(rates.values())
        for (sender, receiver), rate in sorted(rates.items()):
            if rate < LINK_SHARE * usual:
                sentence = f"{_format_value(rate, 'B/s')}, the median of all links is {_format_value(usual, 'B/s')}"
                findings.append(
                    PreflightFinding(f"{names[sender]} -> {names[receiver]}", "slow link", sentence)
                )
    if len(latencies) > 2:
        usual = statistics.median(latencies.values())
        for (one, other), latency_s in sorted(latencies.items()):
            if latency_s > LATENCY_RATIO * usual:
                sentence = f"{_format_value(latency_s, 's')} there and back, the median of all links is {_format_value(usual, 's')}"
                findings.append(
                    PreflightFinding(f"{names[one]} -> {names[other]}", "long latency", sentence)
                )
    return findings


def _clocks(found: Sequence[NodeExamination], names: Mapping[str, str]) -> list[PreflightFinding]:
    """Name the nodes whose wall clock is far from that of most."""
    ahead: dict[str, list[float]] = {}
    for one in found:
        for peer, link in one.links.items():
            ahead.setdefault(peer, []).append(link.clock_offset_s)
            ahead.setdefault(one.address, []).append(-link.clock_offset_s)
    return [
        PreflightFinding(
            names[address],
            "clock is off",
            f"its wall clock is {statistics.median(offsets):+.2f} s from the others'",
        )
        for address, offsets in sorted(ahead.items())
        if address in names and abs(statistics.median(offsets)) > CLOCK_S
    ]


def _format_value(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e6:.0f} us" if value < 1e-3 else f"{value * 1e3:.1f} ms"
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.2f} {prefix}{unit}"
    return f"{value / 1e3:.1f} k{unit}"
