"""Writes a checkpoint as torchtitan does: a folder `step-N` of DCP with the model at the root.

The module's tensors have their names and nothing before them. The optimizer's state is one mapping,
`optimizer`, by `state.PARAMETER.SLOT` and `param_groups.PARAMETER.OPTION`. `train_state.step` is
the step. The other values of torchtitan, `lr_scheduler`, `dataloader` and
`train_state.ntokens_seen`, are there if the source has values of these names.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.checkpoint.convert.write.dcp_leaves import (
    Leaf,
    TensorLeaf,
    ValueLeaf,
    files_of_leaves,
)
from keepstep.checkpoint.convert.write.dcp_target import apart, others_of, own_leaf
from keepstep.checkpoint.convert.write.planned_folder import PlannedFile
from keepstep.checkpoint.convert.write.state_parts import StateParts, parts_of
from keepstep.checkpoint.format.layout.source import Source

_TRAIN_STATE = "train_state"
_STEP = f"{_TRAIN_STATE}/step"


def torchtitan_files(source: Source) -> list[PlannedFile]:
    """Return the files of torchtitan's `checkpoint.folder`: those of `step-N`, `.metadata` last.

    Raises:
        LayoutMismatch: two names of the source are one in DCP.
    """
    files = files_of_leaves(source, torchtitan_leaves_of(source))
    return [PlannedFile(f"step-{source.step}/{file.name}", file.pieces) for file in files]


def torchtitan_leaves_of(source: Source) -> list[Leaf]:
    """Return the leaves of a source's state under torchtitan's names."""
    parts = parts_of(source)
    leaves = [*_model(parts), *_optimizer(parts)]
    others = [_within(leaf) for leaf in others_of(parts)]
    if _STEP not in parts.values and _STEP not in parts.tensors:
        others.append(ValueLeaf((_TRAIN_STATE, "step"), source.step))
    return leaves + apart([*others, own_leaf(source.step, parts)], leaves)


def _within(leaf: Leaf) -> Leaf:
    """Return a leaf within a mapping: at the root a tensor would be the module's."""
    if len(leaf.path) > 1 or isinstance(leaf, ValueLeaf):
        return leaf
    return TensorLeaf(("others", *leaf.path), leaf.key)


def _model(parts: StateParts) -> Iterator[Leaf]:
    for name, key in parts.model.items():
        yield TensorLeaf((name,), key)
    for name, tie in parts.ties.items():
        yield TensorLeaf((name,), tie.key, tie.is_transposed)


def _optimizer(parts: StateParts) -> Iterator[Leaf]:
    for group in parts.groups:
        for name in group.parameters:
            for slot, key in parts.slots.get(name, {}).items():
                yield TensorLeaf(("optimizer", f"state.{name}.{slot}"), key)
            for slot, value in parts.scalars.get(name, {}).items():
                yield ValueLeaf(("optimizer", f"state.{name}.{slot}"), value)
    for group in parts.groups:
        for name in group.parameters:
            for option, value in group.options.items():
                yield ValueLeaf(("optimizer", f"param_groups.{name}.{option}"), value)
