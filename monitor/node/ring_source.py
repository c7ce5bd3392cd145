"""The rings of a job on this node, as the daemon wants them: what may have changed since the last reading, and little else.

A ring holds some 20,000 records, of which few are new half a second later. How many are looked at follows from how many came
last time and from how far back something is still under way; if it turns out to have been too few, more are read at once,
for the ring still has them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.monitor.contracts import RingReading
from keepstep.monitor.records import JobRecords, Kind
from keepstep.monitor.telemetry.job_rings import JobRings
from keepstep.monitor.telemetry.ring import OPERATIONS
from keepstep.monitor.telemetry.ring_files import Sweeper

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

    def read(self) -> Sequence[RingReading]:
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
        lanes = _lanes(job, self._rings.incarnations())
        if self._has_missed(lanes):
            job = self._rings.read(OPERATIONS)
            lanes = _lanes(job, self._rings.incarnations())
        self._count = self._wanted(lanes)
        incarnations = self._rings.incarnations()
        processes, created_s = self._rings.processes(), self._rings.created_s()
        communicators = tuple(job.communicators.values())
        generation, size = self._rings.generation(), self._rings.world_size()
        return [
            RingReading(
                told,
                communicators,
                processes[rank],
                incarnations[rank],
                generation,
                size,
                created_s[rank],
            )
            for rank, told in job.ranks.items()
        ]

    def close(self) -> None:
        """Let all rings go."""
        self._rings.close()

    def _has_missed(self, lanes: Mapping[tuple[str, bool], _LaneWindow]) -> bool:
        """Return whether in some lane what was read does not reach back to what was still under way, or new, at the last reading."""
        if self._count >= OPERATIONS:
            return False
        return any(
            lane.count >= self._count and lane.oldest > self._needed.get(key, 0)
            for key, lane in lanes.items()
        )

    def _wanted(self, lanes: Mapping[tuple[str, bool], _LaneWindow]) -> int:
        """Return how many records of each lane to look at next time, and remember where this reading ended."""
        wanted = _LEAST
        for key, lane in lanes.items():
            came = (lane.newest - self._newest.get(key, lane.newest)) // 2
            back = max(0, lane.newest - lane.needed) // 2
            # What is under way will be found `came` further back next time, if as many come again.
            wanted = max(wanted, back + _AHEAD * came + _LEAST)
        self._newest = {key: lane.newest for key, lane in lanes.items()}
        self._needed = {key: lane.needed for key, lane in lanes.items()}
        return min(wanted, OPERATIONS)


@dataclass(frozen=True, slots=True)
class _LaneWindow:
    """What was read of one lane of a ring: how many records, the oldest and the newest stamp, and the first to be seen again."""

    count: int
    oldest: int
    newest: int
    needed: int


def _lanes(job: JobRecords, incarnations: Mapping[int, str]) -> dict[tuple[str, bool], _LaneWindow]:
    """Return the lanes read, by incarnation of the writer and whether they are of operations."""
    lanes = {}
    for told in job.ranks.values():
        is_operation = told.records["kind"] == Kind.OPERATION
        is_open = told.records["ended_s"] == 0
        stamps = told.records["stamp"]
        for operation, mine in ((True, is_operation), (False, ~is_operation)):
            here = stamps[mine]
            under_way = stamps[mine & is_open]
            newest = int(here.max()) if len(here) else 0
            needed = int(under_way.min()) if len(under_way) else newest + 2
            oldest = int(here.min()) if len(here) else 0
            lanes[incarnations[told.rank], operation] = _LaneWindow(
                len(here), oldest, newest, needed
            )
    return lanes
