"""Connects agents: detects dead agents at once, and reports to the leader what was sealed.

The leader keeps a connection to every other agent, and every other agent one to the leader: linear
in nodes. When a process dies its kernel closes the connection; if its port then refuses the one
that was connected, or an agent of another name answers there, the agent is certainly dead, and
whoever notices may revoke its lease. A new leader had no connection before: there the port of the
node's snapshot server has to refuse as well, for nothing is committed unless servers reach each
other. Everything else proves nothing, and is left to the lease: a host that does not answer, a port
that has never accepted this observer (a firewall may be what refuses), a server that waits for the
node's next agent, a peer that speaks another version, one with another secret.

What a node has sealed changes at every step and matters to the leader only, so it is sent over
these connections and not through the coordinator, where every write costs a majority's disks.

In the other direction the leader announces over them what is committed.

Promises (with those of `keepstep.transport`):
- A report is taken only from an agent that knows the job's secret, and only about its own node;
  nobody on the way can forge, change or repeat one.
- The newest report or announcement is sent again on every new connection, so that a new leader has
  it at once. A peer that reads slowly misses those that newer ones have replaced, and delays nobody
  else.
- A peer that speaks no common version is refused alone.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol as Structure
from typing import TypeAlias

from keepstep.elastic.agent.output_files import (
    ListOutput,
    OutputFiles,
    OutputPiece,
    OutputReader,
    OutputReply,
    OutputRequest,
    ReadOutput,
)
from keepstep.elastic.errors import StoreUnavailable, UsageError
from keepstep.elastic.rendezvous.records import (
    CommitAnnouncement,
    Member,
    NodeRecord,
    NodeReport,
)
from keepstep.transport import (
    AuthenticationFailed,
    Codec,
    Identity,
    MalformedMessage,
    Message,
    PeerRefused,
    PeerTimeout,
    PeerUnavailable,
    Protocol,
    StreamConnection,
    StreamListener,
    TransportError,
    VersionMismatch,
    VersionRange,
    identify,
    open_stream,
)
from keepstep.transport.admission import MAX_PENDING
from keepstep.transport.protocol import check_name

log = logging.getLogger("keepstep")

_HANDSHAKE_S = 4.0
# A process that is killed closes its connections before it refuses new ones: so the first pause is
# short.
_FIRST_RETRY_S = 0.01
_RETRY_S = 0.5
_REFUSED_RETRY_S = 5.0


class Report(Message, frozen=True, kw_only=True):
    """Tells the leader what a node has sealed; the node's record says so later."""

    report: NodeReport


class Announce(Message, frozen=True, kw_only=True):
    """Tells the members that a snapshot is committed; the coordinator holds it later."""

    announcement: CommitAnnouncement


AgentRequest: TypeAlias = Report | Announce | OutputRequest

PROTOCOL = Protocol(
    name="agent",
    versions=VersionRange(2, 3),
    requests=Codec[AgentRequest](Report, Announce, ListOutput, ReadOutput),
    replies=Codec[OutputReply](OutputFiles, OutputPiece),
    max_body_nbytes=2**20,
)
"""Spoken between agents: who connects reports or announces, and both learn of the other's death.
`keepstep logs` connects as well, and asks for the workers' output, which agents of version 2 do not
know.
"""

OUTPUT_PROTOCOL = replace(PROTOCOL, versions=VersionRange(3, 3))
"""As `keepstep logs` speaks it."""


