"""Finds hangs: jobs without progress, and the rank, link or communicator that is the root cause.

The graph of `keepstep.monitor.diagnosis.waits` shows where waiting ends; this module decides
whether the wait has lasted too long, and which syndrome it is. All ages are of one rank by its own
node's clock, from its last progress to the time of reading. Clocks of different nodes therefore
need not agree, and a reader that is behind sees young ages rather than old ones. A rank whose
records were not read lately is never blamed for progress that it may have made since.

Ranks that stand still for good reason get more time: before the first step, within a checkpoint
phase, in an evaluation and between steps (see `HangThresholds`). A rank that keeps making progress
is never a root cause, however long others wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keepstep.monitor.diagnosis.mismatches import first_mismatch
from keepstep.monitor.diagnosis.subjects import gather, group_subject, link_subject, rank_subject
from keepstep.monitor.diagnosis.thresholds import HangThresholds
from keepstep.monitor.diagnosis.waits import OpenOperation, Waits, wait_for
from keepstep.monitor.records import Communicator, Ending, Phase
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class HangInputs:
    """Inputs of `find_hangs`.

    Args:
        ranks: dtype RANK, ascending by rank.
        frontiers: dtype FRONTIER.
        communicators: of the job.
        nodes: each rank's node.
        unread_s: for each of `ranks`, seconds since new records of it were read.
        stopped: ranks whose process the kernel has stopped (SIGSTOP, a debugger).
        step_s: the job's step time; 0.0 if not known.
    """

    ranks: np.ndarray
    frontiers: np.ndarray
    communicators: Mapping[int, Communicator]
    nodes: Mapping[int, str]
    unread_s: np.ndarray
    stopped: frozenset[int]
    step_s: float


def find_hangs(job: HangInputs, thresholds: HangThresholds) -> tuple[Verdict, ...]:
    """Return a verdict for each root cause of a standstill; none while no wait is too long.

    The graph is built only if some rank has waited for a share of the patience, so a healthy job
    costs little.
    """
    if not len(job.ranks):
        return ()
    analysis = _HangAnalysis(job, thresholds)
    dead = _dead_processes(analysis)
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


class _HangAnalysis:
    """Ages and patience of one standstill, computed once."""

    def __init__(self, job: HangInputs, thresholds: HangThresholds) -> None:
        self.job, self.thresholds = job, thresholds
        ranks, frontiers = job.ranks, job.frontiers
        self.rows = dict(zip(ranks["rank"].tolist(), ranks, strict=True))
        self.unread_s = dict(zip(ranks["rank"].tolist(), job.unread_s.tolist(), strict=True))
        self.idle_s = dict(
            zip(
                ranks["rank"].tolist(),
                (ranks["read_at_s"] - ranks["moved_s"]).tolist(),
                strict=True,
            )
        )
        rank_index = np.minimum(np.searchsorted(ranks["rank"], frontiers["rank"]), len(ranks) - 1)
        self.is_waiting = (
            (frontiers["open"] > 0)
            & (ranks["rank"][rank_index] == frontiers["rank"])
            & ranks["alive"][rank_index]
        )
        self.waited_s = np.where(
            self.is_waiting, ranks["read_at_s"][rank_index] - frontiers["open_s"], 0.0
        )
        self.dead = {rank for rank, row in self.rows.items() if not row["alive"]}
        self.longest_wait_s = float(np.max(self.waited_s, initial=0.0))
        self.started = bool((ranks["step"] >= 2).any())
        self.base_patience_s = thresholds.patience_s(job.step_s)

    def patience_of_s(self, rank: int) -> float:
        """Return how long this rank may stand still, given its phase."""
        row = self.rows[rank]
        patience = self.base_patience_s if self.started else self.thresholds.first_step_s
        if row["phase"] == Phase.CHECKPOINT:
            return max(patience, self.thresholds.checkpoint_s)
        # An evaluation that loads batches looks like the beginning of a step.
        if row["phase"] == Phase.EVALUATION or (row["marks_steps"] and not self.is_in_step(rank)):
            return max(patience, self.thresholds.between_steps_s)
        return patience

    def is_in_step(self, rank: int) -> bool:
        """Return whether a rank is in a step.

        A pipeline stage receives before its model runs, which is when its step is recorded as
        begun. A rank that has received from a rank in a step at least as late is therefore in a
        step too. A loss that is sent between steps comes from a rank that is in no step.
        """
        row = self.rows[rank]
        sender = self.rows.get(int(row["received_from"]))
        return bool(row["in_step"]) or (
            sender is not None and bool(sender["in_step"]) and sender["step"] >= row["step"]
        )

    def waited_at(self, operation: OpenOperation) -> dict[int, float]:
        """Return how long each rank has waited in an operation, in seconds."""
        rows = np.flatnonzero(self._of(operation) & self.is_waiting)
        return {int(self.job.frontiers["rank"][row]): float(self.waited_s[row]) for row in rows}

    def payloads(self, operation: OpenOperation) -> dict[int, int]:
        """Return the payload of each rank that has an operation open, in bytes."""
        rows = np.flatnonzero(self._of(operation))
        return {
            int(self.job.frontiers["rank"][row]): int(self.job.frontiers["open_nbytes"][row])
            for row in rows
        }

    def _of(self, operation: OpenOperation) -> np.ndarray:
        rows = self.job.frontiers
        is_call: np.ndarray = (rows["communicator"] == operation.communicator) & (
            rows["open"] == operation.number
        )
        if operation.pair is None:
            is_call &= rows["direction"] == 0
        else:
            is_call &= (
                (rows["direction"] > 0)
                & np.isin(rows["rank"], operation.pair)
                & np.isin(rows["peer"], operation.pair)
            )
        return is_call

    def name(self, operation: OpenOperation) -> str:
        """Return an operation's name for people."""
        if operation.pair is not None:
            return (
                f"message {operation.number} from rank {operation.pair[0]} to {operation.pair[1]}"
            )
        communicator = self.job.communicators.get(operation.communicator)
        name = communicator.name if communicator else operation.communicator
        return f"operation {operation.number} of {name}"

    def moved_s(self, rank: int) -> float:
        """Return when a rank last made progress, by the job's clock."""
        row = self.rows[rank]
        moved_s = row["moved_s"] if np.isfinite(row["moved_s"]) else row["read_at_s"]
        return float(moved_s + row["offset_s"])


