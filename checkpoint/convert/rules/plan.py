"""Describes every tensor of a target checkpoint as views of a source's tensors. Pure values.

Plans compose: from one spelling to another by way of a third is one plan, without data in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from keepstep.checkpoint.convert.rules.views import View, box_view, compose
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.source import TensorSpec


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to write: data type, global shape, and the views that fill it.

    Invariant: each element is in exactly one view. A tensor without elements has no views.
    """

    spec: TensorSpec
    views: tuple[View, ...]

    def views_in(self, box: Box) -> tuple[View, ...]:
        """Return views that fill a box of the tensor, in the tensor's coordinates."""
        return tuple(part for view in self.views for part in view.clipped(box))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Part of a source tensor that no target holds: the smallest box around it, and why."""

    source: str
    box: Box
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Describes how the tensors of one checkpoint are made from those of another.

    Args:
        tensors: the tensors to write, by key.
        left_out: what of the source is not carried.
        equal: keys of source tensors of which only the first is read, and which the reader checks
            to be equal: the steps of parameters that become one.
    """

    tensors: Mapping[str, PlannedTensor]
    left_out: tuple[LeftOut, ...] = ()
    equal: tuple[tuple[str, ...], ...] = ()

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensors to write, as a checkpoint has them that is read in turn."""
        return {key: tensor.spec for key, tensor in self.tensors.items()}

    def after(self, first: Plan) -> Plan:
        """Return the plan that does what `first` does and then this one.

        Args:
            first: plans the tensors that this plan reads.
        """
        return Plan(
            tensors={
                key: PlannedTensor(
                    tensor.spec,
                    tuple(part for view in tensor.views for part in _behind(view, first)),
                )
                for key, tensor in self.tensors.items()
            },
            left_out=first.left_out
            + tuple(
                replace(left, source=view.source, box=view.source_box)
                for left in self.left_out
                for view in first.tensors[left.source].views_in(left.box)
                if view.source is not None
            ),
            equal=first.equal + tuple(tuple(_sources(keys, first)) for keys in self.equal),
        )


def unchanged(key: str, spec: TensorSpec) -> PlannedTensor:
    """Return a tensor that is the source's of this key as it is."""
    if 0 in spec.shape:
        return PlannedTensor(spec, ())
    whole = Box.whole(spec.shape)
    return PlannedTensor(spec, (box_view(key, whole, whole),))


def _behind(view: View, first: Plan) -> Iterator[View]:
    """Yield a view of a planned tensor as views of what that is made from."""
    if view.source is None:
        yield view
        return
    for inner in first.tensors[view.source].views:
        yield from compose(view, inner)


def _sources(keys: tuple[str, ...], first: Plan) -> list[str]:
    """Return the sources of planned tensors, each once."""
    sources = {
        view.source: None
        for key in keys
        for view in first.tensors[key].views
        if view.source is not None
    }
    return list(sources)
