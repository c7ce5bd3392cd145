"""Finds processes that are gone and were still needed, and which of them died first.

At the end of a job processes end one after another, record it, and no rank waits for them. When one
dies in mid-job, others follow: their operations fail, or a launcher kills them.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from keepstep.monitor.diagnosis.standstill import Standstill, hang_verdict
from keepstep.monitor.diagnosis.subjects import gather
from keepstep.monitor.diagnosis.waits import Waits, wait_for
from keepstep.monitor.records import Ending
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict


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

    def __init__(self, analysis: Standstill) -> None:
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
        longest_s = analysis.longest_wait_of_s
        return any(
            longest_s.get(waiter, 0.0) >= analysis.thresholds.dead_s
            for waiter in self.waiters.get(rank, [])
        )

    def _had_work(self, rank: int) -> bool:
        """Return whether a rank was in a step, or did not record that it had finished."""
        row = self._analysis.rows[rank]
        return bool(
            self._analysis.is_in_step(rank)
            or not row["marks_steps"]
            or row["ending"] != Ending.FINISHED
        )


def dead_processes(analysis: Standstill) -> tuple[Verdict, ...]:
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
        lines = _death_evidence(analysis, deaths, subject)
        verdicts.append(hang_verdict(subject, Syndrome.DEAD_PROCESS, since_s, lines, 1.0, advice))
    return tuple(verdicts)


def _death_evidence(analysis: Standstill, deaths: _Deaths, subject: Subject) -> list[str]:
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


def _program_ended(analysis: Standstill, raised: Collection[int]) -> Verdict:
    """Return the verdict that the program itself is at fault, on the whole job."""
    step = max(int(analysis.rows[rank]["step"]) for rank in raised)
    sentence = (
        f"exceptions ended {len(raised)} of {len(analysis.rows)} processes, the last in step {step}"
    )
    since_s = min(analysis.moved_s(rank) for rank in raised)
    return hang_verdict(
        Subject("job", ()), Syndrome.DEAD_PROCESS, since_s, (sentence,), 1.0, Advice.ALERT
    )
