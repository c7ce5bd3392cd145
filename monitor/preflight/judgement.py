"""Judges what doctors measured, and names the nodes and links that should be seen to. Pure.

A node is judged against the other nodes, never against figures of a data sheet: a job suffers from
the one node that differs. A measurement that is wrong by itself (a wrong product, a peer that does
not answer, a clock far off) is a defect with a single node too.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from keepstep.monitor.preflight.examination import LinkResult, NodeExamination
from keepstep.monitor.preflight.pairing import best_rates, outliers

MAX_CLOCK_OFFSET_S = 1.0
"""Leases, tokens and logs bear less than this between wall clocks."""
MIN_SHARE = 0.20
"""A node that differs by less costs a job less than preparing another node does."""
LINK_SHARE = 0.5
"""A link below this share of the usual rate is named.

Paths through a network may share capacity and differ by that much."""
LATENCY_RATIO = 5.0
"""A link with this many times the usual latency is named.

One switch more or less makes no such difference."""
_MIN_LINKS = 3


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """One quantity by which nodes are compared.

    Args:
        what: its name.
        values: each node's value, by address.
        unit: of the values.
        is_rate: the lower the worse; otherwise the higher.
        is_of_links: a node that is an outlier in it makes its links slow.
    """

    what: str
    values: Mapping[str, float]
    unit: str
    is_rate: bool = True
    is_of_links: bool = False


def judge(
    examinations: Sequence[NodeExamination], missing: Mapping[str, str]
) -> tuple[PreflightFinding, ...]:
    """Return what should be seen to.

    Args:
        examinations: one for each node.
        missing: the addresses whose doctors never answered, with the reason.
    """
    names = names_of(examinations)
    findings = [
        PreflightFinding(address, "does not answer", reason)
        for address, reason in sorted(missing.items())
    ]
    for examination in examinations:
        findings += _defects(examination, names, missing)
    slow_nodes: set[str] = set()
    for comparison in _comparisons(examinations):
        for outlier in outliers(comparison.values, MIN_SHARE, low_is_bad=comparison.is_rate):
            if comparison.is_of_links:
                slow_nodes.add(outlier.name)
            value = _format_value(outlier.value, comparison.unit)
            median = _format_value(outlier.median, comparison.unit)
            findings.append(
                PreflightFinding(
                    _name_of(names, outlier.name),
                    f"{'slow' if comparison.is_rate else 'long'} {comparison.what}",
                    f"{value}, the median of {len(comparison.values)} nodes is {median}; "
                    f"{outlier.sigmas:.0f} times the noise",
                )
            )
    findings += _slow_links(examinations, names, slow_nodes)
    findings += _late_links(examinations, names, slow_nodes)
    findings += _wrong_clocks(examinations, names)
    return tuple(findings)


def names_of(examinations: Sequence[NodeExamination]) -> dict[str, str]:
    """Return each address's name; with the address, where names are not unique."""
    counts = Counter(examination.name for examination in examinations)
    return {
        examination.address: examination.name
        if counts[examination.name] == 1
        else f"{examination.name} ({examination.address})"
        for examination in examinations
    }


def _name_of(names: Mapping[str, str], address: str) -> str:
    """Return the name of a node, or the address of one that was measured and gave no results."""
    return names.get(address, address)


def _defects(
    examination: NodeExamination, names: Mapping[str, str], missing: Mapping[str, str]
) -> Iterator[PreflightFinding]:
    """Yield what is wrong with a node by itself."""
    name = names[examination.address]
    for matmul in examination.matmuls:
        if not matmul.is_right:
            yield PreflightFinding(
                name, "wrong matrix product", f"{matmul.device} multiplies wrongly"
            )
        if not matmul.is_repeatable:
            yield PreflightFinding(
                name,
                "product does not repeat",
                f"{matmul.device} gives other bits when it multiplies the same again",
            )
    for concerned, reason in examination.errors.items():
        if concerned in names:
            yield PreflightFinding(f"{name} -> {names[concerned]}", "link failed", reason)
        elif concerned not in missing:
            yield PreflightFinding(name, f"{concerned} failed", reason)


def _measured_links(
    examinations: Sequence[NodeExamination],
) -> Iterator[tuple[str, str, LinkResult]]:
    """Yield every link: the node that measured, the other node, and the result."""
    for examination in examinations:
        for peer, link in examination.links.items():
            yield examination.address, peer, link


def _rates(examinations: Sequence[NodeExamination]) -> dict[tuple[str, str], float]:
    """Return the rate of every link and direction, by sender and receiver."""
    rates: dict[tuple[str, str], float] = {}
    for address, peer, link in _measured_links(examinations):
        rates[address, peer] = link.send_rate
        rates[peer, address] = link.receive_rate
    return rates


