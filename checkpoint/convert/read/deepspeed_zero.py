"""Reads the state of one model rank of DeepSpeed's ZeRO: stages 1, 2 and 3.

It joins the ranks of data parallelism; `checkpoint.convert.read.deepspeed_ranks` joins model ranks.

The optimizer works on one flat buffer for each group of parameters, in the order of the groups.

Stages 1 and 2 cut each buffer into one partition per rank, wherever that falls. Each rank's file
says which parameter's elements its partition has where (`param_slice_mappings`). The last
partition is padded: its moments are stored with the padding, its parameters without.

Stage 3 cuts each parameter by itself into one part per rank; the last ones are padded. No
file says where parts are: they lie in the order of `param_shapes`, one after the other. Small
sub-groups make several buffers of a group. The module's own parameters are not in the files where
they have fewer bits: they are the optimizer's, rounded.

The optimizer's parameters become the slot `master_param` if the module's have fewer bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from keepstep.checkpoint.convert.read.arrays import FileArray
from keepstep.checkpoint.convert.read.contents import MASTER_SLOT, Contents, mapping_of
from keepstep.checkpoint.convert.read.converted_arrays import ConvertedArray
from keepstep.checkpoint.convert.read.deepspeed_cuts import INFO
from keepstep.checkpoint.convert.read.deepspeed_files import (
    ModelFile,
    OptimizerFile,
    Shape,
    add_groups,
    add_rest,
)
from keepstep.checkpoint.convert.read.files import damaged
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.optimizer_state import add_optimizer_state, is_optimizer_state
from keepstep.checkpoint.convert.read.pickled_values import Record
from keepstep.checkpoint.convert.read.pieces import Piece, assembled, pieces_of_range
from keepstep.checkpoint.convert.read.safe_repr import safe_repr
from keepstep.checkpoint.errors import FormatUnsupported
from keepstep.checkpoint.format.layout.completeness import OPTIMIZER
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.parameter_order import ParameterNames
from keepstep.checkpoint.format.layout.source import TensorSpec

_STATE = ("base_optimizer_state", "optimizer_state_dict")
_MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
# What describes the partitions, and is of no use without them.
_STRUCTURE = (
    *_STATE,
    *_MASTERS,
    "param_slice_mappings",
    "group_paddings",
    "param_alignment_paddings",
    "partition_count",
    "zero_stage",
    "ds_version",
    "ds_zero_partition_groups",
    INFO,
)

# Elements of a parameter, each with the place of the first in the flattened parameter.
_Ranges = list[tuple[int, FileArray]]


def read_model_rank(
    url: str,
    models: Sequence[ModelFile],
    optimizers: Sequence[OptimizerFile],
    parameter_names: ParameterNames = None,
) -> ForeignCheckpoint:
    """Return what one rank of model parallelism has, as a checkpoint of its own.

    Args:
        models: its modules' files; the first one has the module's state.
        optimizers: its optimizers' files, by rank of data parallelism.
        parameter_names: see `add_optimizer_state`; ZeRO's files have names of their own.

    Raises:
        CheckpointDamaged: files contradict themselves or each other.
        FormatUnsupported: it is of no stage that is read, or it has experts.
    """
    model = models[0]
    is_of_layers = model.content.get("module") is None
    if not model.module and not model.trained and not is_of_layers:
        raise damaged(model.location, "it has no module's state")
    if not optimizers:
        contents = Contents(url, "DeepSpeed")
        add_module(contents, model, {})
        state = model.content.get("optimizer")
        if is_optimizer_state(state):
            add_optimizer_state(
                contents, mapping_of(state), "optimizer", model.location, parameter_names
            )
        elif state is not None:
            contents.leave_out("optimizer", "it is in a form that is not read", key=OPTIMIZER)
        return contents.checkpoint(add_rest(contents, model, {}))
    _check_world(optimizers)
    stage = _stage(optimizers[0])
    contents = Contents(url, f"DeepSpeed ZeRO {stage}")
    if not model.groups:
        # DeepSpeed's BF16 optimizer without ZeRO partitions as stage 1, and writes no shapes.
        model = replace(model, groups=_groups_of(model, optimizers))
    if stage == 3:
        add_frozen_parts(contents, models)
    add_module(contents, model, model.trained if stage == 3 else {})
    _add_optimizer(contents, model, optimizers, stage)
    settings = {
        name: value for name, value in optimizers[0].state.items() if name not in _STRUCTURE
    }
    return contents.checkpoint(add_rest(contents, model, settings))


def add_module(contents: Contents, model: ModelFile, partitioned: Mapping[str, Shape]) -> None:
    """Add the module's tensors that are whole in its file.

    Args:
        partitioned: the parameters without elements in the file.
    """
    for name, value in model.module.items():
        if name in model.shared or name in partitioned or f"model/{name}" in contents.tensors:
            continue
        contents.add_model_array(name, value)


def add_frozen_parts(contents: Contents, models: Sequence[ModelFile]) -> None:
    """Add the parameters that are not trained, which stage 3 cuts as it does the others.

    Raises:
        CheckpointDamaged: ranks have too many or too few elements of one.
    """
    for name, shape in models[0].frozen.items():
        if name in models[0].shared:
            continue
        parts = [
            _flat(mapping_of(model.content.get("frozen_param_fragments")).get(name), model.location)
            for model in models
        ]
        most = -(-math.prod(shape) // len(parts))
        if any(part.size != most for part in parts):
            raise damaged(
                models[0].location,
                f"of {name}, {shape}, {len(parts)} ranks have {[part.size for part in parts]} "
                f"elements, and need {most} each",
            )
        slices = [(rank * most, part) for rank, part in enumerate(parts)]
        _add(contents, f"model/{name}", shape, list(_without_padding(shape, slices)))


def _add_optimizer(
    contents: Contents, model: ModelFile, optimizers: Sequence[OptimizerFile], stage: int
) -> None:
    """Add the trained parameters' masters and slots, and the groups."""
    states = [_states(optimizer) for optimizer in optimizers]
    for number, shapes in enumerate(model.groups):
        whole = [_master(optimizer, number) for optimizer in optimizers]
        cut = _parts if stage == 3 else _slices
        for name, slices in cut(number, shapes, whole, whole, optimizers).items():
            _add_master(contents, model, name, shapes[name], slices, stage)
        for slot in states[0].get(number, {}):
            values = [state.get(number, {}).get(slot) for state in states]
            if not (isinstance(values[0], FileArray) and values[0].shape):
                for name in shapes:
                    contents.add_slot(name, slot, values[0])
                continue
            flat = [
                _flat(value, optimizer.location)
                for value, optimizer in zip(values, optimizers, strict=True)
            ]
            for name, slices in cut(number, shapes, flat, whole, optimizers).items():
                _add(contents, f"optim/{name}/{slot}", shapes[name], slices)
    groups = mapping_of(optimizers[0].state.get(_STATE[stage == 3])).get("param_groups")
    add_groups(contents, groups, [list(group) for group in model.groups], optimizers[0].location)


