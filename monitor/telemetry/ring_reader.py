"""Reads a worker's telemetry ring from another process, at any time.

`keepstep.monitor.telemetry.ring` describes the format. A reader maps the file for reading only: it
cannot disturb the worker, and costs it nothing but memory bandwidth.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keepstep.monitor.errors import RingUnreadable
from keepstep.monitor.records import RECORD, Communicator, Ending, as_bytes, joined
from keepstep.monitor.telemetry.ring import (
    FIXED,
    HEADER_NBYTES,
    JOB_OFFSET,
    LANE,
    MAGIC,
    NAME_NBYTES,
    NODE_OFFSET,
    STATE_OFFSET,
    STEP_OFFSET,
    VERSION,
    Region,
    RingSizes,
    WorkerIdentity,
    process_started,
    ranks_of,
)

Records = npt.NDArray[np.void]
_STATES = struct.Struct("@II")
_U64 = struct.Struct("@Q")


@dataclass(frozen=True, slots=True)
class LaneRecords:
    """The records of a lane from some position on.

    Args:
        records: complete records, oldest first.
        next_position: where to continue reading; open records before it are still completed in
            place.
        missed: number of records that were overwritten, or being written, when they were read.
    """

    records: Records
    next_position: int
    missed: int


class RingReader:
    """One ring, open for reading until `close`, also when the file is removed or replaced."""

    def __init__(self, path: Path) -> None:
        """Open a ring.

        Raises:
            RingUnreadable: it cannot be opened, is not a ring, is truncated, or has another
                version.
            FileNotFoundError: the file does not exist.
        """
        self.path = path
        try:
            self._memory, nbytes = self._open(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise RingUnreadable(
                f"{path} cannot be read as a telemetry ring: {error.strerror}; if it is not one, "
                "remove it"
            ) from error
        try:
            self._parse(nbytes)
        except RingUnreadable:
            self._memory.close()
            raise

    def _open(self, path: Path) -> tuple[mmap.mmap, int]:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            status = os.fstat(descriptor)
            self.inode = status.st_ino
            if status.st_size < HEADER_NBYTES:
                raise RingUnreadable(
                    f"{path} is no telemetry ring, or is truncated: {status.st_size} bytes"
                )
            return mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ), status.st_size
        finally:
            os.close(descriptor)

    def _parse(self, nbytes: int) -> None:
        (
            magic,
            version,
            header_nbytes,
            record_nbytes,
            process,
            started,
            rank,
            world_size,
            generation,
            created_s,
        ) = FIXED.unpack_from(self._memory, 0)
        if magic != MAGIC:
            raise RingUnreadable(f"{self.path} is no telemetry ring: it begins with {magic!r}")
        if version != VERSION:
            remedy = (
                "upgrade the monitor"
                if version > VERSION
                else "restart the worker with this version of keepstep"
            )
            raise RingUnreadable(
                f"{self.path} has format version {version}, this monitor reads {VERSION}: {remedy}"
            )
        lanes = [LANE.unpack_from(self._memory, at) for at in (72, 96, 120)]
        try:
            sizes = RingSizes(lanes[0][1], lanes[1][1], lanes[2][1])
        except ValueError as error:
            raise RingUnreadable(f"{self.path} is damaged: {error}") from error
        offsets = [region.offset for region in sizes.regions]
        has_known_sizes = (header_nbytes, record_nbytes) == (HEADER_NBYTES, RECORD.itemsize)
        has_known_offsets = offsets == [offset for offset, _, _ in lanes]
        if not has_known_sizes or not has_known_offsets or sizes.nbytes > nbytes:
            raise RingUnreadable(
                f"{self.path} is damaged or truncated: {nbytes} bytes, its header requires "
                f"{sizes.nbytes}"
            )
        self.process: int = process
        self.process_started: int = started
        self.created_s: float = created_s
        self.identity = WorkerIdentity(
            self._name(JOB_OFFSET), rank, self._name(NODE_OFFSET), generation, world_size
        )
        operations, marks, self._table = sizes.regions
        self.operations = LaneReader(self._memory, operations)
        """Operations, in the order in which they were called."""
        self.marks = LaneReader(self._memory, marks)
        """Phases and measures, in the order in which they began."""
        self._communicators: dict[int, Communicator] = {}
        self._table_read = 0

    def last(self, count: int) -> Records:
        """Return the last `count` complete records of each lane, sorted by the time they began."""
        records = joined([self.operations.last(count), self.marks.last(count)])
        return records.take(np.argsort(records["enqueued_s"], kind="stable"))

    def communicators(self) -> Mapping[int, Communicator]:
        """Return the process groups that the worker has used so far, by identity."""
        (used,) = _U64.unpack_from(self._memory, self._table.counter_offset)
        start = self._table.offset
        for line in self._memory[start + self._table_read : start + used].splitlines():
            fields = json.loads(line)
            self._communicators[fields["identity"]] = Communicator(
                fields["identity"], fields["name"], ranks_of(fields["ranks"])
            )
        self._table_read = used
        return dict(self._communicators)

    @property
    def step(self) -> int:
        """The current optimizer step, from 1; 0 before the first."""
        return int(_STATES.unpack_from(self._memory, STEP_OFFSET)[0])

    @property
    def ending(self) -> Ending:
        """How the process recorded that it ended."""
        return Ending(_STATES.unpack_from(self._memory, STEP_OFFSET)[1])

    @property
    def process_started_s(self) -> float:
        """When the writer's process started, in monotonic seconds."""
        suspended_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
        return self.process_started / os.sysconf("SC_CLK_TCK") - suspended_s

    def is_alive(self) -> bool:
        """Whether the writer exists: the same process, not a later one with its id.

        A stopped process is alive; a zombie is not.
        """
        return process_started(self.process) == self.process_started

    def close(self) -> None:
        """Unmap the file. Arrays that were returned are copies and stay valid."""
        self._memory.close()

    def _name(self, offset: int) -> str:
        return self._memory[offset : offset + NAME_NBYTES].rstrip(b"\0").decode(errors="replace")


