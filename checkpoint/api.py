"""Saves and loads checkpoints without agents or snapshot servers, on one process or collectively.

If there is a process group, ranks exchange the names and boxes that they hold, as JSON, once per
save; each rank writes tensor bytes directly to storage, or by way of one other rank where shards
form no regular grid.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.checkpoint.collective import Bytes, all_gather_json, box_of, gather_chunks, rank
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError, LayoutMismatch
from keepstep.checkpoint.layout.boxes import Box, Entry, Json, ShardIndex
from keepstep.checkpoint.layout.documents import merged_documents
from keepstep.checkpoint.live.capture import LiveStateReader
from keepstep.checkpoint.live.optimizer_options import is_json, restore_options
from keepstep.checkpoint.live.restore import allocate, restore
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, describe
from keepstep.checkpoint.stored.chunking import plan_chunks
from keepstep.checkpoint.stored.format import Attempt, StoredObject, StoredStep
from keepstep.checkpoint.stored.reader import StoredCheckpoint, list_steps
from keepstep.checkpoint.stored.storage import open_storage
from keepstep.checkpoint.stored.writer import publish, write_part

log = logging.getLogger("keepstep")

_VALUES = "values"

StateMapping = Mapping[str, object]

_Result = TypeVar("_Result")


def save(url: str, state: StateMapping, *, step: int, generation: int = 0) -> None:
    """Store a checkpoint of `step` under `url`; it is complete and durable on return.

    Args:
        url: a path, `file://`, `s3://bucket/prefix` or `gs://bucket/prefix`.
        state: a module, optimizers of its parameters, tensors (sharded or not), JSON values and
            mappings of these, by name. The module's tensors are stored as `model/<name>` and its
            optimizers' as `optim/<name>/<slot>`.
        step: number of completed steps.
        generation: distinguishes attempts at one step; `load` takes the greatest.

    Raises:
        CheckpointExists: a checkpoint of this step and generation exists already.
        CheckpointError: a rank could not write; every rank raises.
    """
    # All ranks take the name that rank 0 gives the attempt.
    live, gathered = _on_all_ranks_gathering(
        lambda: _capture(state), lambda live: [uuid.uuid4().hex, _index_of(live).to_json()]
    )
    indexes = [ShardIndex.from_json(index) for _, index in gathered]
    plan = plan_chunks(indexes)
    storage, attempt = open_storage(url), Attempt(StoredStep(step, generation), gathered[0][0])
    tensors = {tensor.key: tensor for tensor in live.tensors}
    collected = gather_chunks(plan, indexes, tensors)

    def read_box(key: str, box: Box) -> Bytes:
        return collected[key, box] if (key, box) in collected else box_of(tensors[key], box)

    _, gathered_parts = _on_all_ranks_gathering(
        lambda: write_part(storage, attempt, plan, [rank()], read_box, name=rank()),
        StoredObject.to_json,
    )
    parts = [StoredObject.from_json(part) for part in gathered_parts]
    documents = merged_documents(index.documents for index in indexes)
    _on_all_ranks(
        lambda: publish(storage, attempt, parts, plan.tensors, documents) if rank() == 0 else None
    )


def load(
    url: str,
    state: StateMapping,
    *,
    step: int | None = None,
    strict: bool = True,
    convert: bool = False,
    fallback: bool = False,
    resize: Collection[str] = (),
) -> int:
    """Fill `state` from a checkpoint under `url`, saved in any layout; return its step.

    Args:
        url: as for `save`.
        state: as for `save`; modules, optimizers and tensors are filled in place. Mutable mappings
            get their JSON values. A module without optimizers can be loaded, for inference.
        step: the step to load; None for the newest.
        strict: refuse a checkpoint whose names differ; otherwise fill what both have.
        convert: convert tensors that were saved in another data type.
        fallback: if the checkpoint is damaged, log the reason and load the newest intact one.
        resize: names of parameters that may be larger or smaller than in the checkpoint, such as
            embeddings whose vocabulary was padded: the common part is filled, the rest is zero.
            The same holds for their optimizer state.

    Raises:
        CheckpointMissing: there is no such checkpoint.
        LayoutMismatch: the checkpoint does not fit the state; the message lists the differences.
        CheckpointDamaged: stored bytes were changed or lost.
        CheckpointTooNew: a newer release wrote the checkpoint; `fallback` does not skip it.
    """
    # Only rank 0 lists the steps, so that all ranks load the same one even if a new one appears.
    steps = _on_all_ranks(lambda: list_steps(url) if rank() == 0 else ())
    candidates = all_gather_json([[s.step, s.generation] for s in steps if step in (None, s.step)])[
        0
    ]
    for position, chosen in enumerate(candidates or [[step, None]]):
        try:
            return _load(
                url, state, *chosen, strict=strict, convert=convert, resize=frozenset(resize)
            )
        except CheckpointDamaged as error:
            if not fallback or position == len(candidates) - 1:
                raise
            log.warning("%s: loading the checkpoint before it", error)
    raise AssertionError("unreachable: the last candidate loads or raises")


def _load(
    url: str,
    state: StateMapping,
    step: int | None,
    generation: int | None,
    *,
    strict: bool,
    convert: bool,
    resize: Collection[str],
) -> int:
    with ExitStack() as undo_allocations:

        def prepare() -> tuple[StoredCheckpoint, LiveState]:
            source = StoredCheckpoint.open(url, step, generation)
            for model, optimizers in _modules(state):
                undo = allocate(model, optimizers, source.slots, resize=resize)
                undo_allocations.callback(undo)
            return source, _capture(state)

        source, live = _on_all_ranks(prepare)
        loaded_step = _fill(source, live, state, strict=strict, convert=convert, resize=resize)
        # The load succeeded: the new slots stay.
        undo_allocations.pop_all()
        return loaded_step


def _fill(
    source: StoredCheckpoint,
    live: LiveState,
    state: StateMapping,
    *,
    strict: bool,
    convert: bool,
    resize: Collection[str],
) -> int:
    keys_of_other_ranks: set[str] = set()
    own_keys = {tensor.key for tensor in live.tensors}
    lacks_tensors = any(key not in own_keys for key in source.tensors if key.startswith("model/"))
    # Ranks exchange their keys only if one lacks tensors, as the rank of a pipeline stage does.
    if any(all_gather_json(lacks_tensors)):
        keys_of_other_ranks = {key for keys in all_gather_json(sorted(own_keys)) for key in keys}

    def fill() -> int:
        restore(
            live,
            source,
            strict=strict,
            convert=convert,
            keys_of_other_ranks=keys_of_other_ranks,
            resize=resize,
        )
        for model, optimizers in _modules(state):
            restore_options(model, optimizers, source.documents)
        _fill_values(state, source.documents.get(_VALUES, {}))
        return source.step

    return _on_all_ranks(fill)


def _on_all_ranks(act: Callable[[], _Result]) -> _Result:
    """Run a function on every rank; if it fails on any rank, all ranks raise, for the same reason.

    See `_on_all_ranks_gathering`.
    """
    return _on_all_ranks_gathering(act, lambda _: None)[0]


def _on_all_ranks_gathering(
    act: Callable[[], _Result], share: Callable[[_Result], Json]
) -> tuple[_Result, list[Json]]:
    """Run a function on every rank, and gather what `share` returns for each rank's result.

    Args:
        act: the function to run.
        share: returns the part of the result that every rank gets.

    Returns:
        This rank's result, and what all ranks share, in the order of ranks.

    Raises:
        CheckpointDamaged: the function failed because of damage on some ranks, and did not fail
            otherwise on any. So all ranks decide alike whether to fall back.
        CheckpointError: the function failed on some rank. A rank that failed in the reported way
            raises its own error; the others raise that of the first such rank.
    """
    own_error: Exception | None = None
    result: _Result | None = None
    outcome: dict[str, Json] = {}
    try:
        result = act()
        outcome = {"shared": share(result)}
    except Exception as error:  # noqa: BLE001 - other ranks wait for this one's outcome
        own_error = error
        outcome = {"error": str(error), "damaged": isinstance(error, CheckpointDamaged)}
    outcomes = all_gather_json(outcome)
    failures = {failed: outcome for failed, outcome in enumerate(outcomes) if "error" in outcome}
    if not failures:
        return cast(_Result, result), [outcome["shared"] for outcome in outcomes]
    is_damage = all(failure["damaged"] for failure in failures.values())
    if own_error is not None and isinstance(own_error, CheckpointDamaged) == is_damage:
        raise own_error
    failed_rank, failure = next(
        (failed, failure) for failed, failure in failures.items() if failure["damaged"] == is_damage
    )
    raise (CheckpointDamaged if is_damage else CheckpointError)(
        f"rank {failed_rank}: {failure['error']}"
    ) from own_error


def _modules(state: StateMapping) -> list[tuple[nn.Module, list[Optimizer]]]:
    """Return the state's module with its optimizers, or nothing if it has no module."""
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
    if len(modules) > 1:
        raise LayoutMismatch(
            "the state has several modules; put them into one nn.ModuleDict, or save them under "
            "several URLs"
        )
    if optimizers and not modules:
        raise LayoutMismatch(
            "the state has an optimizer but not the module that names its parameters; add it"
        )
    return [(modules[0], optimizers)] if modules else []


