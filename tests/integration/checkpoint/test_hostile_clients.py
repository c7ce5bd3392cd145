"""Claims about a snapshot server under attack by processes without the job's secret."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.boxes import Box, Entry, encode_boxes, encode_index
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.checkpoint.snapshot.memory.messages import SNAPSHOT_PROTOCOL, ShardBox
from keepstep.transport.admission import MAX_PENDING
from keepstep.transport.blocking_handshake import HANDSHAKE_S
from keepstep.transport.handshake import NONCE_NBYTES, Handshake
from tests.adaptive_timeouts import patient
from tests.integration.checkpoint.servers import SECRET, Server

MIB = 2**20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, 1)
    yield server
    server.close()


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    return host, int(port)


def open_idle_connections(address: str, count: int, stack: ExitStack) -> None:
    """Open connections that send nothing."""
    for _ in range(count):
        stack.enter_context(socket.create_connection(host_and_port(address), timeout=patient(10)))


def open_files(server: Server) -> int:
    """Return the number of descriptors that a server has open."""
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def wait_until(is_reached: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + patient(timeout_s)
    while not is_reached():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def holdings(address: str) -> dict[SnapshotId, list[int]]:
    with closing(SnapshotClient(address, SECRET)) as client:
        return client.holdings()


def test_a_flood_that_exhausts_descriptors_does_not_end_the_server(tmp_path: Path) -> None:
    """S2 of the security review: the first EMFILE ended the thread that accepts over TCP."""
    with closing(Server(tmp_path, 1, max_descriptors=40)) as server, ExitStack() as stack:
        open_idle_connections(server.address, 60, stack)
        wait_until(lambda: open_files(server) >= 38)
        assert holdings(server.address) == {}
        assert holdings(server.local) == {}


def test_connections_that_do_not_authenticate_are_capped(server: Server) -> None:
    """S3: idle connections used up descriptors."""
    before = open_files(server)
    with ExitStack() as stack:
        open_idle_connections(server.address, 300, stack)
        assert holdings(server.address) == {}
        wait_until(lambda: open_files(server) <= before + MAX_PENDING, HANDSHAKE_S / 2)


def test_bytes_that_come_before_authentication_are_not_kept(server: Server) -> None:
    """S3: a peer's bytes were buffered without limit before it had authenticated."""
    process = psutil.Process(server.process.pid)
    before_nbytes = process.memory_info().rss
    with socket.create_connection(host_and_port(server.address), timeout=patient(2)) as raw:
        with contextlib.suppress(OSError):
            for _ in range(128):
                raw.sendall(bytes(MIB))
        assert process.memory_info().rss < before_nbytes + 16 * MIB


def test_a_trickled_handshake_ends_at_its_deadline(server: Server) -> None:
    """S10: each byte that came renewed the time that a handshake had."""
    hello = Handshake(
        SNAPSHOT_PROTOCOL.client, "n" * 100, SECRET, bytes(NONCE_NBYTES), "server"
    ).start()
    began_s = time.monotonic()
    with socket.create_connection(host_and_port(server.address)) as raw:
        raw.settimeout(0.2)
        for byte in hello:
            try:
                raw.sendall(bytes([byte]))
                while raw.recv(4096):
                    pass
                break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("the server waited for the whole hello")
    assert HANDSHAKE_S / 2 < time.monotonic() - began_s < HANDSHAKE_S + patient(5)


class Relay:
    """Passes bytes between a client and a server, and changes what the server sends."""

    def __init__(self, address: str, change: Callable[[bytes], bytes]) -> None:
        self.target = host_and_port(address)
        self.change = change
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = "tcp:{}:{}".format(*self.listening.getsockname())
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self) -> None:
        client, _ = self.listening.accept()
        server = socket.create_connection(self.target)
        back = threading.Thread(target=self.copy, args=(server, client, self.change))
        back.start()
        self.copy(client, server, lambda data: data)
        back.join()
        client.close()
        server.close()

    @staticmethod
    def copy(
        source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(MIB):
                target.sendall(change(data))
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.listening.close()
        for thread in self.threads:
            thread.join(patient(10))


def write_shard(server: Server, content: bytes) -> SnapshotId:
    """Have rank 0 seal a snapshot whose one tensor has this content."""
    server.open_generation(1)
    snapshot = SnapshotId(1, 1)
    box = Box.whole((len(content),))
    entry = Entry(
        key="w",
        dtype="uint8",
        global_shape=box.shape,
        box=box,
        byte_offset=0,
        nbytes=len(content),
    )
    index = encode_index(encode_boxes(len(content), [entry]), {})
    with closing(SnapshotClient(server.local, SECRET)) as client:
        _, arena = client.begin(snapshot, 0, len(content) + len(index))
        arena.buffer[: len(content)] = content
        arena.buffer[len(content) : len(content) + len(index)] = index
        client.seal(snapshot, 0, len(content), len(index))
    return snapshot


def test_bytes_that_are_changed_on_the_way_are_rejected(server: Server) -> None:
    """S8: frames had no tag, so whoever relayed a handshake could change what followed."""
    content = b"state of the training"
    snapshot = write_shard(server, content)
    wanted = ShardBox(0, "w", Box.whole((len(content),)))
    into = bytearray(len(content))
    with (
        closing(Relay(server.address, lambda data: data.replace(b"state", b"spate"))) as relay,
        closing(SnapshotClient(relay.address, SECRET)) as client,
    ):
        with pytest.raises(SnapshotUnavailable, match="changed on the way"):
            client.read(snapshot, [wanted], [memoryview(into)])
        with pytest.raises(SnapshotUnavailable):
            client.holdings()
