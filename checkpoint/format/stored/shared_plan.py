"""Plan of a checkpoint's chunks, made by several planners, each for the tensors that fall to it.

Pure. One planner for all would go over all tensors of all ranks: 40 million boxes where 10,240
ranks hold 4,000 tensors each. With a planner for every few ranks, each goes over about as many
boxes as these ranks hold, whatever the number of ranks. The ranks send their boxes to the planners,
and get from them which chunks they write; the publisher gets all tensors and who writes their
chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import crc32c

from keepstep.checkpoint.format.layout.boxes import Box, Entry, Json, ShardIndex
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.format.stored.chunking import (
    ChunkPlan,
    Compression,
    Piece,
    PlannedChunk,
    StoredTensor,
    chunk_at,
    plan_chunks,
)

_RANKS_PER_PLANNER = 8


@dataclass(frozen=True, slots=True)
class WriterPlan:
    """The chunks that one rank writes, and their tensors by key."""

    tensors: dict[str, StoredTensor]
    chunks: tuple[PlannedChunk, ...]

    @property
    def plan(self) -> ChunkPlan:
        """The plan of this one writer, whose position in it is 0."""
        return ChunkPlan(self.tensors, (self.chunks,))

    def to_json(self) -> Json:
        """Return the plan as JSON, without what follows from a chunk's place."""
        return [
            {key: _tensor_to_json(tensor) for key, tensor in self.tensors.items()},
            [
                [
                    chunk.key,
                    list(chunk.place),
                    [[p.holder, list(p.box.offset), list(p.box.shape)] for p in chunk.pieces],
                ]
                for chunk in self.chunks
            ],
        ]

    @classmethod
    def from_json(cls, data: Json) -> WriterPlan:
        """Parse what `to_json` returned."""
        tensors = {key: _tensor_from_json(tensor) for key, tensor in data[0].items()}
        chunks = []
        for key, place, pieces in data[1]:
            chunk = chunk_at(key, tensors[key], tuple(place))
            chunks.append(
                PlannedChunk(
                    key,
                    chunk.place,
                    chunk.box,
                    tuple(
                        Piece(holder, Box(tuple(offset), tuple(shape)))
                        for holder, offset, shape in pieces
                    ),
                )
            )
        return cls(tensors, tuple(chunks))


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Tensors by key, and which rank writes each of their chunks, in C order."""

    tensors: Mapping[str, StoredTensor]
    writers: Mapping[str, Sequence[int]]

    def to_json(self) -> Json:
        """Return the plan as JSON."""
        return [
            {key: _tensor_to_json(tensor) for key, tensor in self.tensors.items()},
            {key: list(writers) for key, writers in self.writers.items()},
        ]

    @classmethod
    def from_json(cls, data: Json) -> TensorPlan:
        """Parse what `to_json` returned."""
        return cls({key: _tensor_from_json(tensor) for key, tensor in data[0].items()}, data[1])


def planner_count(ranks: int) -> int:
    """Return how many planners so many ranks have."""
    return ceil_div(ranks, _RANKS_PER_PLANNER)


def planner_rank(planner: int) -> int:
    """Return the rank that is a planner: they are spread over the nodes."""
    return planner * _RANKS_PER_PLANNER


def entries_by_planner(entries: Iterable[Entry], planners: int) -> list[Json]:
    """Return, for each planner, this rank's boxes of the tensors that fall to it, as JSON."""
    split: list[list[Json]] = [[] for _ in range(planners)]
    for entry in entries:
        split[crc32c.crc32c(entry.key.encode()) % planners].append(
            [
                entry.key,
                entry.dtype,
                list(entry.global_shape),
                list(entry.box.offset),
                list(entry.box.shape),
            ]
        )
    return split


def plan_share(
    entries_by_rank: Sequence[Json], planner: int, compression: Compression | None = None
) -> tuple[dict[int, WriterPlan], TensorPlan]:
    """Plan the tensors that fall to one planner.

    Args:
        entries_by_rank: what `entries_by_planner` returned for this planner on each rank.
        planner: the planner's number; it only sets which of several ranks that could write a chunk
            is taken first, so that not all planners take the same.
        compression: as for `plan_chunks`.

    Returns:
        The plans of the ranks that write any of the chunks, by rank; and the tensors.

    Raises:
        LayoutMismatch: as `plan_chunks`.
    """
    indexes = [
        ShardIndex(0, tuple(map(_entry_from_json, entries)), {}) for entries in entries_by_rank
    ]
    plan = plan_chunks(indexes, first_writer=planner_rank(planner), compression=compression)
    plans: dict[int, WriterPlan] = {}
    for writer, chunks in enumerate(plan.chunks):
        if chunks:
            keys = {chunk.key for chunk in chunks}
            plans[writer] = WriterPlan({key: plan.tensors[key] for key in keys}, chunks)
    return plans, TensorPlan(plan.tensors, plan.chunk_parts())


def merged_writer_plan(plans: Iterable[WriterPlan]) -> WriterPlan:
    """Return the plans of several planners for one rank as one."""
    tensors: dict[str, StoredTensor] = {}
    chunks: list[PlannedChunk] = []
    for plan in plans:
        tensors |= plan.tensors
        chunks += plan.chunks
    return WriterPlan(tensors, tuple(chunks))


def merged_tensor_plan(plans: Iterable[TensorPlan]) -> TensorPlan:
    """Return the tensors of several planners as one plan."""
    tensors: dict[str, StoredTensor] = {}
    writers: dict[str, Sequence[int]] = {}
    for plan in plans:
        tensors |= plan.tensors
        writers |= plan.writers
    return TensorPlan(tensors, writers)


def _tensor_to_json(tensor: StoredTensor) -> Json:
    return [
        tensor.dtype,
        list(tensor.shape),
        list(tensor.chunk),
        list(tensor.cell),
        tensor.is_packed,
        dict(tensor.attributes),
        tensor.compression,
    ]


def _tensor_from_json(data: Json) -> StoredTensor:
    dtype, shape, chunk, cell, is_packed, attributes, compression = data
    return StoredTensor(
        dtype=dtype,
        shape=tuple(shape),
        chunk=tuple(chunk),
        cell=tuple(cell),
        is_packed=is_packed,
        attributes=attributes,
        compression=compression,
    )


def _entry_from_json(data: Any) -> Entry:
    key, dtype, global_shape, offset, shape = data
    box = Box(tuple(offset), tuple(shape))
    return Entry(
        key=key,
        dtype=dtype,
        global_shape=tuple(global_shape),
        box=box,
        byte_offset=0,
        nbytes=box.size * numpy_dtype(dtype).itemsize,
    )
