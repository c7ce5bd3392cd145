"""Claims about the blocking listener: it outlives whatever comes in."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from keepstep.transport import (
    AuthenticationFailed,
    Connection,
    Identity,
    Listener,
    VersionMismatch,
    VersionRange,
    connect,
    listen,
    tcp_address_of,
)
from tests.adaptive_timeouts import patient
from tests.unit.transport.example_protocol import (
    ASK,
    CLIENT,
    OTHER_SECRET,
    PROTOCOL,
    SERVER,
    Tell,
    protocol,
)


def echo(connection: Connection[Any, Any]) -> None:
    while connection.receive() is not None:
        connection.send(Tell(text=connection.peer_node))


@contextmanager
def serving(
    listening: socket.socket | None = None, **options: Any
) -> Iterator[tuple[Listener[Any, Any], str]]:
    listening = listening or listen("tcp:127.0.0.1:0")
    listener = Listener([listening], PROTOCOL, SERVER, echo, **options)
    listener.start()
    try:
        yield listener, tcp_address_of(listening)
    finally:
        listener.close()


def ask(address: str) -> Tell:
    with connect(address, PROTOCOL, CLIENT) as client:
        client.send(ASK)
        reply = client.receive()
        assert isinstance(reply, Tell)
        return reply


def test_clients_are_served_on_all_sockets_at_once(tmp_path: Any):
    tcp, unix = listen("tcp:127.0.0.1:0"), listen(f"unix:{tmp_path}/socket")
    addresses = [tcp_address_of(tcp), f"unix:{tmp_path}/socket"]
    listener = Listener([tcp, unix], PROTOCOL, SERVER, echo)
    listener.start()
    with ExitStack() as stack:
        stack.callback(listener.close)
        clients = [
            stack.enter_context(connect(address, PROTOCOL, CLIENT)) for address in addresses * 3
        ]
        for client in clients:
            client.send(ASK)
        assert [client.receive() for client in clients] == [Tell(text="client-node")] * 6


def test_close_ends_connections_and_threads():
    before = threading.active_count()
    with serving() as (listener, address), connect(address, PROTOCOL, CLIENT) as client:
        idle = socket.create_connection(listener._sockets[0].getsockname())
        client.send(ASK)
        client.receive()
        listener.close()
        assert client.receive() is None
        idle.close()
        assert threading.active_count() == before


def test_a_stranger_and_another_version_are_refused_while_others_go_on():
    with serving() as (_, address), connect(address, PROTOCOL, CLIENT) as client:
        with pytest.raises(AuthenticationFailed):
            connect(address, PROTOCOL, Identity("stranger", OTHER_SECRET))
        with pytest.raises(VersionMismatch, match="upgrade keepstep on node client-node"):
            connect(address, protocol(VersionRange(1, 1)), CLIENT)
        with pytest.raises(VersionMismatch, match="upgrade keepstep on node server-node"):
            connect(address, protocol(VersionRange(5, 9)), CLIENT)
        client.send(ASK)
        assert client.receive() == Tell(text="client-node")


def test_idle_connections_are_capped_and_the_oldest_dropped():
    with serving(max_pending=3) as (listener, address), ExitStack() as stack:
        where = listener._sockets[0].getsockname()
        idle = [
            stack.enter_context(socket.create_connection(where, timeout=patient(10)))
            for _ in range(6)
        ]
        assert [one.recv(1) for one in idle[:3]] == [b"", b"", b""]
        assert listener.pending <= 3
        assert ask(address) == Tell(text="client-node")


class _Exhausted(socket.socket):
    """A listening socket of a process that has run out of descriptors some times."""

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(fileno=listening.detach())
        self.setblocking(False)
        self.failures = [
            errno.EMFILE,
            errno.ENFILE,
            errno.ECONNABORTED,
            errno.EPROTO,
            errno.ENOBUFS,
        ]

    def accept(self) -> Any:
        if self.failures:
            raise OSError(self.failures.pop(), "invented")
        return super().accept()


def test_accepting_goes_on_after_every_error_of_accept():
    """S2 of the security review: the first EMFILE ended the listening thread for good."""
    listening = _Exhausted(listen("tcp:127.0.0.1:0"))
    with serving(listening) as (_, address):
        assert ask(address) == Tell(text="client-node")
    assert listening.failures == []


_SERVER = """
import resource, sys
from keepstep.transport import Listener, listen, tcp_address_of
from tests.unit.transport.example_protocol import PROTOCOL, SERVER
from tests.unit.transport.test_listener import echo
from tests.adaptive_timeouts import patient

listening = listen("tcp:127.0.0.1:0")
listener = Listener([listening], PROTOCOL, SERVER, echo, max_pending=1000, handshake_s=600)
listener.start()
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
print(tcp_address_of(listening), flush=True)
sys.stdin.read()
listener.close()
"""


def test_a_flood_that_exhausts_descriptors_does_not_end_the_listener():
    with (
        subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ) as process,
        ExitStack() as stack,
    ):
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        for _ in range(60):
            stack.enter_context(socket.create_connection((host, int(port))))
        with connect(address, PROTOCOL, CLIENT, handshake_s=60) as client:
            client.send(ASK)
            assert client.receive() == Tell(text="client-node")
        _, errors = process.communicate("")
        assert process.returncode == 0
        assert "Raise the limits" in errors


def test_a_fault_of_the_server_ends_one_connection_only(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    served = []

    def fail_first(connection: Connection[Any, Any]) -> None:
        served.append(connection)
        if len(served) == 1:
            raise ZeroDivisionError
        echo(connection)

    listening = listen("tcp:127.0.0.1:0")
    listener = Listener([listening], PROTOCOL, SERVER, fail_first)
    listener.start()
    try:
        with connect(tcp_address_of(listening), PROTOCOL, CLIENT) as client:
            assert client.receive() is None
        assert ask(tcp_address_of(listening)) == Tell(text="client-node")
    finally:
        listener.close()
    assert [fault.exc_type for fault in seen] == [ZeroDivisionError]