def _verdict(
    subject: Subject,
    syndrome: Syndrome,
    since_s: float,
    evidence: Iterable[str],
    confidence: float,
    advice: Advice,
) -> Verdict:
    return Verdict(
        subject=subject,
        syndrome=syndrome,
        since_s=since_s,
        evidence=tuple(evidence),
        confidence=confidence,
        cost_s_per_step=math.inf,
        advice=advice,
    )


class _Deaths:
    """Which processes ended, how, and who still needed them.

    Attributes:
        dead: ranks whose process is gone.
        alive: the others.
        witnesses: ranks, dead or alive, whose operations failed: usually because a peer had died.
        raised: dead ranks that recorded an exception of their own program.
        killed: dead ranks that recorded nothing.
        waiters: for each dead rank, the living ranks that wait for it.
        open_operations: for each dead rank, the names of the operations in which it was.
    """

    def __init__(self, analysis: _HangAnalysis) -> None:
        self._analysis = analysis
        rows = analysis.rows
        self.dead = analysis.dead
        self.alive = rows.keys() - self.dead
        self.witnesses = {
            rank for rank, row in rows.items() if row["failed"] or row["ending"] == Ending.FAILED
        }
        self.raised = {
            rank for rank in self.dead - self.witnesses if rows[rank]["ending"] == Ending.RAISED
        }
        self.killed = {rank for rank in self.dead if rows[rank]["ending"] == Ending.NONE}

    @cached_property
    def _waits(self) -> Waits:
        job = self._analysis.job
        return wait_for(job.frontiers, job.communicators, self.dead)

    @cached_property
    def waiters(self) -> dict[int, list[int]]:
        return {
            rank: [waiter for waiter in waiters if waiter in self.alive]
            for rank, waiters in self._waits.absent.items()
            if rank in self.dead
        }

    @cached_property
    def open_operations(self) -> dict[int, list[str]]:
        names: dict[int, list[str]] = {rank: [] for rank in self.dead}
        for operation in self._waits.operations:
            for rank in operation.waiting:
                if rank in self.dead:
                    names[rank].append(self._analysis.name(operation))
        return names

    def is_end_of_job(self) -> bool:
        """Return whether all processes are gone and no failure was recorded.

        Then the job has finished, or was ended as a whole.
        """
        return not self.alive and not self.witnesses and not self.raised

    def is_program_at_fault(self) -> bool:
        """Return whether most processes ended by an exception: then the program is the cause."""
        return len(self.raised) > 1 and 2 * len(self.raised) > len(self._analysis.rows)

    def suspects(self) -> set[int]:
        """Return the dead ranks among which the root causes are.

        In this order:

        1. Ranks that raised an exception: launchers then kill the others, which record nothing.
        2. Ranks whose operations did not fail, without those that could still record their end
           while in an operation, if other ranks could not: these died first.
        3. Ranks whose operations did not fail.
        4. All dead ranks.
        """
        without_failure = self.dead - self.witnesses
        return (
            self.raised
            or without_failure - self._ended_in_operation()
            or without_failure
            or self.dead
        )

    def _ended_in_operation(self) -> set[int]:
        """Return the ranks that recorded their end while in an operation, if others did not."""
        if not self.killed:
            return set()
        return {rank for rank in self.dead - self.killed if self.open_operations[rank]}

    def was_needed(self, rank: int) -> bool:
        """Return whether a dead rank still had work to do when it ended."""
        return (
            rank in self.raised
            or self._is_awaited(rank)
            or bool(self.open_operations[rank])
            or (bool(self.witnesses - {rank}) and self._had_work(rank))
        )

    def _is_awaited(self, rank: int) -> bool:
        """Return whether living ranks have waited for a dead one for long enough."""
        analysis = self._analysis
        waiters = self.waiters.get(rank, [])
        if not waiters:
            return False
        is_waiter = analysis.is_waiting & np.isin(analysis.job.frontiers["rank"], waiters)
        longest_s = float(analysis.waited_s[is_waiter].max(initial=0.0))
        return longest_s >= analysis.thresholds.dead_s

    def _had_work(self, rank: int) -> bool:
        """Return whether a rank was in a step, or did not record that it had finished."""
        row = self._analysis.rows[rank]
        return bool(
            self._analysis.is_in_step(rank)
            or not row["marks_steps"]
            or row["ending"] != Ending.FINISHED
        )


