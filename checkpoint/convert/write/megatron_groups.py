"""Makes an optimizer's groups as Megatron has them: without parameters' names. Pure."""

from __future__ import annotations

from typing import Any

from keepstep.checkpoint.convert.read.megatron_settings import is_expert, members_by_rules
from keepstep.checkpoint.convert.write.state_parts import Group, StateParts
from keepstep.checkpoint.format.layout.source import Source

# What Megatron tells an optimizer's groups apart by.
_MARKS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def are_groups_distinct(source: Source, parts: StateParts) -> bool:
    """Return whether Megatron's rules give each group that is written the parameters it has."""
    shapes = {name: source.tensors[key].shape for name, key in parts.model.items()}
    written = [
        (members, options)
        for group in parts.groups
        for expert, members in by_experts(group).items()
        for options in [marked(group, is_of_experts=expert)]
    ]
    trained = {name for members, _ in written for name in members}
    found = members_by_rules(
        [options for _, options in written],
        {name: shape for name, shape in shapes.items() if name in trained},
    )
    return found is not None and list(map(set, found)) == [set(names) for names, _ in written]


def by_experts(group: Group) -> dict[bool, list[str]]:
    """Return a group's parameters by whether Megatron has them in the optimizer of experts."""
    said = group.options.get("is_expert_parallel")
    if isinstance(said, bool):
        return {said: list(group.parameters)}
    found: dict[bool, list[str]] = {}
    for name in group.parameters:
        found.setdefault(is_expert(name), []).append(name)
    return dict(sorted(found.items()))


def marked(group: Group, *, is_of_experts: bool) -> dict[str, Any]:
    """Return a group's options, with all that Megatron tells groups apart by."""
    marks = {
        "wd_mult": 0.0 if group.options.get("weight_decay") == 0 else 1.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        **{mark: value for mark, value in group.options.items() if mark in _MARKS},
        "is_expert_parallel": is_of_experts,
    }
    return {**group.options, **marks}
