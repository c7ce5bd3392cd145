"""Reads files of another tool's checkpoint by ranges, from any storage.

Whoever wrote them is not trusted. A file is opened only by a name that the storage listed, so no
name inside a file leads out of the checkpoint, and every range is checked against the file's size.
A link in a folder leads no further than the folder, or to the cache that Hugging Face's library
keeps next to it.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointMissing
from keepstep.checkpoint.format.stored.files import FileStorage
from keepstep.checkpoint.format.stored.storage import Storage, open_storage
from keepstep.checkpoint.format.stored.urls import parse_url

_READ_AT_ONCE_NBYTES = 2**26


def damaged(location: str, contradiction: str) -> CheckpointDamaged:
    """Return the error for a file whose content contradicts itself or its format."""
    return CheckpointDamaged(
        f"{location}: {contradiction}; it is damaged, incomplete, or not what its tool writes: "
        "copy it again, or take another checkpoint"
    )


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """A file of `nbytes` bytes, read by ranges."""

    storage: Storage = field(compare=False, repr=False)
    name: str
    nbytes: int

    @property
    def location(self) -> str:
        """URL of the file, for error messages."""
        return f"{self.storage.url.rstrip('/')}/{self.name}"

    @property
    def whole(self) -> Extent:
        """All bytes of the file."""
        return Extent(self, 0, self.nbytes)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, in order, with the bytes from `offset`.

        Raises:
            CheckpointDamaged: the file ends before the buffers are full.
            CheckpointError: the file cannot be read.
        """
        wanted = sum(buffer.nbytes for buffer in buffers)
        if not wanted:
            return
        if offset + wanted > self.nbytes:
            raise damaged(
                self.location, f"bytes {offset} to {offset + wanted} of its {self.nbytes} are used"
            )
        count = self.storage.read_into(self.name, buffers, offset)
        if count != wanted:
            raise damaged(
                self.location,
                f"it ended at byte {offset + count}, though it had {self.nbytes} bytes before",
            )


@dataclass(frozen=True, slots=True)
class Checksum:
    """The CRC-32 that a zip has of an entry, and the entry's name."""

    crc32: int
    name: str


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes of a file, such as a storage in torch's zip or an entry of DCP.

    Attributes:
        file: the file.
        offset: position of its first byte in the file.
        nbytes: number of bytes.
        checksum: that of all its bytes, if the file has one; a part has none.

    Raises:
        CheckpointDamaged: the file has no such range.
    """

    file: ForeignFile
    offset: int
    nbytes: int
    checksum: Checksum | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.offset < 0 or self.nbytes < 0 or self.offset + self.nbytes > self.file.nbytes:
            raise damaged(
                self.file.location,
                f"its content refers to {self.nbytes} bytes from {self.offset} on, and the file "
                f"has {self.file.nbytes}",
            )

    @property
    def location(self) -> str:
        """URL of the file and the range in it, for error messages."""
        if (self.offset, self.nbytes) == (0, self.file.nbytes):
            return self.file.location
        return f"{self.file.location} at byte {self.offset}"

    def part(self, offset: int, nbytes: int) -> Extent:
        """Return a range of this one; `offset` counts from its beginning.

        Raises:
            CheckpointDamaged: this range does not have it.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise damaged(
                self.location,
                f"its content refers to {nbytes} bytes from {offset} on, and it has {self.nbytes}",
            )
        return Extent(self.file, self.offset + offset, nbytes)

    def read(self, most_nbytes: int = _READ_AT_ONCE_NBYTES) -> bytes:
        """Return all bytes.

        Raises:
            CheckpointDamaged: these are more than `most_nbytes`, or the file is shorter.
        """
        if self.nbytes > most_nbytes:
            raise damaged(
                self.location, f"{self.nbytes} bytes are where at most {most_nbytes} can be"
            )
        # It hands out the bytes that it was given, which `bytes` of a buffer would copy.
        stream = io.BytesIO(bytes(self.nbytes))
        with stream.getbuffer() as buffer:
            self.file.read_into(self.offset, [buffer])
        return stream.getvalue()


