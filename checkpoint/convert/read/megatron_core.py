"""Reads folders of Megatron-Core's torch_dist: those of DCP, with Megatron's names and layouts.

Tensors are global: where ranks held slices, `.metadata` says which. `common.pt` has what all ranks
had in common: arguments, the optimizer's options, the learning rate's schedule. Other objects are
pickled for each rank: states of random numbers, and Transformer Engine's own.

A distributed optimizer's state is stored by parameters (`fully_reshardable`), or as the buffers
that it consists of (`dp_reshardable`), which `checkpoint.convert.read.megatron_buffers` reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from keepstep.checkpoint.convert.read.contents import MASTER_SLOT, Contents, mapping_of, step_of
from keepstep.checkpoint.convert.read.dcp_entries import tensor_of_chunks
from keepstep.checkpoint.convert.read.dcp_metadata import METADATA, Metadata, read_metadata
from keepstep.checkpoint.convert.read.files import ForeignFiles, damaged
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.megatron_buffers import (
    buffer_name,
    optimizers_of_buffers,
    tensors_of_buffers,
)
from keepstep.checkpoint.convert.read.megatron_settings import (
    add_groups,
    add_settings,
    add_vocabulary,
    arguments_of,
    optimizers_in,
)
from keepstep.checkpoint.convert.read.megatron_stacks import cut, module_name, placed_in
from keepstep.checkpoint.convert.read.pieces import ForeignTensor
from keepstep.checkpoint.convert.read.torch_file import read_torch_file
from keepstep.checkpoint.errors import FormatUnsupported
from keepstep.checkpoint.format.layout.completeness import OPTIMIZER
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype

COMMON, BACKENDS = "common.pt", "metadata.json"
BACKEND = "torch_dist"

LAYERS_APART = "layers_apart"
"""The setting by which files have tensors of each layer, though layers may be equal."""

_SLOT = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_OBJECT = re.compile(r"(.+)/shard_[\d.]+_[\d.]+")
_MASTERS = ("fp32_param", "param")
"""Megatron's name of a parameter in the optimizer: without, and with a distributed optimizer."""

_MOST_TENSORS = 2**21
_LAYER_APART = re.compile(r"decoder\.layers\.\d")
_NOT_OF_THE_MODEL = ("optimizer.", "chained_")
_READ_APART = ("args", "optimizer", "content_metadata", "checkpoint_version")
_OF_PARAMETERS = ("state", "param_groups", "optimizer", "param_state", "fp32_from_fp16_params")
_READ_OF_BUFFERS = ("optimizer", "per_bucket_numel", "per_bucket_numel_unpadded")
_REASONS = (
    ("_extra_state", "it is what Transformer Engine pickled of a module"),
    ("rng_state", "it is the generators of one rank, pickled"),
)


def read_megatron_core(files: ForeignFiles) -> ForeignCheckpoint:
    """Return the checkpoint of a folder such as `iter_0001000`.

    Raises:
        CheckpointMissing: a file is not there.
        CheckpointDamaged: files contradict themselves or each other.
        FormatUnsupported: it has another backend than torch_dist.
    """
    versions = _versions(files)
    metadata = read_metadata(files)
    common = mapping_of(read_torch_file(files.file(COMMON).whole))
    if not common:
        raise damaged(files.file(COMMON).location, "it has no values by name")
    arguments = arguments_of(common.get("args"))
    contents = Contents(files.url, "Megatron-Core torch_dist")
    reading = _Reading(contents, metadata, arguments, f"{files.url}/{METADATA}")
    reading.leave_out_others(files)
    reading.add_model()
    reading.add_slots()
    reading.add_buffers()
    optimizers = optimizers_in(common.get("optimizer"))
    if not any("param_groups" in optimizer or "optimizer" in optimizer for optimizer in optimizers):
        optimizers = optimizers_in(optimizers_of_buffers(metadata))
    add_groups(contents, optimizers, reading.trained())
    add_vocabulary(contents, arguments)
    kept = {name: common[name] for name in _READ_APART[2:] if name in common}
    if any(_LAYER_APART.match(key) for key in metadata.tensors):
        # Who loads what is written of this asks for the names that it had.
        kept[LAYERS_APART] = True
    add_settings(contents, arguments, {**versions, **kept})
    for name, value in _others_of(common.get("optimizer")):
        contents.add_value(name, value)
    for name, value in common.items():
        if name not in _READ_APART and value is not None:
            contents.add_value(name, value)
    return contents.checkpoint(step_of(common.get("iteration")) or 0)


