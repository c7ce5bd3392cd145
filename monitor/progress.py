"""Publishes a worker's progress in shared memory, readable even when the worker hangs or is dead.

The record has a fixed size and lies in a memfd, with one writer and any number of readers. The
writer increments a sequence number before and after (a seqlock, after Lameter, "Effective
synchronization on Linux/NUMA systems", 2005), so a reader never accepts a partly written record.
x86-64 and AArch64 order the plain stores well enough for a diagnostic record of this kind: Python's
own evaluation between the stores is thousands of instructions.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass

_RECORD = struct.Struct("<QQQd")
_SEQUENCE = struct.Struct("<Q")
_NOTE_LENGTH = struct.Struct("<Q")
_NOTE_AT = 4096
_NBYTES = _NOTE_AT + (1 << 20)
"""Memory that is not written to is not used."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The last progress that a worker wrote.

    Args:
        generation: of the job.
        step: completed steps.
        at_s: when it was written, by the node's monotonic clock.
    """

    generation: int
    step: int
    at_s: float


class ProgressBoard:
    """The shared record. The agent creates it; the worker writes to its inherited descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _NBYTES)

    @classmethod
    def create(cls, name: str) -> ProgressBoard:
        """Create a board in anonymous shared memory; it is freed when the last holder closes it."""
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
        """Return the last complete record.

        None if nothing was written, the writer died while writing, or the board is closed.
        """
        if self.descriptor < 0:
            return None
        for _ in range(100):
            sequence, generation, step, at_s = _RECORD.unpack_from(self._memory, 0)
            (after,) = _SEQUENCE.unpack_from(self._memory, 0)
            if sequence == after and sequence % 2 == 0:
                return Progress(generation, step, at_s) if sequence else None
        return None

    def leave_note(self, note: bytes) -> None:
        """Leave word of why the worker ends, for when it has nothing else to say it by.

        Text that does not fit is cut off.
        """
        begin = _NOTE_AT + _NOTE_LENGTH.size
        note = note[: _NBYTES - begin]
        self._memory[begin : begin + len(note)] = note
        _NOTE_LENGTH.pack_into(self._memory, _NOTE_AT, len(note))

    def note(self) -> bytes:
        """Return the note; empty if there is none, or the board is closed."""
        if self.descriptor < 0:
            return b""
        (length,) = _NOTE_LENGTH.unpack_from(self._memory, _NOTE_AT)
        begin = _NOTE_AT + _NOTE_LENGTH.size
        return self._memory[begin : begin + length]

    def close(self) -> None:
        """Close this process's view. Safe to call twice."""
        if self.descriptor >= 0:
            self._memory.close()
            os.close(self.descriptor)
            self.descriptor = -1
