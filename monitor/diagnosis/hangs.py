"""Hangs: a job of which nothing moves any more, and the rank, link or communicator at the root of it.

The graph of `keepstep.monitor.diagnosis.waits` says where waiting ends; this decides whether it has lasted too long, and what to call it. All ages
are of one rank by its own node's clock, from its last sign of life to the moment of reading; so clocks need not agree, and a reader that
is behind sees young ages rather than old ones. A rank whose records were not read lately is never blamed for what it did not tell.

Who stands still rightly is given longer: before the first step, within a checkpoint phase, in an evaluation and between steps (see
`HangThresholds`).
A rank that keeps moving is never a root, however long others wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.diagnosis.mismatches import first_mismatch
from keepstep.monitor.diagnosis.subjects import gather, group_subject, link_subject, rank_subject
from keepstep.monitor.diagnosis.thresholds import HangThresholds
from keepstep.monitor.diagnosis.waits import OpenOperation, Waits, wait_for
from keepstep.monitor.records import Communicator, Ending, Phase
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict

INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class HangInputs:
    """What hangs are judged from.

    Args:
        ranks: dtype RANK, ascending by rank.
        frontiers: dtype FRONTIER.
        communicators: of the job.
        nodes: each rank's node.
        unread_s: for each of `ranks`, how long ago its records were read anew.
        stopped: ranks whose process the kernel has stopped (SIGSTOP, a debugger).
        step_s: the job's own step time; 0.0 if not known.
    """

    ranks: np.ndarray
    frontiers: np.ndarray
    communicators: Mapping[int, Communicator]
    nodes: Mapping[int, str]
    unread_s: np.ndarray
    stopped: frozenset[int]
    step_s: float


def find_hangs(job: HangInputs, thresholds: HangThresholds) -> tuple[Verdict, ...]:
    """Return a verdict for each root of a standstill; none while nothing waits too long.

    The graph is built only if some rank has waited a share of the patience, so a healthy job costs no more than a look.
    """
    if not len(job.ranks):
        return ()
    view = _HangAnalysis(job, thresholds)
    dead = _dead(view)
    if dead:
        # Backends end processes whose collectives do not fit: then that is the root, and the deaths follow from it.
        partings = _mismatch_verdicts(view, np.ones(len(job.frontiers), bool))
        if partings:
            return partings
    if view.longest_wait_s < thresholds.waiter_share * view.plain_s:
        return dead
    partings = _mismatch_verdicts(
        view, view.waits & (view.waited_s >= thresholds.waiter_share * view.plain_s)
    )
    if partings:
        return dead + partings
    silent = {rank for rank, row in view.rows.items() if not row["alive"]} | job.stopped
    silent |= {rank for rank, unread in view.unread_s.items() if unread > thresholds.stale_s}
    waits = wait_for(job.frontiers, job.communicators, silent)
    found = [*dead, *_absent(view, waits), *_stuck(view, waits)]
    if not found and waits.cycle:
        found.extend(_deadlock(view, waits.cycle))
    return tuple(found)


class _HangAnalysis:
    """Ages and patience of one standstill, worked out once."""

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
        at = np.minimum(np.searchsorted(ranks["rank"], frontiers["rank"]), len(ranks) - 1)
        self.waits = (
            (frontiers["open"] > 0) & (ranks["rank"][at] == frontiers["rank"]) & ranks["alive"][at]
        )
        self.waited_s = np.where(self.waits, ranks["read_at_s"][at] - frontiers["open_s"], 0.0)
        self.longest_wait_s = float(np.max(self.waited_s, initial=0.0))
        self.started = bool((ranks["step"] >= 2).any())
        self.plain_s = thresholds.patience_s(job.step_s)

    def patience_of_s(self, rank: int) -> float:
        """Return how long this rank may stand still, given what it is at."""
        row = self.rows[rank]
        patience = self.plain_s if self.started else self.thresholds.first_step_s
        if row["phase"] == Phase.CHECKPOINT:
            return max(patience, self.thresholds.checkpoint_s)
        # An evaluation that loads batches seems to begin a step.
        if row["phase"] == Phase.EVALUATION or (row["marks_steps"] and not self.is_in_step(rank)):
            return max(patience, self.thresholds.between_steps_s)
        return patience

    def is_in_step(self, rank: int) -> bool:
        """Return whether a rank is in a step.

        A stage of a pipeline receives before its model runs, which is when its step is seen to begin: so is who has heard from a rank that is
        in one as late. A loss that is sent around between steps comes from one that is not.
        """
        row = self.rows[rank]
        sender = self.rows.get(int(row["heard_from"]))
        return bool(row["in_step"]) or (
            sender is not None and bool(sender["in_step"]) and sender["step"] >= row["step"]
        )

    def waited_at(self, operation: OpenOperation) -> dict[int, float]:
        """Return how long each rank has waited in an operation, in seconds."""
        rows = np.flatnonzero(self._of(operation) & self.waits)
        return {int(self.job.frontiers["rank"][row]): float(self.waited_s[row]) for row in rows}

    def payloads(self, operation: OpenOperation) -> dict[int, int]:
        """Return the payload of each rank that waits in an operation, in bytes."""
        rows = np.flatnonzero(self._of(operation))
        return {
            int(self.job.frontiers["rank"][row]): int(self.job.frontiers["open_nbytes"][row])
            for row in rows
        }

    def _of(self, operation: OpenOperation) -> np.ndarray:
        rows = self.job.frontiers
        chosen: np.ndarray = (rows["communicator"] == operation.communicator) & (
            rows["open"] == operation.number
        )
        if operation.pair is None:
            chosen &= rows["direction"] == 0
        else:
            chosen &= (
                (rows["direction"] > 0)
                & np.isin(rows["rank"], operation.pair)
                & np.isin(rows["peer"], operation.pair)
            )
        return chosen

    def name(self, operation: OpenOperation) -> str:
        """Return for people what an operation is."""
        if operation.pair is not None:
            return (
                f"message {operation.number} from rank {operation.pair[0]} to {operation.pair[1]}"
            )
        known = self.job.communicators.get(operation.communicator)
        return f"operation {operation.number} of {known.name if known else operation.communicator}"

    def moved_s(self, rank: int) -> float:
        """Return when a rank last moved, by the job's clock."""
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
    return Verdict(subject, syndrome, since_s, tuple(evidence), confidence, INFINITE, advice)