def _add_master(
    contents: Contents,
    model: ModelFile,
    name: str,
    shape: Shape,
    slices: _Ranges,
    stage: int,
) -> None:
    """Add a parameter as the optimizer has it: as the module's, as a slot, or as both."""
    stub = model.module.get(name)
    dtype = stub.dtype if isinstance(stub, FileArray) else "float32"
    stored = slices[0][1].dtype if slices else "float32"
    is_narrower = numpy_dtype(dtype).itemsize < numpy_dtype(stored).itemsize
    if stage == 3:
        _add(contents, f"model/{name}", shape, slices, dtype if is_narrower else None)
    elif name not in model.module:
        raise damaged(model.location, f"it has no {name}, which was trained")
    if is_narrower:
        _add(contents, f"optim/{name}/{MASTER_SLOT}", shape, slices)
        contents.note_master(name)


def _add(
    contents: Contents,
    key: str,
    shape: Shape,
    slices: Iterable[tuple[int, FileArray]],
    dtype: str | None = None,
) -> None:
    """Add a tensor of ranges of its elements, perhaps converted to another data type."""
    pieces: list[Piece] = []
    stored = "float32"
    for start, elements in slices:
        stored = elements.dtype
        pieces.extend(pieces_of_range(shape, start, elements))
    if dtype is not None:
        pieces = [
            Piece(piece.box, ConvertedArray(piece.array, dtype))
            for piece in pieces
            if isinstance(piece.array, FileArray)
        ]
    contents.add(key, assembled(key, TensorSpec(dtype or stored, shape), pieces))


