"""Files of a checkpoint of DeepSpeed: which there are, and what the module's file has.

One file has the module's state, as rank 0 had it, and what the script added; in stage 3 each rank
has one. The parameters that are trained are named in the order of the optimizer's groups, which is
the order of the flat buffers in the optimizer's files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keepstep.checkpoint.errors import FormatUnsupported
from keepstep.checkpoint.foreign.contents import Contents, mapping_of, step_of
from keepstep.checkpoint.foreign.files import ForeignFiles, damaged
from keepstep.checkpoint.foreign.pickled_json import NotJson, as_json
from keepstep.checkpoint.foreign.pickled_values import Record
from keepstep.checkpoint.foreign.torch_file import read_torch_file
from keepstep.checkpoint.layout.boxes import Json

DEEPSPEED = "deepspeed"
"""The document that has DeepSpeed's own settings, which say how training was configured."""

MASTERS = "masters"
"""The document that says which slot of the optimizer has a parameter in a wider data type."""

MASTER_SLOT = "master_param"

Shape = tuple[int, ...]

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_UNSUPPORTED = (
    (re.compile(r"layer_\d+_expert_.*|expp_rank_.*"), "it has experts of DeepSpeed"),
    (re.compile(r"layer_.*model_states\.pt"), "it was trained with DeepSpeed's pipeline"),
)
_INSTEAD = (
    "load it with the script that trained it, and save whole parameters, such as with "
    "torch.distributed.checkpoint; what ds_to_universal makes of it is not read either"
)
# What the module's file has beside what the script added.
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


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What a module's file has.

    Attributes:
        location: URL of the file.
        content: all of it.
        module: the module's state by name; in stage 3 empty tensors stand for what is partitioned.
        groups: names and shapes of the trained parameters, for each flat buffer in order.
        shared: names that are other parameters' too, and those.
        frozen: names and shapes of what stage 3 partitioned and did not train.
    """

    location: str
    content: Mapping[str, Any]
    module: Mapping[str, Any]
    groups: Sequence[Mapping[str, Shape]]
    shared: Mapping[str, str]
    frozen: Mapping[str, Shape]

    @property
    def trained(self) -> dict[str, Shape]:
        """Names and shapes of all trained parameters."""
        return {name: shape for group in self.groups for name, shape in group.items()}


@dataclass(frozen=True, slots=True)
class OptimizerFile:
    """What an optimizer's file has of one rank: the settings and flat buffers."""

    location: str
    state: Mapping[str, Any] = field(repr=False)


def model_files(files: ForeignFiles) -> list[ModelFile]:
    """Return what the modules' files have, by rank: one, or in stage 3 one for each.

    Raises:
        CheckpointMissing: one of the files is not there.
        CheckpointDamaged: one contradicts itself.
        FormatUnsupported: model parallelism cut the parameters.
    """
    return [_model_file(files, name) for name in _names_by_rank(files, _MODEL)]


def optimizer_files(files: ForeignFiles) -> list[OptimizerFile]:
    """Return what the optimizers' files have, by rank.

    Raises:
        CheckpointMissing: one of the files is not there.
        CheckpointDamaged: one contradicts itself.
        FormatUnsupported: model parallelism cut the parameters.
    """
    found = []
    for name in optimizer_names(files):
        file = files.file(name)
        state = mapping_of(mapping_of(read_torch_file(file.whole)).get("optimizer_state_dict"))
        if not state:
            raise damaged(file.location, "it has no optimizer_state_dict")
        found.append(OptimizerFile(file.location, state))
    return found


def leave_out_others(contents: Contents, files: ForeignFiles, opened: Collection[str]) -> None:
    """Leave out all files by name but those that were opened, and the modules'."""
    of_modules = _names_by_rank(files, _MODEL)
    for name in files.names:
        if name not in opened and name not in of_modules:
            contents.leave_out(name, "it was not opened: DeepSpeed has no state of its own in it")


def optimizer_names(files: ForeignFiles) -> list[str]:
    """Return the names of the optimizers' files, by rank.

    Raises:
        CheckpointMissing: one of the files is not there.
        FormatUnsupported: model parallelism cut the parameters.
    """
    return _names_by_rank(files, _OPTIMIZER)


def add_rest(contents: Contents, model: ModelFile, settings: Mapping[str, Any]) -> int:
    """Add ties and all that is no tensor; return the number of steps.

    Args:
        contents: where to add it.
        model: the first module's file.
        settings: what the optimizer's file has beside the state, such as `clip_grad`.
    """
    for name, first in model.shared.items():
        contents.tie(name, first)
    for name, value in model.content.items():
        if name not in _STRUCTURE and name not in _SETTINGS and value is not None:
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
    module = mapping_of(content.get("module"))
    if not module:
        raise damaged(file.location, "it has no module's state")
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
    )


def _names_by_rank(files: ForeignFiles, pattern: re.Pattern[str]) -> list[str]:
    """Return the names of the files of all ranks of data parallelism, in their order."""
    for name in files.names:
        for unsupported, reason in _UNSUPPORTED:
            if unsupported.fullmatch(name):
                raise FormatUnsupported(
                    f"{files.url}/{name}: {reason}, and only parameters that each rank had whole "
                    f"are read; {_INSTEAD}"
                )
    found = dict(_matches(files, pattern))
    for rank in range(len(found)):
        if rank not in found:
            # The listing lacks it, so this says so.
            files.file(re.sub(r"(pp_rank_)\d+", rf"\g<1>{rank}", next(iter(found.values()))))
    return [found[rank] for rank in range(len(found))]


def _matches(files: ForeignFiles, pattern: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    for name in files.names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if int(match[2]):
            raise FormatUnsupported(
                f"{files.url}/{name}: model parallelism cut its parameters, and nothing in the "
                f"file says how; {_INSTEAD}"
            )
        yield int(match[1] or 0), name