def _dead(view: _HangAnalysis) -> tuple[Verdict, ...]:
    """Name processes that are gone and were still needed.

    At the end of a job processes go one after another, saying so, and nobody waits for them: that is no death. Who left because its operations
    failed died of another's death, and so did who could still say that it ends while in an operation, if others could not; who said so and
    was in no step had done its work. Who says that an exception of its own ended it comes before all who said nothing, for launchers kill
    the others then; where most say so, it is the program. If all are gone otherwise and nobody's operations failed, someone ended the job
    as a whole.
    """
    dead = {rank for rank, row in view.rows.items() if not row["alive"]}
    if not dead:
        return ()
    alive = {rank for rank, row in view.rows.items() if row["alive"]}
    witnesses = {
        rank for rank, row in view.rows.items() if row["failed"] or row["ending"] == Ending.FAILED
    }
    raised = {rank for rank in dead - witnesses if view.rows[rank]["ending"] == Ending.RAISED}
    if not alive and not witnesses and not raised:
        return ()
    waits = wait_for(view.job.frontiers, view.job.communicators, dead)
    missed = {
        rank: [waiter for waiter in waiters if waiter in alive]
        for rank, waiters in waits.absent.items()
        if rank in dead
    }
    open_of: dict[int, list[str]] = {rank: [] for rank in dead}
    for operation in waits.operations:
        for rank in operation.waiting:
            if rank in dead:
                open_of[rank].append(view.name(operation))
    killed = {rank for rank in dead if view.rows[rank]["ending"] == Ending.NONE}
    victims = {rank for rank in dead - killed if open_of[rank]} if killed else set()
    if len(raised) > 1 and 2 * len(raised) > len(view.rows):
        return (_program_ended(view, raised),)
    needed = []
    for rank in sorted(raised or dead - witnesses - victims or dead - witnesses or dead):
        waited = view.waited_s[
            view.waits & np.isin(view.job.frontiers["rank"], missed.get(rank, []))
        ]
        is_missed = (
            bool(missed.get(rank)) and float(waited.max(initial=0.0)) >= view.thresholds.dead_s
        )
        row = view.rows[rank]
        had_work = (
            view.is_in_step(rank) or not row["marks_steps"] or row["ending"] != Ending.FINISHED
        )
        if rank in raised or is_missed or open_of[rank] or (witnesses - {rank} and had_work):
            needed.append(rank)
    verdicts = []
    for subject in gather(needed, view.job.nodes):
        evidence = [
            f"process of rank {rank} {'was ended by an exception' if rank in raised else 'is gone'}, last heard of in step"
            f" {view.rows[rank]['step']}"
            for rank in subject.ranks[:4]
        ]
        evidence += [
            f"it was in {name}" for rank in subject.ranks[:4] for name in open_of[rank][:1]
        ]
        waiters = sorted({waiter for rank in subject.ranks for waiter in missed.get(rank, ())})
        if waiters:
            evidence.append(f"{len(waiters)} ranks wait for it, rank {waiters[0]} among them")
        if witnesses:
            evidence.append(
                f"operations of {len(witnesses)} ranks failed, of rank {min(witnesses)} among them"
            )
        advice = Advice.REPLACE_NODE if subject.kind == "node" else Advice.RESTART_WORKER
        since_s = min(view.moved_s(rank) for rank in subject.ranks)
        verdicts.append(_verdict(subject, Syndrome.DEAD_PROCESS, since_s, evidence, 1.0, advice))
    return tuple(verdicts)


