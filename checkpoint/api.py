"""Saves and loads checkpoints without agents or snapshot servers, on one process or collectively.

The ranks of a process group plan a save together (`checkpoint.ranks.collective_plan`), and
again only when a rank's boxes have changed. Each rank writes tensor bytes directly to storage, or
by way of one other rank where shards are small or form no regular grid. A load reads each stored
byte on one rank, which hands it on to the others.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Generic, Literal, Protocol, Self, TypeVar, overload

from torch.distributed import ProcessGroup

from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint, LeftOut, summary
from keepstep.checkpoint.convert.read.opening import NamedForeign, format_before
from keepstep.checkpoint.convert.read.rank_cuts import RankRules
from keepstep.checkpoint.convert.read.recognition import Recognized
from keepstep.checkpoint.convert.write.dequantized import (
    Dequantized,
    dequantized,
    describe_dequantized,
    fitted,
)
from keepstep.checkpoint.convert.write.opened import Opened, without_wrapper_names
from keepstep.checkpoint.convert.write.request import configuration
from keepstep.checkpoint.convert.write.respelling import Respelled
from keepstep.checkpoint.convert.write.rules_given import rank_rules, respell
from keepstep.checkpoint.errors import RulesInvalid
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.completeness import (
    OPTIMIZER,
    Requested,
    has_optimizer_state,
    leaves_anything,
    not_requested,
    taken_names,
)
from keepstep.checkpoint.format.layout.descriptions import NOT_DESCRIBED, Descriptions
from keepstep.checkpoint.format.layout.documents import VALUES
from keepstep.checkpoint.format.layout.quantized import is_quantized
from keepstep.checkpoint.format.layout.source import Source, TensorSpec
from keepstep.checkpoint.format.stored.chunking import Compression
from keepstep.checkpoint.format.stored.object_names import Attempt, StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import missing
from keepstep.checkpoint.format.stored.storage import Storage, open_storage
from keepstep.checkpoint.format.stored.strict_json import to_strict_json
from keepstep.checkpoint.format.stored.writer import publish, write_part
from keepstep.checkpoint.live.allocation import allocate
from keepstep.checkpoint.live.computed import fit_computed
from keepstep.checkpoint.live.fills import Fill, fill
from keepstep.checkpoint.live.model_parameters import ModelParameters
from keepstep.checkpoint.live.optimizer_options import restore_options
from keepstep.checkpoint.live.restore import plan_fills, unmatched
from keepstep.checkpoint.live.state_mapping import (
    StateMapping,
    capture,
    check_mutable,
    fill_values,
    modules_of,
    optimizer_orders,
    requested_by,
)
from keepstep.checkpoint.live.tensors import LiveState
from keepstep.checkpoint.ranks.agreement import (
    load_newest_intact,
    older_steps,
    union_of_all_ranks,
)
from keepstep.checkpoint.ranks.collective_plan import (
    agree_on_save,
    boxes_reader,
    merge_reports,
    report_parts,
)
from keepstep.checkpoint.ranks.control_group import CONTROL_GROUPS, ControlGroup
from keepstep.checkpoint.ranks.shared_foreign import find_foreign_together, open_foreign_together
from keepstep.checkpoint.ranks.shared_metadata import find_together, open_together
from keepstep.checkpoint.ranks.shared_restore import RestoreTraffic, fill_together
from keepstep.checkpoint.saving.handle import SaveHandle
from keepstep.checkpoint.saving.process_saver import PROCESS_SAVER
from keepstep.checkpoint.saving.saver import Saver, told_failure

log = logging.getLogger("keepstep")


class _Named(Source, Protocol):
    """A checkpoint whose tensors may have names of wrappers."""

    @property
    def may_be_renamed(self) -> bool:
        """Whether `named_for` may change anything, or depend on the parameters' names."""
        ...

    def named_for(self, parameters: Collection[str]) -> Self:
        """Return it with its tensors named as those of a model with these parameters."""
        ...


