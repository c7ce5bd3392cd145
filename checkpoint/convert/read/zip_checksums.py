"""Checks the bytes of zips, which files of `torch.save` are, against the checksums in them.

A checksum of 0 was not computed: PyTorch writes that if it is set to save time
(`torch.serialization.set_crc32_options`), and where it leaves the place of a tensor empty.
PyTorch compares no checksums when it loads.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from keepstep.checkpoint.convert.read.files import Checksum, Extent, damaged
from keepstep.checkpoint.convert.read.ranged_file import RangedFile
from keepstep.checkpoint.errors import CheckpointDamaged

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_READ_NBYTES = 2**22


@dataclass(frozen=True, slots=True)
class CheckedBytes:
    """Counts the bytes that were read, and those of them that match a checksum."""

    read: int = 0
    checked: int = 0

    def __add__(self, other: CheckedBytes) -> CheckedBytes:
        return CheckedBytes(self.read + other.read, self.checked + other.checked)


def check_zip(extent: Extent, report: Callable[[int], None]) -> CheckedBytes:
    """Read a zip from beginning to end, and compare the entries that have checksums with them.

    Args:
        extent: the file, or the range of one.
        report: called with bytes that were read.

    Raises:
        CheckpointDamaged: an entry does not match its checksum, or the zip contradicts itself.
    """
    entries = _entries(extent)
    position = checked = 0
    # They are in the order of their bytes, and share none: each piece completes the first of them.
    pending = deque(entry for entry in entries if entry.content.checksum)
    for data in pieces_of(extent):
        stop = position + data.nbytes
        while pending and pending[0].start < stop:
            entry = pending[0]
            first = max(entry.start, position) - position
            entry.found = zlib.crc32(data[first : entry.stop - position], entry.found)
            if entry.stop > stop:
                break
            compare_checksum(entry.content, entry.found)
            checked += entry.content.nbytes
            pending.popleft()
        position = stop
        report(data.nbytes)
    return CheckedBytes(extent.nbytes, checked)


@dataclass(slots=True)
class _Entry:
    """The bytes of an entry, their place in the zip, and the checksum of those that were read."""

    name: str
    start: int
    stop: int
    content: Extent
    found: int = 0


def check_extent(extent: Extent, report: Callable[[int], None]) -> CheckedBytes:
    """Read bytes that have a checksum, and compare them with it; others are not read.

    Args:
        extent: the bytes.
        report: called with bytes that were read, or that have no checksum.

    Raises:
        CheckpointDamaged: they do not match it.
    """
    if extent.checksum is None:
        report(extent.nbytes)
        return CheckedBytes(extent.nbytes, 0)
    found = 0
    for data in pieces_of(extent):
        found = zlib.crc32(data, found)
        report(data.nbytes)
    compare_checksum(extent, found)
    return CheckedBytes(extent.nbytes, extent.nbytes)


def compare_checksum(extent: Extent, found: int) -> None:
    """Refuse bytes whose CRC-32 is another than the one that the file has of them, if it has one.

    Raises:
        CheckpointDamaged: it is.
    """
    if extent.checksum is not None and extent.checksum.crc32 != found:
        raise damaged(
            extent.file.location,
            f"the {extent.nbytes} bytes of {extent.checksum.name} do not match their checksum",
        )


def _entries(extent: Extent) -> list[_Entry]:
    """Return a zip's entries in the order of their bytes.

    PyTorch compresses nothing; a compressed entry has the checksum of its content.
    Entries that share bytes are refused: few bytes would be read once for each entry.
    """
    file = RangedFile(extent)
    try:
        with zipfile.ZipFile(file) as archive:
            listed = archive.infolist()
    except CheckpointDamaged:
        raise
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error) as e:
        raise damaged(extent.location, f"its directory cannot be read: {e}") from None
    entries: list[_Entry] = []
    for info in sorted(listed, key=lambda i: i.header_offset):
        if entries and info.header_offset < entries[-1].stop:
            raise damaged(
                extent.location,
                f"its entries {entries[-1].name} and {info.orig_filename} share bytes",
            )
        extent.part(info.header_offset, _LOCAL_HEADER.size)
        header = file.at(info.header_offset, _LOCAL_HEADER.size)
        signature, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
        if signature != b"PK\x03\x04":
            raise damaged(extent.location, f"{info.orig_filename} is not where its directory says")
        start = info.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
        content = extent.part(start, info.compress_size)
        is_plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
        if is_plain and info.CRC:
            content = replace(content, checksum=Checksum(info.CRC, info.orig_filename))
        entries.append(_Entry(info.orig_filename, start, start + content.nbytes, content))
    return entries


def read_all(extent: Extent, report: Callable[[int], None]) -> CheckedBytes:
    """Read bytes that have no checksums.

    Raises:
        CheckpointError: they cannot be read.
    """
    for data in pieces_of(extent):
        report(data.nbytes)
    return CheckedBytes(extent.nbytes, 0)


def pieces_of(extent: Extent) -> Iterator[memoryview]:
    """Yield an extent's bytes, a few MiB at a time, in memory that is used again."""
    memory = memoryview(bytearray(min(_READ_NBYTES, extent.nbytes)))
    for start in range(0, extent.nbytes, _READ_NBYTES):
        into = memory[: min(_READ_NBYTES, extent.nbytes - start)]
        extent.file.read_into(extent.offset + start, [into])
        yield into
