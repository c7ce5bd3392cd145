"""Saves and loads checkpoints without agents or snapshot servers, on one process or collectively.

If there is a process group, ranks plan a save together (`keepstep.checkpoint.collective_plan`), and
again only when a rank's boxes have changed. Each rank writes tensor bytes directly to storage, or
by way of one other rank where shards are small or form no regular grid. A load reads each stored
byte on one rank, which hands it on to the others.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, TypeVar, overload

from keepstep.checkpoint.agreement import (
    agreed_steps,
    load_newest_intact,
    newest_first,
    on_all_ranks,
    on_all_ranks_gathering,
)
from keepstep.checkpoint.collective import all_gather_json, rank
from keepstep.checkpoint.collective_plan import agree_on_save, boxes_reader, merge_documents
from keepstep.checkpoint.foreign.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.foreign.opening import NamedForeign, format_before
from keepstep.checkpoint.layout.boxes import Json
from keepstep.checkpoint.layout.descriptions import NOT_DESCRIBED, Descriptions
from keepstep.checkpoint.layout.source import Source
from keepstep.checkpoint.live.model_parameters import ModelParameters
from keepstep.checkpoint.live.optimizer_options import restore_options
from keepstep.checkpoint.live.restore import allocate, fill, plan_fills
from keepstep.checkpoint.live.tensors import LiveState
from keepstep.checkpoint.saving.handle import SaveHandle
from keepstep.checkpoint.saving.process_saver import PROCESS_SAVER
from keepstep.checkpoint.saving.saver import Saver, told_failure
from keepstep.checkpoint.shared_foreign import find_foreign_together, open_foreign_together
from keepstep.checkpoint.shared_metadata import open_together
from keepstep.checkpoint.shared_restore import RestoreTraffic, fill_together
from keepstep.checkpoint.state_mapping import (
    VALUES,
    StateMapping,
    capture,
    fill_values,
    modules_of,
)
from keepstep.checkpoint.stored.chunking import Compression
from keepstep.checkpoint.stored.manifest import StoredObject
from keepstep.checkpoint.stored.object_names import Attempt, StoredStep
from keepstep.checkpoint.stored.reader import StoredCheckpoint
from keepstep.checkpoint.stored.storage import open_storage
from keepstep.checkpoint.stored.writer import publish, write_part

log = logging.getLogger("keepstep")

_Opened = TypeVar("_Opened", StoredCheckpoint, ForeignCheckpoint)

__all__ = ["SaveHandle", "Saver", "load", "save"]


@overload
def save(
    url: str,
    state: StateMapping,
    *,
    step: int,
    generation: int = 0,
    descriptions: Descriptions = NOT_DESCRIBED,
    config: Json = None,
    compression: Compression | None = None,
    block: Literal[True] = True,
) -> None: ...


@overload
def save(
    url: str,
    state: StateMapping,
    *,
    step: int,
    generation: int = 0,
    descriptions: Descriptions = NOT_DESCRIBED,
    config: Json = None,
    compression: Compression | None = None,
    block: Literal[False],
) -> SaveHandle: ...


def save(
    url: str,
    state: StateMapping,
    *,
    step: int,
    generation: int = 0,
    descriptions: Descriptions = NOT_DESCRIBED,
    config: Json = None,
    compression: Compression | None = None,
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
            `model/<name>` and its optimizers' as `optim/<name>/<slot>`. Names are those of the bare
            module, also if it is wrapped by DDP, FSDP1, `torch.compile` or a checkpoint wrapper.
        step: number of completed steps.
        generation: distinguishes attempts at one step; `load` takes the greatest.
        descriptions: what tensors are, as far as names, shapes and placements do not tell: fused
            parts, padding, scales, averages, masters.
        config: the model's configuration, or whatever a reader needs to build it, as JSON.
        compression: "zstd": compress tensors of 1 MiB or more, without loss; None: nothing. The
            same on all ranks.
        block: return when the checkpoint is durable.

    Raises:
        ValueError: there is no such compression.
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
            descriptions=descriptions,
            config=config,
            compression=compression,
        )
    saver = PROCESS_SAVER.current
    failure = None if saver is None else saver.finish()
    storage, stored = on_all_ranks(lambda: (open_storage(url), StoredStep(step, generation)))
    agreed = agree_on_save(
        lambda: capture(state, descriptions, config), failure, PROCESS_SAVER.plans, compression
    )
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
    descriptions: Descriptions = NOT_DESCRIBED,
) -> int:
    """Fill `state` from a checkpoint under `url`, saved in any layout; return its step.

    With a process group all ranks call it. Each stored byte is then read by one rank, which hands
    it on. A line of the log "keepstep" says how many bytes were read, and for how many of tensors.

    Where there is no checkpoint of keepstep, another tool's is read, in any format that `keepstep
    ckpt convert` reads. Of several the latest is read, as rank 0 sees them; each rank reads what it
    wants. What it has and keepstep does not carry is listed by a warning of the log.

    Args:
        url: as for `save`; of another tool's checkpoint, its format may come before it, as in
            `deepspeed:/path`, if it cannot be told from its files.
        state: as for `save`; modules, optimizers and tensors are filled in place. Mutable mappings
            get their JSON values. A module without optimizers can be loaded, for inference.
        step: the step to load; None for the newest. Another tool's checkpoint must have this step.
        strict: refuse a checkpoint whose names differ; otherwise fill what both have.
        convert: convert tensors that were saved in another data type. A parameter that has the data
            type of its stored master takes the master's values, also without this.
        fallback: if the checkpoint is damaged, log the reason and load the newest intact one.
            Without effect on other tools' checkpoints.
        resize: names of parameters that may be larger or smaller than in the checkpoint: the common
            part is filled, the rest is zero. The same holds for their optimizer state.
        descriptions: as for `save`; only needed where the state to fill is sliced by parts, or
            padded. Where the padding differs, all but the padding is filled: in parameters and
            their masters padding stays as it is, in other slots it becomes zero.

    Raises:
        CheckpointMissing: there is no such checkpoint.
        LayoutMismatch: the checkpoint does not fit the state; the message lists the differences.
        CheckpointDamaged: stored bytes were changed or lost.
        CheckpointTooNew: a newer release wrote the checkpoint; `fallback` does not skip it.
    """

    return load_state(
        url, state,
        step=step, strict=strict, convert=convert, fallback=fallback, resize=resize,
        descriptions=descriptions,
    ).step  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What a state was filled from: the step, the documents, and the format in words."""

    step: int
    documents: Mapping[str, Json]
    format_name: str


def load_state(
    url: str,
    state: StateMapping,
    *,
    step: int | None = None,
    strict: bool = True,
    convert: bool = False,
    fallback: bool = False,
    resize: Collection[str] = (),
    descriptions: Descriptions = NOT_DESCRIBED,
) -> LoadedState:
    """Fill `state` from a checkpoint, as `load` does, and return what it was filled from."""

    def load_foreign(source: ForeignCheckpoint) -> LoadedState:
        return _load_foreign(
            source, state,
            strict=strict, convert=convert, resize=frozenset(resize), descriptions=descriptions,
        )  # fmt: skip

    if named := format_before(url):
        return load_foreign(open_foreign_together(named, step=step))
    listed = newest_first(url) if step is None else iter(agreed_steps(url))
    newest = next(listed, None)
    if newest is None and (found := find_foreign_together(url, step)):
        return load_foreign(open_foreign_together(NamedForeign(url, None), found, step=step))
    all_steps = itertools.chain(() if newest is None else [newest], listed)
    candidates = (stored for stored in all_steps if step in (None, stored.step))
    first = next(candidates, None)

    def load_one(step: int | None, generation: int | None) -> LoadedState:
        return _load(
            url, state, step, generation,
            strict=strict, convert=convert, resize=frozenset(resize),
            descriptions=descriptions,
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
    descriptions: Descriptions,
) -> LoadedState:
    opened = open_together(url, step, generation)

    def fill_tensors(source: StoredCheckpoint, live: LiveState, others: set[str]) -> RestoreTraffic:
        return fill_together(
            lambda: plan_fills(
                live,
                source,
                strict=strict,
                convert=convert,
                keys_of_other_ranks=others,
                resize=resize,
            ),
            source,
        )

    return _fill_state(opened, url, state, descriptions, fill_tensors)


def _load_foreign(
    opened: ForeignCheckpoint,
    state: StateMapping,
    *,
    strict: bool,
    convert: bool,
    resize: Collection[str],
    descriptions: Descriptions,
) -> LoadedState:
    """Fill a state from another tool's checkpoint, of which each rank reads what it wants."""

    def fill_tensors(source: ForeignCheckpoint, live: LiveState, others: set[str]) -> str:
        def fill_own() -> None:
            fills = plan_fills(
                live,
                source,
                strict=strict,
                convert=convert,
                keys_of_other_ranks=others,
                resize=resize,
            )
            fill(fills, source)

        on_all_ranks(fill_own)
        return f"from {source.format_name}"

    loaded = _fill_state(opened, opened.url, state, descriptions, fill_tensors)
    if rank() == 0:
        for left in opened.left_out:
            log.warning("%s: left out %s: %s", opened.url, left.name, left.reason)
    return loaded


def _fill_state(
    opened: _Opened,
    url: str,
    state: StateMapping,
    descriptions: Descriptions,
    fill_tensors: Callable[[_Opened, LiveState, set[str]], RestoreTraffic | str],
) -> LoadedState:
    """Fill a state from a checkpoint that all ranks have opened.

    Args:
        opened: the checkpoint.
        url: where it is, for the log.
        state: as for `load`.
        descriptions: as for `load`.
        fill_tensors: fills live tensors, given the keys of other ranks' tensors; returns what rank
            0 logs of it.
    """
    names = _names_of_all_ranks(state)
    with ExitStack() as undo_allocations:

        def prepare() -> tuple[_Opened, LiveState]:
            source = opened
            for model, optimizers in modules_of(state):
                source = source.named_for(names)
                undo = allocate(model, optimizers, source, descriptions=descriptions)
                undo_allocations.callback(undo)
            return source, capture(state, descriptions)

        source, live = on_all_ranks(prepare)
        told = fill_tensors(source, live, _keys_of_other_ranks(source, live))

        def fill_rest() -> None:
            for model, optimizers in modules_of(state):
                restore_options(model, optimizers, source.documents)
            fill_values(state, source.documents.get(VALUES, {}))

        on_all_ranks(fill_rest)
        # The load succeeded: the new slots stay.
        undo_allocations.pop_all()
    if rank() == 0:
        log.info("%s: loaded step %d: %s", url, source.step, told)
    format_name = source.format_name if isinstance(source, ForeignCheckpoint) else "keepstep"
    return LoadedState(source.step, source.documents, format_name)


def _names_of_all_ranks(state: StateMapping) -> set[str]:
    """Return the names of the models of all ranks, of which pipeline stages have their own.

    So all ranks take the names in a checkpoint for the same.
    """
    own_names = on_all_ranks(
        lambda: [
            name for model, _ in modules_of(state) for name in ModelParameters(model).all_names()
        ]
    )
    return {name for names_of_rank in all_gather_json(own_names) for name in names_of_rank}


def _keys_of_other_ranks(source: Source, live: LiveState) -> set[str]:
    """Return the keys of all ranks' tensors if one rank lacks some, as a pipeline stage does."""
    own_keys = {tensor.key for tensor in live.tensors}
    lacks_tensors = any(key not in own_keys for key in source.tensors if key.startswith("model/"))
    if not any(all_gather_json(lacks_tensors)):
        return set()
    return {key for keys in all_gather_json(sorted(own_keys)) for key in keys}
