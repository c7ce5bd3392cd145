"""Finds the files of Megatron-LM's ranks, and reads model and optimizer of each.

A file `mp_rank_TT[_PPP]/model_optim_rng.pt` has what one rank of tensor and pipeline parallelism
has. Layers are numbered within the rank's chunk of the model, and the optimizer numbers parameters
within the rank.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.checkpoint.convert.read.arrays import FileArray
from keepstep.checkpoint.convert.read.contents import MASTER_SLOT, mapping_of
from keepstep.checkpoint.convert.read.files import ForeignFiles, damaged
from keepstep.checkpoint.convert.read.megatron_settings import (
    OUTPUT_LAYER,
    arguments_of,
    groups_in,
    members_by_rules,
    optimizers_in,
)
from keepstep.checkpoint.convert.read.safe_repr import safe_repr
from keepstep.checkpoint.convert.read.torch_file import read_torch_file
from keepstep.checkpoint.errors import FormatUnsupported

_FILE = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?/model_(?:optim_)?rng\.pt")
_LAYER = re.compile(r"((?:.+\.)?layers\.)(\d+)(\..+)")
_HALVES = ("float16", "bfloat16")
_LEAST_VERSION = 2


class Unnamed(Exception):
    """The parameters of an optimizer are unknown; the message says why."""


@dataclass(frozen=True, slots=True)
class RankFile:
    """The content of one rank's file.

    Attributes:
        location: URL of the file.
        name: the file's name.
        content: all of it.
        arguments: Megatron's.
    """

    location: str
    name: str
    content: Mapping[str, Any]
    arguments: Mapping[str, Any]

    @property
    def chunks(self) -> list[dict[str, object]]:
        """The rank's chunks of the model, each by names within it."""
        numbered = sorted(
            (int(key.removeprefix("model")), key)
            for key in self.content
            if re.fullmatch(r"model\d+", key)
        )
        keys = ["model"] if "model" in self.content else [key for _, key in numbered]
        return [dict(_flat(self.content[key])) for key in keys]


def rank_files(files: ForeignFiles) -> list[list[RankFile]]:
    """Return what the files have, by stage of the pipeline, and then by rank of tensor parallelism.

    Raises:
        CheckpointMissing: one of the files is not there.
        CheckpointDamaged: they are of other ranks than they say.
        FormatUnsupported: experts are in files of their own, or it is too old.
    """
    names: dict[tuple[int, int], str] = {}
    for name in files.names:
        match = _FILE.fullmatch(name)
        if match is None:
            continue
        if match[3] is not None:
            raise FormatUnsupported(f"{files.url}/{name}: {_EXPERTS}")
        names[int(match[2] or 0), int(match[1])] = name
    stages = max((stage for stage, _ in names), default=-1) + 1
    ranks = max((rank for _, rank in names), default=-1) + 1
    if not names:
        raise damaged(files.url, "it has no mp_rank_*/model_optim_rng.pt")
    found: list[list[RankFile]] = []
    for stage in range(stages):
        found.append([])
        for rank in range(ranks):
            name = names.get((stage, rank)) or _name_like(next(iter(names.values())), stage, rank)
            found[stage].append(_opened(files, name, ranks, stages))
    return found


_EXPERTS = (
    "the experts of each rank are in a file of its own, which is not read; load it with "
    "Megatron-LM, and save it with --ckpt-format torch_dist"
)


def _name_like(name: str, stage: int, rank: int) -> str:
    directory, _, file = name.partition("/")
    is_staged = directory.count("_") > 2
    return f"mp_rank_{rank:02d}{f'_{stage:03d}' if is_staged else ''}/{file}"


def _opened(files: ForeignFiles, name: str, ranks: int, stages: int) -> RankFile:
    file = files.file(name)
    content = mapping_of(read_torch_file(file.whole))
    opened = RankFile(file.location, name, content, arguments_of(content.get("args")))
    if not opened.chunks:
        raise damaged(file.location, "it has no model")
    if (opened.arguments.get("expert_model_parallel_size") or 1) != 1:
        raise FormatUnsupported(f"{file.location}: {_EXPERTS}")
    version = content.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < _LEAST_VERSION:
        raise FormatUnsupported(
            f"{file.location}: its checkpoint_version is {safe_repr(version)}, which orders the "
            "rows of attention otherwise; load it with Megatron-LM, and save it again"
        )
    for argument, kind, count in (
        ("tensor_model_parallel_size", "tensor", ranks),
        ("pipeline_model_parallel_size", "pipeline", stages),
    ):
        said = opened.arguments.get(argument)
        if type(said) is int and said != count:
            raise damaged(
                file.location,
                f"it is of one of {said} ranks of {kind} parallelism, and there are files of "
                f"{count}",
            )
    return opened


