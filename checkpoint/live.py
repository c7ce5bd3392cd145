"""Live training state as named boxes: what a model and its optimizers hold on this rank, where it belongs, and how to fill it.

No communication and no gathering: a sharded tensor's box follows from its mesh and placements alone. Names are the format's:
`model/<fqn>` for parameters and persistent buffers, `optim/<fqn>/<slot>` for optimizer state, which is keyed by the parameter's name and
the slot's, never by position. Parameters that share storage (tied weights) are kept once, under their first name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.optim import Optimizer

from checkpoint.errors import LayoutMismatch
from checkpoint.layout import Box, Json
from checkpoint.source import BoxRequest, Source, TensorSpec

_GROUPS = "optim/groups"
_SCALARS = "optim/scalars"
_TIED = "model/tied"

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "bool", torch.int8: "int8", torch.int16: "int16", torch.int32: "int32", torch.int64: "int64",
    torch.uint8: "uint8", torch.float16: "float16", torch.float32: "float32", torch.float64: "float64",
    torch.bfloat16: "bfloat16", torch.complex64: "complex64", torch.complex128: "complex128",
    torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e4m3fnuz: "float8_e4m3fnuz",
    torch.float8_e5m2: "float8_e5m2", torch.float8_e5m2fnuz: "float8_e5m2fnuz",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """This rank's box of a tensor; `data` is the local shard, detached, in the live memory itself."""

    key: str
    global_shape: tuple[int, ...]
    box: Box
    data: torch.Tensor

    @property
    def dtype(self) -> str:
        """The Zarr name of the data type."""
        return dtype_name(self.data.dtype)


@dataclass(frozen=True, slots=True)
class LiveState:
    """All state of this rank: tensors, and the documents that are none."""

    tensors: tuple[LiveTensor, ...]
    documents: Mapping[str, Json]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the Zarr v3 name of a torch dtype.

    Raises:
        LayoutMismatch: the format cannot store it.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise LayoutMismatch(f"{dtype} cannot be stored; known are {', '.join(map(str, _NAMES))}") from None


