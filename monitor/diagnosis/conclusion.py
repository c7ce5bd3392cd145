"""From what all ranks tell to verdicts: the one function that a daemon calls, and its two halves for a tree of daemons.

`diagnose` reads everybody's records. In a large job each node calls `keepstep.monitor.diagnosis.digest.digest` on its own ranks, racks call
`keepstep.monitor.diagnosis.tables.merge`, and whoever sits at the top calls `conclude` on the result: `diagnose` is just that, in one process.

Pure: the state goes in and comes out (`DiagnosisState`, of bounded size), and so does the time. One `DiagnosisState` belongs to one generation: when ranks or
communicators change, begin with `NO_DIAGNOSIS_STATE`. Verdicts returned are those that stand now; each keeps the `since_s` with which it first did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from keepstep.monitor.diagnosis.delays import find_slow_links
from keepstep.monitor.diagnosis.digest import EMPTY_DIGEST_STATE, DigestState, digest
from keepstep.monitor.diagnosis.hangs import HangInputs, find_hangs
from keepstep.monitor.diagnosis.measures import (
    EMPTY_MEASURE_HISTORY,
    MeasureHistory,
    judge_measures,
)
from keepstep.monitor.diagnosis.metrics import (
    NodeFindings,
    NodeMetrics,
    NodeMetricsHistory,
    judge_nodes,
)
from keepstep.monitor.diagnosis.mismatches import CollectiveMismatch
from keepstep.monitor.diagnosis.slowness import SlownessInputs, find_slow_ranks
from keepstep.monitor.diagnosis.stalls import find_stalls
from keepstep.monitor.diagnosis.steps import Window, collect, distrusting, late_steps
from keepstep.monitor.diagnosis.subjects import gather, group_subject
from keepstep.monitor.diagnosis.tables import FRONTIER, RANK, Digest
from keepstep.monitor.diagnosis.thresholds import Thresholds
from keepstep.monitor.diagnosis.transfers import TransferInputs, find_slow_transfers
from keepstep.monitor.records import Communicator, JobRecords, joined
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict

_SEEN = np.dtype(
    [
        ("rank", "<i4"),
        ("read_at_s", "<f8"),
        ("changed_s", "<f8"),
        ("failed", "<u4"),
        ("failed_s", "<f8"),
    ]
)


@dataclass(frozen=True, slots=True)
class DiagnosisState:
    """What diagnosis remembers: some steps' worth of few numbers per rank, communicator and link.

    Args:
        memory: of the reader of rings; used by `diagnose` alone.
        ranks: the newest snapshot of each rank, dtype RANK.
        frontiers: the newest of each rank.
        seen: when each rank's records were last read anew, and operations of it last told as failed, by `now_s`.
        window: the last steps.
        curves: of measures.
        nodes: of each node's metrics.
        slow: verdicts of the last whole step; they stand until the next.
        suspected: when each deviation of the last whole step was first found, by the job's clock.
        reported_mismatches: collectives that were completed though ranks called different things, each with the step it was found in.
        since_s: when each verdict that stands first did.
    """

    memory: DigestState = EMPTY_DIGEST_STATE
    ranks: np.ndarray = field(default_factory=lambda: np.zeros(0, RANK))
    frontiers: np.ndarray = field(default_factory=lambda: np.zeros(0, FRONTIER))
    seen: np.ndarray = field(default_factory=lambda: np.zeros(0, _SEEN))
    window: Window = field(default_factory=Window)
    curves: MeasureHistory = EMPTY_MEASURE_HISTORY
    nodes: Mapping[str, NodeMetricsHistory] = field(default_factory=dict)
    slow: tuple[Verdict, ...] = ()
    suspected: Mapping[tuple[Subject, Syndrome], float] = field(default_factory=dict)
    reported_mismatches: Mapping[tuple[Subject, Syndrome], tuple[Verdict, int]] = field(
        default_factory=dict
    )
    since_s: Mapping[tuple[Subject, Syndrome], float] = field(default_factory=dict)


NO_DIAGNOSIS_STATE = DiagnosisState()


def diagnose(
    job: JobRecords,
    metrics: Mapping[str, NodeMetrics],
    past: DiagnosisState,
    now_s: float,
    thresholds: Thresholds,
) -> tuple[DiagnosisState, tuple[Verdict, ...]]:
    """Return what is the matter with a job.

    Args:
        job: what the rings of all ranks hold now; it may repeat what was read before.
        metrics: the newest reading of each node; may be empty.
        past: as returned by the last call, `NO_DIAGNOSIS_STATE` at first.
        now_s: by the job's clock, or any clock that is the same in each call.
        thresholds: what counts.
    """
    memory, told = digest(job.ranks.values(), job.communicators, past.memory)
    nodes = {rank: one.node for rank, one in job.ranks.items()}
    return conclude(
        told, job.communicators, nodes, metrics, replace(past, memory=memory), now_s, thresholds
    )


def conclude(
    told: Digest,
    communicators: Mapping[int, Communicator],
    nodes: Mapping[int, str],
    metrics: Mapping[str, NodeMetrics],
    past: DiagnosisState,
    now_s: float,
    thresholds: Thresholds,
) -> tuple[DiagnosisState, tuple[Verdict, ...]]:
    """Return what is the matter with a job of which digests were merged.

    Args:
        told: of all nodes that have told something since the last call; ranks not in it are taken as they last were.
        communicators: of the job.
        nodes: each rank's node.
        metrics: the newest reading of each node.
        past: as returned by the last call.
        now_s: as for `diagnose`.
        thresholds: what counts.
    """
    ranks = _latest(past.ranks, _one_row_per_rank(told.ranks), told.ranks["rank"])
    frontiers = _latest(past.frontiers, told.frontiers, told.ranks["rank"])
    seen = _seen(past.seen, told.ranks, ranks, now_s)
    # Failures are kept once somebody has died, for whoever died of it may end too.
    remembered = (now_s - seen["failed_s"] < thresholds.hang.witness_s) | (
        not past.ranks["alive"].all()
    )
    seen["failed"] = np.where(remembered, seen["failed"], 0)
    ranks["failed"] = seen["failed"]
    node_past, findings = judge_nodes(metrics, past.nodes, nodes, now_s, thresholds.node)
    expected = ranks["rank"][
        ranks["alive"] & (now_s - seen["changed_s"] < thresholds.hang.silent_s)
    ]
    clock_error_s = dict(zip(ranks["rank"].tolist(), ranks["offset_error_s"].tolist(), strict=True))
    window = past.window
    if _is_time_new(past.ranks, ranks):
        window = distrusting(window, told)
    window, count = collect(
        window, told, expected, communicators, nodes, clock_error_s, thresholds.slow
    )
    slow, suspected = past.slow, past.suspected
    if count:
        window, found = _judge_steps(window, communicators, nodes, findings, thresholds)
        suspected, slow = _lasting(found, past.suspected, window, thresholds.slow.least_s)
    stopped = frozenset(rank for one in metrics.values() for rank in one.stopped_ranks)
    standstill = HangInputs(
        ranks, frontiers, communicators, nodes, now_s - seen["changed_s"], stopped, window.step_s()
    )
    hangs = find_hangs(standstill, thresholds.hang)
    # Of a job that is over, nothing but how it ended holds any more.
    is_over = not ranks["alive"].any()
    late = late_steps(window.step_s())
    curves, measured = judge_measures(
        past.curves,
        told.measures,
        len(ranks),
        late,
        communicators,
        nodes,
        now_s,
        thresholds.measure,
    )
    reported_mismatches = _mismatched(
        past.reported_mismatches,
        window.pending.mismatches,
        communicators,
        nodes,
        now_s,
        window.newest,
        thresholds,
    )
    of_steps = (
        () if is_over else (*(one for one, _ in reported_mismatches.values()), *slow, *measured)
    )
    standing = _distinct((*hangs, *of_steps, *findings.verdicts))
    since_s = {
        (one.subject, one.syndrome): min(
            one.since_s, past.since_s.get((one.subject, one.syndrome), one.since_s)
        )
        for one in standing
    }
    verdicts = tuple(replace(one, since_s=since_s[one.subject, one.syndrome]) for one in standing)
    following = DiagnosisState(
        past.memory,
        ranks,
        frontiers,
        seen,
        window,
        curves,
        node_past,
        slow,
        suspected,
        reported_mismatches,
        since_s,
    )
    return following, verdicts


def _latest(old: np.ndarray, new: np.ndarray, told: np.ndarray) -> np.ndarray:
    """Return the rows of the ranks told anew, and of the others as they were."""
    rows = joined([old.compress(~np.isin(old["rank"], told)), new])
    latest: np.ndarray = rows.take(np.argsort(rows["rank"], kind="stable"))
    return latest


def _one_row_per_rank(ranks: np.ndarray) -> np.ndarray:
    """Return one row of each rank, of a living process if there is one: a rank that moved may be told of by both nodes once."""
    ranks = ranks.take(np.lexsort((~ranks["alive"], ranks["rank"])))
    _, first = np.unique(ranks["rank"], return_index=True)
    one_each: np.ndarray = ranks.take(first)
    return one_each


def _is_time_new(old: np.ndarray, new: np.ndarray) -> bool:
    """Return whether some clock has turned out to be off by more than was thought, or been measured for the first time."""
    _, before, now = np.intersect1d(old["rank"], new["rank"], return_indices=True)
    error_s = old["offset_error_s"][before] + new["offset_error_s"][now]
    moved_s = np.abs(new["offset_s"][now] - old["offset_s"][before])
    first = np.isinf(old["offset_error_s"][before]) & np.isfinite(new["offset_error_s"][now])
    return bool((first | (moved_s > error_s)).any())


def _seen(old: np.ndarray, told: np.ndarray, ranks: np.ndarray, now_s: float) -> np.ndarray:
    """Note for each rank when its reading last changed, and its last failures; only `now_s` is compared with `now_s`."""
    rows = np.zeros(len(ranks), _SEEN)
    rows["rank"], rows["read_at_s"], rows["changed_s"] = ranks["rank"], ranks["read_at_s"], now_s
    rows["failed_s"] = -np.inf
    if len(old):
        at = np.minimum(np.searchsorted(old["rank"], rows["rank"]), len(old) - 1)
        known = old["rank"][at] == rows["rank"]
        same = known & (old["read_at_s"][at] == rows["read_at_s"])
        rows["changed_s"][same] = old["changed_s"][at[same]]
        for name in ("failed", "failed_s"):
            rows[name][known] = old[name][at[known]]
    # Digests tell an operation's failure once.
    fresh = np.isin(rows["rank"], told["rank"]) & (ranks["failed"] > 0)
    rows["failed"][fresh] = np.maximum(rows["failed"], ranks["failed"])[fresh]
    rows["failed_s"][fresh] = now_s
    return rows


def _judge_steps(
    window: Window,
    communicators: Mapping[int, Communicator],
    nodes: Mapping[int, str],
    findings: NodeFindings,
    thresholds: Thresholds,
) -> tuple[Window, tuple[Verdict, ...]]:
    """Judge the window after new whole steps, and let the histories learn from what is normal."""
    slow, table, step_s, ended_s = (
        thresholds.slow,
        window.table(),
        window.step_s(),
        window.ended_s(),
    )
    times = np.bincount(window.last_arrivals["rank"], window.last_arrivals["times"])
    lateness = {int(rank): int(times[rank]) for rank in np.flatnonzero(times)}
    ranks, slow_ranks = find_slow_ranks(SlownessInputs(window.own, table, lateness, nodes), slow)
    links, slow_links = find_slow_links(
        window.links, window.link_counts, nodes, step_s, ended_s, slow
    )
    unsteady, unsteady_links = find_slow_links(
        window.averages, window.link_counts, nodes, step_s, ended_s, slow, averages=True
    )
    if not links:
        links = unsteady
    changed = window.own.values - window.own.past
    own_shift = float(np.exp(np.nanmedian(changed))) if (~np.isnan(changed)).any() else float("nan")
    fabric = TransferInputs(
        communicators, nodes, window.transfer_counts, step_s, own_shift, ended_s
    )
    transfers, slow_transfers = find_slow_transfers(window.transfers, fabric, slow)
    if not links and any(verdict.subject.kind in ("group", "job") for verdict in transfers):
        # That collectives are slow is evidence of its own: among links too noisy to tell by themselves, half as far out will do.
        half = replace(slow, sigmas=slow.sigmas / 2)
        likely, slow_links = find_slow_links(
            window.links, window.link_counts, nodes, step_s, ended_s, half
        )
        links = tuple(
            replace(verdict, confidence=min(verdict.confidence, 0.6)) for verdict in likely
        )
    named = {rank for verdict in ranks for rank in verdict.subject.ranks}
    stalls = find_stalls(table, window.saves, named, nodes, thresholds.stall, slow)
    window = replace(
        window,
        own=window.own.learn(slow_ranks, slow),
        links=window.links.learn(slow_links, slow),
        averages=window.averages.learn(unsteady_links, slow),
        transfers=window.transfers.learn(slow_transfers, slow),
    )
    precise = named | {rank for verdict in links for rank in verdict.subject.ranks}
    told = [_explained(verdict, findings, nodes) for verdict in ranks]
    # A slow rank or link slows the collectives it takes part in: the vaguer verdict on these adds nothing.
    told += links
    for verdict in transfers:
        vague = verdict.subject.kind in ("group", "job")
        members = set(verdict.subject.ranks) if verdict.subject.kind == "group" else precise
        if not (vague and members & precise):
            told.append(verdict)
    return window, (*told, *stalls)


def _lasting(
    found: tuple[Verdict, ...],
    suspected: Mapping[tuple[Subject, Syndrome], float],
    window: Window,
    least_s: float,
) -> tuple[dict[tuple[Subject, Syndrome], float], tuple[Verdict, ...]]:
    """Return since when each deviation was found, and those that have lasted long enough, the window itself counted in."""
    ended_s = window.ended_s()
    # The job's clock may turn out to have been off: what was suspected later than now was so at the latest now.
    following = {
        (one.subject, one.syndrome): min(
            suspected.get((one.subject, one.syndrome), ended_s[-1]), ended_s[-1]
        )
        for one in found
    }
    span_s = ended_s[-1] - ended_s[0]

    def lasted_s(one: Verdict) -> float:
        return ended_s[-1] - min(following[one.subject, one.syndrome] - span_s, one.since_s)

    return following, tuple(one for one in found if lasted_s(one) >= least_s)


def _explained(verdict: Verdict, findings: NodeFindings, nodes: Mapping[int, str]) -> Verdict:
    """Say why a rank is slow if its node's figures tell."""
    places = {nodes.get(rank, "") for rank in verdict.subject.ranks}
    reason = findings.throttled.get(next(iter(places)), "") if len(places) == 1 else ""
    if not reason or verdict.syndrome is not Syndrome.NON_COMMUNICATION_SLOW:
        return verdict
    return replace(verdict, syndrome=Syndrome.THROTTLED, evidence=(reason, *verdict.evidence))


