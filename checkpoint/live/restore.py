"""Restores live state from a source: creates missing optimizer slots, then fills every box.

What to fill is planned first (`plan_fills`). Then either each rank fills its tensors by itself
(`fill`), or all ranks do it together (`keepstep.checkpoint.shared_restore`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Box, Json
from keepstep.checkpoint.layout.completeness import ONLY_MODEL, Requested, differences
from keepstep.checkpoint.layout.described import Tie, master_of, stored_parameter
from keepstep.checkpoint.layout.descriptions import NOT_DESCRIBED, Descriptions
from keepstep.checkpoint.layout.documents import MASTERS, PARTS, SCALARS, SUBCLASSES, TIED
from keepstep.checkpoint.layout.dtypes import is_convertible, numpy_dtype
from keepstep.checkpoint.layout.encoded_values import noted_slots, slots_within
from keepstep.checkpoint.layout.names import MODEL_PREFIX
from keepstep.checkpoint.layout.source import BoxRequest, Source, TensorSpec
from keepstep.checkpoint.live.model_parameters import ModelParameters
from keepstep.checkpoint.live.optimizer_rest import (
    REST,
    PendingRest,
    Rest,
    check_fits,
    parameters_of,
)
from keepstep.checkpoint.live.optimizer_state import local_groups, slots_of
from keepstep.checkpoint.live.part_slices import check_parts
from keepstep.checkpoint.live.source_match import Origin, SourceMatcher
from keepstep.checkpoint.live.storable import check_fillable, check_subclasses
from keepstep.checkpoint.live.tensor_values import new_tensor
from keepstep.checkpoint.live.tensors import (
    LiveState,
    LiveTensor,
    as_bytes,
    copyable,
    is_plain,
    torch_dtype,
)
from keepstep.checkpoint.live.tied_names import differing_names

Bytes = npt.NDArray[np.uint8]

# Elements that a slot may have whatever its parameter's shape, such as tables for quantization.
_SMALL_SLOT = 2**16

_STAGING_NBYTES = 256 * 2**20


def allocate(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    source: Source,
    *,
    descriptions: Descriptions = NOT_DESCRIBED,
) -> Callable[[], None]:
    """Create the optimizer slots that the source has and a new optimizer lacks.

    A slot of the parameter's shape in the source is sharded like the parameter, and has its shape
    here; any other slot is complete on every rank. A master begins as its parameter's values, and
    is not made where the parameter has its data type. `step` is where torch's own optimizers keep
    it: on the CPU, unless the group is fused or capturable. Units of FSDP free what they have
    gathered, for it is about to change.

    Args:
        model: names the parameters.
        optimizers: the optimizers to complete.
        source: the state to read.
        descriptions: which parameters have fused parts, and which slots may be masters.

    Returns:
        An undo for a load that fails. It restores the slots that every parameter had before, also
        if `restore_options` has added others since: with part of a state the next step would fail
        or be wrong. It does not restore the tensors' values.

    Raises:
        LayoutMismatch: torch has no such data type, the model no such parameter, or a slot is far
            too large for its parameter. After this or
            any other error, such as lack of memory, the optimizers are unchanged.
    """
    undo = _make_undo(optimizers)
    try:
        _allocate(ModelParameters(model, descriptions), optimizers, source, descriptions)
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
    """Return a function that restores the state that the optimizers have now, but for values."""
    before: list[tuple[Optimizer, dict[Any, Any]]] = [
        (
            optimizer,
            {
                key: dict(value) if isinstance(key, torch.Tensor) else value
                for key, value in slots_of(optimizer).items()
            },
        )
        for optimizer in optimizers
    ]

    def undo() -> None:
        for optimizer, kept in before:
            state = slots_of(optimizer)
            for key in [key for key in state if key not in kept]:
                del state[key]
            for key, value in kept.items():
                if isinstance(key, torch.Tensor):
                    # In place: others, such as a `LiveStateReader`, hold these dictionaries.
                    slots = state.setdefault(key, {})
                    slots.clear()
                    slots.update(value)
                else:
                    state[key] = value

    return undo


def _allocate(
    parameters: ModelParameters,
    optimizers: Sequence[Optimizer],
    source: Source,
    descriptions: Descriptions,
) -> None:
    own_names = {
        name
        for optimizer in optimizers
        for group in local_groups(optimizer)
        for parameter in group["params"]
        for name in parameters.shapes(parameter)
    }
    slots = dict(source.slots(own_names))
    ties = _ties(own_names, slots, source)
    slots.update(source.slots({_name_of(tie) for tie in ties.values()}) if ties else {})
    values = _values_by_name(source)
    for optimizer in optimizers:
        state, groups = slots_of(optimizer), local_groups(optimizer)
        total = sum(p.numel() for group in groups for p in group["params"])
        for group in groups:
            for parameter in group["params"]:
                on_device = group.get("fused") or group.get("capturable")
                for name, shape in parameters.shapes(parameter).items():
                    tie = ties.get(name)
                    stored_name = name if tie is None else _name_of(tie)
                    stored_values = values.get(stored_name, {})
                    noted = noted_slots(stored_values)
                    for slot in stored_values if parameter in state else ():
                        # What is no tensor in the source is not filled.
                        state[parameter].pop(slot, None)
                    for slot, stored_spec in slots.get(stored_name, {}).items():
                        if isinstance(state.get(parameter, {}).get(slot), torch.Tensor):
                            continue
                        if slot.startswith(f"{REST}.") and REST in stored_values:
                            continue
                        spec = stored_spec
                        if tie is not None and tie.is_transposed:
                            spec = replace(spec, shape=spec.shape[::-1])
                        dtype = torch_dtype(spec.dtype)
                        is_master = slot in descriptions.master_slots and _is_master(
                            stored_name, slot, source
                        )
                        if is_master and dtype == parameter.dtype:
                            continue
                        has_shape = _has_parameter_shape(stored_name, shape, spec, source)
                        if slot != "step" and has_shape and "strides" not in noted.get(slot, {}):
                            new = parameters.new_master if is_master else parameters.new_slot
                            created = new(parameter, dtype)
                        else:
                            _check_slot_size(name, slot, spec, shape, total)
                            on_cpu = slot == "step" and not on_device
                            created = new_tensor(
                                spec.shape,
                                dtype,
                                torch.device("cpu") if on_cpu else parameter.device,
                                noted.get(slot, {}),
                            )
                        state.setdefault(parameter, {})[slot] = created
        _prepare_rest(optimizer, parameters, values, slots, total)


def _values_by_name(source: Source) -> dict[str, dict[str, Json]]:
    """Return the slots that are no tensors in a source, by parameter and slot."""
    values: dict[str, dict[str, Json]] = {}
    for key, value in source.documents.get(SCALARS, {}).items():
        name, _, slot = key.rpartition("/")
        values.setdefault(name, {})[slot] = value
    return values


def _prepare_rest(
    optimizer: Optimizer,
    parameters: ModelParameters,
    values: Mapping[str, Mapping[str, Json]],
    slots: Mapping[str, Mapping[str, TensorSpec]],
    total: int,
) -> None:
    """Make the tensors of the rest that a source has of an optimizer's `state_dict`."""
    members = parameters_of(optimizer)
    names = [name for parameter in members for name in parameters.names(parameter)]
    owner = next((name for name in names if REST in values.get(name, {})), None)
    if owner is None:
        return
    document = values[owner][REST]
    check_fits(optimizer, parameters, document)
    tensors: dict[str, torch.Tensor] = {}
    for noted in slots_within(document["content"]):
        slot = noted["name"]
        spec = slots.get(owner, {}).get(slot)
        if spec is None:
            raise LayoutMismatch(f"optim/{owner}/{slot}: missing in the source")
        dtype = torch_dtype(spec.dtype)
        if "like" in noted:
            tensors[slot] = parameters.new_slot(parameters.named(noted["like"]), dtype)
        else:
            _check_slot_size(owner, slot, spec, tuple(members[0].shape), total)
            tensors[slot] = new_tensor(spec.shape, dtype, members[0].device, noted)
    state = slots_of(optimizer)
    state.setdefault(members[0], {})[REST] = PendingRest(
        Rest(document, tensors, document["is_whole"])
    )


