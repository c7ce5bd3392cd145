"""Claims about reserved ports: the later listener can bind them, and nothing else can."""

import socket

import pytest

from keepstep.elastic.store.ports import ReservedPort


def test_reserved_port_is_not_given_away_and_can_be_listened_on_repeatedly() -> None:
    with ReservedPort() as port:
        address = ("127.0.0.1", port.number)
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)
            with (
                socket.create_server(address) as listener,
                socket.create_connection(address),
                listener.accept()[0],
            ):
                pass
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
    # Closed connections are in TIME_WAIT on the port; a socket that allows reuse can bind it.
    ReservedPort(port=port.number).close()


def test_port_with_a_listener_cannot_be_reserved() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OSError, match="in use"):
        ReservedPort(port=listener.getsockname()[1])
