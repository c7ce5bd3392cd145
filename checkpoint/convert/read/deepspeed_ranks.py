"""Reads checkpoints of DeepSpeed: each rank of model parallelism by itself, merged into one.

Tensors of the ranks of tensor parallelism are joined as the files say
(`keepstep.checkpoint.convert.read.deepspeed_cuts`), or rules of the user. Stages of a pipeline have
tensors of their own; of a tied parameter that several have, the first one's counts: DeepSpeed sums
its gradients in each stage, which may round differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from keepstep.checkpoint.convert.read.contents import MASTER_SLOT
from keepstep.checkpoint.convert.read.deepspeed_cuts import UniversalInfo, universal_info
from keepstep.checkpoint.convert.read.deepspeed_differences import buffer_differences, differences
from keepstep.checkpoint.convert.read.deepspeed_files import (
    ModelFile,
    OptimizerFile,
    left_out_files,
    model_files,
    optimizer_files,
    optimizer_names,
)
from keepstep.checkpoint.convert.read.deepspeed_layers import (
    layer_names,
    read_layers,
    stage_modules,
)
from keepstep.checkpoint.convert.read.deepspeed_zero import names_of_slices, read_model_rank
from keepstep.checkpoint.convert.read.files import ForeignFiles, damaged
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint, LeftOut
from keepstep.checkpoint.convert.read.pieces import ForeignTensor, whole
from keepstep.checkpoint.convert.read.rank_tensors import array_of_box, joined, mean
from keepstep.checkpoint.convert.read.safe_repr import safe_repr
from keepstep.checkpoint.convert.rules.planning import keys_by_name, shape_of
from keepstep.checkpoint.convert.rules.rank_merges import REPLICATED, ShardMerge, merge_of
from keepstep.checkpoint.convert.rules.rank_shards import RankRules, join_ranks
from keepstep.checkpoint.errors import FormatUnsupported
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.documents import GROUPS, MASTERS, PADDING, SCALARS, TIED
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX, OPTIMIZER_PREFIX
from keepstep.checkpoint.format.layout.parameter_order import ParameterNames
from keepstep.checkpoint.format.layout.source import TensorSpec

_DIMENSIONS = "checkpoint_parallel_dimensions"
_BY_PARAMETER = (MASTERS, SCALARS, TIED)
"""Documents with an entry for each parameter, which ranks and stages have of their own."""


@dataclass(frozen=True, slots=True)
class ModelRank:
    """The state of a rank of model parallelism, and the file with its module."""

    checkpoint: ForeignCheckpoint
    file: ModelFile


@dataclass(frozen=True, slots=True)
class Stage:
    """The state of a pipeline's stage; the whole state without a pipeline."""

    tensors: Mapping[str, ForeignTensor]
    documents: Mapping[str, Json]
    left_out: Sequence[LeftOut]


def read_deepspeed(
    files: ForeignFiles,
    parameter_names: ParameterNames = None,
    rank_rules: RankRules | None = None,
) -> ForeignCheckpoint:
    """Return the checkpoint of a folder such as `global_step1000`.

    Args:
        parameter_names: see `add_optimizer_state`; ZeRO's files have names of their own.
        rank_rules: how tensor parallelism cut the parameters, if the files do not say it.

    Raises:
        CheckpointMissing: a rank's file is not there.
        CheckpointDamaged: files contradict themselves or each other.
        FormatUnsupported: nothing says how parameters were cut, or it has experts.
        RulesInvalid: the rules do not fit the tensors.
    """
    models = model_files(files)
    optimizers = optimizer_files(files)
    if not models:
        raise damaged(files.url, "no file there has the module's state")
    if optimizers and len(optimizers) != len(models):
        raise damaged(
            files.url,
            f"{len(models)} model ranks have files of modules, and {len(optimizers)} of optimizers",
        )
    layers = layer_names(files)
    stages, ranks = parallel_degrees(models, len(layers))
    if layers:
        models = _with_modules(files, models, optimizers, layers, stages, ranks)
    if not any(row[0].module or row[0].trained for row in models):
        raise damaged(
            models[0][0].location, "neither it nor a file of layers has the module's state"
        )
    # Names in order are those of one optimizer, and each stage has its own.
    names = parameter_names if stages == 1 else None
    model_ranks = [
        ModelRank(read_model_rank(files.url, row, optimizers_of_rank, names), row[0])
        for row, optimizers_of_rank in zip(models, optimizers or [[] for _ in models], strict=True)
    ]
    whole_checkpoint = join_model_ranks(files.url, model_ranks, stages, ranks, rank_rules)
    opened = {name for row in optimizer_names(files) for name in row}
    opened.update(name for row in layers.values() for name in row.values())
    return replace(
        whole_checkpoint,
        left_out=(
            *whole_checkpoint.left_out,
            *left_out_of_ranks(models),
            *left_out_files(files, opened),
        ),
    )