def _ties(
    own_names: Collection[str], slots: Mapping[str, Mapping[str, TensorSpec]], source: Source
) -> dict[str, Tie]:
    """Return the parameters whose state that of others is in a source, where it is tied to them."""
    lacking = [name for name in own_names if name not in slots]
    document = source.documents.get(TIED) if lacking else None
    ties = ((name, stored_parameter(document, name, own_names)) for name in lacking)
    return {name: tie for name, tie in ties if tie is not None}


def _name_of(tie: Tie) -> str:
    return tie.key.removeprefix(MODEL_PREFIX)


def _has_parameter_shape(
    name: str, shape: tuple[int, ...], spec: TensorSpec, source: Source
) -> bool:
    """Return whether a slot has its parameter's shape, in the source's padding or in this one's."""
    if spec.shape == shape:
        return True
    if len(spec.shape) != len(shape):
        return False
    stored = source.tensors.get(f"{MODEL_PREFIX}{name}")
    return stored is not None and stored.shape == spec.shape


def _is_master(name: str, slot: str, source: Source) -> bool:
    """Return whether a source says that a slot is the parameter in a wider data type."""
    key = f"{MODEL_PREFIX}{name}"
    master = master_of(source.documents.get(MASTERS), key)
    return master is not None and master.key == f"optim/{name}/{slot}"


