"""Runs this node's snapshot server for the agent: the process, its commands, and its events."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.erasure_group import ErasureGroup
from keepstep.checkpoint.snapshot.memory.messages import (
    CONTROL_PROTOCOL,
    AgentCommand,
    AgentReply,
    AgentRequest,
    AlreadyStored,
    CommitSnapshot,
    EndPersist,
    EndServer,
    Fence,
    FinishProtection,
    NodeHoldings,
    OpenGeneration,
    PartListing,
    Persisted,
    PersistFailed,
    PersistPart,
    PersistTask,
    Protected,
    Published,
    PublishFailed,
    PublishManifest,
    RankHolder,
    Rebuild,
    Refused,
    ReportHoldings,
    RestoreChecked,
    ServerEvent,
    Serving,
    TakeOutput,
    Verify,
)
from keepstep.checkpoint.snapshot.server.limits import RateLimits
from keepstep.elastic.agent.state_directory import CONTROL_SOCKET
from keepstep.elastic.errors import JobFailed
from keepstep.elastic.rendezvous.checkpoint_schedule import PartAttempt
from keepstep.elastic.rendezvous.records import (
    Generation,
    Member,
    SnapshotCommit,
    group_of,
)
from keepstep.notices import notices_blocked
from keepstep.processes import module_command
from keepstep.transport import Identity, StreamConnection, TransportError, listen, open_stream

log = logging.getLogger("keepstep")

_OUTPUT = 2
_START_S = 120.0
"""One that ends is noticed at once; on a machine that is overloaded, imports take long."""
_END_S = 5.0
_ANSWER_S = 30.0
_PUBLISH_S = 300.0
"""One snapshot is stored at a time: after this the next one's turn comes."""
_ANSWER_NBYTES_PER_S = 200e6
"""Some commands read all memory that the server holds: its limit grows with that."""


class ServerGone(SnapshotUnavailable):
    """The snapshot server has ended, or has been ended because it did not answer."""


@dataclass(frozen=True, slots=True)
class ServerDied:
    """The snapshot server ended although the agent did not close it."""


SnapshotEvent: TypeAlias = (
    Protected | RestoreChecked | Persisted | AlreadyStored | PersistFailed | ServerDied
)
ControlConnection: TypeAlias = StreamConnection[AgentRequest, AgentReply | ServerEvent]


class _ForeignProcess:
    """A process that another one has started, as far as `subprocess.Popen` has the same."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def kill(self) -> None:
        """Send it SIGKILL."""
        signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self) -> None:
        """Wait for its end."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        poll.poll()


