"""Communicators whose collectives are slow though everybody has arrived.

A collective's transfer time is the duration at the rank that arrived last, the shortest of all: what remains of the operation when nobody
is waited for. It is compared, per size class, with that of communicators of equal size and reach, and with its own past.

A slow communicator does not tell which of its ranks is at fault. If several are slow, a node that is in all of them and of whose
communicators none is fast is named; else the group is. If all have slowed down together, it is the job's network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.diagnosis.history import Deviations, StepSeries, deviations
from keepstep.monitor.diagnosis.subjects import group_subject, node_subject, rank_subject
from keepstep.monitor.diagnosis.thresholds import SlowThresholds
from keepstep.monitor.records import Communicator
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict

_CLASS_BITS = 8


def transfer_keys(communicator: np.ndarray, size_class: np.ndarray) -> np.ndarray:
    """Pack communicators and size classes into int64."""
    packed: np.ndarray = communicator.astype(np.int64) << _CLASS_BITS | size_class.astype(np.int64)
    return packed


@dataclass(frozen=True, slots=True)
class TransferInputs:
    """What transfer times are judged with.

    Args:
        communicators: of the job.
        nodes: each rank's node.
        counts: collectives a step, by packed key.
        step_s: the job's step time.
        own_shift: how own times have changed from their past, as a ratio; NaN if not known.
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
    found = deviations(history, groups, thresholds.transfer_ratio, thresholds)
    counts = np.array([fabric.counts.get(int(key), 1.0) for key in history.keys])
    cost_s = np.nan_to_num(found.excess_s) * counts
    costly = found.hot & (cost_s >= max(thresholds.cost_share * fabric.step_s, thresholds.cost_s))
    common = _all_together(history, fabric, counts, thresholds)
    if common is not None:
        return (common,), np.ones(len(found.hot), bool)
    verdicts = []
    for group in np.unique(groups[costly]):
        members = np.flatnonzero(groups == group)
        slow = members[costly[members]]
        if 2 * len(slow) > len(members):
            continue
        identities = [int(history.keys[at]) >> _CLASS_BITS for at in slow]
        others = [int(history.keys[at]) >> _CLASS_BITS for at in members if not found.hot[at]]
        subject, confidence = _localise(identities, others, fabric)
        worst = slow[np.argmax(cost_s[slow])]
        verdicts.append(
            _verdict(subject, confidence, slow, int(worst), history, found, cost_s, fabric)
        )
    return _best(verdicts), found.hot


def _groups(keys: np.ndarray, fabric: TransferInputs) -> np.ndarray:
    """Return for each key an id of (ranks, size class, within a node or across)."""
    distinct, index = np.unique(keys >> _CLASS_BITS, return_inverse=True)
    sizes = np.zeros(len(distinct), np.int64)
    across = np.zeros(len(distinct), bool)
    for at, identity in enumerate(distinct.tolist()):
        known = fabric.communicators.get(identity)
        if known:
            sizes[at] = len(known.ranks)
            first = fabric.nodes.get(known.ranks[0])
            across[at] = any(fabric.nodes.get(rank) != first for rank in known.ranks)
    classes = keys & ((1 << _CLASS_BITS) - 1)
    kinds: np.ndarray = (sizes[index] << 16) | (classes << 1) | across[index]
    return kinds


def _localise(
    slow: Sequence[int], fast: Sequence[int], fabric: TransferInputs
) -> tuple[Subject, float]:
    """Return whom all slow communicators and no fast one have in common, and how sure that is."""
    known = [
        set(fabric.communicators[identity].ranks)
        for identity in slow
        if identity in fabric.communicators
    ]
    if not known:
        return Subject("job", ()), 0.3
    if len(set(slow)) > 1:
        cleared = {
            rank
            for identity in fast
            if identity in fabric.communicators
            for rank in fabric.communicators[identity].ranks
        }
        common = set.intersection(*known) - cleared
        if len(common) == 1:
            return rank_subject(next(iter(common)), fabric.nodes), 0.75
        places = [
            {fabric.nodes.get(rank, "") for rank in ranks if rank not in cleared} for ranks in known
        ]
        shared = set.intersection(*places) - {""}
        if len(shared) == 1:
            return node_subject(shared.pop(), fabric.nodes), 0.75
    everybody = set.union(*known)
    if len(everybody) >= len(fabric.nodes):
        return Subject("job", ()), 0.4
    return group_subject(everybody, fabric.nodes), 0.5


