"""Finds slow links, from delays of messages between pairs: a matrix, senders by receivers.

A message's delay runs from the call of the later side until it was received. The shorter of the two
sides' durations is a lower bound of it, for the later side waited for nothing but the transfer; a
backend that buffers sends, however, records only the time of copying. With aligned clocks the delay
is computed from both sides, less the clocks' error: an error of the clocks therefore never makes a
link look slow. The same error, the largest, is used for all links between nodes, for they are
compared with each other; if some node's clock is not known, no clock is trusted.

Cells are medians over the window and deviate in the logarithm from those of the same size class and
reach (within a node or across). A row all of whose cells are slow is a sender, a column a receiver,
otherwise each slow cell is a link. A row's effect is its lower median, which with two cells
requires both: with few peers, ratios to a mean, or a median polish that splits one slow cell
between its row and itself, point at the wrong one.

A link that loses packets delays few messages, by much, which medians do not show: see
`keepstep.monitor.diagnosis.lossy_links`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.diagnosis.history import (
    Deviations,
    StepSeries,
    changed_of_two,
    deviations,
)
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
    """Return link keys and delays in seconds of messages that both sides have reported.

    Args:
        messages: dtype MESSAGE, of one step.
        clock_error_s: largest error of each rank's clock against the job's; infinite if not
            aligned.
        nodes: each rank's node.
    """
    both = messages.compress(messages["sides"] == 3)
    if not len(both):
        return link_keys(both["sender"], both["receiver"], both["size_class"]), both["shortest_s"]
    error_s = np.zeros(len(both))
    for side in ("sender", "receiver"):
        error_s += [clock_error_s.get(rank, np.inf) for rank in both[side].tolist()]
    # Processes of one node share their clock.
    is_across = ~same_node(both["sender"], both["receiver"], nodes)
    error_s = np.where(is_across, error_s.max(initial=0.0, where=is_across), 0.0)
    delay_s = np.maximum(both["shortest_s"], both["received_s"] - both["later_s"] - error_s)
    return link_keys(both["sender"], both["receiver"], both["size_class"]), np.maximum(
        delay_s, 1e-9
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkInputs:
    """Inputs of `find_slow_links` in addition to the series.

    Args:
        counts: messages a step, by packed link.
        nodes: each rank's node.
        step_s: the job's step time.
        since_s: when each step of the history ended, by the job's clock.
    """

    counts: Mapping[int, float]
    nodes: Mapping[int, str]
    step_s: float
    since_s: Sequence[float]

    def per_step(self, keys: np.ndarray) -> np.ndarray:
        """Return the messages a step of each link."""
        return np.array([self.counts.get(key, 1.0) for key in keys.tolist()])

    def began_s(self, position: int) -> float:
        """Return when a deviation began that shows from a position of the history on."""
        if not self.since_s:
            return 0.0
        return float(self.since_s[min(position, len(self.since_s) - 1)])


def find_slow_links(
    history: StepSeries, job: LinkInputs, thresholds: SlowThresholds
) -> tuple[tuple[Verdict, ...], np.ndarray]:
    """Return verdicts on links, senders and receivers by median delays, and which keys deviate."""
    verdicts, hot = judge_cells(history, job, thresholds)
    of_pair, has_changed = _pairs(history, job, thresholds)
    return verdicts or of_pair, hot | has_changed


def judge_cells(
    history: StepSeries, job: LinkInputs, thresholds: SlowThresholds
) -> tuple[tuple[Verdict, ...], np.ndarray]:
    """Return verdicts on slow cells of the delay matrix by their shape, and which keys deviate.

    Args:
        history: delays, by packed link; of each step their median or their average.
        job: the other inputs.
        thresholds: how far and how long.
    """
    senders, receivers, classes = unpack(history.keys)
    groups = classes * 2 + same_node(senders, receivers, job.nodes)
    deviation = deviations(history, groups, thresholds.transfer_ratio, thresholds)
    if not len(history.keys):
        return (), deviation.hot
    cost_s = np.nan_to_num(deviation.excess_s) * job.per_step(history.keys)
    least_s = max(thresholds.cost_share * job.step_s, thresholds.cost_s)
    is_costly = deviation.hot & (cost_s >= least_s)
    is_costly &= share_of(is_costly, groups) <= 0.5
    verdicts = [
        _verdict(
            subject,
            cells,
            max(cells, key=lambda at: float(cost_s[at])),
            history,
            deviation,
            cost_s,
            job,
        )
        for subject, cells in _shape(
            senders, receivers, is_costly, nearly_slow(is_costly, deviation.ratio), job.nodes
        )
    ]
    return tuple(verdicts), deviation.hot


def share_of(chosen: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return for each subject the share of its group that is chosen."""
    _, group_of = np.unique(groups, return_inverse=True)
    share: np.ndarray = (np.bincount(group_of, chosen) / np.bincount(group_of))[group_of]
    return share


