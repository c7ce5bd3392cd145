"""Reads folders of Orbax: of a CheckpointManager's step with its items, or of one tree.

Trees are put where the structure says what they are: the parameters are below `params` (or the
whole of a tree that has nothing else), and an Adam's state is a `mu`, a `nu` and a `count` of which
the first two have the paths and shapes of parameters. Whatever else there is keeps its name. JSON
items are documents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keepstep.checkpoint.convert.read.arrays import MemoryArray
from keepstep.checkpoint.convert.read.contents import Contents, step_of
from keepstep.checkpoint.convert.read.files import ForeignFiles, damaged
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.hugging_face import read_json_object
from keepstep.checkpoint.convert.read.orbax_arrays import MANIFEST
from keepstep.checkpoint.convert.read.orbax_tree import METADATA, STRINGS, Leaf, OrbaxTree, Path
from keepstep.checkpoint.convert.read.pieces import ForeignTensor, whole
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.documents import VALUES
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype

STEP_METADATA = "_CHECKPOINT_METADATA"

DOCUMENT = "orbax"
"""The document with the notes of Orbax and of its user."""

_JSON_ITEM = "metadata"
# How a manager names the folders of steps; what is saved alone has this file, and any name.
_NUMBERED = re.compile(r"(?:.*_)?(\d{1,18})")
_SAVED_ALONE = "orbax.checkpoint"
_PARAMETERS = ("params", "model")
_STEPS = ("step", "global_step")
_ADAM = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_SCALAR = "scalar"
_STRING = "string"
# Files of the stores, which are of no use without the arrays.
_STRUCTURE = re.compile(
    rf"{METADATA}|{STRINGS}|{re.escape(MANIFEST)}|manifest\.[0-9a-f]{{16}}"
    r"|(?:ocdbt\.process_[^/]*/)?(?:manifest\.[^/]*|(?:d|ocdbt_data|ocdbt_meta)/[^/]*)"
)
_COMMITTED = "commit_success.txt"
_SHARDING = "_sharding"
_ARRAY_NOTES = "array_metadatas/"


def read_orbax(files: ForeignFiles) -> ForeignCheckpoint:
    """Return the checkpoint in a folder: of a tree, or of items in folders.

    Raises:
        CheckpointMissing: a file is not there.
        CheckpointDamaged: files contradict themselves or each other.
        FormatUnsupported: arrays are in a codec that is not read.
    """
    contents = Contents(files.url, "Orbax")
    # Its mappings are sorted by keys.
    contents.is_in_module_order = False
    notes: dict[str, Json] = {}
    if STEP_METADATA in files:
        notes[STEP_METADATA] = read_json_object(files, STEP_METADATA)
    if METADATA in files:
        trees, step = {"": OrbaxTree(files)}, None
        opened = {STEP_METADATA, _COMMITTED, _SAVED_ALONE}
    else:
        trees = {
            name.removesuffix(f"/{METADATA}"): OrbaxTree(files.below(name.rpartition("/")[0]))
            for name in files.names
            if name.endswith(f"/{METADATA}") and name.count("/") == 1
        }
        step = None if _SAVED_ALONE in files else _step_of_folder(files.url)
        opened = {STEP_METADATA, _COMMITTED, _SAVED_ALONE}
        opened |= _add_json_items(contents, files, trees)
    state = _State(contents)
    for item, tree in trees.items():
        state.add(tree, _prefix(item, len(trees)), f"{files.url}/{item}".rstrip("/"))
        if tree.custom_metadata is not None:
            notes[f"{item}/{METADATA}".lstrip("/")] = tree.custom_metadata
        opened |= _leave_out_files(contents, files, item, tree)
    own_step = state.place()
    unread = dict.fromkeys(
        name if name.partition("/")[0] in trees else name.partition("/")[0]
        for name in files.names
        if name not in opened
    )
    for name in unread:
        contents.leave_out(name, "it is no tree and no JSON, which are the items that are read")
    if notes:
        contents.add_document(DOCUMENT, notes)
    return contents.checkpoint(own_step if own_step is not None else step or 0)


def _prefix(item: str, count: int) -> Path:
    """Return what paths of an item begin with: its name, if it tells what the tree is."""
    is_name = item and (count > 1 or item in (*_PARAMETERS, "opt_state"))
    return (item,) if is_name else ()


def _step_of_folder(url: str) -> int | None:
    match = _NUMBERED.fullmatch(url.rpartition("/")[2])
    return int(match[1]) if match else None


def _add_json_items(
    contents: Contents, files: ForeignFiles, trees: Mapping[str, OrbaxTree]
) -> set[str]:
    """Add the items that are JSON; return their files."""
    opened = set()
    for name in files.names:
        item, _, leaf = name.rpartition("/")
        # The metrics of a step are an item whose file has the item's name.
        if not item or "/" in item or item in trees or leaf not in (_JSON_ITEM, item):
            continue
        opened |= {name, f"{item}/{_COMMITTED}"}
        document = read_json_object(files, name)
        if item in (VALUES, DOCUMENT):
            contents.add_value(item, document)
        else:
            contents.add_document(item, document)
    return opened


def _leave_out_files(
    contents: Contents, files: ForeignFiles, item: str, tree: OrbaxTree
) -> set[str]:
    """Leave out an item's files that are no arrays; return the files of the item."""
    start = f"{item}/" if item else ""
    opened = set()
    arrays = {} if tree.is_ocdbt else {leaf.array_name: True for leaf in tree.leaves}
    for full_name in files.names:
        name = full_name.removeprefix(start)
        if not full_name.startswith(start) or full_name == STEP_METADATA:
            continue
        if name == _SHARDING:
            contents.leave_out(full_name, "it says on which devices arrays were")
        elif name.startswith(_ARRAY_NOTES):
            contents.leave_out(full_name, "it says how arrays were cut when they were written")
        elif not (
            name == _COMMITTED
            or _STRUCTURE.fullmatch(name)
            or any(name[:at] in arrays for at, letter in enumerate(name) if letter == "/")
        ):
            continue
        opened.add(full_name)
    return opened


