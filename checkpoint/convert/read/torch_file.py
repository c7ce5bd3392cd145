"""Reads files of `torch.save`: the zip that it writes, and its format before torch 1.6.

The result is the tree that was saved, of plain containers with `FileArray`s where tensors were;
only the pickle is read. An entry of a DCP file is such a zip, so a range of a file is opened.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from keepstep.checkpoint.convert.read.files import Checksum, Extent, damaged
from keepstep.checkpoint.convert.read.pickled_tensors import (
    PickledStorage,
    StorageKind,
    sized_extent,
    storage_of_id,
    torch_constructors,
)
from keepstep.checkpoint.convert.read.pickles import MOST_NBYTES, names_in, unpickle
from keepstep.checkpoint.convert.read.ranged_file import RangedFile
from keepstep.checkpoint.convert.read.safe_repr import safe_repr
from keepstep.checkpoint.convert.read.zip_checksums import compare_checksum
from keepstep.checkpoint.errors import CheckpointDamaged, FormatUnsupported

ZIP_SIGNATURE = b"PK\x03\x04"
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C

# A pickle of LEGACY_MAGIC, in the protocols that torch was ever asked to write.
_LEGACY_HEADS = tuple(
    b"\x80" + bytes([protocol]) + frame + b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
    for protocol, frame in (
        (2, b""),
        (3, b""),
        (4, b"\x95\x0d" + bytes(7)),
        (5, b"\x95\x0d" + bytes(7)),
    )
)
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MOST_ENTRIES = 2**20
_NEAR_NBYTES = 2**18
_PARALLEL_READS = 16
# How much of a legacy file is taken to have its pickles, until it is enough.
_PICKLES_NBYTES = (2**20, 2**24, MOST_NBYTES)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of a zip, by its place in the directory."""

    name: str
    header_offset: int
    nbytes: int
    is_stored: bool
    crc32: int


def is_torch_file(head: bytes) -> bool:
    """Return whether a file that begins so may be one of `torch.save`."""
    return head.startswith(ZIP_SIGNATURE) or is_legacy(head)


def is_legacy(head: bytes) -> bool:
    """Return whether a file that begins so was written by `torch.save` before 1.6."""
    return head.startswith(_LEGACY_HEADS)


def read_torch_file(extent: Extent) -> object:
    """Return the tree that `torch.save` wrote to a file, or to a range of one.

    Raises:
        CheckpointDamaged: it contradicts itself.
        FormatUnsupported: it is no such file, or was written on a big-endian machine.
    """
    file = RangedFile(extent)
    head = file.at(0, min(extent.nbytes, 32))
    if head.startswith(ZIP_SIGNATURE):
        return _TorchZip(extent, file).tree()
    if is_legacy(head):
        return _read_legacy(extent)
    raise FormatUnsupported(
        f"{extent.location}: it begins with {head[:8]!r}, and no file of torch.save does; name its "
        "format, if it is another"
    )


def names_in_torch_file(extent: Extent) -> frozenset[str]:
    """Return the names of classes and functions that a file of `torch.save` refers to.

    Raises:
        CheckpointDamaged: it contradicts itself.
        FormatUnsupported: it is no such file, or was written before torch 1.6.
    """
    file = RangedFile(extent)
    if not file.at(0, min(extent.nbytes, 4)).startswith(ZIP_SIGNATURE):
        raise FormatUnsupported(
            f"{extent.location}: it is no zip: files from before torch 1.6 are read without the "
            "code that they name; leave out --trust"
        )
    return _TorchZip(extent, file).names()


