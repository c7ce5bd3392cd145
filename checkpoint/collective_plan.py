"""Plans what each rank writes of a checkpoint: gathers all indexes, collects missing pieces.

Ranks exchange the names and boxes that they hold, as JSON, and each computes the same plan. Every
rank must make the same calls in the same order, as for `keepstep.checkpoint.collective`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from keepstep.checkpoint.agreement import on_all_ranks_gathering
from keepstep.checkpoint.collective import Bytes, box_of, gather_chunks, incomplete_chunks
from keepstep.checkpoint.layout.boxes import Box, Entry, Json, ShardIndex
from keepstep.checkpoint.layout.documents import merged_documents
from keepstep.checkpoint.live.tensors import LiveState
from keepstep.checkpoint.stored.chunking import ChunkPlan, plan_chunks
from keepstep.checkpoint.stored.format import Attempt, StoredStep
from keepstep.checkpoint.stored.writer import ReadBox


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePlan:
    """What all ranks write together.

    Attributes:
        attempt: the attempt, of the same name on all ranks.
        chunks: who writes which chunks.
        read_box: returns the bytes of a box of this rank's chunks.
        documents: all ranks' documents, merged.
        failures: what each rank tells about its last save.
    """

    attempt: Attempt
    chunks: ChunkPlan
    read_box: ReadBox
    documents: Mapping[str, Json]
    failures: tuple[Json, ...]


def plan_collectively(
    stored: StoredStep, capture: Callable[[], LiveState], failure: Json
) -> CollectivePlan:
    """Plan a save with all ranks.

    Args:
        stored: the checkpoint to write.
        capture: returns this rank's live state.
        failure: what this rank tells the others about its last save.

    Raises:
        CheckpointError: a rank could not capture its state, or the ranks' states do not fit
            together; every rank raises.
    """
    # All ranks take the name that rank 0 gives the attempt.
    live, gathered = on_all_ranks_gathering(
        capture, lambda live: [uuid.uuid4().hex, index_of(live).to_json(), failure]
    )
    indexes = [ShardIndex.from_json(index) for _, index, _ in gathered]
    chunks = plan_chunks(indexes)
    tensors = {tensor.key: tensor for tensor in live.tensors}
    collected = gather_chunks(incomplete_chunks(chunks, indexes), indexes, tensors)

    def read_box(key: str, box: Box) -> Bytes:
        return collected[key, box] if (key, box) in collected else box_of(tensors[key], box)

    return CollectivePlan(
        attempt=Attempt(stored, gathered[0][0]),
        chunks=chunks,
        read_box=read_box,
        documents=merged_documents(index.documents for index in indexes),
        failures=tuple(failure for *_, failure in gathered),
    )


def index_of(live: LiveState) -> ShardIndex:
    """Return which boxes of which tensors a rank holds; the offsets mean nothing."""
    entries = tuple(
        Entry(
            key=tensor.key,
            dtype=tensor.dtype,
            global_shape=tensor.global_shape,
            box=tensor.box,
            byte_offset=0,
            nbytes=tensor.data.numel() * tensor.data.element_size(),
        )
        for tensor in live.tensors
    )
    return ShardIndex(0, entries, live.documents)
