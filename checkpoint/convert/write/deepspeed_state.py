"""Lays out a checkpoint as DeepSpeed's ZeRO has it: flat groups with masters and slots.

ZeRO's optimizer has one tensor for each group of parameters, so all parameters of a group have the
same slots, and one step.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from keepstep.checkpoint.convert.read.deepspeed_files import DEEPSPEED
from keepstep.checkpoint.convert.write.dcp_leaves import Leaf, ValueLeaf
from keepstep.checkpoint.convert.write.dcp_target import apart, others_of
from keepstep.checkpoint.convert.write.foreign_objects import ForeignObject
from keepstep.checkpoint.convert.write.pieces_of_files import StoredTensor, Transposed, whole
from keepstep.checkpoint.convert.write.selection import MODEL, Selection
from keepstep.checkpoint.convert.write.state_parts import Group, StateParts, parts_of
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.described import master_of
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import BoxRequest, Source

VERSION = "0.19.8"
"""The release of DeepSpeed whose files these are like."""

MASTER_DTYPE = "float32"
_STEP = "step"
# Buffers of PyTorch's modules that are no integers, which nothing else tells from parameters.
_BUFFERS = ("running_mean", "running_var")
_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_SETTINGS = ("dynamic_loss_scale", "overflow", "clip_grad")
# The engine's own entries in the module's file, which has those of the script, too.
_OWN = (
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "sparse_tensor_module_names", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "universal_checkpoint_info", "ds_config", "ds_version",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trained parameter: what has it in float32, under which key, and the keys of its slots."""

    name: str
    shape: tuple[int, ...]
    source: Source
    master: str
    slots: Mapping[str, str]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """A group of the optimizer, whose parameters are one tensor.

    Attributes:
        options: hyperparameters.
        parameters: the parameters, in the order of the group.
        slots: data types of the slots with an element for each of the parameters'.
        numbers: slots with one value for all, such as the step: a tensor, or a number.
    """

    options: Mapping[str, object]
    parameters: tuple[Parameter, ...]
    slots: Mapping[str, str]
    numbers: Mapping[str, StoredTensor | Json]

    @property
    def size(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.size for parameter in self.parameters)


