"""Saves and loads checkpoints without agents or snapshot servers, on one process or collectively.

If there is a process group, ranks plan a save together (`keepstep.checkpoint.collective_plan`), and
again only when a rank's boxes have changed. Each rank writes tensor bytes directly to storage, or
by way of one other rank where shards are small or form no regular grid. A load reads each stored
byte on one rank, which hands it on to the others.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Literal, overload

from keepstep.checkpoint.agreement import (
    agreed_steps,
    load_newest_intact,
    newest_first,
    on_all_ranks,
    on_all_ranks_gathering,
)
from keepstep.checkpoint.collective import all_gather_json, rank
from keepstep.checkpoint.collective_plan import agree_on_save, boxes_reader, merge_documents
from keepstep.checkpoint.layout.documents import PARTS
from keepstep.checkpoint.layout.part_table import PartTable
from keepstep.checkpoint.live.optimizer_options import restore_options
from keepstep.checkpoint.live.part_slices import FusedTensors, check_parts
from keepstep.checkpoint.live.restore import allocate, plan_fills
from keepstep.checkpoint.live.tensors import LiveState
from keepstep.checkpoint.saving.handle import SaveHandle
from keepstep.checkpoint.saving.process_saver import PROCESS_SAVER
from keepstep.checkpoint.saving.saver import Saver, told_failure
from keepstep.checkpoint.shared_restore import fill_together
from keepstep.checkpoint.state_mapping import (
    VALUES,
    StateMapping,
    capture,
    fill_values,
    modules_of,
)
from keepstep.checkpoint.stored.format import Attempt, StoredObject, StoredStep
from keepstep.checkpoint.stored.reader import StoredCheckpoint
from keepstep.checkpoint.stored.storage import open_storage
from keepstep.checkpoint.stored.writer import publish, write_part

log = logging.getLogger("keepstep")

__all__ = ["SaveHandle", "Saver", "load", "save"]


@overload
def save(
    url: str,
    state: StateMapping,
    *,
    step: int,
    generation: int = 0,
    parts: Mapping[str, PartTable] | None = None,
    parts_mesh_axis: str = "tp",
    block: Literal[True] = True,
) -> None: ...


@overload
def save(
    url: str,
    state: StateMapping,
    *,
    step: int,
    generation: int = 0,
    parts: Mapping[str, PartTable] | None = None,
    parts_mesh_axis: str = "tp",
    block: Literal[False],
) -> SaveHandle: ...


def save(
    url: str,
    state: StateMapping,
    *,
    step: int,
    generation: int = 0,
    parts: Mapping[str, PartTable] | None = None,
    parts_mesh_axis: str = "tp",
    block: bool = True,
) -> SaveHandle | None:
    """Store a checkpoint of `step` under `url`; it is complete and durable on return.

    With `block=False` this returns once the state is copied; a process of its own writes the
    checkpoint while training goes on, and the handle tells when it is durable. The first such save
    makes that process and the memory of the copy, which are kept. One save is in progress at most:
    any further one waits for it. A save that failed in the background is told, on all ranks alike,
    by a warning at the next save and by `previous_error` of its handle. The interpreter's exit
    finishes a save in progress, for ten minutes at most. See `Saver` to say when these things end.

    Args:
        url: a path, `file://`, `s3://bucket/prefix` or `gs://bucket/prefix`.
        state: a module, optimizers of its parameters, tensors (sharded or not), flat fragments of
            tensors, JSON values and mappings of these, by name. The module's tensors are stored as
            `model/<name>` and its optimizers' as `optim/<name>/<slot>`.
        step: number of completed steps.
        generation: distinguishes attempts at one step; `load` takes the greatest.
        parts: the parts of fused tensors, such as q, k and v, by patterns of parameter names (or of
            keys, for other tensors): `{"*.qkv.weight": PartTable(...)}`. Optimizer slots of the
            parameter's shape have the same parts. They are stored in the order of the table,
            whatever the number of ranks that slice them.
        parts_mesh_axis: name of the device mesh's axis that slices every part; other axes split
            rows.
        block: return when the checkpoint is durable.

    Raises:
        CheckpointExists: a checkpoint of this step and generation exists already.
        CheckpointError: a rank could not write; every rank raises. With `block=False` the handle
            has these errors, and only a state that cannot be stored raises (LayoutMismatch).
    """
    if not block:
        return PROCESS_SAVER.get().save(
            url,
            state,
            step=step,
            generation=generation,
            parts=parts,
            parts_mesh_axis=parts_mesh_axis,
        )
    saver = PROCESS_SAVER.current
    failure = None if saver is None else saver.finish()
    fused = FusedTensors(parts or {}, parts_mesh_axis)
    storage, stored = on_all_ranks(lambda: (open_storage(url), StoredStep(step, generation)))
    agreed = agree_on_save(lambda: capture(state, fused), failure, PROCESS_SAVER.plans)
    told_failure(agreed.failures)
    if saver is not None:
        saver.forget_failure()
    attempt = Attempt(stored, agreed.attempt)
    plan = agreed.plan
    read_box = boxes_reader(plan, agreed.live.tensors)
    _, gathered_parts = on_all_ranks_gathering(
        lambda: write_part(storage, attempt, plan.own.plan, [0], read_box, name=rank()),
        StoredObject.to_json,
    )
    written = [StoredObject.from_json(part) for part in gathered_parts]
    documents = merge_documents(agreed.documents)
    on_all_ranks(
        lambda: (
            publish(
                storage, attempt, written, plan.tensors.tensors, plan.tensors.writers, documents
            )
            if rank() == 0
            else None
        )
    )
    return None


def load(
    url: str,
    state: StateMapping,
    *,
    step: int | None = None,
    strict: bool = True,
    convert: bool = False,
    fallback: bool = False,
    resize: Collection[str] = (),
    parts: Mapping[str, PartTable] | None = None,
    parts_mesh_axis: str = "tp",
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
        parts: as for `save`; only needed where the state to fill is sliced.
        parts_mesh_axis: as for `save`.

    Raises:
        CheckpointMissing: there is no such checkpoint.
        LayoutMismatch: the checkpoint does not fit the state; the message lists the differences.
        CheckpointDamaged: stored bytes were changed or lost.
        CheckpointTooNew: a newer release wrote the checkpoint; `fallback` does not skip it.
    """
    fused = FusedTensors(parts or {}, parts_mesh_axis)
    candidates = (
        newest_first(url)
        if step is None
        else (stored for stored in agreed_steps(url) if stored.step == step)
    )
    first = next(candidates, None)

    def load_one(step: int | None, generation: int | None) -> int:
        return _load(
            url, state, step, generation,
            strict=strict, convert=convert, resize=frozenset(resize), fused=fused,
        )  # fmt: skip

    if first is None:
        return load_one(step, None)
    tried = itertools.chain([first], candidates if fallback else ())
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
    fused: FusedTensors,
) -> int:
    with ExitStack() as undo_allocations:

        def prepare() -> tuple[StoredCheckpoint, LiveState]:
            source = StoredCheckpoint.open(url, step, generation)
            for model, optimizers in modules_of(state):
                undo = allocate(model, optimizers, source.slots, resize=resize, fused=fused)
                undo_allocations.callback(undo)
            live = capture(state, fused)
            check_parts(source.documents.get(PARTS, {}), live.documents.get(PARTS, {}))
            return source, live

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
        for model, optimizers in modules_of(state):
            restore_options(model, optimizers, source.documents)
        fill_values(state, source.documents.get(VALUES, {}))
        return source.step

    loaded_step = on_all_ranks(fill_rest)
    if rank() == 0:
        log.info("%s: loaded step %d: %s", source.storage.url, loaded_step, traffic)
    return loaded_step