class _TorchZip:
    """The zip of `torch.save`: a pickle, and a stored entry for each storage."""

    def __init__(self, extent: Extent, file: RangedFile) -> None:
        self._extent = extent
        self._file = file
        entries = self._directory()
        pickles = [name for name in entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise FormatUnsupported(
                f"{extent.location}: it is a zip with {len(pickles)} entries data.pkl, and "
                "torch.save writes one"
            )
        self._root = pickles[0].removesuffix("data.pkl")
        if f"{self._root}constants.pkl" in entries:
            raise FormatUnsupported(
                f"{extent.location}: it is a program of TorchScript; save its state_dict"
            )
        self._entries = entries
        self._headers = self._storage_headers()
        self._storages: dict[str, PickledStorage] = {}

    def tree(self) -> object:
        """Return what was saved."""
        if f"{self._root}byteorder" in self._entries:
            order = self._bytes(self._content("byteorder"))
            if order != b"little":
                raise FormatUnsupported(
                    f"{self._extent.location}: its byte order is {safe_repr(order)}; save it on a "
                    "little-endian machine"
                )
        pickle = self._content("data.pkl")
        value, _ = unpickle(
            self._bytes(pickle), pickle.location, torch_constructors(), self._storage
        )
        return value

    def names(self) -> frozenset[str]:
        """Return the names of classes and functions that what was saved refers to."""
        pickle = self._content("data.pkl")
        return names_in(self._bytes(pickle), pickle.location)

    def _directory(self) -> dict[str, _Entry]:
        """Return the entries, once they are shown to be distinct, plain, and disjoint."""
        try:
            with zipfile.ZipFile(self._file) as archive:
                listed = archive.infolist()
        except CheckpointDamaged:
            raise
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError) as error:
            raise self._damaged(f"its directory cannot be read: {error}") from None
        except struct.error:
            raise self._damaged("its directory ends too early") from None
        if len(listed) > _MOST_ENTRIES:
            raise self._damaged(f"it has {len(listed)} entries")
        entries: dict[str, _Entry] = {}
        end = 0
        for info in sorted(listed, key=lambda i: i.header_offset):
            name = info.orig_filename
            if name in entries:
                raise self._damaged(f"it has two entries {name!r}")
            if name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
                raise self._damaged(f"it has an entry {name!r}, which leads elsewhere")
            if info.header_offset < end:
                raise self._damaged(f"the entry {name!r} lies within the one before it")
            end = info.header_offset + _LOCAL_HEADER.size + info.compress_size
            if end > self._extent.nbytes:
                raise self._damaged(f"the entry {name!r} ends behind the file's end")
            entries[name] = _Entry(
                name,
                info.header_offset,
                info.file_size,
                info.compress_type == zipfile.ZIP_STORED
                and info.file_size == info.compress_size
                and not info.flag_bits & 1,
                info.CRC,
            )
        return entries

    def _content(self, name: str) -> Extent:
        """Return where an entry's bytes are."""
        entry = self._entries.get(f"{self._root}{name}")
        if entry is None:
            raise self._damaged(f"it has no entry {self._root}{name}")
        if not entry.is_stored:
            raise self._damaged(
                f"the entry {entry.name} is compressed or encrypted, which torch.save never does"
            )
        header = self._headers.get(entry.name) or self._header(entry)
        signature, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
        if signature != ZIP_SIGNATURE or name_nbytes != len(entry.name.encode()):
            raise self._damaged(f"where its directory has the entry {entry.name} is another")
        offset = entry.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
        checksum = Checksum(entry.crc32, entry.name) if entry.crc32 else None
        return replace(self._extent.part(offset, entry.nbytes), checksum=checksum)

    def _bytes(self, content: Extent) -> bytes:
        """Return an entry's bytes, by way of the blocks that were read already."""
        if content.nbytes > MOST_NBYTES:
            raise self._damaged(f"{content.nbytes} bytes are where at most {MOST_NBYTES} can be")
        data = self._file.at(content.offset - self._extent.offset, content.nbytes)
        compare_checksum(content, zlib.crc32(data))
        return data

    def _header(self, entry: _Entry) -> bytes:
        return self._extent.part(entry.header_offset, _LOCAL_HEADER.size).read()

    def _storage_headers(self) -> dict[str, bytes]:
        """Return the headers of the storages, read at the same time where they lie far apart.

        Only a header, not the directory, says where its entry's bytes begin.
        """
        if self._extent.nbytes <= _NEAR_NBYTES:
            return {
                name: self._file.at(entry.header_offset, _LOCAL_HEADER.size)
                for name, entry in self._entries.items()
            }
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            return dict(
                zip(self._entries, pool.map(self._header, self._entries.values()), strict=True)
            )

    def _storage(self, identity: object) -> PickledStorage:
        """Return the storage that a persistent id names."""
        kind, key, count = storage_of_id(identity)
        if key not in self._storages:
            self._storages[key] = sized_extent(self._content(f"data/{key}"), kind, count)
        storage = self._storages[key]
        if storage.kind != kind:
            # Tensors of different types share these bytes.
            storage = sized_extent(storage.extent, kind, count)
        return storage

    def _damaged(self, contradiction: str) -> CheckpointDamaged:
        return damaged(self._extent.location, contradiction)


