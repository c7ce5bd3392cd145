"""Finds communicators whose collectives are slow although all ranks have arrived.

A collective's transfer time is the duration at the rank that arrived last, the shortest of all:
what remains of the operation when no rank is waited for. It is compared, per size class, with that
of communicators of equal size and reach, and with its own past.

A slow communicator does not show which of its ranks is at fault. If several are slow, the node that
is in all of them and in no fast one is named; otherwise the group is. If all have slowed down
together, it is the job's network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.diagnosis.history import Deviations, StepSeries, deviations
from keepstep.monitor.diagnosis.subjects import (
    group_name,
    group_subject,
    node_subject,
    rank_subject,
)
from keepstep.monitor.diagnosis.thresholds import SlowThresholds
from keepstep.monitor.records import Communicator
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict

_CLASS_BITS = 8


def transfer_keys(communicator: np.ndarray, size_class: np.ndarray) -> np.ndarray:
    """Pack communicators and size classes into int64."""
    packed: np.ndarray = communicator.astype(np.int64) << _CLASS_BITS | size_class.astype(np.int64)
    return packed


def communicators_of(keys: np.ndarray) -> np.ndarray:
    """Return the communicators of packed keys."""
    identities: np.ndarray = keys >> _CLASS_BITS
    return identities


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferInputs:
    """Inputs of `find_slow_transfers` in addition to the series.

    Args:
        communicators: of the job.
        nodes: each rank's node.
        counts: collectives a step, by packed key.
        step_s: the job's step time.
        own_shift: ratio by which own times have changed from their past; NaN if not known.
        since_s: when each step of the history ended, by the job's clock.
    """

    communicators: Mapping[int, Communicator]
    nodes: Mapping[int, str]
    counts: Mapping[int, float]
    step_s: float
    own_shift: float
    since_s: Sequence[float]


def find_slow_transfers(
    history: StepSeries, fabric: TransferInputs, thresholds: SlowThresholds
) -> tuple[tuple[Verdict, ...], np.ndarray]:
    """Return verdicts on communicators, and which keys deviate."""
    if not len(history.keys):
        return (), np.zeros(0, bool)
    groups = _groups(history.keys, fabric)
    deviation = deviations(history, groups, thresholds.transfer_ratio, thresholds)
    counts = np.array([fabric.counts.get(int(key), 1.0) for key in history.keys])
    cost_s = np.nan_to_num(deviation.excess_s) * counts
    is_costly = deviation.hot & (
        cost_s >= max(thresholds.cost_share * fabric.step_s, thresholds.cost_s)
    )
    common_change, is_deviating = _common_change(history), deviation.hot
    if (common_change > np.log(thresholds.job_transfer_ratio)).sum() >= thresholds.sustained:
        # Not learnt from, whether the network is blamed for it or machines that are busy.
        is_deviating = np.ones(len(deviation.hot), bool)
        job_verdict = _all_together(history, fabric, counts, common_change, thresholds)
        if job_verdict is not None:
            return (job_verdict,), is_deviating
    verdicts = []
    for group in np.unique(groups[is_costly]):
        members = np.flatnonzero(groups == group)
        slow = members[is_costly[members]]
        if 2 * len(slow) > len(members):
            continue
        identities = communicators_of(history.keys[slow]).tolist()
        others = communicators_of(history.keys[members[~deviation.hot[members]]]).tolist()
        subject, confidence = _localise(identities, others, fabric)
        worst = slow[np.argmax(cost_s[slow])]
        verdicts.append(
            _verdict(subject, confidence, slow, int(worst), history, deviation, cost_s, fabric)
        )
    return _best(verdicts), is_deviating


def _groups(keys: np.ndarray, fabric: TransferInputs) -> np.ndarray:
    """Return a group number for each key: of (ranks, size class, within a node or across)."""
    distinct, index = np.unique(communicators_of(keys), return_inverse=True)
    sizes = np.zeros(len(distinct), np.int64)
    across = np.zeros(len(distinct), bool)
    for at, identity in enumerate(distinct.tolist()):
        communicator = fabric.communicators.get(identity)
        if communicator:
            sizes[at] = len(communicator.ranks)
            first = fabric.nodes.get(communicator.ranks[0])
            across[at] = any(fabric.nodes.get(rank) != first for rank in communicator.ranks)
    classes = keys & ((1 << _CLASS_BITS) - 1)
    groups: np.ndarray = (sizes[index] << 16) | (classes << 1) | across[index]
    return groups


def _localise(
    slow: Sequence[int], fast: Sequence[int], fabric: TransferInputs
) -> tuple[Subject, float]:
    """Return what all slow communicators and no fast one have in common, and the confidence."""
    slow_members = [
        set(fabric.communicators[identity].ranks)
        for identity in slow
        if identity in fabric.communicators
    ]
    if not slow_members:
        return Subject("job", ()), 0.3
    if len(set(slow)) > 1:
        fast_members = {
            rank
            for identity in fast
            if identity in fabric.communicators
            for rank in fabric.communicators[identity].ranks
        }
        common_ranks = set.intersection(*slow_members) - fast_members
        if len(common_ranks) == 1:
            return rank_subject(next(iter(common_ranks)), fabric.nodes), 0.75
        slow_nodes = [
            {fabric.nodes.get(rank, "") for rank in ranks if rank not in fast_members}
            for ranks in slow_members
        ]
        common_nodes = set.intersection(*slow_nodes) - {""}
        if len(common_nodes) == 1:
            return node_subject(common_nodes.pop(), fabric.nodes), 0.75
    all_members = set.union(*slow_members)
    if len(all_members) >= len(fabric.nodes):
        return Subject("job", ()), 0.4
    return group_subject(all_members, fabric.nodes), 0.5


def _verdict(
    subject: Subject,
    confidence: float,
    slow: np.ndarray,
    worst: int,
    history: StepSeries,
    deviation: Deviations,
    cost_s: np.ndarray,
    fabric: TransferInputs,
) -> Verdict:
    """Return a verdict on one subject and its slow communicators."""
    identity = int(communicators_of(history.keys[worst]))
    name = group_name(fabric.communicators, identity)
    transfer_s = np.exp(np.nanmedian(history.values[:, worst]))
    evidence = [
        f"collectives of {name} take {transfer_s:.4f} s after the last rank has arrived, "
        f"{deviation.ratio[worst]:.1f} times the expected time"
    ]
    if len(slow) > 1:
        evidence.append(f"so do {len(slow) - 1} other communicators of equal size")
    since_s = (
        float(fabric.since_s[min(int(deviation.since[worst]), len(fabric.since_s) - 1)])
        if len(fabric.since_s)
        else 0.0
    )
    advice = Advice.REPLACE_NODE if subject.kind == "node" else Advice.ALERT
    cost = float(cost_s[worst])
    return Verdict(
        subject=subject,
        syndrome=Syndrome.COMMUNICATION_SLOW,
        since_s=since_s,
        evidence=tuple(evidence),
        confidence=confidence,
        cost_s_per_step=cost,
        advice=advice,
    )


def _best(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Keep one verdict per subject.

    Groups and the job are dropped if they contain a subject that is named more precisely.
    """
    by_subject: dict[Subject, Verdict] = {}
    for verdict in sorted(verdicts, key=lambda verdict: -verdict.cost_s_per_step):
        by_subject.setdefault(verdict.subject, verdict)
    precise_ranks = {
        rank for subject in by_subject if subject.kind in ("rank", "node") for rank in subject.ranks
    }
    return tuple(
        verdict
        for subject, verdict in by_subject.items()
        if subject.kind in ("rank", "node")
        or not (precise_ranks & set(subject.ranks) or (precise_ranks and subject.kind == "job"))
    )


