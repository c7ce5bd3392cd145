"""Reads folders of PyTorch's DCP by the conventions of the tools that save them.

DCP flattens the state to names with dots, and notes the path of each, so the state is put together
again by paths: a parameter's name may have dots as well. Three layouts are known: the module's and
the optimizer's state under names of their own (`get_state_dict`), perhaps together under one more
name; the module's alone; and torchtitan's, which has the module's at the root and the optimizer's
flattened to one mapping by names of parameters. Any other state has its tensors under their own
names.

Tied weights are stored under both names, as two tensors; as one, where keepstep wrote the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from keepstep.checkpoint.convert.read.contents import Contents, has_tensor, mapping_of, step_of
from keepstep.checkpoint.convert.read.dcp_entries import opened, read_entries, tensor_of_chunks
from keepstep.checkpoint.convert.read.dcp_metadata import METADATA, Metadata, Path, read_metadata
from keepstep.checkpoint.convert.read.files import ForeignFiles, damaged
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.optimizer_state import add_optimizer_state, is_optimizer_state
from keepstep.checkpoint.convert.read.pickled_json import NotJson, as_json
from keepstep.checkpoint.convert.read.pickled_values import plain_constructors
from keepstep.checkpoint.convert.read.pickles import unpickle
from keepstep.checkpoint.convert.read.state_dicts import add_model, add_training_state, is_model
from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.completeness import OPTIMIZER
from keepstep.checkpoint.format.layout.described import check_described
from keepstep.checkpoint.format.layout.parameter_order import ParameterNames

KEEPSTEP = "keepstep"
"""The name of a value with the step and the documents, in folders that keepstep wrote."""

_STATE = "state"
_GROUPS = "param_groups"
# A list lacks the items that were empty mappings: more of them than others are no list's.
_MOST_EMPTY_ITEMS = 1024


def read_dcp(files: ForeignFiles, parameter_names: ParameterNames = None) -> ForeignCheckpoint:
    """Return the checkpoint of a folder with `.metadata` and `.distcp` files.

    Args:
        parameter_names: see `add_optimizer_state`.

    Raises:
        CheckpointMissing: a file is not there.
        CheckpointDamaged: files contradict themselves or each other.
        FormatUnsupported: entries are compressed.
    """
    location = f"{files.url}/{METADATA}"
    metadata = read_metadata(files)
    root = _tree(metadata, location)
    train_state = mapping_of(root.get("train_state"))
    is_torchtitan = "step" in train_state
    contents = Contents(files.url, "torchtitan" if is_torchtitan else "PyTorch DCP")
    for name, dtype in metadata.unsupported.items():
        contents.leave_out(name, f"its data type {dtype} cannot be stored")
    for name in metadata.unexplained:
        contents.leave_out(name, "the metadata does not say what it is")
    for file_name in files.names:
        if file_name != METADATA and file_name not in metadata.file_names:
            contents.leave_out(file_name, "it was not opened: .metadata has nothing that is in it")
    own = mapping_of(root.get(KEEPSTEP))
    if own.keys() == {"step", "documents"}:
        del root[KEEPSTEP]
        step = _add(contents, root, location, parameter_names)
        _add_documents(contents, mapping_of(own["documents"]), location)
        step = step_of(own["step"]) if step is None else step
    else:
        step = _add(contents, root, location, parameter_names)
    return contents.checkpoint(step or step_of(train_state.get("step")) or 0)


def _add_documents(contents: Contents, documents: Mapping[str, Any], location: str) -> None:
    """Add what keepstep noted of the state's tensors."""
    known: dict[str, Json] = {}
    for name, content in documents.items():
        try:
            known[name] = as_json(content)
        except NotJson as error:
            contents.leave_out(f"{KEEPSTEP}/{name}", str(error))
    try:
        check_described(known, {key: tensor.spec for key, tensor in contents.tensors.items()})
    except ValueError as error:
        raise damaged(location, str(error)) from None
    for name, content in known.items():
        contents.add_document(name, content)


