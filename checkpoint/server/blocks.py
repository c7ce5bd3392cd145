"""Blocks of stripes on their way between snapshot servers: what is said about them, the connections, and their combination on arrival.

A node's own bytes, as stripes see them, are the shards of its ranks one after the other; its table says where each begins. Blocks are
combined tile by tile as they arrive, so that they pass through the processor's cache and never through Python.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.layout.boxes import Json
from keepstep.checkpoint.memory.arena import Bytes
from keepstep.checkpoint.memory.wire import Connection, Message
from keepstep.checkpoint.parity.erasure import Combination, Row
from keepstep.checkpoint.parity.stripes import Stripes

# As many sources' tiles as fit a core's cache beside the target's.
_TILES_NBYTES = 2**20
_SMALLEST_TILE_NBYTES = 64 * 2**10

_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """A rank's shard as part of its node's bytes: its place in these, where its index lies in it, and its CRC-32C."""

    rank: int
    offset: int
    nbytes: int
    index_offset: int
    crc: int

    def to_json(self) -> Json:
        """Return the part as a JSON list."""
        return [self.rank, self.offset, self.nbytes, self.index_offset, self.crc]


ShardTable = tuple[ShardLocation, ...]


@dataclass(frozen=True, slots=True)
class ErasureGroup:
    """An erasure group as one of its nodes sees it: where the others answer, by position, and which position is its own."""

    generation: int
    addresses: tuple[str, ...]
    position: int
    parity: int

    @property
    def stripes(self) -> Stripes:
        """Which node holds which block."""
        return Stripes(len(self.addresses), self.parity)


class ServerConnections:
    """Connections to other servers, for one thread; `interrupt`, from any, makes what it waits for end."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._connections: dict[str, Connection] = {}

    def get(self, address: str) -> Connection:
        """Return the connection to an address, made the first time."""
        if address not in self._connections:
            self._connections[address] = Connection.connect(address, self._secret, _TIMEOUT_S)
        return self._connections[address]

    def retain_only(self, addresses: Collection[str]) -> None:
        """End the connections to others than these."""
        for address in [a for a in self._connections if a not in addresses]:
            self._connections.pop(address).close()

    def interrupt(self) -> None:
        """Have every receive fail."""
        for connection in list(self._connections.values()):
            connection.interrupt()


def combine(
    coefficients: Row,
    sources: Sequence[Connection],
    counts: Sequence[int],
    target: Bytes,
    stop: threading.Event,
) -> None:
    """Receive as many bytes as the counts say from each source, and write their combination; short ones are followed by zeros.

    Raises:
        SnapshotUnavailable: a connection broke, or the attempt was stopped.
    """
    if coefficients == (1,) and counts[0] == target.nbytes:
        sources[0].receive_into(target.data)
        return
    combination = Combination(coefficients)
    tile = max(_SMALLEST_TILE_NBYTES, _TILES_NBYTES // (len(sources) + 1) // 64 * 64)
    scratch = np.empty((len(sources), tile), np.uint8)
    for start in range(0, target.nbytes, tile):
        if stop.is_set():
            raise SnapshotUnavailable("the generation is over")
        nbytes = min(tile, target.nbytes - start)
        for source, count, row in zip(sources, counts, scratch, strict=True):
            here = min(max(count - start, 0), nbytes)
            source.receive_into(row[:here].data)
            row[here:nbytes] = 0
        combination.into(target[start : start + nbytes], [row[:nbytes] for row in scratch])


def receive_head(source: Connection) -> tuple[Message, int]:
    """Return an answer's message and the size of its payload, which is still to come."""
    head = source.receive_head()
    if head is None:
        raise SnapshotUnavailable(f"{source.peer}: is gone")
    if "error" in head[0]:
        raise SnapshotUnavailable(head[0]["error"])
    return head


def table_nbytes(table: ShardTable) -> int:
    """Return how many bytes a table is of."""
    return table[-1].offset + table[-1].nbytes if table else 0
