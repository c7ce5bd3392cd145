"""Collects what a reader finds in another tool's checkpoint, and makes a `ForeignCheckpoint` of it.

Every tensor and value of the files ends in exactly one of these: a tensor, a document, or
`left_out` with a reason. Nothing is dropped without a word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from keepstep.checkpoint.convert.read.arrays import Array, FileArray, MemoryArray
from keepstep.checkpoint.convert.read.files import ForeignFile, damaged
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint, LeftOut
from keepstep.checkpoint.convert.read.pickled_json import NotJson, as_json, described, number_of
from keepstep.checkpoint.convert.read.pickled_values import NumpyArray, Record
from keepstep.checkpoint.convert.read.pieces import ForeignTensor, whole
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.documents import GROUPS, MASTERS, SCALARS, TIED, VALUES
from keepstep.checkpoint.format.layout.names import check_keys

MASTER_SLOT = "master_param"

_MOST_DEPTH = 200
_SHOWN = 80
# How much tensors may be that repeat a file's bytes, or share them, in all and per byte.
_MOST_REPEATED_NBYTES = 2**30
_MOST_REPETITIONS = 64


class Contents:
    """The tensors, documents and left-out names of one checkpoint, while it is read.

    Attributes:
        is_in_module_order: whether the files have the model's tensors in the order of the module's
            `state_dict`; a reader notes that they do not.
    """

    def __init__(self, url: str, format_name: str) -> None:
        self._url = url
        self._format_name = format_name
        self._tensors: dict[str, ForeignTensor] = {}
        self._documents: dict[str, Json] = {}
        self._tied: dict[str, str] = {}
        self._scalars: dict[str, Json] = {}
        self._values: dict[str, Json] = {}
        self._groups: list[Json] = []
        self._masters: dict[str, Json] = {}
        self._left_out: list[LeftOut] = []
        self._model_arrays: dict[ForeignTensor, str] = {}
        self.is_in_module_order = True
        self._nbytes_of_files: dict[ForeignFile, int] = {}

    @property
    def tensors(self) -> Mapping[str, ForeignTensor]:
        """The tensors so far, by key."""
        return self._tensors

    def add(self, key: str, tensor: ForeignTensor) -> None:
        """Add a tensor that was put together; leave it out if its name cannot be a key.

        Raises:
            CheckpointDamaged: there is one of this key.
        """
        if key in self._tensors:
            raise damaged(self._url, f"it has two tensors {key}")
        try:
            check_keys([key])
        except ValueError as error:
            self.leave_out(key, f"its name cannot be a key: {error}", key=key)
            return
        for piece in tensor.pieces:
            if isinstance(piece.array, FileArray):
                self._count(piece.array)
        self._tensors[key] = tensor

    def _count(self, array: FileArray) -> None:
        """Refuse files whose bytes are repeated to far more of them."""
        file = array.extent.file
        nbytes = self._nbytes_of_files.get(file, 0) + array.nbytes
        self._nbytes_of_files[file] = nbytes
        if nbytes > _MOST_REPEATED_NBYTES + _MOST_REPETITIONS * file.nbytes:
            raise damaged(
                file.location,
                f"its {file.nbytes} bytes are repeated to tensors of {nbytes} bytes or more",
            )

    def add_value(self, key: str, value: object) -> None:
        """Add whatever a file has at a place that is named by a key: a tensor, or anything else.

        Tensors are added under the key, mappings by their items, anything that JSON has to the
        document `values`, as `checkpoint.save` does. The rest is left out.
        """
        self._add_value(key, value, {})

    def _add_value(self, key: str, value: object, known: dict[int, bool], depth: int = 0) -> None:
        if depth > _MOST_DEPTH:
            # By way of a `Record` a value may contain itself.
            raise damaged(
                self._url,
                f"{key[:_SHOWN]}... is nested more than {_MOST_DEPTH} deep, or contains itself",
            )
        if isinstance(value, Record) and value.name == "argparse.Namespace":
            value = value.attributes
        tensor = tensor_of(value, f"{self._url}: {key}")
        if tensor is not None:
            self.add(key, tensor)
        elif items := mapping_of(value):
            for name, item in items.items():
                self._add_value(f"{key}/{name}", item, known, depth + 1)
        elif isinstance(value, dict | list | tuple) and has_tensor(value, known):
            for place, item in value.items() if isinstance(value, dict) else enumerate(value):
                self._add_value(f"{key}/{place}", item, known, depth + 1)
        else:
            self._set_json(self._values, key, value, key)

    def add_model_array(self, name: str, value: object) -> None:
        """Add a tensor of the model, or note that it is tied to an earlier one of the same bytes.

        Args:
            name: its name in the module's `state_dict`.
            value: what the file has of it; left out if it is no tensor.
        """
        tensor = tensor_of(value, f"{self._url}: {name}")
        if tensor is None:
            key = f"model/{name}"
            # None says that there is nothing, as `_extra_state` of a module that keeps none.
            asked = None if value is None else key
            self.leave_out(key, f"it is {described(value)}, and no tensor", key=asked)
            return
        if math.prod(tensor.spec.shape) and not isinstance(value, MemoryArray):
            first = self._model_arrays.setdefault(tensor, name)
            if first != name:
                self._tied[name] = first
                return
        self.add(f"model/{name}", tensor)

    def tie(self, name: str, first: str) -> None:
        """Note that a parameter of the model is another one, under whose name it is stored."""
        self._tied[name] = first

    def add_slot(self, parameter: str, slot: str, value: object) -> None:
        """Add what an optimizer keeps of a parameter: a tensor, or a number."""
        tensor = tensor_of(value, f"{self._url}: {parameter}, {slot}")
        if tensor is not None:
            self.add(f"optim/{parameter}/{slot}", tensor)
            return
        path = f"{parameter}/{slot}"
        self._set_json(self._scalars, path, value, f"optim/{path}")

    def note_master(self, parameter: str) -> None:
        """Note that the slot `MASTER_SLOT` of a parameter is the parameter itself in more bits."""
        tensor = self._tensors.get(f"optim/{parameter}/{MASTER_SLOT}")
        if tensor is not None:
            entry = {"slot": MASTER_SLOT, "dtype": tensor.spec.dtype}
            self._masters[f"model/{parameter}"] = entry

    def _set_json(self, into: dict[str, Json], key: str, value: object, name: str) -> None:
        if key in into:
            self.leave_out(name, "another value has this name", key=name)
            return
        try:
            into[key] = as_json(value)
        except NotJson as error:
            self.leave_out(name, str(error), key=name)

    def add_group(self, parameters: Sequence[str], options: Mapping[str, object]) -> None:
        """Add a parameter group of an optimizer: names, and hyperparameters by name."""
        kept: dict[str, Json] = {}
        for name, value in options.items():
            try:
                kept[name] = as_json(value)
            except NotJson as error:
                where = f"{GROUPS}/{len(self._groups)}/{name}"
                self.leave_out(where, str(error), key=where)
        self._groups.append({"parameters": list(parameters), "options": kept})

    def add_document(self, name: str, content: Json) -> None:
        """Add a document, which is JSON already."""
        self._documents[name] = content

    def leave_out(self, name: str, reason: str, *, key: str | None = None) -> None:
        """Note that something of the checkpoint is not carried, and why; see `LeftOut`."""
        self._left_out.append(LeftOut(name, reason, key))

    def checkpoint(self, step: int) -> ForeignCheckpoint:
        """Return the checkpoint of all that was added.

        Raises:
            CheckpointDamaged: the tensors' names contradict each other.
        """
        try:
            check_keys(self._tensors.keys())
        except ValueError as error:
            raise damaged(self._url, str(error)) from None
        documents = {
            **self._documents,
            **{
                name: content
                for name, content in (
                    (TIED, self._tied),
                    (GROUPS, self._groups),
                    (MASTERS, self._masters),
                    (SCALARS, self._scalars),
                    (VALUES, self._values),
                )
                if content or name == VALUES
            },
        }
        return ForeignCheckpoint(
            url=self._url,
            format_name=self._format_name,
            step=step,
            foreign_tensors=self._tensors,
            documents=documents,
            left_out=tuple(self._left_out),
        )


def array_of(value: object, location: str) -> Array | None:
    """Return a value of a pickle as an array, or None if it is no tensor and no NumPy array."""
    if isinstance(value, FileArray | MemoryArray):
        return value
    if isinstance(value, NumpyArray) and value.values is not None:
        values = value.values
        if values.dtype.kind in "biufc":
            native = values.astype(values.dtype.newbyteorder("="), copy=False)
            return MemoryArray(native.dtype.name, native, location)
    return None


def tensor_of(value: object, location: str) -> ForeignTensor | None:
    """Return a value as a tensor: one of pieces, or an array; None if it is neither."""
    if isinstance(value, ForeignTensor):
        return value
    array = array_of(value, location)
    return whole(array) if array is not None else None


def has_tensor(value: object, known: dict[int, bool] | None = None) -> bool:
    """Return whether a value is a tensor, or a container that has one.

    Args:
        value: any value of a pickle.
        known: what was found before of values in the same tree, which are not gone over again.
    """
    if isinstance(value, ForeignTensor | FileArray | MemoryArray | NumpyArray):
        return True
    if not isinstance(value, dict | list | tuple):
        return False
    known = {} if known is None else known
    if id(value) not in known:
        items = value.values() if isinstance(value, dict) else value
        known[id(value)] = any(has_tensor(item, known) for item in items)
    return known[id(value)]


def step_of(value: object) -> int | None:
    """Return a number of steps, if a value is one: a number, or a tensor of one element."""
    if isinstance(value, FileArray) and value.size == 1:
        value = number_of(value)
    if isinstance(value, Record | bool) or not isinstance(value, int | float):
        return None
    return int(value) if value == value and 0 <= value < 2**63 and value == int(value) else None


def mapping_of(value: object) -> Mapping[str, Any]:
    """Return a value if it is a mapping by text, else an empty mapping."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return value
    return {}
