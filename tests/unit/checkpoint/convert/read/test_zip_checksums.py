"""Zips whose directory names the same bytes many times are refused: each would be read again."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path

import pytest

from keepstep.checkpoint.convert.read import zip_checksums
from keepstep.checkpoint.convert.read.zip_checksums import CheckedBytes, check_zip
from keepstep.checkpoint.errors import CheckpointDamaged
from tests.unit.checkpoint.convert.read.written import extent_of


def local(name: bytes, content: bytes) -> bytes:
    sizes = (zlib.crc32(content), len(content), len(content), len(name), 0)
    return struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, *sizes) + name + content


def listed(name: bytes, content: bytes, offset: int) -> bytes:
    sizes = (zlib.crc32(content), len(content), len(content), len(name), 0, 0, 0, 0, 0, offset)
    return struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 0, *sizes) + name


def zip_of(body: bytes, *directory: bytes) -> bytes:
    joined = b"".join(directory)
    count = len(directory)
    return body + joined + struct.pack(
        "<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(joined), len(body), 0
    )  # fmt: skip


CONTENT = b"abc" * 9
INNER = local(b"b", b"inside")


def nothing(nbytes: int) -> None:
    pass


@pytest.mark.parametrize(
    "content",
    [
        zip_of(local(b"a", CONTENT), *(listed(b"a", CONTENT, 0) for _ in range(2))),
        zip_of(local(b"a", b""), *(listed(b"a", b"", 0) for _ in range(2))),
        zip_of(local(b"a", INNER), listed(b"a", INNER, 0), listed(b"b", b"inside", 31)),
    ],
)
def test_entries_that_share_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CheckpointDamaged, match=r"entries a and [ab] share bytes"):
        check_zip(extent_of(tmp_path, content), nothing)


def test_entries_beside_each_other_are_checked(tmp_path: Path) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in "abc":
            archive.writestr(name, CONTENT)
        archive.writestr("empty", b"")
    content = file.getvalue()
    extent = extent_of(tmp_path, content)
    assert check_zip(extent, nothing) == CheckedBytes(len(content), 3 * len(CONTENT))


class CountedEntry(zip_checksums._Entry):
    """An entry that counts how often its attributes are read."""

    __slots__ = ()
    reads = 0

    def __getattribute__(self, name: str) -> object:
        CountedEntry.reads += 1
        return super().__getattribute__(name)


def test_each_piece_looks_at_its_own_entries_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for number in range(500):
            archive.writestr(f"{number}", CONTENT)
    content = file.getvalue()
    monkeypatch.setattr(zip_checksums, "_READ_NBYTES", 16)
    monkeypatch.setattr(zip_checksums, "_Entry", CountedEntry)
    extent = extent_of(tmp_path, content)
    assert check_zip(extent, nothing) == CheckedBytes(len(content), 500 * len(CONTENT))
    pieces = len(content) // 16
    assert 500 < CountedEntry.reads < 10 * (pieces + 500)
    damage = bytearray(content)
    damage[content.index(CONTENT, len(content) // 2) + 20] ^= 1
    with pytest.raises(CheckpointDamaged, match=r"the 27 bytes of .* do not match their checksum"):
        check_zip(extent_of(tmp_path, bytes(damage)), nothing)
