"""How DeepSpeed is to keep a checkpoint: the stage of ZeRO, and the ranks of data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.checkpoint.errors import LayoutMismatch

STAGES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class ZeroLayout:
    """A stage of ZeRO and a number of ranks; what is not known is None.

    Raises:
        LayoutMismatch: there is no such stage, or there are no ranks.
    """

    stage: int | None = None
    ranks: int | None = None

    def __post_init__(self) -> None:
        if self.stage not in (None, *STAGES):
            raise LayoutMismatch(f"ZeRO has the stages 1, 2 and 3, not {self.stage}")
        if self.ranks is not None and self.ranks < 1:
            raise LayoutMismatch(f"ZeRO's files are of one rank or more, not of {self.ranks}")
