"""The training state of one worker: model, optimizers, schedulers, extras, randomness, position; read as a whole, and filled from a source."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Box, Json
from keepstep.checkpoint.layout.source import Source
from keepstep.checkpoint.live.capture import LiveStateReader
from keepstep.checkpoint.live.optimizer_options import name_of, parameter_names, restore_options
from keepstep.checkpoint.live.restore import allocate, restore
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, describe
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.data import Position
from keepstep.elastic.trainer.json_values import from_json_value, to_json_value
from keepstep.elastic.trainer.process_groups import check_mesh_position

if TYPE_CHECKING:
    from keepstep.elastic.trainer.state import State

_TRAINER = "trainer"


class TrainingState:
    """What `build` made, with everything else that a resumed run needs to go on as if nothing had happened."""

    def __init__(self, state: State, device: torch.device, rank: int) -> None:
        self._rank = rank
        self._extra = state.extra
        self._initialize = state.initialize
        self.model = state.model
        self._was_meta = _materialize(state.model, device)
        made = state.optimizer(state.model.parameters())
        self.optimizers = (made,) if isinstance(made, Optimizer) else tuple(made)
        self.schedulers = tuple(map(state.scheduler, self.optimizers)) if state.scheduler else ()
        self._buffers = {f"model/{name}" for name, _ in state.model.named_buffers()}
        self._state_reader = LiveStateReader(state.model, self.optimizers)

    def start_fresh(self, seed: int) -> Position:
        """Fill the state as a run that has nothing to resume from begins.

        Raises:
            UsageError: nothing says how to fill the model.
        """
        if self._initialize is not None:
            self._initialize(self.model)
        elif self._was_meta:
            raise UsageError(
                "the model is on the meta device and there is nothing to resume from; "
                "give State(initialize=...) that fills its parameters"
            )
        self._seed_randomness(seed, 0)
        return Position()

    def restore_from(self, source: Source, seed: int) -> Position:
        """Fill the state from a source; return the position that it is of.

        Raises:
            LayoutMismatch: it does not fit.
        """
        allocate(self.model, self.optimizers, source.tensors)
        names = parameter_names(self.model)
        for optimizer in self.optimizers:
            for parameter, slots in optimizer.state.items():
                for tensor in (parameter, *slots.values()):
                    check_mesh_position(name_of(parameter, names), tensor)
        for name, parameter in self.model.named_parameters():
            check_mesh_position(name, parameter)
        restore(self._state_reader.capture(), source)
        restore_options(self.model, self.optimizers, source.documents)
        trainer = source.documents[_TRAINER]
        for scheduler, stored in zip(self.schedulers, trainer["schedulers"], strict=False):
            scheduler.load_state_dict(from_json_value(stored, scheduler.state_dict()))
        self._restore_extra(source, trainer["extra"])
        self._restore_randomness(source, seed)
        return Position(trainer["step"], trainer["batch"])

    def invalidate_if_moved(self) -> None:
        """Look anew, at the next `capture`, for tensors that have been given other memory."""
        self._state_reader.invalidate_if_moved()

    def capture(self, position: Position) -> LiveState:
        """Return all of it as it is at a position; the tensors of model and optimizers are the live memory."""
        live = self._state_reader.capture()
        # Forward writes to buffers (batch norm's statistics), so these cannot be copied under it.
        tensors = [
            tensor.clone() if tensor.key in self._buffers else tensor for tensor in live.tensors
        ]
        extra: dict[str, Json] = {}
        for key, value in self._extra.items():
            state = value.state_dict()
            mine = _tensors_of(key, state)
            tensors += [tensor.clone() for tensor in mine]
            extra[key] = None if mine else to_json_value(f"extra {key!r}", state)
        rank = self._rank
        trainer: dict[str, Json] = {
            "step": position.step,
            "batch": position.batch,
            "extra": extra,
            "schedulers": [
                to_json_value("the scheduler's state", scheduler.state_dict())
                for scheduler in self.schedulers
            ],
        }
        documents = {
            **live.documents,
            _TRAINER: trainer,
            f"rank/{rank:05d}/random": random.getstate(),
        }
        return LiveState((*tensors, *_generators(rank)), documents)

    def _restore_extra(self, source: Source, stored: Mapping[str, Json]) -> None:
        """Fill what the source has; what is new since then stays as it was made."""
        for key, value in self._extra.items():
            state = value.state_dict()
            mine = _tensors_of(key, state)
            known = [tensor for tensor in mine if tensor.key in source.tensors]
            if known and len(known) < len(mine):
                missing = next(tensor.key for tensor in mine if tensor.key not in source.tensors)
                raise LayoutMismatch(
                    f"{missing}: missing in step {source.step}, which has other parts of {key!r}"
                )
            if known:
                restore(LiveState(tuple(known), {}), source, strict=False)
                # What `state_dict` returned may be copies.
                value.load_state_dict(state)
            elif not mine and stored.get(key) is not None:
                value.load_state_dict(from_json_value(stored[key], state))

    def _seed_randomness(self, seed: int, step: int) -> None:
        torch.manual_seed((seed * 1_000_003 + step) * 65_537 + self._rank + 1)
        random.seed(f"{seed}/{step}/{self._rank}")

    def _restore_randomness(self, source: Source, seed: int) -> None:
        """Continue this rank's random numbers; a rank that is new starts a stream of its own."""
        rank = self._rank
        generators = _generators(rank)
        if any(tensor.key not in source.tensors for tensor in generators):
            self._seed_randomness(seed, source.step)
            return
        restore(LiveState(generators, {}), source, strict=False)
        torch.set_rng_state(generators[0].data)
        if len(generators) > 1:
            torch.cuda.set_rng_state(generators[1].data)
        version, internal, gauss = source.documents[f"rank/{rank:05d}/random"]
        random.setstate((version, tuple(internal), gauss))


def _generators(rank: int) -> tuple[LiveTensor, ...]:
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return tuple(
        LiveTensor(f"rank/{rank:05d}/rng/{name}", tuple(state.shape), Box.whole(state.shape), state)
        for name, state in states.items()
    )


def _tensors_of(key: str, state: Any) -> tuple[LiveTensor, ...]:
    """Return the tensors of an extra part of the state, which may be sharded; none if it is JSON.

    Raises:
        UsageError: it is partly tensors and partly something else.
    """
    if not isinstance(state, Mapping) or not any(
        isinstance(item, torch.Tensor) for item in state.values()
    ):
        return ()
    for name, item in state.items():
        if not isinstance(item, torch.Tensor):
            raise UsageError(
                f"extra {key!r}: {name!r} is no tensor, but others of it are; split it in two"
            )
    return tuple(describe(f"extra/{key}/{name}", item) for name, item in state.items())


def _materialize(model: nn.Module, device: torch.device) -> bool:
    """Give a model on the meta device memory; True if it was there.

    Raises:
        UsageError: a buffer is there that no checkpoint will fill.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return False
    saved = set(model.state_dict())
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in saved]
    if lost:
        raise UsageError(
            f"buffer {lost[0]} is on the meta device but not part of the model's state, so nothing would fill it; "
            "make it on World.device inside build"
        )
    model.to_empty(device=device)
    return True