def _read_legacy(extent: Extent) -> object:
    """Return the tree of a file of torch before 1.6: five pickles, then the storages.

    The tree comes before the bytes of the storages, whose places follow from their sizes. So its
    pickle is gone through twice: for the sizes, and for the tensors.
    """
    for nbytes in _PICKLES_NBYTES:
        try:
            return _read_legacy_pickles(
                extent, extent.part(0, min(nbytes, extent.nbytes)).read(nbytes)
            )
        except CheckpointDamaged:
            # A pickle is cut off, or the file is damaged: nothing tells where the pickles end.
            if nbytes >= min(extent.nbytes, MOST_NBYTES):
                raise
    raise AssertionError("the last size is the largest")


def _read_legacy_pickles(extent: Extent, data: bytes) -> object:
    constructors = torch_constructors()
    _, start = unpickle(data, extent.location, constructors)
    protocol, start = unpickle(data, extent.location, constructors, start=start)
    system, start = unpickle(data, extent.location, constructors, start=start)
    if protocol != 1001 or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise FormatUnsupported(
            f"{extent.location}: it has protocol {protocol!r} or is not little-endian; save it "
            "again with a current torch"
        )
    kinds: dict[str, tuple[StorageKind, int]] = {}

    def note(identity: object) -> None:
        kind, key, count = storage_of_id(identity)
        if kinds.setdefault(key, (kind, count)) != (kind, count):
            raise ValueError(f"the storage {key} has two sizes")
        if isinstance(identity, tuple) and len(identity) > 5 and identity[5] is not None:
            raise ValueError("a storage is a view of another, as before torch 0.4")

    no_tensors = {name: _nothing for name in constructors if name.startswith("torch._")}
    _, end = unpickle(data, extent.location, constructors | no_tensors, note, start)
    keys, offset = unpickle(data, extent.location, constructors, start=end)
    if (
        not isinstance(keys, list)
        or not all(isinstance(key, str) for key in keys)
        or len(set(keys)) != len(keys)
    ):
        raise damaged(extent.location, "its list of storages has no or equal names")
    storages: dict[str, PickledStorage] = {}
    for key in keys:
        if key not in kinds:
            raise damaged(extent.location, f"it has a storage {key!r} that nothing refers to")
        kind, count = kinds[key]
        stored_count = int.from_bytes(extent.part(offset, 8).read(), "little")
        if stored_count != count:
            raise damaged(
                extent.location, f"the storage {key} has {stored_count} elements and {count}"
            )
        content = extent.part(offset + 8, count * kind.itemsize)
        storages[key] = sized_extent(content, kind, count)
        offset += 8 + content.nbytes

    def find(identity: object) -> PickledStorage:
        _, key, _ = storage_of_id(identity)
        if key not in storages:
            raise ValueError(f"the storage {key} is not in the file")
        return storages[key]

    value, _ = unpickle(data, extent.location, constructors, find, start)
    return value


def _nothing(*_: object) -> None:
    return None
