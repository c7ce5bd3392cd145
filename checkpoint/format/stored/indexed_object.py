"""An object of JSON members by key, of which blocks are read when a member of theirs is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import crc32c

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointMissing
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.stored.key_index import INDEXED_NBYTES, ByteRange
from keepstep.checkpoint.format.stored.manifest import Manifest
from keepstep.checkpoint.format.stored.metadata import PARALLEL_READS, entry_of, read_verified
from keepstep.checkpoint.format.stored.storage import Storage
from keepstep.checkpoint.format.stored.stored_json import decode

_SINGLE_READS = 8
"""How many blocks are read one after the other: who goes on to ask so gets all."""

_LARGEST_READ_NBYTES = 2**26

_Member = TypeVar("_Member")


class IndexedObject(Generic[_Member]):
    """Members of a JSON object, parsed, by key. Thread-safe.

    Blocks are read when they are needed, several at a time. The whole object is read at once where
    it is small, where half of its blocks are needed, and after some reads of one block.

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
        *,
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
        self._single_reads = 0
        self._blocks: dict[int, Mapping[str, _Member]] = {}
        self._lock = threading.Lock()
        self._nbytes = nbytes = entry_of(storage, manifest, name).nbytes
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
        if number not in self._blocks:
            self.load((key,))
        return self._blocks[number].get(key)

    def load(self, keys: Iterable[str]) -> None:
        """Read and parse the members of these keys, as far as that was not done.

        Raises:
            CheckpointDamaged: the block of one of them is not what was written.
            CheckpointError: one cannot be read.
        """
        wanted = {self._numbers[key] for key in keys if key in self._numbers}
        with self._lock:
            missing = sorted(wanted - self._blocks.keys())
            for number, data in zip(missing, self._read(missing), strict=True):
                self._blocks[number] = self._parsed(number, data)
            if len(self._blocks) == len(self._ranges):
                self._content = None

    def _read(self, numbers: Sequence[int]) -> list[bytes]:
        if not numbers:
            return []
        ranges = [self._ranges[number] for number in numbers]
        if self._content is None and self._needs_all(ranges):
            self._content = read_verified(self._storage, self._manifest, self._name)
        content = self._content
        if content is not None:
            return [content[part.offset : part.offset + part.nbytes] for part in ranges]
        if len(ranges) == 1:
            self._single_reads += 1
            return [self._bytes(ranges[0])]
        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            return list(pool.map(self._bytes, ranges))

    def _needs_all(self, ranges: Sequence[ByteRange]) -> bool:
        return (
            self._nbytes < INDEXED_NBYTES
            or self._single_reads >= _SINGLE_READS
            or 2 * (len(self._blocks) + len(ranges)) > len(self._ranges)
            # Memory is taken for a range before it is read: metadata may claim any size.
            or any(part.nbytes > _LARGEST_READ_NBYTES for part in ranges)
        )

    def _parsed(self, number: int, data: bytes) -> Mapping[str, _Member]:
        part = self._ranges[number]
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
            if self._numbers.get(key) == number
        }

    def _bytes(self, part: ByteRange) -> bytes:
        data = bytearray(part.nbytes)
        path = f"{self._manifest.directory}/{self._name}"
        try:
            count = self._storage.read_into(path, [memoryview(data)], part.offset)
        except CheckpointMissing:
            raise CheckpointDamaged(f"{self._where} is missing; load an older step") from None
        return bytes(data[:count])
