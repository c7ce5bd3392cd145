"""Converts a checkpoint: any format that is read, to any that is written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from keepstep.checkpoint.convert.read.deepspeed_files import DEEPSPEED
from keepstep.checkpoint.convert.read.files import ForeignFiles
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.opening import files_of
from keepstep.checkpoint.convert.read.zip_checksums import CheckedBytes
from keepstep.checkpoint.convert.write.opened import Checkpoint
from keepstep.checkpoint.convert.write.parallel import Start, run_in_processes
from keepstep.checkpoint.convert.write.pieces_of_files import Piece
from keepstep.checkpoint.convert.write.planned_folder import (
    PlannedFile,
    Report,
    write_file,
    write_folder,
)
from keepstep.checkpoint.convert.write.renaming import RenamedSource
from keepstep.checkpoint.convert.write.request import ConversionRequest, seen_in
from keepstep.checkpoint.convert.write.safetensors_target import (
    are_weights,
    hugging_face_files,
    model_left_out,
    safetensors_file,
)
from keepstep.checkpoint.convert.write.selection import MODEL, Selection
from keepstep.checkpoint.convert.write.state_parts import parts_of, unknown_tie_lines
from keepstep.checkpoint.convert.write.universal import (
    UniversalParts,
    attempt_for,
    run_here,
    write_universal,
)
from keepstep.checkpoint.convert.write.verification import check_tensors
from keepstep.checkpoint.convert.write.zero_layout import ZeroLayout
from keepstep.checkpoint.errors import FormatUnsupported
from keepstep.checkpoint.format.layout.documents import (
    CONFIG,
    GROUPS,
    MASTERS,
    SCALARS,
    TIED,
    VALUES,
)
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.location import Format
from keepstep.checkpoint.format.layout.source import Source, TensorSpec


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
    """The result of a conversion.

    Attributes:
        step: number of completed optimizer steps.
        tensors: how many tensors.
        nbytes: how many bytes of tensors.
        left_out: names of the source that the target does not have, each with the reason.
        checked: the bytes of tensors in another tool's files, and how many match checksums.
    """

    step: int
    tensors: int
    nbytes: int
    left_out: tuple[str, ...]
    checked: CheckedBytes


_FILES = (Target.SAFETENSORS, Target.TORCH_SAVE)
_MODELS_ONLY = (Target.SAFETENSORS, Target.HUGGING_FACE)
_DEEPSPEED = (Target.DEEPSPEED, Target.DEEPSPEED_UNIVERSAL)
_WITH_OWN_MASTERS = (*_DEEPSPEED, Target.MEGATRON_CORE)
"""Formats that have the masters of all parameters, however wide these are."""
_COPIED_NAMES = frozenset(
    {
        "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json",
        "merges.txt", "preprocessor_config.json", "processor_config.json",
        "special_tokens_map.json", "spiece.model", "tokenizer.json", "tokenizer.model",
        "tokenizer_config.json", "vocab.json", "vocab.txt",
    }
)  # fmt: skip
_MOST_COPIED_NBYTES = 2**28
_IN_DEEPSPEED = frozenset({DEEPSPEED, GROUPS, MASTERS, SCALARS, TIED, VALUES})


def holds_models_only(target: Target) -> bool:
    """Return whether a format holds nothing but models."""
    return target in _MODELS_ONLY


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
    opened: Checkpoint,
    origin: str,
    url: str,
    target: Target,
    chosen: Selection,
    *,
    memory_nbytes: int,
    zero: ZeroLayout | None = None,
    report: Report = lambda nbytes: None,
    workers: int = 1,
    request: ConversionRequest | None = None,
) -> Converted:
    """Write a checkpoint in a format, and compare what was written with what was read.

    Another tool's tensors are compared with the checksums that there are before anything is
    written.

    Args:
        url: where to write; nothing there is replaced.
        chosen: what of the checkpoint to write; see `selection`.
        memory_nbytes: how much memory tensors may take.
        zero: the stage and ranks of DeepSpeed's engines that are to load it.
        report: called with bytes of tensors that were checked or written, perhaps from several
            threads.
        workers: how many processes; more than one for the universal format only.
        request: what `chosen` was made from, which more than one process needs; a conversion that
            was interrupted is taken up by one of an equal request.

    Raises:
        CheckpointExists: the target has such a checkpoint.
        FormatUnsupported: the target's format is written by one process.
        LayoutMismatch: the target's format cannot hold a tensor.
        CheckpointDamaged: the source is damaged, or what was written is not what was read.
        CheckpointError: a read or a write failed.
    """
    left_out = left_out_of(opened, chosen, target, request)
    if workers > 1 and target != Target.UNIVERSAL:
        raise FormatUnsupported(
            f"{target} is written by one process: leave out --workers, or convert to keepstep's "
            "format"
        )
    foreign = _foreign(chosen)
    checked = CheckedBytes()
    if foreign is not None:
        # Rules keep the names of the parts.
        prefix = f"{MODEL}/" if chosen.only_model else ""
        keys = [key for key in foreign.foreign_tensors if key.startswith(prefix)]
        checked = check_tensors(foreign, keys, report)
    if target == Target.UNIVERSAL:
        _write_universal(
            opened, origin, chosen, url, memory_nbytes, report, workers=workers, request=request
        )
    elif target in _FILES:
        pieces = _pieces_of_file(chosen, target)
        write_file(url, pieces, memory_nbytes=memory_nbytes, report=report)
    else:
        write_folder(
            url,
            _files_of_folder(chosen, target, zero or ZeroLayout(), request),
            memory_nbytes=memory_nbytes,
            report=report,
            is_of_another=are_weights if target == Target.HUGGING_FACE else lambda name: True,
        )
    return Converted(
        step=chosen.step,
        tensors=len(chosen.tensors),
        nbytes=nbytes_of(chosen.tensors.values()),
        left_out=tuple(left_out),
        checked=checked,
    )


def _foreign(source: Source) -> ForeignCheckpoint | None:
    """Return the checkpoint of another tool that is read from, if it is one."""
    while isinstance(source, Selection | RenamedSource):
        source = source.whole
    return source if isinstance(source, ForeignCheckpoint) else None


def _pieces_of_file(chosen: Selection, target: Target) -> tuple[Piece, ...]:
    """Return the pieces of the file that a checkpoint is in a format of one file."""
    if target == Target.SAFETENSORS:
        return safetensors_file(chosen)
    # Loaded only here: it loads PyTorch.
    from keepstep.checkpoint.convert.write.torch_target import torch_file

    return torch_file(chosen, only_model=chosen.only_model)


def _files_of_folder(
    chosen: Selection, target: Target, zero: ZeroLayout, request: ConversionRequest | None
) -> Sequence[PlannedFile]:
    """Return the files of the folder that a checkpoint is in a format of several files."""
    if target == Target.HUGGING_FACE:
        copied = {
            name: files.read(name, _MOST_COPIED_NBYTES) for name, files in _copied_files(request)
        }
        return hugging_face_files(chosen, copied)
    # Loaded only here: they load PyTorch.
    from keepstep.checkpoint.convert.write.dcp_target import dcp_files
    from keepstep.checkpoint.convert.write.deepspeed_target import deepspeed_files
    from keepstep.checkpoint.convert.write.deepspeed_universal_target import (
        deepspeed_universal_files,
    )
    from keepstep.checkpoint.convert.write.megatron_target import megatron_files
    from keepstep.checkpoint.convert.write.torchtitan_target import torchtitan_files

    match target:
        case Target.DCP:
            return dcp_files(chosen)
        case Target.TORCHTITAN:
            return torchtitan_files(chosen)
        case Target.MEGATRON_CORE:
            return megatron_files(chosen)
        case Target.DEEPSPEED:
            return deepspeed_files(chosen, zero)
        case _:
            return deepspeed_universal_files(chosen, zero)


def _write_universal(
    opened: Checkpoint,
    origin: str,
    chosen: Selection,
    url: str,
    memory_nbytes: int,
    report: Report,
    *,
    workers: int,
    request: ConversionRequest | None,
) -> None:
    # Of other tensors, as after other rules, an attempt would keep arrays that are not its own.
    identity = [
        origin,
        opened.format_name,
        chosen.only_model,
        chosen.model_dtype,
        seen_in(chosen),
        None if request is None else request.spelling(),
    ]
    attempt_name = attempt_for(url, chosen.step, json.dumps(identity))
    parts = UniversalParts(chosen, url, attempt_name=attempt_name, memory_nbytes=memory_nbytes)
    with ExitStack() as processes:
        run = run_here(parts, report)
        if workers > 1 and request is not None:
            start = Start(
                request=request,
                seen=seen_in(chosen),
                url=url,
                attempt_name=attempt_name,
                memory_nbytes=memory_nbytes,
                part_nbytes=parts.part_nbytes,
            )
            run = processes.enter_context(run_in_processes(start, workers, report))
        write_universal(
            parts,
            chosen.documents,
            run=run,
            converted_from=opened.format_name,
            now=datetime.now(UTC),
        )


def _copied_files(request: ConversionRequest | None) -> list[tuple[str, ForeignFiles]]:
    """Return the files of a folder of Hugging Face that go with its weights as they are."""
    location = None if request is None else request.location
    if location is None or location.format not in (Format.HUGGING_FACE, Format.TRAINER):
        return []
    files = files_of(location)
    return [(name, files) for name in files.names if name in _COPIED_NAMES]


def left_out_of(
    opened: Checkpoint, chosen: Selection, target: Target, request: ConversionRequest | None = None
) -> list[str]:
    """Return what of a checkpoint is read by no reader, not selected, or not in the format.

    Each line has a name and the reason.
    """
    copied = _copied_files(request) if target == Target.HUGGING_FACE else []
    kept = {name for name, _ in copied}
    lines = [f"{item.name}: {item.reason}" for item in opened.left_out if item.name not in kept]
    lines += [f"{name}: only the model is converted" for name in chosen.left_out()]
    if target not in _WITH_OWN_MASTERS:
        lines += [
            f"{MASTERS}/{name}: the parameter is {chosen.model_dtype} now, which is as wide as its "
            f"{chosen.masters[name]['slot']}; that remains a slot of the optimizer"
            for name in chosen.matched_masters()
        ]
    if target in _MODELS_ONLY:
        lines += model_left_out(chosen, has_config=target == Target.HUGGING_FACE)
    elif target == Target.TORCH_SAVE:
        # Loaded only here: it loads PyTorch.
        from keepstep.checkpoint.convert.write.torch_target import torch_left_out

        lines += torch_left_out(chosen, only_model=chosen.only_model)
    elif target != Target.UNIVERSAL:
        lines += unknown_tie_lines(parts_of(chosen))
        if target == Target.MEGATRON_CORE:
            # Loaded only here: it loads PyTorch.
            from keepstep.checkpoint.convert.write.megatron_target import megatron_left_out

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


def work_nbytes(chosen: Selection, target: Target) -> int:
    """Return how many bytes `convert` reports in all."""
    # Another tool's are checked, and those of keepstep's format read again: each takes as long.
    times = 1 + (_foreign(chosen) is not None) + (target == Target.UNIVERSAL)
    return times * nbytes_of(chosen.tensors.values())


def nbytes_of(specs: Iterable[TensorSpec]) -> int:
    """Return the bytes of tensors."""
    total = 0
    for spec in specs:
        nbytes = numpy_dtype(spec.dtype).itemsize
        for extent in spec.shape:
            nbytes *= extent
        total += nbytes
    return total