def _dead_processes(analysis: _HangAnalysis) -> tuple[Verdict, ...]:
    """Return verdicts on processes that are gone and were still needed.

    At the end of a job processes end one after another, record it, and no rank waits for them: that
    is no fault. `_Deaths` distinguishes the ranks that died first from those that died as a
    consequence.
    """
    if not analysis.dead:
        return ()
    deaths = _Deaths(analysis)
    if deaths.is_end_of_job():
        return ()
    if deaths.is_program_at_fault():
        return (_program_ended(analysis, deaths.raised),)
    needed = [rank for rank in sorted(deaths.suspects()) if deaths.was_needed(rank)]
    verdicts = []
    for subject in gather(needed, analysis.job.nodes):
        advice = Advice.REPLACE_NODE if subject.kind == "node" else Advice.RESTART_WORKER
        since_s = min(analysis.moved_s(rank) for rank in subject.ranks)
        evidence = _death_evidence(analysis, deaths, subject)
        verdicts.append(_verdict(subject, Syndrome.DEAD_PROCESS, since_s, evidence, 1.0, advice))
    return tuple(verdicts)


def _death_evidence(analysis: _HangAnalysis, deaths: _Deaths, subject: Subject) -> list[str]:
    evidence = []
    for rank in subject.ranks[:4]:
        end = "was ended by an exception" if rank in deaths.raised else "is gone"
        step = analysis.rows[rank]["step"]
        evidence.append(f"process of rank {rank} {end}; its last record is of step {step}")
    evidence += [
        f"it was in {name}"
        for rank in subject.ranks[:4]
        for name in deaths.open_operations[rank][:1]
    ]
    waiters = sorted({waiter for rank in subject.ranks for waiter in deaths.waiters.get(rank, ())})
    if waiters:
        evidence.append(f"{len(waiters)} ranks wait for it, rank {waiters[0]} among them")
    if deaths.witnesses:
        evidence.append(
            f"operations of {len(deaths.witnesses)} ranks failed, "
            f"of rank {min(deaths.witnesses)} among them"
        )
    return evidence