def nearly_slow(slow: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """Return the slow cells, and those half as far out as the least of these, by the logarithm.

    Not all cells are found in the same step.
    """
    if not slow.any():
        return slow
    with np.errstate(invalid="ignore"):
        is_near: np.ndarray = slow | (ratio >= np.sqrt(np.nanmin(ratio[slow])))
    return is_near


def _shape(
    senders: np.ndarray,
    receivers: np.ndarray,
    slow: np.ndarray,
    nearly: np.ndarray,
    nodes: Mapping[int, str],
) -> list[tuple[Subject, list[int]]]:
    """Return what slow cells have in common: a sender, a receiver, both (the rank), or links."""
    remaining = set(np.flatnonzero(nearly).tolist())
    subjects: list[tuple[Subject, list[int]]] = []
    rows, columns = lines_of(senders, slow, nearly), lines_of(receivers, slow, nearly)
    for rank in sorted(rows.keys() | columns.keys()):
        cells = sorted({*rows.get(rank, ()), *columns.get(rank, ())} & remaining)
        worst = [at for at in cells if slow[at]]
        # A cell at the crossing of two slow lines belongs to the longer one.
        if worst and (len(cells) >= 2 or (rank in rows and rank in columns)):
            subjects.append((rank_subject(rank, nodes), worst))
            remaining.difference_update(cells)
    by_link: dict[tuple[int, int], list[int]] = defaultdict(list)
    for at in sorted(remaining):
        if slow[at]:
            by_link[int(senders[at]), int(receivers[at])].append(at)
    subjects.extend((link_subject(*link, nodes), cells) for link, cells in by_link.items())
    return subjects


def lines_of(ends: np.ndarray, slow: np.ndarray, nearly: np.ndarray) -> dict[int, list[int]]:
    """Return the ranks with nearly slow cells on most of one side, and those cells.

    At least one of the cells is slow, and there are two or more on that side.
    """
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
    deviation: Deviations,
    cost_s: np.ndarray,
    job: LinkInputs,
) -> Verdict:
    """Return a verdict on one subject and its slow cells."""
    senders, receivers, _ = unpack(history.keys)
    direction = "link"
    if subject.kind == "rank":
        (rank,) = subject.ranks
        if all(senders[at] == rank for at in cells):
            direction = "sending side (a row)"
        elif all(receivers[at] == rank for at in cells):
            direction = "receiving side (a column)"
        else:
            direction = "both directions"
    delay_s = float(np.exp(np.nanmedian(history.values[:, worst])))
    evidence = (
        f"{direction}: {len(cells)} slow cells of the delay matrix",
        f"from rank {senders[worst]} to {receivers[worst]} a message takes {delay_s:.4f} s, "
        f"{deviation.ratio[worst]:.1f} times the expected delay",
    )
    return slow_verdict(
        subject,
        evidence,
        float(max(cost_s[at] for at in cells)),
        job.began_s(int(deviation.since[worst])),
    )


