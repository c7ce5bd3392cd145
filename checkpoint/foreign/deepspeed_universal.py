"""Universal checkpoints of DeepSpeed, as its tool `ds_to_universal` makes: a folder per parameter.

`zero/<name>/fp32.pt` has a parameter as the optimizer has it, the files beside it the moments: a
mapping with the tensor as `param`, or of stage 3 the flattened tensor alone. The module's file is
as it was, so what has fewer bits there is in its own data type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from keepstep.checkpoint.foreign.arrays import FileArray
from keepstep.checkpoint.foreign.contents import Contents, mapping_of
from keepstep.checkpoint.foreign.converted_arrays import ConvertedArray
from keepstep.checkpoint.foreign.deepspeed_files import (
    MASTER_SLOT,
    MASTERS,
    ModelFile,
    Shape,
    add_groups,
    add_rest,
    leave_out_others,
    model_files,
)
from keepstep.checkpoint.foreign.deepspeed_zero import add_frozen_parts, add_module
from keepstep.checkpoint.foreign.files import Extent, ForeignFiles, damaged
from keepstep.checkpoint.foreign.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.foreign.pieces import whole
from keepstep.checkpoint.foreign.torch_file import read_torch_file
from keepstep.checkpoint.layout.boxes import Json
from keepstep.checkpoint.layout.dtypes import numpy_dtype

_SLOT = re.compile(r"zero/(.+)/([^/]+)\.pt")
_MASTER = "fp32"
_OPTIMIZER = "zero/optimizer_state.pt"
_STATE = "optimizer_state_dict"
# What the converter kept of rank 0's partitions.
_STRUCTURE = (
    "param_groups",
    "base_optimizer_state",
    _STATE,
    "fp32_flat_groups",
    "group_paddings",
    "param_alignment_paddings",
    "partition_count",
    "zero_stage",
    "ds_version",
)


def read_deepspeed_universal(files: ForeignFiles) -> ForeignCheckpoint:
    """Return the checkpoint of a folder such as `global_step1000_universal`.

    Raises:
        CheckpointMissing: a file is not there.
        CheckpointDamaged: files contradict themselves or each other.
        FormatUnsupported: parameters that were not trained were cut by model parallelism.
    """
    contents = Contents(files.url, "DeepSpeed Universal")
    models = model_files(files)
    if not models:
        raise damaged(files.url, "no file there has the module's state")
    model = models[0]
    trained = model.trained
    slots: dict[str, dict[str, str]] = {}
    for name in files.names:
        if match := _SLOT.fullmatch(name):
            slots.setdefault(match[1], {})[match[2]] = name
    optimizer = _optimizer(files)
    steps = _steps(optimizer, model)
    masters: dict[str, Json] = {}
    for parameter, shape in trained.items():
        if _MASTER not in slots.get(parameter, {}):
            # Says that it is missing.
            files.file(f"zero/{parameter}/{_MASTER}.pt")
        for slot, name in slots[parameter].items():
            value = _tensor(files.file(name).whole, shape)
            if slot == _MASTER and isinstance(value, FileArray):
                _add_master(contents, masters, model, parameter, value)
            else:
                contents.add_slot(parameter, slot, value)
        if "step" not in slots[parameter] and parameter in steps:
            contents.add_slot(parameter, "step", steps[parameter])
    if any(_is_stub(model.module.get(name), shape) for name, shape in model.frozen.items()):
        add_frozen_parts(contents, models)
    # A parameter that is not trained, and a buffer, is there in the module's own data type.
    add_module(contents, model, trained)
    opened = {_OPTIMIZER}
    for parameter, names_of_slots in slots.items():
        is_unknown = parameter not in model.module and parameter not in trained
        if is_unknown:
            contents.leave_out(f"zero/{parameter}", "the module's file does not have it")
        if is_unknown or parameter in trained:
            opened.update(names_of_slots.values())
        elif _MASTER in names_of_slots:
            # The converter's copy of what the module's file has.
            opened.add(names_of_slots[_MASTER])
    leave_out_others(contents, files, opened)
    if masters:
        contents.add_document(MASTERS, masters)
    groups = optimizer.get("param_groups")
    if groups is None:
        contents.leave_out(_OPTIMIZER, "it has no groups of the optimizer")
    else:
        names = [list(group) for group in model.groups]
        add_groups(contents, groups, names, f"{files.url}/{_OPTIMIZER}")
    settings = {name: value for name, value in optimizer.items() if name not in _STRUCTURE}
    return contents.checkpoint(add_rest(contents, model, settings))


def _add_master(
    contents: Contents,
    masters: dict[str, Json],
    model: ModelFile,
    parameter: str,
    master: FileArray,
) -> None:
    """Add a parameter, and as a slot what the optimizer has of it, if that has more bits."""
    own = model.module.get(parameter)
    dtype = own.dtype if isinstance(own, FileArray) else master.dtype
    if numpy_dtype(dtype).itemsize >= numpy_dtype(master.dtype).itemsize:
        contents.add(f"model/{parameter}", whole(master))
        return
    if isinstance(own, FileArray) and own.shape == master.shape:
        contents.add_model_array(parameter, own)
    else:
        contents.add(f"model/{parameter}", whole(ConvertedArray(master, dtype)))
    contents.add_slot(parameter, MASTER_SLOT, master)
    masters[f"model/{parameter}"] = {"slot": MASTER_SLOT, "dtype": master.dtype}


def _tensor(extent: Extent, shape: Shape) -> object:
    """Return what a file of a parameter has; a flattened tensor in the parameter's shape."""
    value = read_torch_file(extent)
    if isinstance(value, dict):
        if "param" not in value:
            raise damaged(extent.location, "it has no tensor `param`")
        return value["param"]
    if isinstance(value, FileArray) and len(value.shape) == 1 and value.shape != shape:
        if value.size != math.prod(shape):
            raise damaged(
                extent.location,
                f"it has {value.size} elements, and the parameter's shape is {shape}",
            )
        return value.reshaped(shape)
    return value


def _optimizer(files: ForeignFiles) -> Mapping[str, Any]:
    if _OPTIMIZER not in files:
        return {}
    return mapping_of(read_torch_file(files.file(_OPTIMIZER).whole))


def _steps(optimizer: Mapping[str, Any], model: ModelFile) -> dict[str, object]:
    """Return the steps of parameters, which stage 3 has by flat buffers only."""
    state = mapping_of(optimizer.get(_STATE)).get("state")
    if not isinstance(state, dict):
        return {}
    return {
        name: mapping_of(state[number])["step"]
        for number, names in enumerate(model.groups)
        if "step" in mapping_of(state.get(number))
        for name in names
    }


def _is_stub(value: object, shape: Shape) -> bool:
    return isinstance(value, FileArray) and value.shape != shape
