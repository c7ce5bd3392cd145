"""Reads a committed snapshot from memory, wherever its shards are held, as one `Source` of boxes.

A rank reads its own old shard first, then those of its node (both from shared memory), then other
nodes' over TCP (see `nearest_first`). It fetches indexes only until they cover what is wanted, so a
rank whose layout has not changed asks no other node, and nobody waits for a shard that it does not
need. What no holder has comes from a fallback, such as a stored checkpoint of the same snapshot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from keepstep.checkpoint.errors import LayoutMismatch, SnapshotUnavailable
from keepstep.checkpoint.format.layout.boxes import Box, Entry, Json, ShardIndex
from keepstep.checkpoint.format.layout.documents import (
    OF_OWN_TENSORS,
    WITHOUT_SLOTS,
    merged_documents,
)
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.planner import Read, plan_available_reads
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.format.layout.source import BoxRequest, Source, TensorSpec, slots_in
from keepstep.checkpoint.snapshot.arena import Bytes, box_bytes
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.checkpoint.snapshot.memory.messages import ShardBox

_PARALLEL_PEERS = 8


@dataclass(frozen=True, slots=True)
class Holder:
    """A snapshot server, and the ranks whose shards it holds, or rebuilds from parity.

    `address` is `unix:PATH` for this node's server and `tcp:HOST:PORT` for another's.
    """

    address: str
    ranks: tuple[int, ...]
    rebuilds: bool = False

    @property
    def is_local(self) -> bool:
        """Whether the server is this node's."""
        return self.address.startswith("unix:")


def nearest_first(
    holders: Mapping[int, Holder], rank: int, world_size: int | None = None
) -> list[int]:
    """Return the snapshot's ranks in the order in which a reader asks for their shards.

    The reader's own shard comes first, then those of its node, then those that lie about where the
    reader's boxes are, if tensors are cut into equal pieces in the order of ranks. Shards that are
    still being rebuilt come last, for replicas may have what they hold. If the reader's own is one
    of these, one other index shows whether there are replicas.

    Args:
        holders: who holds the shard of each rank.
        rank: the rank that reads.
        world_size: the number of ranks that read; None if it is the snapshot's.
    """
    place = (rank + 0.5) / (world_size or len(holders))

    def distance(other: int) -> float:
        return abs((other + 0.5) / len(holders) - place)

    ordered = sorted(
        holders,
        key=lambda r: (
            holders[r].rebuilds, r != rank, not holders[r].is_local, round(distance(r), 9), r,
        ),
    )  # fmt: skip
    if rank in holders and holders[rank].rebuilds:
        ordered.remove(rank)
        ordered.insert(min(1, len(ordered)), rank)
    return ordered