class _State:
    """The leaves of all trees of a checkpoint, by paths, and what they are taken for."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._tensors: dict[Path, ForeignTensor] = {}
        self._values: dict[Path, object] = {}
        self._items: list[Path] = []

    def add(self, tree: OrbaxTree, prefix: Path, location: str) -> None:
        """Add the leaves of a tree."""
        if prefix:
            self._items.append(prefix)
        names: dict[str, Path] = {}
        for leaf in tree.leaves:
            if leaf.is_empty:
                continue
            path = (*prefix, *leaf.path)
            if leaf.array_name in names:
                raise damaged(
                    f"{location}/{METADATA}",
                    f"the paths {names[leaf.array_name]} and {leaf.path} have one array",
                )
            names[leaf.array_name] = leaf.path
            self._add(tree, leaf, path)
        for name in tree.unnamed_arrays():
            self._contents.leave_out(name, f"the {METADATA} does not name it")

    def _add(self, tree: OrbaxTree, leaf: Leaf, path: Path) -> None:
        key = "/".join(path)
        if leaf.kind == _STRING:
            text = tree.string(leaf)
            if text is None:
                self._contents.leave_out(key, f"{STRINGS} does not have it")
            else:
                self._values[path] = text
            return
        tensor = tree.array(leaf)
        if tensor is None:
            self._contents.leave_out(key, f"it is of type {leaf.kind[:80]}, and no array")
        elif isinstance(tensor, str):
            self._contents.leave_out(key, f"its data type {tensor} cannot be stored")
        elif leaf.kind == _SCALAR and not tensor.spec.shape:
            self._values[path] = _number(tensor)
        else:
            self._tensors[path] = tensor

    def place(self) -> int | None:
        """Put every leaf where it belongs; return the number of steps, if the tree has it."""
        parameters = self._parameters()
        placed: set[Path] = set()
        for rest, path in parameters.items():
            self._contents.add_model_array(".".join(rest), self._tensors[path])
            placed.add(path)
        named: set[Path] = set()
        for state in sorted({path[:at] for path in self._tensors for at in _depths_of(path, "mu")}):
            slots = self._adam(state, parameters)
            if slots is None or not named.isdisjoint(slots):
                continue
            named |= set(slots)
            count = (*state, "count")
            placed.add(count)
            for rest, moments in slots.items():
                for slot, path in moments.items():
                    self._contents.add_slot(".".join(rest), slot, self._tensors[path])
                    placed.add(path)
                self._contents.add_slot(".".join(rest), "step", self._step_slot(count))
        for path, tensor in self._tensors.items():
            if path not in placed:
                self._contents.add("/".join(path) or "array", tensor)
        for path, value in self._values.items():
            self._contents.add_value("/".join(path) or "value", value)
        return self._step()

    def _step(self) -> int | None:
        """Return the number of steps next to the parameters, if there is one."""
        for path in ((*place, name) for place in self._places() for name in _STEPS):
            step = None
            if path in self._values:
                step = step_of(self._values[path])
            elif path in self._tensors:
                step = step_of(_whole_number(self._tensors[path]))
            if step is not None:
                return step
        return None

    def _places(self) -> tuple[Path, ...]:
        """Return where a training state may be: at the root, or in an item."""
        return ((), *self._items)

    def _parameters(self) -> dict[Path, Path]:
        """Return the paths of the parameters, by what follows the name of all of them."""
        for start in ((*place, name) for place in self._places() for name in _PARAMETERS):
            depth = len(start)
            below = {
                path[depth:]: path
                for path in self._tensors
                if path[:depth] == start and len(path) > depth
            }
            if below:
                return below
        first = {path[0] for path in (*self._tensors, *self._values) if path}
        is_alone = self._tensors and not self._values and not first & {"opt_state", "step"}
        return {path: path for path in self._tensors if path} if is_alone else {}

    def _adam(
        self, state: Path, parameters: Mapping[Path, Path]
    ) -> dict[Path, dict[str, Path]] | None:
        """Return the moments of parameters by slots, if what is below a path is Adam's state."""
        count = self._tensors.get((*state, "count"))
        if count is None or count.spec.shape or count.spec.dtype[:3] not in ("int", "uin"):
            return None
        depth = len(state)
        slots: dict[Path, dict[str, Path]] = {}
        for path in self._tensors:
            if path[:depth] != state or path == (*state, "count"):
                continue
            slot, rest = path[depth], path[depth + 1 :]
            if slot not in _ADAM or rest not in parameters:
                return None
            shape = self._tensors[parameters[rest]].spec.shape
            if self._tensors[path].spec.shape != shape:
                return None
            slots.setdefault(rest, {})[_ADAM[slot]] = path
        is_complete = slots and all(len(moments) == len(_ADAM) for moments in slots.values())
        return slots if is_complete else None

    def _step_slot(self, count: Path) -> ForeignTensor:
        """Return the count of steps as torch's optimizers have it: a number in floating point."""
        tensor = self._tensors[count]
        values = np.asarray(_whole_number(tensor), np.float32)
        return whole(MemoryArray("float32", values, tensor.pieces[0].array.location))


def _depths_of(path: Path, name: str) -> Sequence[int]:
    return [number for number, key in enumerate(path) if key == name]


def _number(tensor: ForeignTensor) -> object:
    """Return the only element of a tensor without dimensions."""
    ((piece),) = tensor.pieces
    values: Any = np.zeros((), numpy_dtype(tensor.spec.dtype))
    piece.array.read_into(Box.whole(()), values)
    number = values.item()
    return number if isinstance(number, bool | int | float | complex) else float(number)


def _whole_number(tensor: ForeignTensor) -> object:
    return _number(tensor) if not tensor.spec.shape else None