class _Reading:
    """The tensors of one folder while they are added."""

    def __init__(
        self,
        contents: Contents,
        metadata: Metadata,
        arguments: Mapping[str, Any],
        location: str,
    ) -> None:
        self._contents = contents
        self._metadata = metadata
        self._arguments = arguments
        self._location = location
        self._has_fused_norms = arguments.get("transformer_impl") != "local"
        self._live_names: dict[str, str] = {}
        self._has_equal_masters = False
        self._slotted: set[str] = set()
        self._cut_tensors = 0

    def leave_out_others(self, files: ForeignFiles) -> None:
        """Leave out objects of ranks, files, and what has no data type or description."""
        for key, dtype in self._metadata.unsupported.items():
            self._contents.leave_out(key, f"its data type {dtype} cannot be stored")
        for key in self._metadata.unexplained:
            self._contents.leave_out(key, "the metadata does not say what it is")
        known = {METADATA, COMMON, BACKENDS, *self._metadata.file_names}
        for file_name in files.names:
            if file_name not in known:
                self._contents.leave_out(
                    file_name, "it was not opened: .metadata has nothing that is in it"
                )
        objects: dict[str, int] = {}
        for key in self._metadata.values:
            match = _OBJECT.fullmatch(key)
            name = match[1] if match else key
            buffer = buffer_name(name)
            if buffer is None or buffer.rest not in _READ_OF_BUFFERS:
                objects[name] = objects.get(name, 0) + 1
        for name, count in objects.items():
            reason = next((why for sign, why in _REASONS if sign in name), "it is pickled")
            self._contents.leave_out(name, f"{reason}; there are {count}")

    def add_model(self) -> None:
        """Add the module's tensors."""
        for key, chunked in self._metadata.tensors.items():
            if not key.startswith(_NOT_OF_THE_MODEL):
                for name, tensor in self._cut(key, tensor_of_chunks(key, chunked)):
                    self._contents.add(f"model/{name}", tensor)

    def add_slots(self) -> None:
        """Add what the optimizer has by parameters."""
        for key, chunked in self._metadata.tensors.items():
            if not key.startswith(_NOT_OF_THE_MODEL) or buffer_name(key) is not None:
                continue
            match = _SLOT.fullmatch(key)
            of = self._metadata.tensors.get(match[2]) if match else None
            if match is None or of is None:
                self._contents.leave_out(
                    key, "it is no state of a parameter of the model", key=OPTIMIZER
                )
            elif of.spec.shape != chunked.spec.shape:
                self._contents.leave_out(
                    key, f"its shape {chunked.spec.shape} is not that of the parameter, "
                    f"{of.spec.shape}",
                    key=OPTIMIZER,
                )  # fmt: skip
            else:
                for name, tensor in self._cut(match[2], tensor_of_chunks(key, chunked)):
                    self._add_slot(name, match[1], tensor)

    def add_buffers(self) -> None:
        """Add what the optimizer has in buffers; then note which slots are wider parameters."""
        if any(buffer_name(key) is not None for key in self._metadata.tensors):
            tensors = tensors_of_buffers(
                self._contents, self._metadata, self._arguments, self._live_names, self._location
            )
            for (name, slot), tensor in tensors.items():
                self._add_slot(name, slot, tensor)
        if self._has_equal_masters:
            self._contents.leave_out(
                "optimizer.state.param", "the parameters in it are the model's, of one data type"
            )

    def trained(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the parameters that the optimizer has a state for."""
        return {
            name: tensor.spec.shape
            for key, tensor in self._contents.tensors.items()
            if key.startswith("model/") and (name := key.removeprefix("model/")) in self._slotted
        }

    def _add_slot(self, name: str, slot: str, tensor: ForeignTensor) -> None:
        self._slotted.add(name)
        if slot not in _MASTERS:
            self._contents.add(f"optim/{name}/{slot}", tensor)
            return
        own = self._contents.tensors[f"model/{name}"].spec.dtype
        if numpy_dtype(own).itemsize >= numpy_dtype(tensor.spec.dtype).itemsize:
            self._has_equal_masters = True
            return
        if self._contents.tensors.get(f"optim/{name}/{MASTER_SLOT}") == tensor:
            # keepstep writes it under both names, of the same bytes.
            return
        self._contents.add(f"optim/{name}/{MASTER_SLOT}", tensor)
        self._contents.note_master(name)

    def _cut(self, key: str, tensor: ForeignTensor) -> Iterator[tuple[str, ForeignTensor]]:
        placed = tuple(placed_in(key, tensor.spec.shape, self._location))
        self._cut_tensors += len(placed)
        if self._cut_tensors > _MOST_TENSORS:
            raise damaged(self._location, f"up to {key} it has {self._cut_tensors} tensors")
        for name, part in cut(tensor, placed):
            live = module_name(name, has_fused_norms=self._has_fused_norms)
            self._live_names[name] = live
            yield live, part


def _versions(files: ForeignFiles) -> dict[str, object]:
    file = files.file(BACKENDS)
    try:
        versions = json.loads(file.whole.read())
    except (ValueError, RecursionError) as error:
        raise damaged(file.location, f"it is not JSON: {error}") from None
    if not isinstance(versions, dict) or versions.get("sharded_backend") != BACKEND:
        raise FormatUnsupported(
            f"{file.location}: its sharded_backend is not {BACKEND}; load it with a release of "
            f"Megatron that wrote it, and save it as {BACKEND}"
        )
    return {name: value for name, value in versions.items() if isinstance(name, str)}


def _others_of(value: object) -> Iterator[tuple[str, object]]:
    """Yield what optimizers hold apart from groups and state, such as a scaler of losses."""
    if isinstance(value, dict):
        for name, item in value.items():
            if type(name) is int:
                for inner, what in _others_of(item):
                    yield inner.replace("optimizer/", f"optimizer/{name}/", 1), what
            elif name not in _OF_PARAMETERS and item not in (None, [], {}):
                yield f"optimizer/{name}", item
