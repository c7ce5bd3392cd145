"""Restores live state from a source: creates missing optimizer slots, then fills every box.

What to fill is planned first (`plan_fills`). Then either each rank fills its tensors by itself
(`fill`), or all ranks do it together (`keepstep.checkpoint.shared_restore`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Box
from keepstep.checkpoint.layout.dtypes import is_in_zarr, numpy_dtype
from keepstep.checkpoint.layout.source import BoxRequest, Source, TensorSpec
from keepstep.checkpoint.live.flat_parameters import reshard
from keepstep.checkpoint.live.model_parameters import NOT_FUSED, ModelParameters
from keepstep.checkpoint.live.optimizer_state import local_groups, slots_of
from keepstep.checkpoint.live.part_slices import FusedTensors
from keepstep.checkpoint.live.tensors import (
    LiveState,
    LiveTensor,
    as_bytes,
    copyable,
    is_plain,
    torch_dtype,
)

Bytes = npt.NDArray[np.uint8]

FindSlots = Callable[[Collection[str]], Mapping[str, Mapping[str, TensorSpec]]]
"""Returns the optimizer slots of parameters, by the parameters' names and the slots'."""

# Elements that a slot may have whatever its parameter's shape, such as tables for quantization.
_SMALL_SLOT = 2**16

_STAGING_NBYTES = 256 * 2**20


def allocate(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    find_slots: FindSlots,
    *,
    resize: Collection[str] = (),
    fused: FusedTensors = NOT_FUSED,
) -> Callable[[], None]:
    """Create the optimizer slots that the source has and a new optimizer lacks.

    A slot of the parameter's shape is sharded like the parameter; any other slot is complete on
    every rank. `step` is where torch's own optimizers keep it: on the CPU, unless the group is
    fused or capturable. Units of FSDP1 free what they have gathered, for it is about to change.

    Args:
        model: names the parameters.
        optimizers: the optimizers to complete.
        find_slots: returns the source's slots of parameters, as `Source.slots` does.
        resize: as for `plan_fills`.
        fused: which parameters have fused parts.

    Returns:
        An undo for a load that fails. It restores the slots that every parameter had before, also
        if `restore_options` has added others since: with part of a state the next step would fail
        or be wrong. It does not restore the tensors' values.

    Raises:
        LayoutMismatch: torch has no such data type, the model no such parameter, or a slot is far
            too large for its parameter. After this or
            any other error, such as lack of memory, the optimizers are unchanged.
    """
    reshard(model)
    undo = _make_undo(optimizers)
    try:
        _allocate(ModelParameters(model, fused), optimizers, find_slots, resize)
    except BaseException:
        undo()
        raise
    return undo


def _check_slot_size(
    name: str, slot: str, spec: TensorSpec, shape: tuple[int, ...], total: int
) -> None:
    """Refuse a slot that no optimizer has: each rank would allocate all of it.

    The largest known are preconditioners, matrices over the elements of a dimension (Shampoo), and
    vectors over all parameters (L-BFGS). `total` is the number of the optimizer's elements.
    """
    most = max(_SMALL_SLOT, math.prod(shape) ** 2, total)
    if math.prod(spec.shape) > most:
        raise LayoutMismatch(
            f"optim/{name}/{slot}: the source holds {spec.dtype} {spec.shape}, too much for a "
            f"parameter of shape {shape}; it is damaged, or of another model"
        )


def _make_undo(optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Return a function that restores the slots that the optimizers' parameters have now."""
    before: list[tuple[dict[Any, Any], torch.Tensor, dict[str, Any] | None]] = [
        (state, parameter, dict(state[parameter]) if parameter in state else None)
        for optimizer in optimizers
        for state in (slots_of(optimizer),)
        for group in local_groups(optimizer)
        for parameter in group["params"]
    ]

    def undo() -> None:
        for state, parameter, slots in before:
            if slots is None:
                state.pop(parameter, None)
            else:
                # In place: other objects, such as a `LiveStateReader`, hold these dictionaries.
                state[parameter].clear()
                state[parameter].update(slots)

    return undo


