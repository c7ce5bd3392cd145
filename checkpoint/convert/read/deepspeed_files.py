"""Finds the files of a checkpoint of DeepSpeed, and reads the modules' files.

Each rank of model parallelism has a file with the module's state, as its first rank of data
parallelism had it, and what the script added; in stage 3 each rank has one. Model ranks count
through the ranks of tensor parallelism first, then through the pipeline's stages; a pipeline's
modules are in files of layers instead (`keepstep.checkpoint.convert.read.deepspeed_layers`). The
parameters that are trained are named in the order of the optimizer's groups, which is the order of
the flat buffers in the optimizer's files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keepstep.checkpoint.convert.read.contents import Contents, mapping_of, step_of
from keepstep.checkpoint.convert.read.files import ForeignFiles, damaged
from keepstep.checkpoint.convert.read.foreign_source import LeftOut
from keepstep.checkpoint.convert.read.pickled_json import NotJson, as_json
from keepstep.checkpoint.convert.read.pickled_values import Record
from keepstep.checkpoint.convert.read.torch_file import read_torch_file
from keepstep.checkpoint.errors import FormatUnsupported
from keepstep.checkpoint.format.layout.boxes import Json

DEEPSPEED = "deepspeed"
"""The document that has DeepSpeed's own settings, which say how training was configured."""

Shape = tuple[int, ...]

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_EXPERTS = re.compile(r"(?:layer_\d+_)?expert_.*|expp_rank_.*")
# Entries of the module's file that DeepSpeed writes; the script adds the others.
_STRUCTURE = (
    "module",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "universal_checkpoint_info",
)
_SETTINGS = ("ds_config", "ds_version", "buffer_names")
# Files that DeepSpeed writes next to its checkpoints' directories.
_NEXT_TO_CHECKPOINTS = ("latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py")
_CHECKPOINT = re.compile(rf"(?:{_MODEL.pattern})|(?:{_OPTIMIZER.pattern})|zero/.+")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The content of a module's file.

    Attributes:
        location: URL of the file.
        content: all of it.
        module: the module's state by name; in stage 3 empty tensors stand for what is partitioned.
        groups: names and shapes of the trained parameters, for each flat buffer in order.
        shared: names that are other parameters' too, and those.
        frozen: names and shapes of what stage 3 partitioned and did not train.
        buffers: names of the module's buffers.
    """

    location: str
    content: Mapping[str, Any]
    module: Mapping[str, Any]
    groups: Sequence[Mapping[str, Shape]]
    shared: Mapping[str, str]
    frozen: Mapping[str, Shape]
    buffers: frozenset[str]

    @property
    def trained(self) -> dict[str, Shape]:
        """Names and shapes of all trained parameters."""
        return {name: shape for group in self.groups for name, shape in group.items()}


@dataclass(frozen=True, slots=True)
class OptimizerFile:
    """The content of one rank's optimizer file: the settings and flat buffers."""

    location: str
    state: Mapping[str, Any] = field(repr=False)


def model_files(files: ForeignFiles) -> list[list[ModelFile]]:
    """Return what the modules' files have, by model rank: of each one, or in stage 3 of each rank.

    Files of a pipeline have no module.

    Raises:
        CheckpointMissing: one of the files is not there.
        CheckpointDamaged: one contradicts itself.
        FormatUnsupported: there are experts' files.
    """
    for name in files.names:
        if _EXPERTS.fullmatch(name):
            raise FormatUnsupported(
                f"{files.url}/{name}: it has experts of DeepSpeed, which are not read; load it "
                "with the script that trained it, and save whole parameters, such as with "
                "torch.distributed.checkpoint"
            )
    return [[_model_file(files, name) for name in row] for row in _names_by_rank(files, _MODEL)]


def optimizer_files(files: ForeignFiles) -> list[list[OptimizerFile]]:
    """Return what the optimizers' files have, by model rank and rank.

    Raises:
        CheckpointMissing: one of the files is not there.
        CheckpointDamaged: one contradicts itself.
    """
    return [[_optimizer_file(files, name) for name in row] for row in optimizer_names(files)]


def left_out_files(files: ForeignFiles, opened: Collection[str]) -> list[LeftOut]:
    """Return the files that were not opened: all by name but those that were, and the modules'.

    Files and directories next to the checkpoint's directory are listed, too, unless they are other
    checkpoints of DeepSpeed, or files that it writes there.
    """
    of_modules = {name for row in _names_by_rank(files, _MODEL) for name in row}
    left_out = [
        LeftOut(name, "it was not opened: DeepSpeed has no state of its own in it")
        for name in files.names
        if name not in opened and name not in of_modules
    ]
    parent = files.directory.rstrip("/").rpartition("/")[0]
    above = f"{parent}/" if parent else ""
    neighbours: dict[str, list[str]] = {}
    for name in files.all_names if files.directory else ():
        if not name.startswith(files.directory):
            inside = name[len(above) :] if name.startswith(above) else name
            top, slash, rest = inside.partition("/")
            neighbours.setdefault(f"{top}{slash}", []).append(rest)
    for top, names in neighbours.items():
        if top not in _NEXT_TO_CHECKPOINTS and not any(
            _CHECKPOINT.fullmatch(name) for name in names
        ):
            count = f" ({len(names)} files)" if len(names) > 1 else ""
            left_out.append(
                LeftOut(f"{top}{count}", "it is next to the checkpoint's directory, not in it")
            )
    return left_out


