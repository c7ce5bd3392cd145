"""Computes what there is to know about one standstill: ages, patience, pauses, open operations.

All ages are of one rank by its own node's clock, from its last progress to the time of reading.
Clocks of different nodes therefore need not agree, and a reader that is behind sees young ages
rather than old ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from keepstep.monitor.diagnosis.activity import QuietProcess
from keepstep.monitor.diagnosis.lateness import Lateness
from keepstep.monitor.diagnosis.pauses import PauseKind, kind_of_pause
from keepstep.monitor.diagnosis.proof import Pause
from keepstep.monitor.diagnosis.subjects import group_name
from keepstep.monitor.diagnosis.thresholds import HangThresholds
from keepstep.monitor.diagnosis.waits import OpenOperation
from keepstep.monitor.records import Communicator
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
        started: whether some rank has gone on to a later step since reading began.
        pauses: the longest pauses that ended by themselves.
        quiet: since when the ranks' processes have done nothing, where that is known.
        lateness: of messages and collectives in recent steps.
    """

    ranks: np.ndarray
    frontiers: np.ndarray
    communicators: Mapping[int, Communicator]
    nodes: Mapping[int, str]
    unread_s: np.ndarray
    stopped: frozenset[int]
    step_s: float
    started: bool = True
    pauses: Mapping[PauseKind, float] = field(default_factory=dict)
    quiet: Mapping[int, QuietProcess] = field(default_factory=dict)
    lateness: Lateness = field(default_factory=Lateness)


class FrontierIndex:
    """Finds the frontiers of a communicator without looking at those of others.

    A job has about as many communicators and open operations as ranks: looking at all frontiers
    for each of them would take the square of the ranks.
    """

    def __init__(self, frontiers: np.ndarray) -> None:
        communicators = frontiers["communicator"]
        self._order = np.argsort(communicators, kind="stable")
        self._sorted = communicators[self._order]

    def places_of(self, communicator: int) -> np.ndarray:
        """Return the positions of a communicator's frontiers, ascending."""
        key = np.asarray(communicator, self._sorted.dtype)
        begin = np.searchsorted(self._sorted, key, side="left")
        end = np.searchsorted(self._sorted, key, side="right")
        places: np.ndarray = self._order[begin:end]
        return places


