"""Presents a checkpoint with other names and layouts, as rules say: a `Source` over a `Source`.

Nothing is read before a box is asked for; then the boxes that its views need are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from keepstep.checkpoint.convert.read.foreign_source import LeftOut
from keepstep.checkpoint.convert.rules.plan import Plan, PlannedTensor
from keepstep.checkpoint.convert.rules.strided import copy_view
from keepstep.checkpoint.convert.rules.views import View
from keepstep.checkpoint.convert.write.boxes_in_order import boxes_in_order
from keepstep.checkpoint.errors import CheckpointDamaged, RulesInvalid
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.described import tie_of
from keepstep.checkpoint.format.layout.documents import (
    AVERAGES,
    GROUPS,
    MASTERS,
    PADDING,
    PARTS,
    SCALARS,
    SCALES,
    TIED,
)
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import BoxRequest, Source, TensorSpec, slots_in
from keepstep.checkpoint.format.layout.wrapper_names import StoredNames

Planner = Callable[[Mapping[str, TensorSpec]], Plan]
"""Plans the tensors of the other spelling from those that a checkpoint has, by key."""

_MODEL, _OPTIMIZER = "model/", "optim/"

_COMPARED_NBYTES = 4 * 2**20
# A request of less is read as if it had so much.
_LEAST_READ_NBYTES = 2**20

_OF_FORMER_SHAPES = frozenset({PARTS, PADDING, AVERAGES, SCALES})
"""Documents that do not hold of tensors that were cut and put together otherwise."""


@dataclass(frozen=True, kw_only=True)
class RenamedSource:
    """A source whose tensors have other names and layouts. Made by `renamed_source`.

    Attributes:
        whole: the source.
        plan: how its tensors are made from those of the source.
        documents: the source's, with the other names.
    """

    whole: Source
    plan: Plan
    documents: Mapping[str, Json]

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.whole.step

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor by key."""
        return self.plan.specs

    def left_out(self) -> list[LeftOut]:
        """Return what of the source's tensors is not carried, each with the reason."""
        return (
            [
                LeftOut(
                    left.source
                    if left.box == Box.whole(self.whole.tensors[left.source].shape)
                    else f"{left.source}, elements at {left.box.offset} of shape {left.box.shape}",
                    left.why,
                )
                for left in self.plan.left_out
            ]
            + [
                LeftOut(f"{document}: {name}", "what it says is of the former names and shapes")
                for document in sorted(_OF_FORMER_SHAPES & self.whole.documents.keys())
                for name in self.whole.documents[document]
            ]
            + [
                LeftOut(f"{_MODEL}{alias}", "rules do not map a name that stands for a transpose")
                for alias in self.whole.documents.get(TIED, {})
                if f"{_MODEL}{alias}" not in _plain_ties(self.whole.documents)
            ]
            + [
                LeftOut(name, "rules make no tensor of its parameter")
                for name in _of_no_tensor(self.whole.documents, _new_names(self.plan))
            ]
        )

    @property
    def may_be_renamed(self) -> bool:
        """Whether `named_for` may change anything, or depend on the parameters' names."""
        # Each rank opens it by itself: nothing tells that all have found the same names.
        return True

    def named_for(self, parameters: Collection[str]) -> RenamedSource:
        """Return the checkpoint with its tensors named as those of a model with these parameters.

        The names that rules make may have those of wrappers, such as `DistributedDataParallel`.
        """
        names = StoredNames.of(self.plan.tensors, parameters)
        if not names.keys:
            return self
        return replace(
            self,
            plan=replace(self.plan, tensors=names.renamed(self.plan.tensors)),
            documents=names.documents(self.documents),
        )

    def slots(self, parameters: Collection[str]) -> Mapping[str, Mapping[str, TensorSpec]]:
        """See `Source.slots`."""
        return slots_in(self.tensors, parameters)

    def known_keys(self) -> Collection[str]:
        """See `Source.known_keys`: all of them."""
        return self.tensors.keys()

    def read(self, requests: Sequence[BoxRequest]) -> None:
        """See `Source.read`; takes as much memory as a request, for what is read of the source."""
        # What is whole in the source is read at once, as sources read best.
        unchanged: list[BoxRequest] = []
        for request in requests:
            views = self.plan.tensors[request.key].views_in(request.box)
            if len(views) == 1 and views[0].is_same_box and views[0].source is not None:
                unchanged.append(BoxRequest(views[0].source, views[0].source_box, request.into))
            else:
                self._assemble(request, views)
        if unchanged:
            self.whole.read(unchanged)

    def check_equal(self) -> None:
        """Compare tensors that have to be equal: only the first of them is read otherwise.

        Raises:
            CheckpointDamaged: they differ.
        """
        for first, *others in self.plan.equal:
            spec = self.whole.tensors[first]
            for key in others:
                if self.whole.tensors[key] != spec or any(
                    self._bytes(key, box) != self._bytes(first, box)
                    for box in boxes_in_order(spec, _COMPARED_NBYTES)
                ):
                    raise CheckpointDamaged(
                        f"{key} and {first} differ, and become one tensor here: the checkpoint is "
                        "damaged, or the rules are of another model"
                    )

    def _assemble(self, request: BoxRequest, views: Sequence[View]) -> None:
        spec = self.tensors[request.key]
        target = np.frombuffer(request.into, numpy_dtype(spec.dtype)).reshape(request.box.shape)
        most = max(request.into.nbytes, _LEAST_READ_NBYTES) // target.itemsize
        for batch in _batches(views, most):
            self._copy(batch, target, request.box)

    def _copy(self, views: Sequence[View], target: np.ndarray, box: Box) -> None:
        """Read what some views need, at once, and copy it to a box of their target."""
        arrays = [
            None if view.source is None else np.empty(view.source_box.shape, target.dtype)
            for view in views
        ]
        self.whole.read([
            BoxRequest(view.source, view.source_box, array.reshape(-1).view(np.uint8).data)
            for view, array in zip(views, arrays, strict=True)
            if view.source is not None and array is not None
        ])  # fmt: skip
        for view, array in zip(views, arrays, strict=True):
            copy_view(
                view,
                target,
                array,
                target_origin=box.offset,
                source_origin=view.source_box.offset if view.source is not None else None,
            )

    def _bytes(self, key: str, box: Box) -> bytes:
        into = bytearray(box.size * numpy_dtype(self.whole.tensors[key].dtype).itemsize)
        self.whole.read([BoxRequest(key, box, memoryview(into))])
        return bytes(into)


