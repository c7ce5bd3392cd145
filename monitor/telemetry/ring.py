"""Defines the telemetry ring: one worker's records in a shared-memory file, readable at any time.

A reader needs nothing from the worker: neither its GIL, nor that it is scheduled, nor that it is
alive. The file remains when the process is killed, and a reader that holds it open keeps its
content when a new worker of the same rank replaces it (see
`keepstep.monitor.telemetry.ring_files`).

Format, version 1. Native byte order, which is little-endian on all supported machines. All offsets
are bytes from the start of the file.

    0     16 s   magic, "keepstep-ring" padded with zeros
    16    u32    version of this format
    20    u32    size of this header, 4096
    24    u32    size of a record, 64
    28    u32    process id of the writer
    32    u64    when that process started, in clock ticks since boot (field 22 of /proc/PID/stat):
                 it distinguishes the process from a later one with the same id
    40    i32    global rank
    44    u32    number of ranks; 0: not known
    48    u64    generation of the job, 0 where generations are not counted
    56    f64    monotonic seconds at which the ring was created
    64    u32    live: optimizer step under way, from 1; 0: before the first
    68    u32    live: 1 running, 2 ended normally, 3 by an exception, 4 by failed communication
    72    3 u64  lane of operations: offset, capacity in records (a power of two, at least 256),
                 live: position
    96    3 u64  lane of phases and measures: the same
    120   3 u64  communicator table: offset, capacity in bytes, live: bytes used
    256   256 s  job, UTF-8
    512   256 s  node, UTF-8

There are two lanes so that thousands of operations a second do not overwrite the phases, and
because different code writes them: operations are written from any thread, without the GIL
(`native/lane.h`), phases and measures from Python under it. The position of a lane is the number
of records begun so far. Record p (from 0) lies in slot p mod capacity. Its stamp is 2p + 1 while it
is written and 2p + 2 when it is complete. A reader that reads 2p + 2 before and after copying has
all of record p and nothing of another (a seqlock: Lameter, "Effective synchronization on Linux/NUMA
systems", 2005). Where the processor does not keep the order of loads and stores, see
`keepstep.monitor.telemetry.fences`.

A complete record may still change, by aligned stores of single fields. An open record has `ended_s`
0.0; when the operation ends, the writer adds `flags` and then sets `ended_s`. One with DEVICE_TIMES
has `started_s` 0.0; it gets the flag LAUNCHED when it is put into a queue of the device, and
`started_s` when the device begins it. One whose end turns out not to be seen gets the flag
UNOBSERVED and no end. Phases may be prolonged: their `ended_s` may grow. A
record that was overwritten before it ended is not completed.

The table holds one JSON object a line, {"identity", "name", "ranks"}, with ranks as runs
[first, count, stride]. Lines are appended, and "bytes used" is set after a line's bytes, so a
reader sees complete lines only.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.monitor.errors import RingUnwritable
from keepstep.monitor.records import RECORD, Communicator, Ending
from keepstep.monitor.telemetry.fences import register_writer

VERSION = 1
MAGIC = b"keepstep-ring\0\0\0"
HEADER_NBYTES = 4096
STEP_OFFSET = 64
STATE_OFFSET = 68
JOB_OFFSET = 256
NODE_OFFSET = 512
NAME_NBYTES = 256

# Seconds of history at the highest observed rates, minutes at usual ones: 1 MiB and 256 KiB.
OPERATIONS = 2**14
MARKS = 2**12
TABLE_NBYTES = 2**18

# Native alignment without padding, so that each field is one aligned store; the same bytes as
# `RECORD`.
RECORD_STRUCT = struct.Struct("@QBBBBIQQiIddd")
assert RECORD_STRUCT.size == RECORD.itemsize
FIXED = struct.Struct("@16sIIIIQiIQd")
LANE = struct.Struct("@QQQ")
_U64 = struct.Struct("@Q")
_U32 = struct.Struct("@I")
_F64 = struct.Struct("@d")
_FLAGS_OFFSET = 11
_ENDED_OFFSET = 56


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the file.

    Args:
        offset: where it begins, in bytes.
        capacity: in records for a lane, in bytes for the table.
        counter_offset: where its live counter lies, in bytes.
    """

    offset: int
    capacity: int
    counter_offset: int


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identifies the worker that a ring belongs to.

    Args:
        job: name of the job.
        rank: global rank.
        node: name of the node; ranks of one node share a monotonic clock.
        generation: the job's generation; 0 where generations are not counted.
        world_size: number of ranks; 0: not known.
    """

    job: str
    rank: int
    node: str
    generation: int = 0
    world_size: int = 0


@dataclass(frozen=True, slots=True)
class RingSizes:
    """The capacity of a ring. Capacities of lanes are powers of two, at least 256."""

    operations: int = OPERATIONS
    marks: int = MARKS
    table_nbytes: int = TABLE_NBYTES

    def __post_init__(self) -> None:
        for capacity in (self.operations, self.marks):
            if capacity < 256 or capacity & (capacity - 1):
                raise ValueError(
                    f"a lane of {capacity} records: it must be a power of two, at least 256"
                )

    @property
    def regions(self) -> tuple[Region, Region, Region]:
        """The regions of operations, marks and the table."""
        marks_offset = HEADER_NBYTES + self.operations * RECORD.itemsize
        table_offset = marks_offset + self.marks * RECORD.itemsize
        return (
            Region(HEADER_NBYTES, self.operations, 88),
            Region(marks_offset, self.marks, 112),
            Region(table_offset, self.table_nbytes, 136),
        )

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return HEADER_NBYTES + (self.operations + self.marks) * RECORD.itemsize + self.table_nbytes


class Lane:
    """Writes a lane from Python.

    Threads of one process may share it, because of the GIL; two processes, or native code, may not.
    """

    def __init__(self, memory: mmap.mmap, region: Region) -> None:
        self._memory = memory
        self._offset = region.offset
        self._capacity = region.capacity
        self._counter_offset = region.counter_offset
        self._positions = itertools.count(_U64.unpack_from(memory, region.counter_offset)[0])

    def begin(
        self,
        kind: int,
        code: int,
        *,
        number: int,
        step: int,
        enqueued_s: float,
        ended_s: float = 0.0,
        nbytes: int = 0,
        communicator: int = 0,
        dtype: int = 0,
        flags: int = 0,
        peer: int = -1,
    ) -> int:
        """Write a record, an open one with `ended_s` 0.0. Returns its position, for `end`."""
        position: int = next(self._positions)
        at = self._offset + position % self._capacity * 64
        started_s = enqueued_s
        RECORD_STRUCT.pack_into(
            self._memory, at,
            2 * position + 1, kind, code, dtype, flags, communicator, number, nbytes, peer, step,
            enqueued_s, started_s, ended_s,
        )  # fmt: skip
        _U64.pack_into(self._memory, at, 2 * position + 2)
        # The garbage collector may run in between and record its own phase: that record has a later
        # position, but is written first.
        (reached,) = _U64.unpack_from(self._memory, self._counter_offset)
        _U64.pack_into(self._memory, self._counter_offset, max(reached, position + 1))
        return position

    def end(self, position: int, ended_s: float, flags: int | None = None) -> None:
        """Complete a record in place, unless it has been overwritten."""
        at = self._offset + position % self._capacity * 64
        (stamp,) = _U64.unpack_from(self._memory, at)
        if stamp == 2 * position + 2:
            if flags is not None:
                self._memory[at + _FLAGS_OFFSET] = flags
            _F64.pack_into(self._memory, at + _ENDED_OFFSET, ended_s)


class Ring:
    """A worker's own ring, mapped for writing.

    Python writes `marks`. Native code writes `operations`, or Python where that is not used.
    """

    def __init__(self, path: Path, memory: mmap.mmap, sizes: RingSizes) -> None:
        self.path = path
        self.sizes = sizes
        self._memory = memory
        operations, marks, self._table = sizes.regions
        self.operations = Lane(memory, operations)
        self.marks = Lane(memory, marks)

    @classmethod
    def create(cls, path: Path, identity: WorkerIdentity, sizes: RingSizes | None = None) -> Ring:
        """Create the file at `path`, which must not exist, with mode 0600.

        Raises:
            RingUnwritable: no space in shared memory, or no permission to write there.
        """
        sizes = sizes or RingSizes()
        register_writer()
        try:
            memory = _new_file(path, sizes.nbytes)
        except OSError as error:
            raise RingUnwritable(
                f"rank {identity.rank}: a telemetry ring of {sizes.nbytes} bytes cannot be created "
                f"at {path}: {error.strerror}. Set KEEPSTEP_MONITOR_DIR to a directory with free "
                "space, in memory if possible."
            ) from error
        FIXED.pack_into(
            memory, 0, MAGIC, VERSION, HEADER_NBYTES, RECORD.itemsize,
            os.getpid(), process_started(os.getpid()) or 0,
            identity.rank, identity.world_size, identity.generation, time.monotonic(),
        )  # fmt: skip
        _U32.pack_into(memory, STATE_OFFSET, Ending.NONE)
        for region in sizes.regions:
            LANE.pack_into(memory, region.counter_offset - 16, region.offset, region.capacity, 0)
        for offset, name in ((JOB_OFFSET, identity.job), (NODE_OFFSET, identity.node)):
            encoded = name.encode()[:NAME_NBYTES]
            memory[offset : offset + len(encoded)] = encoded
        return cls(path, memory, sizes)

    @property
    def step(self) -> int:
        """The current optimizer step, from 1; 0 before the first."""
        (step,) = _U32.unpack_from(self._memory, STEP_OFFSET)
        return int(step)

    @step.setter
    def step(self, step: int) -> None:
        """Set the current optimizer step."""
        _U32.pack_into(self._memory, STEP_OFFSET, step)

    def add_communicator(self, communicator: Communicator) -> bool:
        """Append to the table of communicators.

        Returns False if the table is full; records then name a communicator unknown to readers.
        """
        line = json.dumps({
            "identity": communicator.identity,
            "name": communicator.name,
            "ranks": runs(communicator.ranks),
        })  # fmt: skip
        encoded = line.encode() + b"\n"
        (used,) = _U64.unpack_from(self._memory, self._table.counter_offset)
        if used + len(encoded) > self._table.capacity:
            return False
        start = self._table.offset + used
        self._memory[start : start + len(encoded)] = encoded
        _U64.pack_into(self._memory, self._table.counter_offset, used + len(encoded))
        return True

    def finish(self, ending: Ending = Ending.FINISHED) -> None:
        """Record how the process ends. The file remains for readers."""
        _U32.pack_into(self._memory, STATE_OFFSET, ending)

    def close(self) -> None:
        """Unmap the file, which remains."""
        self._memory.close()


def runs(ranks: Sequence[int]) -> list[list[int]]:
    """Return ranks as runs [first, count, stride]. A group of a device mesh is a single run."""
    encoded: list[list[int]] = []
    for rank in ranks:
        if encoded and encoded[-1][1] == 1:
            encoded[-1][1:] = [2, rank - encoded[-1][0]]
        elif encoded and rank == encoded[-1][0] + encoded[-1][1] * encoded[-1][2]:
            encoded[-1][1] += 1
        else:
            encoded.append([rank, 1, 1])
    return encoded


def ranks_of(encoded: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks that `runs` encoded."""
    return tuple(
        first + index * stride for first, count, stride in encoded for index in range(count)
    )


def process_started(process: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it is gone or a zombie."""
    fields = stat_fields(process)
    return None if not fields or fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def stat_fields(process: int) -> list[bytes]:
    """Return what the kernel says of a process after its name (proc_pid_stat(5)); empty if gone."""
    try:
        # The name in parentheses may contain any bytes, also parentheses.
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _new_file(path: Path, nbytes: int) -> mmap.mmap:
    descriptor = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        # Reserves the pages now: otherwise a full /dev/shm would kill the worker with SIGBUS later.
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
