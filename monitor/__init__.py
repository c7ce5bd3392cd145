"""The watch over a training job: what workers tell through shared memory, and what others make of it.

In a worker: `monitor.attach()`, or KEEPSTEP_MONITOR=1 in its environment; then `monitor.phase` and `monitor.measure`, if wanted. They do
nothing in a process that is not attached.
"""

from __future__ import annotations

if __name__ != "keepstep.monitor":
    raise ImportError(f"{__name__} is a folder of keepstep's source tree; import keepstep.monitor")

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from keepstep.monitor.errors import (
    DumpUnreadable,
    MonitorError,
    MonitorUnreachable,
    ProtocolViolation,
    RecorderUnavailable,
    RingUnreadable,
    RingUnwritable,
    RuntimeUnreachable,
    SecretDiffers,
)
from keepstep.monitor.records import Measure, Phase

if TYPE_CHECKING:
    import torch.distributed as dist

    from keepstep.monitor.telemetry.recorder import Recorder

__all__ = [
    "DumpUnreadable",
    "Measure",
    "MonitorError",
    "MonitorUnreachable",
    "Phase",
    "ProtocolViolation",
    "RecorderUnavailable",
    "RingUnreadable",
    "RingUnwritable",
    "RuntimeUnreachable",
    "SecretDiffers",
    "attach",
    "begin_step",
    "end_step",
    "measure",
    "phase",
]

# The recorder needs PyTorch, which the daemon and the command do without: hence the imports inside.


def attach(
    *,
    job: str | None = None,
    rank: int | None = None,
    node: str | None = None,
    generation: int | None = None,
) -> Recorder:
    """Record this worker from now on. See `keepstep.monitor.telemetry.attachment.attach`."""
    from keepstep.monitor.telemetry.attachment import attach

    return attach(job=job, rank=rank, node=node, generation=generation)


def phase(phase: Phase) -> AbstractContextManager[None]:
    """Mark what runs inside as a part of the step."""
    recorder = _current()
    return nullcontext() if recorder is None else recorder.phase(phase)


def begin_step(number: int | None = None) -> None:
    """Begin a step, with this number if given; needed only where no optimizer says when a step is over."""
    recorder = _current()
    if recorder is not None:
        recorder.begin_step(number)


def end_step() -> None:
    """End the step under way: for loops that do other things between steps, such as evaluating."""
    recorder = _current()
    if recorder is not None:
        recorder.end_step()


def measure(measure: Measure, value: float, group: dist.ProcessGroup | None = None) -> None:
    """Report a number of the step under way. See `keepstep.monitor.telemetry.recorder.Recorder.measure`."""
    recorder = _current()
    if recorder is not None:
        recorder.measure(measure, value, group)


def _current() -> Recorder | None:
    import sys

    # Where nobody has imported it, nobody has attached.
    attachment = sys.modules.get("keepstep.monitor.telemetry.attachment")
    return attachment.current() if attachment is not None else None


def __dir__() -> list[str]:
    return __all__
