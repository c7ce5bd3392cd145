"""A worker's progress in shared memory: readable at any instant by another process, also when the worker hangs or is dead.

One fixed record in a memfd, one writer, any number of readers. The writer bumps a sequence number before and after (a
seqlock, after Lameter, "Effective synchronization on Linux/NUMA systems", 2005), so that a reader never takes a torn record
for whole. x86-64 and AArch64 order the plain stores well enough for a diagnostic record of this kind: Python's own
evaluation between the stores is thousands of instructions.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass

_RECORD = struct.Struct("<QQQd")
_SEQUENCE = struct.Struct("<Q")
_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Progress:
    """What a worker last said: its generation, completed steps, and when (monotonic seconds, the same on the whole node)."""

    generation: int
    step: int
    at_s: float


class ProgressBoard:
    """The shared record. Whoever creates it (the agent) hands the descriptor to the worker, which opens it and writes."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _NBYTES)

    @classmethod
    def create(cls, name: str) -> ProgressBoard:
        """Make a new board in anonymous shared memory; it is gone when the last holder closes it."""
        descriptor = os.memfd_create(f"keepstep-progress-{name}", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _NBYTES)
        return cls(descriptor)

    def write(self, generation: int, step: int) -> None:
        """Record that `step` steps are completed in `generation`."""
        (sequence,) = _SEQUENCE.unpack_from(self._memory, 0)
        _SEQUENCE.pack_into(self._memory, 0, sequence + 1)
        _RECORD.pack_into(self._memory, 0, sequence + 1, generation, step, time.monotonic())
        _SEQUENCE.pack_into(self._memory, 0, sequence + 2)

    def read(self) -> Progress | None:
        """Return the last whole record; None if none was written, the writer died while writing, or this is closed."""
        if self.descriptor < 0:
            return None
        for _ in range(100):
            sequence, generation, step, at_s = _RECORD.unpack_from(self._memory, 0)
            (after,) = _SEQUENCE.unpack_from(self._memory, 0)
            if sequence == after and sequence % 2 == 0:
                return Progress(generation, step, at_s) if sequence else None
        return None

    def close(self) -> None:
        """Release this process's view. Safe to call twice."""
        if self.descriptor >= 0:
            self._memory.close()
            os.close(self.descriptor)
            self.descriptor = -1
