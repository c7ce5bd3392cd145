"""Reads universal checkpoints of DeepSpeed (`ds_to_universal`): a folder per parameter.

`zero/<name>/fp32.pt` has a parameter as the optimizer has it, the other files the moments: a
mapping with the tensor as `param`, or of stage 3 the flattened tensor alone. The tool has
joined the parts of tensor-parallel ranks and of pipeline stages; an embedding lacks the rows that
pad the vocabulary. The modules' files are as they were, so what has fewer bits there is in its own
data type; a pipeline's files of layers are not there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from keepstep.checkpoint.convert.read.arrays import FileArray
from keepstep.checkpoint.convert.read.contents import MASTER_SLOT, Contents, mapping_of
from keepstep.checkpoint.convert.read.converted_arrays import ConvertedArray
from keepstep.checkpoint.convert.read.deepspeed_cuts import UniversalInfo, universal_info
from keepstep.checkpoint.convert.read.deepspeed_files import (
    ModelFile,
    Shape,
    add_groups,
    add_rest,
    left_out_files,
    model_files,
)
from keepstep.checkpoint.convert.read.deepspeed_ranks import (
    ModelRank,
    join_model_ranks,
    left_out_of_ranks,
    parallel_degrees,
)
from keepstep.checkpoint.convert.read.deepspeed_zero import add_frozen_parts, add_module
from keepstep.checkpoint.convert.read.files import Extent, ForeignFiles, damaged
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.pieces import whole
from keepstep.checkpoint.convert.read.safe_repr import safe_repr
from keepstep.checkpoint.convert.read.torch_file import read_torch_file
from keepstep.checkpoint.convert.rules.rank_shards import RankRules
from keepstep.checkpoint.format.layout.completeness import OPTIMIZER
from keepstep.checkpoint.format.layout.documents import TIED
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype

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


def read_deepspeed_universal(
    files: ForeignFiles, rank_rules: RankRules | None = None
) -> ForeignCheckpoint:
    """Return the checkpoint of a folder such as `global_step1000_universal`.

    Args:
        rank_rules: how tensor parallelism cut the parameters that were not trained, if the files
            do not say it.

    Raises:
        CheckpointMissing: a file is not there.
        CheckpointDamaged: files contradict themselves or each other.
        FormatUnsupported: nothing says how parameters that were not trained were cut.
        RulesInvalid: the rules do not fit the tensors.
    """
    contents = Contents(files.url, "DeepSpeed Universal")
    models = model_files(files)
    if not models:
        raise damaged(files.url, "no file there has the module's state")
    model = models[0][0]
    stages, ranks = parallel_degrees(models, 0)
    shapes_by_rank = _shapes_by_rank(models, stages, ranks)
    info = universal_info(model.location, model.content, ranks)
    slots: dict[str, dict[str, str]] = {}
    for name in files.names:
        if match := _SLOT.fullmatch(name):
            slots.setdefault(match[1], {})[match[2]] = name
    optimizer = _optimizer(files)
    steps = _steps(optimizer, model)
    modules = [row[0] for row in models]
    for parameter, shapes in shapes_by_rank.items():
        if _MASTER not in slots.get(parameter, {}):
            # Says that it is missing.
            files.file(f"zero/{parameter}/{_MASTER}.pt")
        for slot, name in slots[parameter].items():
            value = _tensor(files.file(name).whole, parameter, shapes, info)
            if slot == _MASTER and isinstance(value, FileArray):
                _add_master(contents, modules, parameter, value)
            else:
                contents.add_slot(parameter, slot, value)
        if "step" not in slots[parameter] and parameter in steps:
            contents.add_slot(parameter, "step", steps[parameter])
    untrained = _untrained(files.url, models, stages, ranks, rank_rules)
    for key, tensor in untrained.foreign_tensors.items():
        contents.add(key, tensor)
    for left in untrained.left_out:
        contents.leave_out(left.name, left.reason)
    for model_rank in modules[::ranks]:
        if model_rank.content.get("module") is None:
            for name in sorted(model_rank.buffers):
                contents.leave_out(
                    f"model/{name}", "ds_to_universal does not copy the layers' files of a pipeline"
                )
    _leave_out_others(contents, files, models, slots, shapes_by_rank.keys())
    _add_groups(contents, optimizer, modules[::ranks], f"{files.url}/{_OPTIMIZER}")
    settings = {name: value for name, value in optimizer.items() if name not in _STRUCTURE}
    for name, first in untrained.documents.get(TIED, {}).items():
        contents.tie(name, first)
    return contents.checkpoint(add_rest(contents, model, settings))


def _leave_out_others(
    contents: Contents,
    files: ForeignFiles,
    models: Sequence[Sequence[ModelFile]],
    slots: Mapping[str, Mapping[str, str]],
    trained: Collection[str],
) -> None:
    """Leave out the files that are of no parameter of the module, and what ranks have apart."""
    modules = [row[0] for row in models]
    opened = {_OPTIMIZER}
    for parameter, names_of_slots in slots.items():
        is_known = parameter in trained or any(parameter in m.module for m in modules)
        if not is_known:
            contents.leave_out(
                f"zero/{parameter}", "the module's file does not have it", key=OPTIMIZER
            )
        if not is_known or parameter in trained:
            opened.update(names_of_slots.values())
        elif _MASTER in names_of_slots:
            # The converter's copy of what the module's file has.
            opened.add(names_of_slots[_MASTER])
    for left in (*left_out_of_ranks(models), *left_out_files(files, opened)):
        contents.leave_out(left.name, left.reason)


def _add_groups(
    contents: Contents, optimizer: Mapping[str, Any], stages: Sequence[ModelFile], location: str
) -> None:
    groups = optimizer.get("param_groups")
    names = _names_of_groups(stages)
    if groups is None:
        contents.leave_out(_OPTIMIZER, "it has no groups of the optimizer", key=OPTIMIZER)
    elif names is None:
        contents.leave_out(
            "param_groups", "stages of the pipeline have different numbers of them", key=OPTIMIZER
        )
    else:
        add_groups(contents, groups, names, location)


def _shapes_by_rank(
    models: Sequence[Sequence[ModelFile]], stages: int, ranks: int
) -> dict[str, list[Shape]]:
    """Return the shapes that the ranks of tensor parallelism have of each trained parameter."""
    found: dict[str, list[Shape]] = {}
    for stage in range(stages):
        files = [models[stage * ranks + rank][0] for rank in range(ranks)]
        for file in files[1:]:
            if file.trained.keys() != files[0].trained.keys():
                raise damaged(
                    file.location, f"it has trained other parameters than {files[0].location}"
                )
        for name in files[0].trained:
            found.setdefault(name, [file.trained[name] for file in files])
    return found


def _untrained(
    url: str,
    models: Sequence[Sequence[ModelFile]],
    stages: int,
    ranks: int,
    rank_rules: RankRules | None,
) -> ForeignCheckpoint:
    """Return the parameters that are not trained, and buffers, in the modules' own data types."""
    model_ranks = []
    for row in models:
        own = Contents(url, "")
        model = row[0]
        if any(_is_stub(model.module.get(name), shape) for name, shape in model.frozen.items()):
            add_frozen_parts(own, row)
        add_module(own, model, model.trained)
        model_ranks.append(ModelRank(own.checkpoint(0), model))
    return join_model_ranks(url, model_ranks, stages, ranks, rank_rules)