@dataclass(frozen=True, slots=True)
class Fill:
    """A live tensor to fill from a source's tensor of this data type.

    `tensor` has the key, and if need be the order of dimensions, of the source's. `box` is the part
    of its box that the source has: all of it, or, for a tensor that is larger than in the source or
    padded otherwise, a part; the rest is zeroed or kept. It is None if there is no such part.
    """

    tensor: LiveTensor
    dtype: str
    box: Box | None
    zeroes_rest: bool = True

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
        """Zero a tensor of which the source has only a part, before that is filled, if asked to."""
        if self.zeroes_rest and self.box != self.tensor.box:
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
    requested: Requested = ONLY_MODEL,
    resize: Collection[str] = (),
) -> list[Fill]:
    """Return what a source fills of live tensors, after a check that it fits.

    Args:
        state: the state to fill, from `LiveStateReader.capture` after `allocate`.
        source: the state to read.
        strict: refuse a source that lacks what the state has, that is known to have under the
            requested names what the state does not take, or that has different tensors under names
            that are one tensor here; otherwise fill the tensors that both have.
        convert: convert tensors whose data type in the source is another; not those whose elements
            are two values, such as `torch.float4_e2m1fn_x2`.
        requested: what the state asks for, and what other ranks take of it.
        resize: names of parameters that may be larger or smaller than in the source: the common
            part is filled, the rest is zero. The same holds for their optimizer state.

    Raises:
        LayoutMismatch: names, shapes, dtypes or parts do not fit; the message lists them.
    """
    if SUBCLASSES in state.documents:
        check_subclasses(source.documents.get(SUBCLASSES), state.documents[SUBCLASSES])
    if PARTS in state.documents:
        check_parts(source.documents.get(PARTS), state.documents[PARTS])
    matched = _Matched.of(state, source, resize)
    by_key, origins = matched.by_key, matched.origins
    problems = [
        problem
        for key, origin in origins.items()
        if origin is not None and (problem := _problem(by_key[key], origin, convert)) is not None
    ]
    if strict:
        problems += matched.differences(state, source, requested)
        # Reads tensors: only where what is known without fits.
        problems += [] if problems else matched.differing_names(state, source)
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise LayoutMismatch(
            f"step {source.step} does not fit the model: {'; '.join(problems[:8])}{more}. "
            "Pass strict=False to fill only what both have, convert=True to convert "
            "data types where no value is lost but by rounding. Shapes must agree, except for the "
            "padding of tensors whose logical shape is the same, see Descriptions(padding=...), "
            "and for parameters named in resize=[...]"
        )
    _check_shared_numbers(state.tensors, source)
    fills: list[Fill] = []
    for tensor in state.tensors:
        origin = origins[tensor.key]
        if origin is None or tensor.box.size == 0:
            continue
        check_fillable(tensor.key, tensor.data)
        if tensor.data.device.type == "meta":
            raise LayoutMismatch(
                f"{tensor.key} is on the meta device and cannot be filled; call to_empty() first"
            )
        assert origin.common is not None, "what does not fit was refused"
        filled = origin.in_its_terms(tensor)
        box = filled.box.intersect(origin.common)
        fills.append(Fill(filled, origin.spec.dtype, box, origin.zeroes_rest))
    return fills