def _program_ended(analysis: _HangAnalysis, raised: Collection[int]) -> Verdict:
    """Return the verdict that the program itself is at fault, on the whole job."""
    step = max(int(analysis.rows[rank]["step"]) for rank in raised)
    sentence = (
        f"exceptions ended {len(raised)} of {len(analysis.rows)} processes, the last in step {step}"
    )
    since_s = min(analysis.moved_s(rank) for rank in raised)
    return _verdict(
        Subject("job", ()), Syndrome.DEAD_PROCESS, since_s, (sentence,), 1.0, Advice.ALERT
    )


def _mismatch_verdicts(analysis: _HangAnalysis, chosen: np.ndarray) -> tuple[Verdict, ...]:
    """Return verdicts on ranks whose call differs, in the communicators of the chosen frontiers."""
    frontiers = analysis.job.frontiers
    is_collective = frontiers["direction"] == 0
    verdicts = []
    for identity in np.unique(frontiers["communicator"][chosen & is_collective]).tolist():
        mismatch = first_mismatch(
            frontiers[is_collective & (frontiers["communicator"] == identity)]
        )
        if mismatch is None:
            continue
        minority = mismatch.minority
        subjects = (
            gather(minority, analysis.job.nodes)
            if minority
            else (group_subject(mismatch.ranks, analysis.job.nodes),)
        )
        communicator = analysis.job.communicators.get(identity)
        evidence = (
            f"ranks call different operations in {communicator.name if communicator else identity}",
            *mismatch.describe_calls(),
        )
        since_s = min(analysis.moved_s(rank) for rank in mismatch.ranks if rank in analysis.rows)
        confidence = 0.95 if minority else 0.6
        for subject in subjects:
            verdicts.append(
                _verdict(subject, Syndrome.MISMATCH, since_s, evidence, confidence, Advice.ALERT)
            )
    return tuple(verdicts)


