"""Finds ranks that delay the job by what they do outside of communication.

The quantity is a rank's own time per step (see `keepstep.monitor.diagnosis.accounts`): a rank that
is late because it waited for another has a normal one. Peers are ranks of equal role, which call
the same operations equally often in a step: pipeline stages that do other work are not peers. A
rank is slow if its own time exceeds its peers' or its own past
(`keepstep.monitor.diagnosis.history`), and if this is costly: the job waits for the excess in every
step. If data, checkpoints or garbage collection make up most of the excess, the verdict names them.

Equal calls do not show equal work: one stage has more layers, one expert more tokens. So hardware
is blamed only if

- the rank is slow against its own past, and the payload that it routes has not grown with it; or
- the metrics of its node show why; or
- in an earlier assignment of ranks, its node was slow with another rank, which is not slow now.

Otherwise the verdict is that load is uneven, on the whole job: who has most of it changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from keepstep.monitor.diagnosis.history import (
    NOTHING,
    Deviations,
    StepSeries,
    changed_of_two,
    deviations,
)
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
        routed: series of the payload of all-to-alls and messages, by rank.
        throttled: for nodes whose metrics show why their ranks are slow, the reason.
        earlier: nodes that were slow in earlier assignments of ranks, with the ranks they had.
    """

    own: StepSeries
    rows: np.ndarray
    lateness: Mapping[int, int]
    nodes: Mapping[int, str]
    routed: StepSeries = NOTHING
    throttled: Mapping[str, str] = field(default_factory=dict)
    earlier: Mapping[str, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlowRanks:
    """Which ranks are slow.

    Args:
        verdicts: on those whose slowness is costly.
        ranks: those ranks.
        changed: which ranks of `SlownessInputs.own` deviate from their own past, shape (ranks,):
            these steps are not learnt from.
        uneven: nodes with ranks that are slow, and nothing shows that hardware is the cause.
    """

    verdicts: tuple[Verdict, ...]
    ranks: frozenset[int]
    changed: np.ndarray
    uneven: Mapping[str, frozenset[int]]


def find_slow_ranks(job: SlownessInputs, thresholds: SlowThresholds) -> SlowRanks:
    """Return the slow ranks, with the verdicts."""
    roles = job.rows["role"].max(axis=0)
    deviation = deviations(job.own, roles, 1 + thresholds.own_excess, thresholds)
    hot = deviation.hot.copy()
    if not len(hot):
        return SlowRanks((), frozenset(), hot, {})
    changed = hot & _has_changed(deviation, thresholds)
    is_reported = job.rows["step"] > 0
    step_s = float(np.median(job.rows["duration_s"][is_reported])) if is_reported.any() else 0.0
    costly = hot & (deviation.excess_s >= max(thresholds.cost_share * step_s, thresholds.cost_s))
    costly &= ~_widespread(costly, deviation.ratio, roles, job, thresholds)
    is_hardware = costly & changed & ~_has_more_load(job, deviation, thresholds)
    is_hardware |= costly & _is_of_the_node(job, hot)
    slow = np.flatnonzero(costly)
    causes = {
        position: _main_cause(job.rows, position, roles, float(deviation.excess_s[position]))
        for position in slow.tolist()
    }
    uneven = [
        position
        for position, (syndrome, _) in causes.items()
        if syndrome is Syndrome.NON_COMMUNICATION_SLOW and not is_hardware[position]
    ]
    blamed = {position: cause for position, cause in causes.items() if position not in uneven}
    verdicts = _verdicts(job, deviation, blamed, step_s)
    if uneven:
        verdicts += (_imbalance(job, deviation, uneven, step_s),)
    uneven_ranks: dict[str, set[int]] = defaultdict(set)
    for rank in job.own.keys[uneven].tolist():
        uneven_ranks[job.nodes.get(rank, "")].add(rank)
    of_pair, has_changed = _pairs(job, roles, step_s, thresholds)
    return SlowRanks(
        verdicts=(*verdicts, *of_pair),
        ranks=frozenset(job.own.keys[slow].tolist()),
        changed=changed | has_changed,
        uneven={node: frozenset(ranks) for node, ranks in uneven_ranks.items() if node},
    )


def _has_changed(deviation: Deviations, thresholds: SlowThresholds) -> np.ndarray:
    """Return which ranks have become slower than they were."""
    with np.errstate(invalid="ignore", divide="ignore"):
        excess, change = np.log(deviation.ratio), np.log(deviation.own_ratio)
        changed: np.ndarray = change >= thresholds.changed_share * excess
    return changed


def _has_more_load(
    job: SlownessInputs, deviation: Deviations, thresholds: SlowThresholds
) -> np.ndarray:
    """Return which ranks route more than they used to, about as much as they have become slower."""
    load = np.full(len(job.own.keys), np.nan)
    is_routing = np.isin(job.own.keys, job.routed.keys)
    load[is_routing] = job.routed.growth()[np.isin(job.routed.keys, job.own.keys)]
    with np.errstate(invalid="ignore", divide="ignore"):
        growth = thresholds.load_share * np.log(deviation.own_ratio)
        has_more: np.ndarray = (load > 0) & (load >= growth)
    return has_more


def _is_of_the_node(job: SlownessInputs, hot: np.ndarray) -> np.ndarray:
    """Return which ranks are on a node that is slow by itself.

    Its metrics show it, or it was slow with other ranks as well, and none of those is slow now.
    """
    if not job.throttled and not job.earlier:
        return np.zeros(len(hot), bool)
    slow_ranks = set(job.own.keys[hot].tolist())

    def is_of_node(rank: int) -> bool:
        node = job.nodes.get(rank, "")
        earlier = job.earlier.get(node, frozenset())
        return node in job.throttled or (bool(earlier) and slow_ranks.isdisjoint(earlier))

    return np.array([is_of_node(rank) for rank in job.own.keys.tolist()], bool)


def _widespread(
    costly: np.ndarray,
    ratio: np.ndarray,
    roles: np.ndarray,
    job: SlownessInputs,
    thresholds: SlowThresholds,
) -> np.ndarray:
    """Return the ranks that are slow together with too many peers for one to be to blame.

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
    job: SlownessInputs,
    deviation: Deviations,
    slow: Mapping[int, tuple[Syndrome, str]],
    step_s: float,
) -> tuple[Verdict, ...]:
    """Return the verdicts on slow ranks, by syndrome and subject.

    Args:
        job: the inputs.
        deviation: of own times.
        slow: positions of slow ranks, each with its syndrome and the cause, for people.
        step_s: the job's step time.
    """
    by_syndrome: dict[Syndrome, dict[int, int]] = defaultdict(dict)
    causes: dict[int, str] = {}
    for position, (syndrome, cause) in slow.items():
        rank = int(job.own.keys[position])
        by_syndrome[syndrome][rank] = position
        causes[rank] = cause
    verdicts = []
    for syndrome, ranks in sorted(by_syndrome.items()):
        for subject in gather(ranks, job.nodes):
            positions = [ranks[rank] for rank in subject.ranks if rank in ranks]
            worst = max(positions, key=lambda position: float(deviation.excess_s[position]))
            rank, cost_s = int(job.own.keys[worst]), float(deviation.excess_s[worst])
            evidence = [
                _describe(job, deviation, worst),
                f"it costs {cost_s:.4f} s of a step of {step_s:.4f} s",
            ]
            if causes[rank]:
                evidence.append(causes[rank])
            if job.lateness.get(rank):
                evidence.append(
                    f"it arrived last at {job.lateness[rank]} collectives in these steps"
                )
            since_s = _since_s(job, deviation, worst)
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


def _imbalance(
    job: SlownessInputs, deviation: Deviations, uneven: list[int], step_s: float
) -> Verdict:
    """Return the verdict that some ranks have more to do than others of equal role."""
    worst_first = sorted(uneven, key=lambda position: -float(deviation.excess_s[position]))
    cost_s = float(deviation.excess_s[worst_first[0]])
    evidence = [_describe(job, deviation, position) for position in worst_first[:4]]
    if len(uneven) > 4:
        evidence.append(f"so do {len(uneven) - 4} more ranks")
    evidence += [
        f"it costs {cost_s:.4f} s of a step of {step_s:.4f} s",
        "nothing shows that hardware is the cause: look at how layers, experts and samples are "
        "distributed; `keepstep doctor` compares the hardware",
    ]
    return Verdict(
        subject=Subject("job", ()),
        syndrome=Syndrome.LOAD_IMBALANCE,
        since_s=min(_since_s(job, deviation, position) for position in uneven),
        evidence=tuple(evidence),
        confidence=0.8,
        cost_s_per_step=cost_s,
        advice=Advice.ALERT,
    )


def _describe(job: SlownessInputs, deviation: Deviations, position: int) -> str:
    """Return by how much a rank is slow, for people."""
    own_s = float(np.exp(np.nanmedian(job.own.values[:, position])))
    reference = "its peers'" if deviation.from_peers[position] else "in its own past"
    steps = int((job.rows["step"][:, position] > 0).sum())
    return (
        f"rank {job.own.keys[position]} has an own time of {own_s:.4f} s a step, "
        f"{deviation.ratio[position]:.2f} times {reference}, over {steps} steps"
    )


def _since_s(job: SlownessInputs, deviation: Deviations, position: int) -> float:
    """Return when a rank became slow, by the job's clock."""
    row = job.rows[deviation.since[position], position]
    return float(row["ended_s"] - row["duration_s"])


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
) -> tuple[tuple[Verdict, ...], np.ndarray]:
    """Judge a pair of ranks of equal role without other peers.

    If they disagree, only their own past can show which one is at fault. Returns also which ranks
    of the job may be slower than they were.
    """
    none_changed = np.zeros(len(job.own.keys), bool)
    if len(job.own.keys) != 2 or roles[0] != roles[1]:
        return (), none_changed
    difference = job.own.values[:, 0] - job.own.values[:, 1]
    difference = difference[~np.isnan(difference)]
    if len(difference) < thresholds.sustained:
        return (), none_changed
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
        return (), none_changed
    if cost_s < max(thresholds.cost_share * step_s, thresholds.cost_s):
        return (), none_changed
    changed = changed_of_two(job.own, slower, limit)
    evidence = [
        f"rank {job.own.keys[at]} has an own time of {own_s[at]:.4f} s a step" for at in (0, 1)
    ]
    since_s = float(job.rows["ended_s"][0, slower])
    if changed[slower] and not changed[1 - slower]:
        subject = rank_subject(int(job.own.keys[slower]), job.nodes)
        evidence.append("the other has not changed from its own past")
        confidence, advice = 0.6, Advice.ALERT
    else:
        subject = group_subject(job.own.keys.tolist(), job.nodes)
        evidence.append("only two ranks to compare, and their past shows no cause: inconclusive")
        confidence, advice = 0.3, Advice.OBSERVE
    verdict = Verdict(
        subject=subject,
        syndrome=Syndrome.NON_COMMUNICATION_SLOW,
        since_s=since_s,
        evidence=tuple(evidence),
        confidence=confidence,
        cost_s_per_step=cost_s,
        advice=advice,
    )
    return (verdict,), changed