@dataclass(frozen=True, slots=True)
class DeepSpeedState:
    """A checkpoint: its parts, its optimizer's groups, and names of buffers if these are given."""

    source: Selection
    parts: StateParts
    groups: tuple[FlatGroup, ...]
    given_buffers: tuple[str, ...] | None

    @property
    def trained(self) -> dict[str, Parameter]:
        """The trained parameters, by name."""
        return {p.name: p for group in self.groups for p in group.parameters}

    @property
    def buffers(self) -> list[str]:
        """Names of buffers, as far as they are distinguishable from untrained parameters."""
        noted = self.given_buffers
        if noted is None:
            noted = (self.parts.documents.get(DEEPSPEED) or {}).get("buffer_names")
        trained = self.trained
        return [
            name
            for name, key in self.parts.model.items()
            if name not in trained
            and (
                name in noted
                if isinstance(noted, list | tuple)
                else not _is_floating(self.source.tensors[key].dtype)
                or name.rpartition(".")[2] in _BUFFERS
            )
        ]

    @property
    def frozen(self) -> list[str]:
        """Names of parameters that are not trained."""
        known = {*self.trained, *self.buffers}
        return [name for name in self.parts.model if name not in known]

    @property
    def is_bfloat16(self) -> bool:
        """Whether the module's parameters are in bfloat16, which file names say."""
        dtypes = {self.source.tensors[f"{MODEL}/{name}"].dtype for name in self.trained}
        return dtypes == {"bfloat16"}

    def options(self, first: int, group: FlatGroup, count: int = 1) -> dict[str, object]:
        """Return a group as an optimizer's `state_dict` has it.

        Args:
            first: the number of its first flat tensor.
            count: how many flat tensors it has.
        """
        return {**group.options, "params": list(range(first, first + count))}

    def settings(self) -> dict[str, object]:
        """Return what the optimizer noted with its state, if the source was DeepSpeed's."""
        noted = self.parts.documents.get(DEEPSPEED) or {}
        return {name: noted[name] for name in _SETTINGS if name in noted}

    def loss_scaler(self) -> ForeignObject | None:
        """Return the object that scales losses, if the source was DeepSpeed's."""
        noted = (self.parts.documents.get(DEEPSPEED) or {}).get("loss_scaler")
        return loss_scaler(noted) if isinstance(noted, dict) else None

    def module(self) -> dict[str, StoredTensor | Transposed]:
        """Return the module's tensors by name, tied names included."""
        return self.with_ties(
            {name: whole(self.source, key) for name, key in self.parts.model.items()}
        )

    def with_ties(
        self, tensors: Mapping[str, StoredTensor]
    ) -> dict[str, StoredTensor | Transposed]:
        """Return tensors by name, and further names of tied ones."""
        tied = {
            name: Transposed(tensors[first]) if tie.is_transposed else tensors[first]
            for name, tie in self.parts.ties.items()
            if (first := tie.key.removeprefix(f"{MODEL}/")) in tensors
        }
        return {**tensors, **tied}

    def model_file(self, ranks: int, **own: object) -> dict[str, object]:
        """Return what a module's file has.

        Args:
            ranks: of data parallelism.
            own: what depends on the stage.
        """
        noted = self.parts.documents.get(DEEPSPEED) or {}
        nested: dict[str, Any] = {
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
        }
        reserved: list[Leaf] = [ValueLeaf((name,), None) for name in _OWN]
        for leaf in apart(others_of(self.parts), reserved):
            value = leaf.value if isinstance(leaf, ValueLeaf) else whole(self.source, leaf.key)
            _put(nested, [str(name) for name in leaf.path], value)
        return {
            "buffer_names": self.buffers,
            "optimizer": None,
            "shared_params": {
                name: tie.key.removeprefix(f"{MODEL}/")
                for name, tie in self.parts.ties.items()
                if not tie.is_transposed
            },
            **own,
            **nested,
            "global_steps": self.source.step,
            "dp_world_size": ranks,
            "mp_world_size": 1,
            "ds_config": noted.get("ds_config", {}),
            "ds_version": VERSION,
        }


def deepspeed_state(source: Selection, buffers: tuple[str, ...] | None = None) -> DeepSpeedState:
    """Return a checkpoint as ZeRO has it.

    Args:
        buffers: names of the module's buffers, if they are known.

    Raises:
        LayoutMismatch: it has no optimizer, no parameters in float32, or its parameters cannot be
            one tensor.
        CheckpointError: a step cannot be read.
    """
    parts = parts_of(source)
    if not parts.groups:
        raise LayoutMismatch(
            "the checkpoint has no groups of an optimizer, and ZeRO's files are the optimizer's; "
            "write the model with --to torch, huggingface or dcp, which scripts load before "
            "deepspeed.initialize"
        )
    groups = tuple(_group(source, parts, group) for group in parts.groups)
    return DeepSpeedState(source, parts, groups, buffers)


def loss_scaler(attributes: Mapping[str, Json]) -> ForeignObject:
    """Return the object that scales losses, with these attributes."""
    if not attributes.get("dynamic"):
        return ForeignObject(_SCALER, "LossScaler", attributes)
    return ForeignObject(_SCALER, "DynamicLossScaler", {**attributes, "dtype": torch.half})


def shapes_of(parameters: Sequence[Parameter]) -> OrderedDict[str, torch.Size]:
    """Return names and shapes of parameters, as the module's file has them."""
    return OrderedDict((p.name, torch.Size(p.shape)) for p in parameters)


def tag_of(source: Source) -> str:
    """Return the name of the folder of a step."""
    return f"global_step{source.step}"