def _add(
    contents: Contents,
    root: Mapping[str, Any],
    location: str,
    parameter_names: ParameterNames,
) -> int | None:
    """Add the state that was saved; return its step, if it says."""
    if _is_state_of_module(root):
        add_model(contents, root, location)
        return None
    if len(root) == 1:
        ((name, inner),) = root.items()
        if any(
            _is_optimizer(value) or _is_flattened_optimizer(value)
            for value in mapping_of(inner).values()
        ):
            # `dcp.save({"app": application})`, as the documentation of PyTorch has it.
            return _add(contents, inner, location, parameter_names)
    flattened = {name for name, value in root.items() if _is_flattened_optimizer(value)}
    rest: dict[str, Any] = {}
    for name, value in root.items():
        if name in flattened:
            continue
        if isinstance(value, list) and value and all(_is_optimizer(item) for item in value):
            rest |= {f"{name}/{number}": _restored(item) for number, item in enumerate(value)}
        else:
            rest[name] = _readable(_restored(value))
    step = None
    is_torchtitan = "step" in mapping_of(root.get("train_state"))
    if is_torchtitan or (flattened and _is_with_model_at_root(rest)):
        _add_with_model_at_root(contents, rest, location, parameter_names)
    else:
        step = add_training_state(contents, rest, location, parameter_names)
    for name in flattened:
        _add_flattened_optimizer(contents, name, root[name])
    return step


def _add_with_model_at_root(
    contents: Contents,
    root: Mapping[str, Any],
    location: str,
    parameter_names: ParameterNames,
) -> None:
    tensors = {name: value for name, value in root.items() if _is_tensor(value)}
    if not tensors:
        add_training_state(contents, root, location, parameter_names)
        return
    add_model(contents, tensors, location)
    for name, value in root.items():
        if is_optimizer_state(value):
            add_optimizer_state(contents, value, name, location, parameter_names)
        elif name not in tensors:
            contents.add_value(name, value)


def _is_state_of_module(root: Mapping[str, Any]) -> bool:
    """Return whether a state is a module's alone: tensors, some of them by names of submodules."""
    return any("." in name for name in root) and all(
        _is_tensor(value) or name.endswith("_extra_state") for name, value in root.items()
    )


def _is_with_model_at_root(root: Mapping[str, Any]) -> bool:
    """Return whether a state's tensors are the module's, not values next to a module's state."""
    if any("." in name and _is_tensor(value) for name, value in root.items()):
        return True
    return not any(map(is_model, root.values()))


def _is_tensor(value: object) -> bool:
    return has_tensor(value) and not isinstance(value, dict | list | tuple)


def _is_optimizer(value: object) -> bool:
    return is_optimizer_state(_restored(value))


def _restored(value: object) -> object:
    """Return an optimizer's state with what DCP loses: its mapping, if empty, and its numbers."""
    if not isinstance(value, dict) or not set(value) <= {_STATE, _GROUPS}:
        return value
    groups, state = value.get(_GROUPS), value.get(_STATE, {})
    if not isinstance(groups, list) or not isinstance(state, dict):
        return value
    listed = [mapping_of(group).get("params") for group in groups]
    members = [member for params in listed if isinstance(params, list) for member in params]
    if members and all(type(member) is int for member in members):
        state = {int(key) if key.isdecimal() else key: slots for key, slots in state.items()}
    return {_STATE: state, _GROUPS: groups}


def _is_flattened_optimizer(value: object) -> bool:
    """Return whether a value is what `flatten_optimizer_state_dict` makes of an optimizer's."""
    names = mapping_of(value)
    return bool(names) and all(name.startswith((f"{_STATE}.", f"{_GROUPS}.")) for name in names)


