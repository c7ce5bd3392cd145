"""Reads the documents that describe tensors, and checks them against the tensors.

Pure. A document may come from any source: one that contradicts the tensors is refused. Unknown
members of an entry are left to later releases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.documents import (
    AVERAGES,
    MASTERS,
    PADDING,
    PARTS,
    PROVENANCE,
    SCALES,
    TIED,
)
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX, OPTIMIZER_PREFIX
from keepstep.checkpoint.format.layout.part_table import PartTable
from keepstep.checkpoint.format.layout.source import TensorSpec

_Tensors = Mapping[str, TensorSpec]

REFERRING = ("of", "count", "scale", "zero_point")
"""Members of entries on averages and scales whose values are keys of tensors."""


@dataclass(frozen=True, slots=True)
class Tie:
    """The tensor, by key, that a further name stands for, and whether the name is its transpose."""

    key: str
    is_transposed: bool


@dataclass(frozen=True, slots=True)
class Master:
    """The tensor that holds a parameter in a wider data type, by key, and that data type."""

    key: str
    dtype: str


def found(mapping: Mapping[str, object], name: str) -> str | None:
    """Return a name's key in a mapping by tensors: itself, or with `model/` before it."""
    return next((key for key in (name, f"{MODEL_PREFIX}{name}") if key in mapping), None)


def logical_shape_of(document: Json, key: str) -> tuple[int, ...] | None:
    """Return a tensor's logical shape from the document of paddings; None if it is not there."""
    entry = _entry_of(document, key)
    return None if entry is None else tuple(entry["logical_shape"])


def tie_of(document: Json, key: str) -> Tie | None:
    """Return the tensor that a key stands for by the document of ties; None if it is not there."""
    if document is None or not key.startswith(MODEL_PREFIX):
        return None
    entry = document.get(key.removeprefix(MODEL_PREFIX))
    if entry is None:
        return None
    name, is_transposed = _tied(key, entry)
    return Tie(f"{MODEL_PREFIX}{name}", is_transposed)


def stored_parameter(document: Json, name: str, own_names: Collection[str]) -> Tie | None:
    """Return the parameter that a further name of tied weights stands for in a source.

    Which name of them is the first, the one with the optimizer's state, depends on the model.

    Args:
        document: the source's document of ties.
        name: of an optimizer's parameter here, without state of its own in the source.
        own_names: of all parameters of the optimizers here; None is returned if that one is there.
    """
    tie = tie_of(document, f"{MODEL_PREFIX}{name}")
    return None if tie is None or tie.key.removeprefix(MODEL_PREFIX) in own_names else tie


def master_of(document: Json, key: str) -> Master | None:
    """Return a parameter's entry in the document of masters; None if it is not there."""
    entry = _entry_of(document, key)
    return None if entry is None else Master(slot_key(key, entry["slot"]), entry["dtype"])


def scale_of(document: Json, key: str) -> str | None:
    """Return the key of a quantized tensor's scale from the document of scales; None without."""
    entry = _entry_of(document, key)
    return None if entry is None else str(entry["scale"])


def part_table_of(document: Json, key: str) -> Json:
    """Return a tensor's part table from the document of parts; None if it is not there."""
    return _entry_of(document, key)


def references_of(entry: Mapping[str, Json]) -> list[Json]:
    """Return the keys of the tensors that an entry on an average or a scale names."""
    return [entry[member] for member in REFERRING if member in entry]


def is_wider(dtype: str, other: str) -> bool:
    """Return whether a floating data type represents every value of another, and more."""
    return other in _NARROWER.get(dtype, ())


# Of the types that parameters are trained in.
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_NARROWER: Mapping[str, tuple[str, ...]] = {
    "float16": _FLOAT8,
    "bfloat16": _FLOAT8,
    "float32": ("float16", "bfloat16", *_FLOAT8),
    "float64": ("float32", "float16", "bfloat16", *_FLOAT8),
}


