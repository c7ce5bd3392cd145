"""Reads folders of Megatron-LM with a file for each rank of tensor and pipeline parallelism.

Rules join the tensors of a stage's ranks (`checkpoint.convert.rules.rank_shards`); the
layers of the stages follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keepstep.checkpoint.convert.read.arrays import FileArray
from keepstep.checkpoint.convert.read.contents import Contents, step_of
from keepstep.checkpoint.convert.read.files import ForeignFiles, damaged
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.megatron_rank_files import (
    RankFile,
    Unnamed,
    first_layers,
    is_copy_of_embeddings,
    layers_of,
    rank_files,
    state_of,
    with_first_layer,
)
from keepstep.checkpoint.convert.read.megatron_settings import (
    add_groups,
    add_settings,
    add_vocabulary,
    model_configuration,
    optimizers_in,
)
from keepstep.checkpoint.convert.read.pickled_json import described
from keepstep.checkpoint.convert.read.pieces import ForeignTensor, whole
from keepstep.checkpoint.convert.read.rank_tensors import joined
from keepstep.checkpoint.convert.rules.matching import match_names
from keepstep.checkpoint.convert.rules.planning import names_of
from keepstep.checkpoint.convert.rules.rank_shards import RankRules, join_ranks, megatron_ranks
from keepstep.checkpoint.errors import FormatUnsupported, RulesInvalid
from keepstep.checkpoint.format.layout.completeness import OPTIMIZER
from keepstep.checkpoint.format.layout.source import TensorSpec

_READ_APART = ("args", "optimizer", "checkpoint_version", "rng_state")
_OF_RANKS = "the file of each rank has its own, which is of use to that rank alone"
_EXTRA_STATE = "_extra_state"
"""Copies of more bytes are not compared: to open a checkpoint is not to read it."""

_Arrays = dict[str, FileArray]


def read_megatron_lm(files: ForeignFiles) -> ForeignCheckpoint:
    """Return the checkpoint of a folder such as `iter_0001000`.

    Raises:
        CheckpointMissing: a rank's file is not there.
        CheckpointDamaged: files contradict themselves or each other.
        FormatUnsupported: experts are in files of their own, or nothing says what ranks hold.
    """
    stages = rank_files(files)
    contents = Contents(files.url, "Megatron-LM")
    opened = {file.name for stage in stages for file in stage}
    for name in files.names:
        if name not in opened:
            contents.leave_out(name, "it was not opened: it is no rank's model_optim_rng.pt")
    starts = first_layers([_counts(stage) for stage in stages])
    extra_states: dict[str, None] = {}
    models = [
        [dict(_model_of(contents, file, start, extra_states)) for file in stage]
        for stage, start in zip(stages, starts, strict=True)
    ]
    for name in extra_states:
        contents.leave_out(name, "it is what Transformer Engine pickled of a module")
    states = _states(contents, stages, models)
    trained: dict[str, tuple[int, ...]] = {}
    for number, stage in enumerate(stages):
        arguments = stage[0].arguments
        ranks: list[_Arrays] = []
        for model, state in zip(models[number], states[number], strict=True):
            arrays = {f"model/{name}": array for name, array in model.items()}
            arrays |= {key: value for key, value in state.items() if isinstance(value, FileArray)}
            ranks.append(
                {
                    key: array
                    for key, array in arrays.items()
                    if not is_copy_of_embeddings(_parameter_of(key), number, arguments)
                }
            )
        joined = _joined(stage, ranks)
        for key in ranks[0]:
            contents.add(key, joined[key])
        of_optimizer = {_parameter_of(key) for key in joined if key.startswith("optim/")}
        for key in ranks[0]:
            if key.startswith("model/") and _parameter_of(key) in of_optimizer:
                trained[_parameter_of(key)] = joined[key].spec.shape
        for key, value in states[number][0].items():
            if not isinstance(value, FileArray) and _parameter_of(key) in trained:
                contents.add_slot(_parameter_of(key), key.rpartition("/")[2], value)
    _add_rest(contents, stages[0][0], trained)
    return contents.checkpoint(step_of(stages[0][0].content.get("iteration")) or 0)


def _counts(stage: Sequence[RankFile]) -> list[int]:
    """Return how many layers each chunk of a stage's model has."""
    counts = []
    for chunk in stage[0].chunks:
        try:
            counts.append(layers_of(chunk))
        except ValueError as error:
            raise damaged(stage[0].location, str(error)) from None
    return counts


