"""Provides the job's storage: files on their own file system, or objects behind a faulty proxy.

The proxy stands before a moto server and passes requests on. While a fault is set it refuses them
(503), leaves them unanswered, delays them, or tears them: it breaks every other connection off
before the request, after it, or in the middle of the answer.
"""

from __future__ import annotations

import enum
import http.client
import itertools
import logging
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from keepstep.checkpoint.format.stored.storage import open_storage
from ops.bench.chaos.machine import FileSystem

MEGABYTES = 2048
_BUCKET = "chaos"
_SLOW_DOWN = (
    b'<?xml version="1.0"?><Error><Code>SlowDown</Code>'
    b"<Message>Reduce your request rate.</Message></Error>"
)
_HOP_BY_HOP = {"transfer-encoding", "connection", "content-length", "date", "server"}


class RequestFault(enum.StrEnum):
    """The proxy's treatment of requests."""

    NONE = "none"
    REFUSE = "refuse"
    STALL = "stall"
    SLOW = "slow"
    TEAR = "tear"


class Files:
    """Checkpoints in a folder, on a file system of their own where `file_system` is given."""

    def __init__(self, folder: Path, image: Path | None) -> None:
        self.url = str(folder / "checkpoint")
        self.environment: dict[str, str] = {}
        self.file_system = FileSystem(image, folder, MEGABYTES) if image is not None else None

    def close(self) -> None:
        """Unmount the file system."""
        if self.file_system is not None:
            self.file_system.unmount()


class Objects:
    """A moto server, and a proxy before it."""

    def __init__(self, host: str) -> None:
        # moto and its web server take seconds to import, and only this storage needs them.
        import boto3  # type: ignore[import-untyped]
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        self._server.start()
        upstream_host, upstream_port = self._server.get_host_and_port()
        self.proxy = _Proxy((host, 0), (upstream_host, upstream_port))
        self._thread = threading.Thread(target=self.proxy.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"s3://{_BUCKET}/checkpoint"
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{self.proxy.server_port}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }
        # This process reads the storage, too.
        os.environ.update(self.environment)
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=_BUCKET)

    def close(self) -> None:
        """End both servers."""
        self.proxy.set(RequestFault.NONE)
        self.proxy.shutdown()
        self._thread.join()
        self.proxy.server_close()
        self._server.stop()
        for name in self.environment:
            os.environ.pop(name, None)


Storage = Files | Objects


def damage(url: str, directory: str, strength: float) -> str:
    """Delete one object of a stored step; return which."""
    storage = open_storage(url)
    # Parts and packs are what loading needs; which of them it is matters.
    found = storage.names(f"{directory}/")
    names = [name for name in found if "/parts/" in name or "/packs/" in name]
    if not names:
        raise RuntimeError(f"{url}/{directory} has no parts or packs: {found}")
    name = names[int(strength * len(names))]
    storage.delete(name)
    return name


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], upstream: tuple[str, int]) -> None:
        super().__init__(address, _Request)
        self.upstream = upstream
        self.numbers = itertools.count()
        self.delay_s = 0.0
        self._fault = RequestFault.NONE
        self._ended = threading.Event()

    def set(self, fault: RequestFault, delay_s: float = 0.0) -> None:
        """Let all requests from now on have a fault; ends the one before."""
        self._ended.set()
        self._ended = threading.Event()
        self._fault, self.delay_s = fault, delay_s

    def fault(self) -> tuple[RequestFault, threading.Event]:
        """Return the fault of a new request, and what is set when the fault ends."""
        return self._fault, self._ended

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that have been killed."""


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Proxy

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault, ended = self.server.fault()
        tear = next(self.server.numbers) % 6 if fault is RequestFault.TEAR else -1
        if fault is RequestFault.REFUSE:
            self._answer(503, [], _SLOW_DOWN)
            return
        if fault is RequestFault.STALL:
            ended.wait()
            self.close_connection = True
            return
        if fault is RequestFault.SLOW:
            time.sleep(self.server.delay_s)
        if tear == 0:
            self.close_connection = True
            return
        connection = http.client.HTTPConnection(*self.server.upstream, timeout=60)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if tear == 2:
            self.close_connection = True
            return
        headers = [item for item in response.getheaders() if item[0].lower() not in _HOP_BY_HOP]
        length = response.getheader("Content-Length") if self.command == "HEAD" else None
        self._answer(response.status, headers, data, length, is_cut=tear == 4)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

    def _answer(
        self,
        status: int,
        headers: list[tuple[str, str]],
        data: bytes,
        length: str | None = None,
        *,
        is_cut: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if is_cut:
            data = data[: len(data) // 2]
            self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log nothing."""
