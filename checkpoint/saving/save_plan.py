"""Plans one rank's part of a non-blocking save: what is copied where, and what is written of it.

Everything but the bytes and the step; valid while no rank's layout changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from keepstep.checkpoint.collective import incomplete_chunks
from keepstep.checkpoint.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.layout.dtypes import numpy_dtype
from keepstep.checkpoint.layout.integers import round_up
from keepstep.checkpoint.live.packing import ALIGNMENT, pack
from keepstep.checkpoint.live.tensors import LiveTensor
from keepstep.checkpoint.saving.messages import WriterPlan
from keepstep.checkpoint.stored.chunking import Chunk, ChunkPlan, plan_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """What one rank does for a save.

    Attributes:
        copied: positions of the tensors that this rank writes chunks of.
        entries: the copied tensors' places in the buffer, in this order.
        pieces: byte offsets of the chunks that are collected from other ranks.
        nbytes: the size of all, with padding.
        incomplete: the chunks of all ranks that are collected, with their writers.
        indexes: what all ranks hold; nothing if nothing is collected.
        encoded: the `WriterPlan`, encoded once.
    """

    copied: tuple[int, ...]
    entries: tuple[Entry, ...]
    pieces: Mapping[tuple[str, Box], int]
    nbytes: int
    incomplete: tuple[tuple[int, Chunk], ...]
    indexes: tuple[ShardIndex, ...]
    encoded: bytes


def plan_save(rank: int, tensors: Sequence[LiveTensor], indexes: Sequence[ShardIndex]) -> SavePlan:
    """Plan this rank's part.

    Args:
        rank: this rank.
        tensors: what it holds.
        indexes: what each rank holds.

    Raises:
        LayoutMismatch: the ranks' states do not fit together.
    """
    plan = plan_chunks(indexes)
    incomplete = incomplete_chunks(plan, indexes)
    own_pieces = {(chunk.key, chunk.box) for writer, chunk in incomplete if writer == rank}
    keys = {c.key for c in plan.chunks[rank] if (c.key, c.box) not in own_pieces}
    copied = tuple(i for i, tensor in enumerate(tensors) if tensor.key in keys)
    entries, offset = pack([tensors[i] for i in copied])
    pieces: dict[tuple[str, Box], int] = {}
    piece_entries: list[Entry] = []
    for writer, chunk in incomplete:
        if writer != rank:
            continue
        stored = plan.tensors[chunk.key]
        nbytes = chunk.box.size * numpy_dtype(stored.dtype).itemsize
        pieces[chunk.key, chunk.box] = offset
        piece_entries.append(
            Entry(
                key=chunk.key,
                dtype=stored.dtype,
                global_shape=stored.shape,
                box=chunk.box,
                byte_offset=offset,
                nbytes=nbytes,
            )
        )
        offset += round_up(nbytes, ALIGNMENT)
    # Only rank 0 publishes, which needs all tensors; others need those that they write.
    written = {chunk.key for chunk in plan.chunks[rank]}
    own_tensors = {key: t for key, t in plan.tensors.items() if rank == 0 or key in written}
    own_chunks = tuple(c if position == rank else () for position, c in enumerate(plan.chunks))
    writer_plan = WriterPlan(
        rank=rank,
        chunks=ChunkPlan(own_tensors, own_chunks),
        entries=tuple(chain(entries, piece_entries)),
    )
    return SavePlan(
        copied=copied,
        entries=entries,
        pieces=pieces,
        nbytes=offset,
        incomplete=incomplete,
        indexes=tuple(indexes) if incomplete else (),
        encoded=writer_plan.encode(),
    )
