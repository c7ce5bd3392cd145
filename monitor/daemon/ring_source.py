"""The rings of a job on this node, as the daemon wants them: what may have changed since the last reading, and little else.

A ring holds some 20,000 records, of which few are new half a second later. How many are looked at follows from how many came
last time and from how far back something is still under way; if it turns out to have been too few, more are read at once,
for the ring still has them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from monitor.daemon.contracts import Reading
from monitor.records import JobRecords, Kind, RankRecords
from monitor.telemetry.job_rings import JobRings
from monitor.telemetry.ring import OPERATIONS
from monitor.telemetry.ring_files import Sweeper

_LOG = logging.getLogger("keepstep.monitor")
_SWEEP_EVERY_S = 60.0
_LEAST = 128
_AHEAD = 2
"""Twice as many as came last time, for jobs do not pace themselves."""


class RingSource:
    """A `JobReader` over the job's directory, which need not exist yet. Rings whose processes died `keep_s` seconds ago are removed."""

    def __init__(self, directory: Path, *, keep_s: float = 3600.0) -> None:
        self._directory = directory
        self._rings = JobRings(directory)
        self._sweeper = Sweeper(keep_s)
        self._sweep_due_s = 0.0
        self._count = OPERATIONS
        # By incarnation and lane: the newest stamp, and the first that must be seen again.
        self._newest: dict[tuple[str, bool], int] = {}
        self._needed: dict[tuple[str, bool], int] = {}

    def read(self) -> Sequence[Reading]:
        """Return every rank's ring as it is now: all of it at first, later what may have changed."""
        now_s = time.monotonic()
        if now_s >= self._sweep_due_s:
            self._sweep_due_s = now_s + _SWEEP_EVERY_S
            try:
                self._sweeper.sweep([self._directory], now_s)
            except OSError as error:
                # A directory that is mounted to be read only.
                _LOG.debug("rings of dead processes stay in %s: %s", self._directory, error)
        job = self._rings.read(self._count)
        incarnations = self._rings.incarnations()
        if self._has_missed(job, incarnations):
            job = self._rings.read(OPERATIONS)
        self._count = self._wanted(job, incarnations)
        processes = self._rings.processes()
        communicators = tuple(job.communicators.values())
        generation = self._rings.generation()
        return [
            Reading(told, communicators, processes[rank], incarnations[rank], generation)
            for rank, told in job.ranks.items()
        ]

    def close(self) -> None:
        """Let all rings go."""
        self._rings.close()

    def _has_missed(self, job: JobRecords, incarnations: Mapping[int, str]) -> bool:
        """Return whether in some lane what was read does not reach back to what was still under way, or new, at the last reading."""
        if self._count >= OPERATIONS:
            return False
        for told in job.ranks.values():
            for operation, stamps, _ in _lanes(told):
                needed = self._needed.get((incarnations[told.rank], operation), 0)
                if len(stamps) >= self._count and int(stamps.min()) > needed:
                    return True
        return False

    def _wanted(self, job: JobRecords, incarnations: Mapping[int, str]) -> int:
        """Return how many records of each lane to look at next time, and remember where this reading ended."""
        wanted = _LEAST
        newest_of: dict[tuple[str, bool], int] = {}
        self._needed = {}
        for told in job.ranks.values():
            for operation, stamps, is_open in _lanes(told):
                key = (incarnations[told.rank], operation)
                newest = int(stamps.max()) if len(stamps) else 0
                before = self._newest.get(key, newest)
                newest_of[key] = newest
                came = (newest - before) // 2
                needed = self._needed[key] = int(stamps[is_open].min()) if is_open.any() else newest + 2
                back = max(0, newest - needed) // 2
                # What is under way will be found `came` further back next time, if as many come again.
                wanted = max(wanted, back + _AHEAD * came + _LEAST)
        self._newest = newest_of
        return min(wanted, OPERATIONS)


def _lanes(told: RankRecords) -> list[tuple[bool, np.ndarray, np.ndarray]]:
    """Return for each lane whether it is that of operations, its stamps, and which of them have not ended."""
    is_operation = told.records["kind"] == Kind.OPERATION
    return [
        (operation, told.records["stamp"][lane], told.records["ended_s"][lane] == 0)
        for operation, lane in ((True, is_operation), (False, ~is_operation))
    ]