class AgentListener:
    """Where an agent is reached by others. Made by `open`; `close` ends it.

    It sends every client this node's name. Until `admit` is called, clients wait to be
    authenticated, and those that wait too long are dropped.
    """

    def __init__(self, node: str, max_peers: int, output: OutputReader) -> None:
        self._node = node
        self._output = output
        # A new leader may be connected to by all others at once.
        self._max_pending = max(MAX_PENDING, 2 * max_peers)
        self._secret: bytes | None = None
        self._on_report: Callable[[NodeReport], None] = lambda _: None
        self._on_announcement: Callable[[CommitAnnouncement], None] = lambda _: None
        self._listener: StreamListener[AgentRequest, OutputReply]

    @classmethod
    async def open(
        cls, node: str, host: str, *, max_peers: int = 0, output_directory: Path | None = None
    ) -> AgentListener:
        """Listen on a free port of `host`.

        Args:
            node: this node's name.
            host: the address to listen on.
            max_peers: how many agents may connect at the same time.
            output_directory: of the workers' output; None: it goes to no files.

        Raises:
            UsageError: the node's name cannot be sent.
        """
        try:
            check_name("a node", node)
        except ValueError as error:
            raise UsageError(f"{error}; choose another --node name") from error
        self = cls(node, max_peers, OutputReader(output_directory))
        self._listen(f"tcp:{host}:0")
        return self

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._listener.address.rpartition(":")[2])

    async def admit(
        self,
        secret: bytes,
        on_report: Callable[[NodeReport], None],
        on_announcement: Callable[[CommitAnnouncement], None] = lambda _: None,
    ) -> None:
        """Authenticate clients by this secret from now on, and pass on what they send.

        Called once for each membership.

        Args:
            secret: the job's.
            on_report: called with each report.
            on_announcement: called with each announcement of a commit.
        """
        self._on_report, self._on_announcement = on_report, on_announcement
        if self._secret not in (None, secret):
            # The job ended while this node was no member, and a new one of its name has begun.
            address = self._listener.address
            await self._listener.close()
            self._listen(address)
            self._secret = None
        if self._secret is None:
            self._secret = secret
            self._listener.admit(secret)

    async def close(self) -> None:
        """Refuse newcomers, and end every connection; readers of output may read its end first."""
        await self._output.finish()
        await self._listener.close()

    def _listen(self, address: str) -> None:
        self._listener = StreamListener(
            address, PROTOCOL, self._node, self._serve, max_pending=self._max_pending
        )
        self._listener.start()

    async def _serve(self, connection: StreamConnection[OutputReply, AgentRequest]) -> None:
        try:
            while (message := await connection.receive()) is not None:
                match message:
                    case Announce():
                        self._on_announcement(message.announcement)
                    case Report():
                        self._take_report(message.report, connection)
                    case _:
                        await connection.send(await self._output.answer(connection, message))
        finally:
            self._output.forget(connection)

    def _take_report(
        self, report: NodeReport, connection: StreamConnection[OutputReply, AgentRequest]
    ) -> None:
        if report.node != connection.peer_node:
            raise MalformedMessage(
                f"{connection.peer}: reported for node {report.node}", "Report.report"
            )
        self._on_report(report)


class _Observation(enum.Enum):
    """The state of an agent once a connection to it has ended, or could not be made."""

    DEAD = enum.auto()
    UNKNOWN = enum.auto()
    REFUSED = enum.auto()
    """It answers and does not take this agent for a peer: it lives, or its port was taken over."""


class _Answer(enum.Enum):
    """The process that answers at an agent's port."""

    OWN_NAME = enum.auto()
    OTHER_NAME = enum.auto()
    REFUSAL = enum.auto()
    NOTHING = enum.auto()


class Reached(Structure):
    """Another agent: its node, and where it is reached."""

    @property
    def node(self) -> str:
        """The node's name."""

    @property
    def agent(self) -> str:
        """Where the agent is reached."""


class Peer(Reached, Structure):
    """Another agent, and the lease under which it is a member."""

    @property
    def lease(self) -> int:
        """The membership's lease."""