def _mismatched(
    standing: Mapping[tuple[Subject, Syndrome], tuple[Verdict, int]],
    mismatches: np.ndarray,
    communicators: Mapping[int, Communicator],
    nodes: Mapping[int, str],
    now_s: float,
    newest: int,
    thresholds: Thresholds,
) -> dict[tuple[Subject, Syndrome], tuple[Verdict, int]]:
    """Name collectives that went through though ranks called different things: a wrong result, or a deadlock to come."""
    held = thresholds.measure
    still = {
        key: (verdict, step)
        for key, (verdict, step) in standing.items()
        if step + held.held >= newest or now_s - verdict.since_s < held.held_s
    }
    for row in mismatches:
        calls = {
            int(row["lowest"]): (int(row["lowest_rank"]),),
            int(row["highest"]): (int(row["highest_rank"]),),
        }
        parting = CollectiveMismatch(int(row["communicator"]), int(row["number"]), calls)
        known = communicators.get(parting.communicator)
        name = known.name if known else str(parting.communicator)
        # Of a completed collective only two differing calls are kept, not how many ranks made each.
        subject = (
            group_subject(parting.ranks, nodes)
            if len(parting.ranks) > 1
            else gather(parting.ranks, nodes)[0]
        )
        evidence = (f"ranks called different things in {name} and it went through", *parting.told())
        verdict = Verdict(subject, Syndrome.MISMATCH, now_s, evidence, 0.8, 0.0, Advice.ALERT)
        still[subject, Syndrome.MISMATCH] = (verdict, max(newest, int(row["step"])))
    return still


def _distinct(verdicts: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
    """Return one verdict for each subject and syndrome, the first."""
    first: dict[tuple[Subject, Syndrome], Verdict] = {}
    for verdict in verdicts:
        first.setdefault((verdict.subject, verdict.syndrome), verdict)
    return tuple(first.values())
