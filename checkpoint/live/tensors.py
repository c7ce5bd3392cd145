"""Live training state as named boxes: this rank's shards and their places in the global tensors.

No communication: a sharded tensor's box follows from its mesh and placements alone. Names are the
format's: `model/<fqn>` for parameters and persistent buffers, `optim/<fqn>/<slot>` for optimizer
state, which is keyed by the names of the parameter and the slot, never by position. Parameters that
share memory (tied weights) are stored once, under their first name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Box, Json
from keepstep.checkpoint.live.placement import local_box

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "bool",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e4m3fnuz: "float8_e4m3fnuz",
    torch.float8_e5m2: "float8_e5m2",
    torch.float8_e5m2fnuz: "float8_e5m2fnuz",
}


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """This rank's box of a tensor.

    `data` is the local shard, detached; it shares the live memory. `owner` is the state's own
    tensor, if `data` is its memory: every write to it increments its version counter. (A DTensor's
    local tensor has another version counter, which such writes do not increment.)
    """

    key: str
    global_shape: tuple[int, ...]
    box: Box
    data: torch.Tensor
    owner: torch.Tensor | None = None

    @property
    def has_moved(self) -> bool:
        """Whether the owner now has other memory than `data`."""
        return self.owner is not None and local_of(self.owner).data_ptr() != self.data.data_ptr()

    def clone(self) -> LiveTensor:
        """Return a copy with memory of its own and no owner."""
        return LiveTensor(self.key, self.global_shape, self.box, self.data.clone())

    @property
    def dtype(self) -> str:
        """The Zarr name of the data type."""
        return dtype_name(self.data.dtype)


@dataclass(frozen=True, slots=True)
class LiveState:
    """The state of this rank: its tensors, and the documents that hold the rest."""

    tensors: tuple[LiveTensor, ...]
    documents: Mapping[str, Json]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the Zarr v3 name of a torch dtype.

    Raises:
        LayoutMismatch: the format cannot store this dtype.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise LayoutMismatch(
            f"{dtype} cannot be stored; known are {', '.join(map(str, _NAMES))}"
        ) from None


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a Zarr v3 data type name.

    Raises:
        LayoutMismatch: torch has no such dtype.
    """
    for dtype, known in _NAMES.items():
        if known == name:
            return dtype
    raise LayoutMismatch(f"torch has no dtype for {name}")


def describe(key: str, tensor: torch.Tensor) -> LiveTensor:
    """Return this rank's box of a tensor, sharded or not.

    Raises:
        LayoutMismatch: the local shard's shape contradicts the placements, or these are not boxes.
    """
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
                f"{key}: the local shard has shape {tuple(local.shape)}, but placements "
                f"{tensor.placements} over a mesh of {tuple(mesh.shape)} give {box.shape}"
            )
        return LiveTensor(key, shape, box, local, tensor)
    data = tensor.detach()
    return LiveTensor(key, tuple(data.shape), Box.whole(data.shape), data, tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory, in the CPU, holds its elements in C order as they are.

    The memory of a lazily conjugated or negated tensor holds other values than its elements.
    """
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same elements of which `is_plain` holds; itself if it does already."""
    return tensor.contiguous().cpu().resolve_conj().resolve_neg()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a plain tensor (see `is_plain`), writable."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local tensor, the same object at every call; any other tensor itself."""
    # `to_local` makes a new tensor at every call: too slow for every step, and its identity means
    # nothing.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