_Opened = TypeVar("_Opened", bound=_Named)

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
    process_group: ProcessGroup | None = None,
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
    process_group: ProcessGroup | None = None,
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
    process_group: ProcessGroup | None = None,
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
        block: return when the checkpoint is durable.

    Raises:
        ValueError: there is no such compression.
        CheckpointExists: a checkpoint of this step and generation exists already.
        CheckpointError: a rank could not write, or wrote elsewhere; every rank raises. With
            `block=False` the handle has these errors, and only a state that cannot be stored
            (LayoutMismatch) and steps that differ raise.
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
    opened: list[tuple[Storage, StoredStep]] = []

    def prepare() -> LiveState:
        opened.append((open_storage(url), StoredStep(step, generation)))
        return capture(state, descriptions, config)

    agreed = agree_on_save(
        prepare, failure, PROCESS_SAVER.plans, group, compression, step=step, generation=generation
    )
    ((storage, stored),) = opened
    told_failure(agreed.failures)
    if saver is not None:
        saver.forget_failure()
    attempt = Attempt(stored, agreed.attempt)
    plan = agreed.plan
    read_box = boxes_reader(agreed, group)
    reports = report_parts(
        lambda content: write_part(
            storage,
            attempt,
            plan.own.plan,
            [0],
            read_box,
            name=group.rank,
            content=content,
            last=PROCESS_SAVER.last_part,
        ),
        agreed.documents,
        group,
    )

    def publish_parts() -> None:
        parts, documents = merge_reports(reports)
        publish(storage, attempt, parts, plan.tensors.tensors, plan.tensors.writers, documents)

    group.run_on_all_ranks(lambda: publish_parts() if group.rank == 0 else None)
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
    rules: str | None = None,
    config: Mapping[str, Json] | None = None,
    process_group: ProcessGroup | None = None,
) -> int:
    """Fill `state` from a checkpoint under `url`, saved in any layout; return its step.

    All ranks of the process group call it. Each stored byte is then read by one rank, which hands
    it on. A line of the log "keepstep" says how many bytes were read, and for how many of tensors.

    Where there is no checkpoint of keepstep, another tool's is read, in any format that `keepstep
    ckpt convert` reads. Of several the latest is read, as rank 0 sees them; each rank reads what it
    wants. What it has and keepstep does not carry is listed by a warning of the log.

    Args:
        url: as for `save`; of another tool's checkpoint, its format may come before it, as in
            `deepspeed:/path`, if it cannot be told from its files.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a checkpoint fills a state; each as for `load`."""

    strict: bool = True
    convert: bool = False
    resize: Collection[str] = ()
    descriptions: Descriptions = NOT_DESCRIBED
    rules: str | None = None
    config: Mapping[str, Json] | None = None
    optimizers_may_begin_anew: bool = False
    """Whether a checkpoint without any optimizer state is complete, as one of weights alone is."""


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What a state was filled from: the step, the documents, and the format in words."""

    step: int
    documents: Mapping[str, Json]
    format_name: str


def load_state(
    url: str,
    state: StateMapping,
    options: LoadOptions,
    group: ControlGroup,
    *,
    step: int | None = None,
    fallback: bool = False,
) -> LoadedState:
    """Fill `state` from a checkpoint, as `load` does, and return what it was filled from."""

    def load_foreign(named: NamedForeign, found: Recognized | None = None) -> LoadedState:
        of_ranks = group.run_on_all_ranks(lambda: _rank_rules(options))
        # Rules lead to the module's names from others.
        orders = None if options.rules else group.run_on_all_ranks(lambda: optimizer_orders(state))
        source = open_foreign_together(
            named, group, found, step=step, parameter_names=orders, rank_rules=of_ranks
        )
        return _load_by_each(
            Opened(source, source.format_name, source.left_out),
            source.url,
            state,
            options,
            group,
        )

    if named := format_before(url):
        return load_foreign(named)
    found = find_together(url, group, step)
    if found is None:
        if foreign := find_foreign_together(url, group, step):
            return load_foreign(NamedForeign(url, None), foreign)
        raise missing(url, step)

    def load_one(stored: StoredStep) -> LoadedState:
        if stored == found.stored:
            return _load_stored(found.open, url, state, options, group)
        opened = open_together(url, group, stored.step, stored.generation)
        return _load_stored(lambda: opened, url, state, options, group)

    older = (s for s in older_steps(url, found.stored, group) if step in (None, s.step))
    tried = itertools.chain([found.stored], older if fallback else ())
    return load_newest_intact(url, tried, load_one, group).result


def _load_stored(
    open_source: Callable[[], StoredCheckpoint],
    url: str,
    state: StateMapping,
    options: LoadOptions,
    group: ControlGroup,
) -> LoadedState:
    """Fill a state from a checkpoint of keepstep's, of which each byte is read by one rank.

    With rules, and where weights may be dequantized, each rank reads what it wants.
    """
    if options.rules is not None or options.convert:
        opened = group.run_on_all_ranks(open_source)
        if options.rules is not None or is_quantized(opened.documents):
            return _load_by_each(Opened(opened, "keepstep"), url, state, options, group)
        open_source = lambda: opened  # noqa: E731

    def fill_tensors(
        source: StoredCheckpoint, live: LiveState, requested: Requested
    ) -> RestoreTraffic:
        def plan() -> Sequence[Fill]:
            _fitted(live, source, requested, options)
            return _planned(live, source, requested, options)

        return fill_together(plan, source, group)

    return _fill_state(open_source, "keepstep", url, state, options, group, fill_tensors)


def _load_by_each(
    opened: Opened, url: str, state: StateMapping, options: LoadOptions, group: ControlGroup
) -> LoadedState:
    """Fill a state from a checkpoint, of which each rank reads what it wants."""
    opened, spellings = group.run_and_share(lambda: _spelled(opened, options), _spelling)
    for number, spelling in zip(group.names, spellings, strict=True):
        if spelling != spellings[0]:
            raise RulesInvalid(
                f"{url}: rules lead to other tensors on rank {number} than on rank "
                f"{group.names[0]}; give all ranks the same rules, and the same configuration"
            )
    source = opened.source
    assert isinstance(source, ForeignCheckpoint | Respelled | StoredCheckpoint)

    def fill_tensors(source: Source, live: LiveState, requested: Requested) -> str:
        def fill_own() -> str:
            fitting = _fitted(live, source, requested, options)
            fill(_planned(live, fitting, requested, options), fitting)
            return describe_dequantized(fitting) if isinstance(fitting, Dequantized) else ""

        return f"from {opened.format_name}{group.run_on_all_ranks(fill_own)}"

    loaded = _fill_state(
        lambda: source,
        opened.format_name,
        url,
        state,
        options,
        group,
        fill_tensors,
        opened.left_out,
    )
    if group.rank == 0:
        for line in summary(opened.left_out):
            log.warning("%s: left out %s", url, line)
    return loaded


def _spelled(opened: Opened, options: LoadOptions) -> Opened:
    """Return a checkpoint in the spelling that rules lead to, if there are any."""
    if options.rules is None:
        return opened
    clean = without_wrapper_names(opened)
    if options.convert:
        clean = replace(clean, source=dequantized(clean.source))
    return respell(clean, options.rules, configuration(clean, options.config))


def _spelling(opened: Opened) -> Json:
    """Return what ranks have to have alike: a digest of what rules lead to; None without rules."""
    source = opened.source
    if not isinstance(source, Respelled):
        return None
    made = (sorted(source.plan.tensors.items()), to_strict_json(dict(source.documents)))
    return hashlib.blake2b(repr(made).encode(), digest_size=16).hexdigest()


def _rank_rules(options: LoadOptions) -> RankRules | None:
    return None if options.rules is None else rank_rules(options.rules, options.config or {})


def _fitted(live: LiveState, source: Source, requested: Requested, options: LoadOptions) -> Source:
    """Return a checkpoint with those weights dequantized that the module has plain."""
    specs = {tensor.key: TensorSpec(tensor.dtype, tensor.global_shape) for tensor in live.tensors}
    return fitted(source, specs, live.documents, requested.elsewhere, convert=options.convert)


def _planned(
    live: LiveState, source: Source, requested: Requested, options: LoadOptions
) -> Sequence[Fill]:
    return plan_fills(
        live,
        source,
        strict=options.strict,
        convert=options.convert,
        requested=requested,
        resize=options.resize,
    )


@dataclass(frozen=True, slots=True)
class _Prepared(Generic[_Opened]):
    """A checkpoint, and this rank's state that is filled from it."""

    source: _Opened
    live: LiveState
    requested: Requested

    def leaves_anything(self) -> bool:
        """Return whether this rank leaves anything that it asks for, as a pipeline stage does."""
        keys = (tensor.key for tensor in self.live.tensors)
        return leaves_anything(keys, self.live.documents, self.source, self.requested)

    def with_other_ranks(self, group: ControlGroup, *, has_left_any: bool) -> Requested:
        """Return what this rank asks for, with what others take where any rank leaves anything."""
        if not has_left_any:
            return self.requested
        keys = (tensor.key for tensor in self.live.tensors)
        taken = taken_names(keys, self.live.documents, self.requested)
        return replace(self.requested, elsewhere=union_of_all_ranks(taken, group))