def _allocate(
    parameters: ModelParameters,
    optimizers: Sequence[Optimizer],
    find_slots: FindSlots,
    resize: Collection[str],
) -> None:
    own_names = {
        name
        for optimizer in optimizers
        for group in local_groups(optimizer)
        for parameter in group["params"]
        for name in parameters.shapes(parameter)
    }
    slots = find_slots(own_names)
    for optimizer in optimizers:
        state, groups = slots_of(optimizer), local_groups(optimizer)
        total = sum(p.numel() for group in groups for p in group["params"])
        for group in groups:
            for parameter in group["params"]:
                on_device = group.get("fused") or group.get("capturable")
                for name, shape in parameters.shapes(parameter).items():
                    for slot, spec in slots.get(name, {}).items():
                        if slot in state[parameter]:
                            continue
                        dtype = torch_dtype(spec.dtype)
                        has_parameter_shape = spec.shape == shape or (
                            name in resize and len(spec.shape) == len(shape)
                        )
                        if has_parameter_shape and slot != "step":
                            created = parameters.new_slot(parameter, dtype)
                        else:
                            _check_slot_size(name, slot, spec, shape, total)
                            on_cpu = slot == "step" and not on_device
                            created = torch.zeros(
                                spec.shape,
                                dtype=dtype,
                                device="cpu" if on_cpu else parameter.device,
                            )
                        state[parameter][slot] = created


