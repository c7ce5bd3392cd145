"""Filling live state from a source: the slots that a fresh optimizer lacks, then every box."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Box
from keepstep.checkpoint.layout.source import BoxRequest, Source, TensorSpec
from keepstep.checkpoint.live.optimizer_options import name_of, parameter_names
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, as_bytes, torch_dtype

_STAGING_NBYTES = 256 * 2**20


def allocate(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    tensors: Mapping[str, TensorSpec],
    *,
    resize: Collection[str] = (),
) -> Callable[[], None]:
    """Create the optimizer slots that a source has and a fresh optimizer still lacks; return an undo for a load that fails.

    The undo gives every parameter the slots that it had before, whoever added others since, as `restore_options` does: with half a
    state the next step would fail, or begin wrongly. It does not bring back what tensors held.

    A slot of the parameter's shape is laid out like the parameter; another is whole on every rank. `step` is
    where torch's own optimizers keep it: on the CPU, unless the group is fused or capturable.

    Args:
        model: gives the parameters their names.
        optimizers: those whose state is empty so far.
        tensors: what the source holds.
        resize: as for `restore`.

    Raises:
        LayoutMismatch: torch has no such data type, or the model no such parameter. After this or any other error, such as one of
            memory, the optimizers are as they were.
    """
    undo = _make_undo(optimizers)
    try:
        _allocate(parameter_names(model), optimizers, tensors, resize)
    except BaseException:
        undo()
        raise
    return undo


def _make_undo(optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Return what gives the optimizers' parameters back the slots that they have now, and no others."""
    before: list[tuple[dict[Any, Any], torch.Tensor, dict[str, Any] | None]] = [
        (
            optimizer.state,
            parameter,
            dict(optimizer.state[parameter]) if parameter in optimizer.state else None,
        )
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]

    def undo() -> None:
        for state, parameter, slots in before:
            if slots is None:
                state.pop(parameter, None)
            else:
                # In place: others hold these dictionaries, a `LiveStateReader` among them.
                state[parameter].clear()
                state[parameter].update(slots)

    return undo


def _allocate(
    names: Mapping[int, str],
    optimizers: Sequence[Optimizer],
    tensors: Mapping[str, TensorSpec],
    resize: Collection[str],
) -> None:
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
                    is_alike = spec.shape == tuple(parameter.shape) or (
                        name_of(parameter, names) in resize and len(spec.shape) == parameter.dim()
                    )
                    if is_alike and slot != "step":
                        made = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                    else:
                        on_cpu = slot == "step" and not on_device
                        made = torch.zeros(
                            spec.shape, dtype=dtype, device="cpu" if on_cpu else parameter.device
                        )
                    optimizer.state[parameter][slot] = made


def restore(
    state: LiveState,
    source: Source,
    *,
    strict: bool = True,
    convert: bool = False,
    keys_of_other_ranks: Collection[str] = frozenset(),
    resize: Collection[str] = (),
) -> None:
    """Fill live tensors from a source.

    CPU tensors that lie in one piece are read straight into; others go through buffers of bounded size,
    page-locked for CUDA.

    Args:
        state: what to fill, from `LiveStateReader.capture` after `allocate`.
        source: where from.
        strict: refuse a source that lacks tensors or holds more of the model than the model has; else fill
            what both have.
        convert: convert where the source has another data type.
        keys_of_other_ranks: tensors that other ranks fill, such as those of other pipeline stages.
        resize: names of parameters that may be larger or smaller than in the source, such as embeddings whose vocabulary
            was padded: what both have is filled, the rest is zero. Their optimizer state likewise.

    Raises:
        LayoutMismatch: names, shapes or dtypes do not fit; the message lists them.
    """
    mine = {tensor.key: tensor for tensor in state.tensors}
    wrong = [
        f"{key}: the source holds {spec.dtype} {spec.shape}, the model expects {tensor.dtype} {tensor.global_shape}"
        for key, tensor in mine.items()
        if (spec := source.tensors.get(key)) is not None
        and (not _fits(tensor, spec, resize) or (spec.dtype != tensor.dtype and not convert))
    ]
    if strict:
        wrong += [f"{key}: missing in the source" for key in mine if key not in source.tensors]
        wrong += [
            f"{key}: in the source, but not in the model"
            for key in source.tensors
            if key not in mine and key not in keys_of_other_ranks and key.startswith("model/")
        ]
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise LayoutMismatch(
            f"step {source.step} does not fit the model: {'; '.join(wrong[:8])}{more}. "
            "Pass strict=False to fill only what fits by name, convert=True to convert data types; shapes must agree, but for "
            "parameters named in resize=[...], such as embeddings whose vocabulary was padded"
        )
    straight: list[BoxRequest] = []
    staged: list[LiveTensor] = []
    for tensor in mine.values():
        if tensor.key not in source.tensors or tensor.box.size == 0:
            continue
        if tensor.data.device.type == "meta":
            raise LayoutMismatch(
                f"{tensor.key} is on the meta device and cannot be filled; call to_empty() first"
            )
        spec = source.tensors[tensor.key]
        is_alike = (spec.dtype, spec.shape) == (tensor.dtype, tensor.global_shape)
        if is_alike and tensor.data.device.type == "cpu" and tensor.data.is_contiguous():
            straight.append(BoxRequest(tensor.key, tensor.box, as_bytes(tensor.data)))
        else:
            staged.append(tensor)
    if straight:
        source.read(straight)
    for batch in _batches(staged):
        specs = [source.tensors[tensor.key] for tensor in batch]
        boxes = [
            tensor.box.intersect(Box.whole(spec.shape))
            for tensor, spec in zip(batch, specs, strict=True)
        ]
        buffers = [
            torch.empty(
                box.shape if box else 0,
                dtype=torch_dtype(spec.dtype),
                pin_memory=tensor.data.is_cuda,
            )
            for tensor, spec, box in zip(batch, specs, boxes, strict=True)
        ]
        source.read([
            BoxRequest(tensor.key, box, as_bytes(buffer))
            for tensor, box, buffer in zip(batch, boxes, buffers, strict=True)
            if box
        ])  # fmt: skip
        with torch.no_grad():
            for tensor, box, buffer in zip(batch, boxes, buffers, strict=True):
                if box == tensor.box:
                    tensor.data.copy_(buffer)
                    continue
                tensor.data.zero_()
                if box:
                    tensor.data[box.within(tensor.box).slices].copy_(buffer)


def _fits(tensor: LiveTensor, spec: TensorSpec, resize: Collection[str]) -> bool:
    """Whether a tensor can be filled from a source's of this shape."""
    if spec.shape == tensor.global_shape:
        return True
    kind, _, name = tensor.key.partition("/")
    parameter = name.rpartition("/")[0] if kind == "optim" else name
    return parameter in resize and len(spec.shape) == len(tensor.global_shape)


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