def _program_ended(view: _HangAnalysis, raised: Collection[int]) -> Verdict:
    step = max(int(view.rows[rank]["step"]) for rank in raised)
    told = f"exceptions ended {len(raised)} of {len(view.rows)} processes, the last in step {step}"
    since_s = min(view.moved_s(rank) for rank in raised)
    return _verdict(Subject("job", ()), Syndrome.DEAD_PROCESS, since_s, (told,), 1.0, Advice.ALERT)


def _mismatch_verdicts(view: _HangAnalysis, chosen: np.ndarray) -> tuple[Verdict, ...]:
    """Name who called something else than the others, in the communicators of the chosen frontiers."""
    frontiers = view.job.frontiers
    collective = frontiers["direction"] == 0
    verdicts = []
    for identity in np.unique(frontiers["communicator"][chosen & collective]).tolist():
        parting = first_mismatch(frontiers[collective & (frontiers["communicator"] == identity)])
        if parting is None:
            continue
        culprits = parting.minority
        subjects = (
            gather(culprits, view.job.nodes)
            if culprits
            else (group_subject(parting.ranks, view.job.nodes),)
        )
        known = view.job.communicators.get(identity)
        evidence = (
            f"ranks call different things in {known.name if known else identity}",
            *parting.told(),
        )
        since_s = min(view.moved_s(rank) for rank in parting.ranks if rank in view.rows)
        confidence = 0.95 if culprits else 0.6
        for subject in subjects:
            verdicts.append(
                _verdict(subject, Syndrome.MISMATCH, since_s, evidence, confidence, Advice.ALERT)
            )
    return tuple(verdicts)


