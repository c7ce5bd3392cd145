"""Ranks that hold the job up by what they do outside of communication.

The figure is a rank's own time per step (see `keepstep.monitor.diagnosis.accounts`): who is late because it waited for another has a normal one. Peers are
ranks of equal role, which call the same operations equally often in a step: stages of a pipeline that do other work are others. A rank
deviates if its own time exceeds its peers' or its own past (`keepstep.monitor.diagnosis.history`), and it costs: the job waits for the excess in
every step. Where data, checkpoint or garbage collection make up most of the excess, the verdict says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.diagnosis.history import Deviations, StepSeries, deviations
from keepstep.monitor.diagnosis.robust import MAD_TO_SIGMA, MEDIAN_TO_MEAN_ERROR
from keepstep.monitor.diagnosis.subjects import gather, group_subject, rank_subject
from keepstep.monitor.diagnosis.thresholds import SlowThresholds
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict

_PARTS = (
    ("data_s", Syndrome.DATA_STALL, "waiting for data"),
    ("checkpoint_s", Syndrome.CHECKPOINT_STALL, "in checkpoints"),
    ("garbage_s", Syndrome.GARBAGE_COLLECTION, "in garbage collection"),
)


@dataclass(frozen=True, slots=True)
class SlownessInputs:
    """What slowness is judged from.

    Args:
        own: history of own times, by rank.
        rows: the window's steps, dtype STEP, shape (steps, ranks): as `own`, step 0 where not told.
        lateness: for each rank, the collectives of the window to which it came last.
        nodes: each rank's node.
    """

    own: StepSeries
    rows: np.ndarray
    lateness: Mapping[int, int]
    nodes: Mapping[int, str]


def find_slow_ranks(
    job: SlownessInputs, thresholds: SlowThresholds
) -> tuple[tuple[Verdict, ...], np.ndarray]:
    """Return the verdicts, and which ranks of `job.own` deviate, so that their past does not learn from it."""
    roles = job.rows["role"].max(axis=0)
    found = deviations(job.own, roles, 1 + thresholds.own_excess, thresholds)
    hot = found.hot.copy()
    if not len(hot):
        return (), hot
    told = job.rows["step"] > 0
    step_s = float(np.median(job.rows["duration_s"][told])) if told.any() else 0.0
    costly = hot & (found.excess_s >= max(thresholds.cost_share * step_s, thresholds.cost_s))
    costly &= ~_widespread(costly, found.ratio, roles, job, thresholds)
    verdicts = _verdicts(job, found, np.flatnonzero(costly), roles, step_s)
    return (*verdicts, *_pairs(job, roles, step_s, thresholds)), hot


def _widespread(
    costly: np.ndarray,
    ratio: np.ndarray,
    roles: np.ndarray,
    job: SlownessInputs,
    thresholds: SlowThresholds,
) -> np.ndarray:
    """Return whose peers are slow in such a share that nobody is to blame; a whole node may be slow together.

    Who is half as far out as the least of those found counts too: when many slow down at once, not all are found in the same step.
    """
    crowded = np.zeros(len(costly), bool)
    for role in np.unique(roles[costly]):
        peers = roles == role
        with np.errstate(invalid="ignore"):
            is_out = ratio >= np.sqrt(ratio[peers & costly].min())
        slow = np.flatnonzero(peers & (costly | is_out))
        together = len({job.nodes.get(int(rank), str(rank)) for rank in job.own.keys[slow]}) == 1
        limit = 0.5 if together else thresholds.widespread_share
        if len(slow) > max(1.0, limit * peers.sum()):
            crowded[slow] = True
    return crowded


def _verdicts(
    job: SlownessInputs, found: Deviations, slow: np.ndarray, roles: np.ndarray, step_s: float
) -> tuple[Verdict, ...]:
    by_syndrome: dict[Syndrome, dict[int, int]] = defaultdict(dict)
    parts: dict[int, str] = {}
    for at in slow.tolist():
        syndrome, told = _part(job.rows, at, roles, float(found.excess_s[at]))
        rank = int(job.own.keys[at])
        by_syndrome[syndrome][rank] = at
        parts[rank] = told
    verdicts = []
    for syndrome, ranks in sorted(by_syndrome.items()):
        for subject in gather(ranks, job.nodes):
            places = [ranks[rank] for rank in subject.ranks if rank in ranks]
            worst = max(places, key=lambda at: float(found.excess_s[at]))
            rank, cost_s = int(job.own.keys[worst]), float(found.excess_s[worst])
            took_s = float(np.exp(np.nanmedian(job.own.values[:, worst])))
            than = "its peers'" if found.from_peers[worst] else "in its own past"
            steps = int((job.rows["step"][:, worst] > 0).sum())
            evidence = [
                f"rank {rank} takes {took_s:.4f} s a step of its own, {found.ratio[worst]:.2f} times {than}, over {steps} steps",
                f"it costs {cost_s:.4f} s of a step of {step_s:.4f} s",
            ]
            if parts[rank]:
                evidence.append(parts[rank])
            if job.lateness.get(rank):
                evidence.append(f"it came last to {job.lateness[rank]} collectives in these steps")
            since_s = float(
                job.rows["ended_s"][found.since[worst], worst]
                - job.rows["duration_s"][found.since[worst], worst]
            )
            confidence = 0.9 if found.from_peers[worst] else 0.75
            advice = _advice(syndrome, subject, cost_s, step_s)
            verdicts.append(
                Verdict(subject, syndrome, since_s, tuple(evidence), confidence, cost_s, advice)
            )
    return tuple(verdicts)


def _advice(syndrome: Syndrome, subject: Subject, cost_s: float, step_s: float) -> Advice:
    """Advise to replace only what is slow by itself and costs a tenth of the step; what a person can mend is for a person."""
    if syndrome is not Syndrome.NON_COMMUNICATION_SLOW or cost_s < 0.1 * step_s:
        return Advice.ALERT
    return Advice.REPLACE_NODE if subject.node else Advice.ALERT


def _part(rows: np.ndarray, at: int, roles: np.ndarray, excess_s: float) -> tuple[Syndrome, str]:
    """Return what most of the excess is made of."""
    peers = roles == roles[at]
    peers[at] = False
    for column, syndrome, words in _PARTS:
        mine_s = float(np.mean(rows[column][:, at]))
        theirs_s = float(np.median(np.mean(rows[column][:, peers], axis=0))) if peers.any() else 0.0
        if mine_s - theirs_s > excess_s / 2:
            return syndrome, f"{mine_s:.4f} s a step {words}, peers {theirs_s:.4f} s"
    return Syndrome.NON_COMMUNICATION_SLOW, ""


def _pairs(
    job: SlownessInputs, roles: np.ndarray, step_s: float, thresholds: SlowThresholds
) -> tuple[Verdict, ...]:
    """Judge pairs of ranks of equal role with nobody else: if they disagree, only their own past can tell which it is."""
    if len(job.own.keys) != 2 or roles[0] != roles[1]:
        return ()
    apart = job.own.values[:, 0] - job.own.values[:, 1]
    apart = apart[~np.isnan(apart)]
    if len(apart) < thresholds.sustained:
        return ()
    middle = float(np.median(apart))
    slower = 0 if middle > 0 else 1
    noise = (
        float(np.median(np.abs(apart - middle)))
        * MAD_TO_SIGMA
        * MEDIAN_TO_MEAN_ERROR
        / np.sqrt(len(apart))
    )
    limit = max(np.log(1 + thresholds.own_excess), thresholds.sigmas * noise)
    often = int((np.abs(apart) * np.sign(middle * apart) > limit / 2).sum())
    own_s = np.exp(np.nanmedian(job.own.values, axis=0))
    cost_s = float(own_s[slower] - own_s[1 - slower])
    if abs(middle) <= limit or often < thresholds.sustained:
        return ()
    if cost_s < max(thresholds.cost_share * step_s, thresholds.cost_s):
        return ()
    changed = np.nanmedian(job.own.values, axis=0) - job.own.past
    evidence = [
        f"rank {job.own.keys[at]} takes {own_s[at]:.4f} s a step of its own" for at in (0, 1)
    ]
    since_s = float(job.rows["ended_s"][0, slower])
    is_known = not np.isnan(changed).any()
    if is_known and changed[slower] > limit and abs(changed[1 - slower]) < limit / 2:
        subject = rank_subject(int(job.own.keys[slower]), job.nodes)
        evidence.append("the other keeps to its own past")
        confidence, advice = 0.6, Advice.ALERT
    else:
        subject = group_subject(job.own.keys.tolist(), job.nodes)
        evidence.append("with two that disagree, nothing tells which is right: inconclusive")
        confidence, advice = 0.3, Advice.OBSERVE
    slow = Syndrome.NON_COMMUNICATION_SLOW
    return (Verdict(subject, slow, since_s, tuple(evidence), confidence, cost_s, advice),)
