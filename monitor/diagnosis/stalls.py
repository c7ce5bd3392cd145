"""Finds what delays the job although no single rank is slow.

These are data that does not arrive, garbage collections at different steps, and uneven checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from keepstep.monitor.diagnosis.history import StepSeries
from keepstep.monitor.diagnosis.subjects import gather, rank_subject
from keepstep.monitor.diagnosis.thresholds import SlowThresholds, StallThresholds
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict

_FORGOTTEN = 3
"""Checkpoints missed since the last one after which the job counts as no longer saving."""


def find_stalls(
    rows: np.ndarray,
    saves: StepSeries,
    named: Collection[int],
    nodes: Mapping[int, str],
    thresholds: StallThresholds,
    slow: SlowThresholds,
) -> tuple[Verdict, ...]:
    """Return verdicts on what delays all ranks.

    Args:
        rows: the window's steps, dtype STEP, shape (steps, ranks); step 0 where not reported.
        saves: series of checkpoint phases by rank.
        named: ranks that already have a verdict of their own.
        nodes: each rank's node.
        thresholds: shares that count.
        slow: for how long.
    """
    is_reported = rows["step"] > 0
    if len(rows) < slow.sustained or not is_reported.any():
        return ()
    step_s = np.array(
        [
            np.median(row["duration_s"][reported]) if reported.any() else np.nan
            for row, reported in zip(rows, is_reported, strict=True)
        ]
    )
    verdicts = [*_data(rows, is_reported, step_s, thresholds, slow)]
    verdicts += _garbage(rows, is_reported, step_s, named, nodes, thresholds, slow)
    verdicts += _checkpoints(saves, rows, float(np.nanmedian(step_s)), nodes, thresholds, slow)
    return tuple(verdicts)


def _data(
    rows: np.ndarray,
    is_reported: np.ndarray,
    step_s: np.ndarray,
    thresholds: StallThresholds,
    slow: SlowThresholds,
) -> list[Verdict]:
    """Return a verdict if all ranks wait for data.

    The loaders, or the store behind them, are too slow.
    """
    waits_s = np.array(
        [
            np.median(row["data_s"][reported]) if reported.any() else 0.0
            for row, reported in zip(rows, is_reported, strict=True)
        ]
    )
    share = waits_s / np.maximum(step_s, 1e-9)
    cost_s = float(np.median(waits_s))
    if (share > thresholds.data_share).sum() < slow.sustained or cost_s < slow.cost_s:
        return []
    evidence = (
        f"all ranks wait for data for {cost_s:.4f} s of every step of "
        f"{float(np.nanmedian(step_s)):.4f} s",
    )
    since_s = _began(rows, is_reported)
    return [_alert(Subject("job", ()), Syndrome.DATA_STALL, since_s, evidence, 0.8, cost_s)]


def _garbage(
    rows: np.ndarray,
    is_reported: np.ndarray,
    step_s: np.ndarray,
    named: Collection[int],
    nodes: Mapping[int, str],
    thresholds: StallThresholds,
    slow: SlowThresholds,
) -> list[Verdict]:
    """Return a verdict if ranks collect garbage at different steps.

    Then most steps wait for one of them; MegaScale saw throughput decline by this.
    """
    spent_s = np.where(is_reported, rows["garbage_s"], 0.0)
    longest_s = spent_s.max(axis=1)
    cost_s = float(longest_s.mean())
    often = longest_s > thresholds.garbage_share * step_s
    if cost_s < max(
        thresholds.garbage_share * float(np.nanmedian(step_s)), slow.cost_s
    ) or 2 * often.sum() < len(rows):
        return []
    by_rank = spent_s.sum(axis=0)
    collecting = np.flatnonzero(by_rank > 0.1 * by_rank.sum())
    ranks = rows["rank"].max(axis=0)
    if len(collecting) == 1:
        if int(ranks[collecting[0]]) in named:
            return []
        subject = rank_subject(int(ranks[collecting[0]]), nodes)
    else:
        subject = Subject("job", ())
    evidence = (
        f"the longest garbage collection takes {cost_s:.4f} s of a step of "
        f"{float(np.nanmedian(step_s)):.4f} s on average",
        "collect on all ranks at the same step "
        "(gc.freeze, gc.disable and a gc.collect every N steps)",
    )
    since_s = _began(rows, is_reported)
    return [_alert(subject, Syndrome.GARBAGE_COLLECTION, since_s, evidence, 0.8, cost_s)]


def _checkpoints(
    saves: StepSeries,
    rows: np.ndarray,
    step_s: float,
    nodes: Mapping[int, str],
    thresholds: StallThresholds,
    slow: SlowThresholds,
) -> list[Verdict]:
    """Return verdicts on ranks whose checkpoint phases repeatedly take much longer than others'.

    Only ranks that also save are compared.
    """
    if len(saves.steps) < thresholds.saves:
        return []
    save_s, steps = np.exp(saves.values[-thresholds.saves :]), saves.steps[-thresholds.saves :]
    usual_s = np.nanmedian(save_s, axis=1, keepdims=True)
    is_late = (save_s > thresholds.checkpoint_ratio * usual_s).all(axis=0)
    period = float(np.diff(steps).mean())
    newest = rows["step"].max()
    if newest > steps[-1] + _FORGOTTEN * period:
        return []
    cost_s = (save_s - usual_s).mean(axis=0) / period
    is_late &= cost_s > max(slow.cost_share * step_s, slow.cost_s)
    # The first of these checkpoints may be older than the window.
    ended_s = float(np.median(rows["ended_s"][rows["step"] == newest]))
    since_s = ended_s - step_s * float(newest - steps[0])
    verdicts = []
    for subject in gather(saves.keys[is_late].tolist(), nodes):
        cost = float(cost_s[np.isin(saves.keys, subject.ranks)].max())
        longest_s = float(save_s[:, saves.keys == subject.ranks[0]].max())
        evidence = (
            f"rank {subject.ranks[0]} takes {longest_s:.2f} s to save, "
            f"others {float(usual_s.max()):.2f} s",
            f"in each of {thresholds.saves} checkpoints, {period:.0f} steps apart",
        )
        verdicts.append(_alert(subject, Syndrome.CHECKPOINT_STALL, since_s, evidence, 0.7, cost))
    return verdicts


def _alert(
    subject: Subject,
    syndrome: Syndrome,
    since_s: float,
    evidence: tuple[str, ...],
    confidence: float,
    cost_s: float,
) -> Verdict:
    return Verdict(
        subject=subject,
        syndrome=syndrome,
        since_s=since_s,
        evidence=evidence,
        confidence=confidence,
        cost_s_per_step=cost_s,
        advice=Advice.ALERT,
    )


def _began(rows: np.ndarray, is_reported: np.ndarray) -> float:
    """Return when the window began, by the job's clock."""
    first = rows[0][is_reported[0]] if is_reported[0].any() else rows[is_reported]
    return float(np.median(first["ended_s"] - first["duration_s"]))
