"""Writes a checkpoint as a file of `torch.save`, without holding its tensors in memory.

PyTorch writes the file with tensors that have no data, which leaves their places empty
(`torch.serialization.skip_data`); then each place is filled. The checksums in the zip are those of
zeros, which PyTorch does not look at and `unzip -t` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import crc32c
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from keepstep.checkpoint.conversion.boxes_in_order import (
    block_nbytes,
    checksum_of,
    read_in_order,
)
from keepstep.checkpoint.conversion.file_target import local_path, new_local_file
from keepstep.checkpoint.conversion.selection import MODEL
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError, FormatUnsupported
from keepstep.checkpoint.foreign.arrays import FileArray
from keepstep.checkpoint.foreign.files import open_files
from keepstep.checkpoint.foreign.torch_file import read_torch_file
from keepstep.checkpoint.layout.boxes import Json
from keepstep.checkpoint.layout.described import tie_of
from keepstep.checkpoint.layout.documents import CONFIG, GROUPS, SCALARS, TIED
from keepstep.checkpoint.layout.source import Source
from keepstep.checkpoint.live.tensors import torch_dtype

_OPTIM = "optim"
_VALUES = "values"

Report = Callable[[int], None]


def write_torch(
    source: Source, url: str, *, only_model: bool, memory_nbytes: int, report: Report
) -> None:
    """Write a checkpoint as one file, and compare it with what was read.

    With `only_model` the file has the module's `state_dict`. Else it has a mapping of `model`,
    `optimizer` (numbered through its groups, with `param_names`), `step`, and the other tensors and
    values by name. Of two things of one name the later gets `NAME (2)`.

    Raises:
        CheckpointExists: there is such a file.
        FormatUnsupported: the URL is not of a local file.
        CheckpointDamaged: what was written is not what was read.
        CheckpointError: the file cannot be written.
    """
    path = local_path(url)
    if path is None:
        raise FormatUnsupported(
            f"{url}: a file of torch.save can only be written to a disk; write it there, and "
            "copy it"
        )
    with FakeTensorMode():
        tensors = {
            key: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
            for key, spec in source.tensors.items()
        }
        tree = _tree(source, tensors)
        content = tree["model"] if only_model else tree
        keys = _keys_in(content, {id(tensor): key for key, tensor in tensors.items()})
        with new_local_file(path) as unfinished:
            try:
                with skip_data(materialize_fake_tensors=True):
                    torch.save(content, unfinished)
            except RuntimeError as error:
                raise CheckpointError(
                    f"{path} cannot be written: {error}; make room or choose another place"
                ) from error
            _fill(source, unfinished, keys, memory_nbytes, report)


def torch_left_out(source: Source, *, only_model: bool) -> list[str]:
    """Return what of a checkpoint a file of `torch.save` does not have, each with the reason."""
    document = source.documents.get(TIED, {})
    lines = [
        f"{MODEL}/{name}: what it is tied to is not in the model"
        for name in document
        if (tie := tie_of(document, f"{MODEL}/{name}")) is None or tie.key not in source.tensors
    ]
    if only_model and CONFIG in source.documents:
        lines.append(f"{CONFIG}: a state_dict has tensors alone")
    return lines


def _tree(source: Source, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    model = {
        key.removeprefix(f"{MODEL}/"): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{MODEL}/")
    }
    document = source.documents.get(TIED, {})
    for name in document:
        tie = tie_of(document, f"{MODEL}/{name}")
        first = model.get(tie.key.removeprefix(f"{MODEL}/")) if tie is not None else None
        if tie is not None and first is not None:
            model[name] = first.t() if tie.is_transposed else first
    tree: dict[str, Any] = {"model": model}
    groups: list[Json] = source.documents.get(GROUPS, [])
    if groups:
        tree["optimizer"] = _optimizer(groups, tensors, source.documents.get(SCALARS, {}))
    tree["step"] = source.step
    carried = {id(tensor) for tensor in _leaves(tree)}
    values: Mapping[str, Json] = source.documents.get(_VALUES, {})
    others = {key: tensor for key, tensor in tensors.items() if id(tensor) not in carried}
    documents = {
        name: content
        for name, content in source.documents.items()
        if name not in (GROUPS, SCALARS, TIED, _VALUES)
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
    groups: list[Json], tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Json]
) -> dict[str, Any]:
    names = [name for group in groups for name in group["parameters"]]
    numbers = {name: number for number, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {}
    slots = (
        (key.removeprefix(f"{_OPTIM}/"), tensor)
        for key, tensor in tensors.items()
        if key.startswith(f"{_OPTIM}/")
    )
    for path, value in (*slots, *scalars.items()):
        name, _, slot = path.rpartition("/")
        if name in numbers:
            state.setdefault(numbers[name], {})[slot] = value
    return {
        "state": dict(sorted(state.items())),
        "param_groups": [
            {
                **group["options"],
                "params": [numbers[name] for name in group["parameters"]],
                "param_names": list(group["parameters"]),
            }
            for group in groups
        ],
    }


def _keys_in(value: object, keys: Mapping[int, str]) -> Any:
    """Return a tree with the tensors' keys in their places, and without what is no tensor."""
    if isinstance(value, torch.Tensor):
        # A transpose has no bytes of its own.
        return keys.get(id(value), {})
    if isinstance(value, Mapping):
        inner = {name: _keys_in(item, keys) for name, item in value.items()}
        return {name: item for name, item in inner.items() if item}
    return {}


def _leaves(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)


def _fill(source: Source, path: Path, keys: object, memory_nbytes: int, report: Report) -> None:
    """Write the tensors' bytes to their places in a file of `torch.save`, and compare them."""
    places = dict(_places(keys, _read(path)))
    checksums: dict[str, int] = {}
    with path.open("r+b") as file:
        for key, array in places.items():
            file.seek(array.extent.offset + array.start * array.itemsize)
            checksum = 0
            for data in read_in_order(source, key, block_nbytes(memory_nbytes)):
                file.write(data)
                checksum = crc32c.crc32c(data, checksum)
                report(data.nbytes)
            checksums[key] = checksum
        file.flush()
        os.fsync(file.fileno())
    for key, array in places.items():
        if checksum_of(array.extent, block_nbytes(memory_nbytes)) != checksums[key]:
            raise CheckpointDamaged(
                f"{path}: {key} is not what was written; look at the disk, and convert again"
            )


def _read(path: Path) -> object:
    files = open_files(str(path))
    (name,) = files.names
    return read_torch_file(files.file(name).whole)


def _places(keys: object, written: object) -> Iterator[tuple[str, FileArray]]:
    """Yield where each tensor's bytes belong, by its key.

    Args:
        keys: the keys of the tensors, nested as the tensors are in the file.
        written: what the file has.
    """
    if isinstance(keys, str):
        assert isinstance(written, FileArray)
        yield keys, written
    elif isinstance(keys, Mapping):
        assert isinstance(written, Mapping)
        for name, inner in keys.items():
            yield from _places(inner, written[name])
