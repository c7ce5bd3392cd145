"""Files that tests write, and what is read of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.convert.read.files import Extent, open_files
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.format.stored.files import FileStorage


@dataclass(frozen=True, slots=True)
class CountedStorage(FileStorage):
    """Files that note which bytes were read of them."""

    reads: list[tuple[int, int]] = field(default_factory=list)

    def read_into(self, name: str, buffers: Sequence[memoryview], offset: int = 0) -> int:
        # A dataclass with slots is another class than the one that `super()` finds.
        count = FileStorage.read_into(self, name, buffers, offset)
        self.reads.append((offset, offset + count))
        return count


def extent_of(directory: Path, content: bytes, name: str = "file") -> Extent:
    """Return all bytes of a file that has this content."""
    (directory / name).write_bytes(content)
    return open_files(str(directory / name)).file(name).whole


def box_of(source: ForeignCheckpoint, key: str, box: Box) -> npt.NDArray[Any]:
    """Return the elements in a box of a tensor."""
    values = np.zeros(box.shape, numpy_dtype(source.tensors[key].dtype))
    source.read([BoxRequest(key, box, memoryview(values.reshape(-1).view(np.uint8)))])
    return values


def tensor_of(source: ForeignCheckpoint, key: str) -> npt.NDArray[Any]:
    """Return all elements of a tensor."""
    return box_of(source, key, Box.whole(source.tensors[key].shape))
