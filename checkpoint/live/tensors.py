"""Represents live training state as named boxes: this rank's shards in the global tensors.

No communication: a sharded tensor's box follows from its mesh and placements alone. Names are the
format's: `model/<fqn>` for parameters and persistent buffers, `optim/<fqn>/<slot>` for optimizer
state, which is keyed by the names of the parameter and the slot, never by position. Parameters that
share memory (tied weights) are stored once, under their first name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box, Entry, Json, overlapping
from keepstep.checkpoint.format.layout.source import TensorSpec
from keepstep.checkpoint.live.placement import local_box
from keepstep.checkpoint.live.storable import check_storable
from keepstep.torch_internals import flat_shard, local_tensor, with_local_tensor

if TYPE_CHECKING:
    from keepstep.checkpoint.live.computed import ComputedTensors

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "bool",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
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
    torch.float8_e8m0fnu: "float8_e8m0fnu",
    torch.float4_e2m1fn_x2: "float4_e2m1fn_x2",
}


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A box of a tensor on this rank, which may have several boxes of one tensor.

    `data` is the box's elements, detached; it shares the live memory. `owner` is the state's own
    tensor, if `data` is part of its memory: every write to it increments its version counter. (A
    DTensor's local tensor has another version counter, which such writes do not increment.) `data`
    begins `owner_offset_nbytes` bytes after the owner.
    """

    key: str
    global_shape: tuple[int, ...]
    box: Box
    data: torch.Tensor
    owner: torch.Tensor | None = None
    owner_offset_nbytes: int = 0

    @property
    def has_moved(self) -> bool:
        """Whether the owner now has other memory than `data`."""
        return (
            self.owner is not None
            and offset_nbytes(self.data, self.owner) != self.owner_offset_nbytes
        )

    def entry(self, byte_offset: int = 0) -> Entry:
        """Return the entry for this box, as bytes that begin at this place.

        Raises:
            LayoutMismatch: it is on the meta device, or the format cannot store its data type.
        """
        if self.data.is_meta and self.box.size:
            raise LayoutMismatch(
                f"{self.key} is on the meta device and has no elements to store; give it memory "
                "with to_empty(), and values, before"
            )
        return Entry(
            key=self.key,
            dtype=self.dtype,
            global_shape=self.global_shape,
            box=self.box,
            byte_offset=byte_offset,
            nbytes=self.data.numel() * self.data.element_size(),
        )

    def clone(self) -> LiveTensor:
        """Return a copy with memory of its own and no owner."""
        return LiveTensor(self.key, self.global_shape, self.box, self.data.clone())

    @property
    def dtype(self) -> str:
        """The name of the data type, by `dtype_name`.

        Raises:
            LayoutMismatch: the format cannot store it.
        """
        try:
            return dtype_name(self.data.dtype)
        except LayoutMismatch as error:
            raise LayoutMismatch(f"{self.key}: {error}") from None


@dataclass(frozen=True, slots=True)
class LiveState:
    """The state of this rank: its tensors, and the documents that hold the rest.

    `computed` holds the tensors that are not the module's memory, if there are any.
    """

    tensors: tuple[LiveTensor, ...]
    documents: Mapping[str, Json]
    computed: ComputedTensors | None = None


def is_one_of_several() -> bool:
    """Return whether other ranks may hold tensors of the state that this rank does not have."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def specs_of(tensors: Iterable[LiveTensor]) -> dict[str, TensorSpec]:
    """Return the data types and global shapes of live tensors, by key.

    A data type that the format cannot store has torch's name.
    """
    return {
        tensor.key: TensorSpec(
            _NAMES.get(tensor.data.dtype, str(tensor.data.dtype)), tensor.global_shape
        )
        for tensor in tensors
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Return the format's name of a torch dtype.

    Raises:
        LayoutMismatch: the format cannot store this dtype.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise LayoutMismatch(
            f"{dtype} cannot be stored; convert the tensor or leave it out of the state. Known are "
            f"{', '.join(map(str, _NAMES))}"
        ) from None


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name that `dtype_name` returns.

    Raises:
        LayoutMismatch: torch has no such dtype.
    """
    for dtype, known in _NAMES.items():
        if known == name:
            return dtype
    raise LayoutMismatch(f"torch has no dtype for {name}")


