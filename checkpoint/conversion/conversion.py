"""Converts a checkpoint: any format that is read, to any that is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from keepstep.checkpoint.conversion.opened import Opened
from keepstep.checkpoint.conversion.safetensors_target import (
    model_left_out,
    write_hugging_face,
    write_safetensors,
)
from keepstep.checkpoint.conversion.selection import Selection
from keepstep.checkpoint.conversion.state_parts import parts_of, unknown_tie_lines
from keepstep.checkpoint.conversion.universal import write_universal
from keepstep.checkpoint.conversion.zero_layout import ZeroLayout
from keepstep.checkpoint.foreign.contents import VALUES
from keepstep.checkpoint.foreign.deepspeed_files import DEEPSPEED, MASTERS
from keepstep.checkpoint.layout.documents import CONFIG, GROUPS, SCALARS, TIED
from keepstep.checkpoint.layout.dtypes import numpy_dtype
from keepstep.checkpoint.layout.source import TensorSpec


class Target(StrEnum):
    """The formats that are written, by the names that `--to` takes."""

    UNIVERSAL = "keepstep"
    TORCH_SAVE = "torch"
    SAFETENSORS = "safetensors"
    HUGGING_FACE = "huggingface"
    DCP = "dcp"
    TORCHTITAN = "torchtitan"
    DEEPSPEED = "deepspeed"
    DEEPSPEED_UNIVERSAL = "deepspeed-universal"
    MEGATRON_CORE = "megatron-core"


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a conversion has written.

    Attributes:
        step: number of completed optimizer steps.
        tensors: how many tensors.
        nbytes: how many bytes of tensors.
        left_out: what the source has and the target does not, each with the reason.
    """

    step: int
    tensors: int
    nbytes: int
    left_out: tuple[str, ...]


_MODELS_ONLY = (Target.SAFETENSORS, Target.HUGGING_FACE)
_DEEPSPEED = (Target.DEEPSPEED, Target.DEEPSPEED_UNIVERSAL)
_IN_DEEPSPEED = frozenset({DEEPSPEED, GROUPS, MASTERS, SCALARS, TIED, VALUES})


def target_at(url: str) -> Target:
    """Return the format that a URL's ending stands for: the universal one if it has no other."""
    for ending, target in (
        (".safetensors", Target.SAFETENSORS),
        (".pt", Target.TORCH_SAVE),
        (".pth", Target.TORCH_SAVE),
        (".bin", Target.TORCH_SAVE),
    ):
        if url.endswith(ending):
            return target
    return Target.UNIVERSAL


def convert(
    opened: Opened,
    origin: str,
    url: str,
    target: Target,
    chosen: Selection,
    *,
    memory_nbytes: int,
    zero: ZeroLayout | None = None,
    report: Callable[[int], None] = lambda nbytes: None,
) -> Converted:
    """Write a checkpoint in a format, and compare what was written with what was read.

    Args:
        opened: the checkpoint.
        origin: its URL.
        url: where to write; nothing there is replaced.
        target: the format.
        chosen: what of the checkpoint to write; see `selection`.
        memory_nbytes: how much memory tensors may take.
        zero: the stage and ranks of DeepSpeed's engines that are to load it.
        report: called with bytes of tensors that were written, perhaps from several threads.

    Raises:
        CheckpointExists: the target has such a checkpoint.
        LayoutMismatch: the target's format cannot hold a tensor.
        CheckpointDamaged: the source is damaged, or what was written is not what was read.
        CheckpointError: a read or a write failed.
    """
    left_out = left_out_of(opened, chosen, target)
    if target == Target.UNIVERSAL:
        identity = json.dumps(
            [origin, opened.format_name, chosen.step, chosen.only_model, chosen.model_dtype]
        )
        write_universal(
            chosen,
            url,
            origin=identity,
            converted_from=opened.format_name,
            now=datetime.now(UTC),
            memory_nbytes=memory_nbytes,
            report=report,
        )
    elif target == Target.TORCH_SAVE:
        # Loaded only here: it loads PyTorch.
        from keepstep.checkpoint.conversion.torch_target import write_torch

        write_torch(
            chosen, url, only_model=chosen.only_model, memory_nbytes=memory_nbytes, report=report
        )
    elif target in (Target.DCP, Target.TORCHTITAN):
        # Loaded only here: they load PyTorch.
        from keepstep.checkpoint.conversion.dcp_target import write_dcp
        from keepstep.checkpoint.conversion.torchtitan_target import write_torchtitan

        write_folder = write_dcp if target == Target.DCP else write_torchtitan
        write_folder(chosen, url, memory_nbytes=memory_nbytes, report=report)
    elif target == Target.MEGATRON_CORE:
        # Loaded only here: it loads PyTorch.
        from keepstep.checkpoint.conversion.megatron_target import write_megatron

        write_megatron(chosen, url, memory_nbytes=memory_nbytes, report=report)
    elif target in _DEEPSPEED:
        # Loaded only here: they load PyTorch.
        from keepstep.checkpoint.conversion.deepspeed_target import write_deepspeed
        from keepstep.checkpoint.conversion.deepspeed_universal_target import (
            write_deepspeed_universal,
        )

        is_universal = target == Target.DEEPSPEED_UNIVERSAL
        write_zero = write_deepspeed_universal if is_universal else write_deepspeed
        layout = ZeroLayout() if zero is None else zero
        write_zero(chosen, url, layout, memory_nbytes=memory_nbytes, report=report)
    else:
        write = write_hugging_face if target == Target.HUGGING_FACE else write_safetensors
        write(chosen, url, memory_nbytes=memory_nbytes, report=report)
    return Converted(
        step=chosen.step,
        tensors=len(chosen.tensors),
        nbytes=nbytes_of(chosen.tensors.values()),
        left_out=tuple(left_out),
    )


