"""Collects how far a node's workers are with entering a generation. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from keepstep.elastic.rendezvous.records import LoadedCheckpoint
from keepstep.elastic.worker.messages import Ready, Restored, Stepped


class PhaseReports:
    """The reports of one node's workers about one generation, by local rank."""

    def __init__(self) -> None:
        self._ready: dict[int, Ready] = {}
        self._restored: dict[int, Restored] = {}
        self._stepped: dict[int, Stepped] = {}

    def add(self, local_rank: int, report: Ready | Restored | Stepped) -> None:
        """Take note of a worker's report."""
        match report:
            case Ready():
                self._ready[local_rank] = report
            case Restored():
                self._restored[local_rank] = report
            case Stepped():
                self._stepped[local_rank] = report

    def has_entered(self, local_rank: int) -> bool:
        """Whether a worker has entered the process groups."""
        return local_rank in self._ready

    def has_stepped(self, local_rank: int) -> bool:
        """Whether a worker has completed a step."""
        return local_rank in self._stepped

    @property
    def restored_from(self) -> str:
        """Where the workers' state came from, comma-separated."""
        sources = {
            source for report in self._restored.values() for source in report.source.split(", ")
        }
        return ", ".join(sorted(sources))

    @property
    def loaded(self) -> LoadedCheckpoint | None:
        """The checkpoint that rank 0 has resumed from, with its neighbours, if it runs here."""
        found = (report.loaded for report in self._restored.values())
        return next((loaded for loaded in found if loaded is not None), None)

    def times(self, workers: int) -> Mapping[str, float]:
        """Return when the last of all workers reached each phase, as a node's record shows it.

        Args:
            workers: how many workers there are; phases that some have not reached are left out.

        Returns:
            Wall-clock seconds by phase, and under `resumed_step` the step that they went on from.
        """
        times: dict[str, float] = {}
        if not workers:
            return times
        phases: tuple[tuple[str, Mapping[int, Ready | Restored | Stepped]], ...] = (
            ("ready", self._ready),
            ("restored", self._restored),
            ("stepped", self._stepped),
        )
        for phase, reports in phases:
            if len(reports) == workers:
                times[phase] = _latest(reports.values())
        if "restored" in times:
            times["resumed_step"] = max(report.step for report in self._restored.values())
        return times


def _latest(reports: Iterable[Ready | Restored | Stepped]) -> float:
    return max(report.at_s for report in reports)