def _slices(
    number: int,
    shapes: Mapping[str, Shape],
    partitions: Sequence[FileArray],
    masters: Sequence[FileArray],
    optimizers: Sequence[OptimizerFile],
) -> dict[str, _Ranges]:
    """Return each parameter's slices of the partitions of a flat buffer, as stages 1 and 2 cut it.

    Args:
        number: which of the flat buffers it is.
        shapes: the parameters in it.
        partitions: each rank's partition.
        masters: each rank's partition of the parameters, which have no padding.
        optimizers: the ranks' files.
    """
    found: dict[str, _Ranges] = {name: [] for name in shapes}
    ends = dict.fromkeys(shapes, 0)
    for partition, master, optimizer in zip(partitions, masters, optimizers, strict=True):
        if partition.size < master.size:
            raise damaged(
                optimizer.location,
                f"its partition {number} has {master.size} elements of parameters and "
                f"{partition.size} of their state",
            )
        mappings = optimizer.state.get("param_slice_mappings")
        if not isinstance(mappings, list) or len(mappings) <= number:
            raise damaged(optimizer.location, f"it has no param_slice_mappings of group {number}")
        for name, address in mapping_of(mappings[number]).items():
            start, count = _address(address, name, optimizer.location)
            if name not in shapes:
                raise damaged(
                    optimizer.location, f"it has {name}, which the module's file has not trained"
                )
            if start + count > master.size:
                raise damaged(
                    optimizer.location,
                    f"{count} elements of {name} are to be at {start} in partition {number}, "
                    f"which has {master.size}",
                )
            found[name].append((ends[name], partition.flat_range(start, start + count)))
            ends[name] += count
    for name, shape in shapes.items():
        if ends[name] != math.prod(shape):
            raise damaged(
                optimizers[-1].location,
                f"all ranks together have {ends[name]} elements of {name}, whose shape is {shape}",
            )
    return found