def parallel_degrees(models: Sequence[Sequence[ModelFile]], layer_ranks: int) -> tuple[int, int]:
    """Return the number of a pipeline's stages, and of ranks of tensor parallelism.

    Args:
        models: the modules' files, by model rank.
        layer_ranks: the ranks that have files of layers; 0 without such files.

    Raises:
        CheckpointDamaged: they contradict each other.
    """
    first = models[0][0]
    said = first.content.get(_DIMENSIONS)
    if isinstance(said, dict):
        stages, ranks = said.get("pp_degree"), said.get("tp_degree")
        for row in models:
            if row[0].content.get(_DIMENSIONS) != said:
                raise damaged(
                    row[0].location,
                    f"its {_DIMENSIONS} is {safe_repr(row[0].content.get(_DIMENSIONS))}, and that "
                    f"of {first.location} is {safe_repr(said)}",
                )
    else:
        ranks = layer_ranks or len(models)
        stages = len(models) // ranks
    if (
        type(stages) is not int
        or type(ranks) is not int
        or min(stages, ranks) < 1
        or stages * ranks != len(models)
        or layer_ranks not in (0, ranks)
    ):
        raise damaged(
            first.location,
            f"there are {safe_repr(stages)} stages of a pipeline and {safe_repr(ranks)} ranks of "
            f"tensor parallelism, and files of {len(models)} model ranks and of {layer_ranks} "
            "ranks with layers",
        )
    return stages, ranks


def left_out_of_ranks(models: Sequence[Sequence[ModelFile]]) -> list[LeftOut]:
    """Return what is not carried of the ranks' modules' files, where they differ."""
    return [
        *differences([file for row in models for file in row]),
        *(left for row in models for left in buffer_differences(row)),
    ]


def join_model_ranks(
    url: str,
    model_ranks: Sequence[ModelRank],
    stages: int,
    ranks: int,
    rank_rules: RankRules | None = None,
) -> ForeignCheckpoint:
    """Return the checkpoint that all model ranks have together.

    Args:
        model_ranks: the ranks of tensor parallelism of the first stage, then of the next.
        rank_rules: as for `read_deepspeed`.

    Raises:
        CheckpointDamaged: they contradict each other.
        FormatUnsupported: nothing says how parameters were cut.
        RulesInvalid: the rules do not fit the tensors.
    """
    first = model_ranks[0].checkpoint
    joined_stages = [
        _joined_ranks(model_ranks[stage * ranks : (stage + 1) * ranks], rank_rules)
        for stage in range(stages)
    ]
    tensors: dict[str, ForeignTensor] = {}
    for stage in joined_stages:
        for key, tensor in stage.tensors.items():
            own = tensors.setdefault(key, tensor)
            if own.spec != tensor.spec:
                raise damaged(
                    url, f"stages of its pipeline have {key} as {own.spec} and as {tensor.spec}"
                )
    degrees = [f"{n} {what}" for n, what in ((ranks, "tensor-parallel ranks"), (stages, "stages"))]
    degree_texts = [text for n, text in zip((ranks, stages), degrees, strict=True) if n > 1]
    return ForeignCheckpoint(
        url=url,
        format_name=", ".join([first.format_name, *degree_texts]),
        step=first.step,
        foreign_tensors=tensors,
        documents=_documents_of_stages([stage.documents for stage in joined_stages]),
        left_out=tuple(dict.fromkeys(left for stage in joined_stages for left in stage.left_out)),
    )


