"""Judges numbers that workers report: loss, gradient norm, checksums of replicas.

Spikes are judged in the logarithm of the median over ranks, against a window of earlier steps, for
both measures are heavy-tailed. Anomalous steps do not enter the window. Checksums are compared for
equality: the minority is named, and without a majority no rank is.
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
    """A verdict, and how long it holds.

    Args:
        verdict: what was found.
        step: it holds at least until this step,
        until_s: and at least until this time.
        communicator: if not 0, it also holds until replicas of this communicator are found equal.
    """

    verdict: Verdict
    step: int
    until_s: float
    communicator: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureHistory:
    """State between calls.

    Args:
        pending: measures of steps not yet judged, dtype MEASURE.
        calm: for each measure, logarithms of the medians of the last normal steps.
        odd: for each measure, the number of consecutive anomalous steps.
        standing: findings that still hold.
        step: the newest step reported.
        reported: the newest step reported of each measure of each rank; dtype REPORTED.
        compared: the step of the newest comparison of each communicator's replicas.
    """

    pending: np.ndarray
    calm: Mapping[int, tuple[float, ...]]
    odd: Mapping[int, int]
    standing: tuple[MeasureFinding, ...]
    step: int
    reported: np.ndarray
    compared: Mapping[int, int]


REPORTED = np.dtype([("measure", "<u8"), ("step", "<i8")])
"""`measure` has the rank, the code and the communicator."""

EMPTY_MEASURE_HISTORY = MeasureHistory(
    pending=np.zeros(0, MEASURE),
    calm={},
    odd={},
    standing=(),
    step=0,
    reported=np.zeros(0, REPORTED),
    compared={},
)


def judge_measures(
    curves: MeasureHistory,
    measures: np.ndarray,
    expected: int,
    late: float,
    communicators: Mapping[int, Communicator],
    nodes: Mapping[int, str],
    now_s: float,
    thresholds: MeasureThresholds,
) -> tuple[MeasureHistory, tuple[Verdict, ...]]:
    """Add new measures, and return the verdicts that hold.

    A step is judged once all expected ranks have reported it, or others are `late` steps further;
    values that are not finite are judged at once. Measures of far nodes arrive later than those of
    near ones, so a finding holds from the time at which it is made. A daemon that was restarted
    reports again what rings still hold, which says nothing new.

    Args:
        curves: as returned by the last call.
        measures: new measures, dtype MEASURE.
        expected: number of ranks expected to report.
        late: steps after which missing ranks are no longer waited for.
        communicators: of the job.
        nodes: each rank's node.
        now_s: the job's clock.
        thresholds: what counts, and for how long findings hold.
    """
    measures, reported = _news(measures, curves.reported)
    # To a root that was restarted itself all is new: only what is waited for still happened now.
    oldest = -1.0 if curves.step else int(measures["step"].max(initial=0)) - late
    pending = np.concatenate([curves.pending, measures])
    standing = {
        (finding.verdict.subject, finding.verdict.syndrome): finding for finding in curves.standing
    }
    curves = replace(curves, step=max(curves.step, int(measures["step"].max(initial=0))))
    until = (curves.step + thresholds.held, now_s + thresholds.held_s)
    for verdict in _not_finite(measures[measures["step"] > oldest], nodes):
        standing[verdict.subject, verdict.syndrome] = MeasureFinding(verdict, *until)
    keep = np.ones(len(pending), bool)
    calm, odd, compared = dict(curves.calm), dict(curves.odd), dict(curves.compared)
    order = np.lexsort((pending["communicator"], pending["code"], pending["step"]))
    keys = pending[["step", "code", "communicator"]][order]
    starts = (
        np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        if len(keys)
        else np.zeros(0, np.int64)
    )
    for chosen in np.split(order, starts[1:]) if len(order) else ():
        rows = pending[chosen]
        step, code = int(rows["step"][0]), int(rows["code"][0])
        is_checksum = code == Measure.REPLICA_CHECKSUM
        communicator = communicators.get(int(rows["communicator"][0]))
        expected_rows = len(communicator.ranks) if is_checksum and communicator else expected
        if len(rows) < expected_rows and step + late > curves.step:
            continue
        keep[chosen] = False
        verdicts = (
            _disagreement(rows, nodes)
            if is_checksum
            else _spike(rows, calm, odd, nodes, thresholds)
        )
        compared_communicator = int(rows["communicator"][0]) if is_checksum else 0
        # Step 0: the job does not mark its steps.
        if compared_communicator and 0 < step <= compared.get(compared_communicator, 0):
            continue
        if compared_communicator:
            compared[compared_communicator] = step
            # The newest comparison of these replicas decides whether the finding holds.
            standing = {
                key: replace(finding, communicator=0)
                if finding.communicator == compared_communicator
                else finding
                for key, finding in standing.items()
            }
        for verdict in verdicts:
            earlier = standing.get((verdict.subject, verdict.syndrome))
            since_s = earlier.verdict.since_s if earlier else verdict.since_s
            finding = MeasureFinding(
                replace(verdict, since_s=since_s), *until, compared_communicator
            )
            standing[verdict.subject, verdict.syndrome] = finding
    still_standing = tuple(
        finding
        for finding in standing.values()
        if finding.communicator or finding.step >= curves.step or finding.until_s >= now_s
    )
    curves = MeasureHistory(
        pending=pending[keep],
        calm=calm,
        odd=odd,
        standing=still_standing,
        step=curves.step,
        reported=reported,
        compared=compared,
    )
    return curves, tuple(finding.verdict for finding in still_standing)


def _news(measures: np.ndarray, reported: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the measures that were not reported before, and what is reported now.

    Args:
        measures: dtype MEASURE; those of step 0, of a job that does not mark its steps, are news.
        reported: dtype REPORTED.
    """
    keys = (
        measures["rank"].astype(np.uint64) << np.uint64(40)
        | measures["code"].astype(np.uint64) << np.uint64(32)
        | measures["communicator"].astype(np.uint64)
    )
    known, position = np.unique(np.concatenate([reported["measure"], keys]), return_inverse=True)
    of_old, of_new = position[: len(reported)], position[len(reported) :]
    newest = np.zeros(len(known), REPORTED)
    newest["measure"] = known
    newest["step"][of_old] = reported["step"]
    steps = measures["step"].astype(np.int64)
    is_news = (steps > newest["step"][of_new]) | (steps == 0)
    np.maximum.at(newest["step"], of_new, steps)
    return measures[is_news], newest