def _absent(view: _HangAnalysis, waits: Waits) -> list[Verdict]:
    """Name ranks that others wait for, that wait for nobody, and that have stood still for too long."""
    by_syndrome: dict[Syndrome, dict[int, tuple[str, ...]]] = {}
    for rank, waiters in waits.absent.items():
        row = view.rows.get(rank)
        if row is not None and not row["alive"]:
            continue
        present = [
            waiter for waiter in waiters if waiter in view.rows and view.rows[waiter]["alive"]
        ]
        longest_s = max((view.idle_s[waiter] for waiter in present), default=0.0)
        told = f"{len(present)} ranks wait for it at once, for up to {longest_s:.1f} s"
        if row is None or view.unread_s[rank] > view.thresholds.stale_s:
            unread_s = view.unread_s.get(rank, INFINITE)
            if row is not None and min(unread_s, longest_s) > view.thresholds.silent_s:
                evidence = (f"no records of rank {rank} could be read for {unread_s:.0f} s", told)
                by_syndrome.setdefault(Syndrome.DEAD_PROCESS, {})[rank] = evidence
            continue
        stopped = rank in view.job.stopped
        patience_s = view.plain_s if stopped else view.patience_of_s(rank)
        if view.idle_s[rank] < patience_s or longest_s < view.thresholds.waiter_share * patience_s:
            continue
        at = "is stopped by a signal" if stopped else "never arrived"
        evidence = (
            f"rank {rank} {at}; its last sign of life is {view.idle_s[rank]:.1f} s old, in step {row['step']}",
            told,
        )
        syndrome = Syndrome.NON_COMMUNICATION_HANG
        if not stopped and row["phase"] == Phase.DATA_WAIT:
            syndrome = Syndrome.DATA_STALL
            evidence = (
                f"rank {rank} waits for data since {row['read_at_s'] - row['phase_s']:.1f} s",
                told,
            )
        elif not stopped and row["phase"] == Phase.CHECKPOINT:
            syndrome = Syndrome.CHECKPOINT_STALL
            evidence = (
                f"rank {rank} is in a checkpoint since {row['read_at_s'] - row['phase_s']:.1f} s",
                told,
            )
        by_syndrome.setdefault(syndrome, {})[rank] = evidence
    verdicts = []
    for syndrome, found in by_syndrome.items():
        silent = syndrome is Syndrome.DEAD_PROCESS
        for subject in gather(found, view.job.nodes):
            lines = [line for rank in subject.ranks[:4] if rank in found for line in found[rank]]
            advice = Advice.RESTART_WORKER
            if silent:
                advice = Advice.ALERT
            elif subject.kind == "node":
                advice = Advice.REPLACE_NODE
            since_s = min(view.moved_s(rank) for rank in subject.ranks if rank in found)
            verdicts.append(
                _verdict(subject, syndrome, since_s, lines, 0.5 if silent else 0.95, advice)
            )
    return verdicts


def _stuck(view: _HangAnalysis, waits: Waits) -> list[Verdict]:
    """Name operations that all have begun and that do not end."""
    verdicts: dict[tuple[Subject, Syndrome], Verdict] = {}
    for operation in waits.stuck:
        waited_s = view.waited_at(operation)
        members = [rank for rank in operation.waiting if rank in waited_s]
        if not members:
            continue
        patience_s = max(view.patience_of_s(rank) for rank in members)
        if (
            min(waited_s.values()) < patience_s
            or max(view.idle_s[rank] for rank in members) < patience_s
        ):
            continue
        subject, syndrome, confidence, more = _blame(view, operation, members)
        since_s = max(view.moved_s(rank) for rank in members)
        evidence = (
            f"all ranks have begun {view.name(operation)}, the last {min(waited_s.values()):.1f} s ago",
            *more,
        )
        advice = Advice.ALERT if subject.kind in ("group", "link") else Advice.RESTART_WORKER
        verdicts.setdefault(
            (subject, syndrome), _verdict(subject, syndrome, since_s, evidence, confidence, advice)
        )
    return list(verdicts.values())


