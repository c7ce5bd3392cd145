"""The context of one optimizer step, as the training loop uses it."""

from __future__ import annotations

from types import TracebackType
from typing import NoReturn, Self

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.step_control import StepControl


class Step:
    """One optimizer step: `with job.step() as step: loss.backward(); job.optimizer.step()`.

    Gradients are cleared at the beginning. If a peer fails inside, `Step` catches the exception,
    the job recovers, `completed` stays False, and the batch iterator yields the batch of the
    restored position next. Other exceptions pass.
    """

    def __init__(self, control: StepControl) -> None:
        self._control = control
        self._is_open = False
        self._number = control.completed + 1
        self.completed = False

    @property
    def loss_scale(self) -> float:
        """Factor for this rank's mean loss that keeps the average over ranks exact.

        It is 1.0 unless the ranks' shares of the batch are uneven.
        """
        return self._control.loss_scale

    @property
    def number(self) -> int:
        """The number of this step: that of `Job.steps` once it is completed."""
        return self._number

    def report(self, **values: float | torch.Tensor) -> None:
        """Report what shows whether the step is good, before the optimizer's step; by any rank.

        A value that is not finite, or is a spike, rejects the step: the job returns to a snapshot
        before it and skips its batch on all ranks (`BadSteps`). Reading a tensor waits for its
        device. A loss may be finite where its gradients are not: report their norm, too.

        Args:
            values: numbers by name, such as `loss=loss, norm=norm`; the name is shown.

        Raises:
            UsageError: outside of the step, `keepstep.join` has no `on_bad_step`, or a value is a
                DTensor of which this rank has only a part.
            StepRejected: more steps are rejected than the job survives.
        """
        self._check_open()
        self._control.judge({name: _number(name, value) for name, value in values.items()})

    def reject(self, reason: str) -> NoReturn:
        """Reject the step for a reason of the loop's own; see `report`.

        Raises:
            UsageError: outside of the step, or `keepstep.join` has no `on_bad_step`.
            StepRejected: more steps are rejected than the job survives.
        """
        self._check_open()
        self._control.reject(reason)

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError("step.report and step.reject belong inside `with job.step() as step:`")

    def mean_over(self, count: int) -> float:
        """Return the factor for this rank's summed loss that makes the mean over all items exact.

        For items of which samples have different numbers, such as tokens. All ranks call it, once
        and inside the step: it adds up their counts.

        Args:
            count: the items of this rank's share of the batch; in all ranks together at least one.
        """
        world = self._control.world
        total = torch.tensor([count], dtype=torch.int64, device=world.device)
        dist.all_reduce(total)
        # Ranks that compute the same share count the same items.
        return world.world_size / int(total.item())

    def __enter__(self) -> Self:
        self._control.begin()
        self._number = self._control.completed + 1
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._is_open = False
        generation = self._control.world.generation
        handled = self._control.end(error)
        self.completed = error is None and self._control.world.generation == generation
        return handled and error is not None


def _number(name: str, value: float | torch.Tensor) -> float:
    """Return what a step reports by a name as a number."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    if isinstance(value, DTensor) and not all(place.is_replicate() for place in value.placements):
        # Its number would be that of this rank's part, and judged as if it were the whole.
        raise UsageError(
            f"step.report({name}=...) was given a DTensor of placements {value.placements}, of "
            f"which each rank has a part: give {name}.full_tensor(), which all ranks must call"
        )
    # PyTorch warns where a tensor that requires gradients becomes a number.
    return float(value.detach())