def check_described(
    documents: Mapping[str, Json], tensors: _Tensors, *, rank: int = 0, world_size: int = 1
) -> None:
    """Check the documents that describe tensors.

    Args:
        documents: all documents; others are left alone.
        tensors: all tensors that the documents may describe.
        rank: the share of the descriptions that this rank checks: of consecutive tensors.
        world_size: the number of shares.

    Raises:
        ValueError: a document contradicts the tensors or itself; the message names both.
    """
    provenance = documents.get(PROVENANCE)
    if provenance is not None and not isinstance(provenance, dict):
        raise ValueError(f"{PROVENANCE} is an object, not {_shown(provenance)}")
    for alias, entry in _share(_entries(TIED, documents), rank, world_size):
        name, is_transposed = _tied(alias, entry)
        spec = _spec(tensors, f"{MODEL_PREFIX}{name}", f"{TIED}: {alias}")
        if is_transposed and len(spec.shape) != 2:
            raise ValueError(f"{TIED}: {alias} is {name} transposed, which has shape {spec.shape}")
    for name, check in _CHECKS.items():
        for key, entry in _share(_entries(name, documents), rank, world_size):
            where = f"{name}: {key}"
            if not isinstance(entry, dict):
                raise ValueError(f"{where} is an object, not {_shown(entry)}")
            try:
                check(where, found(tensors, key) or key, entry, tensors)
            except KeyError as error:
                raise ValueError(f"{where} has no member {error}") from None
        _check_acyclic(name, documents, tensors)


def _check_parts(where: str, key: str, entry: dict[str, Json], tensors: _Tensors) -> None:
    spec = _spec(tensors, key, where)
    try:
        table = PartTable.from_json(entry)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if table.axis >= len(spec.shape) or table.extent != spec.shape[table.axis]:
        raise ValueError(
            f"{where} has parts of {table.extent} elements of dimension {table.axis}, and the "
            f"tensor has shape {spec.shape}"
        )


def _check_padding(where: str, key: str, entry: dict[str, Json], tensors: _Tensors) -> None:
    spec = _spec(tensors, key, where)
    logical = _extents(where, "logical_shape", entry)
    if len(logical) != len(spec.shape) or any(
        extent > stored for extent, stored in zip(logical, spec.shape, strict=False)
    ):
        raise ValueError(
            f"{where} has logical shape {logical}, which does not fit into {spec.shape}, the "
            "tensor's"
        )


def _check_masters(where: str, key: str, entry: dict[str, Json], tensors: _Tensors) -> None:
    spec = _spec(tensors, key, where)
    master = _spec(tensors, slot_key(key, entry["slot"]), where)
    if master != TensorSpec(entry["dtype"], spec.shape) or not is_wider(master.dtype, spec.dtype):
        raise ValueError(
            f"{where} ({spec.dtype} {spec.shape}) has {_shown(entry['dtype'])} as master, which is "
            f"{master.dtype} {master.shape}"
        )


def _check_averages(where: str, key: str, entry: dict[str, Json], tensors: _Tensors) -> None:
    spec = _spec(tensors, key, where)
    averaged = _spec(tensors, entry["of"], where)
    if averaged.shape != spec.shape or entry["of"] == key:
        raise ValueError(
            f"{where} has shape {spec.shape}, and cannot be an average of {entry['of']}, "
            f"{averaged.shape}"
        )
    decay = entry.get("decay")
    if decay is not None and (
        not isinstance(decay, int | float) or isinstance(decay, bool) or not 0 <= decay <= 1
    ):
        raise ValueError(f"{where}: a decay is a number from 0 to 1, not {_shown(decay)}")
    if "count" in entry and math.prod(_spec(tensors, entry["count"], where).shape) != 1:
        raise ValueError(f"{where}: a count has one element, and {entry['count']} has others")


