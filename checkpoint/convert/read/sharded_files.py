"""Reads files that each rank of a job wrote by `torch.save`, with shards of tensors.

State dictionaries of FSDP have a `ShardedTensor` or a `DTensor` for each tensor. Both are read as
what they contain: the local shard, and where it is in the global tensor. Everything else is taken
from the first rank; where others have something else, that is left out by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keepstep.checkpoint.convert.read.arrays import Array, FileArray
from keepstep.checkpoint.convert.read.contents import Contents, array_of, has_tensor, mapping_of
from keepstep.checkpoint.convert.read.files import ForeignFiles, damaged
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.pickled_json import NotJson, as_json
from keepstep.checkpoint.convert.read.pickled_values import Record
from keepstep.checkpoint.convert.read.pieces import Piece, assembled, first_of_each_box
from keepstep.checkpoint.convert.read.recognition import rank_of_file
from keepstep.checkpoint.convert.read.safe_repr import safe_repr
from keepstep.checkpoint.convert.read.state_dicts import add_model, add_training_state
from keepstep.checkpoint.convert.read.torch_file import read_torch_file
from keepstep.checkpoint.errors import FormatUnsupported
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.parameter_order import ParameterNames
from keepstep.checkpoint.format.layout.source import TensorSpec

_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_DTENSOR = "torch.distributed.tensor.DTensor"
_MOST_DEPTH = 64
# The module's state is the file's, or in its mapping.
_MODEL_DEPTH = 1


def read_sharded_files(
    files: ForeignFiles, parameter_names: ParameterNames = None
) -> ForeignCheckpoint:
    """Return the checkpoint of a folder with one file of each rank.

    Args:
        files: the files, whose names differ in the rank's number only.
        parameter_names: see `add_optimizer_state`.

    Raises:
        CheckpointDamaged: shards overlap, or do not cover a tensor.
        FormatUnsupported: shards are of a kind whose place the files do not say.
    """
    names = sorted(files.names, key=lambda name: rank_of_file(name) or 0)
    trees = [read_torch_file(files.file(name).whole) for name in names]
    contents = Contents(files.url, "torch.save of each rank")
    state = mapping_of(_merged(contents, trees, "", files.url))
    if all(has_tensor(value) and not isinstance(value, dict | list) for value in state.values()):
        add_model(contents, state, files.url)
        return contents.checkpoint(0)
    return contents.checkpoint(add_training_state(contents, state, files.url, parameter_names) or 0)


def _merged(
    contents: Contents, values: Sequence[object], key: str, location: str, depth: int = 0
) -> object:
    """Return what all ranks' values at one place stand for; leave out those that differ."""
    first = values[0]
    if depth > _MOST_DEPTH:
        raise damaged(location, f"{key} is nested more than {_MOST_DEPTH} deep")
    if isinstance(first, dict):
        mappings = [value for value in values if isinstance(value, dict)]
        if len(mappings) < len(values):
            _leave_out_others(contents, key)
        names = dict.fromkeys(name for mapping in mappings for name in mapping)
        if depth <= _MODEL_DEPTH and any(list(mapping) != list(names) for mapping in mappings):
            contents.is_in_module_order = False
        return {
            name: _merged(
                contents,
                [mapping[name] for mapping in mappings if name in mapping],
                f"{key}.{name}".lstrip("."),
                location,
                depth + 1,
            )
            for name in names
        }
    if isinstance(first, list):
        rows = [value for value in values if isinstance(value, list) and len(value) == len(first)]
        if len(rows) < len(values):
            _leave_out_others(contents, key)
        return [
            _merged(contents, list(items), f"{key}.{number}", location, depth + 1)
            for number, items in enumerate(zip(*rows, strict=True))
        ]
    if isinstance(first, Record) and first.name in (_SHARDED_TENSOR, _DTENSOR):
        shape: tuple[int, ...] | None = None
        pieces: list[Piece] = []
        for value in values:
            if not isinstance(value, Record) or value.name != first.name:
                raise damaged(location, f"{key} is sharded on some ranks and not on others")
            own_shape = _shape(value, key, location)
            if shape not in (None, own_shape):
                raise damaged(location, f"{key} has shape {shape} on a rank, and {own_shape}")
            shape = own_shape
            cut = _shards if value.name == _SHARDED_TENSOR else _local_part
            pieces.extend(cut(value, own_shape, key, location))
        if not pieces:
            raise damaged(location, f"no rank has a shard of {key}")
        spec = TensorSpec(pieces[0].array.dtype, shape or ())
        return assembled(key, spec, first_of_each_box(pieces))
    if not all(_is_same(first, value) for value in values[1:]):
        _leave_out_others(contents, key)
    return first


def _leave_out_others(contents: Contents, key: str) -> None:
    contents.leave_out(
        f"{key} of other ranks", "ranks have different values, and the first rank's is carried"
    )


