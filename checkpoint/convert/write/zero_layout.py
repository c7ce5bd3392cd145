"""Says how DeepSpeed keeps a checkpoint: the stage of ZeRO, and the ranks of data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.checkpoint.errors import LayoutMismatch

STAGES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class ZeroLayout:
    """A stage of ZeRO, a number of ranks, and the names of the module's buffers.

    Attributes:
        stage: 1, 2 or 3; None if it is not given.
        ranks: how many; None if it is not given.
        buffers: names of the module's buffers; None if they are not given.

    Raises:
        LayoutMismatch: there is no such stage, or there are no ranks.
    """

    stage: int | None = None
    ranks: int | None = None
    buffers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.stage not in (None, *STAGES):
            raise LayoutMismatch(f"ZeRO has the stages 1, 2 and 3, not {self.stage}")
        if self.ranks is not None and self.ranks < 1:
            raise LayoutMismatch(f"ZeRO's files are of one rank or more, not of {self.ranks}")
