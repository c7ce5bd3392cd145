"""An object of JSON members by key, of which blocks are read when a member of theirs is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import crc32c

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointMissing
from keepstep.checkpoint.layout.boxes import Json
from keepstep.checkpoint.stored.key_index import ByteRange
from keepstep.checkpoint.stored.manifest import Manifest
from keepstep.checkpoint.stored.metadata import entry_of, read_verified
from keepstep.checkpoint.stored.storage import Storage
from keepstep.checkpoint.stored.stored_json import decode

_FEWEST_READS = 8
_READS_OF_ALL = 1 / 8

_Member = TypeVar("_Member")


class IndexedObject(Generic[_Member]):
    """Members of a JSON object, parsed, by key. Thread-safe.

    Blocks are read one by one, each when it is needed, up to an eighth of all, or eight: who needs
    more of them gets the whole object by one read.

    Args:
        storage: has the checkpoint.
        manifest: the checkpoint's.
        name: the object.
        numbers: the number of the block that has each key.
        ranges: the range of each block's members.
        parse: returns what a member is, given its key, its JSON, and the object's URL.
        content: all of the object, if it was read already, verified.

    Raises:
        CheckpointDamaged: the manifest lists no such object, or a range is not in it.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        name: str,
        numbers: Mapping[str, int],
        ranges: Sequence[ByteRange],
        parse: Callable[[str, Json, str], _Member],
        content: bytes | None,
    ) -> None:
        self._where = f"{storage.url}/{manifest.directory}/{name}"
        self._storage = storage
        self._manifest = manifest
        self._name = name
        self._numbers = numbers
        self._ranges = ranges
        self._parse = parse
        self._content = content
        self._reads_left = max(_FEWEST_READS, int(_READS_OF_ALL * len(ranges)))
        self._blocks: dict[int, Mapping[str, _Member]] = {}
        self._lock = threading.Lock()
        nbytes = entry_of(storage, manifest, name).nbytes
        if any(part.offset + part.nbytes > nbytes for part in ranges):
            raise CheckpointDamaged(
                f"{self._where} has {nbytes} bytes, fewer than its index tells of; load an older "
                "step"
            )

    def get(self, key: str) -> _Member | None:
        """Return the member of a key; None if there is none.

        Raises:
            CheckpointDamaged: the key's block is not what was written.
            CheckpointError: it cannot be read.
        """
        number = self._numbers.get(key)
        if number is None:
            return None
        block = self._blocks.get(number)
        if block is None:
            with self._lock:
                block = self._blocks.get(number)
                if block is None:
                    block = self._blocks[number] = self._read(self._ranges[number])
        return block.get(key)

    def _read(self, part: ByteRange) -> Mapping[str, _Member]:
        data = self._bytes(part)
        if crc32c.crc32c(data) != part.crc32c:
            raise CheckpointDamaged(
                f"{self._where}: bytes from {part.offset} do not match their checksum, they were "
                "changed; load an older step"
            )
        members = decode(b"{%b}" % data, self._where)
        assert isinstance(members, dict), "between braces, whatever is JSON is an object"
        # Of the root metadata's members some are groups.
        return {
            key: self._parse(key, member, self._where)
            for key, member in members.items()
            if key in self._numbers
        }

    def _bytes(self, part: ByteRange) -> bytes:
        if self._content is None and self._reads_left == 0:
            self._content = read_verified(self._storage, self._manifest, self._name)
        if self._content is not None:
            return self._content[part.offset : part.offset + part.nbytes]
        self._reads_left -= 1
        data = bytearray(part.nbytes)
        path = f"{self._manifest.directory}/{self._name}"
        try:
            count = self._storage.read_into(path, [memoryview(data)], part.offset)
        except CheckpointMissing:
            raise CheckpointDamaged(f"{self._where} is missing; load an older step") from None
        return bytes(data[:count])