def _comparisons(examinations: Sequence[NodeExamination]) -> list[_Comparison]:
    addresses = [examination.address for examination in examinations]
    rates = _rates(examinations)
    # At its best a sick node is still slow; the best of a healthy one is not spoilt by a sick
    # partner.
    sending = best_rates(((sender, rate) for (sender, _), rate in rates.items()), addresses)
    receiving = best_rates(((receiver, rate) for (_, receiver), rate in rates.items()), addresses)
    latencies: dict[str, float] = {}
    for address, peer, link in _measured_links(examinations):
        for end in (address, peer):
            latencies[end] = min(link.latency_s, latencies.get(end, float("inf")))
    comparisons = [
        _Comparison(
            what="memory",
            values={one.address: one.memory_rate for one in examinations},
            unit="B/s",
        ),
        _Comparison(
            what="disk",
            values={one.address: one.disk.write_rate for one in examinations if one.disk},
            unit="B/s",
        ),
        _Comparison(
            what="loopback",
            values={one.address: one.loopback.send_rate for one in examinations if one.loopback},
            unit="B/s",
        ),
        _Comparison(what="sending", values=sending, unit="B/s", is_of_links=True),
        _Comparison(what="receiving", values=receiving, unit="B/s", is_of_links=True),
        _Comparison(what="latency", values=latencies, unit="s", is_rate=False, is_of_links=True),
    ]
    speeds: dict[str, dict[str, float]] = {}
    for examination in examinations:
        for matmul in examination.matmuls:
            speeds.setdefault(matmul.device, {})[examination.address] = matmul.flops
    comparisons += [
        _Comparison(what=f"matrix products on {device}", values=speeds[device], unit="FLOP/s")
        for device in sorted(speeds)
    ]
    return comparisons


def _slow_links(
    examinations: Sequence[NodeExamination], names: Mapping[str, str], slow_nodes: set[str]
) -> Iterator[PreflightFinding]:
    """Yield links of a low rate between nodes that are not slow themselves."""
    rates = {
        ends: rate for ends, rate in _rates(examinations).items() if slow_nodes.isdisjoint(ends)
    }
    if len(rates) < _MIN_LINKS:
        return
    usual = statistics.median(rates.values())
    for (sender, receiver), rate in sorted(rates.items()):
        if rate < LINK_SHARE * usual:
            yield PreflightFinding(
                f"{_name_of(names, sender)} -> {_name_of(names, receiver)}",
                "slow link",
                f"{_format_value(rate, 'B/s')}, the median of all links is "
                f"{_format_value(usual, 'B/s')}",
            )


def _late_links(
    examinations: Sequence[NodeExamination], names: Mapping[str, str], slow_nodes: set[str]
) -> Iterator[PreflightFinding]:
    """Yield links of a long latency between nodes that are not slow themselves."""
    latencies = {
        (address, peer): link.latency_s
        for address, peer, link in _measured_links(examinations)
        if slow_nodes.isdisjoint((address, peer))
    }
    if len(latencies) < _MIN_LINKS:
        return
    usual_s = statistics.median(latencies.values())
    for (address, peer), latency_s in sorted(latencies.items()):
        if latency_s > LATENCY_RATIO * usual_s:
            yield PreflightFinding(
                f"{_name_of(names, address)} -> {_name_of(names, peer)}",
                "long latency",
                f"{_format_value(latency_s, 's')} there and back, the median of all links is "
                f"{_format_value(usual_s, 's')}",
            )


def _wrong_clocks(
    examinations: Sequence[NodeExamination], names: Mapping[str, str]
) -> Iterator[PreflightFinding]:
    """Yield the nodes whose wall clock is far from that of most."""
    offsets_s: dict[str, list[float]] = {}
    for address, peer, link in _measured_links(examinations):
        offsets_s.setdefault(peer, []).append(link.clock_offset_s)
        offsets_s.setdefault(address, []).append(-link.clock_offset_s)
    for address, offsets in sorted(offsets_s.items()):
        offset_s = common_offset_s(offsets)
        if address in names and abs(offset_s) > MAX_CLOCK_OFFSET_S:
            yield PreflightFinding(
                names[address],
                "clock is off",
                f"its wall clock is {offset_s:+.2f} s from the others'",
            )


def common_offset_s(offsets_s: Sequence[float]) -> float:
    """Return how far a wall clock is off, given how far it is off each other node's; at least one.

    It is right if it agrees with half of the others: in a cluster of three, a healthy one does not
    agree with more. Between two nodes it is not known whose clock is off.
    """
    return sorted(offsets_s, key=abs)[(len(offsets_s) - 1) // 2]


def _format_value(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e6:.0f} us" if value < 1e-3 else f"{value * 1e3:.1f} ms"
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.2f} {prefix}{unit}"
    return f"{value / 1e3:.1f} k{unit}"
