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

import crc32c

from keepstep.checkpoint.format.layout.boxes import Entry, ShardIndex
from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.format.stored.chunking import (
    ChunkPlan,
    Compression,
    PlannedChunk,
    StoredTensor,
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


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Tensors by key, and which rank writes each of their chunks, in C order."""

    tensors: Mapping[str, StoredTensor]
    writers: Mapping[str, Sequence[int]]


def planner_count(ranks: int) -> int:
    """Return how many planners so many ranks have."""
    return ceil_div(ranks, _RANKS_PER_PLANNER)


def planner_rank(planner: int) -> int:
    """Return the rank that is a planner: they are spread over the nodes."""
    return planner * _RANKS_PER_PLANNER


def entries_by_planner(entries: Iterable[Entry], planners: int) -> list[list[Entry]]:
    """Return, for each planner, this rank's boxes of the tensors that fall to it."""
    split: list[list[Entry]] = [[] for _ in range(planners)]
    for entry in entries:
        split[crc32c.crc32c(entry.key.encode()) % planners].append(entry)
    return split


def plan_share(
    entries_by_rank: Sequence[Sequence[Entry]], planner: int, compression: Compression | None = None
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
    indexes = [ShardIndex(0, tuple(entries), {}) for entries in entries_by_rank]
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
