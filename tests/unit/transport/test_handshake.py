"""Claims about the handshake, between two pure ends and whoever sits between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.transport import (
    AuthenticationFailed,
    MalformedMessage,
    TransportError,
    VersionMismatch,
)
from keepstep.transport.frames import FrameOpener, FrameSealer
from keepstep.transport.handshake import Handshake
from keepstep.transport.hello import MAX_HELLO_NBYTES, Hello
from keepstep.transport.protocol import Role, VersionRange
from tests.unit.transport.example_protocol import (
    OTHER_SECRET,
    PROTOCOL,
    SECRET,
    client_handshake,
    exchange,
    feed,
    protocol,
    server_handshake,
)


def test_both_ends_learn_node_version_and_matching_keys():
    client, server = client_handshake(), server_handshake()
    exchange(client, server)
    assert client.result is not None
    assert server.result is not None
    assert (client.result.node, server.result.node) == ("server-node", "client-node")
    assert client.result.version == server.result.version == 4
    assert client.result.keys.send == server.result.keys.receive
    assert client.result.keys.receive == server.result.keys.send
    assert client.result.keys.send != client.result.keys.receive


def test_keys_differ_between_connections():
    keys = set()
    for nonce in range(3, 6):
        client = client_handshake(nonce=nonce)
        exchange(client, server_handshake())
        assert client.result is not None
        keys |= {client.result.keys.send, client.result.keys.receive}
    assert len(keys) == 6


def test_keys_are_not_printed():
    client = client_handshake()
    exchange(client, server_handshake())
    assert client.result is not None
    assert repr(client.result.keys.send) not in repr(client.result)


def test_client_refuses_a_server_of_another_job_and_still_learns_its_node():
    client, server = client_handshake(), server_handshake(secret=OTHER_SECRET)
    exchange(client, server)
    assert isinstance(client.refusal, AuthenticationFailed)
    assert client.refusal.peer_node == "server-node"
    assert "does not know this job's secret: it is another job's server, or has" in str(
        client.refusal
    )
    assert client.result is None
    assert server.result is None


def test_server_refuses_a_client_that_makes_up_its_proof():
    server = server_handshake()
    feed(server, bytearray(client_handshake().start() + bytes(32)))
    assert isinstance(server.refusal, AuthenticationFailed)
    assert server.result is None


@given(st.data())
def test_any_changed_bit_on_the_way_ends_the_handshake(data: st.DataObject):
    client, server = client_handshake(), server_handshake()
    streams = {"hello": client.start()}

    def flip(name: str, said: bytes) -> bytearray:
        changed = bytearray(said)
        if name == which:
            bit = data.draw(st.integers(0, 8 * len(said) - 1))
            changed[bit // 8] ^= 1 << bit % 8
        return changed

    which = data.draw(st.sampled_from(["hello", "answer", "proof"]))
    answer = feed(server, flip("hello", streams["hello"]))
    if not answer:
        assert server.refusal is not None or server.wanted_nbytes
        return
    proof = feed(client, flip("answer", answer))
    feed(server, flip("proof", proof))
    assert server.result is None
    if which != "proof":
        assert client.result is None


def test_a_reflected_hello_is_refused():
    client = client_handshake()
    feed(client, bytearray(client.start()))
    assert isinstance(client.refusal, MalformedMessage)
    assert client.refusal.field == "hello.role"


def test_a_proof_sent_back_to_its_maker_is_refused():
    server = server_handshake()
    said = feed(server, bytearray(client_handshake().start()))
    hello_nbytes = len(server_handshake()._own_bytes)
    feed(server, bytearray(said[hello_nbytes:]))
    assert isinstance(server.refusal, AuthenticationFailed)


def test_a_recorded_handshake_cannot_be_replayed_to_another_server():
    client, server = client_handshake(), server_handshake()
    answer = feed(server, bytearray(client.start()))
    recorded = client.start() + feed(client, bytearray(answer))
    assert (feed(server, bytearray(recorded[-32:])), server.refusal) == (b"", None)
    later = server_handshake(nonce=9)
    feed(later, bytearray(recorded))
    assert isinstance(later.refusal, AuthenticationFailed)


def test_who_relays_the_handshake_cannot_forge_a_frame():
    client, server = client_handshake(), server_handshake()
    exchange(client, server)  # The man in the middle passed every byte on, and saw them all.
    assert server.result is not None
    forged = b"".join(FrameSealer(bytes(32), 1000).seal_head(b'{"type":"Fail"}'))
    opener = FrameOpener(server.result.keys.receive, 1000, "client")
    opener.buffer()[:] = forged[:16]
    opener.advance(16)
    opener.buffer()[:] = forged[16:]
    with pytest.raises(AuthenticationFailed):
        opener.advance(len(forged) - 16)


@pytest.mark.parametrize(
    ("ours", "theirs", "version"),
    [((2, 4), (1, 3), 3), ((1, 1), (1, 9), 1), ((4, 4), (2, 6), 4)],
)
def test_the_highest_common_version_is_spoken(
    ours: tuple[int, int], theirs: tuple[int, int], version: int
):
    client = client_handshake(protocol(VersionRange(*ours)).client)
    server = server_handshake(protocol(VersionRange(*theirs)).server)
    exchange(client, server)
    assert client.result is not None
    assert server.result is not None
    assert client.result.version == server.result.version == version


@pytest.mark.parametrize(
    ("client_versions", "server_versions", "older"),
    [((1, 2), (3, 4), "client-node"), ((5, 6), (3, 4), "server-node")],
)
def test_both_ends_name_the_node_to_upgrade_if_no_version_is_common(
    client_versions: tuple[int, int], server_versions: tuple[int, int], older: str
):
    client = client_handshake(protocol(VersionRange(*client_versions)).client)
    server = server_handshake(protocol(VersionRange(*server_versions)).server)
    exchange(client, server)
    for end in (client, server):
        assert isinstance(end.refusal, VersionMismatch)
        assert f"upgrade keepstep on node {older}" in str(end.refusal)
        assert "versions 3 to 4" in str(end.refusal)


def test_another_protocol_is_refused():
    client, server = client_handshake(protocol(name="doctor").client), server_handshake()
    exchange(client, server)
    assert isinstance(client.refusal, MalformedMessage)
    assert isinstance(server.refusal, MalformedMessage)
    assert "the doctor protocol" in str(client.refusal)


def test_a_hello_of_a_later_version_may_be_longer():
    hello = Hello(Role.CLIENT, "example", PROTOCOL.versions, "client-node", bytes([1] * 32))
    encoded = hello.encode()
    longer = encoded[:4] + (len(encoded) + 5).to_bytes(2, "big") + encoded[6:] + b"later"
    server = server_handshake()
    assert feed(server, bytearray(longer))
    assert server.refusal is None
    assert server.peer_hello == hello


def test_the_longest_hello_fits():
    hello = Hello(Role.CLIENT, "p" * 128, PROTOCOL.versions, "n" * 128, bytes(32))
    assert len(hello.encode()) <= MAX_HELLO_NBYTES


@given(st.binary(max_size=600), st.booleans())
def test_arbitrary_bytes_are_refused_with_a_transport_error(noise: bytes, has_prefix: bool):
    prefix = b"KSH1" + (6 + max(len(noise), 37)).to_bytes(2, "big") if has_prefix else b""
    server = server_handshake()
    feed(server, bytearray(prefix + noise + bytes(40)))
    assert server.result is None
    assert server.refusal is None or isinstance(server.refusal, TransportError)


def test_a_server_says_its_node_before_it_knows_the_secret_and_goes_on_when_it_does():
    client, server = client_handshake(), server_handshake(secret=None)
    exchange(client, server)
    assert server.needs_secret
    assert client.peer_hello is not None
    assert client.peer_hello.node == "server-node"
    assert client.result is None
    proof = feed(client, bytearray(server.provide_secret(SECRET)))
    feed(server, bytearray(proof))
    assert server.result is not None


def test_a_short_secret_is_refused():
    with pytest.raises(ValueError, match="16 random"):
        Handshake(PROTOCOL.client, "a", b"short", bytes(32), "peer")
