"""Messages between the ranks that save or load together, over torch's default process group.

Messages are JSON, as bytes in tensors. Every rank must make the same calls in the same order.
Without a process group, the one process is rank 0.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from keepstep.checkpoint.layout.boxes import Box, Entry, Json, ShardIndex
from keepstep.checkpoint.layout.dtypes import numpy_dtype
from keepstep.checkpoint.layout.planner import plan_reads
from keepstep.checkpoint.live.tensors import LiveTensor, as_bytes, plain
from keepstep.checkpoint.stored.chunking import Chunk, ChunkPlan

Bytes = npt.NDArray[np.uint8]

_LENGTH_NBYTES = 8
_INLINE_NBYTES = 1024
"""What of a message goes with its length. A collective costs more than these bytes."""


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if _is_collective() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if _is_collective() else 1


def default_store() -> Store | None:
    """Return the store that the process group was made with; None without a process group."""
    return _get_default_store() if _is_collective() else None


def all_gather_json(message: Json) -> list[Json]:
    """Send this rank's message to all ranks, and return all ranks' messages, in order of ranks.

    Messages of up to a kilobyte take one collective, longer ones a second for what is left.
    """
    data = json.dumps(message).encode()
    if not _is_collective():
        return [json.loads(data)]
    heads = _all_gather(
        len(data).to_bytes(_LENGTH_NBYTES, "little") + data[:_INLINE_NBYTES],
        _LENGTH_NBYTES + _INLINE_NBYTES,
    )
    nbytes = [int.from_bytes(head[:_LENGTH_NBYTES], "little") for head in heads]
    rest_nbytes = max(nbytes) - _INLINE_NBYTES
    rests = [b""] * len(heads)
    if rest_nbytes > 0:
        rests = _all_gather(data[_INLINE_NBYTES:], rest_nbytes)
    return [
        json.loads((head[_LENGTH_NBYTES:] + rest)[:count])
        for head, rest, count in zip(heads, rests, nbytes, strict=True)
    ]


def incomplete_chunks(
    plan: ChunkPlan, indexes: Sequence[ShardIndex]
) -> tuple[tuple[int, Chunk], ...]:
    """Return the chunks that their writer holds only in part, each with its writer.

    Only shards that form no regular grid have such chunks (FSDP over an uneven tensor-parallel
    split).

    Args:
        plan: the chunks of all writers.
        indexes: what each rank holds.
    """
    shards = _shards_by_key(indexes)
    return tuple(
        (writer, chunk)
        for writer, chunks in enumerate(plan.chunks)
        for chunk in chunks
        if not _holds_chunk(writer, chunk, shards[chunk.key])
    )


def gather_chunks(
    incomplete: Sequence[tuple[int, Chunk]],
    indexes: Sequence[ShardIndex],
    tensors: Mapping[str, LiveTensor],
) -> dict[tuple[str, Box], Bytes]:
    """Collect the chunks that this rank writes but holds only in part; return their bytes.

    All ranks compute the same transfers in the same order, so both ranks of the first unfinished
    transfer are always waiting for it: there is no deadlock.

    Args:
        incomplete: what `incomplete_chunks` returned.
        indexes: what each rank holds.
        tensors: this rank's tensors by key.

    Returns:
        The chunks' bytes by tensor key and box, as `box_of` returns them.
    """
    if not incomplete:
        return {}
    shards = _shards_by_key(indexes)
    own_rank = rank()
    collected: dict[tuple[str, Box], Bytes] = {}
    for writer, chunk in incomplete:
        data = _transfer(chunk, writer, shards[chunk.key], tensors)
        if writer == own_rank:
            collected[chunk.key, chunk.box] = data
    return collected


def box_of(tensor: LiveTensor, box: Box) -> Bytes:
    """Return the bytes of a box within this rank's shard.

    The array has the box's shape plus a last axis of an element's bytes.
    """
    part = plain(tensor.data[box.within(tensor.box).slices])
    return np.frombuffer(as_bytes(part), np.uint8).reshape(*box.shape, part.element_size())


def _shards_by_key(indexes: Sequence[ShardIndex]) -> Mapping[str, list[tuple[int, Entry]]]:
    shards: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
    for holder, index in enumerate(indexes):
        for entry in index.entries:
            shards[entry.key].append((holder, entry))
    return shards


def _holds_chunk(writer: int, chunk: Chunk, shards: Sequence[tuple[int, Entry]]) -> bool:
    """Return whether one shard of the writer contains the chunk."""
    return any(
        holder == writer and chunk.box.intersect(entry.box) == chunk.box for holder, entry in shards
    )


def _transfer(
    chunk: Chunk,
    writer: int,
    shards: Sequence[tuple[int, Entry]],
    tensors: Mapping[str, LiveTensor],
) -> Bytes:
    """Send this rank's pieces of a chunk to its writer; on the writer, return the chunk's bytes."""
    own_rank = rank()
    writer_first = sorted(shards, key=lambda shard: (shard[0] != writer, shard[0]))
    sources = [ShardIndex(0, (entry,), {}) for _, entry in writer_first]
    itemsize = numpy_dtype(shards[0][1].dtype).itemsize
    result = np.empty((*chunk.box.shape, itemsize) if writer == own_rank else 0, np.uint8)
    for read in plan_reads([(chunk.key, chunk.box)], sources):
        source = writer_first[read.source][0]
        if source == own_rank:
            piece = box_of(tensors[chunk.key], read.box)
            if writer == own_rank:
                result[read.box.within(chunk.box).slices] = piece
            else:
                dist.send(torch.from_numpy(piece.reshape(-1).copy()).to(_device()), dst=writer)
        elif writer == own_rank:
            incoming = torch.empty(read.box.size * itemsize, dtype=torch.uint8, device=_device())
            dist.recv(incoming, src=source)
            piece = incoming.cpu().numpy().reshape(*read.box.shape, itemsize)
            result[read.box.within(chunk.box).slices] = piece
    return result


def _all_gather(data: bytes, nbytes: int) -> list[bytes]:
    """Return all ranks' data, each padded to `nbytes`."""
    padded = torch.frombuffer(bytearray(data.ljust(nbytes)), dtype=torch.uint8).to(_device())
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, padded)
    return [buffer.cpu().numpy().tobytes() for buffer in gathered]


def _is_collective() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