def _names_of_groups(stages: Sequence[ModelFile]) -> list[list[str]] | None:
    """Return the parameters of the optimizer's groups in all stages; None if these have others."""
    if len({len(stage.groups) for stage in stages}) > 1:
        return None
    placed: set[str] = set()
    names: list[list[str]] = [[] for _ in stages[0].groups]
    for stage in stages:
        for own, group in zip(names, stage.groups, strict=True):
            own.extend(name for name in group if name not in placed)
            placed.update(group)
    return names


def _add_master(
    contents: Contents,
    modules: Sequence[ModelFile],
    parameter: str,
    master: FileArray,
) -> None:
    """Add a parameter, and as a slot what the optimizer has of it, if that has more bits."""
    own = next((m.module[parameter] for m in modules if parameter in m.module), None)
    dtype = own.dtype if isinstance(own, FileArray) else _trained_dtype(modules[0])
    if numpy_dtype(dtype).itemsize >= numpy_dtype(master.dtype).itemsize:
        contents.add(f"model/{parameter}", whole(master))
        return
    if isinstance(own, FileArray) and own.shape == master.shape and len(modules) == 1:
        contents.add_model_array(parameter, own)
    else:
        contents.add(f"model/{parameter}", whole(ConvertedArray(master, dtype)))
    contents.add_slot(parameter, MASTER_SLOT, master)
    contents.note_master(parameter)


def _trained_dtype(model: ModelFile) -> str:
    """Return the data type that a module was trained in, as the configuration says."""
    config = mapping_of(model.content.get("ds_config"))
    for name, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        if mapping_of(config.get(name)).get("enabled") is True:
            return dtype
    return "float32"


def _tensor(
    extent: Extent, parameter: str, shapes: Sequence[Shape], info: UniversalInfo | None
) -> object:
    """Return what a file of a parameter has; a flattened tensor in the parameter's shape.

    Args:
        shapes: what ranks of tensor parallelism have of it, as the modules' files say.
        info: what the files say of how it was cut.
    """
    value = read_torch_file(extent)
    if isinstance(value, dict):
        if "param" not in value:
            raise damaged(extent.location, "it has no tensor `param`")
        param = value["param"]
        if not isinstance(param, FileArray):
            return param
        if info is not None and not value.get("vocab_tensor"):
            # Fused parts are stored in the shape of a view, which may have other dimensions.
            shape = info.merge(parameter, shapes, is_buffer=False).shape
            if math.prod(shape) == param.size:
                param = param.reshaped(shape)
        _check_merged(extent, value, param.shape, shapes)
        return param
    shape = shapes[0]
    if isinstance(value, FileArray) and len(value.shape) == 1 and value.shape != shape:
        if value.size != math.prod(shape):
            raise damaged(
                extent.location,
                f"it has {value.size} elements, and the parameter's shape is {shape}",
            )
        return value.reshaped(shape)
    return value


def _check_merged(
    extent: Extent, content: Mapping[str, Any], shape: Shape, shapes: Sequence[Shape]
) -> None:
    """Refuse a tensor whose shape is none that the ranks' shapes make together."""
    axis = content.get("cat_dim")
    if axis is None:
        largest = sum(math.prod(own) for own in shapes)
        fits = math.prod(shapes[0]) <= math.prod(shape) <= largest
    elif type(axis) is int and 0 <= axis < min(len(own) for own in shapes):
        rows = sum(own[axis] for own in shapes)
        expected = (*shapes[0][:axis], rows, *shapes[0][axis + 1 :])
        fits = shape == expected
        if content.get("vocab_tensor") is True and len(shape) == len(expected):
            # Without the rows that pad the vocabulary.
            fits = shape[1:] == expected[1:] and shape[0] <= expected[0]
    else:
        # A tensor of no dimensions has none to be put together along.
        fits = axis == 0 and len(shapes) == 1 and shape == shapes[0] == ()
    if not fits:
        raise damaged(
            extent.location,
            f"its shape is {shape}, put together along {safe_repr(axis)} (`cat_dim`), and the "
            f"ranks have {', '.join(str(own) for own in shapes)}",
        )


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