class SnapshotProcess:
    """One snapshot server, made by `start` or found by `attach`; `close` ends it, or leaves it.

    Attributes:
        local_address: where this node's workers reach the server.
        address: where other nodes reach it.
        memory_nbytes: the memory that it uses, as last reported.
        committed: the newest snapshot that it knows as committed, as last reported.
        secret: whoever knows it may use the server.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes] | _ForeignProcess,
        control: ControlConnection,
        directory: Path,
        node: str,
        workers: int,
        secret: bytes,
        on_event: Callable[[SnapshotEvent], None],
        address: str = "",
    ) -> None:
        self.secret = secret
        self._process = process
        self._control = control
        self._node = node
        self._workers = workers
        self._on_event = on_event
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[None]] = {}
        self._publishing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._publishing.set_result(None)
        self._published_snapshot: SnapshotId | None = None
        self._sealed: set[SnapshotId] = set()
        self._protected: set[SnapshotId] = set()
        self._closing = False
        self._receiving = asyncio.create_task(self._receive_all())
        self.local_address = f"unix:{directory / 'snapshots.sock'}"
        self.address = address
        self.memory_nbytes = 0
        self.committed = SnapshotId(0, -1)

    @classmethod
    async def start(
        cls,
        node: str,
        workers: int,
        directory: Path,
        host: str,
        secret: bytes,
        on_event: Callable[[SnapshotEvent], None],
        limits: RateLimits,
        keep_s: float = 0.0,
    ) -> SnapshotProcess:
        """Start a server and wait until it serves.

        Args:
            node: this node's name.
            workers: how many ranks the node has.
            directory: private, for Unix sockets.
            host: the address of this node that other nodes reach.
            secret: the job's.
            on_event: called when a snapshot is sealed and protected here, when a restored state
                has been checked, when a part of a checkpoint is written or has failed to be, and
                when the server has died.
            limits: of the server's sending and writing during training.
            keep_s: how long it keeps what it holds without an agent.

        Raises:
            JobFailed: it does not start.
        """
        for name in ("snapshots.sock", CONTROL_SOCKET):
            (directory / name).unlink(missing_ok=True)
        with listen(f"unix:{directory / CONTROL_SOCKET}") as control, notices_blocked():
            process = subprocess.Popen(  # noqa: ASYNC220 - takes milliseconds, once
                module_command(
                    "keepstep.checkpoint.snapshot.server.server", "--directory", str(directory),
                    "--host", host, "--node", node, "--control", str(control.fileno()),
                    "--parent", str(os.getpid()), "--ranks", str(workers),
                    "--exchange-limit", str(limits.exchange),
                    "--storage-limit", str(limits.storage), "--keep", str(keep_s),
                ),
                stdin=subprocess.PIPE,
                pass_fds=(control.fileno(),),
                start_new_session=True,
            )  # fmt: skip
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(secret.hex().encode() + b"\n")
        try:
            connection, serving = await _connect(directory, node, secret)
        except BaseException as error:
            # Nothing waits for it: the next server of this directory must not find this one there.
            process.kill()
            process.wait()
            if not isinstance(error, ServerGone):
                raise
            raise JobFailed(
                f"the snapshot server of node {node} did not start (its output is above)"
            ) from error
        return cls(process, connection, directory, node, workers, secret, on_event, serving.address)

    @classmethod
    async def attach(
        cls,
        node: str,
        workers: int,
        directory: Path,
        secret: bytes,
        on_event: Callable[[SnapshotEvent], None],
    ) -> SnapshotProcess:
        """Go on with a server that another agent has left; arguments as for `start`.

        Raises:
            ServerGone: it has ended, or does not answer.
        """
        connection, serving = await _connect(directory, node, secret)
        try:
            process = _ForeignProcess(serving.pid)
        except OSError as error:
            connection.close()
            raise ServerGone(f"the snapshot server of node {node} is gone: {error}") from error
        self = cls(process, connection, directory, node, workers, secret, on_event, serving.address)
        await self._ask(TakeOutput(), _OUTPUT)
        return self

    @property
    def sealed(self) -> tuple[SnapshotId, ...]:
        """Snapshots that all local ranks have sealed, as last reported by the server."""
        return tuple(sorted(self._sealed))

    @property
    def protected(self) -> tuple[SnapshotId, ...]:
        """Those of them whose parity is complete here."""
        return tuple(sorted(self._protected))

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    async def refresh(self) -> None:
        """Have the server report what it holds."""
        await self._ask(ReportHoldings())

    async def finish_protection(self) -> None:
        """Give the server a moment to complete the parity that it can still complete."""
        await self._ask(FinishProtection())

    async def verify(self) -> None:
        """Have the server forget snapshots whose memory has changed since they were sealed."""
        await self._ask(Verify())

    async def open_generation(self, generation: Generation) -> None:
        """Open a generation: workers of older ones are refused from now on.

        Snapshots sealed in it are protected by its erasure groups.
        """
        members = group_of(generation.members, self._node)
        nodes = [member.node for member in members]
        group = ErasureGroup(
            generation=generation.generation,
            addresses=tuple(member.server for member in members) or (self.address,),
            position=nodes.index(self._node) if members else 0,
            parity=generation.parity if members else 0,
        )
        await self._ask(OpenGeneration(group=group))

    async def fence(self, generation: int) -> None:
        """Have the server refuse what workers still write in a generation."""
        await self._ask(Fence(generation=generation))

    async def rebuild(self, resume: SnapshotCommit) -> None:
        """Begin to rebuild the lost nodes' shards that this node adopts; readers wait for them."""
        lost_ranks = {adoption.rank for adoption in resume.shard_rebuilds}
        adopted_ranks = {
            adoption.rank for adoption in resume.shard_rebuilds if adoption.node == self._node
        }
        for holder in resume.holders:
            ranks = sorted(adopted_ranks & set(holder.ranks))
            if ranks:
                members = resume.group_of(holder.node)
                await self._ask(
                    Rebuild(
                        snapshot=resume.snapshot,
                        group=_group_seen_from(holder, members, resume),
                        lost=tuple(
                            position
                            for position, member in enumerate(members)
                            if lost_ranks & set(member.ranks)
                        ),
                        ranks=tuple(ranks),
                    )
                )

    async def commit(self, snapshot: SnapshotId) -> None:
        """Have everything older than this snapshot freed."""
        await self._ask(CommitSnapshot(snapshot=snapshot))

    async def persist(self, attempt: PartAttempt) -> None:
        """Begin to write this node's part of a checkpoint; the outcome comes as an event.

        The snapshot is kept until `end_persist`: other holders may need pieces of it.
        """
        commit = attempt.request.commit
        part = [holder.node for holder in commit.holders].index(self._node)
        try:
            await self._ask(PersistPart(task=self._task_of(attempt), part=part))
        except SnapshotUnavailable as error:
            self._on_event(
                PersistFailed(snapshot=commit.snapshot, attempt=attempt.name, reason=str(error))
            )

    async def end_persist(self, attempt: PartAttempt) -> None:
        """Give up writing, if it is under way, and let go of the snapshot: the attempt is over."""
        await self._ask(EndPersist(attempt=attempt.name))

    async def publish(self, attempt: PartAttempt, parts: Sequence[Mapping[str, Any]]) -> None:
        """Write the manifest of a checkpoint whose parts are all written.

        Args:
            attempt: the attempt that wrote the parts.
            parts: what `stored_part` returned for each of the nodes.

        Raises:
            JobFailed: it could not be written.
        """
        listings = tuple(PartListing(*part["entry"]) for part in parts)
        self._publishing = asyncio.get_running_loop().create_future()
        self._published_snapshot = attempt.request.commit.snapshot
        await self._ask(PublishManifest(task=self._task_of(attempt), listings=listings))
        try:
            async with asyncio.timeout(_PUBLISH_S):
                await self._publishing
        except TimeoutError:
            raise JobFailed(
                f"{attempt.request.url} did not take the manifest within {_PUBLISH_S:.0f} s"
            ) from None

    async def close(self, *, keep: bool = False) -> None:
        """End the server, or leave it to the next agent with what it holds."""
        self._closing = True
        if not keep:
            with suppress(TransportError, TimeoutError):
                async with asyncio.timeout(_END_S):
                    end = AgentRequest(number=next(self._numbers), command=EndServer())
                    await self._control.send(end)
        self._control.close()
        if keep:
            self._receiving.cancel()
            return
        try:
            await asyncio.wait_for(asyncio.to_thread(self._process.wait), _END_S)
        except TimeoutError:
            self._process.kill()
            self._process.wait()
        self._receiving.cancel()

    def _task_of(self, attempt: PartAttempt) -> PersistTask:
        request = attempt.request
        return PersistTask(
            url=request.url,
            snapshot=request.commit.snapshot,
            generation=request.stored_generation,
            attempt=attempt.name,
            holders=tuple(
                RankHolder(
                    None if holder.node == self._node else holder.server, tuple(holder.ranks)
                )
                for holder in request.commit.holders
            ),
            compression=request.compression,
            retention=request.retention,
        )

    async def _ask(self, command: AgentCommand, descriptor: int | None = None) -> None:
        """Have a command carried out, and note what the server holds then.

        Raises:
            SnapshotUnavailable: the server refuses.
            ServerGone: it has ended, or has not answered in time and is ended.
        """
        if self._receiving.done():
            raise self._gone()
        number = next(self._numbers)
        reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        limit_s = _ANSWER_S + self.memory_nbytes / _ANSWER_NBYTES_PER_S
        try:
            async with asyncio.timeout(limit_s):
                request = AgentRequest(number=number, command=command)
                await self._control.send(request, descriptor)
                await reply
        except TransportError as error:
            raise self._gone() from error
        except TimeoutError:
            log.error(
                "the snapshot server of node %s did not answer for %.0f s; it is ended",
                self._node, limit_s,
            )  # fmt: skip
            self._process.kill()
            raise self._gone() from None
        finally:
            self._replies.pop(number, None)

    async def _receive_all(self) -> None:
        try:
            while (message := await self._control.receive()) is not None:
                self._on_message(message)
        finally:
            waiting: tuple[asyncio.Future[Any], ...] = (self._publishing, *self._replies.values())
            for future in waiting:
                if not future.done():
                    future.set_exception(self._gone())
            if not self._closing:
                self._on_event(ServerDied())

    def _on_message(self, message: AgentReply | ServerEvent) -> None:
        match message:
            case AgentReply(number=number, result=result):
                # Here and not where it is waited for: an event may follow before that goes on.
                if isinstance(result, NodeHoldings):
                    self._note(result)
                reply = self._replies.get(number)
                if reply is None or reply.done():
                    return  # The task that asked was cancelled.
                if isinstance(result, Refused):
                    reply.set_exception(SnapshotUnavailable(result.reason))
                else:
                    reply.set_result(None)
            case Protected(snapshot=snapshot, nbytes=nbytes):
                self._sealed.add(snapshot)
                self._protected.add(snapshot)
                self.memory_nbytes = nbytes
                self._on_event(message)
            case RestoreChecked() | Persisted() | AlreadyStored() | PersistFailed():
                self._on_event(message)
            case Published(snapshot=snapshot):
                if self._is_awaited(snapshot):
                    self._publishing.set_result(None)
            case PublishFailed(snapshot=snapshot, reason=reason):
                if self._is_awaited(snapshot):
                    self._publishing.set_exception(JobFailed(reason))

    def _note(self, holdings: NodeHoldings) -> None:
        self._sealed = {
            sealed.snapshot for sealed in holdings.sealed if len(sealed.ranks) == self._workers
        }
        self._protected = set(holdings.protected)
        self.memory_nbytes = holdings.nbytes
        self.committed = holdings.committed

    def _is_awaited(self, snapshot: SnapshotId) -> bool:
        """Whether the manifest of this snapshot is waited for, and not one given up before."""
        return self._published_snapshot == snapshot and not self._publishing.done()

    def _gone(self) -> ServerGone:
        return ServerGone(f"the snapshot server of node {self._node} is gone")


