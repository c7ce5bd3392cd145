"""What ranks tell each other to save or load together, over torch's default group; trivial without one.

Messages are JSON, as bytes in tensors. Every rank must make the same calls in the same order.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from keepstep.checkpoint.layout.boxes import Box, Entry, Json, ShardIndex
from keepstep.checkpoint.layout.dtypes import numpy_dtype
from keepstep.checkpoint.layout.planner import plan_reads
from keepstep.checkpoint.live.tensors import LiveTensor, as_bytes
from keepstep.checkpoint.stored.chunking import Chunk, ChunkPlan

Bytes = npt.NDArray[np.uint8]


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if _is_collective() else 0


def all_gather_json(mine: Json) -> list[Json]:
    """Give every rank every rank's message, in the order of ranks."""
    data = json.dumps(mine).encode()
    if not _is_collective():
        return [json.loads(data)]
    device = _device()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    nbytes = [int(size.item()) for size in sizes]
    padded = torch.frombuffer(bytearray(data.ljust(max(nbytes))), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(padded) for _ in nbytes]
    dist.all_gather(gathered, padded)
    return [
        json.loads(bytes(one.cpu().numpy()[:n])) for one, n in zip(gathered, nbytes, strict=True)
    ]


def gather_chunks(
    plan: ChunkPlan, indexes: Sequence[ShardIndex], tensors: Mapping[str, LiveTensor]
) -> dict[tuple[str, Box], Bytes]:
    """Bring together the chunks that this rank writes but does not hold whole; return their bytes.

    Only shards that form no regular grid have such chunks (FSDP over an uneven tensor-parallel split). Every
    rank finds the same transfers in the same order, and the first unfinished one always has both its ends
    waiting for it.
    """
    held: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
    for holder, index in enumerate(indexes):
        for entry in index.entries:
            held[entry.key].append((holder, entry))
    me = rank()
    collected: dict[tuple[str, Box], Bytes] = {}
    for writer, chunks in enumerate(plan.chunks):
        for chunk in chunks:
            if not any(
                h == writer and chunk.box.intersect(e.box) == chunk.box for h, e in held[chunk.key]
            ):
                mine = _transfer(chunk, writer, held[chunk.key], tensors)
                if writer == me:
                    collected[chunk.key, chunk.box] = mine
    return collected


def box_of(tensor: LiveTensor, box: Box) -> Bytes:
    """Return the bytes of a box that this rank holds: its shape plus a last axis of one element's bytes."""
    part = tensor.data[box.within(tensor.box).slices].contiguous().cpu()
    return np.frombuffer(as_bytes(part), np.uint8).reshape(*box.shape, part.element_size())


def _transfer(
    chunk: Chunk, writer: int, held: Sequence[tuple[int, Entry]], tensors: Mapping[str, LiveTensor]
) -> Bytes:
    """Send this rank's pieces of a chunk to its writer; return them all if this is the writer."""
    me = rank()
    order = sorted(held, key=lambda item: (item[0] != writer, item[0]))
    sources = [ShardIndex(0, (entry,), {}) for _, entry in order]
    itemsize = numpy_dtype(held[0][1].dtype).itemsize
    result = np.empty((*chunk.box.shape, itemsize) if writer == me else 0, np.uint8)
    for read in plan_reads([(chunk.key, chunk.box)], sources):
        source = order[read.source][0]
        if source == me:
            piece = box_of(tensors[chunk.key], read.box)
            if writer == me:
                result[read.box.within(chunk.box).slices] = piece
            else:
                dist.send(torch.from_numpy(piece.reshape(-1).copy()).to(_device()), dst=writer)
        elif writer == me:
            incoming = torch.empty(read.box.size * itemsize, dtype=torch.uint8, device=_device())
            dist.recv(incoming, src=source)
            piece = incoming.cpu().numpy().reshape(*read.box.shape, itemsize)
            result[read.box.within(chunk.box).slices] = piece
    return result


def _is_collective() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
