"""Reads a job's rings on this node: the records that may have changed since the previous reading.

A ring holds some 20,000 records, and few are new half a second later. The number of records to read
follows from how many were new last time and from how far back the oldest open record lies. If that
was too few, the whole ring is read at once: it still holds them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.monitor.contracts import RingReading
from keepstep.monitor.records import JobRecords, Kind, is_open
from keepstep.monitor.telemetry.job_rings import JobRings
from keepstep.monitor.telemetry.ring import OPERATIONS
from keepstep.monitor.telemetry.ring_files import Sweeper

_LOG = logging.getLogger("keepstep.monitor")
_SWEEP_EVERY_S = 60.0
_LEAST = 128
_FIRST_STAMP = 2
"""Stamp of a lane's first record; stamps grow by two a record."""
_AHEAD = 2
"""Times the records that were new last time: the rate of a job varies."""


class RingSource:
    """A `JobReader` over the job's directory, which need not exist yet.

    Removes rings whose processes died `keep_s` seconds ago.
    """

    def __init__(self, directory: Path, *, keep_s: float = 3600.0) -> None:
        self._directory = directory
        self._rings = JobRings(directory)
        self._sweeper = Sweeper(keep_s)
        self._sweep_due_s = 0.0
        self._count = OPERATIONS
        # By incarnation and lane: the newest stamp, and the first that must be read again.
        self._newest: dict[tuple[str, bool], int] = {}
        self._needed: dict[tuple[str, bool], int] = {}

    def read(self) -> Sequence[RingReading]:
        """Return every rank's ring: all of it at first, later the records that may have changed."""
        now_s = time.monotonic()
        if now_s >= self._sweep_due_s:
            self._sweep_due_s = now_s + _SWEEP_EVERY_S
            try:
                self._sweeper.sweep([self._directory], now_s)
            except OSError as error:
                # For example, the directory is mounted read-only.
                _LOG.debug("rings of dead processes stay in %s: %s", self._directory, error)
        job = self._rings.read(self._count)
        lanes = _lanes(job, self._rings.incarnations())
        if self._has_missed(lanes):
            job = self._rings.read(OPERATIONS)
            lanes = _lanes(job, self._rings.incarnations())
        self._count = self._next_count(lanes)
        return _readings(self._rings, job)

    def read_all(self) -> Sequence[RingReading]:
        """Return everything that the rings hold. May be called on any thread."""
        rings = JobRings(self._directory)
        try:
            return _readings(rings, rings.read(OPERATIONS))
        finally:
            rings.close()

    def close(self) -> None:
        """Close all rings."""
        self._rings.close()

    def _has_missed(self, lanes: Mapping[tuple[str, bool], _LaneWindow]) -> bool:
        """Return whether some lane was read from later than the first record that was needed."""
        if self._count >= OPERATIONS:
            return False
        return any(lane.oldest > self._needed.get(key, _FIRST_STAMP) for key, lane in lanes.items())

    def _next_count(self, lanes: Mapping[tuple[str, bool], _LaneWindow]) -> int:
        """Return how many records of each lane to read next time; remember where this one ended."""
        count = _LEAST
        for key, lane in lanes.items():
            added = (lane.newest - self._newest.get(key, lane.newest)) // 2
            back = max(0, lane.newest - lane.needed) // 2
            # Open records will lie `added` further back next time, if as many are added again.
            count = max(count, back + _AHEAD * added + _LEAST)
        self._newest = {key: lane.newest for key, lane in lanes.items()}
        self._needed = {key: lane.needed for key, lane in lanes.items()}
        return min(count, OPERATIONS)


@dataclass(frozen=True, slots=True)
class _LaneWindow:
    """The records read of one lane of a ring.

    Args:
        oldest, newest: first and last stamp; 0 if there are none.
        needed: the first stamp that the next reading must include.
    """

    oldest: int
    newest: int
    needed: int


def _readings(rings: JobRings, job: JobRecords) -> list[RingReading]:
    """Return the rings that were read last, with their records."""
    incarnations, processes, created_s = rings.incarnations(), rings.processes(), rings.created_s()
    communicators = tuple(job.communicators.values())
    return [
        RingReading(
            records=records,
            communicators=communicators,
            pid=processes[rank],
            incarnation=incarnations[rank],
            generation=rings.generation(),
            world_size=rings.world_size(),
            created_s=created_s[rank],
        )
        for rank, records in job.ranks.items()
    ]


def _lanes(job: JobRecords, incarnations: Mapping[int, str]) -> dict[tuple[str, bool], _LaneWindow]:
    """Return the lanes read, by incarnation of the writer and whether they hold operations."""
    lanes = {}
    for rank in job.ranks.values():
        is_operation = rank.records["kind"] == Kind.OPERATION
        is_unfinished = is_open(rank.records)
        stamps = rank.records["stamp"]
        for holds_operations, is_in_lane in ((True, is_operation), (False, ~is_operation)):
            lane = stamps[is_in_lane]
            open_stamps = stamps[is_in_lane & is_unfinished]
            newest = int(lane.max()) if len(lane) else 0
            lanes[incarnations[rank.rank], holds_operations] = _LaneWindow(
                oldest=int(lane.min()) if len(lane) else 0,
                newest=newest,
                needed=int(open_stamps.min()) if len(open_stamps) else newest + 2,
            )
    return lanes
