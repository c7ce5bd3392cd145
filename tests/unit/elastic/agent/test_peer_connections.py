"""Claims about what agents detect of each other and report to each other, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.agent import peer_connections
from keepstep.elastic.agent.peer_connections import (
    PROTOCOL,
    AgentListener,
    PeerConnections,
    Report,
    probe,
)
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.records import CommitAnnouncement, NodeRecord, NodeReport
from keepstep.transport import (
    AuthenticationFailed,
    Codec,
    Identity,
    Message,
    Protocol,
    StreamListener,
    VersionRange,
    open_stream,
)
from keepstep.transport.admission import MAX_PENDING
from tests.adaptive_timeouts import patient

HOST = "127.0.0.1"
SECRET = b"the job's secret of 32 bytes...."
OTHER_SECRET = b"another job's secret of 32 bytes"

AGENT = """
import asyncio
from keepstep.elastic.agent.peer_connections import AgentListener

async def live():
    listener = await AgentListener.open("a", "127.0.0.1")
    await listener.admit(
        b"the job's secret of 32 bytes....", lambda report: print(report.step, flush=True)
    )
    print(listener.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(live())
"""

Visit = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def play(scenario: Coroutine[Any, Any, None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(patient(30)):
            await scenario

    asyncio.run(in_time())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - conditions of any kind
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connections, "_RETRY_S", 0.01)
    monkeypatch.setattr(peer_connections, "_REFUSED_RETRY_S", 0.01)


def agent_at(port: int, host: str = HOST, node: str = "a") -> NodeRecord:
    """Return the record of a node whose agent should listen there."""
    return NodeRecord(
        node=node,
        host=host,
        nproc=1,
        agent=f"{host}:{port}",
        server="",
        store_port=5,
        lease=7,
        digest="d",
    )


def report_of(step: int, node: str = "b") -> NodeReport:
    protected = (SnapshotId(1, step),)
    return NodeReport(node, lease=8, generation=1, server="s", step=step, protected=protected)


@asynccontextmanager
async def watching(
    secret: bytes = SECRET, node: str = "b"
) -> AsyncIterator[tuple[PeerConnections, asyncio.Queue[NodeRecord]]]:
    """The connections of a node, and whom they declare dead."""
    declared: asyncio.Queue[NodeRecord] = asyncio.Queue()
    connections = PeerConnections(Identity(node, secret), declared.put)
    try:
        yield connections, declared
    finally:
        await connections.close()


@asynccontextmanager
async def listening(
    node: str, secret: bytes | None = SECRET
) -> AsyncIterator[tuple[AgentListener, asyncio.Queue[NodeReport]]]:
    """An agent's listener, and the reports that it takes."""
    reports: asyncio.Queue[NodeReport] = asyncio.Queue()
    listener = await AgentListener.open(node, HOST)
    if secret is not None:
        await listener.admit(secret, reports.put_nowait)
    try:
        yield listener, reports
    finally:
        await listener.close()


@asynccontextmanager
async def acting(*visits: Visit) -> AsyncIterator[int]:
    """The port of a server that does one of these with each visitor, in turn."""
    turns = itertools.cycle(visits)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await next(turns)(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        # From Python 3.12 on `async with` waits for the visitors, who may wait for this end.
        server.close()


async def send_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End the connection at once, as an agent that is dropped or about to exit does."""


async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@dataclass
class Relay:
    """A process between two agents that passes on what they send, until `is_capturing`."""

    target: int
    captured: bytearray = field(default_factory=bytearray)
    to_target: asyncio.StreamWriter | None = None
    is_capturing: bool = False

    async def visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_reader, self.to_target = await asyncio.open_connection(HOST, self.target)

        async def pass_back() -> None:
            while data := await target_reader.read(2**16):
                writer.write(data)
            writer.close()

        backwards = asyncio.create_task(pass_back())
        while data := await reader.read(2**16):
            self.captured += data
            if not self.is_capturing:
                self.to_target.write(data)
        self.to_target.close()
        backwards.cancel()


def test_reports_arrive_in_order() -> None:
    async def scenario() -> None:
        async with listening("a") as (listener, reports), watching() as (connections, _):
            connections.watch([agent_at(listener.port)])
            for step in (1, 2, 3):
                connections.report(report_of(step))
                assert await reports.get() == report_of(step)

    play(scenario())


def test_agent_without_the_secret_cannot_report() -> None:
    async def scenario() -> None:
        async with listening("a") as (listener, reports):
            with pytest.raises(AuthenticationFailed):
                await open_stream(
                    f"tcp:{HOST}:{listener.port}", PROTOCOL, Identity("b", OTHER_SECRET)
                )
            assert reports.empty()

    play(scenario())


def test_report_about_another_node_is_refused_and_ends_the_connection() -> None:
    async def scenario() -> None:
        async with listening("a") as (listener, reports):
            connection = await open_stream(
                f"tcp:{HOST}:{listener.port}", PROTOCOL, Identity("c", SECRET)
            )
            await connection.send(Report(report=report_of(1, node="b")))
            assert await connection.receive() is None
            connection.close()
            assert reports.empty()

    play(scenario())


@pytest.mark.parametrize(
    ("meddle", "delivered"),
    [
        (lambda frame: frame, 1),
        (lambda frame: frame.replace(b'"step":2', b'"step":9'), 0),
        (lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]), 0),
        (lambda frame: frame[:3] + bytes([0]) + frame[4:-16], 0),
        (lambda frame: frame + frame, 1),
    ],
    ids=["passed on", "other step", "other tag", "no tag", "repeated"],
)
def test_relay_cannot_forge_or_repeat_a_report(
    meddle: Callable[[bytes], bytes], delivered: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It passes on a handshake, which succeeds, and then sends what it likes (S8)."""

    async def scenario() -> None:
        async with listening("a") as (listener, reports), watching() as (connections, _):
            relay = Relay(listener.port)
            async with acting(relay.visit) as port:
                connections.watch([agent_at(port)])
                connections.report(report_of(1))
                assert await reports.get() == report_of(1)
                relay.captured.clear()
                relay.is_capturing = True
                connections.report(report_of(2))
                await until(lambda: len(relay.captured) >= report_frame_nbytes(relay.captured))
                frame = bytes(relay.captured)
                assert b'"step":2' in frame
                assert relay.to_target is not None
                relay.to_target.write(meddle(frame))
                if delivered:
                    assert await reports.get() == report_of(2)
                if meddle(frame) != frame:
                    await until(lambda: "refused a" in caplog.text)
                assert reports.empty()

    play(scenario())


def report_frame_nbytes(captured: bytes | bytearray) -> int:
    """Return how long the frame is that begins here: 16 of header, the body, 16 of tag."""
    if len(captured) < 16:
        return 16
    return 32 + int(struct.unpack_from(">I", captured, 4)[0])


def test_reports_before_admission_are_neither_read_nor_kept() -> None:
    """Whatever comes before authentication beyond a small hello stays in the kernel (S3)."""

    async def scenario() -> None:
        async with listening("a", secret=None) as (listener, _):
            _, writer = await asyncio.open_connection(HOST, listener.port)
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
            writer.write(bytes(64 * 2**20))
            # The hello is none, so the listener ends the connection instead of reading on.
            with pytest.raises(ConnectionError):
                await writer.drain()
            writer.close()

    play(scenario())


def test_report_of_a_client_that_connected_before_admission_arrives_after_it() -> None:
    async def scenario() -> None:
        async with (
            listening("a", secret=None) as (listener, reports),
            watching() as (connections, declared),
        ):
            connections.report(report_of(1))
            connections.watch([agent_at(listener.port)])
            await until(lambda: listener._listener.pending == 1)
            await listener.admit(SECRET, reports.put_nowait)
            assert await reports.get() == report_of(1)
            assert declared.empty()

    play(scenario())


def test_flood_of_idle_connections_does_not_keep_an_agent_out() -> None:
    async def scenario() -> None:
        async with listening("a") as (listener, reports), watching() as (connections, _):
            idle = [
                await asyncio.open_connection(HOST, listener.port) for _ in range(MAX_PENDING + 8)
            ]
            connections.report(report_of(1))
            connections.watch([agent_at(listener.port)])
            assert await reports.get() == report_of(1)
            # The oldest were dropped.
            for reader, _ in idle[:8]:
                assert await reader.read() == b""
            for _, writer in idle:
                writer.close()

    play(scenario())


def test_silent_agent_does_not_delay_reports_to_others() -> None:
    async def scenario() -> None:
        async with (
            listening("a") as (listener, reports),
            acting(stay_silent) as port,
            watching() as (connections, declared),
        ):
            connections.watch([agent_at(port, node="c"), agent_at(listener.port)])
            for step in (1, 2):
                connections.report(report_of(step))
                assert await reports.get() == report_of(step)
            assert declared.empty()

    play(scenario())


def test_agent_that_reads_nothing_misses_reports_and_delays_nobody() -> None:
    """Unsent messages are replaced by the newest, and take no memory."""

    async def scenario() -> None:
        is_released = asyncio.Event()
        steps: list[int] = []

        async def read_late(connection: Any) -> None:
            await is_released.wait()
            while (message := await connection.receive()) is not None:
                steps.append(message.report.step)

        slow = StreamListener(f"tcp:{HOST}:0", PROTOCOL, "c", read_late)
        slow.start()
        slow.admit(SECRET)
        async with listening("a") as (listener, reports), watching() as (connections, _):
            port = int(slow.address.rpartition(":")[2])
            connections.watch([agent_at(port, node="c"), agent_at(listener.port)])
            large = tuple(SnapshotId(1, step) for step in range(20_000))
            for step in range(1, 41):
                connections.report(
                    NodeReport("b", lease=8, generation=1, server="s", step=step, protected=large)
                )
                assert (await reports.get()).step == step
            is_released.set()
            await until(lambda: steps[-1:] == [40])
            assert len(steps) < 40
        await slow.close()

    play(scenario())


def test_killed_agent_is_declared_dead_even_by_one_without_the_secret(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with (
            watching() as (connections, declared),
            watching(OTHER_SECRET) as (other_connections, other_declared),
        ):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", AGENT, stdout=subprocess.PIPE
            )
            try:
                assert process.stdout is not None
                agent = agent_at(int(await process.stdout.readline()))
                other_connections.watch([agent])
                connections.watch([agent])
                connections.report(report_of(5))
                assert await process.stdout.readline() == b"5\n"
                await until(lambda: "not connected to the agent of node a" in caplog.text)
                assert declared.empty()
                assert other_declared.empty()
            finally:
                process.kill()
                await process.wait()
            assert await declared.get() == agent
            assert await other_declared.get() == agent

    play(scenario())


def test_only_an_agent_that_refuses_again_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has started again learns the job's secret a moment later."""
    warned = []

    async def refuses(*_: object, warns: bool) -> peer_connections._Observation:
        warned.append(warns)
        last = len(warned) == 3
        return getattr(peer_connections._Observation, "DEAD" if last else "REFUSED")

    async def scenario() -> None:
        async with watching() as (connections, declared):
            monkeypatch.setattr(connections, "_observe", refuses)
            connections.watch([agent_at(1)])
            await declared.get()

    play(scenario())
    assert warned == [False, True, False]


def test_agent_whose_listener_is_closed_is_declared_dead() -> None:
    async def scenario() -> None:
        async with watching() as (connections, declared):
            async with listening("a") as (listener, reports):
                agent = agent_at(listener.port)
                connections.watch([agent])
                connections.report(report_of(1))
                await reports.get()
            assert await declared.get() == agent

    play(scenario())


def test_agent_that_still_drops_connections_while_it_ends_is_declared_dead_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process closes what is connected before it closes its listener, when it is killed."""
    monkeypatch.setattr(peer_connections, "_RETRY_S", 3600.0)
    dropped = asyncio.Queue[None]()

    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dropped.put_nowait(None)

    async def scenario() -> None:
        async with listening("a") as (listener, reports), watching() as (connections, declared):
            relay = Relay(listener.port)
            async with acting(relay.visit, *[drop] * 1000) as port:
                agent = agent_at(port)
                connections.watch([agent])
                connections.report(report_of(1))
                await reports.get()
                assert relay.to_target is not None
                relay.to_target.close()
                for _ in range(3):
                    await dropped.get()
            assert await declared.get() == agent

    play(scenario())


@pytest.mark.parametrize(
    ("pause_s", "lasted_s", "expected_s"),
    [(0.0, 0.0, 0.01), (0.01, 0.1, 0.02), (0.32, 0.1, 0.5), (0.5, 0.1, 0.5), (0.5, 0.5, 0.01)],
)
def test_pauses_grow_and_are_short_again_after_a_connection_that_lasted(
    pause_s: float, lasted_s: float, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_connections, "_RETRY_S", 0.5)
    assert peer_connections.next_pause_s(pause_s, lasted_s) == expected_s


def test_port_that_has_never_answered_this_observer_proves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A firewall may refuse this one alone; then the lease decides."""
    monkeypatch.setattr(peer_connections, "_RETRY_S", 0.01)
    attempts = asyncio.Queue[None]()
    open_for_real = peer_connections.open_stream

    async def open_counted(*arguments: Any, **options: Any) -> Any:
        attempts.put_nowait(None)
        return await open_for_real(*arguments, **options)

    monkeypatch.setattr(peer_connections, "open_stream", open_counted)

    async def scenario() -> None:
        async with listening("a") as (listener, _):
            agent = agent_at(listener.port)
        async with watching() as (connections, declared):
            connections.watch([agent])
            for _ in range(4):
                await attempts.get()
            assert declared.empty()

    play(scenario())


@pytest.mark.parametrize("server_lives", [True, False])
def test_new_leader_takes_a_node_for_dead_if_its_snapshot_server_refuses_as_well(
    server_lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader before, which was connected to it, was lost in the same moment."""
    monkeypatch.setattr(peer_connections, "_RETRY_S", 0.01)
    asked = asyncio.Queue[str]()
    identify_for_real = peer_connections.identify

    async def identify_noted(address: str, *arguments: Any, **options: Any) -> Any:
        asked.put_nowait(address)
        return await identify_for_real(address, *arguments, **options)

    monkeypatch.setattr(peer_connections, "identify", identify_noted)

    async def scenario() -> None:
        async with listening("a") as (listener, _):
            agent = agent_at(listener.port)
        async with listening("server") as (server, _), watching() as (connections, declared):
            record = replace(agent, server=f"tcp:{HOST}:{server.port}")
            if not server_lives:
                await server.close()
            connections.watch([record])
            if server_lives:
                for _ in range(3):
                    assert await asked.get() == record.server
                assert declared.empty()
            else:
                assert (await declared.get()).node == agent.node

    play(scenario())


@pytest.mark.parametrize("secret", [SECRET, OTHER_SECRET, None])
def test_another_name_at_an_agents_port_means_that_it_is_dead(
    secret: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the newcomer is of this job, of another one, or of none yet."""
    monkeypatch.setattr(peer_connections, "_HANDSHAKE_S", 0.5)

    async def scenario() -> None:
        async with (
            listening("successor", secret) as (listener, reports),
            watching() as (connections, declared),
        ):
            agent = agent_at(listener.port)
            connections.report(report_of(1))
            connections.watch([agent])
            assert await declared.get() == agent
            assert reports.empty()

    play(scenario())


def test_agent_of_another_version_is_refused_alone_and_not_declared_dead(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(Message, frozen=True, kw_only=True):
        pass

    later = Protocol(
        name="agent",
        versions=VersionRange(4, 5),
        requests=Codec[Later](Later),
        replies=Codec[Later](Later),
    )

    async def ignore(_: object) -> None:
        pass

    attempts: list[str] = []

    async def counted(address: str, *arguments: Any, **options: Any) -> Any:
        attempts.append(address.removeprefix("tcp:"))
        return await open_stream(address, *arguments, **options)

    monkeypatch.setattr(peer_connections, "open_stream", counted)

    async def scenario() -> None:
        newer = StreamListener(f"tcp:{HOST}:0", later, "newer", ignore)
        newer.start()
        newer.admit(SECRET)
        agent = agent_at(int(newer.address.rpartition(":")[2]), node="newer")
        async with listening("a") as (listener, reports), watching() as (connections, declared):
            connections.watch([agent, agent_at(listener.port)])
            for step in (1, 2):
                connections.report(report_of(step))
                assert await reports.get() == report_of(step)
            await until(lambda: attempts.count(agent.agent) >= 3)
            assert declared.empty()
            assert await probe(agent) is True
            # The other way round: the newer agent connects to this one.
            with pytest.raises(Exception, match="upgrade keepstep on node a"):
                await open_stream(f"tcp:{HOST}:{listener.port}", later, Identity("newer", SECRET))
            connections.report(report_of(3))
            assert await reports.get() == report_of(3)
        await newer.close()

    with caplog.at_level(logging.WARNING, logger="keepstep"):
        play(scenario())
    warnings = [r.message for r in caplog.records if r.message.startswith("not connected to")]
    assert len(warnings) == 1
    assert "upgrade keepstep on node b" in warnings[0]


def test_new_leader_receives_the_newest_report_at_once() -> None:
    async def scenario() -> None:
        async with (
            listening("a") as (listener, reports),
            listening("a") as (later, later_reports),
            watching() as (connections, _),
        ):
            for step in (1, 2):
                connections.report(report_of(step))
            connections.watch([agent_at(listener.port)])
            assert await reports.get() == report_of(2)
            connections.watch(())
            connections.watch([agent_at(later.port)])
            assert await later_reports.get() == report_of(2)
            assert reports.empty()

    play(scenario())


def test_connection_that_ends_is_made_again_and_the_newest_report_sent_again() -> None:
    async def scenario() -> None:
        reports: asyncio.Queue[NodeReport] = asyncio.Queue()

        async def take_one(connection: Any) -> None:
            message = await connection.receive()
            assert message is not None
            reports.put_nowait(message.report)

        forgetful = StreamListener(f"tcp:{HOST}:0", PROTOCOL, "a", take_one)
        forgetful.start()
        forgetful.admit(SECRET)
        async with watching() as (connections, declared):
            connections.report(report_of(4))
            connections.watch([agent_at(int(forgetful.address.rpartition(":")[2]))])
            for _ in range(3):
                assert await reports.get() == report_of(4)
            assert declared.empty()
        await forgetful.close()

    play(scenario())


@pytest.mark.parametrize("visit", [send_nothing, stay_silent])
def test_connection_that_fails_without_a_refusal_proves_no_death(
    visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_connections, "_HANDSHAKE_S", 0.05)
    visits = 0

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal visits
        visits += 1
        await visit(reader, writer)

    async def scenario() -> None:
        async with acting(counted) as port, watching() as (connections, declared):
            connections.watch([agent_at(port)])
            # An agent is dialled, and asked for its name, again and again.
            await until(lambda: visits >= 6)
            assert declared.empty()

    play(scenario())


def test_member_that_joins_again_is_reached_at_the_same_port() -> None:
    async def scenario() -> None:
        async with listening("a") as (listener, reports):
            port = listener.port
            # The same job, and then another job of the same name.
            for step, secret in enumerate((SECRET, OTHER_SECRET)):
                await listener.admit(secret, reports.put_nowait)
                assert listener.port == port
                async with watching(secret) as (connections, _):
                    connections.report(report_of(step))
                    connections.watch([agent_at(port)])
                    assert await reports.get() == report_of(step)

    play(scenario())


def test_probe_distinguishes_a_living_agent_from_one_that_is_gone() -> None:
    async def scenario() -> None:
        async with (
            listening("a", secret=None) as (listener, _),
            listening("b") as (other, _),
        ):
            agent = agent_at(listener.port)
            assert await probe(agent) is True
            assert await probe(agent_at(other.port)) is False
        assert await probe(agent) is False

    play(scenario())


def test_probe_claims_nothing_of_an_agent_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_connections, "_HANDSHAKE_S", 0.2)

    async def scenario() -> None:
        async with acting(send_nothing, stay_silent) as port:
            for _ in range(2):
                assert await probe(agent_at(port)) is None
        # To a broadcast address no connection can be made, and none is refused.
        assert await probe(agent_at(1, "255.255.255.255")) is None

    play(scenario())


def test_node_name_that_cannot_be_sent_is_a_usage_error() -> None:
    async def scenario() -> None:
        with pytest.raises(UsageError, match="choose another --node name"):
            await AgentListener.open("n" * 200, HOST)

    play(scenario())


def test_newest_announcement_comes_at_once_also_over_a_new_connection() -> None:
    async def scenario() -> None:
        heard: list[asyncio.Queue[CommitAnnouncement]] = [asyncio.Queue(), asyncio.Queue()]
        async with (
            listening("a") as (first, _),
            listening("a") as (second, _),
            watching() as (connections, _),
        ):
            for listener, queue in zip((first, second), heard, strict=True):
                await listener.admit(SECRET, lambda _: None, queue.put_nowait)
            connections.watch([agent_at(first.port)])
            for step in (1, 2):
                connections.announce(CommitAnnouncement(SnapshotId(1, step), after=7))
                assert await heard[0].get() == CommitAnnouncement(SnapshotId(1, step), after=7)
            connections.watch([])
            connections.watch([agent_at(second.port)])
            assert await heard[1].get() == CommitAnnouncement(SnapshotId(1, 2), after=7)

    play(scenario())
