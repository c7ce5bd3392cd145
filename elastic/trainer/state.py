"""What a user's `build` returns: the model, and how to make what depends on its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from keepstep.checkpoint.layout.boxes import Json
from keepstep.elastic.trainer.process_groups import World


class Stateful(Protocol):
    """Anything with state of its own that is JSON (a curriculum, a counter) or tensors by name (an average of the weights)."""

    def state_dict(self) -> Json:
        """Return the state: JSON, or a dictionary with tensors in it."""
        ...

    def load_state_dict(self, state: Json, /) -> None:
        """Take a state of the kind that `state_dict` returns."""
        ...


@dataclass(frozen=True, slots=True)
class State:
    """What `build` returns: the model, and how to make what depends on its parameters.

    `optimizer` is called with the model's parameters once they are real, and returns one optimizer or several; `scheduler` is called
    with each. A model on the meta device is given memory on `World.device`; `initialize` then fills it, only when there is nothing to
    resume from. `extra` is saved and restored by name; its tensors may be sharded, and are on no meta device.
    """

    model: nn.Module
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer | Sequence[Optimizer]]
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    initialize: Callable[[nn.Module], None] | None = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)


Build = Callable[[World], State]
