"""Reads blocks of stripes from other snapshot servers, and combines them as they arrive.

Blocks are combined tile by tile, so that they pass through the processor's cache and no Python
object is made of them. What is combined is authenticated only when `combine` has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.snapshot.arena import Bytes
from keepstep.checkpoint.snapshot.memory.client import translated_transport_errors
from keepstep.checkpoint.snapshot.memory.erasure_group import ErasureGroup
from keepstep.checkpoint.snapshot.memory.messages import (
    SNAPSHOT_PROTOCOL,
    ClientRequest,
    Refused,
    ServerReply,
)
from keepstep.checkpoint.snapshot.parity.erasure import Combination, Row
from keepstep.checkpoint.snapshot.parity.stripes import Stripes
from keepstep.transport import Connection, Identity, connect

# As many sources' tiles as fit a core's cache together with the target's.
_TILES_NBYTES = 2**20
_SMALLEST_TILE_NBYTES = 64 * 2**10
_TILE_ALIGNMENT = 64

ServerConnection: TypeAlias = Connection[ClientRequest, ServerReply]
ReplyT = TypeVar("ReplyT", bound=ServerReply)


class SnapshotIncomplete(SnapshotUnavailable):
    """A node's ranks have ended the generation of a snapshot without sealing it; none ever will."""


def stripes_of(group: ErasureGroup) -> Stripes:
    """Return which node of a group holds which block."""
    return Stripes(len(group.addresses), group.parity)


class ServerConnections:
    """Connections to other servers, for one thread.

    `interrupt`, from any thread, ends them and whatever waits on them.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._connections: dict[str, ServerConnection] = {}
        self._interrupted: set[ServerConnection] = set()

    def get(self, address: str) -> ServerConnection:
        """Return the connection to an address, made the first time.

        Raises:
            SnapshotUnavailable: no snapshot server of this job answers there.
        """
        if address not in self._connections:
            with translated_transport_errors():
                self._connections[address] = connect(address, SNAPSHOT_PROTOCOL, self._identity)
        return self._connections[address]

    def retain_only(self, addresses: Collection[str]) -> None:
        """End the connections to others than these, and close those that were interrupted."""
        for address, connection in list(self._connections.items()):
            if address not in addresses or connection in self._interrupted:
                del self._connections[address]
                connection.close()
        self._interrupted.intersection_update(self._connections.values())

    def interrupt(self) -> None:
        """End all connections; they stay in place, so that what uses them fails."""
        for connection in list(self._connections.values()):
            self._interrupted.add(connection)
            connection.interrupt()


def combine(
    coefficients: Row,
    sources: Sequence[ServerConnection],
    counts: Sequence[int],
    target: Bytes,
    stop: threading.Event,
) -> None:
    """Receive payloads and write their combination; short ones count as followed by zeros.

    Args:
        coefficients: one for each source.
        sources: connections on which a payload comes next.
        counts: the payloads' sizes in bytes, at most the target's.
        target: where to write. Its content is valid only when this has returned.
        stop: ends the attempt when set.

    Raises:
        SnapshotUnavailable: a connection broke, a payload was changed on the way, or the attempt
            was stopped.
    """
    with translated_transport_errors():
        if coefficients == (1,) and counts[0] == target.nbytes:
            sources[0].fill(target.data)
            return
        combination = Combination(coefficients)
        tile_nbytes = max(
            _SMALLEST_TILE_NBYTES,
            _TILES_NBYTES // (len(sources) + 1) // _TILE_ALIGNMENT * _TILE_ALIGNMENT,
        )
        tiles = np.empty((len(sources), tile_nbytes), np.uint8)
        for start in range(0, target.nbytes, tile_nbytes):
            if stop.is_set():
                raise SnapshotUnavailable("the generation is over")
            nbytes = min(tile_nbytes, target.nbytes - start)
            for source, count, tile in zip(sources, counts, tiles, strict=True):
                received_nbytes = min(max(count - start, 0), nbytes)
                source.fill(tile[:received_nbytes].data)
                tile[received_nbytes:nbytes] = 0
            combination.into(target[start : start + nbytes], [tile[:nbytes] for tile in tiles])


def send_request(source: ServerConnection, request: ClientRequest) -> None:
    """Send a request to another server. Raises SnapshotUnavailable if the connection broke."""
    with translated_transport_errors():
        source.send(request)


def receive_head(source: ServerConnection, expected: type[ReplyT]) -> tuple[ReplyT, int]:
    """Return the reply to a request and the size of its payload, which is still to come.

    Raises:
        SnapshotUnavailable: the server refused, or the connection broke.
        SnapshotIncomplete: the server's ranks will not seal the snapshot.
    """
    with translated_transport_errors():
        head = source.receive_head()
    match head:
        case None:
            raise SnapshotUnavailable(f"{source.peer}: is gone")
        case (Refused(reason=reason, is_incomplete=True), _):
            raise SnapshotIncomplete(reason)
        case (Refused(reason=reason), _):
            raise SnapshotUnavailable(reason)
        case (reply, nbytes) if isinstance(reply, expected):
            return reply, nbytes
        case (reply, _):
            raise SnapshotUnavailable(
                f"{source.peer}: answered by {type(reply).__name__}, not {expected.__name__}; "
                f"run one version of keepstep on all nodes"
            )
