"""Checks the options that `join` and `attach` share, and reports them to the agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from keepstep.checkpoint.format.layout.retention import Retention
from keepstep.checkpoint.format.stored.chunking import Compression, check_compression
from keepstep.checkpoint.format.stored.urls import parse_url
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.intervals import AUTO
from keepstep.elastic.rendezvous.rank_limits import RankLimits
from keepstep.elastic.worker.messages import Joined


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of a job, as for `join`; `roll_back` is that of `BadSteps`.

    Raises:
        UsageError: one is invalid.
        CheckpointError: `checkpoint` is no URL.
    """

    checkpoint: str | None
    checkpoint_every: int | Literal["auto"] | None
    checkpoint_compression: Compression | None
    keep_last: int | None
    keep_every: int | None
    snapshot_every: int | Literal["auto"]
    seed: int
    roll_back: int = 0

    def __post_init__(self) -> None:
        for name in ("snapshot_every", "checkpoint_every"):
            every = getattr(self, name)
            if every is not None and not _is_interval(every):
                raise UsageError(
                    f'{name}={every!r}: give the number of steps, at least 1, or "auto"'
                )
        if not -(2**63) <= self.seed < 2**64:
            raise UsageError(
                f"seed={self.seed!r}: give a number from -2**63 to 2**64 - 1, as torch takes"
            )
        if self.checkpoint is not None:
            parse_url(self.checkpoint)
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise UsageError(
                "checkpoint_every needs checkpoint=URL, the place to store checkpoints in"
            )
        for name in ("keep_last", "keep_every"):
            number = getattr(self, name)
            if number is None:
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise UsageError(f"{name}={number!r}: give a number, at least 1, or None")
            if self.checkpoint is None:
                raise UsageError(f"{name} needs checkpoint=URL, the place to store checkpoints in")
        if self.keep_every is not None and self.keep_last is None:
            raise UsageError(
                "keep_every says what else stays of what keep_last=N removes; give keep_last, too"
            )
        try:
            check_compression(self.checkpoint_compression)
        except ValueError as error:
            raise UsageError(f"checkpoint_{error}") from error

    @property
    def snapshot_interval(self) -> int:
        """The steps between snapshots, as rendezvous counts them."""
        return AUTO if self.snapshot_every == "auto" else self.snapshot_every

    def joined(
        self,
        limits: RankLimits,
        *,
        awaits_abort_order: bool,
        restarts_script: bool = False,
        modules: tuple[str, ...] = (),
    ) -> Joined:
        """Return the report to the agent that the script has joined; see `Joined`."""
        retention = None
        if self.keep_last is not None:
            retention = Retention(last=self.keep_last, every=self.keep_every, behind=self.roll_back)
        return Joined(
            checkpoint_url=self.checkpoint,
            checkpoint_every=AUTO if self.checkpoint_every == "auto" else self.checkpoint_every,
            checkpoint_compression=self.checkpoint_compression,
            checkpoint_retention=retention,
            rank_multiple=limits.multiple,
            max_ranks=limits.most,
            fitting_ranks=limits.fitting,
            awaits_abort_order=awaits_abort_order,
            restarts_script=restarts_script,
            modules=modules,
        )


def _is_interval(every: object) -> bool:
    return every == "auto" or (isinstance(every, int) and every >= 1)