def _with_modules(
    files: ForeignFiles,
    models: Sequence[Sequence[ModelFile]],
    optimizers: Sequence[Sequence[OptimizerFile]],
    layers: Mapping[int, Mapping[int, str]],
    stages: int,
    ranks: int,
) -> list[list[ModelFile]]:
    """Return the modules' files with the modules that a pipeline has in files of layers."""
    changed = [list(row) for row in models]
    for rank in range(ranks):
        of_rank = [stage * ranks + rank for stage in range(stages)]
        trained = [
            models[n][0].trained or names_of_slices(optimizers[n] if optimizers else ())
            for n in of_rank
        ]
        modules = stage_modules(read_layers(files, layers[rank]), trained, files.url)
        for model_rank, module in zip(of_rank, modules, strict=True):
            changed[model_rank][0] = replace(models[model_rank][0], module=module)
    return changed


def _joined_ranks(model_ranks: Sequence[ModelRank], rank_rules: RankRules | None) -> Stage:
    """Return what the ranks of tensor parallelism of one stage have together."""
    checkpoints = [rank.checkpoint for rank in model_ranks]
    first = checkpoints[0]
    left_out = [left for checkpoint in checkpoints for left in checkpoint.left_out]
    if len(checkpoints) == 1:
        return Stage(first.foreign_tensors, first.documents, left_out)
    for model_rank in model_ranks:
        lacking = first.foreign_tensors.keys() ^ model_rank.checkpoint.foreign_tensors.keys()
        for key in sorted(key for key in lacking if _is_of_model(key)):
            raise damaged(
                model_rank.file.location,
                f"of {key} and {model_ranks[0].file.location} only one has it",
            )
    specs = [
        {key: spec for key, spec in checkpoint.tensors.items() if _is_of_model(key)}
        for checkpoint in checkpoints
    ]
    info = universal_info(
        model_ranks[0].file.location, model_ranks[0].file.content, len(model_ranks)
    )
    documents = _documents_of_ranks(model_ranks)
    # What the tool itself wrote counts first: rules may be a preset, of another tool's cuts.
    if info is None and rank_rules is not None:
        merges = join_ranks(rank_rules, specs)
    else:
        buffers = model_ranks[0].file.buffers
        if info is None and not buffers.issuperset(keys_by_name(specs[0])):
            raise _not_said(model_ranks, specs)
        said = info or UniversalInfo(model_ranks[0].file.location, {}, len(model_ranks))
        merges = _joinings_of_info(said, specs, buffers)
    tensors = {
        # What is of neither the model nor its optimizer is compared by `differences`.
        key: joined(key, merges[key], _of_all(key, checkpoints)) if key in merges else tensor
        for key, tensor in first.foreign_tensors.items()
    }
    _round_means(tensors, merges, checkpoints)
    if info is not None and info.vocabulary_size is not None:
        documents[PADDING] = {
            f"{MODEL_PREFIX}{name}": {"logical_shape": [info.vocabulary_size, *shape[1:]]}
            for name, shape in _model_shapes(tensors)
            if info.is_vocabulary(name) and shape and shape[0] > info.vocabulary_size
        }
        if not documents[PADDING]:
            del documents[PADDING]
    return Stage(tensors, documents, left_out)


def _joinings_of_info(
    info: UniversalInfo, specs: Sequence[Mapping[str, TensorSpec]], buffers: frozenset[str]
) -> dict[str, ShardMerge]:
    """Return how tensors consist of those of ranks, as the files say."""
    merges: dict[str, ShardMerge] = {}
    for name, keys in keys_by_name(specs[0]).items():
        shapes = [shape_of(keys, of_rank) for of_rank in specs]
        merge = info.merge(name, shapes, is_buffer=name in buffers)
        for key in keys.values():
            own = [of_rank[key].shape for of_rank in specs]
            # A step, or another value that belongs to the whole parameter, is the same on all.
            merges[key] = merge if own == shapes else merge_of(REPLICATED, own)
    return merges