def describe(key: str, tensor: torch.Tensor) -> LiveTensor:
    """Return this rank's box of a tensor, sharded or not; the rank is in the tensor's mesh.

    Raises:
        LayoutMismatch: the tensor cannot be stored, the local shard's shape contradicts the
            placements, or these are not boxes.
    """
    check_storable(key, local_of(tensor))
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        # `to_local` would record a view for autograd first.
        local = local_of(tensor).detach()
        shape = tuple(tensor.shape)
        assert coordinate is not None
        box = local_box(shape, tuple(mesh.shape), coordinate, tensor.placements)
        if tuple(local.shape) != box.shape and (local.numel() or box.size):
            raise LayoutMismatch(
                f"{key}: the local shard has shape {tuple(local.shape)}, but placements "
                f"{tensor.placements} over a mesh of {tuple(mesh.shape)} give {box.shape}"
            )
        return LiveTensor(key, shape, box, local, tensor)
    data = tensor.detach()
    return LiveTensor(key, tuple(data.shape), Box.whole(data.shape), data, tensor)


def check_disjoint(tensors: Iterable[LiveTensor]) -> None:
    """Check that the boxes that this rank has of each tensor are different elements.

    Raises:
        LayoutMismatch: two boxes of a tensor are the same or overlap; the message names the tensor.
    """
    boxes: dict[str, list[Box]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        boxes.setdefault(tensor.key, []).append(tensor.box)
        if shapes.setdefault(tensor.key, tensor.global_shape) != tensor.global_shape:
            raise _repeated(tensor.key)
    for key, held in boxes.items():
        if len(held) == 1:
            continue
        if len(set(held)) < len(held):
            raise _repeated(key)
        pair = overlapping(held)
        if pair is not None:
            one, other = pair
            raise LayoutMismatch(
                f"{key} is in the state in boxes that overlap, at offset {one.offset} with shape "
                f"{one.shape} and at offset {other.offset} with shape {other.shape}; each element "
                "may be there once"
            )


def _repeated(key: str) -> LayoutMismatch:
    return LayoutMismatch(f"{key} is in the state twice; rename the one that is not in the module")


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
    """Return a plain tensor of the same elements (see `is_plain`); itself if it is plain."""
    if is_plain(tensor):
        return tensor
    copied = copyable(tensor).contiguous().cpu().resolve_conj().resolve_neg()
    return copied.view(tensor.dtype)


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor that torch can copy to another of its dtype, whatever the strides.

    torch neither transposes nor fills elements that hold two values: they are viewed as bytes.
    """
    return tensor.view(torch.uint8) if tensor.dtype == torch.float4_e2m1fn_x2 else tensor


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a plain tensor (see `is_plain`), writable."""
    return _flat(tensor.detach()).view(torch.uint8).numpy().data


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in C order as bytes, in the CPU; it may share the memory."""
    return _flat(plain(tensor)).view(torch.uint8)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor's memory, 1-D. A single element is plain with any stride."""
    return tensor.as_strided((tensor.numel(),), (1,))


def placed_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a sharded tensor with this rank's local shard, of the shape and placement of another.

    PyTorch's operations on a whole DTensor (`zeros_like`) cost a millisecond for each new shape, to
    find out how the operation shards. `DTensor.from_local` records a view for autograd and computes
    the placement again, for every tensor.

    Args:
        tensor: gives the shape, the mesh and the placements.
        local: this rank's shard, of any data type; it is not copied.
    """
    return with_local_tensor(tensor, local)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's or flat parameter's local tensor, and any other tensor itself.

    It is the same object at every call.
    """
    # `to_local` makes a new tensor at every call: too slow for every step, and its identity means
    # nothing. While FSDP1 computes, its flat parameter has other memory than this rank's shard.
    return local_tensor(tensor) if isinstance(tensor, DTensor) else flat_shard(tensor)


def offset_nbytes(data: torch.Tensor, owner: torch.Tensor) -> int:
    """Return how many bytes after the beginning of its owner's local memory a tensor begins."""
    return data.data_ptr() - local_of(owner).data_ptr()
