"""Claims about blocking connections, over real sockets."""

from __future__ import annotations

import os
import socket
import tempfile
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.transport import (
    AuthenticationFailed,
    Connection,
    ConnectionLost,
    FileRange,
    FrameRejected,
    Identity,
    MalformedMessage,
    MessageTooLarge,
    PeerRefused,
    PeerTimeout,
    PeerUnavailable,
    TransportError,
    accept,
    connect,
    tcp_address_of,
)
from keepstep.transport.frames import FrameSealer
from tests.adaptive_timeouts import patient
from tests.examples import examples
from tests.unit.transport.conftest import in_thread
from tests.unit.transport.example_protocol import (
    ASK,
    CLIENT,
    OTHER_SECRET,
    PROTOCOL,
    REQUESTS,
    SERVER,
    Ask,
    Tell,
    client_handshake,
    protocol,
)

Ends = tuple[Connection[Any, Any], Connection[Any, Any]]


def test_messages_go_both_ways_and_the_end_is_orderly(ends: Ends):
    client, server = ends
    client.send(ASK)
    assert server.receive() == ASK
    server.send(Tell(text="one"))
    server.send(Tell(text="two"))
    server.close()
    assert client.receive() == Tell(text="one")
    assert client.receive() == Tell(text="two")
    assert client.receive() is None


def test_payload_goes_into_the_buffers_given(ends: Ends):
    client, server = ends
    parts = [os.urandom(3_000_001), b"", os.urandom(5)]
    sent = in_thread(server.send, Tell(text="bytes"), [memoryview(part) for part in parts])
    first, second = bytearray(1_000_000), bytearray(2_000_006)

    def into(message: Tell, nbytes: int) -> list[memoryview]:
        assert (message.text, nbytes) == ("bytes", 3_000_006)
        return [memoryview(first), memoryview(second)]

    assert client.receive(into) == Tell(text="bytes")
    sent.result(patient(10))
    assert bytes(first + second) == b"".join(parts)


def test_files_are_sent_as_payload(ends: Ends):
    client, server = ends
    content = os.urandom(2_500_000)
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        view = memoryview(content)
        ranges = [
            FileRange(file.fileno(), 100, view[100:2_400_000]),
            FileRange(file.fileno(), 0, view[:7]),
        ]
        sent = in_thread(server.send_files, Tell(text="file"), ranges)
        received = bytearray(2_399_907)
        client.receive(lambda _, __: [memoryview(received)])
        sent.result(patient(10))
    assert received == content[100:2_400_000] + content[:7]


def test_pieces_of_files_and_of_memory_are_sent_in_order_each_when_it_is_made(ends: Ends):
    client, server = ends
    content = os.urandom(2_500_000)
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        pieces = [
            memoryview(b"first"),
            FileRange(file.fileno(), 100, memoryview(content)[100:]),
            memoryview(content),
        ]
        nbytes = 5 + 2_499_900 + 2_500_000
        sent = in_thread(server.send_pieces, Tell(text="mixed"), nbytes, iter(pieces))
        received = bytearray(nbytes)
        client.receive(lambda _, __: [memoryview(received)])
        sent.result(patient(10))
    assert received == b"first" + content[100:] + content


def test_a_payload_of_another_size_than_announced_ends_the_connection(ends: Ends):
    client, server = ends
    with pytest.raises(AssertionError, match="3 bytes, 4 were announced"):
        server.send_pieces(Tell(text="short"), 4, [memoryview(b"abc")])
    with pytest.raises(ConnectionLost):
        client.receive(lambda _, __: [memoryview(bytearray(4))])


def test_a_payload_is_consumed_in_tiles(ends: Ends):
    client, server = ends
    content = os.urandom(100_000)
    sent = in_thread(server.send, Tell(text="tiles"), [content])
    head = client.receive_head()
    assert head == (Tell(text="tiles"), 100_000)
    received = b""
    while len(received) < 100_000:
        tile = bytearray(min(777, 100_000 - len(received)))
        client.fill(memoryview(tile))
        received += tile
    sent.result(patient(10))
    assert received == content
    server.send(Tell(text="next"))
    assert client.receive() == Tell(text="next")