def _batches(views: Sequence[View], most: int) -> Iterator[list[View]]:
    """Yield views whose boxes in their sources have at most `most` elements together.

    A view whose own box has more is cut; the box around a rotary permutation is far larger than
    what the view has of it.
    """
    batch: list[View] = []
    total = 0
    for part in (part for view in views for part in view.within(most)):
        size = part.source_box.size if part.source is not None else 0
        if batch and total + size > most:
            yield batch
            batch, total = [], 0
        batch.append(part)
        total += size
    if batch:
        yield batch


def renamed_source(source: Source, planner: Planner) -> RenamedSource:
    """Return a checkpoint in another spelling.

    Raises:
        RulesInvalid: the rules do not fit the tensors.
    """
    # Tied tensors are not stored, but have names: rules map these like any other.
    firsts = aliases_of(source)
    full = planner({**source.tensors, **{a: source.tensors[first] for a, first in firsts.items()}})
    tensors, ties = _without_copies(full, firsts)
    equal = (tuple(dict.fromkeys(firsts.get(key, key) for key in keys)) for keys in full.equal)
    plan = Plan(
        tensors=tensors,
        left_out=tuple(left for left in full.left_out if left.source not in firsts),
        equal=tuple(keys for keys in equal if len(keys) > 1),
    )
    return RenamedSource(
        whole=source, plan=plan, documents=renamed_documents(source.documents, plan, ties)
    )


def aliases_of(source: Source) -> dict[str, str]:
    """Return the keys that are not stored because they are others, and these: ties, their state."""
    firsts = _plain_ties(source.documents)
    names = {first: list[str]() for first in firsts.values()}
    for alias, first in firsts.items():
        names[first].append(alias)
    for key in source.tensors:
        name, _, slot = key.removeprefix(_OPTIMIZER).rpartition("/")
        if key.startswith(_OPTIMIZER):
            for alias in names.get(f"{_MODEL}{name}", ()):
                firsts[f"{_OPTIMIZER}{alias.removeprefix(_MODEL)}/{slot}"] = key
    return {alias: first for alias, first in firsts.items() if alias not in source.tensors}


def _without_copies(
    full: Plan, firsts: Mapping[str, str]
) -> tuple[dict[str, PlannedTensor], dict[str, str]]:
    """Return a plan's tensors without those that tied names alone make again, and these's ties.

    Args:
        full: the plan of all tensors, of tied ones too.
        firsts: the keys of tied ones, and those of the tensors that are stored.
    """
    tensors: dict[str, PlannedTensor] = {}
    ties: dict[str, str] = {}
    made: dict[tuple[str, TensorSpec, frozenset[View]], str] = {}
    # Those that have tensors of their own come first: the others may be the same.
    for key, tensor in sorted(
        full.tensors.items(), key=lambda item: bool(_sources(item[1]) <= firsts.keys())
    ):
        views = tuple(
            replace(view, source=firsts.get(view.source, view.source)) if view.source else view
            for view in tensor.views
        )
        room = key.partition("/")[0]
        same = made.setdefault((room, tensor.spec, frozenset(views)), key)
        if same != key and _sources(tensor) and _sources(tensor) <= firsts.keys():
            ties[key] = same
        else:
            tensors[key] = PlannedTensor(tensor.spec, views)
    return {key: tensors[key] for key in full.tensors if key in tensors}, ties


