"""What holds the whole job up though no rank stands out: data that does not come, collections that take turns, uneven checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from keepstep.monitor.diagnosis.history import StepSeries
from keepstep.monitor.diagnosis.subjects import gather, rank_subject
from keepstep.monitor.diagnosis.thresholds import SlowThresholds, StallThresholds
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict

_FORGOTTEN = 3
"""Checkpoints that should have come since the last one: then the job saves no more, and nothing is known of how it would."""


def find_stalls(
    rows: np.ndarray,
    saves: StepSeries,
    named: Collection[int],
    nodes: Mapping[int, str],
    thresholds: StallThresholds,
    slow: SlowThresholds,
) -> tuple[Verdict, ...]:
    """Return what holds all up.

    Args:
        rows: the window's steps, dtype STEP, shape (steps, ranks), step 0 where not told.
        saves: history of checkpoint phases by rank.
        named: ranks that have a verdict of their own already.
        nodes: each rank's node.
        thresholds: shares that count.
        slow: for how long.
    """
    told = rows["step"] > 0
    if len(rows) < slow.sustained or not told.any():
        return ()
    step_s = np.array(
        [
            np.median(row["duration_s"][here]) if here.any() else np.nan
            for row, here in zip(rows, told, strict=True)
        ]
    )
    found = [*_data(rows, told, step_s, thresholds, slow)]
    found += _garbage(rows, told, step_s, named, nodes, thresholds, slow)
    found += _checkpoints(saves, rows, float(np.nanmedian(step_s)), nodes, thresholds, slow)
    return tuple(found)


def _data(
    rows: np.ndarray,
    told: np.ndarray,
    step_s: np.ndarray,
    thresholds: StallThresholds,
    slow: SlowThresholds,
) -> list[Verdict]:
    """All wait for data: the loaders, or the store behind them, do not keep up."""
    waits_s = np.array(
        [
            np.median(row["data_s"][here]) if here.any() else 0.0
            for row, here in zip(rows, told, strict=True)
        ]
    )
    share = waits_s / np.maximum(step_s, 1e-9)
    cost_s = float(np.median(waits_s))
    if (share > thresholds.data_share).sum() < slow.sustained or cost_s < slow.cost_s:
        return []
    evidence = (
        f"all ranks wait {cost_s:.4f} s of every step of {float(np.nanmedian(step_s)):.4f} s for data",
    )
    since_s = _began(rows, told)
    return [
        Verdict(
            Subject("job", ()), Syndrome.DATA_STALL, since_s, evidence, 0.8, cost_s, Advice.ALERT
        )
    ]


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
    if cost_s < max(
        thresholds.garbage_share * float(np.nanmedian(step_s)), slow.cost_s
    ) or 2 * often.sum() < len(rows):
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
    return [
        Verdict(
            subject,
            Syndrome.GARBAGE_COLLECTION,
            _began(rows, told),
            evidence,
            0.8,
            cost_s,
            Advice.ALERT,
        )
    ]


def _checkpoints(
    saves: StepSeries,
    rows: np.ndarray,
    step_s: float,
    nodes: Mapping[int, str],
    thresholds: StallThresholds,
    slow: SlowThresholds,
) -> list[Verdict]:
    """Some ranks' checkpoint phases take much longer than those of the others that also save, time after time."""
    if len(saves.steps) < thresholds.saves:
        return []
    took_s, steps = np.exp(saves.values[-thresholds.saves :]), saves.steps[-thresholds.saves :]
    usual_s = np.nanmedian(took_s, axis=1, keepdims=True)
    late = (took_s > thresholds.checkpoint_ratio * usual_s).all(axis=0)
    every = float(np.diff(steps).mean())
    newest = rows["step"].max()
    if newest > steps[-1] + _FORGOTTEN * every:
        return []
    cost_s = (took_s - usual_s).mean(axis=0) / every
    late &= cost_s > max(slow.cost_share * step_s, slow.cost_s)
    # The first of these checkpoints may be further back than the window reaches.
    ended_s = float(np.median(rows["ended_s"][rows["step"] == newest]))
    since_s = ended_s - step_s * float(newest - steps[0])
    verdicts = []
    for subject in gather(saves.keys[late].tolist(), nodes):
        cost = float(cost_s[np.isin(saves.keys, subject.ranks)].max())
        longest_s = float(took_s[:, saves.keys == subject.ranks[0]].max())
        evidence = (
            f"rank {subject.ranks[0]} takes {longest_s:.2f} s to save, others {float(usual_s.max()):.2f} s",
            f"in each of {thresholds.saves} checkpoints, {every:.0f} steps apart",
        )
        verdicts.append(
            Verdict(subject, Syndrome.CHECKPOINT_STALL, since_s, evidence, 0.7, cost, Advice.ALERT)
        )
    return verdicts


def _began(rows: np.ndarray, told: np.ndarray) -> float:
    """Return when the window began, by the job's clock."""
    first = rows[0][told[0]] if told[0].any() else rows[told]
    return float(np.median(first["ended_s"] - first["duration_s"]))