def test_a_file_that_changes_while_it_is_sent_is_refused_at_its_last_byte(
    tcp_listener: socket.socket,
):
    client, server = connected(tcp_listener)
    with client, server, tempfile.TemporaryFile() as file:
        file.write(b"now")
        file.flush()
        server.send_files(Tell(text="f"), [FileRange(file.fileno(), 0, memoryview(b"old"))])
        assert client.receive_head() == (Tell(text="f"), 3)
        client.fill(memoryview(bytearray(2)))
        with pytest.raises(FrameRejected, match="payload"):
            client.fill(memoryview(bytearray(1)))


def test_a_file_shorter_than_promised_ends_the_connection(tcp_listener: socket.socket):
    client, server = connected(tcp_listener)
    with client, server, tempfile.TemporaryFile() as file:
        with pytest.raises(ConnectionLost, match="ends before"):
            server.send_files(Tell(text="f"), [FileRange(file.fileno(), 0, memoryview(b"old"))])
        with pytest.raises(ConnectionLost, match="in the middle of a payload"):
            client.receive(lambda _, nbytes: [memoryview(bytearray(nbytes))])


def test_a_payload_that_was_not_asked_for_ends_the_connection(ends: Ends):
    client, server = ends
    client.send(ASK, [b"unasked"])
    with pytest.raises(MalformedMessage, match="not asked for"):
        server.receive()


def test_descriptors_ride_on_frames_of_unix_sockets_only(ends: Ends):
    client, server = ends
    reader, writer = os.pipe()
    try:
        if client._socket.is_unix:
            server.send(Tell(text="without"))
            server.send(Tell(text="with"), descriptor=writer)
            server.send(Tell(text="left"), descriptor=writer)
            server.send(Tell(text="after"))
            client.receive()
            with pytest.raises(MalformedMessage):
                client.take_descriptor()
            client.receive()
            received = client.take_descriptor()
            assert not os.get_inheritable(received)
            os.write(received, b"through")
            os.close(received)
            client.receive()
            client.receive()
        else:
            with pytest.raises(ValueError, match="only Unix sockets"):
                server.send(Tell(text="with"), descriptor=writer)
    finally:
        os.close(writer)
    if client._socket.is_unix:
        # It ends because no copy of the writing end is left open anywhere.
        assert os.read(reader, 100) == b"through"
        assert os.read(reader, 100) == b""
    os.close(reader)


def test_interrupt_ends_a_receive_in_another_thread(ends: Ends):
    client, _ = ends
    client.set_idle_limit(None)
    received = in_thread(client.receive)
    client.interrupt()
    assert received.result(patient(10)) is None


def test_one_thread_sends_while_another_receives(ends: Ends):
    client, server = ends
    received = in_thread(lambda: [client.receive() for _ in range(200)])
    echoed = in_thread(lambda: [server.receive() for _ in range(200)])
    answering = in_thread(lambda: [server.send(Tell(text=str(n))) for n in range(200)])
    for _ in range(200):
        client.send(ASK)
    assert echoed.result(patient(10)) == [ASK] * 200
    answering.result(patient(10))
    assert received.result(patient(10)) == [Tell(text=str(n)) for n in range(200)]


def test_idle_limit_and_deadline_end_a_wait(ends: Ends):
    client, _ = ends
    client.set_idle_limit(0.01)
    with pytest.raises(PeerTimeout):
        client.receive()
    client.set_idle_limit(None)
    client.set_deadline(time.monotonic() + 0.01)
    with pytest.raises(PeerTimeout):
        client.receive()


