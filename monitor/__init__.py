"""Records training workers in shared memory, and diagnoses the job from those records.

In a worker: call `monitor.attach()`, or set KEEPSTEP_MONITOR=1 in its environment; then,
optionally, use `monitor.phase` and `monitor.measure`. In a process that is not attached they do
nothing.
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

# The recorder needs PyTorch, which the daemon and the command do without: hence the imports inside
# functions.


def attach(
    *,
    job: str | None = None,
    rank: int | None = None,
    node: str | None = None,
    generation: int | None = None,
) -> Recorder:
    """Start recording this worker. See `keepstep.monitor.telemetry.attachment.attach`."""
    from keepstep.monitor.telemetry.attachment import attach

    return attach(job=job, rank=rank, node=node, generation=generation)


def phase(phase: Phase) -> AbstractContextManager[None]:
    """Mark the code inside as a phase of the step."""
    recorder = _current()
    return nullcontext() if recorder is None else recorder.phase(phase)


def begin_step(number: int | None = None) -> None:
    """Begin a step, with this number if given.

    Needed only where no optimizer marks the end of a step.
    """
    recorder = _current()
    if recorder is not None:
        recorder.begin_step(number)


def end_step() -> None:
    """End the current step: for loops that do other work between steps, such as evaluation."""
    recorder = _current()
    if recorder is not None:
        recorder.end_step()


def measure(measure: Measure, value: float, group: dist.ProcessGroup | None = None) -> None:
    """Report a number of the current step.

    See `keepstep.monitor.telemetry.recorder.Recorder.measure`.
    """
    recorder = _current()
    if recorder is not None:
        recorder.measure(measure, value, group)


def _current() -> Recorder | None:
    import sys

    # If the module was never imported, the process is not attached.
    attachment = sys.modules.get("keepstep.monitor.telemetry.attachment")
    return attachment.current() if attachment is not None else None


def __dir__() -> list[str]:
    return __all__
