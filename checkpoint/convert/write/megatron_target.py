"""Writes a checkpoint as Megatron-Core's torch_dist, as all of its optimizers load it.

The names are those of Megatron's modules, whichever way norms are called there; rules lead to them
(`--rules llama:hf:megatron`). Layers and experts are stacked, a chunk for each, as Megatron does
where layers are equal and the source did not have them apart; else each layer has tensors of its
own. The optimizer's state is in the
distributed optimizer's form by parameters (`fully_reshardable`). Other optimizers look for masters
under another name, so these have both, of the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from keepstep.checkpoint.convert.read.dcp_metadata import METADATA
from keepstep.checkpoint.convert.read.megatron_core import BACKEND, BACKENDS, COMMON, LAYERS_APART
from keepstep.checkpoint.convert.read.megatron_settings import MEGATRON, OUTPUT_LAYER
from keepstep.checkpoint.convert.read.megatron_stacks import file_name_of, stack_of
from keepstep.checkpoint.convert.write.boxes_in_order import boxes_in_order
from keepstep.checkpoint.convert.write.dcp_leaves import CHUNK_NBYTES, Files
from keepstep.checkpoint.convert.write.dcp_metadata_writer import (
    WrittenChunk,
    WrittenTensor,
    WrittenValue,
    metadata_file,
    tensor_entry,
    value_entry,
)
from keepstep.checkpoint.convert.write.megatron_groups import (
    are_groups_distinct,
    by_experts,
    marked,
)
from keepstep.checkpoint.convert.write.pieces_of_files import StoredTensor, part
from keepstep.checkpoint.convert.write.planned_folder import PlannedFile
from keepstep.checkpoint.convert.write.selection import Selection
from keepstep.checkpoint.convert.write.state_parts import StateParts, parts_of
from keepstep.checkpoint.convert.write.torch_pieces import torch_bytes
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.documents import MASTERS, PADDING
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX, OPTIMIZER_PREFIX
from keepstep.checkpoint.format.layout.source import BoxRequest, Source, TensorSpec

TRACKER = "latest_checkpointed_iteration.txt"

_VERSIONS = {
    "sharded_backend": BACKEND,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_SHARDING = "fully_reshardable"
_MASTERS = ("param", "fp32_param")
_STEP = "step"
_SCHEDULER = "opt_param_scheduler/"
_IN_COMMON = ("iteration", "num_floating_point_operations_so_far")
_SCALER = "optimizer/grad_scaler/"
_KIND_OF_STATE = "optimizer/param_state_sharding_type"
_LAYER = re.compile(r"((?:.+\.)?layers\.)(\d+)\.(.+)")
_OF_MEGATRON = re.compile(
    r"(?:.+\.)?(?:decoder|encoder)\.layers\.\d+\.(?:self_attention|mlp)\.(?:.+\.)?linear_\w+\.\w+"
)
_MODULES_WITHOUT_STATE = ("router", "shared_experts.gate")
_ATTENTION = re.compile(r"(.*self_attention)\.linear_(?:qkv|proj)")


@dataclass(slots=True)
class _Stack:
    """A tensor of files: the source's tensors that it consists of, by their places in it."""

    name: str
    members: dict[tuple[int, ...], str] = field(default_factory=dict)

    def counts(self) -> tuple[int, ...]:
        """Return the extents of the leading dimensions, if the places are all that there are."""
        depth = len(next(iter(self.members)))
        counts = tuple(max(index[n] for index in self.members) + 1 for n in range(depth))
        return counts if len(self.members) == math.prod(counts) else ()


def megatron_files(source: Selection) -> list[PlannedFile]:
    """Return the files of a folder that Megatron's `--load` takes: `iter_XXXXXXX`, the tracker.

    Raises:
        LayoutMismatch: names or shapes are not those of Megatron's layers.
    """
    parts = parts_of(source)
    directory = f"iter_{source.step:07d}"
    files = Files()
    tensors, values, apart = _entries(source, parts, files)
    common = torch_bytes(_common(source, parts, are_layers_apart=apart))
    inner = [
        *files.planned(),
        PlannedFile(METADATA, (metadata_file(tensors, values, has_paths=False),)),
        PlannedFile(COMMON, (common,)),
        PlannedFile(BACKENDS, (json.dumps(_VERSIONS).encode(),)),
    ]
    planned = [PlannedFile(f"{directory}/{file.name}", file.pieces) for file in inner]
    return [*planned, PlannedFile(TRACKER, (str(source.step).encode(),))]


