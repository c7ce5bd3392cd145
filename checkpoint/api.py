"""Saves and loads checkpoints without agents or snapshot servers, on one process or collectively.

If there is a process group, ranks exchange the names and boxes that they hold, as JSON, once per
save; each rank writes tensor bytes directly to storage, or by way of one other rank where shards
form no regular grid. A load reads each stored byte on one rank, which hands it on to the others.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Mapping
from contextlib import ExitStack

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.checkpoint.agreement import (
    agreed_steps,
    load_newest_intact,
    on_all_ranks,
    on_all_ranks_gathering,
)
from keepstep.checkpoint.collective import Bytes, all_gather_json, box_of, gather_chunks, rank
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Box, Entry, Json, ShardIndex
from keepstep.checkpoint.layout.documents import merged_documents
from keepstep.checkpoint.live.capture import LiveStateReader
from keepstep.checkpoint.live.optimizer_options import is_json, restore_options
from keepstep.checkpoint.live.restore import allocate, plan_fills
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, describe
from keepstep.checkpoint.shared_restore import fill_together
from keepstep.checkpoint.stored.chunking import plan_chunks
from keepstep.checkpoint.stored.format import Attempt, StoredObject, StoredStep
from keepstep.checkpoint.stored.reader import StoredCheckpoint
from keepstep.checkpoint.stored.storage import open_storage
from keepstep.checkpoint.stored.writer import publish, write_part

log = logging.getLogger("keepstep")

_VALUES = "values"

StateMapping = Mapping[str, object]


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
    live, gathered = on_all_ranks_gathering(
        lambda: _capture(state), lambda live: [uuid.uuid4().hex, _index_of(live).to_json()]
    )
    indexes = [ShardIndex.from_json(index) for _, index in gathered]
    plan = plan_chunks(indexes)
    storage, attempt = open_storage(url), Attempt(StoredStep(step, generation), gathered[0][0])
    tensors = {tensor.key: tensor for tensor in live.tensors}
    collected = gather_chunks(plan, indexes, tensors)

    def read_box(key: str, box: Box) -> Bytes:
        return collected[key, box] if (key, box) in collected else box_of(tensors[key], box)

    _, gathered_parts = on_all_ranks_gathering(
        lambda: write_part(storage, attempt, plan, [rank()], read_box, name=rank()),
        StoredObject.to_json,
    )
    parts = [StoredObject.from_json(part) for part in gathered_parts]
    documents = merged_documents(index.documents for index in indexes)
    on_all_ranks(
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

    With a process group all ranks call it. Each stored byte is then read by one rank, which hands
    it on. A line of the log "keepstep" says how many bytes were read, and for how many of tensors.

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
    candidates = [stored for stored in agreed_steps(url) if step in (None, stored.step)]

    def load_one(step: int | None, generation: int | None) -> int:
        return _load(
            url, state, step, generation,
            strict=strict, convert=convert, resize=frozenset(resize),
        )  # fmt: skip

    if not candidates:
        return load_one(step, None)
    tried = candidates if fallback else candidates[:1]
    return load_newest_intact(url, tried, lambda s: load_one(s.step, s.generation)).result


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

        source, live = on_all_ranks(prepare)
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

    traffic = fill_together(
        lambda: plan_fills(
            live,
            source,
            strict=strict,
            convert=convert,
            keys_of_other_ranks=keys_of_other_ranks,
            resize=resize,
        ),
        source,
    )

    def fill_rest() -> int:
        for model, optimizers in _modules(state):
            restore_options(model, optimizers, source.documents)
        _fill_values(state, source.documents.get(_VALUES, {}))
        return source.step

    loaded_step = on_all_ranks(fill_rest)
    if rank() == 0:
        log.info("%s: loaded step %d: %s", source.storage.url, loaded_step, traffic)
    return loaded_step


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
