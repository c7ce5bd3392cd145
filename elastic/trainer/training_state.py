"""Captures and restores the training state of one worker.

It consists of the model, optimizers, schedulers, the user's extra objects, random number generators
and the position.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.completeness import (
    MODEL,
    OPTIMIZER,
    Requested,
    shortened,
    taken_names,
)
from keepstep.checkpoint.format.layout.documents import CONFIG, GROUPS, PROVENANCE
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX, OPTIMIZER_PREFIX
from keepstep.checkpoint.format.layout.source import Source
from keepstep.checkpoint.live.allocation import allocate
from keepstep.checkpoint.live.capture import LiveStateReader
from keepstep.checkpoint.live.computed import ComputedTensors, fit_computed, is_extra_state
from keepstep.checkpoint.live.fills import Fill, fill
from keepstep.checkpoint.live.model_parameters import ModelParameters
from keepstep.checkpoint.live.optimizer_options import options_of, restore_options
from keepstep.checkpoint.live.optimizer_rest import parameters_of
from keepstep.checkpoint.live.optimizer_state import local_groups, parameter_slots
from keepstep.checkpoint.live.part_slices import FusedTensors
from keepstep.checkpoint.live.provenance import checked_config, provenance
from keepstep.checkpoint.live.restore import plan_fills
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, local_of, placed_like
from keepstep.checkpoint.ranks.control_group import CONTROL_GROUPS
from keepstep.elastic.data import numpy_generator
from keepstep.elastic.data.json_values import from_json_value, to_json_value
from keepstep.elastic.data.position import NO_POSITION, IndexedPass, Position, StreamPosition
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.process_groups import check_mesh_positions
from keepstep.elastic.trainer.restored_parts import (
    check_options,
    check_schedulers,
    differing_extra,
    differing_options,
    differing_schedulers,
)
from keepstep.elastic.trainer.start_from import StartFrom, begin_from
from keepstep.elastic.trainer.state import State
from keepstep.torch_internals import apply_to_tensors, own_buffers, own_parameters

log = logging.getLogger("keepstep")

_TRAINER = "trainer"
_EXTRA_TENSORS = "extra_tensors"

_MAKE_TENSORS = (
    "make all its tensors in build, or in State.optimizer, where the parameters have memory, and "
    "only fill them later"
)


@dataclass(frozen=True, slots=True)
class BegunRestore:
    """A restore of which the tensors are to be filled.

    Attributes:
        source: what is restored from.
        fills: the tensors to fill.
        extra: the extra objects' states, as they were; some of their tensors are filled.
        generators: states of the random number generators, by name, to fill.
        computed: tensors of the model that are not its memory; some are filled.
    """

    source: Source
    fills: tuple[Fill, ...]
    extra: Mapping[str, Any]
    generators: Mapping[str, torch.Tensor]
    computed: ComputedTensors | None


class TrainingState:
    """The state that a resumed run needs to continue with the same results.

    Args:
        state: what `build` returned.
        device: where the model is to be.
        rank: this worker's.
        data_share: data-parallel rank, and number of data-parallel ranks.
        is_stage: other ranks have other parameters, as those of other stages of a pipeline.
        schedulers: those that are made already; None: `State.scheduler` makes them.
        seeds_new_job: whether a job that has nothing to resume from gets generators of its own.
    """

    def __init__(
        self,
        state: State,
        device: torch.device,
        rank: int,
        data_share: tuple[int, int] = (0, 1),
        *,
        is_stage: bool = False,
        schedulers: Sequence[LRScheduler] | None = None,
        seeds_new_job: bool = True,
    ) -> None:
        self._rank = rank
        self._world_size = CONTROL_GROUPS.of().size
        self._seeds_new_job = seeds_new_job
        self._data_share = data_share
        self._is_stage = is_stage
        self._extra = state.extra
        self._initialize = state.initialize
        self.model = state.model
        self._was_meta = _materialize(state.model, device)
        optimizers = state.optimizer(state.model.parameters())
        self.optimizers = _as_optimizers(optimizers)
        if schedulers is None:
            make = state.scheduler
            schedulers = tuple(map(make, self.optimizers)) if make is not None else ()
        self.schedulers = tuple(schedulers)
        # What cannot be stored is refused now, not at the first snapshot.
        for optimizer in self.optimizers:
            parameters_of(optimizer)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.may_replay_writes = device.type == "cuda" and any(
            group.get("capturable") for group in groups
        )
        """Whether an optimizer may run in a CUDA graph, whose writes move no version counter."""
        self._fused = FusedTensors(state.descriptions)
        self._first_extra_keys = {
            key: _keys(_tensors_of(key, value.state_dict(), self._fused))
            for key, value in self._extra.items()
        }
        parameters = ModelParameters(state.model)
        parameters.groups(self.optimizers)
        self._buffers = {
            f"model/{parameters.clean(name)}" for name, _ in state.model.named_buffers()
        }
        self._descriptions = state.descriptions
        self._config = checked_config(state.config)
        self._has_restored = False
        self._given: tuple[Position, Mapping[str, Any]] | None = None
        """Where the job goes on, and the states that extra objects were given, until a step."""
        self._state_reader = LiveStateReader(state.model, self.optimizers, state.descriptions)

    def parameter_names(self) -> set[str]:
        """Return the names of the model's parameters, without those of wrappers."""
        return ModelParameters(self.model).all_names()

    def start_fresh(self, seed: int) -> Position:
        """Initialize the state of a run that has nothing to resume from.

        Raises:
            UsageError: the model is on the meta device and `State.initialize` is missing.
        """
        if self._initialize is not None:
            self._initialize(self.model)
        elif self._was_meta:
            raise UsageError(
                "the model is on the meta device and there is nothing to resume from; "
                "give State(initialize=...) that fills its parameters"
            )
        if self._seeds_new_job:
            self._seed_randomness(seed, 0)
        return Position()

    def start_from(self, start: StartFrom, seed: int) -> tuple[Position, str]:
        """Initialize the state of a run from a checkpoint that is not its own.

        Args:
            start: the checkpoint.
            seed: seed of the random number generators.

        Returns:
            The position, and where the state came from.

        Raises:
            CheckpointError: as `begin_from` raises.
        """
        if self._was_meta:
            # Padding that the checkpoint has no values for has no others either.
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.zero_()
        begun = begin_from(start, self.model, self.optimizers, self.schedulers, self._descriptions)
        if self._seeds_new_job:
            self._seed_randomness(seed, begun.step)
        return Position(begun.step), begun.source

    def restore_from(self, source: Source, seed: int) -> Position:
        """Restore the state from a source and return its position.

        Args:
            source: the snapshot or checkpoint.
            seed: seed for ranks whose random number generators the source does not have.

        Raises:
            LayoutMismatch: the source does not fit the model or optimizers.
        """
        begun = self.begin_restore(source)
        fill(begun.fills, source)
        return self.finish_restore(begun, seed)

    def taken_names(self) -> set[str]:
        """Return the names of model and optimizers that this rank takes from a checkpoint."""
        live = self._state_reader.capture()
        keys = {*self._buffers, *(f"{MODEL_PREFIX}{name}" for name in self.parameter_names())}
        keys.update(tensor.key for tensor in live.tensors)
        return taken_names(keys, live.documents, self._requested())

    def begin_restore(
        self, source: Source, elsewhere: Collection[str] | None = None
    ) -> BegunRestore:
        """Return what to fill of the tensors; between this and `finish_restore` they are filled.

        Args:
            source: the snapshot or checkpoint.
            elsewhere: what all ranks take together: see `taken_names`. None for a snapshot in
                memory: of that other ranks take what the optimizers give them, and in a pipeline
                all that this rank has not.

        Raises:
            LayoutMismatch: the source does not fit the model, optimizers or extra objects.
        """
        allocate(self.model, self.optimizers, source, descriptions=self._descriptions)
        parameters = ModelParameters(self.model)
        check_mesh_positions(
            itertools.chain(
                (
                    (parameters.names(parameter)[0], tensor)
                    for optimizer in self.optimizers
                    for parameter, slots in parameter_slots(optimizer)
                    for tensor in (parameter, *slots.values())
                ),
                self.model.named_parameters(),
            )
        )
        extra = {key: value.state_dict() for key, value in self._extra.items()}
        tensors_of_extra = {
            key: _tensors_of(key, state, self._fused) for key, state in extra.items()
        }
        captured = self._state_reader.capture(itertools.chain(*tensors_of_extra.values()))
        live = fit_computed(captured, source)
        if _TRAINER not in source.documents:
            raise LayoutMismatch(
                f"step {source.step} was not stored by a job: it has no position and no state of "
                "schedulers; begin from it with start_from= and another checkpoint="
            )
        requested = self._requested()
        if elsewhere is not None:
            requested = replace(requested, elsewhere=elsewhere)
        else:
            # What shards say of groups is known once they were read.
            requested = replace(
                requested,
                parameters=None,
                elsewhere=source.known_keys() if self._is_stage else self._optimized_names(),
            )
        fills = plan_fills(live, source, requested=requested)
        if self._was_meta:
            # Memory that nothing has been written to: no values for padding to keep.
            fills = [replace(item, zeroes_rest=True) for item in fills]
        trainer = source.documents[_TRAINER]
        check_schedulers(trainer["schedulers"], len(self.schedulers), source.step)
        self._compare_options(source)
        stored_extra_keys = trainer[_EXTRA_TENSORS]
        own_extra_keys = {key: _keys(tensors) for key, tensors in tensors_of_extra.items()}
        known = {key for keys in own_extra_keys.values() for key in keys if key in source.tensors}
        for line in differing_extra(trainer["extra"], stored_extra_keys, own_extra_keys, known):
            self._warn(source.step, f"extra object {line}")
        for key, tensors in tensors_of_extra.items():
            keys, stored_keys = own_extra_keys[key], set(stored_extra_keys.get(key, ()))
            # One rank's keys are stored. Those of other stages are others, and those of other ranks
            # may be, so that what is missing here may have its place elsewhere.
            if keys < stored_keys and not self._is_stage:
                log.warning(
                    "%s is in step %d, but not among the tensors of %r on rank %d: it is lost, "
                    "unless another rank has it; %s",
                    min(stored_keys - keys), source.step, key, self._rank, _MAKE_TENSORS,
                )  # fmt: skip
            missing = [tensor.key for tensor in tensors if tensor.key not in source.tensors]
            if missing and (len(missing) < len(tensors) or stored_keys):
                raise LayoutMismatch(
                    f"{missing[0]}: missing in step {source.step}, which has other tensors of "
                    f"{key!r}; {_MAKE_TENSORS}"
                )
            fills += plan_fills(LiveState(tensors, live.documents), source, strict=False)
        generators = _generator_states()
        fills += plan_fills(
            LiveState(_generators(self._rank, generators), {}), source, strict=False
        )
        return BegunRestore(source, tuple(fills), extra, generators, live.computed)

    def finish_restore(self, begun: BegunRestore, seed: int) -> Position:
        """Restore what is not a tensor, and what the filled tensors are the state of.

        Args:
            begun: what `begin_restore` returned.
            seed: as for `restore_from`.
        """
        source = begun.source
        if begun.computed is not None:
            begun.computed.load()
        restore_options(self.model, self.optimizers, source.documents)
        trainer = source.documents[_TRAINER]
        pairs = zip(self.schedulers, trainer["schedulers"], strict=True)
        for number, (scheduler, stored) in enumerate(pairs):
            own = scheduler.state_dict()
            for line in differing_schedulers(stored, own, number):
                self._warn(source.step, line)
            scheduler.load_state_dict(from_json_value(stored, own))
        extra = self._restore_extra(begun, trainer["extra"])
        self._restore_randomness(begun, seed)
        stream = StreamPosition.restore(trainer["stream"], source.documents, *self._data_share)
        indexed_pass = IndexedPass.restore(trainer["indexed_pass"])
        position = Position(trainer["step"], trainer["batch"], stream, indexed_pass)
        self._has_restored, self._given = True, (position, extra)
        return position

    def invalidate_if_moved(self) -> None:
        """Make the next `capture` check for tensors whose memory was replaced."""
        self._state_reader.invalidate_if_moved()

    def generators(self) -> Mapping[str, torch.Tensor]:
        """Return the states of the global generators of torch and NumPy, by name."""
        return _generator_states()

    def set_generators(self, states: Mapping[str, torch.Tensor]) -> None:
        """Set the global generators to states that `generators` returned."""
        for name, state in states.items():
            _SET_STATE[name](state)

    def replicable(self) -> list[LiveTensor]:
        """Return the tensors that are equal on all replicas: parameters and optimizer state.

        Neither buffers nor extra states are among them: each rank computes statistics of its own
        samples.
        """
        return [
            tensor
            for tensor in self._state_reader.tensors()
            if tensor.key not in self._buffers and not is_extra_state(tensor.key)
        ]

    def capture(self, position: Position) -> LiveState:
        """Return the state at a position; tensors of model and optimizers are live memory.

        Raises:
            UsageError: an extra object has other tensors than when it was made.
        """
        extra: dict[str, Json] = {}
        extra_keys: dict[str, Json] = {}
        all_extra_tensors: list[LiveTensor] = []
        # An object that was given a state has it until the next step. Asking for it may change it:
        # torchdata's StatefulDataLoader draws random numbers, and fixes the order of its pass.
        if self._given is not None and self._given[0] != position:
            self._given = None
        given = self._given[1] if self._given is not None else {}
        for key, value in self._extra.items():
            state = given[key] if key in given else value.state_dict()
            extra_tensors = _tensors_of(key, state, self._fused)
            changed = _keys(extra_tensors) ^ self._first_extra_keys[key]
            if changed:
                raise UsageError(
                    f"{min(changed)}: the tensors of {key!r} are not those that it had when it was "
                    f"made, and a new process could not restore them; {_MAKE_TENSORS}"
                )
            all_extra_tensors += extra_tensors
            if extra_tensors:
                extra_keys[key] = sorted(_keys(extra_tensors))
            extra[key] = None if extra_tensors else to_json_value(f"extra {key!r}", state)
        live = self._state_reader.capture(all_extra_tensors)
        # The forward pass writes to buffers (batch norm's statistics), so they are copied now.
        tensors = [
            tensor.clone() if tensor.key in self._buffers else tensor for tensor in live.tensors
        ]
        tensors += [tensor.clone() for tensor in all_extra_tensors]
        rank = self._rank
        trainer: dict[str, Json] = {
            "step": position.step,
            "batch": position.batch,
            "stream": position.stream.document() if position.stream else NO_POSITION,
            "indexed_pass": position.indexed_pass.document() if position.indexed_pass else None,
            "extra": extra,
            _EXTRA_TENSORS: extra_keys,
            "schedulers": [
                to_json_value("the scheduler's state", scheduler.state_dict())
                for scheduler in self.schedulers
            ],
        }
        documents = {
            **live.documents,
            _TRAINER: trainer,
            f"rank/{rank:05d}/random": random.getstate(),
            **(position.stream.documents() if position.stream else {}),
        }
        if self._config is not None:
            documents[CONFIG] = self._config
        if rank == 0:
            documents[PROVENANCE] = provenance(
                self.model.parameters(),
                world_size=self._world_size,
                now=datetime.now(UTC),
            )
        return LiveState((*tensors, *_generators(rank, _generator_states())), documents)

    def _restore_extra(self, begun: BegunRestore, stored: Mapping[str, Json]) -> Mapping[str, Any]:
        """Restore the objects that the source has, and return their states.

        Others keep their initial state.
        """
        given: dict[str, Any] = {}
        for key, state in begun.extra.items():
            tensors = _tensors_of(key, state, self._fused)
            if tensors and all(tensor.key in begun.source.tensors for tensor in tensors):
                # The tensors that `state_dict` returned may be copies.
                given[key] = state
            elif not tensors and stored.get(key) is not None:
                given[key] = from_json_value(stored[key], state)
        for key, state in given.items():
            self._extra[key].load_state_dict(state)
        return given

    def _compare_options(self, source: Source) -> None:
        """Refuse another kind of optimizer's state, and name options that are not the script's.

        Raises:
            LayoutMismatch: it is of another kind.
        """
        stored = {
            name: group["options"]
            for group in source.documents.get(GROUPS, ())
            for name in group["parameters"]
        }
        lines: dict[str, None] = {}
        for optimizer, group, names in ModelParameters(self.model).groups(self.optimizers):
            own = options_of(optimizer, group)
            for options in itertools.islice((stored[it] for it in names if it in stored), 1):
                check_options(options, own, optimizer.defaults, source.step)
                lines.update(dict.fromkeys(differing_options(options, own)))
        # Later it is training that has changed them.
        if lines and not self._has_restored:
            text = f"the optimizer goes on with the options of its state: {shortened(lines)}"
            self._warn(source.step, text)

    def _requested(self) -> Requested:
        """Return what this rank asks a checkpoint for, of model and optimizers."""
        parameters = ModelParameters(self.model)
        updated = {
            name
            for optimizer in self.optimizers
            for group in local_groups(optimizer)
            for parameter in group["params"]
            for name in parameters.shapes(parameter)
        }
        return Requested(names=frozenset({MODEL, OPTIMIZER}), parameters=frozenset(updated))

    def _optimized_names(self) -> set[str]:
        """Return the parameters that optimizers have, also of other ranks, below `optim/`."""
        groups = ModelParameters(self.model).groups(self.optimizers)
        return {f"{OPTIMIZER_PREFIX}{name}" for _, _, names in groups for name in names}

    def _warn(self, step: int, text: str) -> None:
        """Log what is so on all ranks once, and what may be a rank's own on each."""
        if self._rank == 0 or self._is_stage:
            log.warning("step %d: %s", step, text)

    def _seed_randomness(self, seed: int, step: int) -> None:
        # Torch takes 64 bits, which the product soon exceeds.
        torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + self._rank + 1) & (2**64 - 1))
        random.seed(f"{seed}/{step}/{self._rank}")
        numpy_generator.seed(seed, step, self._rank)

    def _restore_randomness(self, begun: BegunRestore, seed: int) -> None:
        """Restore this rank's generators; a rank that the source does not have seeds its own."""
        source, rank = begun.source, self._rank
        self._seed_randomness(seed, source.step)
        own = _generators(rank, begun.generators)
        lacking = [tensor.key for tensor in own if tensor.key not in source.tensors]
        if lacking and len(lacking) < len(own):
            log.warning("step %d does not have %s: seeded again", source.step, ", ".join(lacking))
        for tensor in own:
            if tensor.key in source.tensors:
                _SET_STATE[tensor.key.rpartition("/")[2]](tensor.data)
        document = f"rank/{rank:05d}/random"
        if document in source.documents:
            version, internal, gauss = source.documents[document]
            random.setstate((version, tuple(internal), gauss))