class MemorySource:
    """A snapshot in the memory of its holders, as a `Source`. `close` ends its connections.

    Args:
        snapshot: which one to read.
        holders: who has which ranks' shards; of two for a rank the later one counts.
        secret: the job's.
        rank: the rank that reads.
        world_size: the number of ranks that read, to guess whose shards are nearest.
        open_fallback: opens a source that has the shards that no holder has; called at most once,
            and only if one of them is needed.

    Attributes:
        local_nbytes: bytes read from this node's memory.
        peer_nbytes: bytes read from other nodes, rebuilt ones among them.
        rebuilt_nbytes: bytes read of shards that were rebuilt from parity.
        fallback_nbytes: bytes read from the fallback.
    """

    def __init__(
        self,
        snapshot: SnapshotId,
        holders: Sequence[Holder],
        secret: bytes,
        *,
        rank: int,
        world_size: int | None = None,
        open_fallback: Callable[[], Source] | None = None,
    ) -> None:
        self._open_fallback = open_fallback
        self._fallback: Source | None = None
        self._snapshot = snapshot
        self._secret = secret
        self._holder = {r: holder for holder in holders for r in holder.ranks}
        self._ranks_nearest_first = nearest_first(self._holder, rank, world_size)
        self._clients: dict[str, SnapshotClient] = {}
        self._indexes: dict[int, ShardIndex] = {}
        self._tensors = _UnionMapping(self, _specs, lambda fallback: fallback.tensors)
        self._documents = _UnionMapping(
            self,
            lambda index: dict(index.documents),
            lambda fallback: fallback.documents,
            merged=OF_OWN_TENSORS,
        )
        self.local_nbytes = 0
        self.peer_nbytes = 0
        self.rebuilt_nbytes = 0
        self.fallback_nbytes = 0

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._snapshot.step

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor. Looking one up asks holders, nearest first, until one has it."""
        return self._tensors

    @property
    def documents(self) -> Mapping[str, Json]:
        """Every document. Looking one up asks holders, nearest first, until one has it.

        Of the documents in which ranks tell of their own tensors it has what all those ranks say
        whose tensors were read before: a rank may take over parameters of several others, such as
        the stages of a pipeline.
        """
        return self._documents

    def slots(self, parameters: Collection[str]) -> Mapping[str, Mapping[str, TensorSpec]]:
        """See `Source.slots`. Whoever holds a slot of a parameter holds all of its slots."""
        found: dict[str, dict[str, TensorSpec]] = {}
        missing = set(parameters)
        for rank in self._ranks_nearest_first:
            if not missing:
                return found
            index = self.index(rank)
            found |= slots_in(_specs(index), missing)
            missing.difference_update(found, index.documents.get(WITHOUT_SLOTS, ()))
        if missing and self.fallback is not None:
            found |= {name: dict(slots) for name, slots in self.fallback.slots(missing).items()}
        return found

    def known_keys(self) -> Collection[str]:
        """See `Source.known_keys`: those in the indexes that were needed so far."""
        return {entry.key for index in self._indexes.values() for entry in index.entries}

    def describe(self) -> str:
        """Return where the bytes came from, in words."""
        nbytes_by_origin = {
            "peers' memory": self.peer_nbytes,
            "parity": self.rebuilt_nbytes,
            "storage": self.fallback_nbytes,
        }
        return ", ".join(["memory", *(name for name, nbytes in nbytes_by_origin.items() if nbytes)])

    @property
    def fallback(self) -> Source | None:
        """The source of the shards that no holder has, opened the first time; None without one."""
        if self._fallback is None and self._open_fallback is not None:
            self._fallback = self._open_fallback()
        return self._fallback

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks whose shards make up the snapshot, nearest first."""
        return self._ranks_nearest_first

    @property
    def known_ranks(self) -> Sequence[int]:
        """Those of them whose indexes were needed so far."""
        return [rank for rank in self._ranks_nearest_first if rank in self._indexes]

    def index(self, rank: int) -> ShardIndex:
        """Return what a rank's shard holds, asking its holder the first time."""
        if rank not in self._indexes:
            holder = self._holder[rank]
            self._indexes[rank] = self._client(holder.address).index(
                self._snapshot, rank, wait=holder.rebuilds
            )
        return self._indexes[rank]

    def read(self, requests: Sequence[BoxRequest]) -> None:
        """See `Source.read`."""
        wanted = [(request.key, request.box) for request in requests]
        reads: list[Read] = []
        open_boxes = wanted
        # The position in `requests` of each open box.
        numbers = list(range(len(wanted)))
        for source, rank in enumerate(self._ranks_nearest_first):
            covered, missing = plan_available_reads(open_boxes, [self.index(rank)])
            reads += [Read(numbers[r.wanted], source, r.entry, r.box) for r in covered]
            numbers = [numbers[number] for number, _ in missing]
            open_boxes = [
                (wanted[number][0], box) for number, (_, box) in zip(numbers, missing, strict=True)
            ]
            if not open_boxes:
                break
        if open_boxes and self.fallback is not None:
            self._read_fallback(self.fallback, open_boxes, [requests[number] for number in numbers])
        elif open_boxes:
            key, box = open_boxes[0]
            raise LayoutMismatch(
                f"{key}: elements at offset {box.offset}, shape {box.shape}, are in no shard of "
                f"step {self.step}; the model has changed, or a rank did not save it"
            )
        self._fetch(reads, requests)

    def _read_fallback(
        self,
        fallback: Source,
        boxes: Sequence[tuple[str, Box]],
        requests: Sequence[BoxRequest],
    ) -> None:
        """Read boxes from the fallback, each into the part of its request that it is."""
        itemsizes = [numpy_dtype(fallback.tensors[key].dtype).itemsize for key, _ in boxes]
        pieces = [
            np.empty((*box.shape, itemsize), np.uint8)
            for (_, box), itemsize in zip(boxes, itemsizes, strict=True)
        ]
        fallback.read([
            BoxRequest(key, box, piece.reshape(-1).data)
            for (key, box), piece in zip(boxes, pieces, strict=True)
        ])  # fmt: skip
        for (key, box), request, itemsize, piece in zip(
            boxes, requests, itemsizes, pieces, strict=True
        ):
            _target(request, key, itemsize, box)[...] = piece
            self.fallback_nbytes += piece.nbytes

    def close(self) -> None:
        """End all connections."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _client(self, address: str) -> SnapshotClient:
        if address not in self._clients:
            self._clients[address] = SnapshotClient(address, self._secret)
        return self._clients[address]

    def _fetch(self, reads: Sequence[Read], requests: Sequence[BoxRequest]) -> None:
        local: dict[int, list[Read]] = defaultdict(list)
        remote: dict[str, list[Read]] = defaultdict(list)
        for read in reads:
            rank = self._ranks_nearest_first[read.source]
            holder = self._holder[rank]
            if holder.rebuilds:
                self.rebuilt_nbytes += read.box.size * _itemsize(read.entry)
            if holder.is_local:
                local[rank].append(read)
            else:
                remote[holder.address].append(read)
        for rank, local_reads in local.items():
            self._copy_local(rank, local_reads, requests)
        if remote:
            with ThreadPoolExecutor(_PARALLEL_PEERS) as pool:
                for future in [
                    pool.submit(self._copy_remote, self._client(address), peer_reads, requests)
                    for address, peer_reads in remote.items()
                ]:
                    future.result()

    def _copy_local(self, rank: int, reads: Sequence[Read], requests: Sequence[BoxRequest]) -> None:
        arena = self._client(self._holder[rank].address).open(self._snapshot, rank)
        try:
            for read in reads:
                source = box_bytes(read.entry, arena.bytes, read.box)
                _target(requests[read.wanted], read.entry.key, source.shape[-1], read.box)[...] = (
                    source
                )
                self.local_nbytes += source.nbytes
                del source
        finally:
            arena.close()

    def _copy_remote(
        self, client: SnapshotClient, reads: Sequence[Read], requests: Sequence[BoxRequest]
    ) -> None:
        boxes, buffers, scattered = [], [], []
        for read in reads:
            rank = self._ranks_nearest_first[read.source]
            boxes.append(ShardBox(rank, read.entry.key, read.box))
            target = _target(requests[read.wanted], read.entry.key, _itemsize(read.entry), read.box)
            if target.flags.c_contiguous:
                buffers.append(target.reshape(-1).data)
            else:
                staging = np.empty(target.shape, np.uint8)
                scattered.append((target, staging))
                buffers.append(staging.reshape(-1).data)
            self.peer_nbytes += target.nbytes
        client.read(self._snapshot, boxes, buffers)
        for target, staging in scattered:
            target[...] = staging


class _UnionMapping(Mapping[str, Any]):
    """A union over the ranks' indexes, searched nearest first, and over the fallback.

    Only the rank itself has keys that begin with `rank/<rank>/`.
    """

    def __init__(
        self,
        snapshot: MemorySource,
        view: Callable[[ShardIndex], dict[str, Any]],
        view_fallback: Callable[[Source], Mapping[str, Any]],
        *,
        merged: Collection[str] = (),
    ) -> None:
        self._snapshot = snapshot
        self._view = view
        self._merged = merged
        self._view_fallback = view_fallback
        self._parts: dict[int, dict[str, Any]] = {}

    def _part(self, rank: int) -> dict[str, Any]:
        if rank not in self._parts:
            self._parts[rank] = self._view(self._snapshot.index(rank))
        return self._parts[rank]

    def __getitem__(self, key: str) -> Any:
        found = self._first(key)
        if key not in self._merged:
            return found
        # What is nearest counts, so it is the last.
        known = [self._part(rank) for rank in reversed(self._snapshot.known_ranks)]
        parts = [{key: part[key]} for part in known if key in part]
        if self._snapshot.fallback_nbytes and self._snapshot.fallback is not None:
            stored = self._view_fallback(self._snapshot.fallback)
            parts[:0] = [{key: stored[key]}] if key in stored else []
        return merged_documents(parts)[key] if parts else found

    def _first(self, key: str) -> Any:
        ranks = self._snapshot.ranks
        if key.startswith("rank/"):
            owner = int(key.split("/")[1])
            ranks = [owner] if owner in ranks else []
        for rank in ranks:
            part = self._part(rank)
            if key in part:
                return part[key]
        fallback = self._snapshot.fallback
        if fallback is None:
            raise KeyError(key)
        return self._view_fallback(fallback)[key]

    def __iter__(self) -> Iterator[str]:
        keys = {key: None for rank in self._snapshot.ranks for key in self._part(rank)}
        fallback = self._snapshot.fallback
        if fallback is not None:
            keys |= dict.fromkeys(self._view_fallback(fallback))
        return iter(keys)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _specs(index: ShardIndex) -> dict[str, TensorSpec]:
    return {entry.key: TensorSpec(entry.dtype, entry.global_shape) for entry in index.entries}


def _itemsize(entry: Entry) -> int:
    """Return the size of one element in bytes."""
    return entry.nbytes // max(entry.box.size, 1)


def _target(request: BoxRequest, key: str, itemsize: int, box: Box) -> Bytes:
    """Return the part of a request's buffer that a box fills.

    Its shape is the box's plus a last axis of one element's bytes.
    """
    buffer = np.frombuffer(request.into, dtype=np.uint8)
    if buffer.nbytes != request.box.size * itemsize:
        raise SnapshotUnavailable(
            f"{key}: the snapshot's elements have {itemsize} bytes, the tensor to fill has others; "
            "its dtype has changed"
        )
    return buffer.reshape(*request.box.shape, itemsize)[box.within(request.box).slices]
