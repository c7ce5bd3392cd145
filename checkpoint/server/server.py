"""The snapshot server: a process per node that owns the memory snapshots live in, so that a worker's death loses nothing.

`python -m keepstep.checkpoint.server.server --directory DIR --host ADDRESS --control FD --ranks N`, the job's secret on the first line of standard
input. Workers of the node connect to `DIR/snapshots.sock` and get memory by descriptor; other nodes read boxes over TCP; the agent
speaks on the control descriptor and hears at once when a snapshot that all ranks of the node have sealed is protected. The server ends
when the agent's end of the control connection closes.

What is kept is decided in `keepstep.checkpoint.memory.snapshot_table`; this module only locks, maps and answers. One thread per connection.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from keepstep.checkpoint.errors import CheckpointError, SnapshotUnavailable
from keepstep.checkpoint.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.memory import snapshot_table as retention
from keepstep.checkpoint.memory.arena import Arena, box_bytes, contiguous_range
from keepstep.checkpoint.memory.snapshot_table import SnapshotId, SnapshotTable
from keepstep.checkpoint.memory.wire import Connection, Message, socket_name
from keepstep.checkpoint.server.blocks import ErasureGroup, ShardLocation
from keepstep.checkpoint.server.limits import RateLimits
from keepstep.checkpoint.server.persistence import Persistence
from keepstep.checkpoint.server.protection import Protection
from keepstep.checkpoint.server.rebuilding import Rebuilder

_PR_SET_PDEATHSIG = 1

# How long one question for a shard that is still being rebuilt is kept waiting; who asked asks again.
_PENDING_POLL_S = 5.0
_DRAIN_TIMEOUT_S = 1.0


@dataclass(slots=True)
class _Shard:
    """A sealed shard: where its index lies in its buffer, and what that says once somebody has asked."""

    index_offset: int
    index_nbytes: int
    index: ShardIndex | None = None
    entries: dict[str, Entry] = field(default_factory=dict)


@dataclass(slots=True)
class _ServerState:
    """Everything the server holds, under one lock."""

    snapshot_table: SnapshotTable = field(default_factory=SnapshotTable)
    arenas: dict[int, Arena] = field(default_factory=dict)
    shards: dict[tuple[SnapshotId, int], _Shard] = field(default_factory=dict)
    expected: dict[tuple[SnapshotId, int], str | None] = field(default_factory=dict)
    """Lost nodes' shards that are to be rebuilt here, and why one of them cannot be."""


