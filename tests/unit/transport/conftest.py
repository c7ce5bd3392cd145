"""Connected ends for the tests of the transport."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from keepstep.transport import Connection, accept, connect, listen, tcp_address_of
from tests.adaptive_timeouts import patient
from tests.unit.transport.example_protocol import CLIENT, PROTOCOL, SERVER


def in_thread(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call a function in a thread of its own; the future has its outcome."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - the future raises it in the test
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.fixture
def tcp_listener() -> Iterator[socket.socket]:
    with listen("tcp:127.0.0.1:0") as listening:
        listening.setblocking(True)
        yield listening


@pytest.fixture(params=["tcp", "unix", "pair"])
def ends(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Connection[Any, Any], Connection[Any, Any]]]:
    """A client's and a server's connection to each other."""
    with ExitStack() as stack:
        if request.param == "pair":
            ours, theirs = socket.socketpair()
            client = Connection.over_pair(ours, PROTOCOL.client, "server")
            server = Connection.over_pair(theirs, PROTOCOL.server, "client")
        else:
            # Longer than the kernel allows a socket's name to be.
            directory = tmp_path / ("long" * 30)
            directory.mkdir()
            address = (
                "tcp:127.0.0.1:0" if request.param == "tcp" else f"unix:{directory / 'socket'}"
            )
            listening = stack.enter_context(listen(address))
            listening.setblocking(True)
            if request.param == "tcp":
                address = tcp_address_of(listening)
            accepted = in_thread(lambda: accept(listening.accept()[0], PROTOCOL, SERVER))
            client = connect(address, PROTOCOL, CLIENT)
            server = accepted.result(patient(10))
        for end in (client, server):
            end.set_idle_limit(10)
            stack.enter_context(end)
        yield client, server
