"""A snapshot server's client: for workers beside it (shared memory) and for ranks elsewhere (bytes over TCP)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.layout.boxes import Box, Json, ShardIndex
from keepstep.checkpoint.memory.arena import Arena
from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.checkpoint.memory.wire import Connection

_TIMEOUT_S = 30.0


class SnapshotClient:
    """One connection to a snapshot server, for one thread at a time. `close` ends it and unmaps what it mapped."""

    def __init__(self, address: str, secret: bytes, timeout_s: float = _TIMEOUT_S) -> None:
        self.address = address
        self._connection = Connection.connect(address, secret, timeout_s)
        self._arenas: dict[int, Arena] = {}

    def begin(
        self, snapshot: SnapshotId, rank: int, nbytes: int, *, discard_uncommitted: bool = False
    ) -> tuple[int, Arena]:
        """Ask for a buffer to write a snapshot into; return its number and memory.

        The same number means the same memory as before, still mapped. With `discard_uncommitted` the rank's last snapshot is forgotten, which
        another rank has not sealed and never will.

        Raises:
            SnapshotUnavailable: the generation is over, the rank's last snapshot is not committed, memory is short, or the
                server is gone.
        """
        reply = self._ask(
            verb="begin",
            snapshot=[snapshot.generation, snapshot.step],
            rank=rank,
            nbytes=nbytes,
            mapped=list(self._arenas),
            discard_uncommitted=discard_uncommitted,
        )
        for gone in reply["dropped"]:
            self._arenas.pop(gone).close()
        number = int(reply["buffer"])
        if number not in self._arenas:
            self._arenas[number] = Arena(
                self._connection.take_descriptor(), reply["capacity"], writable=True
            )
        return number, self._arenas[number]

    def seal(self, snapshot: SnapshotId, rank: int, index_offset: int, index_nbytes: int) -> None:
        """Declare a shard complete, whose index lies in its buffer at this place. Raises as `begin` does."""
        self._ask(
            verb="seal",
            snapshot=[snapshot.generation, snapshot.step],
            rank=rank,
            index=[index_offset, index_nbytes],
        )

    def holdings(self) -> dict[SnapshotId, list[int]]:
        """Return the ranks sealed, for every snapshot held."""
        return {SnapshotId(*name): ranks for name, ranks in self._ask(verb="holdings")["sealed"]}

    def index(self, snapshot: SnapshotId, rank: int, *, wait: bool = False) -> ShardIndex:
        """Return what a sealed shard holds; with `wait`, once it has been rebuilt there."""
        while True:
            reply = self._ask(
                verb="index", snapshot=[snapshot.generation, snapshot.step], rank=rank, wait=wait
            )
            if "index" in reply:
                return ShardIndex.from_json(reply["index"])

    def open(self, snapshot: SnapshotId, rank: int) -> Arena:
        """Map a sealed shard for reading (only beside the server). The caller closes it."""
        reply = self._ask(verb="open", snapshot=[snapshot.generation, snapshot.step], rank=rank)
        return Arena(self._connection.take_descriptor(), reply["capacity"], writable=False)

    def read(
        self,
        snapshot: SnapshotId,
        pieces: Sequence[tuple[int, str, Box]],
        into: Sequence[memoryview],
        *,
        background: bool = False,
    ) -> None:
        """Read boxes (rank, key, box) of sealed shards, one after the other, into buffers of their sizes.

        With `background` the server sends no faster than it is allowed to beside the training.
        """
        self._ask(
            lambda: into,
            verb="read",
            background=background,
            snapshot=[snapshot.generation, snapshot.step],
            pieces=[[rank, key, list(box.offset), list(box.shape)] for rank, key, box in pieces],
        )

    def close(self) -> None:
        """End the connection and unmap everything."""
        self._connection.close()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _ask(self, into: Any = None, **request: Json) -> dict[str, Any]:
        self._connection.send(request)

        def buffers(message: dict[str, Any], nbytes: int) -> Sequence[memoryview]:
            return tuple(into()) if into is not None and "error" not in message else ()

        reply = self._connection.receive(buffers)
        if reply is None:
            raise SnapshotUnavailable(f"the snapshot server at {self.address} is gone")
        if "error" in reply:
            raise SnapshotUnavailable(reply["error"])
        return reply
