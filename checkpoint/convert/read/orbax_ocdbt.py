"""Finds the keys of an OCDBT store, and where their values are in the store's files.

The whole tree is read when the store is opened: it has a few numbers for each chunk of each array.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from keepstep.checkpoint.convert.read.files import Extent, ForeignFile, ForeignFiles, damaged
from keepstep.checkpoint.convert.read.orbax_ocdbt_nodes import (
    Node,
    Reference,
    Root,
    decode_manifest,
    decode_node,
)

MANIFEST = "manifest.ocdbt"

_NUMBERED = re.compile(r"manifest\.[0-9a-f]{16}")
_MOST_NODE_NBYTES = 2**28


@dataclass(frozen=True, slots=True)
class InlineValue:
    """A value that a node of the tree has itself."""

    data: bytes
    location: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.data)

    def part(self, offset: int, nbytes: int) -> InlineValue:
        """Return a range of the value.

        Raises:
            CheckpointDamaged: it does not have it.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > len(self.data):
            raise damaged(
                self.location,
                f"its content refers to {nbytes} bytes from {offset} on, and it has "
                f"{len(self.data)}",
            )
        return InlineValue(self.data[offset : offset + nbytes], self.location)

    def read(self, most_nbytes: int = _MOST_NODE_NBYTES) -> bytes:
        """Return the bytes, as `Extent.read` does."""
        return self.data


def read_ocdbt(files: ForeignFiles) -> Mapping[str, Extent | InlineValue]:
    """Return every value of the store in a folder, by key.

    Args:
        files: the folder's.

    Raises:
        CheckpointMissing: a file is not there.
        CheckpointDamaged: files contradict themselves or each other.
    """
    walk = _Walk(files)
    root = walk.root()
    if root is not None:
        walk.visit(root.node, root.height, b"")
    walk.check_extents()
    return walk.values


class _Walk:
    """One walk over a store's tree."""

    def __init__(self, files: ForeignFiles) -> None:
        self.values: dict[str, Extent | InlineValue] = {}
        self._files = files
        self._opened: dict[str, ForeignFile] = {}
        self._visited: set[Reference] = set()
        self._last_key: bytes | None = None

    def root(self) -> Root | None:
        """Return the root of the newest version's tree."""
        try:
            return self._manifest(MANIFEST)
        except LookupError:
            numbered = [name for name in self._files.names if _NUMBERED.fullmatch(name)]
        where = f"{self._files.url}/{MANIFEST}"
        if not numbered:
            raise damaged(where, "it refers to numbered manifests, and there is none")
        try:
            return self._manifest(max(numbered))
        except LookupError as error:
            raise damaged(f"{self._files.url}/{max(numbered)}", str(error)) from None

    def _manifest(self, name: str) -> Root | None:
        content = self._files.read(name, _MOST_NODE_NBYTES)
        try:
            return decode_manifest(content)
        except ValueError as error:
            raise damaged(f"{self._files.url}/{name}", str(error)) from None

    def visit(self, reference: Reference, height: int, prefix: bytes) -> None:
        """Add the values of a node and of all nodes below."""
        node, location = self._node(reference, height)
        for key, value in node.values:
            self._add(prefix + key, value, location)
        for child in node.children:
            self.visit(child.node, height - 1, prefix + child.prefix)

    def _node(self, reference: Reference, height: int) -> tuple[Node, str]:
        extent = self._extent(reference)
        if reference in self._visited:
            raise damaged(extent.location, "its tree has a node twice")
        self._visited.add(reference)
        try:
            node = decode_node(extent.read(_MOST_NODE_NBYTES), reference.base)
        except ValueError as error:
            raise damaged(extent.location, str(error)) from None
        if node.height != height:
            raise damaged(
                extent.location, f"a node of height {node.height} is where one of {height} belongs"
            )
        return node, extent.location

    def _add(self, key: bytes, value: bytes | Reference, location: str) -> None:
        if self._last_key is not None and key <= self._last_key:
            raise damaged(location, "its tree does not have the keys in order")
        self._last_key = key
        try:
            name = key.decode()
        except UnicodeDecodeError:
            raise damaged(location, f"the key {key[:80]!r} is no text") from None
        if isinstance(value, bytes):
            self.values[name] = InlineValue(value, f"{location}, {name}")
        else:
            self.values[name] = self._extent(value)

    def _extent(self, reference: Reference) -> Extent:
        path = reference.path
        if path not in self._opened:
            # Only names that the storage listed are opened, whatever path this one may lead along.
            self._opened[path] = self._files.file(path)
        return Extent(self._opened[path], reference.offset, reference.nbytes)

    def check_extents(self) -> None:
        """Refuse values that share bytes: a few bytes could stand for arrays without end."""
        by_place = sorted(
            (value.file.name, value.offset, value.nbytes)
            for value in self.values.values()
            if isinstance(value, Extent) and value.nbytes
        )
        for (name, offset, nbytes), (other, other_offset, _) in pairwise(by_place):
            if name == other and other_offset < offset + nbytes:
                location = f"{self._files.storage.url.rstrip('/')}/{name}"
                raise damaged(
                    location, f"two values have its bytes from {other_offset} on, of different keys"
                )
