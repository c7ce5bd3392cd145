"""Tests of object storage with faults, over real HTTP: no data is lost or partly visible."""

from __future__ import annotations

import http.client
import itertools
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.stored.objects import ObjectStorage
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.adaptive_timeouts import patient

SLOW_DOWN = (
    b'<?xml version="1.0"?><Error><Code>SlowDown</Code>'
    b"<Message>Reduce your request rate.</Message></Error>"
)


class Faults:
    """Chooses the requests that have a fault: every `every`-th, at most `limit` of them."""

    def __init__(self) -> None:
        self.kind, self.every, self.limit = "none", 1, 0
        self.requests = itertools.count(1)
        self.injected = 0
        self.lock = threading.Lock()
        self.repeated = threading.Event()
        self.ended = threading.Event()

    def set(self, kind: str, every: int = 1, limit: int = 10**9) -> None:
        self.kind, self.every, self.limit, self.injected = kind, every, limit, 0
        self.requests = itertools.count(1)
        self.repeated.clear()

    def inject(self) -> bool:
        """Return whether the next request has the fault."""
        with self.lock:
            if self.kind == "none" or next(self.requests) % self.every:
                return False
            if self.injected >= self.limit:
                return False
            self.injected += 1
            return True


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults = Faults()
    upstream = ("", 0)

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.faults.kind if self.faults.inject() else "none"
        if fault in ("500", "503"):
            self.answer(int(fault), SLOW_DOWN)
            return
        if fault == "reset before":
            self.close_connection = True
            return
        if fault == "stall":
            self.faults.ended.wait()
            self.close_connection = True
            return
        if fault == "slow":
            # The first request is answered once it has been repeated; the repeated one never is.
            if self.faults.injected > 1:
                self.faults.repeated.set()
                self.faults.ended.wait()
                self.close_connection = True
                return
            self.faults.repeated.wait()
        connection = http.client.HTTPConnection(*self.upstream, timeout=patient(30))
        connection.request(self.command, self.path, body, dict(self.headers))
        response = connection.getresponse()
        data = response.read()
        connection.close()
        if fault == "reply lost":
            self.close_connection = True
            return
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in (
                "transfer-encoding",
                "connection",
                "content-length",
                "date",
                "server",
            ):
                self.send_header(name, value)
        length = (
            response.getheader("Content-Length") or "0"
            if self.command == "HEAD"
            else str(len(data))
        )
        self.send_header("Content-Length", length)
        self.end_headers()
        if fault == "cut":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

    def answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def s3_endpoint(s3_server: tuple[str, int]) -> Iterator[tuple[str, int]]:
    """The address of a proxy in front of the server."""
    Proxy.upstream = s3_server
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    yield "127.0.0.1", proxy.server_port
    Proxy.faults.ended.set()
    proxy.shutdown()
    thread.join()
    proxy.server_close()


@pytest.fixture(autouse=True)
def no_fault_left() -> Iterator[None]:
    yield
    Proxy.faults.set("none")


def state(value: float) -> dict[str, torch.Tensor]:
    return {"large": torch.full((700, 500), value), "small": torch.full((9,), value)}


@pytest.mark.parametrize("kind", ["500", "503", "reset before", "reply lost", "cut"])
def test_checkpoints_are_intact_if_every_third_request_fails(s3: str, kind: str) -> None:
    url = f"{s3}/{uuid.uuid4().hex}"
    Proxy.faults.set(kind, every=3)
    checkpoint.save(url, state(1.0), step=1)
    checkpoint.save(url, state(2.0), step=2)
    filled = state(0.0)
    assert checkpoint.load(url, filled) == 2
    assert Proxy.faults.injected >= 4
    Proxy.faults.set("none")
    assert all(torch.equal(filled[name], value) for name, value in state(2.0).items())
    assert [stored.step for stored in list_steps(open_storage(url))] == [2, 1]
    for step in (1, 2):
        StoredCheckpoint.open(open_storage(url), step).verify()


