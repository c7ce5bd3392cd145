"""Writes a checkpoint as a file of `torch.save`, without holding its tensors in memory.

The checksums in the zip are those of empty places, which PyTorch does not look at and `unzip -t`
does.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from keepstep.checkpoint.convert.write.optimizer_values import has_object, only_notes
from keepstep.checkpoint.convert.write.pieces_of_files import Piece, StoredTensor, Transposed, whole
from keepstep.checkpoint.convert.write.selection import MODEL
from keepstep.checkpoint.convert.write.state_parts import parts_of, unknown_tie_lines
from keepstep.checkpoint.convert.write.torch_pieces import torch_pieces
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.described import tie_of
from keepstep.checkpoint.format.layout.documents import CONFIG, GROUPS, SCALARS, TIED, VALUES
from keepstep.checkpoint.format.layout.encoded_values import Decoder, slots_within
from keepstep.checkpoint.format.layout.source import Source
from keepstep.checkpoint.live.tensors import torch_dtype

_OPTIM = "optim"
_REST = "state_dict"


def torch_file(source: Source, *, only_model: bool) -> tuple[Piece, ...]:
    """Return the pieces of a file of `torch.save` with a checkpoint.

    With `only_model` the file has the module's `state_dict`. Else it has a mapping of `model`,
    `optimizer` (numbered through its groups, with `param_names`), `step`, and the other tensors and
    values by name. The second of two things of one name gets `NAME (2)`.
    """
    tree = _tree(source, {key: whole(source, key) for key in source.tensors})
    return torch_pieces(tree["model"] if only_model else tree)


def torch_left_out(source: Source, *, only_model: bool) -> list[str]:
    """Return what of a checkpoint a file of `torch.save` does not have, each with the reason."""
    lines = unknown_tie_lines(parts_of(source))
    if not only_model:
        lines += [
            f"{_OPTIM}/{path}: it has an object, which is written as its attributes"
            for path, value in source.documents.get(SCALARS, {}).items()
            if has_object(value)
        ]
    if only_model and CONFIG in source.documents:
        lines.append(f"{CONFIG}: a state_dict has tensors alone")
    return lines


def _tree(source: Source, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    model: dict[str, StoredTensor | Transposed] = {
        key.removeprefix(f"{MODEL}/"): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{MODEL}/")
    }
    document = source.documents.get(TIED, {})
    for name in document:
        tie = tie_of(document, f"{MODEL}/{name}")
        first = tensors.get(tie.key) if tie is not None else None
        if tie is not None and first is not None:
            model[name] = Transposed(first) if tie.is_transposed else first
    tree: dict[str, Any] = {"model": model}
    groups: list[Json] = source.documents.get(GROUPS, [])
    if groups:
        tree["optimizer"] = _optimizer(groups, tensors, source.documents.get(SCALARS, {}))
    tree["step"] = source.step
    carried = {id(tensor) for tensor in _leaves(tree)}
    values: Mapping[str, Json] = source.documents.get(VALUES, {})
    others = {key: tensor for key, tensor in tensors.items() if id(tensor) not in carried}
    documents = {
        name: content
        for name, content in source.documents.items()
        if name not in (GROUPS, SCALARS, TIED, VALUES)
    }
    grouped = {name for group in groups for name in group["parameters"]}
    scalars = {
        f"{_OPTIM}/{path}": value
        for path, value in source.documents.get(SCALARS, {}).items()
        if path.rpartition("/")[0] not in grouped
    }
    for path, value in (
        *others.items(), *scalars.items(), *values.items(), *documents.items()
    ):  # fmt: skip
        _put(tree, path, value)
    return tree


def _put(tree: dict[str, Any], path: str, value: object) -> None:
    """Put a value into nested mappings, by its path; under a name that is free if that is taken."""
    inner, names = tree, path.split("/")
    for name in names[:-1]:
        following = inner.setdefault(name, {})
        if not isinstance(following, dict):
            break
        inner = following
    else:
        if names[-1] not in inner:
            inner[names[-1]] = value
            return
        there = inner[names[-1]]
        # Such as the step, which many states have as a value too.
        if isinstance(value, int | float | str) and type(there) is type(value) and there == value:
            return
    free, number = path, 1
    while free in tree:
        number += 1
        free = f"{path} ({number})"
    tree[free] = value


def _optimizer(
    groups: list[Json], tensors: Mapping[str, StoredTensor], scalars: Mapping[str, Json]
) -> dict[str, Any]:
    names = [name for group in groups for name in group["parameters"]]
    numbers = {name: number for number, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {}
    slots = (
        (key.removeprefix(f"{_OPTIM}/"), tensor)
        for key, tensor in tensors.items()
        if key.startswith(f"{_OPTIM}/")
    )
    for path, tensor in slots:
        name, _, slot = path.rpartition("/")
        if name in numbers:
            state.setdefault(numbers[name], {})[slot] = tensor
    rest: dict[str, Any] = {}
    for path, value in scalars.items():
        name, _, slot = path.rpartition("/")
        if name not in numbers or only_notes(slot, value):
            continue
        own = state.setdefault(numbers[name], {})
        decoded = _decoder(own).decode(value)
        for inner in slots_within(value):
            own.pop(inner["name"], None)
        if slot != _REST:
            own[slot] = decoded
        elif isinstance(decoded["content"], dict):
            rest.update(decoded["content"])
        if not own:
            del state[numbers[name]]
    options = _decoder({}).decode([group["options"] for group in groups])
    return {
        **rest,
        "state": {**dict(sorted(state.items())), **rest.get("state", {})},
        "param_groups": [
            {
                **own_options,
                "params": [numbers[name] for name in group["parameters"]],
                "param_names": list(group["parameters"]),
            }
            for group, own_options in zip(groups, options, strict=True)
        ],
    }


def _decoder(slots: Mapping[str, Any]) -> Decoder:
    """Return what decodes values of an optimizer for torch; what torch has not stays as it is."""

    def other(kind: str, content: Json) -> Any:
        match kind:
            case "$slot" if content["name"] in slots:
                return slots[content["name"]]
            case "$tensor":
                data = base64.b64decode(content["data"])
                return StoredTensor(content["dtype"], tuple(content["shape"]), (data,))
            case "$dtype":
                return torch_dtype(content)
            case "$size":
                return tuple(content)
        return {kind: content}

    return Decoder(other)


def _leaves(value: object) -> Iterator[StoredTensor]:
    if isinstance(value, StoredTensor):
        yield value
    elif isinstance(value, Transposed):
        yield value.of
    elif isinstance(value, Mapping | list | tuple | deque):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)
