"""Links that are slow, from messages between pairs: the matrix of delays, sender by receiver.

A message's delay runs from when the later of the two called until it was received. The shorter of the two sides' durations is a lower bound
of it, for the later one waited for nothing but the transfer; but a backend that buffers sends tells only its copying so. With aligned
clocks it is read off both sides, less what the clocks may be off: so an error in them never makes a link look slow. It is the same for all links
between nodes, the largest, for they are compared with each other; where some node's clock is not known, none is trusted.

Cells are medians over the window and deviate in the logarithm from those of the same size class and reach (within a node or across).
A row all of whose cells are slow is a sender, a column a receiver, else each slow cell is a link: a row's effect is its lower
median, which with two cells takes both, for with few peers ratios to a mean, or a polish that halves one odd cell between
its row and itself, point at the wrong one.

A link that loses packets now and then delays few messages, by much: their median tells nothing of it, so averages are judged as well,
and more is asked of them, for they follow every odd message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from keepstep.monitor.diagnosis.history import Deviations, StepSeries, deviations
from keepstep.monitor.diagnosis.robust import median_by
from keepstep.monitor.diagnosis.subjects import group_subject, link_subject, rank_subject
from keepstep.monitor.diagnosis.thresholds import SlowThresholds
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict

_RANK_BITS, _CLASS_BITS = 28, 6


def link_keys(sender: np.ndarray, receiver: np.ndarray, size_class: np.ndarray) -> np.ndarray:
    """Pack links into int64: 28 bits sender, 28 bits receiver, 6 bits size class."""
    packed: np.ndarray = (
        sender.astype(np.int64) << (_RANK_BITS + _CLASS_BITS)
        | receiver.astype(np.int64) << _CLASS_BITS
        | size_class.astype(np.int64)
    )
    return packed


def unpack(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sender, receiver and size class of packed links."""
    mask = (1 << _RANK_BITS) - 1
    return (
        keys >> (_RANK_BITS + _CLASS_BITS),
        (keys >> _CLASS_BITS) & mask,
        keys & ((1 << _CLASS_BITS) - 1),
    )


