"""Bringing a committed snapshot from the memory of its holders to storage, without the workers.

Runs in the snapshot servers, on one thread of each. Every holder writes the chunks whose writers are its ranks; pieces of a chunk that only other
nodes hold are read from them. One server then publishes. A generation that ends takes its attempt along.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.layout.boxes import Box, Entry, Json, ShardIndex
from keepstep.checkpoint.layout.documents import merged_documents
from keepstep.checkpoint.layout.dtypes import numpy_dtype
from keepstep.checkpoint.layout.planner import plan_reads
from keepstep.checkpoint.memory.arena import Arena, box_bytes
from keepstep.checkpoint.memory.client import SnapshotClient
from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.checkpoint.memory.wire import Message
from keepstep.checkpoint.server.limits import RateLimiter
from keepstep.checkpoint.server.priority import yield_to_training
from keepstep.checkpoint.stored.chunking import ChunkPlan, plan_chunks
from keepstep.checkpoint.stored.format import StoredObject, StoredStep
from keepstep.checkpoint.stored.storage import open_storage
from keepstep.checkpoint.stored.writer import publish, write_part


class PersistenceHost(Protocol):
    """What persistence needs of the server it runs in."""

    def index(self, snapshot: SnapshotId, rank: int) -> ShardIndex:
        """Return what a local shard holds."""
        ...

    def memory(self, snapshot: SnapshotId, rank: int) -> Arena:
        """Return a local shard's memory."""
        ...

    def pin(self, snapshot: SnapshotId) -> None:
        """Keep a snapshot."""
        ...

    def unpin(self, snapshot: SnapshotId) -> None:
        """Let go of it."""
        ...

    def send_to_agent(self, message: Message) -> None:
        """Send an event to the agent."""
        ...


_Layout = tuple[tuple[int, ...], tuple[tuple[Entry, ...], ...]]
_EntriesByKey = Mapping[str, tuple[tuple[int, Entry], ...]]


@dataclass(frozen=True, slots=True)
class _PersistPlan:
    """A snapshot's ranks, who of them holds which entries of a tensor, its plan, and its documents."""

    snapshot: SnapshotId
    ranks: tuple[int, ...]
    entries_by_key: _EntriesByKey
    plan: ChunkPlan
    documents: Mapping[str, Json]


