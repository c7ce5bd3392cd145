"""Reads a worker's telemetry ring from another process, at any time.

`keepstep.monitor.telemetry.ring` describes the format. A reader opens the file for reading only: it
cannot disturb the worker, and costs it nothing but memory bandwidth.

It reads by `pread` and does not map the file: the writer of a ring can also truncate it, and that
would end a process that has it mapped (SIGBUS). It reads only files of its own user, or of root,
that others cannot write to. Whatever the file contains, it raises RingUnreadable or returns records
whose fields have a meaning.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from keepstep.monitor.errors import RingUnreadable
from keepstep.monitor.records import RECORD, Communicator, Ending, has_meaning, joined
from keepstep.monitor.telemetry.fences import order_loads
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
_MAX_POSITION = 1 << 62
_MAX_RANKS = 1 << 20


class RingReader:
    """One ring, open for reading until `close`, also when the file is removed or replaced."""

    def __init__(self, path: Path) -> None:
        """Open a ring.

        Raises:
            RingUnreadable: it cannot be opened, is not a ring, is truncated, has another version,
                or others could write to it.
            FileNotFoundError: the file does not exist.
        """
        self.path = path
        try:
            self._file = _RingFile(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise RingUnreadable(
                f"{path} cannot be read as a telemetry ring: {error.strerror}; if it is not one, "
                "remove it"
            ) from error
        self.inode = self._file.inode
        try:
            self._parse(self._file.nbytes)
        except RingUnreadable:
            self._file.close()
            raise

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
        ) = FIXED.unpack(self._file.read(0, FIXED.size))
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
        lanes = [LANE.unpack(self._file.read(at, LANE.size)) for at in (72, 96, 120)]
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
        if rank < 0 or not math.isfinite(created_s):
            raise RingUnreadable(
                f"{self.path} is damaged: rank {rank}, created at {created_s}; remove it"
            )
        self.process: int = process
        self.process_started: int = started
        self.created_s: float = created_s
        self.identity = WorkerIdentity(
            self._name(JOB_OFFSET), rank, self._name(NODE_OFFSET), generation, world_size
        )
        operations, marks, self._table = sizes.regions
        self.operations = LaneReader(self._file, operations)
        """Operations, in the order in which they were called."""
        self.marks = LaneReader(self._file, marks)
        """Phases and measures, in the order in which they began."""
        self._communicators: dict[int, Communicator] = {}
        self._table_read = 0

    def last(self, count: int) -> Records:
        """Return the last `count` complete records of each lane, sorted by the time they began.

        Raises:
            RingUnreadable: the file was truncated, or is damaged.
        """
        records = joined([self.operations.last(count), self.marks.last(count)])
        return records.take(np.argsort(records["enqueued_s"], kind="stable"))

    def communicators(self) -> Mapping[int, Communicator]:
        """Return the process groups that the worker has used so far, by identity.

        Raises:
            RingUnreadable: the table is damaged.
        """
        used = self._file.read_number(self._table.counter_offset)
        order_loads()
        if not self._table_read <= used <= self._table.capacity:
            raise RingUnreadable(f"{self.path} is damaged: its table has {used} bytes")
        lines = self._file.read(self._table.offset + self._table_read, used - self._table_read)
        for line in lines.splitlines():
            try:
                communicator = _communicator(json.loads(line))
            # RecursionError: nesting deeper than the interpreter's stack allows.
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                raise RingUnreadable(
                    f"{self.path} is damaged: its table of process groups cannot be read"
                ) from error
            self._communicators[communicator.identity] = communicator
        self._table_read = used
        return dict(self._communicators)

    @property
    def step(self) -> int:
        """The current optimizer step, from 1; 0 before the first."""
        return int(_STATES.unpack(self._file.read(STEP_OFFSET, _STATES.size))[0])

    @property
    def ending(self) -> Ending:
        """How the process recorded that it ended."""
        state = _STATES.unpack(self._file.read(STEP_OFFSET, _STATES.size))[1]
        try:
            return Ending(state)
        except ValueError:
            raise RingUnreadable(f"{self.path} is damaged: its state is {state}") from None

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
        """Close the file. Arrays that were returned stay valid."""
        self._file.close()

    def _name(self, offset: int) -> str:
        return self._file.read(offset, NAME_NBYTES).rstrip(b"\0").decode(errors="replace")


class LaneReader:
    """Reads one lane of a ring."""

    def __init__(self, file: _RingFile, region: Region) -> None:
        self._file = file
        self._region = region

    @property
    def position(self) -> int:
        """Number of records that were begun so far."""
        return self._file.read_number(self._region.counter_offset)

    def last(self, count: int) -> Records:
        """Return up to `count` of the last complete records, oldest first.

        Raises:
            RingUnreadable: the file was truncated, or its position is impossible.
        """
        end = self.position
        if end >= _MAX_POSITION:
            raise RingUnreadable(f"{self._file.path} is damaged: {end} records were begun")
        first = max(end - min(count, self._region.capacity), 0)
        if first >= end:
            return np.empty(0, RECORD)
        expected = 2 * np.arange(first, end, dtype=np.uint64) + 2
        before = self._copy("stamp", first, end)
        order_loads()
        ended_s = self._copy("ended_s", first, end)
        order_loads()
        records = self._copy(None, first, end)
        order_loads()
        after = self._copy("stamp", first, end)
        is_complete = (before == expected) & (records["stamp"] == expected) & (after == expected)
        # A record may be completed while it is copied. The fields that its writer sets before
        # `ended_s` are in the copy if that was set before copying began; otherwise the record is
        # still open here.
        records["ended_s"] = ended_s
        return records.compress(is_complete & has_meaning(records))

    def _copy(self, field: str | None, first: int, end: int) -> Records:
        """Return a copy of the slots of positions [first, end), or of one of their fields."""
        capacity, nbytes = self._region.capacity, RECORD.itemsize
        start, stop = first % capacity, (end - 1) % capacity + 1
        parts = ((start, stop),) if start < stop else ((start, capacity), (0, stop))
        copied = bytearray().join(
            self._file.read(self._region.offset + begin * nbytes, (until - begin) * nbytes)
            for begin, until in parts
        )
        slots: Records = np.frombuffer(copied, RECORD)
        return slots if field is None else slots[field]


class _RingFile:
    """A ring's file, open for reading until `close`.

    Raises:
        RingUnreadable: it is no regular file, too short, or others could write to it.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # O_NONBLOCK: opening a named pipe would wait for a writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = os.open(path, flags)
        try:
            status = os.fstat(self._descriptor)
            _check(path, status)
        except RingUnreadable:
            os.close(self._descriptor)
            raise
        # A file object closes itself if a reader is dropped without `close`.
        self._file = open(self._descriptor, "rb", buffering=0)  # noqa: SIM115
        self.inode = status.st_ino
        self.nbytes = status.st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return this many bytes.

        Raises:
            RingUnreadable: the file has become shorter.
        """
        data = os.pread(self._descriptor, nbytes, offset)
        if len(data) != nbytes:
            raise RingUnreadable(f"{self.path} was truncated while it was read; remove it")
        return data

    def read_number(self, offset: int) -> int:
        """Return the live counter at an offset; raises as `read`."""
        return int(_U64.unpack(self.read(offset, _U64.size))[0])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise RingUnreadable(f"{path} cannot be a telemetry ring: it is no regular file")
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
        raise RingUnreadable(
            f"{path} is not read: others could have written it (owner {status.st_uid}, "
            f"mode {stat.filemode(status.st_mode)}); remove it"
        )
    if status.st_size < HEADER_NBYTES:
        raise RingUnreadable(
            f"{path} is no telemetry ring, or is truncated: {status.st_size} bytes"
        )


def _communicator(fields: Any) -> Communicator:
    """Return the process group that a line of the table describes.

    Raises:
        ValueError, TypeError, LookupError: it describes none.
    """
    identity, name, encoded = fields["identity"], fields["name"], fields["ranks"]
    if not isinstance(name, str) or not isinstance(identity, int) or not 0 <= identity < 1 << 32:
        raise TypeError("identity and name must be a number of 32 bits and a text")
    if not all(isinstance(number, int) for run in encoded for number in run):
        raise TypeError("ranks must be numbers")
    if sum(max(0, count) for _, count, _ in encoded) > _MAX_RANKS:
        raise ValueError(f"a process group has more than {_MAX_RANKS} ranks")
    ranks = ranks_of(encoded)
    if not all(0 <= rank < 1 << 31 for rank in ranks):
        raise ValueError("a rank is negative, or has more than 31 bits")
    return Communicator(identity, name, ranks)


assert STATE_OFFSET == STEP_OFFSET + 4
