"""Writes a checkpoint as a folder of PyTorch's DCP, under the names of `get_state_dict`.

`{"model": ..., "optim": {"state": ..., "param_groups": ...}}` by names of parameters is what
`torch.distributed.checkpoint.state_dict` makes of models and optimizers, such as those of FSDP2,
so `torch.distributed.checkpoint.load` reads the folder into them on any number of ranks. Other
tensors and values follow by name. The value `keepstep` has the notes that
only keepstep makes, such as which slot is a parameter's master.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from keepstep.checkpoint.convert.read.dcp_folders import KEEPSTEP
from keepstep.checkpoint.convert.write.dcp_leaves import (
    Leaf,
    TensorLeaf,
    ValueLeaf,
    files_of_leaves,
)
from keepstep.checkpoint.convert.write.dcp_metadata_writer import Path
from keepstep.checkpoint.convert.write.planned_folder import PlannedFile
from keepstep.checkpoint.convert.write.state_parts import StateParts, parts_of
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.source import Source


def dcp_files(source: Source) -> list[PlannedFile]:
    """Return the files of a folder of DCP; `.metadata` comes last.

    Raises:
        LayoutMismatch: two names of the source are one in DCP.
    """
    return files_of_leaves(source, leaves_of(source))


def leaves_of(source: Source) -> list[Leaf]:
    """Return the leaves of a source's state under the names of `get_state_dict`."""
    parts = parts_of(source)
    leaves = [*_model(parts), *_optimizer(parts)]
    leaves += apart([*others_of(parts), own_leaf(source.step, parts)], leaves)
    return leaves


def others_of(parts: StateParts) -> Iterator[Leaf]:
    """Yield the tensors and values that are of neither the model nor its optimizer."""
    yield from (TensorLeaf(tuple(key.split("/")), key) for key in parts.tensors)
    yield from (ValueLeaf(tuple(name.split("/")), value) for name, value in parts.values.items())


def own_leaf(step: int, parts: StateParts) -> Leaf:
    """Return the value with what only keepstep has."""
    own: dict[str, Json] = {"step": step, "documents": dict(parts.documents)}
    return ValueLeaf((KEEPSTEP,), own)


def apart(leaves: Iterable[Leaf], others: Iterable[Leaf]) -> list[Leaf]:
    """Return leaves under names of their own: `NAME (2)` where another is at or within a path.

    Args:
        leaves: the leaves; the last ones keep their names for certain.
        others: leaves that are in the state already; no name in the first place is one of theirs.
    """
    roots = {leaf.path[0] for leaf in others}
    taken: set[Path] = set()
    within: set[Path] = set()
    result: list[Leaf] = []
    for leaf in reversed(list(leaves)):
        path = leaf.path
        number = 1
        while (
            path[0] in roots
            or path in taken
            or path in within
            or any(path[:depth] in taken for depth in range(1, len(path)))
        ):
            number += 1
            path = (f"{leaf.path[0]} ({number})", *leaf.path[1:])
        taken.add(path)
        within.update(path[:depth] for depth in range(1, len(path)))
        result.append(
            TensorLeaf(path, leaf.key, leaf.is_transposed)
            if isinstance(leaf, TensorLeaf)
            else ValueLeaf(path, leaf.value)
        )
    return result[::-1]


def _model(parts: StateParts) -> Iterator[Leaf]:
    for name, key in parts.model.items():
        yield TensorLeaf(("model", name), key)
    for name, tie in parts.ties.items():
        yield TensorLeaf(("model", name), tie.key, tie.is_transposed)


def _optimizer(parts: StateParts) -> Iterator[Leaf]:
    for group in parts.groups:
        for name in group.parameters:
            path = ("optim", "state", name)
            for slot, key in parts.slots.get(name, {}).items():
                yield TensorLeaf((*path, slot), key)
            for slot, value in parts.scalars.get(name, {}).items():
                yield ValueLeaf((*path, slot), value)
    for number, group in enumerate(parts.groups):
        # Optimizers of named parameters have, and so ask for, their names next to `params`.
        names = {"params": list(group.parameters), "param_names": list(group.parameters)}
        for option, value in {**group.options, **names}.items():
            yield ValueLeaf(("optim", "param_groups", number, option), value)