def _check_scales(where: str, key: str, entry: dict[str, Json], tensors: _Tensors) -> None:
    spec = _spec(tensors, key, where)
    block = _extents(where, "block_shape", entry)
    if len(block) != len(spec.shape) or 0 in block:
        raise ValueError(f"{where} has shape {spec.shape}, and blocks of shape {block}")
    grid = tuple(ceil_div(n, extent) for n, extent in zip(spec.shape, block, strict=True))
    for member in ("scale", "zero_point"):
        if member == "zero_point" and member not in entry:
            continue
        shape = _spec(tensors, entry[member], where).shape
        if entry[member] == key or _without_ones(shape) != _without_ones(grid):
            raise ValueError(
                f"{where} has {grid} blocks, and {entry[member]} as {member}, of shape {shape}"
            )
    try:
        numpy_dtype(entry["dtype"])
    except (TypeError, ValueError):
        raise ValueError(f"{where}: there is no data type {_shown(entry['dtype'])}") from None


def _check_acyclic(name: str, documents: Mapping[str, Json], tensors: _Tensors) -> None:
    """Check that no tensor is an average, or the scale, of its own average or scale."""
    references = {
        found(tensors, key): [
            entry[member]
            for member in ("of", "scale", "zero_point")
            if isinstance(entry.get(member), str)
        ]
        for key, entry in _entries(name, documents)
        # Others are for the rank in whose share they are.
        if isinstance(entry, dict)
    }
    try:
        TopologicalSorter(references).prepare()
    except CycleError as error:
        raise ValueError(f"{name}: {' -> '.join(error.args[1])} is a circle") from None


_CHECKS: Mapping[str, Callable[[str, str, dict[str, Json], _Tensors], None]] = {
    PARTS: _check_parts,
    PADDING: _check_padding,
    MASTERS: _check_masters,
    AVERAGES: _check_averages,
    SCALES: _check_scales,
}


def _share(
    entries: Iterable[tuple[str, Json]], rank: int, world_size: int
) -> Sequence[tuple[str, Json]]:
    """Return a rank's share of the descriptions of tensors, by key, in order of the keys."""
    ordered = sorted(entries, key=lambda entry: entry[0])
    first, end = (n * len(ordered) // world_size for n in (rank, rank + 1))
    return ordered[first:end]


def _entries(name: str, documents: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    content = documents.get(name)
    if content is None:
        return
    if not isinstance(content, Mapping):
        raise ValueError(f"{name} is an object, not {_shown(content)}")
    yield from content.items()


def _entry_of(document: Json, key: str) -> Json:
    names = (key, key.removeprefix(MODEL_PREFIX))
    return next((document[name] for name in names if document and name in document), None)


def _tied(alias: str, entry: Json) -> tuple[str, bool]:
    """Return the name that an alias stands for, and whether it is transposed."""
    if isinstance(entry, str):
        return entry, False
    if (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("transposed", False), bool)
    ):
        return entry["name"], entry.get("transposed", False)
    raise ValueError(f"{TIED}: {alias} is a name or an object with one, not {_shown(entry)}")


def slot_key(parameter: str, slot: str) -> str:
    """Return the key of an optimizer slot of a parameter, by key."""
    return f"{OPTIMIZER_PREFIX}{parameter.removeprefix(MODEL_PREFIX)}/{slot}"


def _spec(tensors: _Tensors, key: Json, where: str) -> TensorSpec:
    spec = tensors.get(key) if isinstance(key, str) else None
    if spec is None:
        raise ValueError(f"{where} names a tensor that there is not: {_shown(key)}")
    return spec


def _extents(where: str, member: str, entry: dict[str, Json]) -> tuple[int, ...]:
    extents = entry[member]
    if not isinstance(extents, list) or not all(
        type(extent) is int and extent >= 0 for extent in extents
    ):
        raise ValueError(f"{where}: {member} is a list of sizes, not {_shown(extents)}")
    return tuple(extents)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent != 1)


def _shown(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