def selection(
    opened: Opened, target: Target, *, only_model: bool, model_dtype: str | None
) -> Selection:
    """Return the part of a checkpoint that a conversion to a format writes.

    Args:
        opened: the checkpoint.
        target: the format; some hold nothing but models.
        only_model: leave out all but the model.
        model_dtype: data type of the model's floating-point tensors; None keeps theirs.

    Raises:
        LayoutMismatch: the data type is none that can be rounded to.
    """
    return Selection(
        whole=opened.source,
        only_model=only_model or target in _MODELS_ONLY,
        model_dtype=model_dtype,
    )


def left_out_of(opened: Opened, chosen: Selection, target: Target) -> list[str]:
    """Return what of a checkpoint is read by no reader, not selected, or not in the format.

    Each line has a name and the reason.
    """
    lines = [f"{item.name}: {item.reason}" for item in opened.left_out]
    lines += [f"{name}: only the model is converted" for name in chosen.left_out()]
    if target in _MODELS_ONLY:
        lines += model_left_out(chosen, has_config=target == Target.HUGGING_FACE)
    elif target == Target.TORCH_SAVE:
        # Loaded only here: it loads PyTorch.
        from keepstep.checkpoint.conversion.torch_target import torch_left_out

        lines += torch_left_out(chosen, only_model=chosen.only_model)
    elif target != Target.UNIVERSAL:
        lines += unknown_tie_lines(parts_of(chosen))
        if target == Target.MEGATRON_CORE:
            # Loaded only here: it loads PyTorch.
            from keepstep.checkpoint.conversion.megatron_target import megatron_left_out

            lines += megatron_left_out(chosen)
        if target in _DEEPSPEED:
            lines += [
                f"{name}: DeepSpeed's files have no place for it"
                for name in chosen.documents.keys() - _IN_DEEPSPEED
                if chosen.documents[name] not in ({}, [], None)
            ]
    return lines


def documents_of(chosen: Selection, target: Target) -> list[str]:
    """Return the names of the documents that a conversion to a format writes."""
    if target in _MODELS_ONLY:
        kept = frozenset({CONFIG} if target == Target.HUGGING_FACE else ())
    elif target == Target.TORCH_SAVE and chosen.only_model:
        kept = frozenset({TIED})
    elif target in _DEEPSPEED:
        kept = _IN_DEEPSPEED
    else:
        return sorted(chosen.documents)
    return sorted(kept & chosen.documents.keys())


def nbytes_of(specs: Iterable[TensorSpec]) -> int:
    """Return the bytes of tensors."""
    total = 0
    for spec in specs:
        nbytes = numpy_dtype(spec.dtype).itemsize
        for extent in spec.shape:
            nbytes *= extent
        total += nbytes
    return total
