"""Describes tensors beyond their shapes: fused parts, padding, masters, averages, scales.

Pure. Callers pass `Descriptions`; `describing_documents` converts them to the separate documents
that FORMAT.md specifies, and `keepstep.checkpoint.format.layout.described` reads these.

A tensor is named by its key, without `model/` if one likes: `fc.weight` is the parameter of the
module, `model/fc.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeVar

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.described import (
    check_described,
    found,
    is_wider,
    references_of,
)
from keepstep.checkpoint.format.layout.documents import AVERAGES, MASTERS, PADDING, PARTS, SCALES
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX, OPTIMIZER_PREFIX, parameter_of
from keepstep.checkpoint.format.layout.part_table import PartTable
from keepstep.checkpoint.format.layout.source import TensorSpec

_Described = TypeVar("_Described")


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of a quantized tensor: an element stands for (element - zero point) x scale.

    Args:
        scale: the tensor of the scales. Its shape is that of the grid of blocks, or has the same
            elements with dimensions of 1 left out or added.
        block_shape: shape of the blocks that have a scale each, in elements of the quantized tensor
            as it is stored; its own shape for one scale of all.
        dtype: data type of the dequantized elements, such as `bfloat16`.
        zero_point: the tensor of the zero points, of the shape of the scales; None for zero.
    """

    scale: str
    block_shape: Sequence[int]
    dtype: str
    zero_point: str | None = None


@dataclass(frozen=True, slots=True)
class Average:
    """An average of a tensor's values over training steps.

    Args:
        of: the tensor that is averaged.
        decay: that of an exponential average; None for another kind.
        count: the tensor of one element that counts the averaged steps; None if there is none.
    """

    of: str
    decay: float | None = None
    count: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptions:
    """Properties of a state's tensors that names, shapes and placements do not show.

    Tensors are named by their keys, without `model/` if one likes. Where the keys of a mapping are
    patterns, such as `*.qkv.weight`, the first that matches counts. Optimizer slots of a
    parameter's shape are described with the parameter.

    Args:
        parts: the parts of fused tensors, such as q, k and v, by patterns. They are stored in the
            order of the table, whatever the number of ranks that slice them.
        parts_mesh_axis: name of the device mesh's axis that slices every part; other axes split
            rows.
        padding: the logical shapes of tensors that have more elements than that, by patterns:
            `{"embed.weight": (50257, 768)}`. The logical elements come first in every dimension.
        scales: the scales of quantized tensors, by the tensors' names.
        averages: the averaged tensors, by the names of the averages. Those of an `AveragedModel`
            inside the module are found automatically.
        master_slots: names of optimizer slots that hold a parameter in a wider data type. Those of
            Transformer Engine and of Megatron-Core are known.
    """

    parts: Mapping[str, PartTable] = field(default_factory=dict)
    parts_mesh_axis: str = "tp"
    padding: Mapping[str, Sequence[int]] = field(default_factory=dict)
    scales: Mapping[str, Scale] = field(default_factory=dict)
    averages: Mapping[str, Average] = field(default_factory=dict)
    master_slots: Collection[str] = ("master_param", "fp32_param")


NOT_DESCRIBED = Descriptions()


def matching(described: Mapping[str, _Described], key: str) -> _Described | None:
    """Return the value of the first pattern that matches a tensor's key; None without one."""
    names = (key, key.removeprefix(MODEL_PREFIX))
    return next(
        (
            content
            for pattern, content in described.items()
            if any(fnmatchcase(name, pattern) for name in names)
        ),
        None,
    )


def describing_documents(
    descriptions: Descriptions, tensors: Mapping[str, TensorSpec], *, is_whole: bool = True
) -> dict[str, Json]:
    """Return the documents that describe these tensors; no empty ones.

    Args:
        descriptions: also of tensors that other ranks hold, which are left out.
        tensors: those that this rank holds or knows, by key.
        is_whole: whether these are all tensors of the state. Otherwise averages and scales that
            name others are left out, since nothing here can check them: a rank that has all of
            them stores them.

    Raises:
        LayoutMismatch: a description contradicts the tensors; the message names one.
    """
    documents: dict[str, dict[str, Json]] = {
        PARTS: _parts(descriptions, tensors),
        PADDING: _padding(descriptions, tensors),
        MASTERS: _masters(descriptions, tensors),
        AVERAGES: _averages(descriptions, tensors),
        SCALES: _scales(descriptions, tensors),
    }
    if not is_whole:
        for name in (AVERAGES, SCALES):
            documents[name] = {
                key: content
                for key, content in documents[name].items()
                if all(reference in tensors for reference in references_of(content))
            }
    present = {name: content for name, content in documents.items() if content}
    try:
        check_described(present, tensors)
    except ValueError as error:
        raise LayoutMismatch(f"{error}; correct the descriptions") from error
    return present


def _own_keys(tensors: Mapping[str, TensorSpec]) -> list[str]:
    """Return the keys of tensors that are not slots of another one in the mapping."""
    return [key for key in tensors if (p := parameter_of(key)) == key or p not in tensors]


def _parts(descriptions: Descriptions, tensors: Mapping[str, TensorSpec]) -> dict[str, Json]:
    if not descriptions.parts:
        return {}
    tables = ((key, matching(descriptions.parts, key)) for key in _own_keys(tensors))
    return {key: table.to_json() for key, table in tables if table is not None}


def _padding(descriptions: Descriptions, tensors: Mapping[str, TensorSpec]) -> dict[str, Json]:
    if not descriptions.padding:
        return {}
    shapes = ((key, matching(descriptions.padding, key)) for key in _own_keys(tensors))
    return {key: {"logical_shape": list(shape)} for key, shape in shapes if shape is not None}


def _masters(descriptions: Descriptions, tensors: Mapping[str, TensorSpec]) -> dict[str, Json]:
    masters: dict[str, Json] = {}
    endings = tuple(f"/{slot}" for slot in descriptions.master_slots)
    for key, spec in tensors.items():
        if not key.endswith(endings) or not key.startswith(OPTIMIZER_PREFIX):
            continue
        parameter = parameter_of(key)
        narrow = tensors.get(parameter)
        if narrow is not None and narrow.shape == spec.shape and is_wider(spec.dtype, narrow.dtype):
            masters[parameter] = {"slot": key.rpartition("/")[2], "dtype": spec.dtype}
    return masters


def _averages(descriptions: Descriptions, tensors: Mapping[str, TensorSpec]) -> dict[str, Json]:
    averages: dict[str, Json] = {}
    for name, average in descriptions.averages.items():
        key = found(tensors, name)
        if key is None:
            continue
        content: dict[str, Json] = {"of": _reference(tensors, average.of)}
        if average.decay is not None:
            content["decay"] = average.decay
        if average.count is not None:
            content["count"] = _reference(tensors, average.count)
        averages[key] = content
    return averages


def _scales(descriptions: Descriptions, tensors: Mapping[str, TensorSpec]) -> dict[str, Json]:
    scales: dict[str, Json] = {}
    for name, scale in descriptions.scales.items():
        key = found(tensors, name)
        if key is None:
            continue
        content: dict[str, Json] = {
            "scale": _reference(tensors, scale.scale),
            "block_shape": list(scale.block_shape),
            "dtype": scale.dtype,
        }
        if scale.zero_point is not None:
            content["zero_point"] = _reference(tensors, scale.zero_point)
        scales[key] = content
    return scales


def _reference(tensors: Mapping[str, TensorSpec], name: str) -> str:
    """Return the key of a tensor that a description refers to; the name if there is none."""
    return found(tensors, name) or name