def test_sending_to_a_peer_that_does_not_read_ends_at_the_idle_limit(ends: Ends):
    client, _ = ends
    client.set_idle_limit(0.01)
    with pytest.raises(PeerTimeout):
        client.send(ASK, [bytes(2**26)])


def test_server_waits_for_requests_for_ever_and_not_for_a_peer_that_takes_no_answer(
    tcp_listener: socket.socket,
):
    """Unsent data stayed in memory until TCP gave up, after 15 minutes or never."""
    accepted = in_thread(lambda: accept(tcp_listener.accept()[0], PROTOCOL, SERVER, stuck_s=0.05))
    client = connect(tcp_address_of(tcp_listener), PROTOCOL, CLIENT)
    server = accepted.result(patient(10))
    with client, server:
        waiting = in_thread(server.receive)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        client.send(ASK)
        assert waiting.result(patient(10)) == ASK
        with pytest.raises(PeerTimeout):
            server.send(Tell(text="bytes"), [bytes(2**26)])


def test_both_ends_look_for_a_host_that_is_lost(tcp_listener: socket.socket):
    client, server = connected(tcp_listener)
    with client, server:
        for end in (client, server):
            tcp = end._socket._socket
            assert tcp.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
            asked = [
                tcp.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            ]
            assert asked[0] + asked[1] * asked[2] == 60


def test_a_malformed_message_leaves_the_connection_usable(tcp_listener: socket.socket):
    client, server = connected(tcp_listener)
    with client, server:
        for body in (b'{"type":"New"}', b"\xff", b"{}"):
            client._socket.send_all(client._sealer.seal_head(body))
            with pytest.raises(MalformedMessage, match="node client-node"):
                server.receive()
        client.send(ASK)
        assert server.receive() == ASK


def test_a_message_too_large_leaves_the_connection_usable(tcp_listener: socket.socket):
    client, server = connected(tcp_listener, limit=200)
    with client, server:
        with pytest.raises(MessageTooLarge):
            client.send(Ask(place=ASK.place, sizes={"x" * 200: 1}))
        client.send(ASK)
        assert server.receive() == ASK


def test_limit_paces_tcp_and_is_lifted(tcp_listener: socket.socket):
    client, server = connected(tcp_listener)
    with client, server:
        server.limit(1_000_000)
        assert server._socket._socket.getsockopt(socket.SOL_SOCKET, 47) == 1_000_000
        server.limit(0)
        server.send(Tell(text="unlimited"))
        assert client.receive() == Tell(text="unlimited")


def test_nobody_listening_differs_from_nobody_answering(tcp_listener: socket.socket, tmp_path: Any):
    address = tcp_address_of(tcp_listener)
    with pytest.raises(PeerTimeout):  # The kernel accepts, no process answers.
        connect(address, PROTOCOL, CLIENT, handshake_s=0.05)
    tcp_listener.close()
    with pytest.raises(PeerRefused, match="no process listens"):
        connect(address, PROTOCOL, CLIENT)
    with pytest.raises(PeerUnavailable):
        connect(f"unix:{tmp_path}/nothing", PROTOCOL, CLIENT)
    with pytest.raises(ValueError, match="no address"):
        connect("127.0.0.1:80", PROTOCOL, CLIENT)


def test_the_answering_node_is_reported(tcp_listener: socket.socket):
    client, server = connected(tcp_listener)
    with client, server:
        assert client.peer_node == "server-node"
        assert server.peer_node == "client-node"
        assert client.version == server.version == 4
        assert client.peer.startswith("node server-node at tcp:127.0.0.1:")


def test_a_wrong_secret_is_refused(tcp_listener: socket.socket):
    accepted = in_thread(lambda: accept(tcp_listener.accept()[0], PROTOCOL, SERVER))
    with pytest.raises(AuthenticationFailed, match="does not know this job's secret"):
        connect(tcp_address_of(tcp_listener), PROTOCOL, Identity("stranger", OTHER_SECRET))
    with pytest.raises(ConnectionLost, match="another secret"):
        accepted.result(patient(10))


