"""Decodes the manifest and the nodes of TensorStore's key-value store OCDBT. Pure.

An OCDBT store is a B+ tree of keys; its nodes and the larger values are ranges of data files. The
format is TensorStore's, https://google.github.io/tensorstore/kvstore/ocdbt/: columns of numbers of
variable length, and keys without what they share with the key before. Here nothing is believed that
the bytes do not bear out: neither counts nor sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import crc32c

from keepstep.checkpoint.convert.read.orbax_zstd import decompress

_MANIFEST_MAGIC = bytes.fromhex("0cdb3a2a")
_NODE_MAGIC = bytes.fromhex("0cdb20de")
_HEADER_NBYTES = 12
_CHECKSUM_NBYTES = 4
_MISSING = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Reference:
    """A range of a data file.

    Attributes:
        path: the file, relative to the store.
        base: the part of `path` that paths inside the range are relative to, if it is a node.
        offset: first byte.
        nbytes: size in bytes.
    """

    path: str
    base: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Root:
    """The node that a tree's newest version begins with."""

    node: Reference
    height: int


@dataclass(frozen=True, slots=True)
class Child:
    """A node below another one.

    Attributes:
        node: where it is.
        prefix: what all keys below it begin with, without what they share above.
    """

    node: Reference
    prefix: bytes


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the tree: of a leaf the values by key, of another one the nodes below."""

    height: int
    values: tuple[tuple[bytes, bytes | Reference], ...] = ()
    children: tuple[Child, ...] = ()


def decode_manifest(data: bytes) -> Root | None:
    """Return where the newest version's tree begins; None if it is empty.

    Args:
        data: the manifest's bytes.

    Raises:
        ValueError: it contradicts itself.
        LookupError: it is of the kind that leaves the versions to numbered manifests.
    """
    cursor = _body(data, _MANIFEST_MAGIC)
    cursor.take(16)
    kind = cursor.byte()
    cursor.varints(2)
    arity = cursor.byte()
    if cursor.varint() == 1:
        cursor.take(4)
    if kind == 1:
        raise LookupError("its versions are in numbered manifests")
    if kind != 0 or not 0 < arity <= 16:
        raise ValueError(f"its manifest is of kind {kind} and arity {arity}")
    files = _files(cursor, "")
    count = cursor.count()
    cursor.varints(count)
    heights = cursor.take(count)
    references = _references(cursor, files, count)
    if not count:
        raise ValueError("its manifest has no version")
    root = references[-1]
    return None if root is None else Root(root, heights[-1])


def decode_node(data: bytes, base: str) -> Node:
    """Return a node of the tree.

    Args:
        data: its bytes.
        base: what the paths of its files are relative to.

    Raises:
        ValueError: it contradicts itself.
    """
    cursor = _body(data, _NODE_MAGIC)
    height = cursor.byte()
    files = _files(cursor, base)
    count = cursor.count()
    if not count:
        raise ValueError("a node of its tree is empty")
    node = (
        Node(height, values=_values(cursor, files, count))
        if height == 0
        else Node(height, children=_children(cursor, files, count))
    )
    if not cursor.is_at_end:
        raise ValueError("a node of its tree goes on behind its end")
    return node


class _Cursor:
    """Reads numbers and bytes, one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def is_at_end(self) -> bool:
        return self._position == len(self._data)

    def take(self, nbytes: int) -> bytes:
        start, self._position = self._position, self._position + nbytes
        if self._position > len(self._data):
            raise ValueError(f"{nbytes} bytes are announced, and it ends before")
        return self._data[start : self._position]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = shift = 0
        data, position = self._data, self._position
        while position < len(data) and shift < 64:
            digit = data[position]
            position += 1
            value |= (digit & 0x7F) << shift
            if digit < 0x80:
                if value > _MISSING:
                    break
                self._position = position
                return value
            shift += 7
        raise ValueError("a number does not end, or has more than 64 bits")

    def varints(self, count: int) -> list[int]:
        return [self.varint() for _ in range(count)]

    def count(self) -> int:
        """Return a number of entries, of which each takes a byte at least."""
        count = self.varint()
        if count > len(self._data) - self._position:
            raise ValueError(f"it announces {count} entries")
        return count