_SET_STATE: Mapping[str, Callable[[torch.Tensor], None]] = {
    "cpu": torch.set_rng_state,
    "numpy": numpy_generator.restore_stored,
    "cuda": torch.cuda.set_rng_state,
}


def _generator_states() -> dict[str, torch.Tensor]:
    """Return copies of the states of the global generators."""
    states = {"cpu": torch.get_rng_state()}
    of_numpy = numpy_generator.stored_state()
    if of_numpy is not None:
        states["numpy"] = of_numpy
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _generators(rank: int, states: Mapping[str, torch.Tensor]) -> tuple[LiveTensor, ...]:
    return tuple(
        LiveTensor(f"rank/{rank:05d}/rng/{name}", tuple(state.shape), Box.whole(state.shape), state)
        for name, state in states.items()
    )


def _tensors_of(key: str, state: Any, fused: FusedTensors) -> tuple[LiveTensor, ...]:
    """Return the tensors, possibly sharded, of an extra object's state; none if it is JSON.

    Raises:
        UsageError: the state has tensors and other values.
    """
    if not isinstance(state, Mapping) or not any(
        isinstance(item, torch.Tensor) for item in state.values()
    ):
        return ()
    for name, item in state.items():
        if not isinstance(item, torch.Tensor):
            raise UsageError(
                f"extra {key!r}: {name!r} is not a tensor, but other values are; "
                "split the object in two"
            )
    return tuple(
        live for name, item in state.items() for live in fused.describe(f"extra/{key}/{name}", item)
    )