def unmatched(
    state: LiveState, source: Source, requested: Requested, resize: Collection[str] = ()
) -> list[str]:
    """Return what `plan_fills` would refuse if it were strict, one line for each difference.

    The arguments are those of `plan_fills`.
    """
    matched = _Matched.of(state, source, resize)
    return [
        *matched.differences(state, source, requested),
        *matched.differing_names(state, source),
    ]


@dataclass(frozen=True, slots=True)
class _Matched:
    """Live tensors by key, and what of a source fills each; boxes of one tensor agree in that."""

    by_key: Mapping[str, LiveTensor]
    origins: Mapping[str, Origin | None]
    matcher: SourceMatcher

    @classmethod
    def of(cls, state: LiveState, source: Source, resize: Collection[str]) -> Self:
        by_key = {tensor.key: tensor for tensor in state.tensors}
        matcher = SourceMatcher(state, source, resize)
        return cls(by_key, {key: matcher.find(tensor) for key, tensor in by_key.items()}, matcher)

    def differences(self, state: LiveState, source: Source, requested: Requested) -> list[str]:
        """See `keepstep.checkpoint.layout.completeness.differences`."""
        filled = {
            key: None if origin is None else origin.key for key, origin in self.origins.items()
        }
        return differences(filled, state.documents, source, requested)

    def differing_names(self, state: LiveState, source: Source) -> list[str]:
        """See `keepstep.checkpoint.live.tied_names.differing_names`."""
        return differing_names(state, source, self.matcher, self.origins)


def _problem(tensor: LiveTensor, origin: Origin, convert: bool) -> str | None:
    """Return why a live tensor cannot be filled from its origin, in words; None if it can."""
    spec = origin.spec
    if origin.contradiction is not None:
        return f"{tensor.key}: {origin.contradiction}"
    if origin.common is not None and (
        spec.dtype == tensor.dtype or (convert and is_convertible(spec.dtype, tensor.dtype))
    ):
        return None
    return (
        f"{tensor.key}: the source holds {spec.dtype} {spec.shape}, "
        f"the model expects {tensor.dtype} {tensor.global_shape}"
    )


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
        numbers = {
            key: torch.empty((), dtype=torch_dtype(source.tensors[key].dtype))
            for key in (first, *others)
        }
        source.read([
            BoxRequest(key, Box((), ()), as_bytes(number)) for key, number in numbers.items()
        ])  # fmt: skip
        values = {key: number.item() for key, number in numbers.items()}
        for key in others:
            # NaN, which does not equal itself, is one number, too.
            if values[key] != values[first] and repr(values[key]) != repr(values[first]):
                raise LayoutMismatch(
                    f"{first} and {key} are one number in this optimizer, because its model was "
                    f"wrapped with use_orig_params=False, but {values[first]} and {values[key]} "
                    "in the source; pass use_orig_params=True"
                )


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
