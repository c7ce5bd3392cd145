"""Numbers that workers report: losses that are not finite, spikes of loss or gradient norm, replicas that disagree.

Spikes are judged in the logarithm of the median over ranks, against a window of earlier steps, for both figures are heavy-tailed. Odd
steps do not enter the window. Checksums are equal or they are not: the minority is named, and without a majority nobody is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from keepstep.monitor.diagnosis.robust import spread
from keepstep.monitor.diagnosis.subjects import gather, group_subject
from keepstep.monitor.diagnosis.tables import MEASURE
from keepstep.monitor.diagnosis.thresholds import MeasureThresholds
from keepstep.monitor.records import Communicator, Measure
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict

_NAMES = {int(Measure.LOSS): "loss", int(Measure.GRADIENT_NORM): "gradient norm"}


@dataclass(frozen=True, slots=True)
class MeasureFinding:
    """A verdict, and until which step and time it stands; that on replicas until those of its communicator are found to agree, too."""

    verdict: Verdict
    step: int
    until_s: float
    communicator: int = 0


@dataclass(frozen=True, slots=True)
class MeasureHistory:
    """What is remembered of measures.

    Args:
        pending: measures of steps not yet judged, dtype MEASURE.
        calm: for each measure, the logarithms of the medians of the last steps that were not odd.
        odd: for each measure, how many steps in a row were odd.
        standing: what was found and still stands.
        step: the newest step judged.
    """

    pending: np.ndarray
    calm: Mapping[int, tuple[float, ...]]
    odd: Mapping[int, int]
    standing: tuple[MeasureFinding, ...]
    step: int


EMPTY_MEASURE_HISTORY = MeasureHistory(np.zeros(0, MEASURE), {}, {}, (), 0)


def judge_measures(
    curves: MeasureHistory,
    told: np.ndarray,
    expected: int,
    late: float,
    communicators: Mapping[int, Communicator],
    nodes: Mapping[int, str],
    now_s: float,
    thresholds: MeasureThresholds,
) -> tuple[MeasureHistory, tuple[Verdict, ...]]:
    """Take in new measures (dtype MEASURE) and return the verdicts that stand.

    A step is judged once `expected` ranks have told of it, or others are `late` steps on; what is not finite is judged at once. News of far nodes
    come later than those of near ones, so a finding stands from when it is made.
    """
    pending = np.concatenate([curves.pending, told])
    standing = {(one.verdict.subject, one.verdict.syndrome): one for one in curves.standing}
    curves = replace(curves, step=max(curves.step, int(told["step"].max(initial=0))))
    until = (curves.step + thresholds.held, now_s + thresholds.held_s)
    for verdict in _not_finite(told, nodes):
        standing[verdict.subject, verdict.syndrome] = MeasureFinding(verdict, *until)
    keep = np.ones(len(pending), bool)
    calm, odd = dict(curves.calm), dict(curves.odd)
    order = np.lexsort((pending["communicator"], pending["code"], pending["step"]))
    keys = pending[["step", "code", "communicator"]][order]
    starts = (
        np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        if len(keys)
        else np.zeros(0, np.int64)
    )
    for at in np.split(order, starts[1:]) if len(order) else ():
        rows = pending[at]
        step, code = int(rows["step"][0]), int(rows["code"][0])
        is_checksum = code == Measure.REPLICA_CHECKSUM
        known = communicators.get(int(rows["communicator"][0]))
        wanted = len(known.ranks) if is_checksum and known else expected
        if len(rows) < wanted and step + late > curves.step:
            continue
        keep[at] = False
        found = (
            _disagreement(rows, nodes)
            if is_checksum
            else _spike(rows, calm, odd, nodes, thresholds)
        )
        compared = int(rows["communicator"][0]) if is_checksum else 0
        if compared:
            # The newest comparison is what holds of these replicas.
            standing = {
                key: replace(one, communicator=0) if one.communicator == compared else one
                for key, one in standing.items()
            }
        for verdict in found:
            earlier = standing.get((verdict.subject, verdict.syndrome))
            since_s = earlier.verdict.since_s if earlier else verdict.since_s
            finding = MeasureFinding(replace(verdict, since_s=since_s), *until, compared)
            standing[verdict.subject, verdict.syndrome] = finding
    still = tuple(
        one
        for one in standing.values()
        if one.communicator or one.step >= curves.step or one.until_s >= now_s
    )
    curves = MeasureHistory(pending[keep], calm, odd, still, curves.step)
    return curves, tuple(one.verdict for one in still)


def _not_finite(rows: np.ndarray, nodes: Mapping[int, str]) -> list[Verdict]:
    numbers = rows[np.isin(rows["code"], tuple(_NAMES))]
    bad = numbers[~np.isfinite(numbers["value"])]
    if not len(bad):
        return []
    first = bad[bad["step"] == bad["step"].min()]
    step, code = int(first["step"][0]), int(first["code"][0])
    ranks = np.unique(first["rank"][first["code"] == code]).tolist()
    others = np.unique(numbers["rank"][(numbers["step"] == step) & (numbers["code"] == code)])
    since_s = float(first["at_s"].min())
    told = f"{_NAMES[code]} of step {step} is {first['value'][0]} at {len(ranks)} of {len(others)} ranks"
    subjects = gather(ranks, nodes) if 2 * len(ranks) < len(others) else (Subject("job", ()),)
    return [
        Verdict(subject, Syndrome.LOSS_NOT_FINITE, since_s, (told,), 1.0, 0.0, Advice.ALERT)
        for subject in subjects
    ]


def _spike(
    rows: np.ndarray,
    calm: dict[int, tuple[float, ...]],
    odd: dict[int, int],
    nodes: Mapping[int, str],
    thresholds: MeasureThresholds,
) -> list[Verdict]:
    """Judge one step of one measure over the ranks; `calm` and `odd` are brought up to date."""
    code, step = int(rows["code"][0]), int(rows["step"][0])
    values = rows["value"][np.isfinite(rows["value"]) & (rows["value"] > 0)]
    if not len(values):
        return []
    now = float(np.log(np.median(values)))
    past = np.array(calm.get(code, ()))
    if len(past) >= thresholds.history:
        usual = float(np.median(past))
        limit = max(np.log(thresholds.least_ratio), thresholds.sigmas * spread(past))
        if now - usual > limit:
            odd[code] = odd.get(code, 0) + 1
            if odd[code] >= thresholds.window // 2:
                # It has stayed there: this is how things are now, not a spike.
                calm[code], odd[code] = (), 0
            told = f"{_NAMES[code]} of step {step} is {np.exp(now):.4g}, {np.exp(now - usual):.1f} times the median of {len(past)} steps"
            lasting = odd.get(code, 0) >= thresholds.sustained
            confidence, advice = (0.9, Advice.ALERT) if lasting else (0.6, Advice.OBSERVE)
            since_s = float(rows["at_s"].min())
            return [
                Verdict(
                    Subject("job", ()),
                    Syndrome.LOSS_SPIKE,
                    since_s,
                    (told,),
                    confidence,
                    0.0,
                    advice,
                )
            ]
    odd[code] = 0
    calm[code] = (*calm.get(code, ()), now)[-thresholds.window :]
    return []


def _disagreement(rows: np.ndarray, nodes: Mapping[int, str]) -> list[Verdict]:
    """Compare the checksums of one group of replicas in one step."""
    sums, index, counts = np.unique(rows["value"], return_inverse=True, return_counts=True)
    if len(sums) < 2:
        return []
    step, since_s = int(rows["step"][0]), float(rows["at_s"].min())
    ranks = rows["rank"]
    if 2 * counts.max() > len(rows):
        odd = ranks[index != counts.argmax()].tolist()
        told = f"after step {step}, {counts.max()} of {len(rows)} replicas agree; ranks {', '.join(map(str, odd[:8]))} differ"
        return [
            Verdict(
                subject,
                Syndrome.SILENT_CORRUPTION,
                since_s,
                (told,),
                0.95,
                0.0,
                Advice.REPLACE_NODE if subject.node else Advice.RESTART_WORKER,
            )
            for subject in gather(odd, nodes)
        ]
    told = f"after step {step}, {len(rows)} replicas hold {len(sums)} different states, none of them a majority: inconclusive"
    group = group_subject(ranks.tolist(), nodes)
    return [Verdict(group, Syndrome.SILENT_CORRUPTION, since_s, (told,), 0.5, 0.0, Advice.ALERT)]
