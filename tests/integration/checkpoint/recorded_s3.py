"""An S3 server that keeps the requests that it gets."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
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

    It may ignore where a listing shall begin, and the condition of a copy, as moto does; refuse
    copies; answer them without what they have become; and answer no copies but the first ones.
    """

    def __init__(self) -> None:
        self.application = DomainDispatcherApplication(create_backend_app)
        self.is_over = threading.Event()
        self.reset()

    def reset(self) -> None:
        """Forget the requests, and answer as S3 does."""
        self.requests: list[Request] = []
        self.ignores_start = False
        self.ignores_conditions = False
        self.refuses_copies = False
        self.hides_copies = False
        self.answered_copies: Iterator[None] | None = None
        self.unanswered_copies = 0

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
        source = environ.get("HTTP_X_AMZ_COPY_SOURCE")
        if source is None:
            return self.application(environ, start_response)
        if self.answered_copies is not None and next(self.answered_copies, self) is self:
            self.unanswered_copies += 1
            self.is_over.wait()
        if self.refuses_copies:
            return _error(start_response, "403 Forbidden", "AccessDenied")
        wanted = environ.get("HTTP_X_AMZ_COPY_SOURCE_IF_MATCH")
        if not self.ignores_conditions and _etag(source) not in (None, wanted):
            return _error(start_response, "412 Precondition Failed", "PreconditionFailed")
        answer = self.application(environ, start_response)
        if self.hides_copies:
            return [re.sub(rb"<ETag>.*</ETag>", b"", b"".join(answer))]
        return answer


def _etag(source: str) -> str | None:
    """Return the ETag of an object, given as a copy's source; None if there is none."""
    bucket, _, key = unquote(source).removeprefix("/").partition("/")
    stored = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].get_object(bucket, key)
    return None if stored is None else stored.etag


def _error(start_response: Callable[..., Any], status: str, code: str) -> list[bytes]:
    start_response(status, [("Content-Type", "application/xml")])
    return [f"<Error><Code>{code}</Code><Message>told so</Message></Error>".encode()]


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
