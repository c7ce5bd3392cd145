"""Live training state as named boxes: what this rank holds, where it belongs, and how to fill it.

No communication and no gathering: a sharded tensor's box follows from its mesh and placements alone. Names
are the format's: `model/<fqn>` for parameters and persistent buffers, `optim/<fqn>/<slot>` for optimizer
state, which is keyed by the parameter's name and the slot's, never by position. Parameters that share storage
(tied weights) are kept once, under their first name.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from checkpoint.documents import GROUPS, SCALARS, TIED
from checkpoint.errors import LayoutMismatch
from checkpoint.layout import Box, Json
from checkpoint.options import (
    name_of,
    options_of,
    parameter_names,
    restore_options,
    storable,
)
from checkpoint.placement import local_box
from checkpoint.source import BoxRequest, Source, TensorSpec

__all__ = [
    "Capturer",
    "LiveState",
    "LiveTensor",
    "allocate",
    "as_bytes",
    "describe",
    "dtype_name",
    "parameter_names",
    "restore",
    "restore_options",
    "torch_dtype",
]

_STAGING_NBYTES = 256 * 2**20

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "bool", torch.int8: "int8", torch.int16: "int16", torch.int32: "int32", torch.int64: "int64",
    torch.uint8: "uint8", torch.float16: "float16", torch.float32: "float32", torch.float64: "float64",
    torch.bfloat16: "bfloat16", torch.complex64: "complex64", torch.complex128: "complex128",
    torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e4m3fnuz: "float8_e4m3fnuz",
    torch.float8_e5m2: "float8_e5m2", torch.float8_e5m2fnuz: "float8_e5m2fnuz",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """This rank's box of a tensor; `data` is the local shard, detached, in the live memory itself.

    `owner` is the tensor that the state has, if `data` is its memory: a write to it moves its version counter. (A DTensor's local
    tensor has one of its own, which stands still.)
    """

    key: str
    global_shape: tuple[int, ...]
    box: Box
    data: torch.Tensor
    owner: torch.Tensor | None = None

    @property
    def has_moved(self) -> bool:
        """Whether its owner now has other memory than `data`."""
        return self.owner is not None and _local(self.owner).data_ptr() != self.data.data_ptr()

    def copied(self) -> LiveTensor:
        """Return the same with memory of its own."""
        return LiveTensor(self.key, self.global_shape, self.box, self.data.clone())

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


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a Zarr v3 data type name.

    Raises:
        LayoutMismatch: torch has none.
    """
    for dtype, known in _NAMES.items():
        if known == name:
            return dtype
    raise LayoutMismatch(f"torch has no dtype for {name}")


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
        if tuple(local.shape) != box.shape and (local.numel() or box.size):
            raise LayoutMismatch(
                f"{key}: the local shard has shape {tuple(local.shape)}, its placements {tensor.placements} "
                f"over a mesh of {tuple(mesh.shape)} say {box.shape}"
            )
        return LiveTensor(key, shape, box, local, tensor)
    data = tensor.detach()
    return LiveTensor(key, tuple(data.shape), Box.whole(data.shape), data, tensor)


_LOCAL = operator.attrgetter("_local_tensor")


@dataclass(frozen=True, slots=True)
class _Bound:
    """Everything found in one walk over the state, good while nothing in it has been replaced.

    `holders[i][names[i]]` is `found[i]`; `sharded` are those that are DTensors, and `shards` their local tensors. `sized` are all
    dictionaries with tensors in them, and `sizes` how many each had; `empty` are places that held no tensor and may come to.
    `is_derived` is True if a state hook makes tensors anew at every call: then nothing found before can be trusted.
    """

    live: tuple[LiveTensor, ...]
    holders: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    found: tuple[torch.Tensor, ...]
    sharded: tuple[torch.Tensor, ...]
    shards: tuple[torch.Tensor, ...]
    scalars: tuple[tuple[str, Mapping[str, Any], str], ...]
    sized: tuple[Mapping[Any, Any], ...]
    sizes: list[int]
    empty: tuple[tuple[Mapping[str, Any], str], ...]
    groups: tuple[tuple[Mapping[str, Any], list[str]], ...]
    is_derived: bool

    @property
    def is_current(self) -> bool:
        # Runs at every step over all tensors, none of which is in the processor's caches then: `map` does no more than it must.
        return (
            not self.is_derived
            and list(map(len, self.sized)) == self.sizes
            and not any(isinstance(holder.get(name), torch.Tensor) for holder, name in self.empty)
            and all(map(operator.is_, map(dict.get, self.holders, self.names), self.found))
            and all(map(operator.is_, map(_LOCAL, self.sharded), self.shards))
        )

    @property
    def has_moved(self) -> bool:
        """Whether something has other memory than when it was found."""
        return any(tensor.has_moved for tensor in self.live)


