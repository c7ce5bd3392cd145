"""Assembles the chunks that a node writes from the shards in its own and other nodes' memory.

A chunk may cover the shards of many ranks, on many nodes, and there are thousands of them. So the
pieces that other nodes hold are read for a batch of chunks at once, with one request to each node.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.arena import Bytes, box_bytes
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.checkpoint.snapshot.memory.messages import ShardBox
from keepstep.checkpoint.snapshot.server.plan_exchange import NodePlan
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory

# What is read from other nodes at once. Each writing thread may be in another batch.
_BATCH_NBYTES = 16 * 2**20
_PARALLEL_NODES = 8


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of a tensor, and the rank whose shard has it."""

    rank: int
    key: str
    box: Box
    itemsize: int


@dataclass(slots=True)
class _Batch:
    """Chunks whose remote pieces are read together, kept until all its chunks were assembled."""

    pieces: dict[tuple[str, Box], Sequence[_Piece]] = field(default_factory=dict)
    nbytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    data: dict[_Piece, Bytes] | None = None


class ChunkPieces:
    """Assembles chunks, in about the order in which they are given. Thread-safe.

    Args:
        memory: holds the node's shards.
        snapshot: the snapshot that is stored.
        addresses: where each rank's shard is; None in this node's memory.
        plan: what this node writes.
        connect: connects to a snapshot server.
    """

    def __init__(
        self,
        memory: SnapshotMemory,
        snapshot: SnapshotId,
        addresses: Mapping[int, str | None],
        plan: NodePlan,
        connect: Callable[[str], SnapshotClient],
    ) -> None:
        self._memory = memory
        self._snapshot = snapshot
        self._addresses = addresses
        self._connect = connect
        self._pieces: dict[tuple[str, Box], Sequence[_Piece]] = {}
        self._batches: dict[tuple[str, Box], _Batch] = {}
        self._scratch = threading.local()
        batch = _Batch()
        for writer, chunks in zip(plan.own, plan.chunks.chunks, strict=True):
            for chunk in chunks:
                name = (chunk.key, chunk.box)
                itemsize = numpy_dtype(plan.chunks.tensors[chunk.key].dtype).itemsize
                pieces = [
                    _Piece(plan.ranks[piece.holder], chunk.key, piece.box, itemsize)
                    for piece in chunk.pieces
                ] or [_Piece(writer, chunk.key, chunk.box, itemsize)]
                self._pieces[name] = pieces
                remote = [piece for piece in pieces if addresses[piece.rank] is not None]
                if remote:
                    self._batches[name] = batch
                    batch.pieces[name] = remote
                    batch.nbytes += sum(piece.box.size * itemsize for piece in remote)
                    if batch.nbytes >= _BATCH_NBYTES:
                        batch = _Batch()

    def read(self, key: str, box: Box) -> Bytes:
        """Return a chunk's bytes, which are valid until this thread reads the next one.

        They are a view if they lie together in local memory, else a copy.

        Raises:
            CheckpointError: another node that holds a piece of it cannot be read.
        """
        pieces = self._pieces[key, box]
        batch = self._batches.get((key, box))
        if batch is None and len(pieces) == 1:
            return self._local(pieces[0])
        remote = self._remote(batch, (key, box)) if batch is not None else {}
        result = self._scratch_of(box, pieces[0].itemsize)
        for piece in pieces:
            data = remote[piece] if piece in remote else self._local(piece)
            result[piece.box.slices_in(box)] = data
        return result

    def _scratch_of(self, box: Box, itemsize: int) -> Bytes:
        """Return memory for a box, the same for all of a thread's: new memory has to be cleared."""
        nbytes = box.size * itemsize
        memory: Bytes | None = getattr(self._scratch, "memory", None)
        if memory is None or memory.size < nbytes:
            memory = self._scratch.memory = np.empty(nbytes, np.uint8)
        return memory[:nbytes].reshape(*box.shape, itemsize)

    def _local(self, piece: _Piece) -> Bytes:
        wanted = ShardBox(piece.rank, piece.key, piece.box)
        entry, arena = self._memory.find_box(self._snapshot, wanted)
        return box_bytes(entry, arena.bytes, piece.box)

    def _remote(self, batch: _Batch, name: tuple[str, Box]) -> Mapping[_Piece, Bytes]:
        with batch.lock:
            if batch.data is None:
                batch.data = self._fetch(
                    [piece for pieces in batch.pieces.values() for piece in pieces]
                )
            data = {piece: batch.data[piece] for piece in batch.pieces.pop(name)}
            if not batch.pieces:
                batch.data = None
            return data

    def _fetch(self, pieces: Sequence[_Piece]) -> dict[_Piece, Bytes]:
        data = {piece: np.empty((*piece.box.shape, piece.itemsize), np.uint8) for piece in pieces}
        by_node: dict[str, list[_Piece]] = defaultdict(list)
        for piece in data:
            address = self._addresses[piece.rank]
            assert address is not None, "local pieces are not fetched"
            by_node[address].append(piece)

        def fetch_from(address: str) -> None:
            wanted = by_node[address]
            boxes = [ShardBox(piece.rank, piece.key, piece.box) for piece in wanted]
            # A connection of its own: chunks are read on several threads.
            with closing(self._connect(address)) as client:
                into = [data[piece].reshape(-1).data for piece in wanted]
                client.read(self._snapshot, boxes, into, background=True)

        with ThreadPoolExecutor(_PARALLEL_NODES) as pool:
            for _ in pool.map(fetch_from, by_node):
                pass
        return data