def _body(data: bytes, magic: bytes) -> _Cursor:
    """Return what is between the header and the checksum, decompressed."""
    if len(data) < _HEADER_NBYTES + 2 + _CHECKSUM_NBYTES or data[:4] != magic:
        raise ValueError("it has no header of OCDBT")
    if int.from_bytes(data[4:_HEADER_NBYTES], "little") != len(data):
        raise ValueError("its header tells of another size")
    content, checksum = data[:-_CHECKSUM_NBYTES], data[-_CHECKSUM_NBYTES:]
    if crc32c.crc32c(content).to_bytes(_CHECKSUM_NBYTES, "little") != checksum:
        raise ValueError("its checksum does not match its bytes")
    version, compression = content[_HEADER_NBYTES], content[_HEADER_NBYTES + 1]
    if version != 0 or compression > 1:
        raise ValueError(f"its version is {version} and its compression {compression}")
    body = content[_HEADER_NBYTES + 2 :]
    return _Cursor(decompress(body) if compression else body)


def _files(cursor: _Cursor, base: str) -> list[tuple[str, str]]:
    """Return the paths of data files, and the beginnings that nodes in them are relative to."""
    count = cursor.count()
    if not count:
        return []
    shared = [0, *cursor.varints(count - 1)]
    own = cursor.varints(count)
    base_lengths = cursor.varints(count)
    files = []
    previous = b""
    for kept, more, base_length in zip(shared, own, base_lengths, strict=True):
        path = previous[:kept] + cursor.take(more)
        if kept > len(previous) or base_length > len(path):
            raise ValueError("a path of its data files has an impossible length")
        files.append((base + path.decode(), base + path[:base_length].decode()))
        previous = path
    return files


def _file(files: list[tuple[str, str]], number: int) -> tuple[str, str]:
    if number >= len(files):
        raise ValueError(f"it refers to data file {number} of {len(files)}")
    return files[number]


def _references(
    cursor: _Cursor, files: list[tuple[str, str]], count: int
) -> list[Reference | None]:
    """Return references to nodes, which statistics of no use here follow."""
    numbers, offsets, sizes = (cursor.varints(count) for _ in range(3))
    cursor.varints(3 * count)
    return [
        None if (offset, nbytes) == (_MISSING, _MISSING) else _reference(files, n, offset, nbytes)
        for n, offset, nbytes in zip(numbers, offsets, sizes, strict=True)
    ]


def _reference(files: list[tuple[str, str]], number: int, offset: int, nbytes: int) -> Reference:
    path, base = _file(files, number)
    return Reference(path, base, offset, nbytes)


def _keys(cursor: _Cursor, count: int, *, with_prefixes: bool) -> tuple[list[bytes], list[int]]:
    """Return the keys of a node's entries, and how long the prefixes of whole subtrees are."""
    shared = [0, *cursor.varints(count - 1)]
    own = cursor.varints(count)
    prefixes = cursor.varints(count) if with_prefixes else []
    keys: list[bytes] = []
    previous = b""
    for kept, more in zip(shared, own, strict=True):
        if kept > len(previous):
            raise ValueError("a key shares more with the one before than that has")
        key = previous[:kept] + cursor.take(more)
        if keys and key <= previous:
            raise ValueError("its keys are not in order")
        keys.append(key)
        previous = key
    return keys, prefixes


def _values(
    cursor: _Cursor, files: list[tuple[str, str]], count: int
) -> tuple[tuple[bytes, bytes | Reference], ...]:
    keys, _ = _keys(cursor, count, with_prefixes=False)
    sizes = cursor.varints(count)
    kinds = cursor.take(count)
    if max(kinds) > 1:
        raise ValueError(f"a value is of kind {max(kinds)}")
    indirect = [number for number, kind in enumerate(kinds) if kind]
    numbers = cursor.varints(len(indirect))
    offsets = cursor.varints(len(indirect))
    references = {
        entry: _reference(files, number, offset, sizes[entry])
        for entry, number, offset in zip(indirect, numbers, offsets, strict=True)
    }
    values: list[tuple[bytes, bytes | Reference]] = []
    for entry, key in enumerate(keys):
        if entry in references:
            values.append((key, references[entry]))
            continue
        values.append((key, cursor.take(sizes[entry])))
    return tuple(values)


def _children(cursor: _Cursor, files: list[tuple[str, str]], count: int) -> tuple[Child, ...]:
    keys, prefixes = _keys(cursor, count, with_prefixes=True)
    children = []
    for key, length, node in zip(keys, prefixes, _references(cursor, files, count), strict=True):
        if node is None or length > len(key):
            raise ValueError("a node of its tree leads nowhere")
        children.append(Child(node, key[:length]))
    return tuple(children)