class Standstill:
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
        is_alive = (ranks["rank"][rank_index] == frontiers["rank"]) & ranks["alive"][rank_index]
        self.is_waiting = is_alive & (frontiers["open"] > 0)
        self.waited_s = np.where(
            self.is_waiting, ranks["read_at_s"][rank_index] - frontiers["open_s"], 0.0
        )
        self.is_queued = is_alive & (frontiers["queued"] > 0)
        self.queued_s = np.where(
            self.is_queued, ranks["read_at_s"][rank_index] - frontiers["queued_s"], 0.0
        )
        self.dead = {rank for rank, row in self.rows.items() if not row["alive"]}
        self.longest_wait_s = max(
            float(np.max(self.waited_s, initial=0.0)), float(np.max(self.queued_s, initial=0.0))
        )
        self.base_patience_s = thresholds.patience_s(job.step_s)

    def patience_of_s(self, rank: int) -> float:
        """Return how long this rank may stand still before that is reported, given what it does."""
        thresholds, kind = self.thresholds, self.kind_of_pause(rank)
        patience = self.base_patience_s
        if self.job.step_s <= 0:
            least_s = thresholds.warmup_s if self.job.started else thresholds.first_step_s
            patience = max(patience, least_s)
        if kind is PauseKind.STEP:
            return patience
        if kind is PauseKind.CHECKPOINT:
            patience = max(patience, thresholds.checkpoint_s)
        # An evaluation that loads batches looks like the beginning of a step.
        elif kind is not PauseKind.DATA or self._is_between_steps(rank):
            patience = max(patience, thresholds.between_steps_s)
        return max(patience, thresholds.learnt_ratio * self.job.pauses.get(kind, 0.0))

    def patience_in_s(self, operation: OpenOperation) -> float:
        """Return how long an operation may take that all ranks have begun, by recent ones."""
        lateness = self.job.lateness
        if operation.pair is not None:
            late_s = lateness.among_s(operation.pair)
        else:
            communicator = self.job.communicators.get(operation.communicator)
            late_s = max(
                lateness.in_communicator_s(operation.communicator),
                lateness.among_s(communicator.ranks) if communicator else 0.0,
            )
        return self.thresholds.late_ratio * late_s

    def kind_of_pause(self, rank: int) -> PauseKind:
        """Return what a rank does while it stands still."""
        return kind_of_pause(self.rows[rank], is_in_step=self.is_in_step(rank))

    def pause_of(self, rank: int) -> Pause:
        """Return what is known of a rank that stands still."""
        kind, quiet = self.kind_of_pause(rank), self.job.quiet.get(rank)
        row, stopped = self.rows[rank], rank in self.job.stopped
        is_known = (
            quiet is not None
            and row["read_at_s"] - quiet.sample.at_s <= self.thresholds.activity_age_s
        )
        return Pause(
            kind=kind,
            idle_s=self.idle_s[rank],
            patience_s=self.base_patience_s if stopped else self.patience_of_s(rank),
            learnt_s=self.job.pauses.get(kind, 0.0),
            quiet_s=quiet.quiet_s if quiet is not None and is_known else None,
            stopped=stopped,
        )

    def _is_between_steps(self, rank: int) -> bool:
        return bool(self.rows[rank]["marks_steps"]) and not self.is_in_step(rank)

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
        places = self._of(operation)
        places = places[self.is_waiting[places]]
        return {
            int(self.job.frontiers["rank"][place]): float(self.waited_s[place]) for place in places
        }

    def oldest_queued(self, rank: int) -> tuple[str, float] | None:
        """Return what a rank called first of what its device has not begun, and for how long.

        Returns:
            the name of the operation for people, and seconds; None if there is none.
        """
        place = self._oldest_queued_places.get(rank)
        if place is None:
            return None
        row = self.job.frontiers[place]
        name = group_name(self.job.communicators, int(row["communicator"]))
        kind = "message" if row["direction"] else "operation"
        return f"{kind} {int(row['queued'])} of {name}", float(self.queued_s[place])

    @cached_property
    def _oldest_queued_places(self) -> Mapping[int, int]:
        oldest: dict[int, int] = {}
        for place in np.flatnonzero(self.is_queued).tolist():
            rank = int(self.job.frontiers["rank"][place])
            if rank not in oldest or self.queued_s[place] > self.queued_s[oldest[rank]]:
                oldest[rank] = place
        return oldest

    def payloads(self, operation: OpenOperation) -> dict[int, int]:
        """Return the payload of each rank that has an operation open, in bytes."""
        frontiers = self.job.frontiers
        return {
            int(frontiers["rank"][place]): int(frontiers["open_nbytes"][place])
            for place in self._of(operation)
        }

    def collectives_of(self, communicator: int) -> np.ndarray:
        """Return the positions of the frontiers of a communicator's collectives."""
        places = self._frontiers_by_communicator.places_of(communicator)
        collectives: np.ndarray = places[self.job.frontiers["direction"][places] == 0]
        return collectives

    @cached_property
    def longest_wait_of_s(self) -> Mapping[int, float]:
        """How long each rank that waits has waited for the longest, in seconds."""
        longest: dict[int, float] = {}
        places = np.flatnonzero(self.is_waiting)
        ranks, waited_s = self.job.frontiers["rank"][places], self.waited_s[places]
        for rank, wait_s in zip(ranks.tolist(), waited_s.tolist(), strict=True):
            longest[rank] = max(wait_s, longest.get(rank, 0.0))
        return longest

    @cached_property
    def _frontiers_by_communicator(self) -> FrontierIndex:
        return FrontierIndex(self.job.frontiers)

    def _of(self, operation: OpenOperation) -> np.ndarray:
        """Return the positions of the frontiers that have an operation open."""
        places = self._frontiers_by_communicator.places_of(operation.communicator)
        rows = self.job.frontiers[places]
        is_call = rows["open"] == operation.number
        if operation.pair is None:
            is_call &= rows["direction"] == 0
        else:
            is_call &= (
                (rows["direction"] > 0)
                & np.isin(rows["rank"], operation.pair)
                & np.isin(rows["peer"], operation.pair)
            )
        calls: np.ndarray = places[is_call]
        return calls

    def name(self, operation: OpenOperation) -> str:
        """Return an operation's name for people."""
        if operation.pair is not None:
            return (
                f"message {operation.number} from rank {operation.pair[0]} to {operation.pair[1]}"
            )
        name = group_name(self.job.communicators, operation.communicator)
        return f"operation {operation.number} of {name}"

    def moved_s(self, rank: int) -> float:
        """Return when a rank last made progress, by the job's clock."""
        row = self.rows[rank]
        moved_s = row["moved_s"] if np.isfinite(row["moved_s"]) else row["read_at_s"]
        return float(moved_s + row["offset_s"])


def hang_verdict(
    subject: Subject,
    syndrome: Syndrome,
    since_s: float,
    evidence: Iterable[str],
    confidence: float,
    advice: Advice,
) -> Verdict:
    """Return a verdict on a standstill, which costs all time."""
    return Verdict(
        subject=subject,
        syndrome=syndrome,
        since_s=since_s,
        evidence=tuple(evidence),
        confidence=confidence,
        cost_s_per_step=math.inf,
        advice=advice,
    )
