"""Finds links that lose packets: few messages are delayed, by much, which medians do not show.

Averages are judged instead, with higher thresholds, for they follow every outlier; and of a few
steps together, as a step in which nothing is lost hides no loss. Packets that are lost in one
direction delay messages of both: TCP's acknowledgements and the receivers' notices that they are
ready use the same connection. So both directions are judged together, and the one that is delayed
more is named. What deviates only by direction, as all that one rank receives, is looked for next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from keepstep.monitor.diagnosis.delays import (
    LinkInputs,
    judge_cells,
    lines_of,
    link_keys,
    nearly_slow,
    same_node,
    share_of,
    slow_verdict,
    unpack,
)
from keepstep.monitor.diagnosis.history import StepSeries, deviations
from keepstep.monitor.diagnosis.subjects import link_subject, rank_subject
from keepstep.monitor.diagnosis.thresholds import SlowThresholds
from keepstep.monitor.verdicts import Subject, Verdict

_AVERAGED_STEPS = 3
"""With four messages a step, one in five of them sent again, six steps in ten are delayed, and nine
in ten of three steps together. A single outlier is in three averages, of eight that must be
high."""


def find_lossy_links(
    history: StepSeries, job: LinkInputs, thresholds: SlowThresholds
) -> tuple[tuple[Verdict, ...], np.ndarray]:
    """Return verdicts on links that lose packets, by average delays, and which keys deviate."""
    if not len(history.keys):
        return (), np.zeros(0, bool)
    recent = replace(history, values=_over_steps(history.values, _AVERAGED_STEPS))
    pairs, pair_of = _by_pair(recent)
    first, second, classes = unpack(pairs.keys)
    groups = classes * 2 + same_node(first, second, job.nodes)
    deviation = deviations(pairs, groups, thresholds.job_transfer_ratio, thresholds)
    per_step = np.bincount(pair_of, job.per_step(history.keys))
    cost_s = np.nan_to_num(deviation.excess_s) * per_step
    least_s = max(thresholds.job_cost_share * job.step_s, thresholds.cost_s)
    is_costly = deviation.hot & (cost_s >= least_s)
    is_costly &= share_of(is_costly, groups) <= 0.5
    senders, receivers, _ = unpack(history.keys)
    delay_s = np.nanmean(np.exp(recent.values), axis=0)
    verdicts = []
    for subject, found in _shape_of_pairs(
        first, second, is_costly, nearly_slow(is_costly, deviation.ratio), job.nodes
    ):
        cells = np.flatnonzero(np.isin(pair_of, found))
        worst = int(cells[np.nanargmax(delay_s[cells])])
        pair = int(pair_of[worst])
        if subject is None:
            subject = link_subject(int(senders[worst]), int(receivers[worst]), job.nodes)
        evidence = (
            f"from rank {senders[worst]} to {receivers[worst]} a message takes "
            f"{delay_s[worst]:.4f} s on average, and both directions together "
            f"{deviation.ratio[pair]:.1f} times the expected delay",
            "few messages take so long: packets may be lost, of either direction",
        )
        worst_cost_s = float(max(cost_s[at] for at in found))
        began_s = job.began_s(int(deviation.since[pair]))
        verdicts.append(slow_verdict(subject, evidence, worst_cost_s, began_s))
    stricter = replace(
        thresholds,
        transfer_ratio=thresholds.job_transfer_ratio,
        cost_share=thresholds.job_cost_share,
    )
    of_cells, hot = judge_cells(history, job, stricter)
    if not verdicts:
        sentence = "this is the average, and few messages take so long: packets may be lost"
        verdicts = [
            replace(verdict, evidence=(*verdict.evidence, sentence)) for verdict in of_cells
        ]
    return tuple(verdicts), hot | deviation.hot[pair_of]


def _over_steps(values: np.ndarray, steps: int) -> np.ndarray:
    """Return for each step the logarithm of the average of it and those before it, `steps` in all.

    Args:
        values: logarithms, NaN where nothing was reported; shape (steps, subjects).
        steps: how many.
    """
    seconds = np.exp(values)
    sums, counts = np.zeros(values.shape), np.zeros(values.shape)
    for back in range(min(steps, len(values))):
        earlier = seconds[: len(seconds) - back]
        sums[back:] += np.nan_to_num(earlier)
        counts[back:] += ~np.isnan(earlier)
    with np.errstate(invalid="ignore", divide="ignore"):
        averages: np.ndarray = np.log(sums / counts)
    averages[np.isnan(values)] = np.nan
    return averages


def _by_pair(history: StepSeries) -> tuple[StepSeries, np.ndarray]:
    """Return averages of both directions together, and each link's position among the pairs."""
    senders, receivers, classes = unpack(history.keys)
    keys, pair_of = np.unique(
        link_keys(np.minimum(senders, receivers), np.maximum(senders, receivers), classes),
        return_inverse=True,
    )

    def average(table: np.ndarray) -> np.ndarray:
        seconds = np.exp(table)
        cells = (np.arange(len(table))[:, None] * len(keys) + pair_of).ravel()
        shape = len(table), len(keys)
        sums, counts = (
            np.bincount(cells, weights.ravel(), len(table) * len(keys)).reshape(shape)
            for weights in (np.nan_to_num(seconds), ~np.isnan(seconds))
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            logarithms: np.ndarray = np.log(sums / counts)
        return logarithms

    (past,) = average(history.past[None])
    with np.errstate(invalid="ignore", divide="ignore"):
        known = np.bincount(pair_of, ~np.isnan(history.drift))
        drift = np.bincount(pair_of, np.nan_to_num(history.drift)) / np.where(known, known, np.nan)
    held = np.zeros(len(keys), np.int64)
    np.maximum.at(held, pair_of, history.held)
    values = average(history.values)
    return replace(history, keys=keys, values=values, past=past, drift=drift, held=held), pair_of


def _shape_of_pairs(
    first: np.ndarray,
    second: np.ndarray,
    slow: np.ndarray,
    nearly: np.ndarray,
    nodes: Mapping[int, str],
) -> list[tuple[Subject | None, list[int]]]:
    """Return what slow pairs have in common: a rank, whose pairs they are; None for one pair."""
    remaining = set(np.flatnonzero(slow).tolist())
    shapes: list[tuple[Subject | None, list[int]]] = []
    ends = np.concatenate([first, second])
    lines = lines_of(ends, np.tile(slow, 2), np.tile(nearly, 2))
    for rank in sorted(lines):
        pairs = sorted({at % len(first) for at in lines[rank]} & remaining)
        if len(lines[rank]) >= 2 and pairs:
            shapes.append((rank_subject(rank, nodes), pairs))
            remaining.difference_update(pairs)
    return [*shapes, *((None, [pair]) for pair in sorted(remaining))]