class Capturer:
    """Reads the state of one model and its optimizers, again and again.

    The walk over modules and optimizers is done once, and again when something in it is no longer the same
    object; a capture otherwise only compares identities, for it runs at every step. Memory that was put under a tensor that
    stayed (`p.data = ...`) is not looked for: `Snapshotter` notices it while it copies, and `forget_moved` mends it.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._names = parameter_names(model)
        self._tied: dict[str, str] = {}
        self._bound: _Bound | None = None

    def capture(self) -> LiveState:
        """Return the state as it is now. Its tensors are the live memory: the next step shows through.

        Raises:
            LayoutMismatch: something in it cannot be stored; the message names it.
        """
        bound = self._bound
        if bound is None or not bound.is_current:
            bound = self._bound = self._bind()
        scalars = {key: storable(key, slots[slot]) for key, slots, slot in bound.scalars}
        groups = [{"parameters": names, "options": options_of(group)} for group, names in bound.groups]
        return LiveState(bound.live, {GROUPS: groups, SCALARS: scalars, TIED: self._tied})

    def forget_moved(self) -> None:
        """Walk anew at the next capture if any tensor has been given other memory."""
        if self._bound is not None and self._bound.has_moved:
            self._bound = None

    def _bind(self) -> _Bound:
        # Calling this first also makes FSDP put its sharded parameters back in place.
        state = self._model.state_dict(keep_vars=True)
        self._tied = _tied_names(state)
        homes = _homes(self._model)
        places: list[tuple[dict[str, Any], str, str, torch.Tensor]] = []
        scalars: list[tuple[str, Mapping[str, Any], str]] = []
        sized: list[Mapping[Any, Any]] = [holder for holder, _ in homes.values()]
        empty: list[tuple[Mapping[str, Any], str]] = [
            (holder, leaf) for holder, leaf in homes.values() if holder[leaf] is None
        ]
        is_derived = False
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name not in self._tied:
                holder, leaf = homes.get(name, ({name: value}, name))
                is_derived = is_derived or name not in homes or holder[leaf] is not value
                places.append((holder, leaf, f"model/{name}", value))
            elif not isinstance(value, torch.Tensor | None):
                raise LayoutMismatch(f"model/{name}: extra state of type {type(value).__name__} cannot be stored")
        groups: list[tuple[Mapping[str, Any], list[str]]] = []
        for optimizer in self._optimizers:
            sized.append(optimizer.state)
            for group in optimizer.param_groups:
                groups.append((group, [name_of(parameter, self._names) for parameter in group["params"]]))
            for parameter, slots in optimizer.state.items():
                sized.append(slots)
                name = name_of(parameter, self._names)
                for slot, value in slots.items():
                    if isinstance(value, torch.Tensor):
                        places.append((slots, slot, f"optim/{name}/{slot}", value))
                    else:
                        scalars.append((f"{name}/{slot}", slots, slot))
                        empty.append((slots, slot))
        sharded = tuple(found for *_, found in places if isinstance(found, DTensor))
        return _Bound(
            live=tuple(describe(key, found) for _, _, key, found in places),
            holders=tuple(holder for holder, *_ in places),
            names=tuple(name for _, name, *_ in places),
            found=tuple(found for *_, found in places),
            sharded=sharded,
            shards=tuple(map(_local, sharded)),
            scalars=tuple(scalars),
            sized=tuple(sized),
            sizes=[len(holder) for holder in sized],
            empty=tuple(empty),
            groups=tuple(groups),
            is_derived=is_derived,
        )


def allocate(model: nn.Module, optimizers: Sequence[Optimizer], tensors: Mapping[str, TensorSpec]) -> None:
    """Create the optimizer slots that a source has and a fresh optimizer still lacks.

    A slot of the parameter's shape is laid out like the parameter; another is whole on every rank. `step` is
    where torch's own optimizers keep it: on the CPU, unless the group is fused or capturable.

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
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                on_device = group.get("fused") or group.get("capturable")
                for slot, spec in slots.get(name_of(parameter, names), {}).items():
                    if slot in optimizer.state[parameter]:
                        continue
                    dtype = torch_dtype(spec.dtype)
                    if spec.shape == tuple(parameter.shape) and slot != "step":
                        made = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                    else:
                        on_cpu = slot == "step" and not on_device
                        made = torch.zeros(spec.shape, dtype=dtype, device="cpu" if on_cpu else parameter.device)
                    optimizer.state[parameter][slot] = made


