"""Runs diagnosis over the digests that wait for it, and describes the outcome of a round."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from keepstep.monitor.contracts import Diagnosis, Renewable
from keepstep.monitor.diagnosis.metrics import NodeMetrics
from keepstep.monitor.diagnosis.tables import EMPTY, Digest
from keepstep.monitor.records import Communicator
from keepstep.monitor.telemetry.record_history import RankState
from keepstep.monitor.verdicts import Verdict
from keepstep.monitor.watch.component_faults import ComponentFaults
from keepstep.monitor.watch.verdict_log import VerdictChanges
from keepstep.monitor.watch.verdict_notes import NoteKind, VerdictNote

_MAX_EVIDENCE = 5
"""The coordinator keeps six sentences; the last one is the note."""


@dataclass(frozen=True, slots=True)
class DiagnosisRound:
    """The outcome of one diagnosis.

    Args:
        verdicts: all that hold.
        now_s: the job's clock.
        changes: of the log.
        generation: the job's newest that any living rank has recorded; if no rank lives, any rank.
        nodes: node of each rank of that generation.
        step_s: the job's step time; 0.0 if not known.
        notes: those of people that are in force.
    """

    verdicts: tuple[Verdict, ...]
    now_s: float
    changes: VerdictChanges
    generation: int = 0
    nodes: Mapping[int, str] = field(default_factory=dict)
    step_s: float = 0.0
    notes: tuple[VerdictNote, ...] = ()

    @property
    def current(self) -> tuple[Verdict, ...]:
        """The verdicts about ranks of the newest generation only.

        While a generation begins, some ranks have recorded it and others have not yet: those that
        lag behind are in transition, not faulty.
        """
        return tuple(
            verdict for verdict in self.verdicts if self.nodes.keys() >= set(verdict.subject.ranks)
        )

    def noted(self, kind: NoteKind) -> DiagnosisRound:
        """Return the round with only those verdicts that people have noted so."""
        return replace(self, verdicts=tuple(v for v in self.verdicts if self._kind(v) is kind))

    def without_muted(self) -> DiagnosisRound:
        """Return the round without the verdicts about which nothing is to be done."""
        unmuted = tuple(v for v in self.verdicts if self._kind(v) is not NoteKind.MUTED)
        return replace(self, verdicts=unmuted)

    def with_remarks(self) -> DiagnosisRound:
        """Return the round with the text of each note after the evidence of its verdict."""
        texts = {(note.subject, note.syndrome): note.text for note in self.notes}
        verdicts = (
            (verdict, texts.get((verdict.subject, verdict.syndrome))) for verdict in self.verdicts
        )
        return replace(
            self,
            verdicts=tuple(
                verdict
                if text is None
                else replace(verdict, evidence=(*verdict.evidence[:_MAX_EVIDENCE], text))
                for verdict, text in verdicts
            ),
        )

    def is_muted(self, verdict: Verdict) -> bool:
        """Whether people have muted this verdict, so nobody is to be alerted."""
        return self._kind(verdict) is NoteKind.MUTED

    def _kind(self, verdict: Verdict) -> NoteKind | None:
        return next((note.kind for note in self.notes if note.is_about(verdict)), None)


class DiagnosisRunner:
    """Holds a diagnosis, the state that it returned last, and the digests that wait for it."""

    def __init__(self, diagnosis: Diagnosis, faults: ComponentFaults) -> None:
        self._diagnosis = diagnosis
        self._faults = faults
        self._waiting: list[Digest] = []
        self._past: Any = None
        self._processes: frozenset[tuple[int, str]] = frozenset()

    def add(self, digest: Digest) -> None:
        """Append a digest for the next run."""
        self._waiting.append(digest)

    def clear(self) -> None:
        """Drop the waiting digests."""
        self._waiting.clear()

    def run(
        self,
        states: Collection[RankState],
        communicators: Mapping[int, Communicator],
        metrics: Mapping[str, NodeMetrics],
        now_s: float,
    ) -> Sequence[Verdict] | None:
        """Return the verdicts that hold after all waiting digests; None if diagnosis failed."""
        processes = frozenset((state.rank, state.incarnation) for state in states)
        if processes != self._processes:
            renewable = isinstance(self._past, Renewable)
            self._processes, self._past = processes, self._past.renewed() if renewable else None
        nodes = {state.rank: state.node for state in states}
        # Without a digest time still passes: ranks may have been silent for too long by now.
        digests, self._waiting = self._waiting or [EMPTY], []
        verdicts: Sequence[Verdict] | None = None
        for digest in digests:
            call = partial(
                self._diagnosis, digest, communicators, nodes, metrics, self._past, now_s
            )
            concluded = self._faults.guard("diagnosis", call, None)
            if concluded is not None:
                self._past, verdicts = concluded
        return verdicts


def newest_generation(states: Collection[RankState]) -> int:
    """Return the newest generation of the living ranks; of all ranks if none lives.

    An earlier run that was killed leaves rings, whose generation may be higher.
    """
    living = [state.generation for state in states if state.is_alive]
    return max(living or (state.generation for state in states), default=0)
