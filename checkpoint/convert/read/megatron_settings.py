"""Reads arguments, optimizer options and steps from Megatron's checkpoints.

Pure. Megatron does not record the parameters of the optimizer's groups. It makes groups by rules of
its own: biases and parameters of one dimension have no weight decay, experts are separate, and
embeddings and the output layer are if they have a learning rate of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepstep.checkpoint.convert.read.contents import Contents, mapping_of, step_of
from keepstep.checkpoint.convert.read.pickled_json import NotJson, as_json
from keepstep.checkpoint.convert.read.pickled_values import Record
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.completeness import OPTIMIZER
from keepstep.checkpoint.format.layout.documents import PADDING

MEGATRON = "megatron"
"""The document that has Megatron's arguments and versions, and the model's configuration."""

WORD_EMBEDDINGS, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"

_OF_THE_MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "padded_vocab_size",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
)
_NO_OPTIONS = ("params",)


def arguments_of(value: object) -> Mapping[str, Any]:
    """Return Megatron's arguments by name, of a namespace or a mapping; empty if there are none."""
    return value.attributes if isinstance(value, Record) else mapping_of(value)


def model_configuration(arguments: Mapping[str, Any]) -> dict[str, Json]:
    """Return what the arguments say of the model's sizes, by Megatron's names."""
    known = {name: arguments.get(name) for name in _OF_THE_MODEL}
    if arguments.get("group_query_attention") is False:
        # Then it is 1, and means nothing.
        known["num_query_groups"] = known["num_attention_heads"]
    return {name: value for name, value in known.items() if type(value) is int}


def add_settings(
    contents: Contents, arguments: Mapping[str, Any], others: Mapping[str, object]
) -> None:
    """Add the document of arguments and versions; leave out what JSON has not."""
    settings: dict[str, Json] = {}
    given: dict[str, Json] = {}
    for into, values in ((given, arguments), (settings, others)):
        for name, value in values.items():
            try:
                into[name] = as_json(value)
            except NotJson as error:
                contents.leave_out(f"args.{name}" if into is given else name, str(error))
    configuration = model_configuration(arguments)
    contents.add_document(
        MEGATRON, {**settings, "args": given, **({"model": configuration} if configuration else {})}
    )


def add_vocabulary(contents: Contents, arguments: Mapping[str, Any]) -> None:
    """Note how much of the vocabulary is padding, and that the output layer is the embeddings."""
    size = arguments.get("vocab_size")
    padded: dict[str, Json] = {}
    for name in (WORD_EMBEDDINGS, OUTPUT_LAYER):
        tensor = contents.tensors.get(f"model/{name}")
        if tensor is None or type(size) is not int or len(tensor.spec.shape) != 2:
            continue
        rows, columns = tensor.spec.shape
        if 0 < size < rows:
            padded[f"model/{name}"] = {"logical_shape": [size, columns]}
    if padded:
        contents.add_document(PADDING, padded)
    if (
        arguments.get("untie_embeddings_and_output_weights") is False
        and f"model/{WORD_EMBEDDINGS}" in contents.tensors
        and f"model/{OUTPUT_LAYER}" not in contents.tensors
    ):
        contents.tie(OUTPUT_LAYER, WORD_EMBEDDINGS)


def optimizers_in(value: object) -> list[Mapping[str, Any]]:
    """Return the states of the optimizers that a checkpoint's `optimizer` consists of.

    A distributed optimizer wraps another one's state; several that are chained are numbered.
    """
    if isinstance(value, list):
        return [state for item in value for state in optimizers_in(item)]
    if isinstance(value, dict) and value and all(type(key) is int for key in value):
        return [state for key in sorted(value) for state in optimizers_in(value[key])]
    state = mapping_of(value)
    inner = mapping_of(state.get("optimizer"))
    return [state] if "param_groups" in state or "param_groups" in inner else []


def groups_in(optimizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return an optimizer's groups, as the file has them."""
    inner = optimizer if "param_groups" in optimizer else mapping_of(optimizer.get("optimizer"))
    listed = inner.get("param_groups")
    return [mapping_of(group) for group in listed] if isinstance(listed, list) else []


def common_step(optimizer: Mapping[str, Any]) -> int | None:
    """Return the number of steps of all of an optimizer's parameters, if the file says it once."""
    for state in (optimizer, mapping_of(optimizer.get("optimizer"))):
        step = step_of(mapping_of(state.get("state")).get("common_step"))
        if step is not None:
            return step
    steps = {step_of(group.get("step")) for group in groups_in(optimizer)}
    return steps.pop() if len(steps) == 1 else None


def members_by_rules(
    groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, tuple[int, ...]]
) -> list[list[str]] | None:
    """Return each group's parameters by Megatron's rules, or None if these do not tell them apart.

    Args:
        groups: as the file has them.
        parameters: names and shapes of all trained parameters, in the order of the module.
    """
    members: list[list[str]] = [[] for _ in groups]
    # Where experts are not spread over ranks, they are with the others.
    are_experts_apart = any(group.get("is_expert_parallel") for group in groups)
    has_own_rate = any(group.get("is_decoupled_lr") for group in groups)
    for name, shape in parameters.items():
        matching = [
            number
            for number, group in enumerate(groups)
            if _has_no_decay(group) == (name.endswith(".bias") or len(shape) == 1)
            and bool(group.get("is_expert_parallel")) == (are_experts_apart and is_expert(name))
            and bool(group.get("is_decoupled_lr"))
            == (has_own_rate and name in (WORD_EMBEDDINGS, OUTPUT_LAYER))
        ]
        if len(matching) != 1:
            return None
        members[matching[0]].append(name)
    return members


def is_expert(name: str) -> bool:
    """Return whether a parameter is of an expert, which expert parallelism spreads over ranks."""
    return ".experts." in name


def _has_no_decay(group: Mapping[str, Any]) -> bool:
    return bool(group.get("wd_mult", group.get("pre_wd_mult")) == 0)


def add_groups(
    contents: Contents,
    optimizers: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, tuple[int, ...]],
    *,
    has_steps: bool = False,
) -> None:
    """Add the optimizers' groups and steps, or leave them out if nothing says what is in them.

    Args:
        optimizers: see `optimizers_in`.
        parameters: names and shapes of all trained parameters, in the order of the module.
        has_steps: each parameter's number of steps has been added.
    """
    groups = [group for optimizer in optimizers for group in groups_in(optimizer)]
    if not groups or not parameters:
        return
    members = members_by_rules(groups, parameters)
    if members is None:
        contents.leave_out(
            "optimizer.param_groups",
            "they do not name their parameters, and Megatron's rules on weight decay, experts and "
            "learning rates do not tell these apart",
            key=OPTIMIZER,
        )
    else:
        for group, names in zip(groups, members, strict=True):
            contents.add_group(names, {k: v for k, v in group.items() if k not in _NO_OPTIONS})
    if has_steps:
        return
    steps = {common_step(optimizer) for optimizer in optimizers}
    if len(steps) > 1:
        contents.leave_out(
            "optimizer step", "the optimizers and groups have different numbers", key=OPTIMIZER
        )
        return
    for name in parameters if steps != {None} else ():
        contents.add_slot(name, "step", *steps)
