"""Claims about ports kept for a listener to come: it gets them, and nobody else does."""

import socket

import pytest

from keepstep.elastic.store.ports import ReservedPort


def test_reserved_port_is_given_to_nobody_and_may_be_listened_on_again_and_again() -> None:
    with ReservedPort() as port:
        here = ("127.0.0.1", port.number)
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(here)
            with (
                socket.create_server(here) as listener,
                socket.create_connection(here),
                listener.accept()[0],
            ):
                pass
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(here)
    # The connections above linger on the port; whoever allows that may have it.
    ReservedPort(port=port.number).close()


def test_port_that_somebody_listens_on_cannot_be_reserved() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OSError, match="in use"):
        ReservedPort(port=listener.getsockname()[1])