def _common_change(history: StepSeries) -> np.ndarray:
    """Return for each step the median logarithm of all transfer times over their own past."""
    rows = [values[~np.isnan(values)] for values in history.values - history.past]
    return np.array([np.median(values) if len(values) else 0.0 for values in rows])


def _all_together(
    history: StepSeries,
    fabric: TransferInputs,
    counts: np.ndarray,
    common_change: np.ndarray,
    thresholds: SlowThresholds,
) -> Verdict | None:
    """Return a verdict on the job if its network is why all communicators are slower."""
    if not fabric.own_shift <= thresholds.job_own_ratio:
        return None
    # A step waits for the communicators of one rank, not for all of the job: count each group once.
    groups = _groups(history.keys, fabric)
    extra_s = np.exp(np.nan_to_num(history.values[-1], nan=-30.0)) - np.exp(
        np.nan_to_num(history.past, nan=-30.0)
    )
    cost_s = sum(
        float(np.median((extra_s * counts)[groups == group])) for group in np.unique(groups)
    )
    if cost_s < max(thresholds.job_cost_share * fabric.step_s, thresholds.cost_s):
        return None
    ratio = float(np.exp(np.median(common_change)))
    evidence = (
        f"collectives of all communicators take {ratio:.1f} times as long as before",
        "own times have not grown, and the slow link is not known: probe the links pairwise",
    )
    since_s = float(fabric.since_s[0]) if len(fabric.since_s) else 0.0
    return Verdict(
        subject=Subject("job", ()),
        syndrome=Syndrome.COMMUNICATION_SLOW,
        since_s=since_s,
        evidence=evidence,
        confidence=0.5,
        cost_s_per_step=cost_s,
        advice=Advice.ALERT,
    )
