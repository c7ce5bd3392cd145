"""Presents a range of a foreign file as a seekable file of Python's, read in blocks that are kept.

Python's zipfile seeks and reads a few bytes at a time, which would each be a request to an object
store.
"""

from __future__ import annotations

import io
from typing import Any

from keepstep.checkpoint.convert.read.files import Extent, damaged

_BLOCK_NBYTES = 2**16
_KEPT_BLOCKS = 64
_MOST_AT_ONCE_NBYTES = 2**28


class RangedFile(io.RawIOBase):
    """A range of a file, to be read. It holds nothing that has to be closed."""

    def __init__(self, extent: Extent) -> None:
        self._extent = extent
        self._position = 0
        self._blocks: dict[int, bytes] = {}

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._extent.nbytes}
        position = base[whence] + offset
        if position < 0:
            raise ValueError(f"no file has a byte {position}")
        self._position = position
        return position

    def read(self, size: int | None = -1) -> bytes:
        """Return bytes from the position on, fewer than `size` only at the end.

        Raises:
            CheckpointDamaged: far more is asked for than an index of a file has.
        """
        left = max(0, self._extent.nbytes - self._position)
        count = left if size is None or size < 0 else min(size, left)
        if count > _MOST_AT_ONCE_NBYTES:
            raise damaged(self._extent.location, f"its index claims to have {count} bytes")
        data = self.at(self._position, count)
        self._position += count
        return data

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer from the position on, as far as there are bytes."""
        view = memoryview(buffer).cast("B")
        data = self.read(view.nbytes)
        view[: len(data)] = data
        return len(data)

    def at(self, offset: int, nbytes: int) -> bytes:
        """Return bytes that the range has, wherever the position is."""
        if nbytes > _BLOCK_NBYTES * _KEPT_BLOCKS // 4:
            return self._extent.part(offset, nbytes).read(nbytes)
        pieces = []
        for number in range(offset // _BLOCK_NBYTES, -(-(offset + nbytes) // _BLOCK_NBYTES)):
            start = number * _BLOCK_NBYTES
            block = self._block(number)
            pieces.append(block[max(offset - start, 0) : offset + nbytes - start])
        return b"".join(pieces)

    def _block(self, number: int) -> bytes:
        block = self._blocks.get(number)
        if block is None:
            start = number * _BLOCK_NBYTES
            nbytes = min(_BLOCK_NBYTES, self._extent.nbytes - start)
            block = self._extent.part(start, nbytes).read()
            while len(self._blocks) >= _KEPT_BLOCKS:
                # The one that was read first: an index is read from its end to its beginning.
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number] = block
        return block