def test_ten_mebibytes_before_authentication_are_cut_off_and_not_kept(tcp_listener: socket.socket):
    for first in (b"GET / HTTP/1.1\r\n", client_handshake().start()):
        with socket.create_connection(tcp_listener.getsockname()) as stranger:
            flood = in_thread(stranger.sendall, first + bytes(10 * 2**20))
            raw, _ = tcp_listener.accept()
            tracemalloc.start()
            with pytest.raises((MalformedMessage, AuthenticationFailed)):
                accept(raw, PROTOCOL, SERVER)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 200_000
            with pytest.raises(OSError):  # noqa: PT011 - reset or broken pipe, as the kernel has it
                flood.result(patient(10))


def test_a_trickled_handshake_ends_at_the_deadline(tcp_listener: socket.socket):
    with socket.create_connection(tcp_listener.getsockname()) as slow:
        raw, _ = tcp_listener.accept()
        began_s = time.monotonic()
        accepted = in_thread(lambda: accept(raw, PROTOCOL, SERVER, handshake_s=0.3))
        slow.settimeout(0.02)
        hello = iter(client_handshake().start())
        while not accepted.done() and (byte := next(hello, None)) is not None:
            try:
                slow.sendall(bytes([byte]))
                # Waits, for the server says nothing until the hello is complete.
                if not slow.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break  # The server has given up.
        with pytest.raises(PeerTimeout):
            accepted.result(patient(5))
        assert next(hello, None) is not None, "the server waited for all of it"
        assert time.monotonic() - began_s > 0.25


def test_who_relays_a_handshake_can_forge_nothing(tcp_listener: socket.socket):
    """S8 of the security review: a relayed proof let the relay speak as the one it came from."""
    with socket.create_server(("127.0.0.1", 0)) as relay:
        accepted = in_thread(lambda: accept(tcp_listener.accept()[0], PROTOCOL, SERVER))
        connected = in_thread(lambda: connect(tcp_address_of(relay), PROTOCOL, CLIENT))
        to_client, _ = relay.accept()
        to_server = socket.create_connection(tcp_listener.getsockname())
        with to_client, to_server:
            hello = to_client.recv(4096)
            to_server.sendall(hello)
            answer = to_server.recv(4096)
            while len(answer) < len(hello) + 32:
                answer += to_server.recv(4096)
            to_client.sendall(answer)
            proof = to_client.recv(32, socket.MSG_WAITALL)
            to_server.sendall(proof)
            with connected.result(patient(10)), accepted.result(patient(10)) as server:
                assert server.peer_node == "client-node"
                forged = FrameSealer(proof, 1000).seal_head(REQUESTS.encode(ASK))
                to_server.sendall(b"".join(forged))
                with pytest.raises(FrameRejected):
                    server.receive()
                with pytest.raises(FrameRejected):
                    server.receive()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(50))
@given(noise=st.binary(max_size=200), is_frame=st.booleans())
def test_arbitrary_bytes_raise_nothing_but_transport_errors(noise: bytes, is_frame: bool):
    ours, theirs = socket.socketpair()
    with ours, Connection.over_pair(theirs, PROTOCOL.server, "client") as server:
        ours.sendall(b"".join(FrameSealer(None, 1000).seal_head(noise)) if is_frame else noise)
        ours.shutdown(socket.SHUT_WR)
        try:
            assert isinstance(server.receive(), Ask | None)
        except TransportError:
            return


def connected(listening: socket.socket, limit: int = 2**24) -> Ends:
    spoken = protocol(limit=limit)
    accepted = in_thread(lambda: accept(listening.accept()[0], spoken, SERVER, stuck_s=10))
    client = connect(tcp_address_of(listening), spoken, CLIENT, idle_s=10)
    return client, accepted.result(patient(10))
