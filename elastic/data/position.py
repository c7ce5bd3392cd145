"""Says how far a job is: in its steps, and in its data."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.checkpoint.layout.boxes import Json


@dataclass(frozen=True, slots=True)
class Position:
    """Progress of a job: completed optimizer steps, and global batches consumed.

    Attributes:
        step: number of completed steps.
        batch: number of global batches consumed.
        stream: where a stream of samples is after these batches; None for other datasets.
    """

    step: int = 0
    batch: int = 0
    stream: Json = field(default=None, compare=False)