def _model_of(
    contents: Contents, file: RankFile, starts: Sequence[int], extra_states: dict[str, None]
) -> Iterator[tuple[str, FileArray]]:
    """Yield what a rank has of the model by global names, in the order of its modules."""
    if len(file.chunks) != len(starts):
        raise damaged(file.location, f"it has {len(file.chunks)} models, and others {len(starts)}")
    for chunk, start in zip(file.chunks, starts, strict=True):
        for name, value in chunk.items():
            if name.endswith(_EXTRA_STATE):
                if value is not None:
                    extra_states[name.rpartition("layers.")[2].partition(".")[2] or name] = None
            elif isinstance(value, FileArray):
                yield with_first_layer(name, start), value
            elif value is not None:
                contents.leave_out(
                    f"{file.name}: {name}", f"it is {described(value)}, and no tensor"
                )


def _states(
    contents: Contents, stages: Sequence[Sequence[RankFile]], models: Sequence[Sequence[_Arrays]]
) -> list[list[dict[str, object]]]:
    """Return what each rank's optimizer has; nothing of all if one's parameters have no names."""
    states: list[list[dict[str, object]]] = []
    for stage, ranks in zip(stages, models, strict=True):
        states.append([])
        for file, model in zip(stage, ranks, strict=True):
            try:
                states[-1].append(state_of(file, model))
            except Unnamed as error:
                contents.leave_out("optimizer", f"{file.name}: {error}", key=OPTIMIZER)
                return [[{} for _ in ranks] for ranks in models]
    return states


def _joined(stage: Sequence[RankFile], ranks: Sequence[_Arrays]) -> dict[str, ForeignTensor]:
    """Return the tensors that the ranks of a stage have together."""
    if len(ranks) == 1:
        return {key: whole(array) for key, array in ranks[0].items()}
    specs = [
        {key: TensorSpec(array.dtype, array.shape) for key, array in of.items()} for of in ranks
    ]
    arguments = stage[0].arguments
    is_gated = arguments.get("swiglu", arguments.get("gated_linear_unit"))
    if not isinstance(is_gated, bool):
        raise FormatUnsupported(
            f"{stage[0].location}: its arguments do not say whether there is SwiGLU, and so not "
            "what each rank has; load it with Megatron-LM, and save it with "
            "--ckpt-format torch_dist"
        )
    rules = megatron_ranks(is_gated=is_gated)
    config: dict[str, Any] = model_configuration(arguments)
    together = " and ".join(file.location for file in stage)
    try:
        names = names_of({key: spec for of in specs for key, spec in of.items()})
        unmatched = match_names(rules, names, rules.variables(config)).unmatched
        if unmatched:
            raise FormatUnsupported(
                f"{stage[0].location}: nothing says what each rank has of {unmatched[0]} (of "
                f"{len(unmatched)} tensors); load it with Megatron-LM, and save it with "
                "--ckpt-format torch_dist"
            )
        merges = join_ranks(RankRules(rules, config), specs)
    except RulesInvalid as error:
        raise damaged(together, str(error)) from None
    tensors: dict[str, dict[int, ForeignTensor]] = {key: {} for key in merges}
    for rank, of_rank in enumerate(ranks):
        for key, array in of_rank.items():
            tensors[key][rank] = whole(array)
    return {key: joined(key, merge, tensors[key]) for key, merge in merges.items()}


def _add_rest(contents: Contents, first: RankFile, trained: Mapping[str, tuple[int, ...]]) -> None:
    """Add what is no tensor of the model or the optimizer, of the first rank's file."""
    for name in trained:
        contents.note_master(name)
    optimizers = optimizers_in(first.content.get("optimizer"))
    add_groups(contents, optimizers, trained, has_steps=True)
    add_vocabulary(contents, first.arguments)
    version = first.content.get("checkpoint_version")
    add_settings(contents, first.arguments, {"checkpoint_version": version})
    if "rng_state" in first.content:
        contents.leave_out("rng_state", _OF_RANKS)
    for name, value in first.content.items():
        if name not in _READ_APART and not name.startswith("model") and value is not None:
            contents.add_value(name, value)


def _parameter_of(key: str) -> str:
    """Return the name in a key of the model or the optimizer."""
    if key.startswith("model/"):
        return key.removeprefix("model/")
    return key.removeprefix("optim/").rpartition("/")[0]