class LaneReader:
    """Reads one lane of a ring."""

    def __init__(self, memory: mmap.mmap, region: Region) -> None:
        self._memory = memory
        self._region = region

    @property
    def position(self) -> int:
        """Number of records that were begun so far."""
        return int(_U64.unpack_from(self._memory, self._region.counter_offset)[0])

    def last(self, count: int) -> Records:
        """Return up to `count` of the last complete records, oldest first."""
        return self.since(self.position - count).records

    def since(self, position: int) -> LaneRecords:
        """Return the complete records from `position` on."""
        end = self.position
        first = max(position, end - self._region.capacity, 0)
        if first >= end:
            return LaneRecords(np.empty(0, RECORD), end, 0)
        expected = 2 * np.arange(first, end, dtype=np.uint64) + 2
        before = self._copy("stamp", first, end)
        records = self._copy(None, first, end)
        after = self._copy("stamp", first, end)
        is_complete = (before == expected) & (records["stamp"] == expected) & (after == expected)
        missed = end - max(position, 0) - int(np.count_nonzero(is_complete))
        return LaneRecords(records.compress(is_complete), end, missed)

    def _copy(self, field: str | None, first: int, end: int) -> Records:
        """Return a copy of the slots of positions [first, end), or of one of their fields."""
        slots: Records = np.frombuffer(
            self._memory, RECORD, self._region.capacity, self._region.offset
        )
        column = as_bytes(slots) if field is None else slots[field]
        start, stop = first % self._region.capacity, (end - 1) % self._region.capacity + 1
        copy = (
            column[start:stop].copy()
            if start < stop
            else np.concatenate([column[start:], column[:stop]])
        )
        return copy.view(RECORD) if field is None else copy


assert STATE_OFFSET == STEP_OFFSET + 4