def message_delays(
    messages: np.ndarray, clock_error_s: Mapping[int, float], nodes: Mapping[int, str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return link keys and delays in seconds of messages (dtype MESSAGE) of which both sides have told.

    Args:
        messages: of one step.
        clock_error_s: how far each rank's clock may be off the job's; infinite if it was not aligned.
        nodes: each rank's node.
    """
    both = messages.compress(messages["sides"] == 3)
    if not len(both):
        return link_keys(both["sender"], both["receiver"], both["size_class"]), both["shortest_s"]
    error_s = np.zeros(len(both))
    for side in ("sender", "receiver"):
        error_s += [clock_error_s.get(rank, np.inf) for rank in both[side].tolist()]
    # Processes of one node share their clock.
    apart = ~_same_node(both["sender"], both["receiver"], nodes)
    error_s = np.where(apart, error_s.max(initial=0.0, where=apart), 0.0)
    delay_s = np.maximum(both["shortest_s"], both["received_s"] - both["later_s"] - error_s)
    return link_keys(both["sender"], both["receiver"], both["size_class"]), np.maximum(
        delay_s, 1e-9
    )


def delay_matrix(history: StepSeries, ranks: Sequence[int]) -> np.ndarray:
    """Return median delays in seconds, shape (ranks, ranks), rows senders, columns receivers, NaN where nothing was sent.

    Where a link carried several size classes, the largest speaks.
    """
    place = {rank: at for at, rank in enumerate(ranks)}
    matrix = np.full((len(ranks), len(ranks)), np.nan)
    told = ~np.isnan(history.values).all(axis=0)
    senders, receivers, _ = unpack(history.keys)
    for at in np.flatnonzero(told):
        sender, receiver = int(senders[at]), int(receivers[at])
        if sender in place and receiver in place:
            matrix[place[sender], place[receiver]] = np.exp(np.nanmedian(history.values[:, at]))
    return matrix


def find_slow_links(
    history: StepSeries,
    counts: Mapping[int, float],
    nodes: Mapping[int, str],
    step_s: float,
    since_s: Sequence[float],
    thresholds: SlowThresholds,
    *,
    averages: bool = False,
) -> tuple[tuple[Verdict, ...], np.ndarray]:
    """Return verdicts on links, senders and receivers, and which keys deviate.

    Args:
        history: delays, by packed link; of each step their median, or their average.
        counts: messages a step, by packed link.
        nodes: each rank's node.
        step_s: the job's step time.
        since_s: when each step of the history ended, by the job's clock.
        thresholds: how far and how long.
        averages: whether the history is of averages.
    """
    if averages:
        thresholds = replace(
            thresholds,
            transfer_ratio=thresholds.job_transfer_ratio,
            cost_share=thresholds.job_cost_share,
        )
    senders, receivers, classes = unpack(history.keys)
    groups = classes * 2 + _same_node(senders, receivers, nodes)
    found = deviations(history, groups, thresholds.transfer_ratio, thresholds)
    if not len(history.keys):
        return (), found.hot
    per_step = np.array([counts.get(int(key), 1.0) for key in history.keys])
    cost_s = np.nan_to_num(found.excess_s) * per_step
    costly = found.hot & (cost_s >= max(thresholds.cost_share * step_s, thresholds.cost_s))
    if not costly.any():
        pairs = () if averages else _pairs(history, groups, nodes, since_s, thresholds)
        return pairs, found.hot
    crowd = np.array([costly[groups == group].mean() for group in groups])
    costly &= crowd <= 0.5
    verdicts = []
    for subject, cells in _shape(senders, receivers, costly, _nearly(costly, found.ratio), nodes):
        worst = max(cells, key=lambda at: float(cost_s[at]))
        verdict = _verdict(subject, cells, worst, history, found, cost_s, since_s)
        if averages:
            verdict = replace(
                verdict,
                evidence=(
                    *verdict.evidence,
                    "that is on average, and few take so long: lost packets?",
                ),
            )
        verdicts.append(verdict)
    return tuple(verdicts), found.hot


def _nearly(slow: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """Return the slow cells, and those half as far out, by the logarithm, as the least of these: not all are found in the same step."""
    if not slow.any():
        return slow
    with np.errstate(invalid="ignore"):
        near: np.ndarray = slow | (ratio >= np.sqrt(np.nanmin(ratio[slow])))
    return near


def _shape(
    senders: np.ndarray,
    receivers: np.ndarray,
    slow: np.ndarray,
    nearly: np.ndarray,
    nodes: Mapping[int, str],
) -> list[tuple[Subject, list[int]]]:
    """Return what slow cells have in common: a sender, a receiver, both (the rank), or nothing (links)."""
    left = set(np.flatnonzero(nearly).tolist())
    found: list[tuple[Subject, list[int]]] = []
    rows, columns = _lines(senders, slow, nearly), _lines(receivers, slow, nearly)
    for rank in sorted(rows.keys() | columns.keys()):
        cells = sorted({*rows.get(rank, ()), *columns.get(rank, ())} & left)
        worst = [at for at in cells if slow[at]]
        # A cell at the crossing of two slow lines belongs to the longer one.
        if worst and (len(cells) >= 2 or (rank in rows and rank in columns)):
            found.append((rank_subject(rank, nodes), worst))
            left.difference_update(cells)
    by_link: dict[tuple[int, int], list[int]] = defaultdict(list)
    for at in sorted(left):
        if slow[at]:
            by_link[int(senders[at]), int(receivers[at])].append(at)
    found.extend((link_subject(*link, nodes), cells) for link, cells in by_link.items())
    return found


def _lines(ends: np.ndarray, slow: np.ndarray, nearly: np.ndarray) -> dict[int, list[int]]:
    """Return the ranks some of whose cells on one side are slow and most nearly so, of two or more, with those cells."""
    lines: dict[int, list[int]] = {}
    for rank in np.unique(ends[slow]).tolist():
        cells = np.flatnonzero(ends == rank)
        # The lower median of yes and no: of two cells both must be slow, of three two.
        if len(cells) >= 2 and 2 * nearly[cells].sum() > len(cells):
            lines[rank] = cells[nearly[cells]].tolist()
    return lines


def _verdict(
    subject: Subject,
    cells: Sequence[int],
    worst: int,
    history: StepSeries,
    found: Deviations,
    cost_s: np.ndarray,
    since_s: Sequence[float],
) -> Verdict:
    senders, receivers, _ = unpack(history.keys)
    side = "link"
    if subject.kind == "rank":
        sends = {int(senders[at]) for at in cells} == {subject.ranks[0]}
        receives = {int(receivers[at]) for at in cells} == {subject.ranks[0]}
        side = (
            "sending side (a row)"
            if sends
            else "receiving side (a column)"
            if receives
            else "both directions"
        )
    delay_s = float(np.exp(np.nanmedian(history.values[:, worst])))
    evidence = (
        f"{side}: {len(cells)} slow cells of the delay matrix",
        f"from rank {senders[worst]} to {receivers[worst]} a message takes {delay_s:.4f} s, "
        f"{found.ratio[worst]:.1f} times what is expected",
    )
    advice = Advice.REPLACE_NODE if subject.kind == "rank" and subject.node else Advice.ALERT
    began_s = (
        float(since_s[min(int(found.since[worst]), len(since_s) - 1)]) if len(since_s) else 0.0
    )
    cost = float(max(cost_s[at] for at in cells))
    return Verdict(subject, Syndrome.COMMUNICATION_SLOW, began_s, evidence, 0.85, cost, advice)


def _pairs(
    history: StepSeries,
    groups: np.ndarray,
    nodes: Mapping[int, str],
    since_s: Sequence[float],
    thresholds: SlowThresholds,
) -> tuple[Verdict, ...]:
    """Judge two links with no others: which of the two directions is at fault is inconclusive unless the past tells."""
    senders, receivers, _ = unpack(history.keys)
    if len(history.keys) != 2 or groups[0] != groups[1]:
        return ()
    apart = history.values[:, 0] - history.values[:, 1]
    apart = apart[~np.isnan(apart)]
    if len(apart) < thresholds.sustained:
        return ()
    middle = float(np.median(apart))
    slower = 0 if middle > 0 else 1
    limit = np.log(thresholds.transfer_ratio)
    often = int((apart * np.sign(middle) > limit).sum())
    excess_s = float(np.abs(np.diff(np.exp(np.nanmedian(history.values, axis=0))))[0])
    if often < thresholds.sustained or excess_s < thresholds.cost_s:
        return ()
    changed = np.nanmedian(history.values, axis=0) - history.past
    told = f"messages from rank {senders[slower]} to {receivers[slower]} take {np.exp(abs(middle)):.1f} times those of the only other link"
    began_s = float(since_s[0]) if len(since_s) else 0.0
    slow = Syndrome.COMMUNICATION_SLOW
    if changed[slower] > limit and abs(changed[1 - slower]) < limit / 2:
        subject = link_subject(int(senders[slower]), int(receivers[slower]), nodes)
        return (
            Verdict(
                subject,
                slow,
                began_s,
                (told, "the other keeps to its past"),
                0.7,
                excess_s,
                Advice.ALERT,
            ),
        )
    subject = group_subject({*senders.tolist(), *receivers.tolist()}, nodes)
    return (
        Verdict(
            subject,
            slow,
            began_s,
            (told, "with two that disagree: inconclusive"),
            0.3,
            excess_s,
            Advice.OBSERVE,
        ),
    )


def _same_node(first: np.ndarray, second: np.ndarray, nodes: Mapping[int, str]) -> np.ndarray:
    ranks = np.union1d(first, second)
    if not len(ranks):
        return np.zeros(0, bool)
    _, places = np.unique([nodes.get(int(rank), f"?{rank}") for rank in ranks], return_inverse=True)
    same: np.ndarray = (
        places[np.searchsorted(ranks, first)] == places[np.searchsorted(ranks, second)]
    )
    return same


def median_delays(
    keys: np.ndarray, delays_s: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct keys of one step's messages, their median delays and how many each had."""
    grouped = median_by(keys, delays_s)
    return grouped.keys, grouped.medians, grouped.counts


def average_delays(keys: np.ndarray, delays_s: np.ndarray) -> np.ndarray:
    """Return the average delay of each distinct key, in the keys' order."""
    _, place = np.unique(keys, return_inverse=True)
    sums, counts = np.bincount(place, delays_s), np.bincount(place)
    averages: np.ndarray = sums / np.maximum(counts, 1)
    return averages