def _round_means(
    tensors: dict[str, ForeignTensor],
    merges: Mapping[str, ShardMerge],
    checkpoints: Sequence[ForeignCheckpoint],
) -> None:
    """Make parameters with averaged masters the rounded means of these."""
    for key, merge in merges.items():
        name = key.removeprefix(MODEL_PREFIX)
        master = f"{OPTIMIZER_PREFIX}{name}/{MASTER_SLOT}"
        if key.startswith(MODEL_PREFIX) and merge.is_mean and master in tensors:
            copies = _of_all(master, checkpoints)
            box = Box.whole(merge.shape)
            arrays = tuple(array_of_box(master, copies[rank], box) for rank in copies)
            tensors[key] = whole(mean(arrays, tensors[key].spec.dtype))


def _not_said(
    model_ranks: Sequence[ModelRank], specs: Sequence[Mapping[str, TensorSpec]]
) -> FormatUnsupported:
    """Return the error for tensor-parallel ranks whose parts nothing describes."""
    names = sorted(keys_by_name(specs[0]))
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return FormatUnsupported(
        f"{model_ranks[1].file.location}: {len(model_ranks)} ranks of tensor parallelism have "
        f"{len(names)} parameters and buffers ({shown}), and the files have no "
        "universal_checkpoint_info that says how they were cut; convert it with --rules FILE, in "
        "which each rule says replicated = true, shard = DIMENSION (of several parts with `parts`) "
        "or average = true, or load it with the script that trained it and save whole parameters"
    )


def _documents_of_ranks(model_ranks: Sequence[ModelRank]) -> dict[str, Json]:
    """Return the documents of ranks that have the same parameters."""
    first = model_ranks[0]
    merged = dict(first.checkpoint.documents)
    for other in model_ranks[1:]:
        documents = other.checkpoint.documents
        for name in _BY_PARAMETER:
            own = merged.get(name, {})
            for key, value in documents.get(name, {}).items():
                if own.get(key, value) != value:
                    raise damaged(
                        other.file.location,
                        f"{name}: its {key} is {safe_repr(value)}, and that of "
                        f"{first.file.location} is {safe_repr(own[key])}",
                    )
            if own or documents.get(name):
                merged[name] = {**documents.get(name, {}), **own}
        groups = [[group["parameters"] for group in d.get(GROUPS, [])] for d in (merged, documents)]
        if groups[0] != groups[1]:
            raise damaged(
                other.file.location,
                f"its optimizer has other groups than that of {first.file.location}",
            )
    return merged


def _documents_of_stages(documents: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Return the documents of all stages: what is said of the whole model is the first one's."""
    merged: dict[str, Json] = dict(documents[0])
    if len(documents) == 1:
        return merged
    groups: list[Json] = []
    placed: set[str] = set()
    for stage in documents:
        # One for each: two groups of one stage stay two, whatever their options.
        left = list(groups)
        for name in (*_BY_PARAMETER, PADDING):
            if name in stage:
                merged[name] = {**stage[name], **merged.get(name, {})}
        for group in stage.get(GROUPS, []):
            own = [name for name in group["parameters"] if name not in placed]
            placed.update(own)
            same = next((g for g in left if g["options"] == group["options"]), None)
            if same is not None:
                left.remove(same)
                same["parameters"].extend(own)
            else:
                groups.append({**group, "parameters": own})
    if groups:
        merged[GROUPS] = groups
    return merged


def _of_all(key: str, checkpoints: Sequence[ForeignCheckpoint]) -> dict[int, ForeignTensor]:
    return {rank: c.foreign_tensors[key] for rank, c in enumerate(checkpoints)}


def _model_shapes(
    tensors: Mapping[str, ForeignTensor],
) -> Iterator[tuple[str, tuple[int, ...]]]:
    for key, tensor in tensors.items():
        if key.startswith(MODEL_PREFIX):
            yield key.removeprefix(MODEL_PREFIX), tensor.spec.shape


def _is_of_model(key: str) -> bool:
    return key.startswith((MODEL_PREFIX, OPTIMIZER_PREFIX))