def _fill_state(
    open_source: Callable[[], _Opened],
    format_name: str,
    url: str,
    state: StateMapping,
    options: LoadOptions,
    group: ControlGroup,
    fill_tensors: Callable[[_Opened, LiveState, Requested], RestoreTraffic | str],
    left_out: Sequence[LeftOut] = (),
) -> LoadedState:
    """Fill a state from a checkpoint that all ranks open alike.

    Args:
        open_source: opens the checkpoint.
        format_name: its format, in words.
        url: where it is, for the log.
        state: as for `load`.
        options: as for `load`.
        group: the ranks.
        fill_tensors: fills live tensors, given what the state asks for; returns what rank 0 logs of
            it.
        left_out: what the checkpoint has and its source does not.
    """
    with ExitStack() as undo_allocations:

        def prepare(opened: _Opened, names: Collection[str]) -> _Prepared[_Opened]:
            source = opened
            for model, optimizers in modules_of(state):
                source = source.named_for(names)
                undo = allocate(model, optimizers, source, descriptions=options.descriptions)
                undo_allocations.callback(undo)
            check_mutable(state, source.documents.get(VALUES, {}))
            requested = _requested(state, source, left_out, options, group)
            live = fit_computed(capture(state, options.descriptions), source)
            return _Prepared(source, live, requested)

        def begin() -> tuple[_Opened, _Prepared[_Opened] | None]:
            opened = open_source()
            # Only where a name may be a wrapper's do those of other ranks' models matter.
            return opened, None if opened.may_be_renamed else prepare(opened, ())

        (opened, begun), leaving = group.run_and_share(
            begin, lambda began: began[1] is not None and began[1].leaves_anything()
        )
        if begun is None:
            names = _names_of_all_ranks(state, group)
            prepared, leaving = group.run_and_share(
                lambda: prepare(opened, names), _Prepared.leaves_anything
            )
        else:
            prepared = begun
        source, live = prepared.source, prepared.live
        requested = prepared.with_other_ranks(group, has_left_any=any(leaving))
        told = fill_tensors(source, live, requested)

        def listed() -> list[str]:
            fitting = _fitted(live, source, requested, options)
            return unmatched(live, fitting, requested, options.resize)

        def fill_rest() -> list[str]:
            # Before anything of the optimizers changes that was compared.
            lines = [] if options.strict else listed()
            if live.computed is not None:
                live.computed.load()
            for model, optimizers in modules_of(state):
                restore_options(model, optimizers, source.documents)
            fill_values(state, source.documents.get(VALUES, {}))
            return lines

        lines = group.run_on_all_ranks(fill_rest)
        # The load succeeded: the new slots stay.
        undo_allocations.pop_all()
    differing = () if options.strict else sorted(union_of_all_ranks(lines, group))
    if group.rank == 0:
        rest = not_requested(source, requested)
        more = f"; not asked for: {rest}" if rest else ""
        log.info("%s: loaded step %d: %s%s", url, source.step, told, more)
        for line in differing:
            log.warning("%s: not loaded: %s", url, line)
    return LoadedState(source.step, source.documents, format_name)


