"""An S3 server that keeps the requests that it gets."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


@dataclass(frozen=True, slots=True)
class Request:
    """A request that the server got, and its answer."""

    method: str
    path: str
    query: str
    authorization: str
    nbytes: int
    copied_from: str
    answer: str

    @property
    def is_listing(self) -> bool:
        return self.query.startswith("list-type=2")

    @property
    def keys(self) -> list[str]:
        """The last parts of objects' keys in the answer to a listing."""
        return [key.rpartition("/")[2] for key in re.findall(r"<Key>([^<]*)</Key>", self.answer)]

    @property
    def directories(self) -> list[str]:
        """The names of directories in the answer to a listing."""
        prefixes = re.findall(r"<CommonPrefixes><Prefix>([^<]*)/</Prefix>", self.answer)
        return [prefix.rpartition("/")[2] for prefix in prefixes]


class Recorder:
    """The application of moto's server; it keeps the requests.

    It may ignore where a listing shall begin, and refuse copies.
    """

    def __init__(self) -> None:
        self.application = DomainDispatcherApplication(create_backend_app)
        self.requests: list[Request] = []
        self.ignores_start = False
        self.refuses_copies = False

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        if self.ignores_start:
            environ["QUERY_STRING"] = re.sub("&?start-after=[^&]*", "", environ["QUERY_STRING"])
        answer = b"".join(self._answer(environ, start_response))
        self.requests.append(
            Request(
                environ["REQUEST_METHOD"],
                environ["PATH_INFO"],
                environ["QUERY_STRING"],
                environ.get("HTTP_AUTHORIZATION", ""),
                int(environ.get("CONTENT_LENGTH") or 0),
                environ.get("HTTP_X_AMZ_COPY_SOURCE", ""),
                answer.decode(errors="replace"),
            )
        )
        return [answer]

    def _answer(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        if self.refuses_copies and "HTTP_X_AMZ_COPY_SOURCE" in environ:
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>no copies</Message></Error>"]
        return self.application(environ, start_response)


@contextmanager
def serve(recorder: Recorder, context: ssl.SSLContext | None) -> Iterator[tuple[str, int]]:
    server = make_server("127.0.0.1", 0, recorder, threaded=True, ssl_context=context)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield "127.0.0.1", server.port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
