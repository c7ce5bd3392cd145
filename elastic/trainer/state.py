"""Defines what a user's `build` returns: the model, its optimizers and its other state.

It also remembers what a script's own objects were before training, for the generations that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.descriptions import NOT_DESCRIBED, Descriptions
from keepstep.elastic.data.json_values import from_json_value, to_json_value
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.process_groups import World


class Stateful(Protocol):
    """An object with state to save: JSON (a curriculum) or tensors by name (averaged weights)."""

    def state_dict(self) -> Json:
        """Return the state: JSON, or a dictionary of tensors."""
        ...

    def load_state_dict(self, state: Json, /) -> None:
        """Set the state from a value of the kind that `state_dict` returns."""
        ...


@dataclass(frozen=True, slots=True)
class State:
    """The result of `build`: the model, and functions that create what depends on its parameters.

    Args:
        model: the sharded model. What of it is on the meta device gets memory on `World.device`;
            parameters and buffers that have memory keep their values.
        optimizer: receives the model's parameters once they have memory; returns one optimizer or
            several.
        scheduler: receives an optimizer and returns its scheduler; called for each optimizer.
        initialize: fills a model that was on the meta device; called only if there is nothing to
            resume from.
        extra: objects saved and restored by name. Their tensors may be sharded, but must not be on
            the meta device. An object has all of them from the beginning, once `optimizer` was
            called: a new process restores into those.
        release: called when the generation ends, before its process groups do: drops what holds
            them and is not the job's, such as CUDA graphs that captured collectives.
        descriptions: what the model's tensors are, such as fused parts and padding, as for
            `checkpoint.save`.
        config: the model's configuration, as JSON; stored with it.

    Raises:
        UsageError: the model is none, the optimizer or scheduler is made already, or an extra
            object has no `state_dict` and `load_state_dict`.
    """

    model: nn.Module
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer | Sequence[Optimizer]]
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    initialize: Callable[[nn.Module], None] | None = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)
    release: Callable[[], None] | None = None
    descriptions: Descriptions = NOT_DESCRIBED
    config: Json = None

    def __post_init__(self) -> None:
        # Scripts have no type checker.
        model: Any = self.model
        optimizer: Any = self.optimizer
        scheduler: Any = self.scheduler
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"State(model=...) is of type {type(model).__name__}: give a torch.nn.Module"
            )
        if isinstance(optimizer, Optimizer):
            name, lr = type(optimizer).__name__, optimizer.defaults.get("lr", "...")
            raise UsageError(
                f"State(optimizer=...) is made already, of type {name}: give the function that "
                f"makes it, as in State(model, functools.partial({name}, lr={lr}))"
            )
        if isinstance(scheduler, LRScheduler):
            name = type(scheduler).__name__
            raise UsageError(
                f"State(scheduler=...) is made already, of type {name}: give the function that "
                f"makes it of an optimizer, as in State(..., scheduler=functools.partial({name}))"
            )
        for name, value in (("optimizer", optimizer), ("scheduler", scheduler)):
            if not callable(value) and (name == "optimizer" or value is not None):
                raise UsageError(
                    f"State({name}=...) is of type {type(value).__name__}: give a function, such "
                    "as functools.partial(torch.optim.AdamW, lr=1e-3) for the optimizer"
                )
        extra: Any = self.extra
        if not isinstance(extra, Mapping):
            raise UsageError(
                f"extra is of type {type(extra).__name__}: give a dictionary of objects by name"
            )
        for name, value in extra.items():
            methods = ("state_dict", "load_state_dict")
            if not all(callable(getattr(value, method, None)) for method in methods):
                raise UsageError(
                    f"extra {name!r} is of type {type(value).__name__}, which has no state_dict() "
                    "and load_state_dict(): give an object that has both, and keeps the value"
                )


class InitialExtra:
    """The states of extra objects as this process made them.

    An object that `build` makes is new in each generation. One that the script made before keeps
    what training has changed, while a process that is new has it as it was. So it is set back
    before a generation's state is restored, and stays so where there is nothing to resume from.
    """

    def __init__(self) -> None:
        self._states: dict[str, tuple[Stateful, Json]] | None = None

    def note(self, extra: Mapping[str, Stateful]) -> None:
        """Remember the objects' states; called before each generation, the first call counts."""
        if self._states is not None:
            return
        self._states = {}
        for key, value in extra.items():
            state = value.state_dict()
            parts = state.values() if isinstance(state, Mapping) else ()
            if any(isinstance(part, DTensor) for part in parts):
                continue  # It belongs to a generation's mesh, and so does what has it.
            try:
                self._states[key] = value, to_json_value(f"extra {key!r}", state)
            except UsageError:
                continue  # Large tensors, or on a device: not worth a copy for the whole job.

    def restore(self, extra: Mapping[str, Stateful]) -> None:
        """Set the objects that are still the same ones to the states remembered."""
        for key, (value, state) in (self._states or {}).items():
            if extra.get(key) is value:
                value.load_state_dict(from_json_value(state, value.state_dict()))


Build = Callable[[World], State]
