"""Messages between the ranks that save or load together, over torch's default process group.

Messages are JSON, as bytes in tensors. Every rank must make the same calls in the same order.
Without a process group, the one process is rank 0.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from keepstep.checkpoint.layout.boxes import Box, Json
from keepstep.checkpoint.layout.dtypes import numpy_dtype
from keepstep.checkpoint.live.tensors import LiveTensor, as_bytes, plain
from keepstep.checkpoint.stored.chunking import Chunk, ChunkPlan, Piece

Bytes = npt.NDArray[np.uint8]

# What a rank sends or receives at once when chunks are gathered.
_BATCH_NBYTES = 64 * 2**20


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if _is_collective() else 0


def all_gather_json(message: Json) -> list[Json]:
    """Send this rank's message to all ranks, and return all ranks' messages, in order of ranks."""
    data = json.dumps(message).encode()
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
        json.loads(bytes(buffer.cpu().numpy()[:count]))
        for buffer, count in zip(gathered, nbytes, strict=True)
    ]


def gather_chunks(
    plan: ChunkPlan, tensors: Mapping[str, LiveTensor]
) -> dict[tuple[str, Box], Bytes]:
    """Collect the chunks that this rank writes but holds only in part; return their bytes.

    These are chunks of many ranks' small shards, and of shards that form no regular grid. All ranks
    have the same plan and go over it in the same order, so that the pieces need no names.

    Args:
        plan: the chunks of all writers.
        tensors: this rank's tensors by key.

    Returns:
        The chunks' bytes by tensor key and box, as `box_of` returns them.
    """
    collected: dict[tuple[str, Box], Bytes] = {}
    transfers = [
        _Transfer(chunk, piece, numpy_dtype(plan.tensors[chunk.key].dtype).itemsize, writer)
        for writer, chunks in enumerate(plan.chunks)
        for chunk in chunks
        for piece in chunk.pieces
    ]
    for batch in _batches(transfers):
        _exchange_pieces(batch, tensors, collected)
    return collected


def box_of(tensor: LiveTensor, box: Box) -> Bytes:
    """Return the bytes of a box within this rank's shard.

    The array has the box's shape plus a last axis of an element's bytes.
    """
    part = plain(tensor.data[box.within(tensor.box).slices])
    return np.frombuffer(as_bytes(part), np.uint8).reshape(*box.shape, part.element_size())


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A piece of a chunk, from the rank that holds it to the one that writes the chunk."""

    chunk: Chunk
    piece: Piece
    itemsize: int
    writer: int

    @property
    def nbytes(self) -> int:
        return self.piece.box.size * self.itemsize


def _batches(transfers: Sequence[_Transfer]) -> Iterator[list[_Transfer]]:
    """Yield the transfers in batches in which no rank sends or receives too much at once."""
    batch: list[_Transfer] = []
    nbytes: dict[tuple[str, int], int] = defaultdict(int)
    for transfer in transfers:
        batch.append(transfer)
        nbytes["from", transfer.piece.holder] += transfer.nbytes
        nbytes["to", transfer.writer] += transfer.nbytes
        if (
            max(nbytes["from", transfer.piece.holder], nbytes["to", transfer.writer])
            >= _BATCH_NBYTES
        ):
            yield batch
            batch, nbytes = [], defaultdict(int)
    if batch:
        yield batch


def _exchange_pieces(
    transfers: Sequence[_Transfer],
    tensors: Mapping[str, LiveTensor],
    collected: dict[tuple[str, Box], Bytes],
) -> None:
    """Send this rank's pieces and put what it receives into `collected`."""
    own_rank = rank()
    ranks = range(dist.get_world_size() if _is_collective() else 1)
    outgoing: dict[int, list[Bytes]] = {peer: [] for peer in ranks}
    incoming: dict[int, list[_Transfer]] = {peer: [] for peer in ranks}
    for transfer in transfers:
        if transfer.piece.holder == own_rank:
            piece = box_of(tensors[transfer.chunk.key], transfer.piece.box)
            outgoing[transfer.writer].append(piece.reshape(-1))
        if transfer.writer == own_rank:
            incoming[transfer.piece.holder].append(transfer)
    pieces = [piece for peer in ranks for piece in outgoing[peer]]
    sent = torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *pieces]))
    received = sent
    if _is_collective():
        received = torch.empty(
            sum(transfer.nbytes for peer in ranks for transfer in incoming[peer]),
            dtype=torch.uint8,
            device=_device(),
        )
        dist.all_to_all_single(
            received,
            sent.to(_device()),
            [sum(transfer.nbytes for transfer in incoming[peer]) for peer in ranks],
            [sum(piece.nbytes for piece in outgoing[peer]) for peer in ranks],
        )
    data, start = received.cpu().numpy(), 0
    for transfer in (transfer for peer in ranks for transfer in incoming[peer]):
        chunk = transfer.chunk
        whole = collected.setdefault(
            (chunk.key, chunk.box), np.empty((*chunk.box.shape, transfer.itemsize), np.uint8)
        )
        piece = data[start : start + transfer.nbytes]
        whole[transfer.piece.box.within(chunk.box).slices] = piece.reshape(
            *transfer.piece.box.shape, transfer.itemsize
        )
        start += transfer.nbytes


def _is_collective() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