def _verdict(
    subject: Subject,
    confidence: float,
    slow: np.ndarray,
    worst: int,
    history: StepSeries,
    found: Deviations,
    cost_s: np.ndarray,
    fabric: TransferInputs,
) -> Verdict:
    identity = int(history.keys[worst]) >> _CLASS_BITS
    known = fabric.communicators.get(identity)
    name = known.name if known else str(identity)
    evidence = [
        f"collectives of {name} take {np.exp(np.nanmedian(history.values[:, worst])):.4f} s after the last rank has come, "
        f"{found.ratio[worst]:.1f} times what is expected"
    ]
    if len(slow) > 1:
        evidence.append(f"so do {len(slow) - 1} others of its kind")
    since_s = (
        float(fabric.since_s[min(int(found.since[worst]), len(fabric.since_s) - 1)])
        if len(fabric.since_s)
        else 0.0
    )
    advice = Advice.REPLACE_NODE if subject.kind == "node" else Advice.ALERT
    cost = float(cost_s[worst])
    return Verdict(
        subject, Syndrome.COMMUNICATION_SLOW, since_s, tuple(evidence), confidence, cost, advice
    )


def _best(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Keep one verdict for each subject; drop groups and the job that contain a subject already named more precisely."""
    named: dict[Subject, Verdict] = {}
    for verdict in sorted(verdicts, key=lambda one: -one.cost_s_per_step):
        named.setdefault(verdict.subject, verdict)
    precise = {
        rank for subject in named if subject.kind in ("rank", "node") for rank in subject.ranks
    }
    return tuple(
        verdict
        for subject, verdict in named.items()
        if subject.kind in ("rank", "node")
        or not (precise & set(subject.ranks) or (precise and subject.kind == "job"))
    )


def _all_together(
    history: StepSeries, fabric: TransferInputs, counts: np.ndarray, thresholds: SlowThresholds
) -> Verdict | None:
    """Judge a slowdown of all communicators against their own past."""
    changed = history.values - history.past
    if len(changed) < thresholds.sustained or np.isnan(changed).all():
        return None
    rows = [row[~np.isnan(row)] for row in changed]
    common = np.array([np.median(row) if len(row) else 0.0 for row in rows])
    if (common > np.log(thresholds.job_transfer_ratio)).sum() < thresholds.sustained:
        return None
    if not fabric.own_shift <= thresholds.job_own_ratio:
        return None
    # A step waits for the communicators of one rank, not for all of the job's: count each kind once.
    groups = _groups(history.keys, fabric)
    extra_s = np.exp(np.nan_to_num(history.values[-1], nan=-30.0)) - np.exp(
        np.nan_to_num(history.past, nan=-30.0)
    )
    cost_s = sum(
        float(np.median((extra_s * counts)[groups == group])) for group in np.unique(groups)
    )
    if cost_s < max(thresholds.job_cost_share * fabric.step_s, thresholds.cost_s):
        return None
    ratio = float(np.exp(np.median(common)))
    evidence = (
        f"collectives take {ratio:.1f} times what they used to, of all communicators alike",
        "own times have not grown; nothing tells which link it is: probe them pairwise",
    )
    since_s = float(fabric.since_s[0]) if len(fabric.since_s) else 0.0
    return Verdict(
        Subject("job", ()),
        Syndrome.COMMUNICATION_SLOW,
        since_s,
        evidence,
        0.5,
        cost_s,
        Advice.ALERT,
    )
