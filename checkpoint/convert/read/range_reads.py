"""Plans the reads that copy arrays of files to memory: which bytes are read together.

Pure. Bytes that lie close together in a file are read by one request, whatever tensors they belong
to; no read takes more than a few MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from keepstep.checkpoint.convert.read.arrays import (
    GAP_NBYTES,
    READ_NBYTES,
    FileArray,
    Values,
    copy_span,
    dense_parts,
    view_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A dense part of a file's array, and the memory that it is copied to."""

    part: FileArray
    into: Values

    @property
    def start(self) -> int:
        """First byte in the file."""
        return self.part.file_offset

    @property
    def stop(self) -> int:
        """End of its bytes in the file."""
        return self.part.file_offset + self.part.span_nbytes

    @property
    def is_plain(self) -> bool:
        """Whether the file's bytes can be read to the memory as they are."""
        return self.part.is_contiguous and self.into.flags.c_contiguous


@dataclass(frozen=True, slots=True, eq=False)
class RangeRead:
    """Bytes of one file, and the copies that are made from them."""

    start: int
    stop: int
    copies: tuple[Copy, ...]


def copies_of(array: FileArray, into: Values) -> Iterator[Copy]:
    """Yield the copies that fill an array of the same shape."""
    for box, part in dense_parts(array):
        yield Copy(part, view_of(into, box))


def range_reads(
    copies: Iterable[Copy], most_nbytes: int = READ_NBYTES, gap_nbytes: int = GAP_NBYTES
) -> list[RangeRead]:
    """Return the reads that serve all copies, in the order of files and bytes.

    Args:
        copies: dense parts, as `copies_of` returns them.
        most_nbytes: size of a read, but where one copy alone needs more.
        gap_nbytes: bytes between two copies that are read along.
    """
    ordered = sorted(copies, key=lambda c: (c.part.extent.file.name, c.start, c.stop))
    reads: list[RangeRead] = []
    together: list[Copy] = []
    start = stop = 0
    for copy in ordered:
        joins = (
            together
            and copy.part.extent.file == together[0].part.extent.file
            and copy.start - stop <= gap_nbytes
            and max(copy.stop, stop) - start <= most_nbytes
        )
        if not joins:
            if together:
                reads.append(RangeRead(start, stop, tuple(together)))
            together, start, stop = [], copy.start, copy.stop
        together.append(copy)
        stop = max(stop, copy.stop)
    if together:
        reads.append(RangeRead(start, stop, tuple(together)))
    return reads


def execute(read: RangeRead, memory_of: Callable[[int], memoryview]) -> None:
    """Read the bytes from the file and make the copies.

    Args:
        memory_of: returns memory of a size, for bytes that cannot be read to where they belong.

    Raises:
        CheckpointError: the file cannot be read, or is shorter than it was.
    """
    file = read.copies[0].part.extent.file
    if len(read.copies) == 1 and read.copies[0].is_plain:
        file.read_into(read.start, [_bytes_of(read.copies[0].into)])
        return
    memory = memory_of(read.stop - read.start)
    file.read_into(read.start, [memory])
    for copy in read.copies:
        copy_span(memory[copy.start - read.start : copy.stop - read.start], copy.part, copy.into)


def _bytes_of(values: Values) -> memoryview:
    return values.reshape(-1).view("uint8").data