def _absent_ranks(analysis: _HangAnalysis, waits: Waits) -> list[Verdict]:
    """Return verdicts on ranks that others wait for and that do not wait themselves.

    Only those that have stood still for too long.
    """
    by_syndrome: dict[Syndrome, dict[int, tuple[str, ...]]] = {}
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
        waiters_sentence = f"{len(present)} ranks wait for it directly, for up to {longest_s:.1f} s"
        if row is None or analysis.unread_s[rank] > analysis.thresholds.stale_s:
            unread_s = analysis.unread_s.get(rank, math.inf)
            if row is not None and min(unread_s, longest_s) > analysis.thresholds.silent_s:
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
        evidence = (
            f"rank {rank} {state}; it last made progress {analysis.idle_s[rank]:.1f} s ago, "
            f"in step {row['step']}",
            waiters_sentence,
        )
        syndrome = Syndrome.NON_COMMUNICATION_HANG
        if not stopped and row["phase"] == Phase.DATA_WAIT:
            syndrome = Syndrome.DATA_STALL
            evidence = (
                f"rank {rank} has waited for data for {row['read_at_s'] - row['phase_s']:.1f} s",
                waiters_sentence,
            )
        elif not stopped and row["phase"] == Phase.CHECKPOINT:
            syndrome = Syndrome.CHECKPOINT_STALL
            evidence = (
                f"rank {rank} has been in a checkpoint for "
                f"{row['read_at_s'] - row['phase_s']:.1f} s",
                waiters_sentence,
            )
        by_syndrome.setdefault(syndrome, {})[rank] = evidence
    verdicts = []
    for syndrome, evidence_of in by_syndrome.items():
        is_unread = syndrome is Syndrome.DEAD_PROCESS
        for subject in gather(evidence_of, analysis.job.nodes):
            ranks = [rank for rank in subject.ranks if rank in evidence_of]
            lines = [line for rank in subject.ranks[:4] for line in evidence_of.get(rank, ())]
            advice = Advice.RESTART_WORKER
            if is_unread:
                advice = Advice.ALERT
            elif subject.kind == "node":
                advice = Advice.REPLACE_NODE
            since_s = min(analysis.moved_s(rank) for rank in ranks)
            confidence = 0.5 if is_unread else 0.95
            verdicts.append(_verdict(subject, syndrome, since_s, lines, confidence, advice))
    return verdicts


def _stuck_operations(analysis: _HangAnalysis, waits: Waits) -> list[Verdict]:
    """Return verdicts on operations that all ranks have begun and that do not end."""
    verdicts: dict[tuple[Subject, Syndrome], Verdict] = {}
    for operation in waits.stuck:
        waited_s = analysis.waited_at(operation)
        members = [rank for rank in operation.waiting if rank in waited_s]
        if not members:
            continue
        patience_s = max(analysis.patience_of_s(rank) for rank in members)
        if (
            min(waited_s.values()) < patience_s
            or max(analysis.idle_s[rank] for rank in members) < patience_s
        ):
            continue
        subject, syndrome, confidence, reasons = _blame(analysis, operation, members)
        since_s = max(analysis.moved_s(rank) for rank in members)
        evidence = (
            f"all ranks have begun {analysis.name(operation)}, "
            f"the last {min(waited_s.values()):.1f} s ago",
            *reasons,
        )
        advice = Advice.ALERT if subject.kind in ("group", "link") else Advice.RESTART_WORKER
        verdicts.setdefault(
            (subject, syndrome), _verdict(subject, syndrome, since_s, evidence, confidence, advice)
        )
    return list(verdicts.values())


def _blame(
    analysis: _HangAnalysis, operation: OpenOperation, members: Collection[int]
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
    rows = analysis.job.frontiers
    rows = rows[(rows["communicator"] == operation.communicator) & (rows["direction"] == 0)]
    # The rank with the fewest launches (C4D): the others have called more operations,
    # asynchronously, and this rank stopped calling.
    fewest = rows["rank"][rows["entered"] < rows["entered"].max()].tolist()
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


def _deadlock(analysis: _HangAnalysis, cycle: tuple[int, ...]) -> list[Verdict]:
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
            return [
                _verdict(
                    subject,
                    Syndrome.NON_COMMUNICATION_HANG,
                    since_s,
                    evidence,
                    0.6,
                    Advice.RESTART_WORKER,
                )
            ]
    subject = group_subject(cycle, analysis.job.nodes)
    return [
        _verdict(
            subject, Syndrome.MISMATCH, since_s, evidence, 0.6 if nonblocking else 0.9, Advice.ALERT
        )
    ]