class PeerConnections:
    """Connections to other agents; `close` ends all of them.

    `watch` sets whom to watch; what is sent to them is the newest that `report` or `announce` was
    called with.
    """

    def __init__(self, identity: Identity, declare_dead: Callable[[Peer], Awaitable[None]]) -> None:
        self._identity = identity
        self._declare_dead = declare_dead
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._message: AgentRequest | None = None
        # One for each connection, set when there is a message that was not sent over it.
        self._unsent: set[asyncio.Event] = set()

    def watch(self, peers: Iterable[Peer]) -> None:
        """Watch exactly these agents."""
        wanted = {(peer.node, peer.lease): peer for peer in peers}
        for key in set(self._tasks) - set(wanted):
            self._tasks.pop(key).cancel()
        for key, peer in wanted.items():
            if key not in self._tasks:
                self._tasks[key] = asyncio.create_task(self._watch_until_dead(peer))

    def report(self, report: NodeReport) -> None:
        """Send a report to those who are watched, as soon as each of them can be reached."""
        self._send(Report(report=report))

    def announce(self, announcement: CommitAnnouncement) -> None:
        """Announce a commit to those who are watched, as soon as each of them can be reached."""
        self._send(Announce(announcement=announcement))

    def _send(self, message: AgentRequest) -> None:
        self._message = message
        for unsent in self._unsent:
            unsent.set()

    async def close(self) -> None:
        """End all connections."""
        tasks = list(self._tasks.values())
        self.watch(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_until_dead(self, peer: Peer) -> None:
        refusals = 0
        reached = asyncio.Event()
        pause_s = 0.0
        while True:
            began_s = time.monotonic()
            # Not at the first refusal: a node that starts again with the coordinator learns the
            # job's secret only when others have restored it there.
            observation = await self._observe(peer, reached, warns=refusals == 1)
            match observation:
                case _Observation.DEAD:
                    break
                case _Observation.UNKNOWN:
                    pause_s = next_pause_s(pause_s, time.monotonic() - began_s)
                    await asyncio.sleep(pause_s)
                case _Observation.REFUSED:
                    refusals += 1
                    await asyncio.sleep(_REFUSED_RETRY_S)
        log.warning("the agent of node %s is dead", peer.node)
        try:
            await self._declare_dead(peer)
        except StoreUnavailable as error:
            log.warning(
                "could not declare %s gone (%s); its lease will end by itself",
                peer.node,
                str(error).partition(" (")[0],
            )

    async def _observe(self, peer: Peer, reached: asyncio.Event, *, warns: bool) -> _Observation:
        """Stay connected to an agent until the connection ends; return what is known then.

        Args:
            peer: whose agent it is.
            reached: set once the agent has answered this observer.
            warns: whether to log a refusal.
        """
        for _ in range(2):
            try:
                connection = await open_stream(
                    f"tcp:{peer.agent}", PROTOCOL, self._identity, handshake_s=_HANDSHAKE_S
                )
            except PeerRefused:
                is_dead = reached.is_set() or (
                    isinstance(peer, NodeRecord) and await has_lost_memory(peer)
                )
                return _Observation.DEAD if is_dead else _Observation.UNKNOWN
            except PeerTimeout:
                # An agent that is not admitted yet sends its name all the same.
                answer = await _ask_name(peer)
                if answer is _Answer.OWN_NAME:
                    reached.set()
                is_dead = answer is _Answer.OTHER_NAME or (
                    answer is _Answer.REFUSAL and reached.is_set()
                )
                return _Observation.DEAD if is_dead else _Observation.UNKNOWN
            except PeerUnavailable:
                return _Observation.UNKNOWN
            except (AuthenticationFailed, VersionMismatch, MalformedMessage) as refusal:
                if _is_other(refusal.peer_node, peer):
                    return _Observation.DEAD
                if refusal.peer_node is not None:
                    reached.set()
                if warns:
                    log.warning(
                        "not connected to the agent of node %s, whose death only its lease will "
                        "show: %s",
                        peer.node,
                        refusal,
                    )
                return _Observation.REFUSED
            try:
                if _is_other(connection.peer_node, peer):
                    return _Observation.DEAD
                reached.set()
                await self._stay_connected(connection)
            finally:
                connection.close()
        return _Observation.UNKNOWN

    async def _stay_connected(
        self, connection: StreamConnection[AgentRequest, OutputReply]
    ) -> None:
        """Send the newest message whenever there is a new one, until the connection ends."""
        unsent = asyncio.Event()
        if self._message is not None:
            unsent.set()
        self._unsent.add(unsent)
        sending = asyncio.create_task(self._send_newest(connection, unsent))
        try:
            while await connection.receive() is not None:
                continue  # This version knows no answer.
        except TransportError as error:
            log.debug("a connection to an agent ended: %s", error)
        finally:
            self._unsent.discard(unsent)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send_newest(
        self, connection: StreamConnection[AgentRequest, OutputReply], unsent: asyncio.Event
    ) -> None:
        while True:
            await unsent.wait()
            unsent.clear()
            message = self._message
            assert message is not None
            try:
                await connection.send(message)
            except PeerUnavailable:
                return  # Whoever receives on it learns of its end too.


def next_pause_s(pause_s: float, lasted_s: float) -> float:
    """Return how long to wait before an agent is connected to again, in seconds.

    Args:
        pause_s: the last pause; 0 if there was none.
        lasted_s: how long the connection that has ended, or the attempt to make one, lasted.
    """
    is_first = pause_s == 0.0 or lasted_s >= _RETRY_S
    return _FIRST_RETRY_S if is_first else min(2 * pause_s, _RETRY_S)


async def probe(peer: Reached) -> bool | None:
    """Return whether an agent lives, for one that waits for it or wants to take its name.

    Returns:
        True if it answers by its name, False if its process is certainly gone, None if unknown.
    """
    match await _ask_name(peer):
        case _Answer.OWN_NAME:
            return True
        case _Answer.OTHER_NAME | _Answer.REFUSAL:
            return False
        case _Answer.NOTHING:
            return None


async def has_lost_memory(peer: NodeRecord | Member) -> bool:
    """Whether nobody listens where a node's snapshot server was, and so its memory is gone."""
    if not peer.server.startswith("tcp:"):
        return False
    try:
        await identify(peer.server, PROTOCOL, peer.node, timeout_s=_HANDSHAKE_S)
    except PeerRefused:
        return True
    except TransportError:
        return False
    return False


async def _ask_name(peer: Reached) -> _Answer:
    """Return what answers at an agent's port."""
    try:
        node = await identify(f"tcp:{peer.agent}", PROTOCOL, peer.node, timeout_s=_HANDSHAKE_S)
    except PeerRefused:
        return _Answer.REFUSAL
    except MalformedMessage as error:
        return _Answer.OTHER_NAME if _is_other(error.peer_node, peer) else _Answer.NOTHING
    except PeerUnavailable:
        return _Answer.NOTHING
    return _Answer.OTHER_NAME if _is_other(node, peer) else _Answer.OWN_NAME


def _is_other(claimed_node: str | None, peer: Reached) -> bool:
    """Whether somebody who claims a node's name, if any, is certainly not this peer."""
    return claimed_node is not None and claimed_node != peer.node
