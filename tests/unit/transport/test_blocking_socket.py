"""Claims about a socket that waits by a poll object which it keeps."""

from __future__ import annotations

import socket

import pytest

from keepstep.transport.blocking_socket import BlockingSocket
from keepstep.transport.errors import ConnectionLost


def test_closed_socket_waits_for_nothing_that_has_its_number_since() -> None:
    """It would wait, without limit, until there was something to read on the other socket."""
    one, other = socket.socketpair()
    number = one.fileno()
    closed = BlockingSocket(one, "peer")
    closed.receiving.idle_s = 20.0
    closed.close()
    later = socket.socketpair()
    with other, later[0], later[1]:
        assert number in (later[0].fileno(), later[1].fileno())
        with pytest.raises(ConnectionLost, match="closed here"):
            closed.receive_with_descriptors(memoryview(bytearray(1)))