async def _connect(directory: Path, node: str, secret: bytes) -> tuple[ControlConnection, Serving]:
    """Connect to the server of a directory, and wait until it serves.

    Raises:
        ServerGone: it has ended, or does not answer.
    """
    connection: ControlConnection | None = None
    try:
        async with asyncio.timeout(_START_S):
            connection = await open_stream(
                f"unix:{directory / CONTROL_SOCKET}",
                CONTROL_PROTOCOL,
                Identity(node, secret),
                handshake_s=_START_S,
            )
            serving = await connection.receive()
        if not isinstance(serving, Serving):
            raise ServerGone(f"the snapshot server of node {node} is gone")
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, TransportError | TimeoutError):
            raise ServerGone(f"the snapshot server of node {node}: {error}") from error
        raise
    return connection, serving


async def end_left_server(directory: Path, node: str, secret: str) -> None:
    """End a server that another agent has left, and wait for its end."""
    with suppress(ServerGone):
        key = bytes.fromhex(secret)
        server = await SnapshotProcess.attach(node, 1, directory, key, lambda _: None)
        await server.close()


def stored_part(event: Persisted | AlreadyStored | PersistFailed) -> dict[str, Any]:
    """Return the outcome of writing a part as JSON, for the node's record in the coordinator."""
    match event:
        case PersistFailed(reason=reason):
            return {"error": reason}
        case AlreadyStored():
            return {"stored": True}
        case Persisted(listing=listing):
            return {"entry": [listing.name, listing.nbytes, listing.crc32c, listing.content]}


def _group_seen_from(
    holder: Member, members: Sequence[Member], commit: SnapshotCommit
) -> ErasureGroup:
    return ErasureGroup(
        generation=commit.snapshot.generation,
        addresses=tuple(member.server for member in members),
        position=[member.node for member in members].index(holder.node),
        parity=commit.parity,
    )
