"""Concludes verdicts from a job's records, or from digests in a tree of daemons.

`diagnose` reads the records of all ranks. In a large job each node calls
`keepstep.monitor.diagnosis.digest.digest` on its own ranks, racks call
`keepstep.monitor.diagnosis.tables.merge`, and the daemon at the top calls `conclude` on the result:
`diagnose` does the same in one process.

Pure: the state (`DiagnosisState`, of bounded size) and the time are arguments, and the state is
returned. A `DiagnosisState` belongs to one generation: when ranks or communicators change, go on
with `renewed`. The verdicts returned are those that hold now; each keeps the `since_s`
of its first appearance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from keepstep.monitor.diagnosis.activity import QuietProcess, follow_processes
from keepstep.monitor.diagnosis.delays import LinkInputs, find_slow_links
from keepstep.monitor.diagnosis.digest import EMPTY_DIGEST_STATE, DigestState, digest
from keepstep.monitor.diagnosis.hangs import find_hangs
from keepstep.monitor.diagnosis.lateness import Lateness
from keepstep.monitor.diagnosis.lossy_links import find_lossy_links
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
from keepstep.monitor.diagnosis.pauses import PauseKind, learn_pauses, unmoved_ranks
from keepstep.monitor.diagnosis.slowness import SlownessInputs, find_slow_ranks
from keepstep.monitor.diagnosis.stalls import find_stalls
from keepstep.monitor.diagnosis.standstill import HangInputs
from keepstep.monitor.diagnosis.steps import ALL_STEPS, Window, collect, distrusting, late_steps
from keepstep.monitor.diagnosis.subjects import group_name, group_subject
from keepstep.monitor.diagnosis.tables import EMPTY, FRONTIER, RANK, Digest
from keepstep.monitor.diagnosis.thresholds import Thresholds
from keepstep.monitor.diagnosis.transfers import TransferInputs, find_slow_transfers
from keepstep.monitor.diagnosis.waits import waiting_ranks
from keepstep.monitor.records import Communicator, JobRecords, joined
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict

_Key = tuple[Subject, Syndrome]
"""Identifies a verdict from one call to the next."""

_LONGEST_RELAY_S = 5.0
"""Readings arrive within this time: a clock by which one took longer is not the job's."""