def _group(source: Selection, parts: StateParts, group: Group) -> FlatGroup:
    parameters = tuple(_parameter(source, parts, name) for name in group.parameters)
    names = dict.fromkeys(
        slot
        for parameter in parameters
        for slot in (*parameter.slots, *parts.scalars.get(parameter.name, {}))
    )
    slots: dict[str, str] = {}
    numbers: dict[str, StoredTensor | Json] = {}
    for slot in names:
        missing = [
            p.name
            for p in parameters
            if slot not in p.slots and slot not in parts.scalars.get(p.name, {})
        ]
        if missing:
            raise LayoutMismatch(
                f"{missing[0]} has no {slot}, and other parameters of its group have; ZeRO keeps "
                "one tensor for a group: train a step with gradients for all of them"
            )
        stored = [source.tensors[p.slots[slot]] for p in parameters if slot in p.slots]
        dtypes = {spec.dtype for spec in stored}
        is_flat = slot != _STEP and [s.shape for s in stored] == [p.shape for p in parameters]
        if is_flat and len(dtypes) == 1:
            slots[slot] = dtypes.pop()
        elif is_flat or any(math.prod(spec.shape) != 1 for spec in stored):
            raise LayoutMismatch(
                f"{slot} of {parameters[0].name} and the parameters of its group differ in data "
                "type, or in shape from the parameters; ZeRO keeps one tensor for a group, with an "
                "element for each of the parameters'"
            )
        else:
            numbers[slot] = _number(source, parts, parameters, slot)
    return FlatGroup(group.options, parameters, slots, numbers)


def _number(
    source: Selection, parts: StateParts, parameters: Sequence[Parameter], slot: str
) -> StoredTensor | Json:
    """Return a slot of one element that all parameters of a group have in common."""
    values = dict(_values(source, parts, parameters, slot))
    if len(set(values.values())) > 1:
        other = next(name for name in values if values[name] != values[parameters[0].name])
        raise LayoutMismatch(
            f"{slot} is {values[parameters[0].name]} for {parameters[0].name} and {values[other]} "
            f"for {other}; ZeRO has one for all parameters of a group"
        )
    first = parameters[0]
    if slot in first.slots:
        return whole(source, first.slots[slot])
    return parts.scalars[first.name][slot]


def _values(
    source: Selection, parts: StateParts, parameters: Sequence[Parameter], slot: str
) -> Iterator[tuple[str, float]]:
    requests: list[BoxRequest] = []
    read: list[tuple[str, np.ndarray]] = []
    for parameter in parameters:
        key = parameter.slots.get(slot)
        if key is None:
            yield parameter.name, parts.scalars[parameter.name][slot]
            continue
        spec = source.tensors[key]
        value = np.empty(1, numpy_dtype(spec.dtype))
        read.append((parameter.name, value))
        requests.append(BoxRequest(key, Box.whole(spec.shape), value.view(np.uint8).data))
    source.read(requests)
    for name, value in read:
        yield name, value[0].item()


def _parameter(source: Selection, parts: StateParts, name: str) -> Parameter:
    key = parts.model.get(name)
    if key is None:
        raise LayoutMismatch(
            f"{name} is in a group of the optimizer, and the model has no such parameter; name the "
            "model as the optimizer does, with --rules"
        )
    slots = parts.slots.get(name, {})
    master = master_of(source.masters, key)
    if master is not None:
        own, found = master.key, source.tensors[master.key]
        slots = {slot: other for slot, other in slots.items() if other != own}
        holder: Source = source
    else:
        # What `--dtype` rounds is the module's; the optimizer's parameter stays what it was.
        own, holder = key, source.whole
        found = holder.tensors[key]
    if found.dtype != MASTER_DTYPE:
        raise LayoutMismatch(
            f"{name} is {found.dtype}, and the checkpoint has no {MASTER_DTYPE} of it, which "
            "ZeRO's optimizer works on; convert a checkpoint with master parameters"
        )
    return Parameter(name, found.shape, holder, own, slots)


def _put(tree: dict[str, Any], path: Sequence[str], value: object) -> None:
    for name in path[:-1]:
        inner = tree.get(name)
        if not isinstance(inner, dict):
            inner = tree[name] = {}
        tree = inner
    tree[path[-1]] = value


def _is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))