def restore(
    state: LiveState,
    source: Source,
    *,
    strict: bool = True,
    convert: bool = False,
    elsewhere: Collection[str] = frozenset(),
) -> None:
    """Fill live tensors from a source.

    CPU tensors that lie in one piece are read straight into; others go through buffers of bounded size,
    page-locked for CUDA.

    Args:
        state: what to fill, from `Capturer.capture` after `allocate`.
        source: where from.
        strict: refuse a source that lacks tensors or holds more of the model than the model has; else fill
            what both have.
        convert: convert where the source has another data type.
        elsewhere: tensors that other ranks fill, such as those of other pipeline stages.

    Raises:
        LayoutMismatch: names, shapes or dtypes do not fit; the message lists them.
    """
    mine = {tensor.key: tensor for tensor in state.tensors}
    wrong = [
        f"{key}: the source holds {spec.dtype} {spec.shape}, the model expects {tensor.dtype} {tensor.global_shape}"
        for key, tensor in mine.items()
        if (spec := source.tensors.get(key)) is not None
        and (spec.shape != tensor.global_shape or (spec.dtype != tensor.dtype and not convert))
    ]
    if strict:
        wrong += [f"{key}: missing in the source" for key in mine if key not in source.tensors]
        wrong += [
            f"{key}: in the source, but not in the model"
            for key in source.tensors
            if key not in mine and key not in elsewhere and key.startswith("model/")
        ]
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise LayoutMismatch(
            f"step {source.step} does not fit the model: {'; '.join(wrong[:8])}{more}. "
            "Pass strict=False to fill only what fits by name, convert=True to convert data types; shapes must agree"
        )
    straight: list[BoxRequest] = []
    staged: list[LiveTensor] = []
    for tensor in mine.values():
        if tensor.key not in source.tensors or tensor.box.size == 0:
            continue
        if tensor.data.device.type == "meta":
            raise LayoutMismatch(f"{tensor.key} is on the meta device and cannot be filled; call to_empty() first")
        is_alike = source.tensors[tensor.key].dtype == tensor.dtype
        if is_alike and tensor.data.device.type == "cpu" and tensor.data.is_contiguous():
            straight.append(BoxRequest(tensor.key, tensor.box, as_bytes(tensor.data)))
        else:
            staged.append(tensor)
    if straight:
        source.read(straight)
    for batch in _batches(staged):
        buffers = [
            torch.empty(
                tensor.box.shape, dtype=torch_dtype(source.tensors[tensor.key].dtype), pin_memory=tensor.data.is_cuda
            )
            for tensor in batch
        ]
        source.read([BoxRequest(t.key, t.box, as_bytes(buffer)) for t, buffer in zip(batch, buffers, strict=True)])
        with torch.no_grad():
            for tensor, buffer in zip(batch, buffers, strict=True):
                tensor.data.copy_(buffer)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's memory, writable."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # `to_local` makes a new tensor at every call, too slow for every step and no use for comparing
    # identities.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _homes(model: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the module dictionary that holds each parameter and buffer, by full name."""
    return {
        f"{path}.{leaf}" if path else leaf: (holder, leaf)
        for path, module in model.named_modules(remove_duplicate=False)
        for holder in (module._parameters, module._buffers)
        for leaf in holder
    }


def _tied_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Return, for every later name of shared memory, the first; memory decides, not identity."""
    first: dict[object, str] = {}
    tied = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        local = _local(value)
        # Without memory (empty, or on the meta device) only identity is left to compare.
        where: object = id(value)
        if local.data_ptr():
            where = (local.data_ptr(), value.shape, local.stride(), local.dtype, local.device)
        if first.setdefault(where, name) != name:
            tied[name] = first[where]
    return tied


def _batches(tensors: Sequence[LiveTensor]) -> Iterator[list[LiveTensor]]:
    """Yield the tensors in batches of about `_STAGING_NBYTES`."""
    batch: list[LiveTensor] = []
    nbytes = 0
    for tensor in tensors:
        size = tensor.data.numel() * tensor.data.element_size()
        if batch and nbytes + size > _STAGING_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(tensor)
        nbytes += size
    if batch:
        yield batch
