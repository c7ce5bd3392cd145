"""What can be loaded from: the one face that stored checkpoints and in-memory snapshots show to a restore.

Pure contract. `keepstep.checkpoint.stored.reader.StoredCheckpoint` implements it over Zarr, `keepstep.checkpoint.memory.memory_source.MemorySource` over snapshot
servers; `keepstep.checkpoint.live.tensors.restore` fills live tensors from either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from keepstep.checkpoint.layout.boxes import Box, Json


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as a whole: Zarr v3 data type name and global shape in elements."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoxRequest:
    """Read `box` of tensor `key` into `into`: a writable, contiguous byte buffer of exactly the box's size, C order."""

    key: str
    box: Box
    into: memoryview


class Source(Protocol):
    """A complete state of one step, readable by boxes."""

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor by key."""
        ...

    @property
    def documents(self) -> Mapping[str, Json]:
        """Every part that is no tensor, by name."""
        ...

    def read(self, requests: Sequence[BoxRequest]) -> None:
        """Fill all requests, verifying checksums where the source keeps them.

        Raises:
            CheckpointError: a box cannot be read or is damaged; the message names tensor, holder and remedy.
        """
        ...
