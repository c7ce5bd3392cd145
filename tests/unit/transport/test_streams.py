"""Claims about connections and listeners for asyncio, over real sockets."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import pytest

from keepstep.transport import (
    AuthenticationFailed,
    Connection,
    ConnectionLost,
    FrameRejected,
    Identity,
    MalformedMessage,
    PeerRefused,
    PeerTimeout,
    StreamConnection,
    StreamListener,
    VersionMismatch,
    VersionRange,
    connect,
    identify,
    open_stream,
)
from tests.adaptive_timeouts import patient
from tests.unit.transport.example_protocol import (
    ASK,
    CLIENT,
    OTHER_SECRET,
    PROTOCOL,
    SECRET,
    Ask,
    Tell,
    client_handshake,
    protocol,
)

LOOPBACK = "tcp:127.0.0.1:0"


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*arguments: Any, **keywords: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **keywords), patient(30)))

    return run


async def echo(connection: StreamConnection[Any, Any]) -> None:
    while await connection.receive() is not None:
        await connection.send(Tell(text=connection.peer_node))


@asynccontextmanager
async def serving(
    serve: Callable[[StreamConnection[Any, Any]], Awaitable[None]] = echo,
    secret: bytes | None = SECRET,
    **options: Any,
) -> AsyncIterator[StreamListener[Any, Any]]:
    listener = StreamListener(LOOPBACK, PROTOCOL, "server-node", serve, **options)
    if secret is not None:
        listener.admit(secret)
    listener.start()
    try:
        yield listener
    finally:
        await listener.close()


async def ask(address: str) -> Tell:
    client = await open_stream(address, PROTOCOL, CLIENT)
    try:
        await client.send(ASK)
        reply = await client.receive()
        assert isinstance(reply, Tell)
        return reply
    finally:
        client.close()


def pair() -> tuple[StreamConnection[Any, Any], Connection[Any, Any]]:
    """An agent's asyncio end and its worker's blocking end."""
    ours, theirs = socket.socketpair()
    agent = StreamConnection.over_pair(ours, PROTOCOL.server, "worker")
    return agent, Connection.over_pair(theirs, PROTOCOL.client, "agent")


@on_loop
async def test_messages_go_both_ways_and_the_end_is_orderly():
    async with serving() as listener:
        client = await open_stream(listener.address, PROTOCOL, CLIENT)
        assert (client.peer_node, client.version) == ("server-node", 4)
        for _ in range(3):
            await client.send(ASK)
            assert await client.receive() == Tell(text="client-node")
        await listener.close()
        assert await client.receive() is None
        client.close()


@on_loop
async def test_blocking_clients_speak_to_asyncio_servers():
    async with serving() as listener:
        with await asyncio.to_thread(connect, listener.address, PROTOCOL, CLIENT) as client:
            client.send(ASK)
            assert await asyncio.to_thread(client.receive) == Tell(text="client-node")


@on_loop
async def test_many_tasks_send_whole_frames():
    received: list[Any] = []
    ended = asyncio.Event()

    async def collect(connection: StreamConnection[Any, Any]) -> None:
        while (message := await connection.receive()) is not None:
            received.append(message)
        ended.set()

    async with serving(collect) as listener:
        client = await open_stream(listener.address, PROTOCOL, CLIENT)
        large = Ask(place=ASK.place, sizes={str(n): n for n in range(20_000)})
        await asyncio.gather(*(client.send(large if n % 5 == 0 else ASK) for n in range(50)))
        client.close()
        await ended.wait()
        assert len(received) == 50
        assert sum(message == large for message in received) == 10


@on_loop
async def test_descriptors_ride_on_frames_of_a_pair():
    agent, worker = pair()
    reader, writer = os.pipe()
    await agent.send(Tell(text="take"), descriptor=writer)
    assert worker.receive() == Tell(text="take")
    os.close(writer)
    taken = worker.take_descriptor()
    worker.send(ASK, descriptor=taken)
    os.close(taken)
    assert await agent.receive() == ASK
    back = agent.take_descriptor()
    os.write(back, b"through")
    os.close(back)
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    worker.close()
    assert await agent.receive() is None
    agent.close()


@on_loop
async def test_a_cancelled_receive_loses_nothing():
    agent, worker = pair()
    whole = b"".join(worker._sealer.seal_head(PROTOCOL.requests.encode(ASK)))
    for cut in (whole[:5], whole[5:20], whole[20:-1]):
        worker._socket.send_all([cut])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(agent.receive(), 0.01)
    worker._socket.send_all([whole[-1:]])
    assert await agent.receive() == ASK
    worker.close()
    agent.close()


@on_loop
async def test_a_send_cancelled_in_a_frame_ends_the_connection():
    agent, worker = pair()
    large = Tell(text="x" * 2**22)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(agent.send(large), 0.01)
    with pytest.raises(ConnectionLost):
        await agent.send(Tell(text="next"))
    with pytest.raises(ConnectionLost, match="middle of a frame"):
        await asyncio.to_thread(worker.receive)
    worker.close()
    agent.close()


@on_loop
async def test_close_ends_a_receive_of_another_task():
    agent, worker = pair()
    receiving = asyncio.create_task(agent.receive())
    await asyncio.sleep(0)
    agent.close()
    assert await receiving is None
    assert worker.receive() is None
    worker.close()


@on_loop
async def test_payloads_are_refused():
    agent, worker = pair()
    worker.send(ASK, [b"unasked"])
    with pytest.raises(MalformedMessage, match="not asked for"):
        await agent.receive()
    worker.close()
    agent.close()


@on_loop
async def test_a_forged_frame_is_rejected():
    rejected: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def serve(connection: StreamConnection[Any, Any]) -> None:
        try:
            await connection.receive()
        except FrameRejected as error:
            rejected.set_result(error)

    async with serving(serve) as listener:
        client = await open_stream(listener.address, PROTOCOL, CLIENT)
        client._sealer._sequence += 1
        await client.send(ASK)
        assert "node client-node" in str(await rejected)
        client.close()


@on_loop
async def test_strangers_and_other_versions_are_refused_while_others_go_on():
    async with serving() as listener:
        client = await open_stream(listener.address, PROTOCOL, CLIENT)
        with pytest.raises(AuthenticationFailed) as caught:
            await open_stream(listener.address, PROTOCOL, Identity("stranger", OTHER_SECRET))
        assert caught.value.peer_node == "server-node"
        with pytest.raises(VersionMismatch):
            await open_stream(listener.address, protocol(VersionRange(7, 8)), CLIENT)
        await client.send(ASK)
        assert await client.receive() == Tell(text="client-node")
        client.close()


@on_loop
async def test_a_listener_says_its_node_before_it_knows_the_secret_and_completes_later():
    async with serving(secret=None) as listener:
        node = await identify(listener.address, PROTOCOL, "prober", timeout_s=patient(5))
        assert node == "server-node"
        with pytest.raises(PeerTimeout):
            await open_stream(listener.address, PROTOCOL, CLIENT, handshake_s=0.05)
        early = asyncio.create_task(ask(listener.address))
        while not listener.pending:  # noqa: ASYNC110 - the listener tells nobody who waits
            await asyncio.sleep(0)
        listener.admit(SECRET)
        assert await early == Tell(text="client-node")


@on_loop
async def test_a_probe_tells_a_dead_agent_from_another_version():
    async with serving() as listener:
        newer = protocol(VersionRange(9, 9))
        node = await identify(listener.address, newer, "prober", timeout_s=patient(5))
        assert node == "server-node"
        address = listener.address
    with pytest.raises(PeerRefused):
        await identify(address, PROTOCOL, "prober", timeout_s=patient(5))


@on_loop
async def test_idle_connections_are_capped_and_the_oldest_dropped():
    async with serving(max_pending=3, handshake_s=600) as listener:
        host, _, port = listener.address.removeprefix("tcp:").rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(6)]
        for reader, _ in idle[:3]:
            assert await reader.read() == b""
        assert listener.pending <= 3
        assert await ask(listener.address) == Tell(text="client-node")
        for _, writer in idle:
            writer.close()


@on_loop
async def test_a_trickled_handshake_ends_at_the_deadline():
    async with serving(handshake_s=0.2) as listener:
        host, _, port = listener.address.removeprefix("tcp:").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        ended = asyncio.create_task(reader.read())
        for byte in client_handshake().start():
            writer.write(bytes([byte]))
            await asyncio.wait([ended], timeout=0.02)
            if ended.done():
                break
        (outcome,) = await asyncio.gather(ended, return_exceptions=True)
        # The kernel resets what is closed while a byte of the peer's has not been read.
        assert outcome == b"" or isinstance(outcome, ConnectionResetError)
        writer.close()


@on_loop
async def test_what_is_sent_before_authentication_is_not_buffered():
    """S3 of the security review: 200 MiB sent were 201 MiB resident."""
    async with serving() as listener:
        host, _, port = listener.address.removeprefix("tcp:").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(client_handshake().start() + bytes(10 * 2**20))
        try:
            await writer.drain()
            await reader.read()
        except ConnectionError:
            pass  # Cut off in the middle, as it is to be.
        assert await ask(listener.address) == Tell(text="client-node")
        writer.close()


class _Exhausted(socket.socket):
    """A listening socket of a process that has run out of descriptors some times."""

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(fileno=listening.detach())
        self.setblocking(False)
        self.failures = [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS]

    def accept(self) -> Any:
        if self.failures:
            raise OSError(self.failures.pop(), "invented")
        return super().accept()


@on_loop
async def test_accepting_goes_on_after_every_error_of_accept():
    listener = StreamListener(LOOPBACK, PROTOCOL, "server-node", echo)
    listening = _Exhausted(listener._listening)
    listener._listening = listening
    listener.admit(SECRET)
    listener.start()
    assert await ask(listener.address) == Tell(text="client-node")
    assert listening.failures == []
    await listener.close()


@on_loop
async def test_a_fault_of_the_server_ends_one_connection_only(caplog: pytest.LogCaptureFixture):
    served = []

    async def fail_first(connection: StreamConnection[Any, Any]) -> None:
        served.append(connection)
        if len(served) == 1:
            raise ZeroDivisionError
        await echo(connection)

    async with serving(fail_first) as listener:
        client = await open_stream(listener.address, PROTOCOL, CLIENT)
        assert await client.receive() is None
        client.close()
        assert await ask(listener.address) == Tell(text="client-node")
    assert "serving a client of the example protocol failed" in caplog.text