_SEEN = np.dtype(
    [
        ("rank", "<i4"),
        ("read_at_s", "<f8"),
        ("changed_s", "<f8"),
        ("failed", "<u4"),
        ("failed_s", "<f8"),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisState:
    """State between calls: a few numbers per rank, communicator and link, for a few steps.

    Args:
        memory: of the reader of rings; used by `diagnose` only.
        ranks: the newest snapshot of each rank, dtype RANK.
        frontiers: the newest of each channel, dtype FRONTIER.
        seen: when new records of each rank were last read, and its last failed operations, by
            `now_s`.
        window: the last steps.
        curves: history of measures.
        nodes: history of each node's metrics.
        slow: verdicts of the last complete step; they hold until the next.
        suspected: when each deviation of the last complete step was first found, by the job's
            clock.
        reported_mismatches: verdicts on collectives that completed although ranks called different
            operations, each with the step in which it was found.
        since_s: when each verdict that holds first appeared.
        first_step: highest step at the first reading in which some rank was in one; 0 before it.
        pauses: the longest pause of each kind that ended by itself, in seconds.
        waiting: ranks that were seen to wait for others since they last moved.
        quiet: since when each rank's process has done nothing.
        slow_here: nodes whose ranks were slow without being blamed, with these ranks.
        slow_before: the same of earlier assignments of ranks.
    """

    memory: DigestState = EMPTY_DIGEST_STATE
    ranks: np.ndarray = field(default_factory=lambda: np.zeros(0, RANK))
    frontiers: np.ndarray = field(default_factory=lambda: np.zeros(0, FRONTIER))
    seen: np.ndarray = field(default_factory=lambda: np.zeros(0, _SEEN))
    window: Window = field(default_factory=Window)
    curves: MeasureHistory = EMPTY_MEASURE_HISTORY
    nodes: Mapping[str, NodeMetricsHistory] = field(default_factory=dict)
    slow: tuple[Verdict, ...] = ()
    suspected: Mapping[_Key, float] = field(default_factory=dict)
    reported_mismatches: Mapping[_Key, tuple[Verdict, int]] = field(default_factory=dict)
    since_s: Mapping[_Key, float] = field(default_factory=dict)
    first_step: int = 0
    pauses: Mapping[PauseKind, float] = field(default_factory=dict)
    waiting: frozenset[int] = frozenset()
    quiet: Mapping[int, QuietProcess] = field(default_factory=dict)
    slow_here: Mapping[str, frozenset[int]] = field(default_factory=dict)
    slow_before: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def renewed(self) -> DiagnosisState:
        """Return the state for new processes: only what is known of the nodes remains."""
        slow_before = {**self.slow_before, **self.slow_here}
        return replace(NO_DIAGNOSIS_STATE, nodes=self.nodes, slow_before=slow_before)


NO_DIAGNOSIS_STATE = DiagnosisState()


def diagnose(
    job: JobRecords,
    metrics: Mapping[str, NodeMetrics],
    past: DiagnosisState,
    now_s: float,
    thresholds: Thresholds,
) -> tuple[DiagnosisState, tuple[Verdict, ...]]:
    """Return the state to remember, and the verdicts that hold now.

    Args:
        job: what the rings of all ranks hold now; it may repeat what was read before.
        metrics: the newest reading of each node; may be empty.
        past: as returned by the last call, `NO_DIAGNOSIS_STATE` at first.
        now_s: by the job's clock, or any clock that is the same in each call.
        thresholds: what counts.
    """
    memory, new_digest = digest(job.ranks.values(), job.communicators, past.memory)
    nodes = {rank: records.node for rank, records in job.ranks.items()}
    past = replace(past, memory=memory)
    return conclude(new_digest, job.communicators, nodes, metrics, past, now_s, thresholds)


def conclude(
    new_digest: Digest,
    communicators: Mapping[int, Communicator],
    nodes: Mapping[int, str],
    metrics: Mapping[str, NodeMetrics],
    past: DiagnosisState,
    now_s: float,
    thresholds: Thresholds,
) -> tuple[DiagnosisState, tuple[Verdict, ...]]:
    """Return the state to remember, and the verdicts that hold now.

    Args:
        new_digest: of all nodes that reported since the last call; other ranks are unchanged.
        communicators: of the job.
        nodes: each rank's node.
        metrics: the newest reading of each node.
        past: as returned by the last call.
        now_s: as for `diagnose`.
        thresholds: what counts.
    """
    reported = new_digest.ranks["rank"]
    ranks = _latest(past.ranks, _one_row_per_rank(new_digest.ranks), reported)
    frontiers = _latest(past.frontiers, new_digest.frontiers, reported)
    seen = _seen(past.seen, new_digest.ranks, ranks, now_s)
    # Failures are kept once some process has died, for others may end because of it.
    is_remembered = (now_s - seen["failed_s"] < thresholds.hang.witness_s) | (
        not past.ranks["alive"].all()
    )
    seen["failed"] = np.where(is_remembered, seen["failed"], 0)
    ranks["failed"] = seen["failed"]
    ranks, new_digest = _dated_by_arrival(ranks, seen["changed_s"], new_digest)
    node_histories, findings = judge_nodes(metrics, past.nodes, nodes, now_s, thresholds.node)

    unread_s = now_s - seen["changed_s"]
    expected = ranks["rank"][ranks["alive"] & (unread_s < thresholds.hang.silent_s)]
    clock_error_s = dict(zip(ranks["rank"].tolist(), ranks["offset_error_s"].tolist(), strict=True))
    window = past.window
    if _is_time_new(past.ranks, ranks):
        window = distrusting(window, new_digest)
    slow, suspected, slow_here = past.slow, past.suspected, past.slow_here
    mismatches_found, increments = None, new_digest
    while True:
        # A first reading holds many steps: what was normal in the first of them is learnt before
        # the last are judged.
        most = ALL_STEPS if window.has_past() else thresholds.slow.window
        window, completed = collect(
            window, increments, expected, communicators, nodes, clock_error_s, thresholds.slow, most
        )
        if mismatches_found is None:
            mismatches_found, increments = window.pending.mismatches, EMPTY
        if not completed:
            break
        window, deviating, uneven = _judge_steps(
            window, communicators, nodes, findings, past.slow_before, thresholds
        )
        slow_here = {**slow_here, **uneven}
        suspected, slow = _lasting(deviating, suspected, window, thresholds.slow.least_s)
        if completed < most:
            break

    stopped = frozenset(rank for node in metrics.values() for rank in node.stopped_ranks)
    step = int(ranks["step"].max(initial=0))
    # Jobs may count their steps from any number, as one that goes on from a checkpoint does.
    first_step = past.first_step or step
    pauses = learn_pauses(past.pauses, past.ranks, past.waiting | stopped, ranks)
    # The last member may begin an operation between two readings, or its node be read later than
    # the others: then nobody seems to wait at the last reading before the operation ends.
    waiting = waiting_ranks(frontiers, communicators) | (
        past.waiting & unmoved_ranks(past.ranks, ranks)
    )
    quiet = follow_processes(past.quiet, metrics, nodes, thresholds.hang)
    inputs = HangInputs(
        ranks=ranks,
        frontiers=frontiers,
        communicators=communicators,
        nodes=nodes,
        unread_s=unread_s,
        stopped=stopped,
        step_s=window.step_s(),
        started=step > first_step,
        pauses=pauses,
        quiet=quiet,
        lateness=Lateness(
            delays=window.averages,
            message_counts=window.link_counts,
            transfers=window.transfers,
            transfer_counts=window.transfer_counts,
        ),
    )
    hangs = find_hangs(inputs, thresholds.hang)
    curves, measured = judge_measures(
        past.curves,
        new_digest.measures,
        len(ranks),
        late_steps(window.step_s()),
        communicators,
        nodes,
        now_s,
        thresholds.measure,
    )
    reported_mismatches = _completed_mismatches(
        past.reported_mismatches,
        mismatches_found,
        communicators,
        nodes,
        now_s,
        window.newest,
        thresholds,
    )
    mismatches = (verdict for verdict, _ in reported_mismatches.values())
    # If the job is over, only verdicts on how it ended still hold.
    is_over = not ranks["alive"].any()
    of_steps = () if is_over else (*mismatches, *slow, *measured)
    verdicts, since_s = _keep_onset((*hangs, *of_steps, *findings.verdicts), past.since_s)
    next_state = DiagnosisState(
        memory=past.memory,
        ranks=ranks,
        frontiers=frontiers,
        seen=seen,
        window=window,
        curves=curves,
        nodes=node_histories,
        slow=slow,
        suspected=suspected,
        reported_mismatches=reported_mismatches,
        since_s=since_s,
        first_step=first_step,
        pauses=pauses,
        waiting=waiting,
        quiet=quiet,
        slow_here=slow_here,
        slow_before=past.slow_before,
    )
    return next_state, verdicts


def _keep_onset(
    verdicts: tuple[Verdict, ...], past_since_s: Mapping[_Key, float]
) -> tuple[tuple[Verdict, ...], dict[_Key, float]]:
    """Return one verdict per subject and syndrome, each with its earliest `since_s`."""
    distinct = _distinct(verdicts)
    since_s = {
        _key(verdict): min(verdict.since_s, past_since_s.get(_key(verdict), verdict.since_s))
        for verdict in distinct
    }
    return tuple(replace(verdict, since_s=since_s[_key(verdict)]) for verdict in distinct), since_s


def _key(verdict: Verdict) -> _Key:
    return verdict.subject, verdict.syndrome


def _latest(old: np.ndarray, new: np.ndarray, reported: np.ndarray) -> np.ndarray:
    """Return the new rows of the reported ranks, and the old rows of the others."""
    rows = joined([old.compress(~np.isin(old["rank"], reported)), new])
    latest: np.ndarray = rows.take(np.argsort(rows["rank"], kind="stable"))
    return latest


def _one_row_per_rank(ranks: np.ndarray) -> np.ndarray:
    """Return one row per rank, preferring that of a living process.

    Two nodes may both report a rank once after it has moved.
    """
    ranks = ranks.take(np.lexsort((~ranks["alive"], ranks["rank"])))
    _, first = np.unique(ranks["rank"], return_index=True)
    distinct: np.ndarray = ranks.take(first)
    return distinct


def _is_time_new(old: np.ndarray, new: np.ndarray) -> bool:
    """Return whether some clock is now known to be further off than its stated error.

    Also true when a clock's offset was measured for the first time.
    """
    _, before, now = np.intersect1d(old["rank"], new["rank"], return_indices=True)
    error_s = old["offset_error_s"][before] + new["offset_error_s"][now]
    moved_s = np.abs(new["offset_s"][now] - old["offset_s"][before])
    is_first = np.isinf(old["offset_error_s"][before]) & np.isfinite(new["offset_error_s"][now])
    return bool((is_first | (moved_s > error_s)).any())


def _seen(old: np.ndarray, reported: np.ndarray, ranks: np.ndarray, now_s: float) -> np.ndarray:
    """Return when new records of each rank were last read, and its last failures.

    Readings are compared for equality only, so `now_s` may be any clock.
    """
    rows = np.zeros(len(ranks), _SEEN)
    rows["rank"], rows["read_at_s"], rows["changed_s"] = ranks["rank"], ranks["read_at_s"], now_s
    rows["failed_s"] = -np.inf
    if len(old):
        old_position = np.minimum(np.searchsorted(old["rank"], rows["rank"]), len(old) - 1)
        is_known = old["rank"][old_position] == rows["rank"]
        is_same = is_known & (old["read_at_s"][old_position] == rows["read_at_s"])
        rows["changed_s"][is_same] = old["changed_s"][old_position[is_same]]
        for name in ("failed", "failed_s"):
            rows[name][is_known] = old[name][old_position[is_known]]
    # A digest reports the failure of an operation once.
    has_failures = np.isin(rows["rank"], reported["rank"]) & (ranks["failed"] > 0)
    rows["failed"][has_failures] = np.maximum(rows["failed"], ranks["failed"])[has_failures]
    rows["failed_s"][has_failures] = now_s
    return rows


def _dated_by_arrival(
    ranks: np.ndarray, changed_s: np.ndarray, new_digest: Digest
) -> tuple[np.ndarray, Digest]:
    """Return ranks and a digest whose times are by the job's clock, also where none was measured.

    Until the clock of a node is measured, it is not known, or only by its least delay: without that
    its times are by its own clock, which may have begun days before the job's, and a verdict dated
    so would seem to be of an earlier run. Then the time at which a reading arrived stands for the
    time of the reading.

    Args:
        ranks: dtype RANK, ascending by rank.
        changed_s: for each of `ranks`, when its newest reading arrived.
        new_digest: just arrived, from some of these ranks.
    """
    shift_s = changed_s - ranks["read_at_s"] - ranks["offset_s"]
    shift_s[np.isfinite(ranks["offset_error_s"]) | (np.abs(shift_s) <= _LONGEST_RELAY_S)] = 0.0
    if not shift_s.any():
        return ranks, new_digest

    def dated(rows: np.ndarray, name: str) -> np.ndarray:
        position = np.minimum(np.searchsorted(ranks["rank"], rows["rank"]), len(ranks) - 1)
        is_known = ranks["rank"][position] == rows["rank"]
        shifted = rows.copy()
        shifted[name] += np.where(is_known, shift_s[position], 0.0)
        return shifted

    return dated(ranks, "offset_s"), replace(
        new_digest,
        steps=dated(new_digest.steps, "ended_s"),
        measures=dated(new_digest.measures, "at_s"),
    )


def _judge_steps(
    window: Window,
    communicators: Mapping[int, Communicator],
    nodes: Mapping[int, str],
    findings: NodeFindings,
    earlier: Mapping[str, frozenset[int]],
    thresholds: Thresholds,
) -> tuple[Window, tuple[Verdict, ...], Mapping[str, frozenset[int]]]:
    """Judge the window after new complete steps, and learn the pasts from what is normal.

    Returns also the nodes whose ranks are slow without being blamed, with these ranks.
    """
    slow, table, step_s, ended_s = (
        thresholds.slow,
        window.table(),
        window.step_s(),
        window.ended_s(),
    )
    times = np.bincount(window.last_arrivals["rank"], window.last_arrivals["times"])
    lateness = {int(rank): int(times[rank]) for rank in np.flatnonzero(times)}
    slow_ranks = find_slow_ranks(
        SlownessInputs(
            own=window.own,
            rows=table,
            lateness=lateness,
            nodes=nodes,
            routed=window.routed,
            throttled=findings.throttled,
            earlier=earlier,
        ),
        slow,
    )
    job_links = LinkInputs(counts=window.link_counts, nodes=nodes, step_s=step_s, since_s=ended_s)
    links, slow_links = find_slow_links(window.links, job_links, slow)
    lossy, unsteady_links = find_lossy_links(window.averages, job_links, slow)
    if not links:
        links = lossy
    changed = window.own.values - window.own.past
    own_shift = float(np.exp(np.nanmedian(changed))) if (~np.isnan(changed)).any() else float("nan")
    inputs = TransferInputs(
        communicators=communicators,
        nodes=nodes,
        counts=window.transfer_counts,
        step_s=step_s,
        own_shift=own_shift,
        since_s=ended_s,
    )
    transfers, slow_transfers = find_slow_transfers(window.transfers, inputs, slow)
    if not links and any(verdict.subject.kind in ("group", "job") for verdict in transfers):
        # Slow collectives are additional evidence: among links too noisy to be found alone, half
        # the deviation suffices.
        half = replace(slow, sigmas=slow.sigmas / 2)
        likely_links, slow_links = find_slow_links(window.links, job_links, half)
        links = tuple(
            replace(verdict, confidence=min(verdict.confidence, 0.6)) for verdict in likely_links
        )
    blamed_ranks = slow_ranks.ranks
    stalls = find_stalls(table, window.saves, blamed_ranks, nodes, thresholds.stall, slow)
    window = replace(
        window,
        own=window.own.learn(slow_ranks.changed, slow),
        # While a rank is slower than it was, it is compared with the load that it had then.
        routed=window.routed.learn(
            np.isin(window.routed.keys, window.own.keys[slow_ranks.changed]), slow
        ),
        links=window.links.learn(slow_links, slow),
        averages=window.averages.learn(unsteady_links, slow),
        transfers=window.transfers.learn(slow_transfers, slow),
    )
    precise_ranks = blamed_ranks | {rank for verdict in links for rank in verdict.subject.ranks}
    verdicts = [_explained(verdict, findings, nodes) for verdict in slow_ranks.verdicts]
    # A slow rank or link slows the collectives in which it takes part: the less precise verdict on
    # these adds nothing.
    verdicts += links
    for verdict in transfers:
        is_vague = verdict.subject.kind in ("group", "job")
        members = set(verdict.subject.ranks) if verdict.subject.kind == "group" else precise_ranks
        if not (is_vague and members & precise_ranks):
            verdicts.append(verdict)
    return window, (*verdicts, *stalls), slow_ranks.uneven


def _lasting(
    deviating: tuple[Verdict, ...],
    suspected: Mapping[_Key, float],
    window: Window,
    least_s: float,
) -> tuple[dict[_Key, float], tuple[Verdict, ...]]:
    """Return since when each deviation was found, and those that have lasted long enough.

    The window itself counts as part of that time.
    """
    ended_s = window.ended_s()
    # If the job's clock was corrected, a deviation may seem to have been found later than now: it
    # was found now at the latest.
    since_s = {
        _key(verdict): min(suspected.get(_key(verdict), ended_s[-1]), ended_s[-1])
        for verdict in deviating
    }
    span_s = ended_s[-1] - ended_s[0]

    def lasted_s(verdict: Verdict) -> float:
        return ended_s[-1] - min(since_s[_key(verdict)] - span_s, verdict.since_s)

    return since_s, tuple(verdict for verdict in deviating if lasted_s(verdict) >= least_s)


def _explained(verdict: Verdict, findings: NodeFindings, nodes: Mapping[int, str]) -> Verdict:
    """Return the verdict with the reason why a rank is slow, if its node's metrics show it."""
    rank_nodes = {nodes.get(rank, "") for rank in verdict.subject.ranks}
    reason = findings.throttled.get(next(iter(rank_nodes)), "") if len(rank_nodes) == 1 else ""
    if not reason or verdict.syndrome is not Syndrome.NON_COMMUNICATION_SLOW:
        return verdict
    return replace(verdict, syndrome=Syndrome.THROTTLED, evidence=(reason, *verdict.evidence))


def _completed_mismatches(
    standing: Mapping[_Key, tuple[Verdict, int]],
    mismatches: np.ndarray,
    communicators: Mapping[int, Communicator],
    nodes: Mapping[int, str],
    now_s: float,
    newest: int,
    thresholds: Thresholds,
) -> dict[_Key, tuple[Verdict, int]]:
    """Return verdicts on collectives that completed although ranks called different operations.

    Their result is wrong, or a deadlock follows.
    """
    measure = thresholds.measure
    holding = {
        key: (verdict, step)
        for key, (verdict, step) in standing.items()
        if step + measure.held >= newest or now_s - verdict.since_s < measure.held_s
    }
    for row in mismatches:
        calls = {
            int(row["lowest"]): (int(row["lowest_rank"]),),
            int(row["highest"]): (int(row["highest_rank"]),),
        }
        mismatch = CollectiveMismatch(int(row["communicator"]), int(row["number"]), calls)
        name = group_name(communicators, mismatch.communicator)
        # Of a completed collective only two differing calls are kept, not how many ranks made each.
        verdict = Verdict(
            subject=group_subject(mismatch.ranks, nodes),
            syndrome=Syndrome.MISMATCH,
            since_s=now_s,
            evidence=(
                f"ranks called different operations in {name} and it completed",
                *mismatch.describe_calls(),
            ),
            confidence=0.8,
            cost_s_per_step=0.0,
            advice=Advice.ALERT,
        )
        holding[_key(verdict)] = (verdict, max(newest, int(row["step"])))
    return holding


def _distinct(verdicts: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
    """Return the first verdict of each subject and syndrome."""
    first: dict[_Key, Verdict] = {}
    for verdict in verdicts:
        first.setdefault(_key(verdict), verdict)
    return tuple(first.values())