def _add_flattened_optimizer(contents: Contents, where: str, state: Mapping[str, Any]) -> None:
    """Add an optimizer's state whose names have the parameter's between the kind and the slot.

    Parameters with equal options become one group: which groups there were is not on file.
    """
    parameters = {
        key.removeprefix("model/") for key in contents.tensors if key.startswith("model/")
    }
    options: dict[str, dict[str, object]] = {}
    for full_name, value in state.items():
        kind, _, rest = full_name.partition(".")
        parameter, key = _split_at_parameter(rest, parameters)
        if not parameter or not key:
            contents.leave_out(
                f"{where}/{full_name}", "it names no parameter of the model", key=OPTIMIZER
            )
        elif kind == _STATE:
            contents.add_slot(parameter, key, value)
        else:
            options.setdefault(parameter, {})[key] = value
    groups: dict[str, list[str]] = {}
    for parameter, values in options.items():
        groups.setdefault(_comparable(values), []).append(parameter)
    for members in groups.values():
        contents.add_group(members, options[members[0]])


def _split_at_parameter(name: str, parameters: set[str]) -> tuple[str, str]:
    """Return the longest parameter that a name begins with, and what follows it."""
    at = len(name)
    while (at := name.rfind(".", 0, at)) > 0:
        if name[:at] in parameters:
            return name[:at], name[at + 1 :]
    parameter, _, key = name.rpartition(".")
    return parameter, key


def _comparable(options: Mapping[str, object]) -> str:
    try:
        return json.dumps(as_json(dict(options)), sort_keys=True)
    except NotJson:
        return repr(sorted(options.items()))


def _readable(value: object) -> object:
    """Return a value with what the pickles in it have, such as torchtitan's of data loaders."""
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, bytes) and value.startswith(b"\x80"):
        try:
            inner, end = unpickle(value, "a value", plain_constructors())
        except CheckpointDamaged:
            return value
        return inner if end == len(value) else value
    return value


def _tree(metadata: Metadata, location: str) -> dict[str, Any]:
    """Return the state that was saved."""
    leaves: dict[str, object] = read_entries(metadata.values, list(metadata.values))
    for name, chunked in metadata.tensors.items():
        tensor = tensor_of_chunks(name, chunked)
        is_number = not chunked.spec.shape and not _is_slot(metadata.paths.get(name, (name,)))
        leaves[name] = (opened(tensor) if is_number else None) or tensor
    root: dict[Any, Any] = {}
    lists: list[tuple[dict[Any, Any], Any]] = []
    for name in [*metadata.paths, *(name for name in leaves if name not in metadata.paths)]:
        if name in leaves:
            _set(root, metadata.paths.get(name, (name,)), leaves[name], lists, location)
    for holder, key in reversed(lists):
        holder[key] = _list(holder[key], location)
    return root


def _is_slot(path: Path) -> bool:
    """Return whether a path leads to a slot of an optimizer, such as the steps of a parameter."""
    return _STATE in path or str(path[-1]).startswith(f"{_STATE}.")


def _set(
    root: dict[Any, Any],
    path: Path,
    value: object,
    lists: list[tuple[dict[Any, Any], Any]],
    location: str,
) -> None:
    """Set a value in nested mappings; where keys are indices, note that it is to be a list."""
    holder = root
    for key, following in pairwise(path):
        if key not in holder:
            holder[key] = {}
            if isinstance(following, int):
                lists.append((holder, key))
        inner = holder[key]
        if not isinstance(inner, dict) or (
            inner and type(next(iter(inner))) is not type(following)
        ):
            raise damaged(location, f"the path {path} leads through a value")
        holder = inner
    if path[-1] in holder:
        raise damaged(location, f"two values have the path {path}")
    holder[path[-1]] = value


def _list(items: Mapping[int, object], location: str) -> list[object]:
    count = max(items) + 1
    if min(items) < 0 or count > 2 * len(items) + _MOST_EMPTY_ITEMS:
        raise damaged(location, f"a list of {len(items)} items has one at {max(items)}")
    return [items.get(number, {}) for number in range(count)]
