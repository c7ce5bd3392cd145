"""Finds ranks that delay the job by what they do outside of communication.

The quantity is a rank's own time per step (see `keepstep.monitor.diagnosis.accounts`): a rank that
is late because it waited for another has a normal one. Peers are ranks of equal role, which call
the same operations equally often in a step: pipeline stages that do other work are not peers. A
rank is slow if its own time exceeds its peers' or its own past
(`keepstep.monitor.diagnosis.history`), and if this is costly: the job waits for the excess in every
step. If data, checkpoints or garbage collection make up most of the excess, the verdict names them.
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
    """Inputs of `find_slow_ranks`.

    Args:
        own: series of own times, by rank.
        rows: the window's steps, dtype STEP, shape (steps, ranks) as `own`; step 0 where not
            reported.
        lateness: for each rank, the number of collectives of the window at which it arrived last.
        nodes: each rank's node.
    """

    own: StepSeries
    rows: np.ndarray
    lateness: Mapping[int, int]
    nodes: Mapping[int, str]


def find_slow_ranks(
    job: SlownessInputs, thresholds: SlowThresholds
) -> tuple[tuple[Verdict, ...], np.ndarray]:
    """Return the verdicts, and which ranks of `job.own` deviate.

    The past of ranks that deviate must not be learnt from.
    """
    roles = job.rows["role"].max(axis=0)
    deviation = deviations(job.own, roles, 1 + thresholds.own_excess, thresholds)
    hot = deviation.hot.copy()
    if not len(hot):
        return (), hot
    is_reported = job.rows["step"] > 0
    step_s = float(np.median(job.rows["duration_s"][is_reported])) if is_reported.any() else 0.0
    costly = hot & (deviation.excess_s >= max(thresholds.cost_share * step_s, thresholds.cost_s))
    costly &= ~_widespread(costly, deviation.ratio, roles, job, thresholds)
    verdicts = _verdicts(job, deviation, np.flatnonzero(costly), roles, step_s)
    return (*verdicts, *_pairs(job, roles, step_s, thresholds)), hot


def _widespread(
    costly: np.ndarray,
    ratio: np.ndarray,
    roles: np.ndarray,
    job: SlownessInputs,
    thresholds: SlowThresholds,
) -> np.ndarray:
    """Return the ranks that are slow together with so many peers that none is to blame.

    If all of them are on one node, half of the peers may be slow. A rank half as far out as the
    least of those found counts too: when many slow down at once, not all are found in the same
    step.
    """
    is_widespread = np.zeros(len(costly), bool)
    for role in np.unique(roles[costly]):
        peers = roles == role
        with np.errstate(invalid="ignore"):
            is_out = ratio >= np.sqrt(ratio[peers & costly].min())
        slow = np.flatnonzero(peers & (costly | is_out))
        on_one_node = len({job.nodes.get(int(rank), str(rank)) for rank in job.own.keys[slow]}) == 1
        limit = 0.5 if on_one_node else thresholds.widespread_share
        if len(slow) > max(1.0, limit * peers.sum()):
            is_widespread[slow] = True
    return is_widespread


def _verdicts(
    job: SlownessInputs, deviation: Deviations, slow: np.ndarray, roles: np.ndarray, step_s: float
) -> tuple[Verdict, ...]:
    """Return the verdicts on slow ranks, by syndrome and subject."""
    by_syndrome: dict[Syndrome, dict[int, int]] = defaultdict(dict)
    causes: dict[int, str] = {}
    for position in slow.tolist():
        syndrome, cause = _main_cause(
            job.rows, position, roles, float(deviation.excess_s[position])
        )
        rank = int(job.own.keys[position])
        by_syndrome[syndrome][rank] = position
        causes[rank] = cause
    verdicts = []
    for syndrome, ranks in sorted(by_syndrome.items()):
        for subject in gather(ranks, job.nodes):
            positions = [ranks[rank] for rank in subject.ranks if rank in ranks]
            worst = max(positions, key=lambda position: float(deviation.excess_s[position]))
            rank, cost_s = int(job.own.keys[worst]), float(deviation.excess_s[worst])
            own_s = float(np.exp(np.nanmedian(job.own.values[:, worst])))
            reference = "its peers'" if deviation.from_peers[worst] else "in its own past"
            steps = int((job.rows["step"][:, worst] > 0).sum())
            evidence = [
                f"rank {rank} has an own time of {own_s:.4f} s a step, "
                f"{deviation.ratio[worst]:.2f} times {reference}, over {steps} steps",
                f"it costs {cost_s:.4f} s of a step of {step_s:.4f} s",
            ]
            if causes[rank]:
                evidence.append(causes[rank])
            if job.lateness.get(rank):
                evidence.append(
                    f"it arrived last at {job.lateness[rank]} collectives in these steps"
                )
            since_s = float(
                job.rows["ended_s"][deviation.since[worst], worst]
                - job.rows["duration_s"][deviation.since[worst], worst]
            )
            confidence = 0.9 if deviation.from_peers[worst] else 0.75
            advice = _advice(syndrome, subject, cost_s, step_s)
            verdicts.append(
                Verdict(
                    subject=subject,
                    syndrome=syndrome,
                    since_s=since_s,
                    evidence=tuple(evidence),
                    confidence=confidence,
                    cost_s_per_step=cost_s,
                    advice=advice,
                )
            )
    return tuple(verdicts)


def _advice(syndrome: Syndrome, subject: Subject, cost_s: float, step_s: float) -> Advice:
    """Return the advice for a slow subject.

    Replace only what is slow by itself and costs a tenth of the step; other causes are for a
    person.
    """
    if syndrome is not Syndrome.NON_COMMUNICATION_SLOW or cost_s < 0.1 * step_s:
        return Advice.ALERT
    return Advice.REPLACE_NODE if subject.node else Advice.ALERT


def _main_cause(
    rows: np.ndarray, position: int, roles: np.ndarray, excess_s: float
) -> tuple[Syndrome, str]:
    """Return the syndrome that most of the excess is made of, and its evidence."""
    peers = roles == roles[position]
    peers[position] = False
    for column, syndrome, activity in _PARTS:
        rank_s = float(np.mean(rows[column][:, position]))
        peers_s = float(np.median(np.mean(rows[column][:, peers], axis=0))) if peers.any() else 0.0
        if rank_s - peers_s > excess_s / 2:
            return syndrome, f"{rank_s:.4f} s a step {activity}, peers {peers_s:.4f} s"
    return Syndrome.NON_COMMUNICATION_SLOW, ""


def _pairs(
    job: SlownessInputs, roles: np.ndarray, step_s: float, thresholds: SlowThresholds
) -> tuple[Verdict, ...]:
    """Judge a pair of ranks of equal role without other peers.

    If they disagree, only their own past can show which one is at fault.
    """
    if len(job.own.keys) != 2 or roles[0] != roles[1]:
        return ()
    difference = job.own.values[:, 0] - job.own.values[:, 1]
    difference = difference[~np.isnan(difference)]
    if len(difference) < thresholds.sustained:
        return ()
    middle = float(np.median(difference))
    slower = 0 if middle > 0 else 1
    noise = (
        float(np.median(np.abs(difference - middle)))
        * MAD_TO_SIGMA
        * MEDIAN_TO_MEAN_ERROR
        / np.sqrt(len(difference))
    )
    limit = max(np.log(1 + thresholds.own_excess), thresholds.sigmas * noise)
    often = int((np.abs(difference) * np.sign(middle * difference) > limit / 2).sum())
    own_s = np.exp(np.nanmedian(job.own.values, axis=0))
    cost_s = float(own_s[slower] - own_s[1 - slower])
    if abs(middle) <= limit or often < thresholds.sustained:
        return ()
    if cost_s < max(thresholds.cost_share * step_s, thresholds.cost_s):
        return ()
    changed = np.nanmedian(job.own.values, axis=0) - job.own.past
    evidence = [
        f"rank {job.own.keys[at]} has an own time of {own_s[at]:.4f} s a step" for at in (0, 1)
    ]
    since_s = float(job.rows["ended_s"][0, slower])
    has_past = not np.isnan(changed).any()
    if has_past and changed[slower] > limit and abs(changed[1 - slower]) < limit / 2:
        subject = rank_subject(int(job.own.keys[slower]), job.nodes)
        evidence.append("the other has not changed from its own past")
        confidence, advice = 0.6, Advice.ALERT
    else:
        subject = group_subject(job.own.keys.tolist(), job.nodes)
        evidence.append("only two ranks to compare, and their past shows no cause: inconclusive")
        confidence, advice = 0.3, Advice.OBSERVE
    return (
        Verdict(
            subject=subject,
            syndrome=Syndrome.NON_COMMUNICATION_SLOW,
            since_s=since_s,
            evidence=tuple(evidence),
            confidence=confidence,
            cost_s_per_step=cost_s,
            advice=advice,
        ),
    )