def _capture(state: StateMapping) -> LiveState:
    tensors: list[LiveTensor] = []
    values: dict[str, Json] = {}
    documents: dict[str, Json] = {}
    for model, optimizers in _modules(state):
        captured = LiveStateReader(model, optimizers).capture()
        tensors += captured.tensors
        documents.update(captured.documents)
    _walk(state, "", tensors, values)
    keys = [tensor.key for tensor in tensors]
    if len(keys) != len(set(keys)):
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise LayoutMismatch(
            f"{repeated} is in the state twice; rename the one that is not in the module"
        )
    return LiveState(tuple(tensors), {**documents, _VALUES: values})


def _walk(
    state: StateMapping, prefix: str, tensors: list[LiveTensor], values: dict[str, Json]
) -> None:
    for name, value in state.items():
        key = f"{prefix}{name}"
        if isinstance(value, torch.Tensor):
            tensors.append(describe(key, value))
        elif isinstance(value, Mapping):
            _walk(value, f"{key}/", tensors, values)
        elif is_json(value):
            values[key] = value
        elif prefix or not isinstance(value, nn.Module | Optimizer):
            raise LayoutMismatch(
                f"{key}: a {type(value).__name__} cannot be stored; pass tensors, JSON values and "
                "mappings of them, and the module and its optimizers at the top level"
            )


def _fill_values(state: StateMapping, values: Mapping[str, Json], prefix: str = "") -> None:
    for name, value in list(state.items()):
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            _fill_values(value, values, f"{key}/")
        elif key in values and isinstance(state, dict):
            state[name] = values[key]


def _index_of(live: LiveState) -> ShardIndex:
    entries = tuple(
        Entry(
            key=tensor.key,
            dtype=tensor.dtype,
            global_shape=tensor.global_shape,
            box=tensor.box,
            byte_offset=0,
            nbytes=tensor.data.numel() * tensor.data.element_size(),
        )
        for tensor in live.tensors
    )
    return ShardIndex(0, entries, live.documents)