def megatron_left_out(source: Source) -> list[str]:
    """Return what of a checkpoint Megatron's files do not have, each with the reason."""
    parts = parts_of(source)
    no_place = "Megatron's files have no place for it"
    lines = [f"{key}: {no_place}" for key in parts.tensors]
    lines += [f"{name}: {no_place}" for name in parts.values if not _is_carried(name)]
    has_arguments = bool((source.documents.get(MEGATRON) or {}).get("args"))
    carried = (MASTERS, MEGATRON, *([PADDING] if has_arguments else []))
    lines += [f"{name}: {no_place}" for name in parts.documents if name not in carried]
    lines += [
        f"{OPTIMIZER_PREFIX}{name}/{slot}: Megatron has no numbers of single parameters"
        for name in parts.scalars.keys() | parts.slots.keys()
        for slot in [*parts.scalars.get(name, {}), *_numbers(source, parts, name)]
        if slot != _STEP
    ]
    lines += [
        f"{MODEL_PREFIX}{alias}: it is {tie.key}; Megatron ties by "
        "--untie-embeddings-and-output-weights alone"
        for alias, tie in parts.ties.items()
        if alias != OUTPUT_LAYER or not has_arguments
    ]
    if parts.groups and not are_groups_distinct(source, parts):
        lines.append(
            "optim/groups: Megatron's files do not name the parameters of groups, and its rules "
            "on weight decay, experts and learning rates do not lead to these groups"
        )
    return sorted(lines)


def _numbers(source: Source, parts: StateParts, name: str) -> Iterator[str]:
    """Yield the slots of a parameter that have no dimensions."""
    for slot, key in parts.slots.get(name, {}).items():
        if not source.tensors[key].shape:
            yield slot


def _is_carried(name: str) -> bool:
    return name in (*_IN_COMMON, _KIND_OF_STATE) or name.startswith((_SCHEDULER, _SCALER))


def _entries(
    source: Selection, parts: StateParts, files: Files
) -> tuple[list[WrittenTensor], list[WrittenValue], bool]:
    """Return the tensors and values of a folder, and whether layers have tensors of their own."""
    settings: Mapping[str, Json] = source.documents.get(MEGATRON) or {}
    apart = not _are_equal(source, parts) or settings.get(LAYERS_APART) is True
    model = _stacks(parts.model, apart=apart)
    tensors = [tensor for stack in model for tensor in _written(source, stack, files)]
    by_name = {tensor.name: tensor for tensor in tensors}
    slots: dict[str, dict[str, str]] = {}
    masters = _master_slots(source.masters)
    for name, of_name in parts.slots.items():
        for slot, key in of_name.items():
            if slot != _STEP and source.tensors[key].shape:
                into = "" if slot == masters.get(name) else slot
                slots.setdefault(into, {})[name] = key
    for slot, keys in slots.items():
        for stack in _stacks(keys, apart=apart):
            (written,) = _written(source, stack, files)
            for stored in _MASTERS if not slot else (slot,):
                tensors.append(_renamed(written, f"optimizer.state.{stored}.{stack.name}"))
    # A distributed optimizer has parameters of its own also where they are the model's.
    for stack in model:
        if parts.slots and set(stack.members.values()).isdisjoint(
            f"{MODEL_PREFIX}{name}" for name in masters
        ):
            names = {key.removeprefix(MODEL_PREFIX) for key in stack.members.values()}
            if names <= parts.slots.keys():
                written = by_name[stack.name]
                tensors.append(_renamed(written, f"optimizer.state.{_MASTERS[0]}.{stack.name}"))
    place = files.add((value_entry([None]),))
    values = [
        WrittenValue(name, (name,), place) for name in dict.fromkeys(_states_of_modules(model))
    ]
    return tensors, values, apart