def _flat(value: object, before: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield what a module's state has by full names; before Megatron-Core it was nested."""
    for name, item in mapping_of(value).items():
        if isinstance(item, dict) and depth < 8:
            yield from _flat(item, f"{before}{name}.", depth + 1)
        else:
            yield f"{before}{name}", item


def layers_of(chunk: Mapping[str, object]) -> int:
    """Return how many layers a chunk of the model has.

    Raises:
        ValueError: their numbers have gaps; the message says so.
    """
    numbers = {int(match[2]) for name in chunk if (match := _LAYER.fullmatch(name))}
    if numbers != set(range(len(numbers))):
        raise ValueError(f"it has the layers {sorted(numbers)}")
    return len(numbers)


def with_first_layer(name: str, first: int) -> str:
    """Return a name with its layer's number counted over all stages."""
    match = _LAYER.fullmatch(name)
    return name if match is None else f"{match[1]}{int(match[2]) + first}{match[3]}"


def state_of(file: RankFile, parameters: Mapping[str, FileArray]) -> dict[str, object]:
    """Return what a rank's optimizer has, by `optim/<name>/<slot>`.

    Args:
        parameters: what the rank has of the model, in the module's order, under global names.

    Raises:
        Unnamed: nothing tells which parameter is which.
    """
    found: dict[str, object] = {}
    for optimizer in optimizers_in(file.content.get("optimizer")):
        inner = optimizer if "state" in optimizer else mapping_of(optimizer.get("optimizer"))
        state = inner.get("state")
        groups = groups_in(optimizer)
        if not isinstance(state, dict) or not state:
            raise Unnamed(
                "the optimizer's state is not in it: that of a distributed optimizer is in "
                "buffers, which do not say what they have; save with --ckpt-format torch_dist"
            )
        members = members_by_rules(groups, {n: a.shape for n, a in parameters.items()})
        numbers = [group.get("params") for group in groups]
        if members is None or [len(names) for names in members] != [
            len(listed) if isinstance(listed, list) else -1 for listed in numbers
        ]:
            raise Unnamed("its groups have other parameters than Megatron's rules give them")
        for names, listed in zip(members, numbers, strict=True):
            for name, number in zip(names, listed or (), strict=True):
                for slot, value in mapping_of(state.get(number)).items():
                    found[f"optim/{name}/{slot}"] = value
        for names, listed in zip(members, _masters(optimizer), strict=False):
            halves = [name for name in names if parameters[name].dtype in _HALVES]
            if len(halves) != len(listed):
                raise Unnamed("its groups have other parameters than Megatron's rules give them")
            for name, value in zip(halves, listed, strict=True):
                found[f"optim/{name}/{MASTER_SLOT}"] = value
    for key, value in found.items():
        name = key.removeprefix("optim/").rpartition("/")[0]
        if isinstance(value, FileArray) and value.shape not in ((), parameters[name].shape):
            raise Unnamed(
                f"{key} has shape {value.shape}, and the parameter {parameters[name].shape}"
            )
    return found


def _masters(optimizer: Mapping[str, Any]) -> list[Sequence[object]]:
    listed = optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16"))
    if not isinstance(listed, list):
        return []
    return [group if isinstance(group, list) else [] for group in listed]


def first_layers(counts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the number of the first layer of each stage's chunks.

    Chunks of interleaved stages follow each other: all stages' first ones, then the second ones.

    Args:
        counts: how many layers each stage's chunks have.
    """
    ends = itertools.accumulate(
        (stage[chunk] for chunk in range(len(counts[0])) for stage in counts), initial=0
    )
    starts = list(ends)
    return [
        [starts[chunk * len(counts) + stage] for chunk in range(len(counts[0]))]
        for stage in range(len(counts))
    ]


def is_copy_of_embeddings(name: str, stage: int, arguments: Mapping[str, Any]) -> bool:
    """Return whether a tensor is the last stage's copy of the embeddings on the first."""
    is_tied = arguments.get("untie_embeddings_and_output_weights") is False
    return (is_tied and stage > 0 and name == OUTPUT_LAYER) or "word_embeddings_for_head" in name