def _blame(
    view: _HangAnalysis, operation: OpenOperation, members: Collection[int]
) -> tuple[Subject, Syndrome, float, tuple[str, ...]]:
    """Return who is at fault where all have begun an operation, with what, how surely, and why."""
    nodes = view.job.nodes
    stopped = sorted(view.job.stopped & set(members))
    if stopped:
        told = tuple(f"the process of rank {rank} is stopped by a signal" for rank in stopped[:4])
        subjects = gather(stopped, nodes)
        subject = subjects[0] if len(subjects) == 1 else group_subject(stopped, nodes)
        return subject, Syndrome.NON_COMMUNICATION_HANG, 0.95, told
    payloads = view.payloads(operation)
    if len(set(payloads.values())) > 1:
        told = (
            f"payloads differ: {', '.join(f'rank {rank} {nbytes}' for rank, nbytes in sorted(payloads.items())[:6])}",
        )
        return group_subject(payloads, nodes), Syndrome.MISMATCH, 0.7, told
    if operation.pair is not None:
        return link_subject(*operation.pair, nodes), Syndrome.COMMUNICATION_HANG, 0.8, ()
    known = view.job.communicators[operation.communicator].ranks
    rows = view.job.frontiers
    rows = rows[(rows["communicator"] == operation.communicator) & (rows["direction"] == 0)]
    # The rank with the fewest launches (C4D): others have called more, asynchronously, and this one stopped calling.
    fewest = rows["rank"][rows["entered"] < rows["entered"].max()].tolist()
    if 0 < len(fewest) <= (len(known) - 1) // 2:
        subjects = gather(fewest, nodes)
        told = (
            f"ranks {', '.join(map(str, fewest[:6]))} have called fewer operations than the others",
        )
        subject = subjects[0] if len(subjects) == 1 else group_subject(fewest, nodes)
        if len(members) == len(known):
            return subject, Syndrome.NON_COMMUNICATION_HANG, 0.8, told
    if len(members) <= (len(known) - 1) // 2:
        told = (f"{len(known) - len(members)} ranks have left it, {len(members)} have not",)
        return group_subject(members, nodes), Syndrome.COMMUNICATION_HANG, 0.8, told
    return group_subject(known, nodes), Syndrome.COMMUNICATION_HANG, 0.7, ()


def _deadlock(view: _HangAnalysis, cycle: tuple[int, ...]) -> list[Verdict]:
    """Name ranks that wait for each other in a circle.

    A rank in the circle that only has asynchronous operations under way may not be waiting at all: it may have posted a receive and gone
    astray in its own code. If there are such ranks, and one of them stopped clearly before all others, it is the likelier root.
    """
    idle_s = {rank: view.idle_s[rank] for rank in cycle}
    if (
        min(idle_s.values()) < view.plain_s * view.thresholds.waiter_share
        or max(idle_s.values()) < view.plain_s
    ):
        return []
    told: tuple[str, ...] = (
        f"ranks wait for each other in a circle: {' -> '.join(map(str, (*cycle, cycle[0])))}",
    )
    since_s = min(view.moved_s(rank) for rank in cycle)
    frontiers = view.job.frontiers
    blocking = set(frontiers["rank"][(frontiers["open"] > 0) & ~frontiers["asynchronous"]].tolist())
    loose = [rank for rank in cycle if rank not in blocking]
    if loose:
        first = max(loose, key=lambda rank: idle_s[rank])
        others = max((age for rank, age in idle_s.items() if rank != first), default=0.0)
        if idle_s[first] > others + view.thresholds.waiter_share * view.job.step_s:
            told = (
                *told,
                f"rank {first} has only asynchronous operations under way and stopped before the others",
            )
            subject = rank_subject(first, view.job.nodes)
            return [
                _verdict(
                    subject,
                    Syndrome.NON_COMMUNICATION_HANG,
                    since_s,
                    told,
                    0.6,
                    Advice.RESTART_WORKER,
                )
            ]
    subject = group_subject(cycle, view.job.nodes)
    return [
        _verdict(subject, Syndrome.MISMATCH, since_s, told, 0.6 if loose else 0.9, Advice.ALERT)
    ]
