"""Divides a checkpoint as other tools' formats do: into model, optimizer and the rest.

Pure. Every tensor and value of a source is in exactly one part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.checkpoint.convert.write.optimizer_values import only_notes, plain_options
from keepstep.checkpoint.convert.write.selection import MODEL
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.described import Tie, tie_of
from keepstep.checkpoint.format.layout.documents import GROUPS, SCALARS, TIED, VALUES
from keepstep.checkpoint.format.layout.names import OPTIMIZER_PREFIX
from keepstep.checkpoint.format.layout.source import Source

_MODEL_PREFIX = f"{MODEL}/"


@dataclass(frozen=True, slots=True)
class Group:
    """A group of an optimizer: names of its parameters, and hyperparameters as torch has them."""

    parameters: tuple[str, ...]
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateParts:
    """The parts of a source.

    Attributes:
        model: keys of the module's tensors, by name.
        ties: what further names of the module stand for, by name.
        unknown_ties: further names without a tensor.
        groups: the optimizer's groups.
        slots: keys of what the optimizer keeps of each parameter of its groups, by slot.
        scalars: what the optimizer keeps of each as a number, by slot.
        tensors: keys of the tensors of neither.
        values: values by name, names nested by slashes.
        documents: what else there is, by name.
    """

    model: Mapping[str, str]
    ties: Mapping[str, Tie]
    unknown_ties: Sequence[str]
    groups: Sequence[Group]
    slots: Mapping[str, Mapping[str, str]]
    scalars: Mapping[str, Mapping[str, Json]]
    tensors: Sequence[str]
    values: Mapping[str, Json]
    documents: Mapping[str, Json]


def parts_of(source: Source) -> StateParts:
    """Return the parts of a source."""
    documents = source.documents
    ties = documents.get(TIED) or {}
    known = {
        name: tie
        for name in ties
        if (tie := tie_of(ties, f"{_MODEL_PREFIX}{name}")) and tie.key in source.tensors
    }
    groups = [
        Group(tuple(group["parameters"]), _options(group["options"]))
        for group in documents.get(GROUPS) or []
    ]
    grouped = {name for group in groups for name in group.parameters}
    slots: dict[str, dict[str, str]] = {}
    tensors: list[str] = []
    for key in source.tensors:
        parameter, _, slot = key.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
        if key.startswith(OPTIMIZER_PREFIX) and parameter in grouped:
            slots.setdefault(parameter, {})[slot] = key
        elif not key.startswith(_MODEL_PREFIX):
            tensors.append(key)
    scalars: dict[str, dict[str, Json]] = {}
    values: dict[str, Json] = dict(documents.get(VALUES) or {})
    for path, value in (documents.get(SCALARS) or {}).items():
        parameter, _, slot = path.rpartition("/")
        if only_notes(slot, value):
            continue
        if parameter in grouped:
            scalars.setdefault(parameter, {})[slot] = value
        else:
            values[f"{OPTIMIZER_PREFIX}{path}"] = value
    return StateParts(
        model={
            key.removeprefix(_MODEL_PREFIX): key
            for key in source.tensors
            if key.startswith(_MODEL_PREFIX)
        },
        ties=known,
        unknown_ties=sorted(ties.keys() - known.keys()),
        groups=groups,
        slots=slots,
        scalars=scalars,
        tensors=tensors,
        values=values,
        documents={
            name: content
            for name, content in documents.items()
            if name not in (GROUPS, SCALARS, TIED, VALUES) and content not in ({}, [], None)
        },
    )


def unknown_tie_lines(parts: StateParts) -> list[str]:
    """Return what is left out of every format: names whose tensors are not there."""
    return [
        f"{_MODEL_PREFIX}{name}: what it is tied to is not in the model"
        for name in parts.unknown_ties
    ]


def _options(options: Mapping[str, Json]) -> dict[str, object]:
    # Torch's optimizers have pairs of coefficients as tuples, JSON has lists.
    return {
        name: tuple(value) if name == "betas" and isinstance(value, list) else value
        for name, value in plain_options(options).items()
    }
