"""Writes files and folders that are planned before: each is compared before it has its name.

A folder is complete with its last file. A conversion that was interrupted is taken up by the next
one: files that are there are compared with what would be written, and kept. A folder with anything
else gets no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import crc32c

from keepstep.checkpoint.convert.read.files import open_files
from keepstep.checkpoint.convert.write.boxes_in_order import block_nbytes, checksum_of
from keepstep.checkpoint.convert.write.file_target import new_file
from keepstep.checkpoint.convert.write.pieces_of_files import Piece, nbytes_of_pieces
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointExists, LayoutMismatch
from keepstep.checkpoint.format.stored.object_names import is_object_name
from keepstep.checkpoint.format.stored.storage import open_storage

Report = Callable[[int], None]

_UNFINISHED = ".unfinished"


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of a folder, by its name there, and the pieces that it consists of."""

    name: str
    pieces: tuple[Piece, ...]


def write_folder(
    url: str,
    files: Sequence[PlannedFile],
    *,
    memory_nbytes: int,
    report: Report,
    is_of_another: Callable[[str], bool] = lambda name: True,
) -> None:
    """Write the files that are missing, in their order.

    Args:
        files: its files; the last one makes it complete.
        memory_nbytes: how much memory tensors may take.
        report: called with bytes of tensors that were written, or compared.
        is_of_another: whether a file that is none of these shows that the folder has another
            checkpoint.

    Raises:
        CheckpointExists: the folder is complete, or has other files than these would be.
        LayoutMismatch: a file would be outside of the folder.
        CheckpointDamaged: what was written is not what was read.
        CheckpointError: a read or a write failed.
    """
    # Some formats name files by tensors, and who wrote the source has named those.
    for file in files:
        if not is_object_name(file.name):
            raise LayoutMismatch(f"{url}: {file.name!r} cannot be the name of a file below it")
    present = _present(url, files, is_of_another)
    for file in files:
        if file.name in present and not _is_written(url, file, memory_nbytes, report):
            raise _exists(f"{url}/{file.name}")
    for file in files:
        if file.name not in present:
            write_file(
                f"{url}/{file.name}", file.pieces, memory_nbytes=memory_nbytes, report=report
            )


def write_file(url: str, pieces: Sequence[Piece], *, memory_nbytes: int, report: Report) -> None:
    """Write a file from its pieces; it has its name once it is durable and compared.

    Raises:
        CheckpointExists: there is such a file.
        CheckpointDamaged: what was written is not what was read.
        CheckpointError: a read or a write failed.
    """
    checksum = 0

    def compare(written: str) -> None:
        if _checksum(written, memory_nbytes) != checksum:
            raise CheckpointDamaged(
                f"{url} is not what was written; look at the disk, and convert again"
            )

    with new_file(url, compare, nbytes=nbytes_of_pieces(pieces)) as stream:
        for data in _blocks(pieces, memory_nbytes, report):
            stream.write(data)
            checksum = crc32c.crc32c(data, checksum)


def _present(
    url: str, files: Sequence[PlannedFile], is_of_another: Callable[[str], bool]
) -> set[str]:
    """Return which of the files are there, if nothing else is in the folders that they are in."""
    planned = {file.name for file in files}
    folders = {file.name.rpartition("/")[0].partition("/")[0] for file in files[:-1] or files}
    present = set()
    for name in open_storage(url).names():
        if name in planned:
            present.add(name)
        elif (
            name.rpartition("/")[0].partition("/")[0] in folders
            and not name.endswith(_UNFINISHED)
            and is_of_another(name)
        ):
            raise _exists(f"{url}/{name}")
    last = files[-1].name
    if last in present:
        raise _exists(f"{url}/{last}")
    return present


def _exists(url: str) -> CheckpointExists:
    return CheckpointExists(
        f"{url} exists, and is never overwritten; give a folder without a checkpoint, or remove "
        "this one"
    )


def _is_written(url: str, file: PlannedFile, memory_nbytes: int, report: Report) -> bool:
    """Return whether a file is what would be written."""
    written = f"{url}/{file.name}"
    files = open_files(written)
    if files.file(files.names[0]).nbytes != nbytes_of_pieces(file.pieces):
        return False
    checksum = 0
    for data in _blocks(file.pieces, memory_nbytes, report):
        checksum = crc32c.crc32c(data, checksum)
    return _checksum(written, memory_nbytes) == checksum


def _blocks(
    pieces: Sequence[Piece], memory_nbytes: int, report: Report
) -> Iterator[bytes | memoryview]:
    for piece in pieces:
        if isinstance(piece, bytes):
            yield piece
            continue
        for data in piece.blocks(block_nbytes(memory_nbytes)):
            yield data
            report(data.nbytes)


def _checksum(url: str, memory_nbytes: int) -> int:
    files = open_files(url)
    return checksum_of(files.file(files.names[0]).whole, block_nbytes(memory_nbytes))
