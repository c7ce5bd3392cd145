"""Claims about what agents notice of each other and tell each other, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.elastic.agent.peer_connections import AgentListener, PeerConnections, _prove, probe
from keepstep.elastic.rendezvous.records import NodeRecord, NodeReport

HOST = "127.0.0.1"
SECRET = b"the job's"

AGENT = """
import asyncio
from keepstep.elastic.agent.peer_connections import AgentListener

async def live():
    listener = await AgentListener.open("a", "127.0.0.1")
    listener.accept_reports(b"the job's", lambda report: print(report.step, flush=True))
    print(listener.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(live())
"""

Visit = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def play(scenario: Coroutine[Any, Any, None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(30):
            await scenario

    asyncio.run(in_time())


def agent_at(port: int, host: str = HOST) -> NodeRecord:
    """The record of node a, whose agent is said to listen there."""
    return NodeRecord(
        node="a",
        host=host,
        nproc=1,
        agent=f"{host}:{port}",
        server="",
        store_port=5,
        lease=7,
        digest="d",
    )


def report_of(step: int) -> NodeReport:
    return NodeReport("b", 8, 1, step, (SnapshotId(1, step),))


@asynccontextmanager
async def watching(
    secret: bytes = SECRET,
) -> AsyncIterator[tuple[PeerConnections, asyncio.Queue[NodeRecord]]]:
    """PeerConnections, and whom they declare dead."""
    declared: asyncio.Queue[NodeRecord] = asyncio.Queue()
    connections = PeerConnections(secret, declared.put)
    try:
        yield connections, declared
    finally:
        await connections.close()


@asynccontextmanager
async def listening(node: str) -> AsyncIterator[tuple[AgentListener, asyncio.Queue[NodeReport]]]:
    """An agent's listener, and what it hears."""
    heard: asyncio.Queue[NodeReport] = asyncio.Queue()
    listener = await AgentListener.open(node, HOST)
    listener.accept_reports(SECRET, heard.put_nowait)
    try:
        yield listener, heard
    finally:
        listener.close()


@asynccontextmanager
async def acting(*visits: Visit) -> AsyncIterator[int]:
    """The port of someone who does one of these with each visitor, in turn, and then closes the connection."""
    turns = itertools.cycle(visits)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next(turns)(reader, writer)
        writer.close()

    async with await asyncio.start_server(serve, HOST, 0) as server:
        yield server.sockets[0].getsockname()[1]


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Is nobody that one could tell from an agent about to greet."""


@dataclass
class Stranger:
    """Someone who says to a listener what it pleases."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    nonce: str

    @classmethod
    async def at(cls, listener: AgentListener) -> Stranger:
        reader, writer = await asyncio.open_connection(HOST, listener.port)
        _, nonce = (await reader.readline()).decode().split()
        return cls(reader, writer, nonce)

    def say(self, secret: bytes, report: NodeReport) -> None:
        self.writer.write(_prove(secret, self.nonce) + b"\n" + report.encode() + b"\n")

    async def finish(self) -> None:
        """Return once the listener has taken in all that was said."""
        self.writer.write_eof()
        await self.reader.read()
        self.writer.close()


def test_reports_are_heard_in_turn() -> None:
    async def scenario() -> None:
        async with listening("a") as (listener, heard), watching() as (connections, _):
            connections.watch([agent_at(listener.port)])
            for step in (1, 2, 3):
                connections.report(report_of(step))
                assert await heard.get() == report_of(step)

    play(scenario())


def test_only_who_knows_the_secret_is_heard() -> None:
    async def scenario() -> None:
        async with listening("a") as (listener, heard):
            for step, secret in enumerate((b"another", SECRET, b"")):
                stranger = await Stranger.at(listener)
                stranger.say(secret, report_of(step))
                await stranger.finish()
            assert heard.get_nowait() == report_of(1)
            assert heard.empty()

    play(scenario())


def test_a_proof_that_was_overheard_is_worth_nothing() -> None:
    async def scenario() -> None:
        async with listening("a") as (listener, heard):
            overheard, stranger = await Stranger.at(listener), await Stranger.at(listener)
            stranger.nonce = overheard.nonce
            stranger.say(SECRET, report_of(1))
            for one in (stranger, overheard):
                await one.finish()
            assert heard.empty()

    play(scenario())


def test_who_lacks_the_secret_stays_connected() -> None:
    async def scenario() -> None:
        async with listening("a") as (listener, heard):
            stranger, other = await Stranger.at(listener), await Stranger.at(listener)
            stranger.say(b"another", report_of(1))
            # By the end of a whole exchange that began later, the listener has answered the stranger, if it ever does.
            other.say(SECRET, report_of(2))
            await other.finish()
            assert heard.get_nowait() == report_of(2)
            assert not stranger.reader.at_eof()
            await stranger.finish()

    play(scenario())


def test_a_killed_agent_is_declared_dead_even_by_one_that_lacks_the_secret() -> None:
    async def scenario() -> None:
        async with (
            watching() as (connections, declared),
            watching(b"another") as (other_links, other_declared),
        ):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", AGENT, stdout=subprocess.PIPE
            )
            try:
                assert process.stdout is not None
                agent = agent_at(int(await process.stdout.readline()))
                other_links.watch([agent])
                connections.watch([agent])
                connections.report(report_of(5))
                assert await process.stdout.readline() == b"5\n"
                assert declared.empty()
                assert other_declared.empty()
            finally:
                process.kill()
                await process.wait()
            assert await declared.get() == agent
            assert await other_declared.get() == agent

    play(scenario())


