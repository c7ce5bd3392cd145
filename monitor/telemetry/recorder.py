"""Records a worker's communicators, steps, phases and measures in its ring.

Native code records operations. The recorder never makes the job wait; a record that it cannot write
is left out. By default it detects steps: a step ends when an optimizer has run (or the last of
several), and the next begins at that time. Its number changes only when the loop waits for data or
begins a forward or backward pass, so records in between, such as the reduction of metrics, still
carry the number of the old step. A loop without an optimizer, or with its own numbers, calls
`begin_step`.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from keepstep.monitor.records import Communicator, Ending, Kind, Measure, Phase
from keepstep.monitor.telemetry.ring import Ring, WorkerIdentity
from keepstep.monitor.telemetry.ring_files import create_ring

if TYPE_CHECKING:
    import torch.distributed as dist

    from keepstep.monitor.telemetry.native import NativeRecorder

_log = logging.getLogger(__name__)
_F64 = struct.Struct("<d")

_BEGIN_A_STEP = frozenset({Phase.DATA_WAIT, Phase.FORWARD, Phase.BACKWARD})


class Recorder:
    """One worker's recorder. Owns the ring's Python side.

    Args:
        identity: of the worker.
        native: records operations; if None, only phases and measures are recorded.
    """

    def __init__(self, identity: WorkerIdentity, native: NativeRecorder | None) -> None:
        self._native = native
        self._open(identity)

    def _open(self, identity: WorkerIdentity) -> None:
        self.identity = identity
        self.ring: Ring = create_ring(identity)
        self._communicators: set[int] = set()
        self._step_position = -1
        self._updated_s = 0.0
        self._detects_steps = True
        self._ending = Ending.FINISHED
        if self._native is not None:
            self._native.open(self.ring, self.describe)

    def reopen(self, identity: WorkerIdentity) -> None:
        """Continue in a new ring, for a worker that survives into another generation.

        The numbers of operations begin again from 1.
        """
        former = self.ring
        self._open(identity)
        former.close()

    @property
    def sees_operations(self) -> bool:
        """Whether operations are recorded, not only phases and measures."""
        return self._native is not None

    @property
    def calls_inside(self) -> int:
        """How many threads are inside a call of a back end; 0 if operations are not recorded."""
        return 0 if self._native is None else self._native.calls_inside()

    @property
    def step(self) -> int:
        """The current optimizer step, from 1; 0 before the first."""
        return self.ring.step

    def begin_step(self, number: int | None = None) -> None:
        """End the current step and begin another: the next, or the one with this number.

        From now on steps are not detected automatically.
        """
        now_s = time.monotonic()
        self._detects_steps = False
        if self._step_position >= 0:
            self.ring.marks.end(self._step_position, now_s)
        self._begin_step(self.step + 1 if number is None else number, now_s)

    def end_step(self) -> None:
        """End the current step; what follows is between steps until another one begins."""
        if self._step_position >= 0:
            self.ring.marks.end(self._step_position, time.monotonic())
            self._step_position = -1

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Record the body of a `with` block as a phase. `begin_step` records `Phase.STEP`."""
        position = self.begin(phase)
        try:
            yield
        finally:
            self.end(position)

    def begin(self, phase: Phase) -> int:
        """Record the beginning of a phase; return its position, for `end`."""
        now_s = time.monotonic()
        if (
            phase in _BEGIN_A_STEP
            and self._detects_steps
            and (self._updated_s or self._step_position < 0)
        ):
            self._begin_step(self.step + 1, self._updated_s or now_s)
        step = self.ring.step
        return self.ring.marks.begin(Kind.PHASE, phase, number=step, step=step, enqueued_s=now_s)

    def end(self, position: int) -> None:
        """Record the end of a phase."""
        self.ring.marks.end(position, time.monotonic())

    def record_phase(self, phase: Phase, began_s: float, ended_s: float) -> None:
        """Record a phase that has ended."""
        step = self.ring.step
        self.ring.marks.begin(
            Kind.PHASE, phase, number=step, step=step, enqueued_s=began_s, ended_s=ended_s
        )

    def optimizer_stepped(self) -> None:
        """Record that an optimizer has run.

        If another one runs before the next forward or backward pass, the step lasts until then.
        """
        if self._detects_steps and self._step_position >= 0:
            self._updated_s = time.monotonic()
            self.ring.marks.end(self._step_position, self._updated_s)

    def measure(
        self, measure: Measure, value: float, group: dist.ProcessGroup | None = None
    ) -> None:
        """Record a number of the current step.

        Args:
            measure: the kind of number.
            value: on the host already; a checksum of 32 bits is exact.
            group: whose replicas must agree on a checksum.
        """
        communicator = 0
        if group is not None:
            communicator, _ = self.describe(group.group_name, group.rank(), group.size())
        step, now_s = self.ring.step, time.monotonic()
        bits = int.from_bytes(_F64.pack(value), "little")
        self.ring.marks.begin(
            Kind.MEASURE,
            measure,
            number=step,
            step=step,
            enqueued_s=now_s,
            ended_s=now_s,
            nbytes=bits,
            communicator=communicator,
        )

    def describe(self, name: str, rank: int, size: int) -> tuple[int, Sequence[int]]:
        """Return identity and global ranks of a process group; add it to the ring's table."""
        communicator = Communicator.of(name, _global_ranks(name, size))
        if communicator.identity not in self._communicators:
            self._communicators.add(communicator.identity)
            if not self.ring.add_communicator(communicator):
                _log.warning(
                    "the telemetry ring has no space for process group %s, the %dth",
                    name,
                    len(self._communicators),
                )
        return communicator.identity, communicator.ranks

    def close(self) -> None:
        """Record how the process ends, and stop recording."""
        if self._native is not None:
            self._native.close()
        self.ring.finish(self._ending)

    def set_ending(self, ending: Ending) -> None:
        """Record why the process ends."""
        self._ending = ending
        self.ring.finish(ending)

    def _begin_step(self, number: int, at_s: float) -> None:
        self.ring.step = number
        self._updated_s = 0.0
        self._step_position = self.ring.marks.begin(
            Kind.PHASE, Phase.STEP, number=number, step=number, enqueued_s=at_s
        )


def _global_ranks(name: str, size: int) -> Sequence[int]:
    """Return a group's global ranks; 0 to `size` for a group created outside torch.distributed."""
    import torch.distributed as dist

    from keepstep.torch_internals import group_names

    for group, group_name in list(group_names().items()):
        if group_name == name and group.size() == size:
            return dist.get_process_group_ranks(group)
    return range(size)