class Persistence:
    """Owns the thread that writes. `stop` gives up what is under way, `close` also ends the thread."""

    def __init__(self, host: PersistenceHost, secret: bytes, bytes_per_s: int) -> None:
        self._rate_limiter = RateLimiter(bytes_per_s)
        self._host = host
        self._secret = secret
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="keepstep-persist", initializer=yield_to_training
        )
        self._stop_requested = threading.Event()
        self._persist_plan: _PersistPlan | None = None
        # The plan of the last checkpoint, good for the next one of an unchanged layout.
        self._cached_plan: tuple[_Layout, _EntriesByKey, ChunkPlan] | None = None

    def start(self, request: Message) -> None:
        """Write this server's part; the agent hears `persisted` or `persist_failed`.

        Args:
            request: `url`, `snapshot`, `holders` ([address or null for this server, ranks] each) and `name`, this part's number.
        """
        stop = self._stop_requested = threading.Event()
        snapshot = SnapshotId(*request["snapshot"])
        self._host.pin(snapshot)
        self._pool.submit(self._write, request, snapshot, stop)

    def publish(self, request: Message) -> None:
        """Write the manifest; the agent hears `published` or `publish_failed`.

        Args:
            request: as for `start`, and `parts`, the entries of all listings.
        """
        self._pool.submit(self._publish, request, SnapshotId(*request["snapshot"]))

    def stop(self) -> None:
        """Give up the attempt under way."""
        self._stop_requested.set()

    def close(self) -> None:
        """Give up and end."""
        self.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _write(self, request: Message, snapshot: SnapshotId, stop: threading.Event) -> None:
        clients: dict[str, SnapshotClient] = {}
        try:
            whole = self._gather(request, snapshot, clients)
            addresses = {rank: address for address, ranks in request["holders"] for rank in ranks}
            local = [i for i, rank in enumerate(whole.ranks) if addresses[rank] is None]
            stored = StoredStep(snapshot.step, snapshot.generation)

            def read_box(key: str, box: Box) -> npt.NDArray[np.uint8]:
                data = self._assemble_box(whole, addresses, clients, key, box)
                stop.wait(self._rate_limiter.reserve(data.nbytes, time.monotonic()))
                return data

            part = write_part(
                open_storage(request["url"]),
                stored,
                whole.plan,
                local,
                read_box,
                name=request["name"],
                stop=stop.is_set,
            )
            event: Message = {"event": "persisted", "part": {"entry": part.to_json()}}
        except Exception as error:  # noqa: BLE001 - the thread's edge: whatever went wrong, the agent must hear of it
            event = {"event": "persist_failed", "reason": _reason(error)}
        finally:
            self._host.unpin(snapshot)
            for client in clients.values():
                client.close()
        self._host.send_to_agent({**event, "snapshot": request["snapshot"]})

    def _publish(self, request: Message, snapshot: SnapshotId) -> None:
        clients: dict[str, SnapshotClient] = {}
        try:
            whole = self._gather(request, snapshot, clients)
            publish(
                open_storage(request["url"]),
                StoredStep(snapshot.step, snapshot.generation),
                [StoredObject.from_json(part["entry"]) for part in request["parts"]],
                whole.plan.tensors,
                whole.documents,
            )
            event: Message = {"event": "published"}
        except Exception as error:  # noqa: BLE001 - as above
            event = {"event": "publish_failed", "reason": _reason(error)}
        finally:
            for client in clients.values():
                client.close()
        self._host.send_to_agent({**event, "snapshot": request["snapshot"]})

    def _gather(
        self, request: Message, snapshot: SnapshotId, clients: dict[str, SnapshotClient]
    ) -> _PersistPlan:
        """Return everything about the snapshot but its bytes; asked for twice, for writing and for publishing."""
        if self._persist_plan is not None and self._persist_plan.snapshot == snapshot:
            return self._persist_plan
        found: dict[int, ShardIndex] = {}
        for address, ranks in request["holders"]:
            for rank in ranks:
                if address is None:
                    found[rank] = self._host.index(snapshot, rank)
                else:
                    found[rank] = self._client(address, clients).index(snapshot, rank)
        ranks = tuple(sorted(found))
        indexes = tuple(found[rank] for rank in ranks)
        documents = merged_documents(index.documents for index in indexes)
        layout = (ranks, tuple(index.entries for index in indexes))
        if self._cached_plan is None or self._cached_plan[0] != layout:
            self._cached_plan = (layout, _entries_by_key(ranks, indexes), plan_chunks(indexes))
        _, entries_by_key, plan = self._cached_plan
        self._persist_plan = _PersistPlan(snapshot, ranks, entries_by_key, plan, documents)
        return self._persist_plan

    def _assemble_box(
        self,
        whole: _PersistPlan,
        addresses: Mapping[int, str | None],
        clients: dict[str, SnapshotClient],
        key: str,
        box: Box,
    ) -> npt.NDArray[np.uint8]:
        """Return a box's bytes, straight from local memory where it lies there whole, else put together."""
        for rank, entry in whole.entries_by_key[key]:
            if entry.box == box and addresses[rank] is None:
                return self._local_box(whole, rank, entry, box)
        near = sorted(whole.entries_by_key[key], key=lambda item: addresses[item[0]] is not None)
        reads = plan_reads([(key, box)], [ShardIndex(0, (entry,), {}) for _, entry in near])
        ranks = [near[read.source][0] for read in reads]
        if len(reads) == 1 and addresses[ranks[0]] is None:
            return self._local_box(whole, ranks[0], reads[0].entry, box)
        itemsize = numpy_dtype(whole.plan.tensors[key].dtype).itemsize
        result = np.empty((*box.shape, itemsize), np.uint8)
        for rank, read in zip(ranks, reads, strict=True):
            address = addresses[rank]
            if address is None:
                piece = self._local_box(whole, rank, read.entry, read.box)
            else:
                piece = np.empty((*read.box.shape, itemsize), np.uint8)
                # A connection of its own: boxes are read on several threads.
                client = SnapshotClient(address, self._secret)
                try:
                    client.read(
                        whole.snapshot,
                        [(rank, key, read.box)],
                        [piece.reshape(-1).data],
                        background=True,
                    )
                finally:
                    client.close()
            result[read.box.within(box).slices] = piece
        return result

    def _local_box(
        self, whole: _PersistPlan, rank: int, entry: Entry, box: Box
    ) -> npt.NDArray[np.uint8]:
        return box_bytes(entry, self._host.memory(whole.snapshot, rank).bytes, box)

    def _client(self, address: str, clients: dict[str, SnapshotClient]) -> SnapshotClient:
        if address not in clients:
            clients[address] = SnapshotClient(address, self._secret)
        return clients[address]


def _entries_by_key(ranks: Sequence[int], indexes: Sequence[ShardIndex]) -> _EntriesByKey:
    entries_by_key: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
    for rank, index in zip(ranks, indexes, strict=True):
        for entry in index.entries:
            entries_by_key[entry.key].append((rank, entry))
    return {key: tuple(entries) for key, entries in entries_by_key.items()}


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else repr(error)