def test_an_agent_whose_gate_is_closed_is_declared_dead() -> None:
    async def scenario() -> None:
        async with listening("a") as (listener, _):
            agent = agent_at(listener.port)
        async with watching() as (connections, declared):
            connections.watch([agent])
            assert await declared.get() == agent

    play(scenario())


def test_another_name_in_an_agents_place_means_that_it_is_dead() -> None:
    async def scenario() -> None:
        async with (
            listening("successor") as (listener, heard),
            watching() as (connections, declared),
        ):
            agent = agent_at(listener.port)
            connections.report(report_of(1))
            connections.watch([agent])
            assert await declared.get() == agent
            assert heard.empty()

    play(scenario())


def test_a_new_leader_hears_the_newest_report_at_once() -> None:
    async def scenario() -> None:
        async with (
            listening("a") as (listener, heard),
            listening("a") as (later, later_heard),
            watching() as (connections, _),
        ):
            for step in (1, 2):
                connections.report(report_of(step))
            connections.watch([agent_at(listener.port)])
            assert await heard.get() == report_of(2)
            connections.watch(())
            connections.watch([agent_at(later.port)])
            assert await later_heard.get() == report_of(2)
            assert heard.empty()

    play(scenario())


def test_a_connection_that_ends_is_made_anew_and_the_newest_report_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keepstep.elastic.agent.peer_connections._RETRY_S", 0.0)

    async def scenario() -> None:
        heard: asyncio.Queue[NodeReport] = asyncio.Queue()

        async def hear_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"a nonce\n")
            await reader.readline()
            heard.put_nowait(NodeReport.decode(await reader.readline()))

        # A silence proves no death, even right after a connection has ended.
        async with watching() as (connections, declared), acting(hear_one, say_nothing) as port:
            connections.report(report_of(4))
            connections.watch([agent_at(port)])
            for _ in range(3):
                assert await heard.get() == report_of(4)
            assert declared.empty()

    play(scenario())


def test_a_probe_tells_a_living_agent_from_one_that_is_gone() -> None:
    async def scenario() -> None:
        async with listening("a") as (listener, _), listening("b") as (other, _):
            agent = agent_at(listener.port)
            assert await probe(agent) is True
            assert await probe(agent_at(other.port)) is False
        assert await probe(agent) is False

    play(scenario())


def test_a_probe_claims_nothing_of_who_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.elastic.agent.peer_connections._CONNECT_TIMEOUT_S", 0.2)

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def scenario() -> None:
        async with acting(say_nothing, stay_silent) as port:
            for _ in range(2):
                assert await probe(agent_at(port)) is None
        # To a broadcast address no connection can be made, and none is refused.
        assert await probe(agent_at(1, "255.255.255.255")) is None

    play(scenario())