def optimizer_names(files: ForeignFiles) -> list[list[str]]:
    """Return the names of the optimizers' files, by model rank and rank.

    Raises:
        CheckpointMissing: one of the files is not there.
    """
    return _names_by_rank(files, _OPTIMIZER)


def is_state(name: str) -> bool:
    """Return whether DeepSpeed itself has a part of the state, or a setting, under a name.

    The rest of a module's file is what the script added, and the same on all ranks.
    """
    return name in _STRUCTURE or name in _SETTINGS


def add_rest(contents: Contents, model: ModelFile, settings: Mapping[str, Any]) -> int:
    """Add ties and all that is no tensor; return the number of steps.

    Args:
        model: the first module's file.
        settings: what the optimizer's file has besides the state, such as `clip_grad`.
    """
    for name, first in model.shared.items():
        contents.tie(name, first)
    for name, value in model.content.items():
        if not is_state(name) and value is not None:
            contents.add_value(name, value)
    known: dict[str, Json] = {}
    for name, value in [
        *((name, model.content.get(name)) for name in _SETTINGS),
        *settings.items(),
    ]:
        if value is None:
            continue
        try:
            known[name] = as_json(dict(value.attributes) if isinstance(value, Record) else value)
        except NotJson as error:
            contents.leave_out(name, str(error))
    contents.add_document(DEEPSPEED, known)
    return step_of(model.content.get("global_steps")) or 0


def add_groups(
    contents: Contents,
    groups: object,
    flat_names: Sequence[Sequence[str]],
    location: str,
) -> None:
    """Add the optimizer's groups; each one's parameters are the flat buffers that it names.

    Raises:
        CheckpointDamaged: a flat buffer is in no group, or in two.
    """
    listed = groups if isinstance(groups, list) else []
    members_of = [mapping_of(group).get("params") for group in listed]
    numbers = [members if isinstance(members, list) else [] for members in members_of]
    flat = [number for members in numbers for number in members]
    if sorted(flat, key=repr) != sorted(range(len(flat_names)), key=repr):
        raise damaged(
            location,
            f"its groups have the flat buffers {flat}, and there are {len(flat_names)}",
        )
    for group, members in zip(listed, numbers, strict=True):
        options = {name: value for name, value in group.items() if name != "params"}
        contents.add_group([name for n in members for name in flat_names[n]], options)


def shapes_of(value: object, location: str) -> dict[str, Shape]:
    """Return names and shapes, as a file has them.

    Raises:
        CheckpointDamaged: they are something else.
    """
    shapes = mapping_of(value)
    for name, shape in shapes.items():
        if not isinstance(shape, tuple) or any(
            type(extent) is not int or not 0 <= extent < 2**60 for extent in shape
        ):
            raise damaged(location, f"the shape of {name} is no tuple of numbers")
        if math.prod(shape) > 2**60:
            raise damaged(location, f"no tensor has the shape {shape} of {name}")
    return dict(shapes)


def _model_file(files: ForeignFiles, name: str) -> ModelFile:
    file = files.file(name)
    content = mapping_of(read_torch_file(file.whole))
    if "module" not in content:
        raise damaged(file.location, "it has no module's state")
    module = mapping_of(content.get("module"))
    listed = content.get("param_shapes") or []
    if not isinstance(listed, list):
        raise damaged(file.location, "its param_shapes are no list")
    groups = [shapes_of(group, file.location) for group in listed]
    trained = [name for group in groups for name in group]
    if len(trained) != len(set(trained)):
        raise damaged(file.location, "its param_shapes have a parameter twice")
    shared = {
        alias: kept
        for alias, kept in mapping_of(content.get("shared_params")).items()
        if isinstance(kept, str) and kept != alias
    }
    return ModelFile(
        file.location,
        content,
        module,
        groups,
        shared,
        shapes_of(content.get("frozen_param_shapes"), file.location),
        frozenset(name for name in content.get("buffer_names") or () if isinstance(name, str)),
    )


def _optimizer_file(files: ForeignFiles, name: str) -> OptimizerFile:
    file = files.file(name)
    state = mapping_of(mapping_of(read_torch_file(file.whole)).get("optimizer_state_dict"))
    if not state:
        raise damaged(file.location, "it has no optimizer_state_dict")
    return OptimizerFile(file.location, state)


def _names_by_rank(files: ForeignFiles, pattern: re.Pattern[str]) -> list[list[str]]:
    """Return the names of all ranks' files, by model rank and rank of data parallelism."""
    found = {
        (int(match[2]), int(match[1] or 0)): name
        for name in files.names
        if (match := pattern.fullmatch(name))
    }
    if not found:
        return []
    some = next(iter(found.values()))
    rows = []
    for model_rank in range(max(rank for rank, _ in found) + 1):
        row = []
        for rank in range(max(rank for _, rank in found) + 1):
            if (model_rank, rank) not in found:
                missing = re.sub(r"(?<=zero_pp_rank_)\d+", f"{rank}", some)
                # The listing lacks it, so this says so.
                files.file(re.sub(r"(?<=mp_rank_)\d+", f"{model_rank:02d}", missing))
            row.append(found[model_rank, rank])
        rows.append(row)
    return rows