@dataclass(frozen=True, slots=True)
class Fill:
    """A live tensor to fill from a source's tensor of this data type.

    `box` is the part of the live tensor's box that the source has: all of it, or, for a tensor that
    is larger than in the source, a part; the rest is zeroed. It is None if there is no such part.
    """

    tensor: LiveTensor
    dtype: str
    box: Box | None

    @property
    def nbytes(self) -> int:
        """Size of what is read from the source."""
        return self.box.size * self.itemsize if self.box else 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the source."""
        return numpy_dtype(self.dtype).itemsize

    @property
    def is_direct(self) -> bool:
        """Whether the source's bytes can be read into the live tensor's memory as they are."""
        return (
            self.dtype == self.tensor.dtype
            and self.box == self.tensor.box
            and is_plain(self.tensor.data)
        )

    def memory(self, box: Box) -> Bytes | None:
        """Return the live memory of a box if it is contiguous and takes the source's bytes.

        The array has the box's shape plus a last axis of an element's bytes.
        """
        if not self.is_direct:
            return None
        part = self._bytes(box)
        return part if part.flags.c_contiguous else None

    def place(self, box: Box, data: Bytes) -> None:
        """Fill a box of the live tensor, converting the data if necessary.

        Args:
            box: a part of `box`, in coordinates of the global tensor.
            data: the source's bytes, in the shape that `memory` returns.
        """
        if self.is_direct:
            self._bytes(box)[...] = data
            return
        values = torch.from_numpy(np.ascontiguousarray(data)).view(torch_dtype(self.dtype))
        with torch.no_grad():
            part = copyable(self.tensor.data[box.within(self.tensor.box).slices])
            part.copy_(copyable(values.reshape(box.shape)))

    def zero_rest(self) -> None:
        """Zero a tensor of which the source has only a part, before that is filled."""
        if self.box != self.tensor.box:
            with torch.no_grad():
                copyable(self.tensor.data).zero_()

    def _bytes(self, box: Box) -> Bytes:
        """Return the memory of a box of a plain tensor."""
        live = self.tensor
        values = np.frombuffer(as_bytes(live.data), np.uint8)
        return values.reshape(*live.box.shape, self.itemsize)[box.within(live.box).slices]


def plan_fills(
    state: LiveState,
    source: Source,
    *,
    strict: bool = True,
    convert: bool = False,
    keys_of_other_ranks: Collection[str] = frozenset(),
    resize: Collection[str] = (),
) -> list[Fill]:
    """Return what a source fills of live tensors, after a check that it fits.

    Args:
        state: the state to fill, from `LiveStateReader.capture` after `allocate`.
        source: the state to read.
        strict: refuse a source that lacks tensors, or that is known to have tensors of the model
            which the model lacks; otherwise fill the tensors that both have.
        convert: convert tensors whose data type in the source is another; not those whose elements
            are two values, such as `torch.float4_e2m1fn_x2`.
        keys_of_other_ranks: tensors that other ranks fill, such as those of other pipeline stages.
        resize: names of parameters that may be larger or smaller than in the source, such as
            embeddings whose vocabulary was padded: the common part is filled, the rest is zero.
            The same holds for their optimizer state.

    Raises:
        LayoutMismatch: names, shapes or dtypes do not fit; the message lists them.
    """
    # Boxes of one tensor agree in all that is checked here.
    by_key = {tensor.key: tensor for tensor in state.tensors}
    problems = [
        f"{key}: the source holds {spec.dtype} {spec.shape}, "
        f"the model expects {tensor.dtype} {tensor.global_shape}"
        for key, tensor in by_key.items()
        if (spec := source.tensors.get(key)) is not None
        and not (
            _fits(tensor, spec, resize)
            and (
                spec.dtype == tensor.dtype
                or (convert and is_in_zarr(spec.dtype) and is_in_zarr(tensor.dtype))
            )
        )
    ]
    if strict:
        problems += [f"{key}: missing in the source" for key in by_key if key not in source.tensors]
        problems += [
            f"{key}: in the source, but not in the model"
            for key in source.known_keys()
            if key not in by_key and key not in keys_of_other_ranks and key.startswith("model/")
        ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise LayoutMismatch(
            f"step {source.step} does not fit the model: {'; '.join(problems[:8])}{more}. "
            "Pass strict=False to fill only the tensors that both have, convert=True to convert "
            "data types, but for float4_e2m1fn_x2; shapes must agree, except for parameters named "
            "in resize=[...], such as embeddings whose vocabulary was padded"
        )
    _check_shared_numbers(state.tensors, source)
    fills: list[Fill] = []
    for tensor in state.tensors:
        if tensor.key not in source.tensors or tensor.box.size == 0:
            continue
        if tensor.data.device.type == "meta":
            raise LayoutMismatch(
                f"{tensor.key} is on the meta device and cannot be filled; call to_empty() first"
            )
        spec = source.tensors[tensor.key]
        fills.append(Fill(tensor, spec.dtype, tensor.box.intersect(Box.whole(spec.shape))))
    return fills


def fill(fills: Sequence[Fill], source: Source) -> None:
    """Fill live tensors from a source, by this rank alone.

    Contiguous CPU tensors are read directly; others go through buffers of bounded size, page-locked
    for CUDA.
    """
    direct = [item for item in fills if item.is_direct]
    if direct:
        source.read([
            BoxRequest(item.tensor.key, item.tensor.box, as_bytes(item.tensor.data))
            for item in direct
        ])  # fmt: skip
    for batch in _batches([item for item in fills if not item.is_direct]):
        _fill_staged(batch, source)


def _fill_staged(fills: Sequence[Fill], source: Source) -> None:
    """Fill tensors by way of CPU buffers."""
    buffers = [
        torch.empty(
            item.box.shape if item.box else 0,
            dtype=torch_dtype(item.dtype),
            pin_memory=item.tensor.data.is_cuda,
        )
        for item in fills
    ]
    source.read([
        BoxRequest(item.tensor.key, item.box, as_bytes(buffer))
        for item, buffer in zip(fills, buffers, strict=True)
        if item.box
    ])  # fmt: skip
    with torch.no_grad():
        for item, buffer in zip(fills, buffers, strict=True):
            item.zero_rest()
            if item.box:
                part = copyable(item.tensor.data[item.box.within(item.tensor.box).slices])
                part.copy_(copyable(buffer))


def _check_shared_numbers(tensors: Sequence[LiveTensor], source: Source) -> None:
    """Check that optimizer slots that are one number here are equal in the source.

    All parameters in a flat parameter of FSDP1 have one step.
    """
    keys_by_memory: dict[int, list[str]] = {}
    for tensor in tensors:
        is_number = tensor.key.startswith("optim/") and not tensor.global_shape
        if is_number and tensor.key in source.tensors and tensor.data.data_ptr():
            keys_by_memory.setdefault(tensor.data.data_ptr(), []).append(tensor.key)
    for first, *others in keys_by_memory.values():
        if not others:
            continue
        dtype = torch_dtype(source.tensors[first].dtype)
        numbers = torch.empty(1 + len(others), dtype=dtype)
        source.read([
            BoxRequest(key, Box((), ()), as_bytes(number))
            for key, number in zip((first, *others), numbers, strict=True)
        ])  # fmt: skip
        for key, number in zip(others, numbers[1:], strict=True):
            if as_bytes(number) != as_bytes(numbers[0]):
                raise LayoutMismatch(
                    f"{first} and {key} are one number in this optimizer, because its model was "
                    f"wrapped with use_orig_params=False, but {numbers[0].item()} and "
                    f"{number.item()} in the source; pass use_orig_params=True"
                )


def _fits(tensor: LiveTensor, spec: TensorSpec, resize: Collection[str]) -> bool:
    """Return whether a tensor can be filled from a source's tensor of this shape."""
    if spec.shape == tensor.global_shape:
        return True
    kind, _, name = tensor.key.partition("/")
    parameter = name.rpartition("/")[0] if kind == "optim" else name
    return parameter in resize and len(spec.shape) == len(tensor.global_shape)


def _batches(fills: Sequence[Fill]) -> Iterator[list[Fill]]:
    """Yield the fills in batches of about `_STAGING_NBYTES`."""
    batch: list[Fill] = []
    nbytes = 0
    for item in fills:
        size = item.tensor.data.numel() * item.tensor.data.element_size()
        if batch and nbytes + size > _STAGING_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += size
    if batch:
        yield batch
