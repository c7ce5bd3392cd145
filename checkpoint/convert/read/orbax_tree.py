"""Reads the leaves of a tree that Orbax saved: the `_METADATA` of an item, and its arrays.

The metadata has each leaf's path as a list of keys. Orbax names the leaf's array by the keys with
dots between them, which says nothing where keys have dots; so paths come from the list alone.
Named tuples are mappings there, and lists and tuples have numbers as keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from keepstep.checkpoint.convert.read.files import ForeignFiles, damaged
from keepstep.checkpoint.convert.read.hugging_face import read_json_object
from keepstep.checkpoint.convert.read.orbax_arrays import MANIFEST, OrbaxArrays
from keepstep.checkpoint.convert.read.pieces import ForeignTensor
from keepstep.checkpoint.format.layout.boxes import Json

METADATA = "_METADATA"
STRINGS = "_strings.json"

Path = tuple[str, ...]

_EMPTY = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple"})
_MOST_DEPTH = 200


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a tree.

    Attributes:
        path: its keys.
        kind: what Orbax calls its type: `jax.Array`, `np.ndarray`, `scalar`, `string`, `None`, ...
    """

    path: Path
    kind: str

    @property
    def array_name(self) -> str:
        """The name that Orbax gives its array."""
        return ".".join(self.path)

    @property
    def is_empty(self) -> bool:
        """Whether it stands for a container without content, or for None."""
        return self.kind in _EMPTY


class OrbaxTree:
    """A tree in a folder.

    Attributes:
        leaves: in the order of the metadata.
        custom_metadata: what the user noted with it; None for nothing.
    """

    def __init__(self, files: ForeignFiles) -> None:
        """Read the metadata of a folder."""
        self._files = files
        self._where = f"{files.url}/{METADATA}"
        content = read_json_object(files, METADATA)
        self.custom_metadata: Json = content.get("custom_metadata")
        self.leaves = tuple(_leaves(content.get("tree_metadata"), self._where))
        is_ocdbt = content.get("use_ocdbt")
        self.is_ocdbt = MANIFEST in files if is_ocdbt is None else is_ocdbt is True
        self._arrays = OrbaxArrays(
            files,
            frozenset(leaf.array_name for leaf in self.leaves),
            is_ocdbt=self.is_ocdbt,
            is_v3=content.get("use_zarr3") is True,
            stores_all=content.get("store_array_data_equal_to_fill_value") is True,
        )

    def unnamed_arrays(self) -> Iterator[str]:
        """Yield the arrays that the metadata does not name."""
        return self._arrays.unnamed()

    def array(self, leaf: Leaf) -> ForeignTensor | str | None:
        """Return a leaf's array; the data type, if that cannot be stored; None if it has none.

        Raises:
            CheckpointMissing: a chunk is not there.
            CheckpointDamaged: its metadata cannot be read.
            FormatUnsupported: TensorStore cannot open it.
        """
        return self._arrays.open(leaf.array_name)

    def string(self, leaf: Leaf) -> str | None:
        """Return a leaf's text, which is in a file of all texts; None if it is not there.

        Raises:
            CheckpointDamaged: the file is no JSON object.
        """
        content: Any = self._strings
        for key in leaf.array_name.split("/"):
            content = content.get(key) if isinstance(content, dict) else None
        return content if isinstance(content, str) else None

    @cached_property
    def _strings(self) -> Mapping[str, Json]:
        return read_json_object(self._files, STRINGS) if STRINGS in self._files else {}


def _leaves(tree: Json, where: str) -> Iterator[Leaf]:
    if not isinstance(tree, dict):
        raise damaged(where, "its tree_metadata is no mapping")
    paths: set[Path] = set()
    for name, entry in tree.items():
        keys = entry.get("key_metadata") if isinstance(entry, dict) else None
        value = entry.get("value_metadata") if isinstance(entry, dict) else None
        kind = value.get("value_type") if isinstance(value, dict) else None
        if not isinstance(keys, list) or not isinstance(kind, str) or len(keys) > _MOST_DEPTH:
            raise damaged(where, f"its entry {name[:80]} has no keys, no type, or far too many")
        path = tuple(
            key["key"] for key in keys if isinstance(key, dict) and isinstance(key.get("key"), str)
        )
        if len(path) != len(keys):
            raise damaged(where, f"its entry {name[:80]} has a key that is no text")
        if path in paths:
            raise damaged(where, f"two entries have the path {str(path)[:80]}")
        paths.add(path)
        yield Leaf(path, kind)
