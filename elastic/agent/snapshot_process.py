"""The agent's side of its node's snapshot server: the process, the control connection, and what the server has told so far."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.checkpoint.memory.wire import Message, encode, read_message
from keepstep.checkpoint.server.limits import RateLimits
from keepstep.elastic.errors import JobFailed
from keepstep.elastic.rendezvous.records import Generation, PersistRequest, SnapshotCommit, group_of
from keepstep.processes import module_command

_START_S = 30.0


class SnapshotProcess:
    """One snapshot server. Made by `start`; `close` ends it, and with it all that it holds."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        directory: Path,
        node: str,
        workers: int,
        on_event: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._process = process
        self._reader, self._writer = streams
        self._node = node
        self._workers = workers
        self._on_event = on_event
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._published: asyncio.Future[Message] | None = None
        self._serving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._sealed: set[SnapshotId] = set()
        self._protected: set[SnapshotId] = set()
        self._closing = False
        self._listener = asyncio.create_task(self._listen())
        self.local_address = f"unix:{directory / 'snapshots.sock'}"
        self.address = ""
        self.memory_nbytes = 0

    @classmethod
    async def start(
        cls,
        node: str,
        workers: int,
        directory: Path,
        host: str,
        secret: bytes,
        on_event: Callable[[Mapping[str, Any]], None],
        limits: RateLimits,
    ) -> SnapshotProcess:
        """Start a server and wait until it serves.

        `on_event` is called with `protected` (a snapshot is sealed here, and its parity kept), `persisted`, `persist_failed` and `died`.

        Raises:
            JobFailed: it does not start.
        """
        ours, theirs = socket.socketpair()
        socket_path = directory / "snapshots.sock"
        socket_path.unlink(missing_ok=True)
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 - forking takes milliseconds, once per node
                module_command(
                    "keepstep.checkpoint.server.server", "--directory", str(directory),
                    "--host", host, "--control", str(theirs.fileno()), "--parent", str(os.getpid()),
                    "--ranks", str(workers),
                    "--exchange-limit", str(limits.exchange), "--storage-limit", str(limits.storage),
                ),
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )  # fmt: skip
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(secret.hex().encode() + b"\n")
        ours.setblocking(False)
        self = cls(
            process, await asyncio.open_connection(sock=ours), directory, node, workers, on_event
        )
        try:
            async with asyncio.timeout(_START_S):
                self.address = await self._serving
        except (TimeoutError, SnapshotUnavailable) as error:
            await self.close()
            raise JobFailed(
                f"the snapshot server of node {node} did not start (its output is above)"
            ) from error
        return self

    @property
    def sealed(self) -> tuple[SnapshotId, ...]:
        """Snapshots that all local ranks have sealed, as far as the server has told."""
        return tuple(sorted(self._sealed))

    @property
    def protected(self) -> tuple[SnapshotId, ...]:
        """Those of them whose parity is complete here."""
        return tuple(sorted(self._protected))

    async def refresh(self) -> None:
        """Ask the server what it holds."""
        await self._ask({"verb": "holdings"})

    async def finish_protection(self) -> None:
        """Give the server a moment to complete the parity that it can still complete, and ask what it holds."""
        await self._ask({"verb": "finish_protection"})

    async def verify(self) -> None:
        """Have memory that has changed since it was sealed forgotten."""
        await self._ask({"verb": "verify"})

    async def open_generation(self, generation: Generation) -> None:
        """Have nothing accepted any more from workers of older generations, and what is sealed protected by this one's groups."""
        group = group_of(generation.members, self._node)
        nodes = [member.node for member in group]
        await self._ask({
            "verb": "open_generation",
            "generation": generation.generation,
            "addresses": [member.server for member in group] or [self.address],
            "position": nodes.index(self._node) if group else 0,
            "parity": generation.parity if group else 0,
        })  # fmt: skip

    async def rebuild(self, resume: SnapshotCommit) -> None:
        """Begin to rebuild those shards of lost nodes that this one adopts; their readers wait for them."""
        orphans = {adoption.rank for adoption in resume.shard_rebuilds}
        mine = {adoption.rank for adoption in resume.shard_rebuilds if adoption.node == self._node}
        for holder in resume.holders:
            ranks = sorted(mine & set(holder.ranks))
            if not ranks:
                continue
            group = resume.group_of(holder.node)
            await self._ask({
                "verb": "rebuild",
                "snapshot": [resume.snapshot.generation, resume.snapshot.step],
                "addresses": [member.server for member in group],
                "position": group.index(holder),
                "parity": resume.parity,
                "lost": [position for position, member in enumerate(group) if orphans & set(member.ranks)],
                "ranks": ranks,
            })  # fmt: skip

    async def commit(self, snapshot: SnapshotId) -> None:
        """Let go of everything older than this snapshot."""
        await self._ask({"verb": "commit", "snapshot": [snapshot.generation, snapshot.step]})

    async def persist(self, request: PersistRequest) -> None:
        """Begin to write this node's part of a checkpoint; the outcome comes as an event."""
        position = [holder.node for holder in request.commit.holders].index(self._node)
        try:
            await self._ask({"verb": "persist", "name": position, **self._describe(request)})
        except SnapshotUnavailable as error:
            self._on_event({"event": "persist_failed", "reason": str(error)})

    async def publish(self, request: PersistRequest, parts: Sequence[Mapping[str, Any]]) -> None:
        """Write the manifest of a checkpoint whose parts are all written.

        Raises:
            JobFailed: it could not be written.
        """
        self._published = asyncio.get_running_loop().create_future()
        await self._ask({"verb": "publish", "parts": list(parts), **self._describe(request)})
        event = await self._published
        if event["event"] == "publish_failed":
            raise JobFailed(event["reason"])

    async def close(self) -> None:
        """End the server: its end of the control connection closes, and it goes."""
        self._closing = True
        self._writer.close()
        try:
            await asyncio.wait_for(asyncio.to_thread(self._process.wait), 5.0)
        except TimeoutError:
            self._process.kill()
            self._process.wait()
        self._listener.cancel()

    def _describe(self, request: PersistRequest) -> Message:
        snapshot = request.commit.snapshot
        return {
            "url": request.url,
            "snapshot": [snapshot.generation, snapshot.step],
            "holders": [
                [
                    None if holder.node == self._node else holder.server,
                    list(holder.ranks),
                ]
                for holder in request.commit.holders
            ],
        }

    async def _ask(self, request: Message) -> Message:
        number = next(self._numbers)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        if self._listener.done():
            raise SnapshotUnavailable(f"the snapshot server of node {self._node} is gone")
        self._writer.write(encode({"id": number, **request}))
        reply = await answer
        if "error" in reply:
            raise SnapshotUnavailable(reply["error"])
        self._sealed = {
            SnapshotId(*name) for name, ranks in reply["sealed"] if len(ranks) == self._workers
        }
        self._protected = {SnapshotId(*name) for name in reply["protected"]}
        self.memory_nbytes = reply["nbytes"]
        return reply

    async def _listen(self) -> None:
        while (message := await read_message(self._reader)) is not None:
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            else:
                self._on_message(message)
        gone = SnapshotUnavailable(f"the snapshot server of node {self._node} is gone")
        for future in (*self._answers.values(), self._published):
            if future is not None and not future.done():
                future.set_exception(gone)
        if not self._serving.done():
            self._serving.set_exception(gone)
        if not self._closing:
            self._on_event({"event": "died"})

    def _on_message(self, message: Message) -> None:
        match message["event"]:
            case "serving":
                self._serving.set_result(message["address"])
            case "protected":
                self._sealed.add(SnapshotId(*message["snapshot"]))
                self._protected.add(SnapshotId(*message["snapshot"]))
                self.memory_nbytes = message["nbytes"]
                self._on_event(message)
            case "published" | "publish_failed":
                if self._published is not None and not self._published.done():
                    self._published.set_result(message)
            case _:
                self._on_event(message)