def _is_same(one: object, other: object) -> bool:
    """Return whether two ranks' values are equal; tensors by their bytes."""
    arrays = [array_of(value, "a value of a rank") for value in (one, other)]
    first, second = arrays
    if first is not None and second is not None:
        return (first.dtype, first.shape) == (second.dtype, second.shape) and (
            _bytes_of(first) == _bytes_of(second)
        )
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, Record) and isinstance(other, Record):
        try:
            return one.name == other.name and as_json(one) == as_json(other)
        except NotJson:
            # It is left out by its name on any rank.
            return one.name == other.name
    is_nan = one != one and other != other
    return type(one) is type(other) and (is_nan or one == other)


def _bytes_of(array: Array) -> bytes:
    values = np.empty(array.shape, numpy_dtype(array.dtype))
    array.read_into(Box.whole(array.shape), values)
    return values.tobytes()


def _shape(value: Record, key: str, location: str) -> tuple[int, ...]:
    """Return the global shape, with which either class is made."""
    if len(value.args) < 3:
        raise damaged(location, f"{key} is sharded and has no shape")
    return _numbers(value.args[2], key, location)


def _shards(value: Record, shape: tuple[int, ...], key: str, location: str) -> Iterator[Piece]:
    """Yield the shards of a `ShardedTensor`, each of which says where it is."""
    state = value.state
    shards = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(shards, list):
        raise damaged(location, f"{key} has no list of shards")
    for shard in shards:
        attributes = shard.attributes if isinstance(shard, Record) else {}
        place = attributes.get("metadata")
        described = place.attributes if isinstance(place, Record) else {}
        tensor = attributes.get("tensor")
        offset = _numbers(described.get("shard_offsets"), key, location)
        if not isinstance(tensor, FileArray) or len(offset) != len(tensor.shape):
            raise damaged(location, f"a shard of {key} has no tensor, or no place for it")
        yield Piece(Box(offset, tensor.shape), tensor)


def _local_part(value: Record, shape: tuple[int, ...], key: str, location: str) -> Iterator[Piece]:
    """Yield the local part of a `DTensor`, whose place follows from its mesh and placements."""
    local = value.attributes.get("_local_tensor")
    described = _attributes(value.attributes.get("_spec"))
    mesh = _attributes(described.get("mesh"))
    placements, position = described.get("placements"), mesh.get("_coordinate_on_dim")
    axes = _attributes(mesh.get("_layout")).get("axes")
    extents = [_extent(axis) for axis in axes] if isinstance(axes, tuple | list) else None
    if (
        not isinstance(local, FileArray)
        or not isinstance(placements, tuple)
        or not isinstance(position, tuple | list)
        or extents is None
        or not len(placements) == len(position) == len(extents)
    ):
        raise FormatUnsupported(
            f"{location}: {key} is a DTensor whose mesh does not say where its shards are; save it "
            "with torch.distributed.checkpoint, or with a current PyTorch"
        )
    box = Box.whole(shape)
    offset, left = list(box.offset), list(box.shape)
    for placement, place, count in zip(placements, position, extents, strict=True):
        kind = placement.name.rpartition(".")[2] if isinstance(placement, Record) else "?"
        if kind == "Replicate":
            continue
        axis = _attributes(placement).get("dim")
        if kind != "Shard" or type(axis) is not int or not 0 <= axis < len(shape):
            raise FormatUnsupported(
                f"{location}: {key} is a DTensor that is placed as {kind} over its mesh, and Shard "
                "and Replicate are read; save it with torch.distributed.checkpoint"
            )
        if type(place) is not int or not 0 <= place < count:
            raise damaged(location, f"{key} is at {safe_repr(place)} of {count} places of its mesh")
        most = -(-left[axis] // count)
        start = min(place * most, left[axis])
        offset[axis] += start
        left[axis] = min(most, left[axis] - start)
    # An empty shard may be stored in another shape.
    if local.size or 0 not in left:
        if tuple(left) != local.shape:
            raise damaged(
                local.location,
                f"its shard of {key}, {shape}, is to have shape {tuple(left)}, and has "
                f"{local.shape}",
            )
        yield Piece(Box(tuple(offset), local.shape), local)


def _extent(axis: object) -> int:
    """Return the size of an axis of a mesh, which may be made of several."""
    shape = _attributes(axis).get("shape")
    count = 1
    for extent in shape if isinstance(shape, tuple) else (shape,):
        if type(extent) is not int or not 0 < extent < 2**31:
            return 0
        count *= extent
    return count


def _attributes(value: object) -> Mapping[str, Any]:
    return value.attributes if isinstance(value, Record) else {}


def _numbers(value: object, key: str, location: str) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or any(
        type(number) is not int or not 0 <= number < 2**60 for number in value
    ):
        raise damaged(location, f"a shape or offset of {key} is no tuple of numbers")
    return tuple(value)