def _requested(
    state: StateMapping,
    source: Source,
    left_out: Sequence[LeftOut],
    options: LoadOptions,
    group: ControlGroup,
) -> Requested:
    """Return what this rank's state asks for."""
    requested = requested_by(state)
    reasons = [
        (left.name, left.reason)
        for left in left_out
        if left.key is not None and requested.covers(left.key)
    ]
    has_none = not has_optimizer_state(source) and not any(
        left.key is not None and left.key.partition("/")[0] == OPTIMIZER for left in left_out
    )
    if options.optimizers_may_begin_anew and has_none:
        if OPTIMIZER in requested.names and group.rank == 0:
            log.warning("the checkpoint has no optimizer state: the optimizers begin anew")
        names = requested.names - {OPTIMIZER}
        return replace(requested, names=names, parameters=None, left_out=reasons)
    return replace(requested, left_out=reasons)


def _names_of_all_ranks(state: StateMapping, group: ControlGroup) -> set[str]:
    """Return the names of the models of all ranks, of which pipeline stages have their own.

    So all ranks take the names in a checkpoint for the same.
    """
    own_names = group.run_on_all_ranks(
        lambda: [
            name for model, _ in modules_of(state) for name in ModelParameters(model).all_names()
        ]
    )
    return union_of_all_ranks(own_names, group)