def renamed_documents(
    documents: Mapping[str, Json], plan: Plan, ties: Mapping[str, str]
) -> dict[str, Json]:
    """Return a checkpoint's documents with the names of its other spelling. Pure.

    Args:
        documents: with the names of the source.
        plan: the plan of the tensors that are carried.
        ties: the keys of the other spelling that are not carried, and those that they stand for.

    Raises:
        RulesInvalid: parameters of different groups of the optimizer become one.
    """
    names = _new_names(plan)
    renamed = {name: c for name, c in documents.items() if name not in _OF_FORMER_SHAPES}
    if MASTERS in documents:
        renamed[MASTERS] = {
            f"{_MODEL}{new}": master
            for key, master in documents[MASTERS].items()
            for new in names.get(key.removeprefix(_MODEL), ())
        }
    if TIED in documents:
        renamed[TIED] = {
            alias.removeprefix(_MODEL): first.removeprefix(_MODEL)
            for alias, first in ties.items()
            if alias.startswith(_MODEL)
        }
    if GROUPS in documents:
        renamed[GROUPS] = _renamed_groups(documents[GROUPS], names)
    if SCALARS in documents:
        scalars: dict[str, Json] = {}
        for path, value in documents[SCALARS].items():
            name, _, slot = path.rpartition("/")
            for new in names.get(name, ()):
                if scalars.setdefault(f"{new}/{slot}", value) != value:
                    raise RulesInvalid(
                        f"optimizer state {slot} of {new} would have several values, one of them "
                        f"{value!r:.99} of {name}; the rules make one tensor of parameters that "
                        "were trained differently"
                    )
        renamed[SCALARS] = scalars
    return renamed


def _plain_ties(documents: Mapping[str, Json]) -> dict[str, str]:
    """Return what further names stand for, by keys; not those that stand for a transpose."""
    ties = {
        f"{_MODEL}{alias}": tie_of(documents[TIED], f"{_MODEL}{alias}")
        for alias in documents.get(TIED, {})
    }
    return {alias: tie.key for alias, tie in ties.items() if tie and not tie.is_transposed}


def _renamed_groups(groups: Sequence[Json], names: Mapping[str, Sequence[str]]) -> list[Json]:
    """Return an optimizer's groups, each new name in the place of the first old one."""
    group_of: dict[str, int] = {}
    renamed: list[Json] = []
    for number, group in enumerate(groups):
        new_names = [new for name in group["parameters"] for new in names.get(name, ())]
        for new in new_names:
            if group_of.setdefault(new, number) != number:
                raise RulesInvalid(
                    f"{new} would be in the optimizer's groups {group_of[new]} and {number}; the "
                    "rules make one tensor of parameters that have different options"
                )
        renamed.append({**group, "parameters": list(dict.fromkeys(new_names))})
    return renamed


def _of_no_tensor(documents: Mapping[str, Json], names: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the optimizer's parameters and numbers that have no tensors in the other spelling."""
    return [
        f"{GROUPS}: {name}"
        for group in documents.get(GROUPS) or ()
        for name in group["parameters"]
        if name not in names
    ] + [
        f"{SCALARS}: {path}"
        for path in documents.get(SCALARS) or ()
        if path.rpartition("/")[0] not in names
    ]


def _new_names(plan: Plan) -> dict[str, list[str]]:
    """Return, for each parameter or buffer, the names of what is made from it or its state."""
    names: dict[str, dict[str, None]] = {}
    for key, tensor in plan.tensors.items():
        for source in _sources(tensor):
            if key.startswith(_MODEL) and source.startswith(_MODEL):
                name, new = source.removeprefix(_MODEL), key.removeprefix(_MODEL)
            elif key.startswith(_OPTIMIZER) and source.startswith(_OPTIMIZER):
                name = source.removeprefix(_OPTIMIZER).rpartition("/")[0]
                new = key.removeprefix(_OPTIMIZER).rpartition("/")[0]
            else:
                continue
            names.setdefault(name, {})[new] = None
    return {name: list(new_names) for name, new_names in names.items()}


def _sources(tensor: PlannedTensor) -> set[str]:
    return {view.source for view in tensor.views if view.source is not None}