def _not_finite(rows: np.ndarray, nodes: Mapping[int, str]) -> list[Verdict]:
    """Return verdicts on ranks, or on the job, whose loss or gradient norm is not finite."""
    numbers = rows[np.isin(rows["code"], tuple(_NAMES))]
    not_finite = numbers[~np.isfinite(numbers["value"])]
    if not len(not_finite):
        return []
    first = not_finite[not_finite["step"] == not_finite["step"].min()]
    step, code = int(first["step"][0]), int(first["code"][0])
    ranks = np.unique(first["rank"][first["code"] == code]).tolist()
    reporting = np.unique(numbers["rank"][(numbers["step"] == step) & (numbers["code"] == code)])
    since_s = float(first["at_s"].min())
    sentence = (
        f"{_NAMES[code]} of step {step} is {first['value'][0]} "
        f"at {len(ranks)} of {len(reporting)} ranks"
    )
    subjects = gather(ranks, nodes) if 2 * len(ranks) < len(reporting) else (Subject("job", ()),)
    return [
        _verdict(subject, Syndrome.LOSS_NOT_FINITE, since_s, sentence, 1.0, Advice.ALERT)
        for subject in subjects
    ]


def _spike(
    rows: np.ndarray,
    calm: dict[int, tuple[float, ...]],
    odd: dict[int, int],
    nodes: Mapping[int, str],
    thresholds: MeasureThresholds,
) -> list[Verdict]:
    """Judge one step of one measure over the ranks; updates `calm` and `odd`."""
    code, step = int(rows["code"][0]), int(rows["step"][0])
    values = rows["value"][np.isfinite(rows["value"]) & (rows["value"] > 0)]
    if not len(values):
        return []
    level = float(np.log(np.median(values)))
    past_levels = np.array(calm.get(code, ()))
    if len(past_levels) >= thresholds.history:
        usual = float(np.median(past_levels))
        limit = max(np.log(thresholds.least_ratio), thresholds.sigmas * spread(past_levels))
        if level - usual > limit:
            odd[code] = odd.get(code, 0) + 1
            if odd[code] >= thresholds.window // 2:
                # A level that lasts is the new normal, not a spike.
                calm[code], odd[code] = (), 0
            sentence = (
                f"{_NAMES[code]} of step {step} is {np.exp(level):.4g}, "
                f"{np.exp(level - usual):.1f} times the median of {len(past_levels)} steps"
            )
            is_lasting = odd.get(code, 0) >= thresholds.sustained
            confidence, advice = (0.9, Advice.ALERT) if is_lasting else (0.6, Advice.OBSERVE)
            since_s = float(rows["at_s"].min())
            job = Subject("job", ())
            return [_verdict(job, Syndrome.LOSS_SPIKE, since_s, sentence, confidence, advice)]
    odd[code] = 0
    calm[code] = (*calm.get(code, ()), level)[-thresholds.window :]
    return []


def _disagreement(rows: np.ndarray, nodes: Mapping[int, str]) -> list[Verdict]:
    """Return verdicts on replicas of one group whose checksums differ in one step."""
    sums, index, counts = np.unique(rows["value"], return_inverse=True, return_counts=True)
    if len(sums) < 2:
        return []
    step, since_s = int(rows["step"][0]), float(rows["at_s"].min())
    ranks = rows["rank"]
    if 2 * counts.max() > len(rows):
        minority = ranks[index != counts.argmax()].tolist()
        sentence = (
            f"after step {step}, {counts.max()} of {len(rows)} replicas agree; "
            f"ranks {', '.join(map(str, minority[:8]))} differ"
        )
        return [
            _verdict(
                subject,
                Syndrome.SILENT_CORRUPTION,
                since_s,
                sentence,
                0.95,
                Advice.REPLACE_NODE if subject.node else Advice.RESTART_WORKER,
            )
            for subject in gather(minority, nodes)
        ]
    sentence = (
        f"after step {step}, {len(rows)} replicas hold {len(sums)} different states, "
        "none of them a majority: inconclusive"
    )
    group = group_subject(ranks.tolist(), nodes)
    return [_verdict(group, Syndrome.SILENT_CORRUPTION, since_s, sentence, 0.5, Advice.ALERT)]


def _verdict(
    subject: Subject,
    syndrome: Syndrome,
    since_s: float,
    sentence: str,
    confidence: float,
    advice: Advice,
) -> Verdict:
    return Verdict(
        subject=subject,
        syndrome=syndrome,
        since_s=since_s,
        evidence=(sentence,),
        confidence=confidence,
        cost_s_per_step=0.0,
        advice=advice,
    )