def test_a_request_without_an_answer_is_repeated_and_finally_fails(s3: str) -> None:
    storage = open_storage(f"{s3}/{uuid.uuid4().hex}")
    assert isinstance(storage, ObjectStorage)
    storage = replace(storage, request_timeout_s=1.0)
    data = bytes(range(256))
    for number, act in enumerate([
        lambda: storage.write("a", [data]),
        lambda: storage.create("b", data),
        lambda: storage.read("a"),
        lambda: storage.read_into("a", [memoryview(bytearray(10))], 5),
        lambda: storage.exists("a"),
        lambda: storage.delete("a"),
    ]):  # fmt: skip
        Proxy.faults.set("stall", limit=1)
        act()
        assert Proxy.faults.injected == 1, number
    assert storage.names() == ["b"]
    assert storage.read("b") == data
    Proxy.faults.set("stall")
    with pytest.raises(
        CheckpointError, match="could not read b: 3 requests got no answer within 3 s"
    ):
        storage.read("b")


def test_a_slow_request_succeeds_although_it_was_repeated(s3: str) -> None:
    storage = open_storage(f"{s3}/{uuid.uuid4().hex}")
    assert isinstance(storage, ObjectStorage)
    storage = replace(storage, request_timeout_s=1.0)
    for act in (lambda: storage.write("a", [b"onetwo"]), lambda: storage.read("a")):
        Proxy.faults.set("slow")
        act()
        assert Proxy.faults.injected >= 2
    Proxy.faults.set("none")
    assert storage.read("a") == b"onetwo"


def test_large_requests_get_more_time_with_every_attempt(s3: str) -> None:
    storage = open_storage(f"{s3}/{uuid.uuid4().hex}")
    assert isinstance(storage, ObjectStorage)
    storage = replace(storage, request_timeout_s=0.1)
    Proxy.faults.set("stall")
    # 1/8 s at the assumed rate, then 4/8 s and 16/8 s, plus 0.1 s each.
    with pytest.raises(
        CheckpointError, match="could not read a: 3 requests got no answer within 3 s"
    ):
        storage.read("a", nbytes=2**15)
    with pytest.raises(
        CheckpointError, match="could not write a: 3 requests got no answer within 3 s"
    ):
        storage.write("a", [bytes(2**15)])


def test_storage_that_stays_unavailable_is_an_error_and_keeps_the_last_checkpoint(s3: str) -> None:
    url = f"{s3}/{uuid.uuid4().hex}"
    checkpoint.save(url, state(1.0), step=1)
    Proxy.faults.set("503")
    with pytest.raises(CheckpointError, match="check bucket"):
        checkpoint.save(url, state(2.0), step=2)
    Proxy.faults.set("none")
    filled = state(0.0)
    assert checkpoint.load(url, filled) == 1
    assert torch.equal(filled["large"], state(1.0)["large"])


@pytest.mark.parametrize("kind", ["500", "503", "reset before", "reply lost", "cut"])
def test_directories_are_listed_if_every_third_request_fails(s3: str, kind: str) -> None:
    storage = open_storage(f"{s3}/{uuid.uuid4().hex}")
    for name in "abcd":
        storage.write(f"{name}/leaf", [b"x"])
    Proxy.faults.set(kind, every=3)
    assert storage.directories_with("leaf") == ["a", "b", "c", "d"]
    assert Proxy.faults.injected >= 1


def test_a_listing_without_an_answer_is_repeated_and_finally_fails(s3: str) -> None:
    storage = open_storage(f"{s3}/{uuid.uuid4().hex}")
    assert isinstance(storage, ObjectStorage)
    storage = replace(storage, request_timeout_s=0.5)
    storage.write("a/leaf", [b"x"])
    Proxy.faults.set("stall", limit=1)
    assert storage.directories_with("leaf") == ["a"]
    Proxy.faults.set("stall")
    with pytest.raises(CheckpointError, match=r"could not list: Read timeout .*; check bucket"):
        storage.directories_with("leaf")
    assert Proxy.faults.injected == 5
