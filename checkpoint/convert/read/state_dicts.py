"""Reads files of state dictionaries (`torch.save`) by the conventions of training scripts.

A file has a module's `state_dict` alone, or a mapping with that, an optimizer's, the number of
steps, and whatever else the script needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepstep.checkpoint.convert.read.contents import Contents, has_tensor, mapping_of, step_of
from keepstep.checkpoint.convert.read.files import ForeignFiles, damaged
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.modules import is_module, module_state
from keepstep.checkpoint.convert.read.optimizer_state import add_optimizer_state, is_optimizer_state
from keepstep.checkpoint.convert.read.pickled_json import NotJson, as_json, described
from keepstep.checkpoint.convert.read.pickled_values import Record
from keepstep.checkpoint.convert.read.torch_file import read_torch_file
from keepstep.checkpoint.errors import FormatUnsupported
from keepstep.checkpoint.format.layout.described import check_described
from keepstep.checkpoint.format.layout.documents import AVERAGES, MASTERS, PADDING, PARTS, SCALES
from keepstep.checkpoint.format.layout.parameter_order import ParameterNames

_MODEL_NAMES = ("model", "state_dict", "model_state_dict", "model_state", "module", "net")
DESCRIPTIONS = frozenset({AVERAGES, MASTERS, PADDING, PARTS, SCALES})
"""Names under which keepstep writes what it knows of tensors."""

_STEP_NAMES = ("step", "global_step", "global_steps", "iteration", "iter", "steps")


def read_state_dicts(
    files: ForeignFiles, name: str, parameter_names: ParameterNames = None
) -> ForeignCheckpoint:
    """Return the checkpoint that one file of `torch.save` has.

    Args:
        name: which of them.
        parameter_names: see `add_optimizer_state`.

    Raises:
        CheckpointDamaged: the file contradicts itself.
        FormatUnsupported: it has neither tensors by name nor a module.
    """
    file = files.file(name)
    contents = Contents(file.location, "torch.save")
    tree = read_torch_file(file.whole)
    if is_model(tree):
        add_model(contents, tree, file.location)
        return contents.checkpoint(0)
    entries = mapping_of(tree)
    if not any(has_tensor(value) or is_module(value) for value in entries.values()):
        raise FormatUnsupported(
            f"{file.location}: it has {described(tree)}, and neither a state_dict nor a mapping "
            "with one; save the module's state_dict()"
        )
    step = add_training_state(contents, entries, file.location, parameter_names)
    return contents.checkpoint(step or 0)


def add_training_state(
    contents: Contents,
    entries: Mapping[str, Any],
    location: str,
    parameter_names: ParameterNames = None,
) -> int | None:
    """Add a mapping of a module's and an optimizer's state and other values; return the step.

    Raises:
        CheckpointDamaged: it contradicts itself.
    """
    model_name = _model_name(entries)
    if model_name is not None:
        add_model(contents, entries[model_name], location)
    step = None
    descriptions: dict[str, object] = {}
    optimizers = [name for name, value in entries.items() if is_optimizer_state(value)]
    for name, value in entries.items():
        if name == model_name:
            continue
        if name in DESCRIPTIONS and mapping_of(value):
            descriptions[name] = value
            continue
        if is_optimizer_state(value):
            add_optimizer_state(
                contents,
                value,
                name,
                location,
                parameter_names,
                number=optimizers.index(name),
                count=len(optimizers),
            )
            continue
        if name in _STEP_NAMES and step is None:
            step = step_of(value)
        contents.add_value(name, value)
    for name, value in descriptions.items():
        if not _add_description(contents, name, value):
            contents.add_value(name, value)
    return step


def _add_description(contents: Contents, name: str, value: object) -> bool:
    """Add what keepstep noted of tensors; return False if it is something else of that name."""
    tensors = {key: tensor.spec for key, tensor in contents.tensors.items()}
    try:
        content = as_json(value)
        check_described({name: content}, tensors)
    except (NotJson, ValueError):
        return False
    contents.add_document(name, content)
    return True


def add_model(contents: Contents, value: object, location: str) -> None:
    """Add a module's `state_dict`, or the module itself, which was pickled as an object.

    Raises:
        CheckpointDamaged: it is neither, or its modules contain each other.
    """
    state = module_state(value, location) if isinstance(value, Record) else mapping_of(value)
    if not state and value != {}:
        raise damaged(location, f"the module's state is {described(value)}, and no tensors by name")
    for name, tensor in state.items():
        contents.add_model_array(name, tensor)


def is_model(value: object) -> bool:
    """Return whether a value is a module, or its `state_dict`: tensors by names, not nested."""
    if is_module(value):
        return True
    state = mapping_of(value)
    return any(
        has_tensor(item) and not isinstance(item, dict | list) for item in state.values()
    ) and (
        not any(isinstance(item, dict) and has_tensor(item) for item in state.values())
        and not is_optimizer_state(value)
    )


def _model_name(entries: Mapping[str, Any]) -> str | None:
    """Return which entry is the module's state: by its name, or because no other can be."""
    models = [name for name, value in entries.items() if is_model(value)]
    for name in _MODEL_NAMES:
        if name in models:
            return name
    return models[0] if len(models) == 1 else None