class SnapshotServer:
    """Serves one node. `run` returns when the agent has gone; `close` is called by it on every path."""

    def __init__(
        self,
        directory: Path,
        host: str,
        control: socket.socket,
        secret: bytes,
        ranks: int,
        limits: RateLimits,
    ) -> None:
        self._limits = limits
        self._secret = secret
        self._ranks = ranks
        self._lock = threading.Condition()
        self._state = _ServerState()
        self._control = Connection(control, "agent")
        self._send_lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._threads: set[threading.Thread] = set()
        self._local = socket.socket(socket.AF_UNIX)
        with socket_name(directory / "snapshots.sock") as name:
            self._local.bind(name)
        self._remote = socket.create_server((host, 0), backlog=1024)
        self._persistence = Persistence(self, secret, limits.storage)
        self._protection = Protection(self, secret)
        self._rebuilder = Rebuilder(self, secret, self._protection.mark_unprotected)

    @property
    def address(self) -> str:
        """Where other nodes reach this server."""
        host, port = self._remote.getsockname()[:2]
        return f"tcp:{host}:{port}"

    def run(self) -> None:
        """Serve until the agent's end of the control connection closes."""
        try:
            self._local.listen(1024)
            for listener in (self._local, self._remote):
                self._spawn(self._accept, listener)
            self.send_to_agent({"event": "serving", "address": self.address})
            while (request := self._control.receive()) is not None:
                self.send_to_agent({"id": request["id"], **self._answer_agent(request)})
        finally:
            self.close()

    def close(self) -> None:
        """Refuse newcomers, end every connection and thread, and free the memory."""
        self._persistence.close()
        for listener in (self._local, self._remote):
            try:
                listener.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # It was never listening.
            listener.close()
        with self._lock:
            connections = list(self._connections)
        for client in connections:
            client.interrupt()
        self._rebuilder.close()
        self._protection.close()
        for thread in list(self._threads):
            thread.join()
        for arena in self._state.arenas.values():
            arena.close()
        self._state.arenas.clear()
        self._control.close()

    def send_to_agent(self, message: Message) -> None:
        """Send an answer or an event to the agent; when it is gone, `run` is about to notice."""
        with self._send_lock:
            try:
                self._control.send(message)
            except SnapshotUnavailable:
                return

    def index(self, snapshot: SnapshotId, rank: int) -> ShardIndex:
        """Return what a sealed local shard holds. Raises SnapshotUnavailable if it is not here."""
        with self._lock:
            return self._indexed(snapshot, rank)[0]

    def memory(self, snapshot: SnapshotId, rank: int) -> Arena:
        """Return a sealed local shard's memory; pin the snapshot first if it is used after the lock is gone."""
        with self._lock:
            return self._arena(snapshot, rank)

    def pin(self, snapshot: SnapshotId) -> None:
        """Keep a snapshot until `unpin`."""
        with self._lock:
            self._state.snapshot_table = retention.pin(self._state.snapshot_table, snapshot)

    def unpin(self, snapshot: SnapshotId) -> None:
        """Let go of a pinned snapshot."""
        self._update_table(lambda snapshot_table: retention.unpin(snapshot_table, snapshot))

    def own_shards(self, snapshot: SnapshotId) -> list[tuple[int, Arena, int, int]]:
        """Return (rank, memory, offset of the index, bytes in use) of each shard that this node's ranks have sealed."""
        with self._lock:
            snapshot_table, shards = self._state.snapshot_table, self._state.shards
            return [
                (
                    rank,
                    self._arena(snapshot, rank),
                    shard.index_offset,
                    shard.index_offset + shard.index_nbytes,
                )
                for rank in sorted(snapshot_table.sealed().get(snapshot, ()))
                for shard in [shards[snapshot, rank]]
            ]

    def adopt(self, snapshot: SnapshotId, rank: int, nbytes: int) -> Arena:
        """Return memory for a lost node's shard. Raises SnapshotUnavailable if there is not enough."""
        available = psutil.virtual_memory().available
        with self._lock:
            contents = self._state
            contents.snapshot_table, held = retention.adopt(
                contents.snapshot_table, snapshot, rank, nbytes, available
            )
            if held.buffer not in contents.arenas:
                contents.arenas[held.buffer] = Arena.create(held.capacity)
            return contents.arenas[held.buffer]

    def complete_adoption(self, snapshot: SnapshotId, part: ShardLocation) -> None:
        """Take a rebuilt shard for one that is held here."""
        with self._lock:
            self._state.snapshot_table = retention.complete_adoption(
                self._state.snapshot_table, snapshot, part.rank
            )
            self._state.shards[snapshot, part.rank] = _Shard(
                part.index_offset, part.nbytes - part.index_offset
            )
            self._lock.notify_all()

    def fail_adoption(self, snapshot: SnapshotId, rank: int, reason: str) -> None:
        """Tell whoever waits for a shard that it will not come."""
        with self._lock:
            self._state.snapshot_table = retention.abandon(
                self._state.snapshot_table, snapshot, rank
            )
            self._state.expected[snapshot, rank] = reason
            self._lock.notify_all()

    def on_protected(self, snapshot: SnapshotId) -> None:
        """Tell the agent that this node's part of a snapshot is sealed and protected."""
        name = [snapshot.generation, snapshot.step]
        self.send_to_agent({"event": "protected", "snapshot": name, "nbytes": self._nbytes})

    @property
    def _nbytes(self) -> int:
        return self._state.snapshot_table.nbytes + self._protection.nbytes

    @property
    def _background_rate(self) -> int:
        """What one connection may take of the exchange's limit: all of a group's nodes ask at the same time."""
        return -(-self._limits.exchange // max(1, self._protection.peers))

    def _spawn(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        """Answer one client until it goes; forget what it left unsealed."""
        peer = (
            "a local worker"
            if connection.family == socket.AF_UNIX
            else str(connection.getpeername())
        )
        began: set[tuple[SnapshotId, int]] = set()
        try:
            client = Connection.accept(connection, self._secret, peer)
        except (SnapshotUnavailable, OSError) as error:
            print(f"keepstep snapshot server: refused {peer}: {error}", file=sys.stderr)
            connection.close()
            self._threads.discard(threading.current_thread())
            return
        with self._lock:
            self._connections.add(client)
        try:
            while (request := client.receive()) is not None:
                try:
                    self._answer(client, request, began)
                except (CheckpointError, KeyError, ValueError) as error:
                    client.send({"error": str(error)})
        except SnapshotUnavailable:
            pass  # The client died in the middle of something; what it began is forgotten below.
        finally:
            with self._lock:
                self._connections.discard(client)
            for snapshot, rank in began:
                self._update_table(partial(_abandon, snapshot=snapshot, rank=rank))
            client.close()
            self._threads.discard(threading.current_thread())

    def _answer(
        self, client: Connection, request: Message, began: set[tuple[SnapshotId, int]]
    ) -> None:
        verb = request["verb"]
        if verb == "holdings":
            client.send({"sealed": self._sealed()})
            return
        snapshot = SnapshotId(*request["snapshot"])
        if verb in ("stripe", "read"):
            client.limit(self._background_rate if request.get("background") else 0)
        if verb == "stripe":
            self._protection.serve(
                client, snapshot, request["stripe"], request["offset"], request.get("count")
            )
        elif verb == "table":
            table = self._protection.table(snapshot, request["position"])
            client.send({"table": [part.to_json() for part in table]})
        elif verb == "begin":
            self._begin(client, request, snapshot, began)
        elif verb == "seal":
            self._seal(snapshot, request["rank"], *request["index"])
            began.discard((snapshot, request["rank"]))
            client.send({})
            self._protect(snapshot)
        elif verb == "index":
            if request["wait"] and self._is_pending(snapshot, request["rank"]):
                client.send({"pending": True})
            else:
                client.send({"index": self.index(snapshot, request["rank"]).to_json()})
        elif verb == "open":
            arena = self.memory(snapshot, request["rank"])
            client.send({"capacity": arena.nbytes}, descriptor=arena.descriptor)
        elif verb == "read":
            self._read(client, snapshot, request["pieces"])
        else:
            raise ValueError(
                f"unknown verb {verb!r}; do all nodes run the same version of keepstep?"
            )

    def _begin(
        self,
        client: Connection,
        request: Message,
        snapshot: SnapshotId,
        began: set[tuple[SnapshotId, int]],
    ) -> None:
        rank, mapped = request["rank"], request["mapped"]
        available = psutil.virtual_memory().available
        with self._lock:
            contents = self._state
            contents.snapshot_table, held = retention.begin(
                contents.snapshot_table,
                snapshot,
                rank,
                request["nbytes"],
                available,
                discard_uncommitted=request["discard_uncommitted"],
            )
            if held.buffer not in contents.arenas:
                contents.arenas[held.buffer] = Arena.create(held.capacity)
            self._release_unused()
            began.add((snapshot, rank))
            reply = {
                "buffer": held.buffer,
                "capacity": held.capacity,
                "dropped": [number for number in mapped if number not in contents.arenas],
            }
            descriptor = None if held.buffer in mapped else contents.arenas[held.buffer].descriptor
            client.send(reply, descriptor=descriptor)

    def _seal(self, snapshot: SnapshotId, rank: int, index_offset: int, index_nbytes: int) -> None:
        with self._lock:
            self._state.snapshot_table = retention.seal(self._state.snapshot_table, snapshot, rank)
            self._state.shards[snapshot, rank] = _Shard(index_offset, index_nbytes)

    def _protect(self, snapshot: SnapshotId) -> None:
        """Have a snapshot protected once the last of the node's ranks has sealed."""
        with self._lock:
            sealed = self._state.snapshot_table.sealed()
        if len(sealed.get(snapshot, ())) == self._ranks:
            self._protection.protect(snapshot)

    def _is_pending(self, snapshot: SnapshotId, rank: int) -> bool:
        """Wait a while for a shard that is to be rebuilt here; whether it is still to come.

        Raises:
            SnapshotUnavailable: it cannot be rebuilt.
        """
        key = (snapshot, rank)

        def is_settled() -> bool:
            return key in self._state.shards or self._state.expected.get(key) is not None

        with self._lock:
            # Who asks may have heard of the new generation before this node's agent has.
            if not self._lock.wait_for(is_settled, _PENDING_POLL_S):
                return key in self._state.expected
            reason = self._state.expected.get(key)
        if reason is not None:
            raise SnapshotUnavailable(reason)
        return False

    def _read(self, client: Connection, snapshot: SnapshotId, pieces: list[Any]) -> None:
        """Send boxes; those that lie in one piece go from memory to socket inside the kernel."""
        self.pin(snapshot)
        try:
            ranges: list[tuple[int, int, int]] = []
            views = []
            for rank, key, offset, shape in pieces:
                with self._lock:
                    entry, arena = (
                        self._indexed(snapshot, rank)[1][key],
                        self._arena(snapshot, rank),
                    )
                box = Box(tuple(offset), tuple(shape))
                views.append(box_bytes(entry, arena.bytes, box))
                found = contiguous_range(entry, box)
                if found is not None:
                    ranges.append((arena.descriptor, *found))
            if len(ranges) == len(pieces):
                client.send_files({}, ranges)
            else:
                client.send({}, [memoryview(view.tobytes()) for view in views])
        finally:
            self.unpin(snapshot)

    def _answer_agent(self, request: Message) -> Message:
        verb = request["verb"]
        try:
            if verb == "open_generation":
                group = ErasureGroup(
                    request["generation"],
                    tuple(request["addresses"]),
                    request["position"],
                    request["parity"],
                )
                self._update_table(
                    lambda snapshot_table: retention.open_generation(
                        snapshot_table, group.generation
                    )
                )
                self._protection.open_generation(group)
                self._persistence.stop()
            elif verb == "rebuild":
                self._rebuild(request)
            elif verb == "finish_protection":
                self._protection.finish_protection(_DRAIN_TIMEOUT_S)
            elif verb == "verify":
                self._drop_damaged()
            elif verb == "commit":
                self._update_table(
                    lambda snapshot_table: retention.commit(
                        snapshot_table, SnapshotId(*request["snapshot"])
                    )
                )
            elif verb == "persist":
                self._persistence.start(request)
            elif verb == "publish":
                self._persistence.publish(request)
            elif verb != "holdings":
                raise ValueError(f"unknown verb {verb!r}")
        except (CheckpointError, ValueError) as error:
            return {"error": str(error)}
        with self._lock:
            sealed = self._sealed()
            protected = [
                name for name, _ in sealed if self._protection.is_protected(SnapshotId(*name))
            ]
            return {"sealed": sealed, "protected": protected, "nbytes": self._nbytes}

    def _rebuild(self, request: Message) -> None:
        snapshot = SnapshotId(*request["snapshot"])
        group = ErasureGroup(
            snapshot.generation, tuple(request["addresses"]), request["position"], request["parity"]
        )
        with self._lock:
            self._state.expected.update({(snapshot, rank): None for rank in request["ranks"]})
            self._lock.notify_all()
        self._rebuilder.rebuild(snapshot, group, request["lost"], request["ranks"])

    def _drop_damaged(self) -> None:
        """Forget snapshots whose bytes are no longer what was sealed; what is forgotten is rebuilt from parity, if there is any."""
        with self._lock:
            sealed = self._state.snapshot_table.sealed()
        for snapshot in sealed:
            if not self._protection.is_intact(snapshot):
                print(
                    f"keepstep snapshot server: memory of step {snapshot.step} has changed since it was sealed; it is not used",
                    file=sys.stderr,
                )
                self._update_table(partial(_discard, snapshot=snapshot))

    def _sealed(self) -> list[Any]:
        return [
            [[snapshot.generation, snapshot.step], sorted(ranks)]
            for snapshot, ranks in self._state.snapshot_table.sealed().items()
        ]

    def _update_table(self, change: Callable[[SnapshotTable], SnapshotTable]) -> None:
        with self._lock:
            self._state.snapshot_table = change(self._state.snapshot_table)
            self._release_unused()

    def _release_unused(self) -> None:
        """Release the memory and the indexes of what the snapshot_table no longer names. Under the lock."""
        contents = self._state
        used = {held.buffer for held in contents.snapshot_table.shards.values()} | set(
            contents.snapshot_table.free
        )
        for number in [number for number in contents.arenas if number not in used]:
            contents.arenas.pop(number).close()
        for name in [
            name for name in contents.shards if name not in contents.snapshot_table.shards
        ]:
            del contents.shards[name]
        contents.expected = {
            key: reason
            for key, reason in contents.expected.items()
            if key[0] >= contents.snapshot_table.committed
        }
        self._protection.retain_only({snapshot for snapshot, _ in contents.snapshot_table.shards})

    def _shard(self, snapshot: SnapshotId, rank: int) -> _Shard:
        shard = self._state.shards.get((snapshot, rank))
        if shard is None:
            raise SnapshotUnavailable(
                f"rank {rank}'s part of step {snapshot.step} (generation {snapshot.generation}) is not held here"
            )
        return shard

    def _indexed(self, snapshot: SnapshotId, rank: int) -> tuple[ShardIndex, dict[str, Entry]]:
        """Return a shard's index, whole and by key, read from its buffer the first time. Under the lock."""
        shard = self._shard(snapshot, rank)
        if shard.index is None:
            encoded = self._arena(snapshot, rank).buffer[
                shard.index_offset : shard.index_offset + shard.index_nbytes
            ]
            shard.index = ShardIndex.from_json(json.loads(bytes(encoded)))
            shard.entries = shard.index.by_key
        return shard.index, shard.entries

    def _arena(self, snapshot: SnapshotId, rank: int) -> Arena:
        self._shard(snapshot, rank)
        return self._state.arenas[self._state.snapshot_table.shards[snapshot, rank].buffer]


def _abandon(snapshot_table: SnapshotTable, *, snapshot: SnapshotId, rank: int) -> SnapshotTable:
    return retention.abandon(snapshot_table, snapshot, rank)


def _discard(snapshot_table: SnapshotTable, *, snapshot: SnapshotId) -> SnapshotTable:
    return retention.discard(snapshot_table, snapshot)


def main() -> None:
    """Run a server as the agent's child."""
    parser = argparse.ArgumentParser(
        description="Own the memory of this node's snapshots (started by the agent)."
    )
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--exchange-limit", type=int, default=0)
    parser.add_argument("--storage-limit", type=int, default=0)
    options = parser.parse_args()
    # Should the agent die between fork and here, its end of the control connection says so.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != options.parent:
        return
    # Ctrl-C and SIGTERM to the process group are the agent's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    secret = bytes.fromhex(sys.stdin.readline().strip())
    control = socket.socket(fileno=options.control)
    limits = RateLimits(options.exchange_limit, options.storage_limit)
    SnapshotServer(options.directory, options.host, control, secret, options.ranks, limits).run()


if __name__ == "__main__":
    main()