@dataclass(frozen=True)
class ForeignFiles:
    """The files under a URL, or below a directory there; names are relative to it.

    Attributes:
        storage: where the files are.
        all_names: names of the storage's files, sorted.
        directory: where the checkpoint is in the storage: empty, or ends with a slash.
        is_named: whether the user named the file, so that a link there is the user's own.
    """

    storage: Storage
    all_names: tuple[str, ...]
    directory: str = ""
    is_named: bool = False

    @property
    def url(self) -> str:
        """URL of the directory, for error messages."""
        return f"{self.storage.url.rstrip('/')}/{self.directory}".rstrip("/")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the files, relative to the directory, sorted."""
        start = len(self.directory)
        return tuple(name[start:] for name in self.all_names if name.startswith(self.directory))

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def below(self, directory: str) -> ForeignFiles:
        """Return the files below a directory of this one."""
        return ForeignFiles(
            self.storage, self.all_names, f"{self.directory}{directory.strip('/')}/"
        )

    def file(self, name: str) -> ForeignFile:
        """Return a file.

        Raises:
            CheckpointMissing: the listing has no such file, whatever path the name may lead along.
            CheckpointDamaged: it is a link that leads out of the folder.
        """
        full_name = self.check_name(name)
        return ForeignFile(self.storage, full_name, self.storage.size(full_name))

    def check_name(self, name: str) -> str:
        """Return a file's name in the storage, once it is shown to be one of the folder.

        Raises:
            CheckpointMissing: the listing has no such file, whatever path the name may lead along.
            CheckpointDamaged: it is a link that leads out of the folder.
        """
        if name not in self._known:
            raise CheckpointMissing(
                f"{self.url}: there is no file {name!r}, which the checkpoint needs; copy all of "
                "its files"
            )
        full_name = f"{self.directory}{name}"
        if isinstance(self.storage, FileStorage) and not self.is_named:
            _check_link(self.storage.root, full_name)
        return full_name

    def check_links(self) -> None:
        """Refuse a folder with a link out of it, before another library opens its files by names.

        Raises:
            CheckpointDamaged: there is one.
        """
        for name in self.names:
            self.check_name(name)

    def read(self, name: str, most_nbytes: int = _READ_AT_ONCE_NBYTES) -> bytes:
        """Return a small file's bytes.

        Raises:
            CheckpointMissing: the listing has no such file.
            CheckpointDamaged: it has more than `most_nbytes`.
        """
        return self.file(name).whole.read(most_nbytes)


def open_files(url: str) -> ForeignFiles:
    """Return the files at a URL: those below a directory, or one file.

    Raises:
        CheckpointMissing: there is nothing.
        CheckpointError: the URL cannot be opened.
    """
    parsed = parse_url(url)
    path = parsed.local_path
    if path is not None and _is_regular(path):
        return ForeignFiles(open_storage(str(path.parent)), (path.name,), is_named=True)
    storage = open_storage(url)
    names = tuple(storage.names())
    if names:
        return ForeignFiles(storage, names)
    parent, _, name = url.rstrip("/").rpartition("/")
    if path is None and parsed.path.strip("/"):
        directory = open_storage(parent)
        if name in directory.names(name):
            return ForeignFiles(directory, (name,))
    raise CheckpointMissing(f"{url}: there is no file and no directory with files")


def _check_link(root: Path, name: str) -> None:
    """Refuse a link out of a folder: whoever made it chose which of the reader's files it names."""
    path = root / name
    if not path.is_symlink():
        return
    target, folder = path.resolve(), root.resolve()
    # Hugging Face's library keeps `snapshots/<revision>/<name>` as links to `blobs/<hash>`.
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if not target.is_relative_to(folder) and target.parent != blobs:
        raise CheckpointDamaged(
            f"{path}: it is a link to {target}, outside of the folder; copy that file to the "
            "folder if it belongs there"
        )


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False
