"""What holds the whole job up though no rank stands out: data that does not come, collections that take turns, uneven checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from monitor.diagnosis.subjects import gather, rank_subject
from monitor.diagnosis.thresholds import SlowThresholds, StallThresholds
from monitor.verdicts import Advice, Subject, Syndrome, Verdict


def find_stalls(
    rows: np.ndarray,
    named: Collection[int],
    nodes: Mapping[int, str],
    thresholds: StallThresholds,
    slow: SlowThresholds,
) -> tuple[Verdict, ...]:
    """Return what holds all up.

    Args:
        rows: the window's steps, dtype STEP, shape (steps, ranks), step 0 where not told.
        named: ranks that have a verdict of their own already.
        nodes: each rank's node.
        thresholds: shares that count.
        slow: for how long.
    """
    told = rows["step"] > 0
    if len(rows) < slow.sustained or not told.any():
        return ()
    step_s = np.array(
        [np.median(row["duration_s"][here]) if here.any() else np.nan for row, here in zip(rows, told, strict=True)]
    )
    found = [*_data(rows, told, step_s, thresholds, slow)]
    found += _garbage(rows, told, step_s, named, nodes, thresholds, slow)
    found += _checkpoints(rows, told, step_s, nodes, thresholds, slow)
    return tuple(found)


def _data(
    rows: np.ndarray, told: np.ndarray, step_s: np.ndarray, thresholds: StallThresholds, slow: SlowThresholds
) -> list[Verdict]:
    """All wait for data: the loaders, or the store behind them, do not keep up."""
    waits_s = np.array(
        [np.median(row["data_s"][here]) if here.any() else 0.0 for row, here in zip(rows, told, strict=True)]
    )
    share = waits_s / np.maximum(step_s, 1e-9)
    cost_s = float(np.median(waits_s))
    if (share > thresholds.data_share).sum() < slow.sustained or cost_s < slow.cost_s:
        return []
    evidence = (f"all ranks wait {cost_s:.4f} s of every step of {float(np.nanmedian(step_s)):.4f} s for data",)
    since_s = _began(rows, told)
    return [Verdict(Subject("job", ()), Syndrome.DATA_STALL, since_s, evidence, 0.8, cost_s, Advice.ALERT)]


def _garbage(
    rows: np.ndarray,
    told: np.ndarray,
    step_s: np.ndarray,
    named: Collection[int],
    nodes: Mapping[int, str],
    thresholds: StallThresholds,
    slow: SlowThresholds,
) -> list[Verdict]:
    """Ranks collect garbage at different steps, so that in most steps all wait for one (MegaScale saw throughput drift by it)."""
    spent_s = np.where(told, rows["garbage_s"], 0.0)
    longest_s = spent_s.max(axis=1)
    cost_s = float(longest_s.mean())
    often = longest_s > thresholds.garbage_share * step_s
    if cost_s < max(thresholds.garbage_share * float(np.nanmedian(step_s)), slow.cost_s) or 2 * often.sum() < len(rows):
        return []
    by_rank = spent_s.sum(axis=0)
    guilty = np.flatnonzero(by_rank > 0.1 * by_rank.sum())
    ranks = rows["rank"].max(axis=0)
    if len(guilty) == 1:
        if int(ranks[guilty[0]]) in named:
            return []
        subject = rank_subject(int(ranks[guilty[0]]), nodes)
    else:
        subject = Subject("job", ())
    evidence = (
        f"the rank that collects longest takes {cost_s:.4f} s of a step of {float(np.nanmedian(step_s)):.4f} s on average",
        "collect on all ranks at the same step (gc.freeze, gc.disable and a gc.collect every so many steps)",
    )
    return [Verdict(subject, Syndrome.GARBAGE_COLLECTION, _began(rows, told), evidence, 0.8, cost_s, Advice.ALERT)]


def _checkpoints(
    rows: np.ndarray,
    told: np.ndarray,
    step_s: np.ndarray,
    nodes: Mapping[int, str],
    thresholds: StallThresholds,
    slow: SlowThresholds,
) -> list[Verdict]:
    """Some ranks' checkpoint phases take much longer than those of the others that also save."""
    spent_s = np.where(told, rows["checkpoint_s"], 0.0)
    if not spent_s.any():
        return []
    # In steps in which most save; whoever saves alone (rank 0, say) has no peers.
    saving = (spent_s > 0).sum(axis=1) >= slow.peers
    if not saving.any():
        return []
    medians = np.array([np.median(row[row > 0]) for row in spent_s[saving]])
    late = (spent_s[saving] > thresholds.checkpoint_ratio * medians[:, None]).all(axis=0)
    excess_s = (spent_s[saving] - medians[:, None]).sum(axis=0)
    cost_s = excess_s / len(rows)
    late &= cost_s > max(slow.cost_share * float(np.nanmedian(step_s)), slow.cost_s)
    ranks = rows["rank"].max(axis=0)
    verdicts = []
    for subject in gather(ranks[late].tolist(), nodes):
        cost = float(max(cost_s[np.flatnonzero(ranks == rank)[0]] for rank in subject.ranks))
        took_s = float(spent_s[saving][:, ranks == subject.ranks[0]].max())
        evidence = (f"rank {subject.ranks[0]} takes {took_s:.2f} s to save, others {float(medians.max()):.2f} s",)
        verdicts.append(
            Verdict(subject, Syndrome.CHECKPOINT_STALL, _began(rows, told), evidence, 0.7, cost, Advice.ALERT)
        )
    return verdicts


def _began(rows: np.ndarray, told: np.ndarray) -> float:
    """Return when the window began, by the job's clock."""
    first = rows[0][told[0]] if told[0].any() else rows[told]
    return float(np.median(first["ended_s"] - first["duration_s"]))
