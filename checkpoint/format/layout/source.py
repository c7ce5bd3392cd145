"""Defines the interface of a restore's sources: stored checkpoints and in-memory snapshots.

Pure. `keepstep.checkpoint.format.stored.reader.StoredCheckpoint` implements it over Zarr,
`keepstep.checkpoint.snapshot.memory.memory_source.MemorySource` over snapshot servers;
`keepstep.checkpoint.live.fills.fill` fills live tensors from either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.names import OPTIMIZER_PREFIX


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A global tensor: Zarr v3 data type name and global shape in elements."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoxRequest:
    """A request to read `box` of tensor `key` into `into`.

    `into` is a writable, contiguous byte buffer of exactly the box's size, in C order.
    """

    key: str
    box: Box
    into: memoryview


def slots_in(
    tensors: Mapping[str, TensorSpec], parameters: Collection[str]
) -> dict[str, dict[str, TensorSpec]]:
    """Return the optimizer slots of these parameters among tensors, by parameter and slot."""
    slots: dict[str, dict[str, TensorSpec]] = {}
    for key, name, slot in slot_keys(tensors, parameters):
        slots.setdefault(name, {})[slot] = tensors[key]
    return slots


def slot_keys(keys: Iterable[str], parameters: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of these parameters' optimizer slots, with the parameter and the slot."""
    for key in keys:
        name, _, slot = key.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
        if key.startswith(OPTIMIZER_PREFIX) and name in parameters:
            yield key, name, slot


class Source(Protocol):
    """The complete state of one step, readable by boxes."""

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor by key."""
        ...

    def slots(self, parameters: Collection[str]) -> Mapping[str, Mapping[str, TensorSpec]]:
        """Return the optimizer slots of these parameters, by parameter and slot.

        A source of many parts asks as few of them as possible.
        """
        ...

    def known_keys(self) -> Collection[str]:
        """Return the tensors' keys that are known without asking further parts."""
        ...

    @property
    def documents(self) -> Mapping[str, Json]:
        """The parts that are not tensors, by name."""
        ...

    def read(self, requests: Sequence[BoxRequest]) -> None:
        """Fill all requests, verifying checksums where the source keeps them.

        Raises:
            CheckpointError: a box cannot be read or is damaged; the message names tensor, holder
                and remedy.
        """
        ...