def _as_optimizers(made: Any) -> tuple[Optimizer, ...]:
    """Return what `State.optimizer` has returned as a tuple.

    Raises:
        UsageError: it is no optimizer.
    """
    optimizers = (made,) if isinstance(made, Optimizer) or made is None else tuple(made)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"State.optimizer returned {optimizer!r}: return a torch.optim.Optimizer, or "
                "several in a list, as functools.partial(AdamW, lr=1e-3) does"
            )
    return optimizers


def _keys(tensors: Iterable[LiveTensor]) -> set[str]:
    return {tensor.key for tensor in tensors}


def _materialize(model: nn.Module, device: torch.device) -> bool:
    """Allocate memory for a model's tensors on the meta device; return whether there were any.

    Tensors that have memory keep their values, and tensors that are one for several modules stay
    one.

    Raises:
        UsageError: a buffer on the meta device is not saved, so no checkpoint would fill it.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return False
    saved = set(model.state_dict())
    unfilled = [
        name for name, buffer in model.named_buffers() if buffer.is_meta and name not in saved
    ]
    if unfilled:
        raise UsageError(
            f"buffer {unfilled[0]} is on the meta device but not in the model's state_dict(), so "
            "nothing would fill it; create it on World.device inside build"
        )
    entries = [
        (module, name, tensor)
        for module in model.modules()
        for tensors in (own_parameters(module), own_buffers(module))
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    # `to_empty`, but for what DTensor would find out of it: a millisecond for each new shape.
    apply_to_tensors(model, lambda tensor: _with_memory(tensor, device))
    # A tensor that leaves the meta device becomes another object in each module that has it.
    first: dict[int, torch.Tensor] = {}
    for module, name, before in entries:
        tensor = getattr(module, name)
        shared = first.setdefault(id(before), tensor)
        if shared is not tensor:
            setattr(module, name, shared)
    return True


def _with_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not tensor.is_meta:
        return tensor.to(device)
    if isinstance(tensor, DTensor):
        return placed_like(tensor, torch.empty_like(local_of(tensor), device=device))
    return torch.empty_like(tensor, device=device)
