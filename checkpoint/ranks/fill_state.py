"""Fills a state of all ranks from a checkpoint that is open: everything but where it comes from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from keepstep.checkpoint.errors import LayoutMismatch
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
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX
from keepstep.checkpoint.format.layout.quantized import QuantizedWeight
from keepstep.checkpoint.format.layout.quantized_fit import fitted
from keepstep.checkpoint.format.layout.source import Source, TensorSpec
from keepstep.checkpoint.live.allocation import allocate
from keepstep.checkpoint.live.computed import fit_computed
from keepstep.checkpoint.live.fills import Fill
from keepstep.checkpoint.live.model_parameters import ModelParameters
from keepstep.checkpoint.live.optimizer_options import restore_options
from keepstep.checkpoint.live.restore import plan_fills, unmatched
from keepstep.checkpoint.live.state_mapping import (
    StateMapping,
    capture,
    check_mutable,
    fill_values,
    modules_of,
    requested_by,
)
from keepstep.checkpoint.live.tensors import LiveState
from keepstep.checkpoint.ranks.agreement import union_of_all_ranks
from keepstep.checkpoint.ranks.control_group import ControlGroup
from keepstep.checkpoint.ranks.shared_restore import RestoreTraffic

if TYPE_CHECKING:
    from keepstep.checkpoint.convert.read.foreign_source import LeftOut

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a checkpoint fills a state; each as for `load`."""

    strict: bool = True
    convert: bool = False
    resize: Collection[str] = ()
    descriptions: Descriptions = NOT_DESCRIBED
    rules: str | None = None
    config: Mapping[str, Json] | None = None
    optimizers_may_start_empty: bool = False
    """Whether a checkpoint without any optimizer state is complete, as one of weights alone is."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The origin of a filled state: the step, the documents, and the format in words."""

    step: int
    documents: Mapping[str, Json]
    format_name: str


def fitted_source(
    live: LiveState, source: Source, requested: Requested, options: LoadOptions
) -> Source:
    """Return a checkpoint with those weights dequantized that the module has plain."""
    specs = {tensor.key: TensorSpec(tensor.dtype, tensor.global_shape) for tensor in live.tensors}
    dequantize = _dequantize if options.convert else None
    return fitted(source, specs, live.documents, requested.elsewhere, dequantize)


def _dequantize(source: Source, weights: Mapping[str, QuantizedWeight]) -> Source:
    # Most checkpoints have no quantized weights: what reads them is imported where they are met.
    from keepstep.checkpoint.convert.write.dequantized import Dequantized

    return Dequantized(whole=source, weights=weights)


def planned(
    live: LiveState, source: Source, requested: Requested, options: LoadOptions
) -> Sequence[Fill]:
    """Return what fills this rank's tensors."""
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

    def findings(self, resize: Collection[str]) -> Json:
        """Return whether this rank leaves anything, and the names of `resize` that it lacks."""
        known = {tensor.key.removeprefix(MODEL_PREFIX) for tensor in self.live.tensors}
        return [self.leaves_anything(), sorted(set(resize) - known)]

    def with_other_ranks(self, group: ControlGroup, *, has_left_any: bool) -> Requested:
        """Return what this rank asks for, with what others take where any rank leaves anything."""
        if not has_left_any:
            return self.requested
        keys = (tensor.key for tensor in self.live.tensors)
        taken = taken_names(keys, self.live.documents, self.requested)
        return replace(self.requested, elsewhere=union_of_all_ranks(taken, group))


def fill_state(
    open_source: Callable[[], _Opened],
    format_name: str,
    url: str,
    state: StateMapping,
    options: LoadOptions,
    group: ControlGroup,
    fill_tensors: Callable[[_Opened, LiveState, Requested], RestoreTraffic | str],
    left_out: Sequence[LeftOut] = (),
) -> LoadReport:
    """Fill a state from a checkpoint; all ranks open it in the same way.

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

        (opened, begun), findings = group.run_and_share(
            begin, lambda began: None if began[1] is None else began[1].findings(options.resize)
        )
        if begun is None:
            names = _names_of_all_ranks(state, group)
            prepared, findings = group.run_and_share(
                lambda: prepare(opened, names), lambda own: own.findings(options.resize)
            )
        else:
            prepared = begun
        source, live = prepared.source, prepared.live
        if unknown := set.intersection(*(set(names) for _, names in findings)):
            raise LayoutMismatch(
                f"resize names {', '.join(sorted(unknown))}, which the state does not have; give "
                "the names of parameters"
            )
        has_left_any = any(leaves for leaves, _ in findings)
        requested = prepared.with_other_ranks(group, has_left_any=has_left_any)
        traffic = fill_tensors(source, live, requested)

        def listed() -> list[str]:
            fitting = fitted_source(live, source, requested, options)
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
        log.info("%s: loaded step %d: %s%s", url, source.step, traffic, more)
        for line in differing:
            log.warning("%s: not loaded: %s", url, line)
    return LoadReport(source.step, source.documents, format_name)


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
    if options.optimizers_may_start_empty and has_none:
        if OPTIMIZER in requested.names and group.rank == 0:
            log.warning("the checkpoint has no optimizer state: the optimizers start empty")
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