def _parts(
    number: int,
    shapes: Mapping[str, Shape],
    buffers: Sequence[FileArray],
    masters: Sequence[FileArray],
    optimizers: Sequence[OptimizerFile],
) -> dict[str, _Ranges]:
    """Return each parameter's parts in the ranks' flat buffers, as stage 3 cuts parameters."""
    ranks = len(buffers)
    total = sum(-(-math.prod(shape) // ranks) for shape in shapes.values())
    for buffer, optimizer in zip(buffers, optimizers, strict=True):
        if buffer.size != total:
            raise damaged(
                optimizer.location,
                f"flat buffer {number} has {buffer.size} elements, and its parameters need "
                f"{total} on each of {ranks} ranks",
            )
    found = {}
    offset = 0
    for name, shape in shapes.items():
        most = -(-math.prod(shape) // ranks)
        parts = [
            (rank * most, buffer.flat_range(offset, offset + most))
            for rank, buffer in enumerate(buffers)
        ]
        found[name] = list(_without_padding(shape, parts))
        offset += most
    return found


def _without_padding(
    shape: Shape, parts: Iterable[tuple[int, FileArray]]
) -> Iterator[tuple[int, FileArray]]:
    total = math.prod(shape)
    for start, part in parts:
        count = max(0, min(part.size, total - start))
        if count:
            yield start, part.flat_range(0, count)


def _address(value: object, name: str, location: str) -> tuple[int, int]:
    """Return where a slice begins in its partition, and how many elements it has."""
    attributes = value.attributes if isinstance(value, Record) else mapping_of(value)
    start, count = attributes.get("start"), attributes.get("numel")
    if type(start) is not int or type(count) is not int or start < 0 or count < 0:
        raise damaged(location, f"it does not say where its elements of {name} are")
    return start, count


def _states(optimizer: OptimizerFile) -> dict[int, Mapping[str, Any]]:
    """Return an optimizer's slots by the numbers of the flat buffers."""
    for name in _STATE:
        state = mapping_of(optimizer.state.get(name)).get("state")
        if isinstance(state, dict):
            return {number: mapping_of(slots) for number, slots in state.items()}
    raise damaged(optimizer.location, "it has no state of the optimizer by groups")


def _master(optimizer: OptimizerFile, number: int) -> FileArray:
    for name in _MASTERS:
        listed = optimizer.state.get(name)
        if isinstance(listed, list) and number < len(listed):
            return _flat(listed[number], optimizer.location)
    raise damaged(optimizer.location, f"it has no parameters of group {number}")


def _flat(value: object, location: str) -> FileArray:
    if not isinstance(value, FileArray) or len(value.shape) != 1:
        raise damaged(location, "a flat buffer is no tensor of one dimension")
    return value


def _stage(optimizer: OptimizerFile) -> int:
    """Return the stage of ZeRO, which newer releases store as an enumeration's member."""
    stage = optimizer.state.get("zero_stage")
    if stage is None and _MASTERS[0] in optimizer.state:
        return 1
    if isinstance(stage, Record) and len(stage.args) == 1:
        stage = stage.args[0]
    if stage not in (1, 2, 3):
        raise FormatUnsupported(
            f"{optimizer.location}: its zero_stage is {safe_repr(stage)}, and 1, 2 and 3 are read"
        )
    if optimizer.state.get("ds_zero_partition_groups"):
        raise FormatUnsupported(
            f"{optimizer.location}: its parameters are in partitions of experts, which are not "
            "read; load it with the script that trained it, and save whole parameters"
        )
    return int(stage)


def names_of_slices(optimizers: Sequence[OptimizerFile]) -> dict[str, None]:
    """Return the names of the parameters that ranks have slices of; their shapes are unknown."""
    return {name: None for group in _sliced_groups(optimizers) for name in group}


def _sliced_groups(optimizers: Sequence[OptimizerFile]) -> list[dict[str, str]]:
    """Return the parameters that ranks have slices of, by groups, with a file that says so."""
    groups: list[dict[str, str]] = []
    for optimizer in optimizers:
        mappings = optimizer.state.get("param_slice_mappings")
        for number, mapping in enumerate(mappings if isinstance(mappings, list) else ()):
            if number == len(groups):
                groups.append({})
            groups[number].update(dict.fromkeys(mapping_of(mapping), optimizer.location))
    return groups


def _groups_of(model: ModelFile, optimizers: Sequence[OptimizerFile]) -> list[dict[str, Shape]]:
    """Return names and shapes of the trained parameters from where their slices are."""
    groups: list[dict[str, Shape]] = []
    for group in _sliced_groups(optimizers):
        groups.append({})
        for name, location in group.items():
            tensor = model.module.get(name)
            if not isinstance(tensor, FileArray):
                raise damaged(location, f"it has {name}, which the module's file has not")
            groups[-1][name] = tensor.shape
    return groups


def _check_world(optimizers: Sequence[OptimizerFile]) -> None:
    """Refuse the files of some of the ranks."""
    for optimizer in optimizers:
        count = optimizer.state.get("partition_count")
        counts = count if isinstance(count, list) else [count]
        if any(one not in (None, len(optimizers)) for one in counts):
            raise damaged(
                optimizer.location,
                f"it is one of {count} partitions, and there are files of {len(optimizers)} ranks",
            )