def _renamed(tensor: WrittenTensor, name: str) -> WrittenTensor:
    return WrittenTensor(name, (name,), tensor.spec, tensor.chunks)


def _master_slots(masters: Mapping[str, Json]) -> dict[str, str]:
    """Return the slots that have parameters in a wider data type, by the parameters' names."""
    return {key.removeprefix(MODEL_PREFIX): master["slot"] for key, master in masters.items()}


def _are_equal(source: Source, parts: StateParts) -> bool:
    """Return whether all layers have the same tensors."""
    layers: dict[str, dict[int, set[tuple[str, TensorSpec]]]] = {}
    for name, key in parts.model.items():
        match = _LAYER.fullmatch(file_name_of(name))
        if match is not None:
            of_layer = layers.setdefault(match[1], {}).setdefault(int(match[2]), set())
            of_layer.add((match[3], source.tensors[key]))
    if not any(map(_OF_MEGATRON.fullmatch, parts.model)):
        raise LayoutMismatch(
            "no tensor of the model is called as Megatron's are, such as "
            "decoder.layers.0.self_attention.linear_qkv.weight; rename them, as with "
            "--rules llama:hf:megatron"
        )
    for prefix, numbered in layers.items():
        missing = set(range(max(numbered) + 1)) - numbered.keys()
        if missing:
            raise LayoutMismatch(
                f"the model has the layer {prefix}{max(numbered)} and no {prefix}{min(missing)}"
            )
    return all(
        content == numbered[0] for numbered in layers.values() for content in numbered.values()
    )


def _stacks(keys: Mapping[str, str], *, apart: bool) -> list[_Stack]:
    """Return the tensors of files that tensors of the module are in.

    Args:
        keys: keys of the module's tensors, or of their state, by name.
        apart: each layer has tensors of its own.
    """
    stacks: dict[str, _Stack] = {}
    for name, key in keys.items():
        stored = file_name_of(name)
        placed = stack_of(stored)
        stack_name, index = placed.name, placed.index
        layer = _LAYER.fullmatch(stored)
        if apart and layer is not None:
            rest = stack_of(f"layers.0.{layer[3]}")
            stack_name = f"{layer[1]}{layer[2]}.{rest.name.removeprefix('layers.')}"
            index = index[1:]
        stack = stacks.setdefault(stack_name, _Stack(stack_name))
        if index in stack.members:
            raise LayoutMismatch(f"{key} and {stack.members[index]} are both {stack_name}{index}")
        stack.members[index] = key
    for stack in stacks.values():
        if () not in stack.members and not stack.counts():
            raise LayoutMismatch(
                f"{stack.name} has {len(stack.members)} layers or experts, the last of which is "
                f"{max(stack.members)}: some are missing, such as those that are not trained; "
                "convert with --only model"
            )
    return list(stacks.values())


def _written(source: Source, stack: _Stack, files: Files) -> Iterator[WrittenTensor]:
    specs = {source.tensors[key] for key in stack.members.values()}
    if len(specs) > 1:
        raise LayoutMismatch(
            f"{stack.name} would have layers or experts of several shapes or data types: "
            f"{sorted((spec.dtype, spec.shape) for spec in specs)}"
        )
    (spec,) = specs
    counts = stack.counts()
    chunks = []
    for index, key in sorted(stack.members.items()):
        for box in list(boxes_in_order(spec, CHUNK_NBYTES)) or [Box.whole(spec.shape)]:
            stored = part(source, key, box)
            ones = (1,) * len(index)
            place = files.add(
                tensor_entry(StoredTensor(stored.dtype, ones + box.shape, stored.pieces))
            )
            chunks.append(WrittenChunk(Box(index + box.offset, ones + box.shape), place))
    shape = counts + spec.shape
    yield WrittenTensor(stack.name, (stack.name,), TensorSpec(spec.dtype, shape), tuple(chunks))