def slow_verdict(
    subject: Subject, evidence: tuple[str, ...], cost_s: float, began_s: float
) -> Verdict:
    """Return the verdict that a link, or all links of a rank, are slow."""
    return Verdict(
        subject=subject,
        syndrome=Syndrome.COMMUNICATION_SLOW,
        since_s=began_s,
        evidence=evidence,
        confidence=0.85,
        cost_s_per_step=cost_s,
        advice=Advice.REPLACE_NODE if subject.kind == "rank" and subject.node else Advice.ALERT,
    )


def _pairs(
    history: StepSeries, job: LinkInputs, thresholds: SlowThresholds
) -> tuple[tuple[Verdict, ...], np.ndarray]:
    """Judge two links without other peers.

    Which of the two is at fault is inconclusive unless their past shows it. Returns also which
    links may be slower than they were.
    """
    none_changed = np.zeros(len(history.keys), bool)
    if len(history.keys) != 2:
        return (), none_changed
    senders, receivers, classes = unpack(history.keys)
    is_same = same_node(senders, receivers, job.nodes)
    if classes[0] != classes[1] or is_same[0] != is_same[1]:
        return (), none_changed
    difference = history.values[:, 0] - history.values[:, 1]
    difference = difference[~np.isnan(difference)]
    if len(difference) < thresholds.sustained:
        return (), none_changed
    middle = float(np.median(difference))
    slower = 0 if middle > 0 else 1
    limit = np.log(thresholds.transfer_ratio)
    often = int((difference * np.sign(middle) > limit).sum())
    excess_s = float(np.abs(np.diff(np.exp(np.nanmedian(history.values, axis=0))))[0])
    if often < thresholds.sustained or excess_s < thresholds.cost_s:
        return (), none_changed
    changed = changed_of_two(history, slower, limit)
    sentence = (
        f"messages from rank {senders[slower]} to {receivers[slower]} take "
        f"{np.exp(abs(middle)):.1f} times as long as those of the only other link"
    )
    if changed[slower] and not changed[1 - slower]:
        subject = link_subject(int(senders[slower]), int(receivers[slower]), job.nodes)
        reason = "the other link has not changed from its past"
        confidence, advice = 0.7, Advice.ALERT
    else:
        subject = group_subject({*senders.tolist(), *receivers.tolist()}, job.nodes)
        reason = "only two links to compare, and their past shows no cause: inconclusive"
        confidence, advice = 0.3, Advice.OBSERVE
    verdict = Verdict(
        subject=subject,
        syndrome=Syndrome.COMMUNICATION_SLOW,
        since_s=job.began_s(0),
        evidence=(sentence, reason),
        confidence=confidence,
        cost_s_per_step=excess_s,
        advice=advice,
    )
    return (verdict,), changed


def same_node(first: np.ndarray, second: np.ndarray, nodes: Mapping[int, str]) -> np.ndarray:
    """Return for each pair of ranks whether both are on the same node."""
    ranks = np.union1d(first, second)
    if not len(ranks):
        return np.zeros(0, bool)
    _, node_index = np.unique(
        [nodes.get(int(rank), f"?{rank}") for rank in ranks], return_inverse=True
    )
    is_same: np.ndarray = (
        node_index[np.searchsorted(ranks, first)] == node_index[np.searchsorted(ranks, second)]
    )
    return is_same


def median_delays(
    keys: np.ndarray, delays_s: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct keys of one step's messages, their median delays and their counts."""
    grouped = median_by(keys, delays_s)
    return grouped.keys, grouped.medians, grouped.counts


def average_delays(keys: np.ndarray, delays_s: np.ndarray) -> np.ndarray:
    """Return the average delay of each distinct key, in the keys' order."""
    _, key_index = np.unique(keys, return_inverse=True)
    sums, counts = np.bincount(key_index, delays_s), np.bincount(key_index)
    averages: np.ndarray = sums / np.maximum(counts, 1)
    return averages