def local_box(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Box:
    """Return the box of a sharded tensor that one rank holds.

    Each sharded dimension is split as `torch.chunk` does: pieces of ceil(n / parts), the last ones smaller or empty. Mesh dimensions split
    left to right, except that a strided shard (FSDP over tensor parallelism) splits what the later dimensions left.

    Args:
        shape: global shape of the tensor.
        mesh_shape: sizes of the mesh's dimensions.
        coordinate: this rank's place in the mesh.
        placements: one per mesh dimension.

    Raises:
        LayoutMismatch: a pending sum (`Partial`) has no box.
    """
    offset, extent = [0] * len(shape), list(shape)
    # Strided shards were applied after the plain ones on their right, although they stand to the left of them.
    strided = [i for i, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    plain = [i for i in range(len(placements)) if i not in strided]
    for position in (*plain, *strided):
        placement = placements[position]
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, Partial) or not isinstance(placement, Shard | _StridedShard):
            raise LayoutMismatch(f"a tensor placed as {placement} cannot be stored; redistribute it first")
        axis = placement.dim % len(shape)
        piece = -(-extent[axis] // mesh_shape[position])
        start = min(piece * coordinate[position], extent[axis])
        offset[axis] += start
        extent[axis] = min(piece, extent[axis] - start)
    return Box(tuple(offset), tuple(extent))


def describe(key: str, tensor: torch.Tensor) -> LiveTensor:
    """Return a tensor, sharded or not, as this rank's box of it."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        local = tensor.to_local().detach()
        shape = tuple(tensor.shape)
        if coordinate is None:
            return LiveTensor(key, shape, Box((0,) * len(shape), (0,) * len(shape)), local)
        box = local_box(shape, tuple(mesh.shape), coordinate, tensor.placements)
        if tuple(local.shape) != box.shape and local.numel() != box.size:
            raise LayoutMismatch(
                f"{key}: the local shard has shape {tuple(local.shape)}, its placements {tensor.placements} "
                f"over a mesh of {tuple(mesh.shape)} say {box.shape}"
            )
        return LiveTensor(key, shape, box, local)
    data = tensor.detach()
    return LiveTensor(key, tuple(data.shape), Box.whole(data.shape), data)


class Capturer:
    """Reads the state of one model and its optimizers, again and again; where each tensor belongs is worked out once."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._names = parameter_names(model)
        self._boxes: dict[str, tuple[tuple[int, ...], Box]] = {}
        self._tied = _tied_names(model)

    def capture(self) -> LiveState:
        """Return the state as it is now. The tensors alias live memory: what the next step writes shows through."""
        tensors = []
        for name, tensor in self._model.state_dict().items():
            if isinstance(tensor, torch.Tensor) and name not in self._tied:
                tensors.append(self._describe(f"model/{name}", tensor))
        scalars: dict[str, Json] = {}
        groups: list[Json] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                names = [self._names[id(parameter)] for parameter in group["params"]]
                options = {k: v for k, v in group.items() if k != "params" and _is_json(v)}
                groups.append({"parameters": names, "options": options})
            for parameter, slots in optimizer.state.items():
                name = self._names[id(parameter)]
                for slot, value in slots.items():
                    if isinstance(value, torch.Tensor):
                        tensors.append(self._describe(f"optim/{name}/{slot}", value))
                    elif _is_json(value):
                        scalars[f"{name}/{slot}"] = value
        documents = {_GROUPS: groups, _SCALARS: scalars, _TIED: self._tied}
        return LiveState(tuple(tensors), documents)

    def _describe(self, key: str, tensor: torch.Tensor) -> LiveTensor:
        known = self._boxes.get(key)
        if known is None:
            described = describe(key, tensor)
            self._boxes[key] = (described.global_shape, described.box)
            return described
        data = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return LiveTensor(key, *known, data.detach())


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return each parameter's name by identity; one that is used in several places has its first name."""
    return {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}


def allocate(model: nn.Module, optimizers: Sequence[Optimizer], tensors: Mapping[str, TensorSpec]) -> None:
    """Create the optimizer slots that a source has and a fresh optimizer still lacks, so that they can be filled.

    A slot of the parameter's shape is laid out like the parameter; another is whole on every rank (Adam's `step`, on the CPU as torch
    keeps it).

    Args:
        model: gives the parameters their names.
        optimizers: those whose state is empty so far.
        tensors: what the source holds.
    """
    names = parameter_names(model)
    slots: dict[str, dict[str, TensorSpec]] = {}
    for key, spec in tensors.items():
        if key.startswith("optim/"):
            name, _, slot = key.removeprefix("optim/").rpartition("/")
            slots.setdefault(name, {})[slot] = spec
    dtypes = {name: dtype for dtype, name in _NAMES.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for slot, spec in slots.get(names[id(parameter)], {}).items():
                    if slot in optimizer.state[parameter]:
                        continue
                    dtype = dtypes[spec.dtype]
                    like = spec.shape == tuple(parameter.shape) and spec.shape != ()
                    optimizer.state[parameter][slot] = (
                        torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                        if like
                        else torch.zeros(spec.shape, dtype=dtype)
                    )


def restore(state: LiveState, source: Source, *, strict: bool = True) -> None:
    """Fill live tensors from a source.

    CPU tensors that lie in one piece are read straight into; others go through a buffer of their size.

    Args:
        state: what to fill, from `Capturer.capture` after `allocate`.
        source: where from.
        strict: refuse a source that lacks tensors or holds more of the model than the model has; else fill what both have.

    Raises:
        LayoutMismatch: names, shapes or dtypes do not fit; the message lists them.
    """
    mine = {tensor.key: tensor for tensor in state.tensors}
    wrong = [
        f"{key}: the source holds {spec.dtype} {spec.shape}, the model expects {tensor.dtype} {tensor.global_shape}"
        for key, tensor in mine.items()
        if (spec := source.tensors.get(key)) is not None
        and (spec.shape, spec.dtype) != (tensor.global_shape, tensor.dtype)
    ]
    if strict:
        wrong += [f"{key}: missing in the source" for key in mine if key not in source.tensors]
        wrong += [
            f"{key}: in the source, but not in the model"
            for key in source.tensors
            if key not in mine and key.startswith("model/")
        ]
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise LayoutMismatch(
            f"step {source.step} does not fit the model: {'; '.join(wrong[:8])}{more}. "
            "Pass strict=False to fill only what fits by name; shapes and dtypes must agree"
        )
    requests, staged = [], []
    for tensor in mine.values():
        if tensor.key not in source.tensors or tensor.box.size == 0:
            continue
        target = tensor.data
        if not (target.device.type == "cpu" and target.is_contiguous()):
            target = torch.empty(tensor.box.shape, dtype=tensor.data.dtype)
            staged.append((tensor.data, target))
        requests.append(BoxRequest(tensor.key, tensor.box, as_bytes(target)))
    source.read(requests)
    with torch.no_grad():
        for live, target in staged:
            live.copy_(target)


def restore_options(model: nn.Module, optimizers: Sequence[Optimizer], documents: Mapping[str, Json]) -> None:
    """Give optimizers back their hyperparameters, group by group as parameters are named, and their scalar slots."""
    names = parameter_names(model)
    stored = {tuple(group["parameters"]): group["options"] for group in documents.get(_GROUPS, [])}
    scalars = documents.get(_SCALARS, {})
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            options = stored.get(tuple(names[id(parameter)] for parameter in group["params"]), {})
            for option, value in options.items():
                if option in group and not isinstance(group[option], torch.Tensor):
                    group[option] = tuple(value) if isinstance(group[option], tuple) else value
            for parameter in group["params"]:
                prefix = f"{names[id(parameter)]}/"
                for key, value in scalars.items():
                    if key.startswith(prefix) and "/" not in key.removeprefix(prefix):
                        optimizer.state[parameter][key.removeprefix(prefix)] = value


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's memory, writable."""
    flat = tensor.detach().reshape(-1).view(torch.uint8) if tensor.dim() else tensor.detach().view(1).view(torch.uint8)
    return memoryview(flat.numpy())


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return, for every later name of a shared parameter, the first."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return tied


def _is_json(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float | str):
        return True
    return isinstance(value, list | tuple) and all(_is_json(item) for item in value)