def _states_of_modules(stacks: Sequence[_Stack]) -> Iterator[str]:
    """Yield the names of what Transformer Engine keeps of modules: nothing, for which it asks."""
    for stack in stacks:
        module, _, leaf = stack.name.rpartition(".")
        if (
            leaf not in ("weight", "layer_norm_weight")
            or ".layers." not in f".{module}"
            or module.endswith(_MODULES_WITHOUT_STATE)
        ):
            continue
        counts = stack.counts()
        attention = _ATTENTION.fullmatch(module)
        modules = [module, *([f"{attention[1]}.core_attention"] if attention else [])]
        for index in itertools.product(*map(range, counts)) if counts else [(0,)]:
            place = ".".join(map(str, index))
            for name in modules:
                yield f"{name}._extra_state/shard_{place}_{'.'.join(map(str, counts or (1,)))}"


def _common(source: Source, parts: StateParts, *, are_layers_apart: bool) -> dict[str, Any]:
    """Return what all ranks have in common."""
    settings: Mapping[str, Json] = source.documents.get(MEGATRON) or {}
    common: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": source.step}
    arguments = settings.get("args")
    if arguments:
        common["args"] = argparse.Namespace(
            **{name: _torch_value(value) for name, value in arguments.items()}
        )
    for name, value in parts.values.items():
        if name.startswith(_SCHEDULER):
            common.setdefault("opt_param_scheduler", {})[name.removeprefix(_SCHEDULER)] = value
        elif name in _IN_COMMON:
            common[name] = value
    common["content_metadata"] = {
        "distrib_optim_sharding_type": _SHARDING,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "non_homogeneous_layers": are_layers_apart,
    }
    if parts.groups:
        common["optimizer"] = _optimizers(source, parts)
    return common


def _torch_value(value: Json) -> object:
    """Return a value of Megatron's arguments; JSON has data types as text."""
    if isinstance(value, str) and value.startswith("torch."):
        named = getattr(torch, value.removeprefix("torch."), None)
        return named if isinstance(named, torch.dtype) else value
    return value


def _optimizers(source: Source, parts: StateParts) -> dict[Any, Any]:
    """Return the optimizers' groups and steps; experts have an optimizer of their own."""
    step = _step(source, parts)
    of_experts: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for group in parts.groups:
        for expert in by_experts(group):
            options = marked(group, is_of_experts=expert)
            rate = options.get("lr")
            # Megatron's schedule of learning rates asks for these.
            for name in ("max_lr", "min_lr"):
                options.setdefault(name, rate)
            if step is not None:
                options[_STEP] = float(step)
            of_experts[expert].append(options)
    scaler = {
        name.removeprefix(_SCALER): value
        for name, value in parts.values.items()
        if name.startswith(_SCALER)
    }
    states = [
        {**_state(groups, step), **({"grad_scaler": scaler} if scaler else {})}
        for groups in of_experts.values()
        if groups
    ]
    return states[0] if len(states) == 1 else dict(enumerate(states))


def _state(groups: list[dict[str, Any]], step: int | None) -> dict[str, Any]:
    """Return an optimizer's state without tensors, as each kind of optimizer looks for it."""
    state = {} if step is None else {"common_step": torch.tensor(float(step))}
    inner = {"state": state, "param_groups": groups}
    return {**inner, "optimizer": inner, "param_state_sharding_type": _SHARDING}


def _step(source: Source, parts: StateParts) -> int | None:
    """Return the number of steps that all parameters have had."""
    steps: dict[float, str] = {}
    for name, slots in parts.slots.items():
        if _STEP in slots:
            key = slots[_STEP]
            spec = source.tensors[key]
            value = np.empty(math.prod(spec.shape), numpy_dtype(spec.dtype))
            source.read([BoxRequest(key, Box.whole(spec.shape), value.view(np.uint8).data)])
            steps.setdefault(float(value.max()), name)
    for name, scalars in parts.scalars.items():
        if _STEP in scalars:
            steps.setdefault(float(scalars[_STEP]), name)
    if len(steps) > 1:
        (first, one), (second, other) = list(steps.items())[:2]
        raise LayoutMismatch(
            f"{one} has had {first:g} steps and {other} {second:g}, and Megatron has one number of "
            "all parameters; convert with --only model"
        )
    return int(next(iter(steps))) if steps else None
