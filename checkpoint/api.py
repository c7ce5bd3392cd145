"""Saves and loads checkpoints without agents or snapshot servers, on one process or collectively.

The ranks of a process group plan a save together (`checkpoint.ranks.collective_plan`), and
again only when a rank's boxes have changed. Each rank writes tensor bytes directly to storage, or
by way of one other rank where shards are small or form no regular grid. A load reads each stored
byte on one rank, which hands it on to the others.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, overload

from torch.distributed import ProcessGroup

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.completeness import (
    Requested,
)
from keepstep.checkpoint.format.layout.descriptions import NOT_DESCRIBED, Descriptions
from keepstep.checkpoint.format.layout.location import Location, split_format_prefix
from keepstep.checkpoint.format.layout.quantized import is_quantized
from keepstep.checkpoint.format.stored.chunking import Compression
from keepstep.checkpoint.format.stored.object_names import Attempt, StoredStep, whole_number
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import missing
from keepstep.checkpoint.format.stored.storage import Storage, open_storage
from keepstep.checkpoint.format.stored.urls import url_text
from keepstep.checkpoint.live.fills import Fill
from keepstep.checkpoint.live.state_mapping import (
    StateMapping,
    capture,
)
from keepstep.checkpoint.live.tensors import LiveState
from keepstep.checkpoint.ranks.agreement import (
    check_same,
    load_newest_intact,
    older_steps,
)
from keepstep.checkpoint.ranks.collective_plan import (
    agree_on_save,
    boxes_reader,
)
from keepstep.checkpoint.ranks.control_group import CONTROL_GROUPS, ControlGroup
from keepstep.checkpoint.ranks.fill_state import (
    LoadOptions,
    LoadReport,
    fill_state,
    fitted_source,
    planned,
)
from keepstep.checkpoint.ranks.shared_metadata import find_together, open_together
from keepstep.checkpoint.ranks.shared_restore import RestoreTraffic, fill_together
from keepstep.checkpoint.saving.commit import commit_together
from keepstep.checkpoint.saving.handle import SaveHandle
from keepstep.checkpoint.saving.parts import DirectPart
from keepstep.checkpoint.saving.process_saver import PROCESS_SAVER
from keepstep.checkpoint.saving.saver import Saver, report_previous_failure

__all__ = ["SaveHandle", "Saver", "load", "save"]


@overload
def save(
    url: str | os.PathLike[str],
    state: StateMapping,
    *,
    step: int,
    generation: int = 0,
    descriptions: Descriptions = NOT_DESCRIBED,
    config: Json = None,
    compression: Compression | None = None,
    process_group: ProcessGroup | None = None,
    block: Literal[True] = True,
) -> None: ...


@overload
def save(
    url: str | os.PathLike[str],
    state: StateMapping,
    *,
    step: int,
    generation: int = 0,
    descriptions: Descriptions = NOT_DESCRIBED,
    config: Json = None,
    compression: Compression | None = None,
    process_group: ProcessGroup | None = None,
    block: Literal[False],
) -> SaveHandle: ...


def save(
    url: str | os.PathLike[str],
    state: StateMapping,
    *,
    step: int,
    generation: int = 0,
    descriptions: Descriptions = NOT_DESCRIBED,
    config: Json = None,
    compression: Compression | None = None,
    process_group: ProcessGroup | None = None,
    block: bool = True,
) -> SaveHandle | None:
    """Store a checkpoint of `step` under `url`; it is complete and durable on return.

    With `block=False` this returns once the state is copied; a process of its own writes the
    checkpoint while training goes on, and the handle shows when it is durable. The first such save
    makes that process and the memory of the copy, which are kept. One save is in progress at most:
    any further one waits for it. If a background save fails, every rank logs a warning at the next
    save, and that one's handle has the error as `previous_error`. The interpreter's exit finishes a
    save in progress, for ten minutes at most. See `Saver` to say when these things end.

    Args:
        url: a path, `file://`, `s3://bucket/prefix` or `gs://bucket/prefix`: one storage, which all
            ranks reach.
        state: a module, optimizers of its parameters, tensors (sharded or not), flat fragments of
            tensors, JSON values and mappings of these, by name. The module's tensors are stored as
            `model/<name>` and its optimizers' as `optim/<name>/<slot>`. Names are those of the bare
            module, also if it is wrapped by DDP, FSDP1, `torch.compile` or a checkpoint wrapper.
            All ranks' values are stored; of values of one name that differ, the last rank's.
        step: number of completed steps, the same on all ranks.
        generation: distinguishes attempts at one step; `load` takes the greatest. The same on all
            ranks.
        descriptions: what tensors are, as far as names, shapes and placements do not tell: fused
            parts, padding, scales, averages, masters.
        config: the model's configuration, or whatever a reader needs to build it, as JSON.
        compression: "zstd": compress tensors of 1 MiB or more, without loss; None: nothing. The
            same on all ranks.
        process_group: the ranks that save together, each of which makes the call; None for the
            default group, or for one process without any. Ranks that are not in it do something
            else meanwhile.
        block: return when the checkpoint is durable. The same on all ranks.

    Raises:
        ValueError: there is no such compression.
        CheckpointExists: a checkpoint of this step and generation exists already.
        CheckpointError: a rank could not write, or wrote elsewhere; every rank raises. With
            `block=False` the handle has these errors, and only a state that cannot be stored
            (LayoutMismatch) and arguments that are invalid or differ between ranks raise.
    """
    if not block:
        return PROCESS_SAVER.get(process_group).save(
            url,
            state,
            step=step,
            generation=generation,
            descriptions=descriptions,
            config=config,
            compression=compression,
        )
    group = CONTROL_GROUPS.of(process_group)
    saver = PROCESS_SAVER.current
    failure = None if saver is None else saver.finish()
    opened: list[Storage] = []

    def prepare() -> LiveState:
        opened.append(open_storage(url_text(url)))
        return capture(state, descriptions, config)

    agreed = agree_on_save(
        prepare, failure, PROCESS_SAVER.plans, group, compression, step=step, generation=generation
    )
    (storage,) = opened
    if report_previous_failure(agreed.failures) is not None and saver is not None:
        saver.forget_failure()
    part = DirectPart(
        storage,
        Attempt(agreed.stored, agreed.attempt),
        group.rank,
        agreed.plan.own,
        agreed.plan.tensors,
        boxes_reader(agreed, group),
        agreed.documents,
        PROCESS_SAVER.last_part,
    )
    commit_together(part, group)
    return None


def load(
    url: str | os.PathLike[str],
    state: StateMapping,
    *,
    step: int | None = None,
    strict: bool = True,
    convert: bool = False,
    fallback: bool = False,
    resize: Collection[str] = (),
    descriptions: Descriptions = NOT_DESCRIBED,
    rules: str | None = None,
    config: Mapping[str, Json] | None = None,
    process_group: ProcessGroup | None = None,
) -> int:
    """Fill `state` from a checkpoint under `url`, saved in any layout; return its step.

    All ranks of the process group call it. Each stored byte is then read by one rank, which hands
    it on. A line of the log "keepstep" says how many bytes were read, and for how many of tensors.

    Where there is no checkpoint of keepstep, another tool's is read, in any format that `keepstep
    ckpt convert` reads. Of several the latest is read, as rank 0 sees them; each rank reads what it
    wants. Anything that keepstep cannot import is listed in a warning.

    Args:
        url: as for `save`; of another tool's checkpoint, its format may come before it, as in
            `deepspeed:/path`, if its files do not show it.
        state: as for `save`; modules, optimizers and tensors are filled in place. Mutable mappings
            get their JSON values. A module without optimizers can be loaded, for inference. Where
            another tool's checkpoint numbers an optimizer's parameters, they are those of the
            optimizer here, in its order: of that of the same name, or the only one.
        step: the step to load; None for the newest. Another tool's checkpoint must have this step.
        strict: of each top-level name of the state (`model`, `optimizer`, ...), refuse a checkpoint
            that lacks anything that the state has, or has anything that the state does not take;
            otherwise fill what both have, and list the rest by warnings of the log. What it has
            under other names is not an error: a line of the log counts it.
        convert: convert tensors that were saved in another data type, where only rounding loses
            anything: no fraction, sign or imaginary part is dropped. A parameter that has the data
            type of its stored master takes the master's values, also without this. Quantized
            weights that the module has plain are dequantized if it is known how: their scales are
            described, or the configuration's `quantization_config` is one of fp8, GPTQ, AWQ or
            compressed-tensors. Otherwise they are refused, also with `strict=False`.
        fallback: if the checkpoint is damaged, log the reason and load the newest intact one.
            Without effect on other tools' checkpoints.
        resize: names of parameters that may be larger or smaller than in the checkpoint: the common
            part is filled, the rest is zero. The same holds for their optimizer state.
        descriptions: as for `save`; only needed where the state to fill is sliced by parts, or
            padded. Where the padding differs, all but the padding is filled: in parameters and
            their masters padding stays as it is, in other slots it becomes zero.
        rules: how tensors get the module's names and shapes from those of the checkpoint: a file of
            rules, or FAMILY:FROM:TO of a preset, as `llama:megatron:live`. Each rank then reads
            what it wants. They have to fit all of the checkpoint, also what is not loaded.
        config: the model's configuration, for rules; None for that of the checkpoint.
        process_group: as for `save`; need not be the ranks that have saved.

    Raises:
        CheckpointMissing: there is no such checkpoint, or no such file of rules.
        RulesInvalid: the rules do not fit the checkpoint, or are none.
        LayoutMismatch: the checkpoint does not fit the state; the message lists the differences.
        CheckpointDamaged: stored bytes were changed or lost.
        CheckpointTooNew: a newer release wrote the checkpoint; `fallback` does not skip it.
    """
    if isinstance(resize, str):
        raise CheckpointError(f"resize={resize!r} is one text; give names, as resize=[{resize!r}]")
    options = LoadOptions(
        strict=strict,
        convert=convert,
        resize=frozenset(resize),
        descriptions=descriptions,
        rules=rules,
        config=config,
    )
    group = CONTROL_GROUPS.of(process_group)
    return load_state(url, state, options, group, step=step, fallback=fallback).step


def load_state(
    url: str | os.PathLike[str],
    state: StateMapping,
    options: LoadOptions,
    group: ControlGroup,
    *,
    step: int | None = None,
    fallback: bool = False,
) -> LoadReport:
    """Fill `state` from a checkpoint, as `load` does, and return what it was filled from."""

    def prepare() -> tuple[str, Location, Storage, int | None]:
        target = url_text(url)
        location = split_format_prefix(target)
        number = None if step is None else whole_number("step", step)
        return target, location, open_storage(location.url), number

    # Ranks whose options differ would wait for each other in different collectives.
    (target, location, storage, number), given = group.run_and_share(
        prepare,
        lambda prepared: {
            "url": prepared[0],
            "step": prepared[3],
            "strict": options.strict,
            "convert": options.convert,
            "fallback": fallback,
            # Their files may lie elsewhere on each rank; what they lead to is compared later.
            "rules": "none" if options.rules is None else "given",
        },
    )
    check_same(given, group, "load one checkpoint together")
    return _load_from(target, location, storage, state, options, group, number, fallback=fallback)


def _load_from(
    url: str,
    location: Location,
    storage: Storage,
    state: StateMapping,
    options: LoadOptions,
    group: ControlGroup,
    step: int | None,
    *,
    fallback: bool,
) -> LoadReport:
    """Fill a state as `load_state` does, with the arguments that all ranks have given."""
    found = find_together(storage, group, step) if location.format is None else None
    if found is None:
        # The readers of other tools' checkpoints are imported only where one is read.
        from keepstep.checkpoint.ranks.foreign_load import load_foreign

        if report := load_foreign(location, state, options, group, step):
            return report
        raise missing(storage, step)

    def load_one(stored: StoredStep) -> LoadReport:
        if stored == found.stored:
            return _load_stored(found.open, url, state, options, group)
        opened = open_together(storage, group, stored.step, stored.generation)
        return _load_stored(lambda: opened, url, state, options, group)

    older = (s for s in older_steps(storage, found.stored, group) if step in (None, s.step))
    tried = itertools.chain([found.stored], older if fallback else ())
    try:
        return load_newest_intact(url, tried, load_one, group).result
    except CheckpointDamaged as error:
        # It is raised on all ranks, so that all of them list the others.
        count = sum(1 for _ in older)
        if not count:
            raise
        raise CheckpointDamaged(
            f"{error}; older checkpoints there: {count}; fallback=True loads the newest intact one"
        ) from error


def _load_stored(
    open_source: Callable[[], StoredCheckpoint],
    url: str,
    state: StateMapping,
    options: LoadOptions,
    group: ControlGroup,
) -> LoadReport:
    """Fill a state from a checkpoint of keepstep's, of which each byte is read by one rank.

    With rules, and where weights may be dequantized, each rank reads what it wants.
    """
    if options.rules is not None or options.convert:
        opened = group.run_on_all_ranks(open_source)
        if options.rules is not None or is_quantized(opened.documents):
            from keepstep.checkpoint.ranks.foreign_load import load_stored_by_each

            return load_stored_by_each(opened, url, state, options, group)
        open_source = lambda: opened  # noqa: E731

    def fill_tensors(
        source: StoredCheckpoint, live: LiveState, requested: Requested
    ) -> RestoreTraffic:
        def plan() -> Sequence[Fill]:
            fitted_source(live, source, requested, options)
            return planned(live, source, requested, options)

        return fill_together(plan, source, group)

    return fill_state(open_source, "keepstep", url, state, options, group, fill_tensors)
