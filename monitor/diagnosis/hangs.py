"""Finds hangs: jobs without progress, and the rank, link or communicator that is the root cause.

The graph of `keepstep.monitor.diagnosis.waits` shows where waiting ends; this module decides
whether the wait has lasted too long, and which syndrome it is. All ages are of one rank by its own
node's clock, from its last progress to the time of reading. Clocks of different nodes therefore
need not agree, and a reader that is behind sees young ages rather than old ones. A rank whose
records were not read lately is never blamed for progress that it may have made since.

Ranks that stand still for good reason get more time: before the first step, within a checkpoint
phase, in an evaluation and between steps (see `HangThresholds`). A rank that keeps making progress
is never a root cause, however long others wait for it. What a verdict advises is decided by
`keepstep.monitor.diagnosis.proof`: to look, to alert people, or to restart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain

import numpy as np

from keepstep.monitor.diagnosis.deaths import dead_processes
from keepstep.monitor.diagnosis.mismatches import first_mismatch
from keepstep.monitor.diagnosis.proof import describe_process, is_proved, needs_alert
from keepstep.monitor.diagnosis.standstill import HangInputs, Standstill, hang_verdict
from keepstep.monitor.diagnosis.subjects import (
    gather,
    group_name,
    group_subject,
    link_subject,
    rank_subject,
)
from keepstep.monitor.diagnosis.thresholds import HangThresholds
from keepstep.monitor.diagnosis.waits import OpenOperation, Waits, wait_for
from keepstep.monitor.records import Phase
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict

_UNPROVED_CONFIDENCE = 0.6
"""Confidence of a verdict that is only shown: ranks that compute, load or save look the same."""


def find_hangs(job: HangInputs, thresholds: HangThresholds) -> tuple[Verdict, ...]:
    """Return a verdict for each root cause of a standstill; none while no wait is too long.

    The graph is built only if some rank has waited for a share of the patience, so a healthy job
    costs little.
    """
    if not len(job.ranks):
        return ()
    analysis = Standstill(job, thresholds)
    dead = dead_processes(analysis)
    if dead:
        # Backends end processes whose collectives do not match: then the mismatch is the root
        # cause, and the deaths follow from it.
        mismatches = _mismatch_verdicts(analysis, np.ones(len(job.frontiers), bool))
        if mismatches:
            return mismatches
    least_wait_s = thresholds.waiter_share * analysis.base_patience_s
    if analysis.longest_wait_s < least_wait_s:
        return dead
    has_waited = analysis.is_waiting & (analysis.waited_s >= least_wait_s)
    mismatches = _mismatch_verdicts(analysis, has_waited)
    if mismatches:
        return dead + mismatches
    silent = analysis.dead | job.stopped
    silent |= {rank for rank, unread in analysis.unread_s.items() if unread > thresholds.stale_s}
    waits = wait_for(job.frontiers, job.communicators, silent)
    verdicts = [*dead, *_absent_ranks(analysis, waits), *_stuck_operations(analysis, waits)]
    if not verdicts and waits.cycle:
        verdicts.extend(_deadlock(analysis, waits.cycle))
    return tuple(verdicts)


def _mismatch_verdicts(analysis: Standstill, chosen: np.ndarray) -> tuple[Verdict, ...]:
    """Return verdicts on ranks whose call differs, in the communicators of the chosen frontiers."""
    frontiers = analysis.job.frontiers
    is_collective = frontiers["direction"] == 0
    verdicts = []
    for identity in np.unique(frontiers["communicator"][chosen & is_collective]).tolist():
        mismatch = first_mismatch(frontiers[analysis.collectives_of(identity)])
        if mismatch is None:
            continue
        minority = mismatch.minority
        subjects = (
            gather(minority, analysis.job.nodes)
            if minority
            else (group_subject(mismatch.ranks, analysis.job.nodes),)
        )
        name = group_name(analysis.job.communicators, identity)
        evidence = (
            f"ranks call different operations in {name}",
            *mismatch.describe_calls(),
        )
        since_s = min(analysis.moved_s(rank) for rank in mismatch.ranks if rank in analysis.rows)
        confidence = 0.95 if minority else 0.6
        for subject in subjects:
            verdicts.append(
                hang_verdict(
                    subject, Syndrome.MISMATCH, since_s, evidence, confidence, Advice.ALERT
                )
            )
    return tuple(verdicts)


def _absent_ranks(analysis: Standstill, waits: Waits) -> list[Verdict]:
    """Return verdicts on ranks that others wait for and that do not wait themselves.

    Only those that have stood still for too long.
    """
    by_syndrome: dict[Syndrome, dict[int, tuple[str, ...]]] = {}
    unreported: dict[int, list[int]] = {}
    for rank, waiters in waits.absent.items():
        row = analysis.rows.get(rank)
        if row is not None and not row["alive"]:
            continue
        present = [
            waiter
            for waiter in waiters
            if waiter in analysis.rows and analysis.rows[waiter]["alive"]
        ]
        longest_s = max((analysis.idle_s[waiter] for waiter in present), default=0.0)
        waiters_sentence = _waiters_sentence(
            len(present), f"for it directly, for up to {longest_s:.1f} s"
        )
        queued = analysis.oldest_queued(rank)
        if not present and queued is not None:
            longest_s = min(queued[1], analysis.idle_s[rank])
            waiters_sentence = f"it has waited for its own device for {longest_s:.1f} s"
        if row is None:
            # Its node's monitor is gone for so long that the rank was dropped, or never was there.
            if longest_s > analysis.thresholds.silent_s:
                unreported[rank] = present
            continue
        if analysis.unread_s[rank] > analysis.thresholds.stale_s:
            unread_s = analysis.unread_s[rank]
            if min(unread_s, longest_s) > analysis.thresholds.silent_s:
                evidence = (
                    f"no records of rank {rank} could be read for {unread_s:.0f} s",
                    waiters_sentence,
                )
                by_syndrome.setdefault(Syndrome.DEAD_PROCESS, {})[rank] = evidence
            continue
        stopped = rank in analysis.job.stopped
        patience_s = analysis.base_patience_s if stopped else analysis.patience_of_s(rank)
        if (
            analysis.idle_s[rank] < patience_s
            or longest_s < analysis.thresholds.waiter_share * patience_s
        ):
            continue
        state = "is stopped by a signal" if stopped else "never arrived"
        if not stopped and queued is not None:
            state = f"has called {queued[0]}, and its device runs earlier work"
        evidence = (
            f"rank {rank} {state}; it last made progress {analysis.idle_s[rank]:.1f} s ago, "
            f"in step {row['step']}",
            waiters_sentence,
        )
        syndrome = Syndrome.NON_COMMUNICATION_HANG
        # What the host does matters only if the device has done all that it was given.
        is_host_late = not stopped and queued is None
        if is_host_late and row["phase"] == Phase.DATA_WAIT:
            syndrome = Syndrome.DATA_STALL
            evidence = (
                f"rank {rank} has waited for data for {row['read_at_s'] - row['phase_s']:.1f} s",
                waiters_sentence,
            )
        elif is_host_late and row["phase"] == Phase.CHECKPOINT:
            syndrome = Syndrome.CHECKPOINT_STALL
            evidence = (
                f"rank {rank} has been in a checkpoint for "
                f"{row['read_at_s'] - row['phase_s']:.1f} s",
                waiters_sentence,
            )
        by_syndrome.setdefault(syndrome, {})[rank] = evidence
    verdicts = _unreported_ranks(analysis, unreported)
    for syndrome, evidence_of in by_syndrome.items():
        for subject in gather(evidence_of, analysis.job.nodes):
            ranks = [rank for rank in subject.ranks if rank in evidence_of]
            lines = [line for rank in subject.ranks[:4] for line in evidence_of.get(rank, ())]
            since_s = min(analysis.moved_s(rank) for rank in ranks)
            if syndrome is Syndrome.DEAD_PROCESS:  # Not read: it may only seem to be dead.
                verdicts.append(hang_verdict(subject, syndrome, since_s, lines, 0.5, Advice.ALERT))
                continue
            advice, confidence, process = _judge_pauses(analysis, ranks, subject, 0.95)
            lines += process
            verdicts.append(hang_verdict(subject, syndrome, since_s, lines, confidence, advice))
    return verdicts


def _waiters_sentence(count: int, rest: str) -> str:
    return f"{count} rank{'s wait' if count != 1 else ' waits'} {rest}"


def _unreported_ranks(
    analysis: Standstill, waiters_of: Mapping[int, Collection[int]]
) -> list[Verdict]:
    """Return a verdict on ranks that no monitor reports, by those that wait for each."""
    if not waiters_of:
        return []
    waiters = set(chain(*waiters_of.values()))
    names = ", ".join(map(str, list(waiters_of)[:6])) + (", ..." if len(waiters_of) > 6 else "")
    longest_s = max(analysis.idle_s[waiter] for waiter in waiters)
    evidence = (
        f"no monitor reports rank{'s' * (len(waiters_of) > 1)} {names}",
        _waiters_sentence(len(waiters), f"directly, for up to {longest_s:.1f} s"),
    )
    # What they did last is not known.
    since_s = min(analysis.moved_s(waiter) for waiter in waiters)
    subject = group_subject(waiters_of, analysis.job.nodes)
    return [hang_verdict(subject, Syndrome.DEAD_PROCESS, since_s, evidence, 0.5, Advice.ALERT)]


def _judge_pauses(
    analysis: Standstill, ranks: Collection[int], subject: Subject, confidence: float
) -> tuple[Advice, float, list[str]]:
    """Return the advice for ranks that stand still, the confidence, and what their processes do.

    Args:
        analysis: of the standstill.
        ranks: that others wait for.
        subject: whom the verdict names.
        confidence: once people are to be alerted.
    """
    thresholds, step_s = analysis.thresholds, analysis.job.step_s
    pauses = {rank: analysis.pause_of(rank) for rank in ranks}
    process = [f"rank {rank}: {describe_process(pause)}" for rank, pause in pauses.items()][:4]
    if all(is_proved(pause, step_s, thresholds) for pause in pauses.values()):
        advice = Advice.REPLACE_NODE if subject.kind == "node" else Advice.RESTART_WORKER
        return advice, confidence, process
    if any(needs_alert(pause, thresholds) for pause in pauses.values()):
        return Advice.ALERT, confidence, process
    return Advice.OBSERVE, min(confidence, _UNPROVED_CONFIDENCE), process


def _stuck_operations(analysis: Standstill, waits: Waits) -> list[Verdict]:
    """Return verdicts on operations that all ranks have begun and that do not end."""
    verdicts: dict[tuple[Subject, Syndrome], Verdict] = {}
    for operation in waits.stuck:
        waited_s = analysis.waited_at(operation)
        members = [rank for rank in operation.waiting if rank in waited_s]
        if not members:
            continue
        # A process that a signal has stopped needs no patience for what it might be doing.
        is_stopped = not analysis.job.stopped.isdisjoint(members)
        patience_s = (
            analysis.base_patience_s
            if is_stopped
            else max(analysis.patience_of_s(rank) for rank in members)
        )
        least_s = min(min(waited_s.values()), max(analysis.idle_s[rank] for rank in members))
        # What looks at all links is asked last.
        if least_s < patience_s or (not is_stopped and least_s < analysis.patience_in_s(operation)):
            continue
        subject, syndrome, confidence, reasons = _blame(analysis, operation, members)
        since_s = max(analysis.moved_s(rank) for rank in members)
        evidence = (
            f"all ranks have begun {analysis.name(operation)}, "
            f"the last {min(waited_s.values()):.1f} s ago",
            *reasons,
        )
        advice = Advice.ALERT
        # What is lost on a network is sent again, seconds later.
        is_short = min(waited_s.values()) < analysis.thresholds.alert_s
        if syndrome is Syndrome.COMMUNICATION_HANG and is_short:
            advice, confidence = Advice.OBSERVE, min(confidence, _UNPROVED_CONFIDENCE)
        if subject.kind in ("rank", "node"):
            advice, confidence, process = _judge_pauses(
                analysis, subject.ranks, subject, confidence
            )
            evidence = (*evidence, *process)
        verdicts.setdefault(
            (subject, syndrome),
            hang_verdict(subject, syndrome, since_s, evidence, confidence, advice),
        )
    return list(verdicts.values())


def _blame(
    analysis: Standstill, operation: OpenOperation, members: Collection[int]
) -> tuple[Subject, Syndrome, float, tuple[str, ...]]:
    """Return who is at fault where all ranks have begun an operation.

    Returns the subject, its syndrome, the confidence, and the reasons as evidence.
    """
    nodes = analysis.job.nodes
    stopped = sorted(analysis.job.stopped & set(members))
    if stopped:
        evidence = tuple(
            f"the process of rank {rank} is stopped by a signal" for rank in stopped[:4]
        )
        subjects = gather(stopped, nodes)
        subject = subjects[0] if len(subjects) == 1 else group_subject(stopped, nodes)
        return subject, Syndrome.NON_COMMUNICATION_HANG, 0.95, evidence
    payloads = analysis.payloads(operation)
    if len(set(payloads.values())) > 1:
        sizes = [f"{nbytes} bytes at rank {rank}" for rank, nbytes in sorted(payloads.items())[:6]]
        evidence = (f"payloads differ: {', '.join(sizes)}",)
        return group_subject(payloads, nodes), Syndrome.MISMATCH, 0.7, evidence
    if operation.pair is not None:
        return link_subject(*operation.pair, nodes), Syndrome.COMMUNICATION_HANG, 0.8, ()
    group = analysis.job.communicators[operation.communicator].ranks
    rows = analysis.job.frontiers[analysis.collectives_of(operation.communicator)]
    # The rank with the fewest launches (C4D): the others have called more operations,
    # asynchronously, and this rank stopped calling. Where times of the device exist, those that
    # began there count: how far ahead hosts have called says nothing.
    fewest = rows["rank"][rows["began"] < rows["began"].max()].tolist()
    if 0 < len(fewest) <= (len(group) - 1) // 2:
        subjects = gather(fewest, nodes)
        evidence = (
            f"ranks {', '.join(map(str, fewest[:6]))} have called fewer operations than the others",
        )
        subject = subjects[0] if len(subjects) == 1 else group_subject(fewest, nodes)
        if len(members) == len(group):
            return subject, Syndrome.NON_COMMUNICATION_HANG, 0.8, evidence
    if len(members) <= (len(group) - 1) // 2:
        evidence = (f"{len(group) - len(members)} ranks have left it, {len(members)} have not",)
        return group_subject(members, nodes), Syndrome.COMMUNICATION_HANG, 0.8, evidence
    return group_subject(group, nodes), Syndrome.COMMUNICATION_HANG, 0.7, ()


def _deadlock(analysis: Standstill, cycle: tuple[int, ...]) -> list[Verdict]:
    """Return a verdict on ranks that wait for each other in a cycle.

    A rank in the cycle whose open operations are all asynchronous may not be waiting at all: it may
    have posted a receive and then hang in its own code. If one such rank stopped clearly before all
    others, it is the likelier root cause.
    """
    idle_s = {rank: analysis.idle_s[rank] for rank in cycle}
    if (
        min(idle_s.values()) < analysis.base_patience_s * analysis.thresholds.waiter_share
        or max(idle_s.values()) < analysis.base_patience_s
    ):
        return []
    evidence: tuple[str, ...] = (
        f"ranks wait for each other in a cycle: {' -> '.join(map(str, (*cycle, cycle[0])))}",
    )
    since_s = min(analysis.moved_s(rank) for rank in cycle)
    frontiers = analysis.job.frontiers
    blocking = set(frontiers["rank"][(frontiers["open"] > 0) & ~frontiers["asynchronous"]].tolist())
    nonblocking = [rank for rank in cycle if rank not in blocking]
    if nonblocking:
        first = max(nonblocking, key=lambda rank: idle_s[rank])
        others = max((age for rank, age in idle_s.items() if rank != first), default=0.0)
        if idle_s[first] > others + analysis.thresholds.waiter_share * analysis.job.step_s:
            evidence = (
                *evidence,
                f"rank {first} has only asynchronous operations open and stopped before the others",
            )
            subject = rank_subject(first, analysis.job.nodes)
            advice, confidence, process = _judge_pauses(analysis, [first], subject, 0.6)
            syndrome = Syndrome.NON_COMMUNICATION_HANG
            lines = (*evidence, *process)
            return [hang_verdict(subject, syndrome, since_s, lines, confidence, advice)]
    subject = group_subject(cycle, analysis.job.nodes)
    return [
        hang_verdict(
            subject, Syndrome.MISMATCH, since_s, evidence, 0.6 if nonblocking else 0.9, Advice.ALERT
        )
    ]
