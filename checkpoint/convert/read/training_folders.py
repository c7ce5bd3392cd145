"""Reads checkpoints of Hugging Face's Trainer and Accelerate, of PEFT, and of Lightning.

The first three are folders with the weights as in any folder of Hugging Face, next to files of
`torch.save` whatever their endings are. Lightning writes one such file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from keepstep.checkpoint.convert.read.contents import Contents, mapping_of, step_of
from keepstep.checkpoint.convert.read.files import ForeignFiles, damaged
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.hugging_face import (
    add_config,
    add_named_file,
    add_weights,
    read_json_object,
)
from keepstep.checkpoint.convert.read.optimizer_state import (
    add_optimizer_state,
    is_optimizer_state,
    parameter_count,
)
from keepstep.checkpoint.convert.read.state_dicts import add_model
from keepstep.checkpoint.convert.read.torch_file import is_torch_file, read_torch_file
from keepstep.checkpoint.format.layout.parameter_order import LiveOrders, ParameterNames

# Other JSON, such as that of tokenizers, is no state of training.
_DOCUMENTS = ("trainer_state.json", "generation_config.json", "adapter_config.json")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_HEAD_NBYTES = 64


def read_training_folder(
    files: ForeignFiles, format_name: str, parameter_names: ParameterNames = None
) -> ForeignCheckpoint:
    """Return the checkpoint that the Trainer of transformers, or Accelerate, wrote to a folder.

    Raises:
        CheckpointDamaged: files contradict themselves or each other.
        CheckpointMissing: a file that another one names is not there.
    """
    contents = Contents(files.url, format_name)
    read = add_weights(contents, files)
    add_config(contents, files)
    step = _add_other_files(contents, files, {*read, "config.json"}, parameter_names)
    return contents.checkpoint(step)


def read_adapter(files: ForeignFiles) -> ForeignCheckpoint:
    """Return the checkpoint that PEFT wrote to a folder: the adapter's tensors, as named on file.

    Raises:
        CheckpointDamaged: files contradict themselves.
    """
    contents = Contents(files.url, "PEFT")
    # PEFT appends biases and modules that are saved whole.
    contents.is_in_module_order = False
    # The first, which is not there either, if there is none: that is said of it.
    weights = next((name for name in _ADAPTERS if name in files), _ADAPTERS[0])
    add_named_file(contents, files, weights)
    _add_other_files(contents, files, {weights}, None)
    return contents.checkpoint(0)


def read_lightning(
    files: ForeignFiles, name: str, parameter_names: ParameterNames = None
) -> ForeignCheckpoint:
    """Return the checkpoint that Lightning wrote to a file.

    Args:
        name: which of them.
        parameter_names: names of the parameters of all optimizers, one after the other.

    Raises:
        CheckpointDamaged: the file contradicts itself.
    """
    file = files.file(name)
    contents = Contents(file.location, "Lightning")
    entries = mapping_of(read_torch_file(file.whole))
    if not entries:
        raise damaged(file.location, "it has no mapping by names")
    add_model(contents, entries.get("state_dict"), file.location)
    optimizers = entries.get("optimizer_states", [])
    if not isinstance(optimizers, list):
        raise damaged(file.location, "its optimizer_states are no list")
    _add_optimizers(contents, optimizers, file.location, parameter_names)
    for key, value in entries.items():
        if key not in ("state_dict", "optimizer_states"):
            contents.add_value(key, value)
    return contents.checkpoint(step_of(entries.get("global_step")) or 0)


def _add_optimizers(
    contents: Contents,
    states: Sequence[object],
    location: str,
    parameter_names: ParameterNames,
) -> None:
    start = 0
    for number, state in enumerate(states):
        where = f"optimizer_states.{number}"
        if not isinstance(state, dict) or not is_optimizer_state(state):
            raise damaged(location, f"{where} is no state of an optimizer")
        names = parameter_names
        if names is not None and not isinstance(names, LiveOrders):
            names = names[start : start + parameter_count(state)]
            start += len(names)
        add_optimizer_state(
            contents, state, where, location, names, number=number, count=len(states)
        )


def _add_other_files(
    contents: Contents,
    files: ForeignFiles,
    read: set[str],
    parameter_names: ParameterNames,
) -> int:
    """Add everything but the weights; return the number of steps."""
    step: int | None = None
    for name in files.names:
        if name in read:
            continue
        if "/" in name:
            contents.leave_out(name, "it is in a folder of its own; convert that folder")
            continue
        stem = PurePosixPath(name).stem
        if name in _DOCUMENTS:
            document = read_json_object(files, name)
            contents.add_document(stem, document)
            step = step_of(document.get("global_step")) if step is None else step
            continue
        whole = files.file(name).whole
        if not is_torch_file(whole.part(0, min(whole.nbytes, _HEAD_NBYTES)).read()):
            contents.leave_out(name, "it is no file of torch.save, and no state of training")
            continue
        tree = read_torch_file(whole)
        if is_optimizer_state(tree):
            add_optimizer_state(contents, _mapping(tree), name, whole.location, parameter_names)
            continue
        step = _step_in(stem, tree) if step is None else step
        contents.add_value(stem, tree)
    return step or 0


def _step_in(stem: str, tree: object) -> int | None:
    """Return the steps that Accelerate notes with the state of the random generators."""
    return step_of(mapping_of(tree).get("step")) if stem.startswith("random_states_") else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
