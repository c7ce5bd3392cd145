"""Asks other monitors over HTTP, with signed requests, and accepts only signed answers.

`keepstep.monitor.signing` states what that promises.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from keepstep.monitor.errors import MonitorUnreachable, ProtocolViolation
from keepstep.monitor.signing import (
    CHALLENGE_HEADER,
    SIGNATURE_HEADER,
    Request,
    is_answer,
    sign_request,
)

_CHUNK_NBYTES = 1 << 18


class MonitorClient:
    """Requests to any number of monitors of one job. `close` ends its connections.

    Args:
        secret: the job's.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        # An answer that is compressed may expand a thousandfold; none is asked for.
        self._session = aiohttp.ClientSession(
            headers={"Accept-Encoding": "identity"}, auto_decompress=False
        )
        self._challenges: dict[str, str] = {}

    async def ask(
        self, method: str, address: str, timeout_s: float, limit_nbytes: int, body: bytes = b""
    ) -> bytes:
        """Return the body of the answer.

        Args:
            method: of HTTP.
            address: URL of the request.
            timeout_s: for each of the two requests that it may take.
            limit_nbytes: of the answer.
            body: of the request.

        Raises:
            MonitorUnreachable: no monitor of this job answers, or it refuses; or the address is no
                URL.
            ProtocolViolation: the answer is longer than the limit.
        """
        where = _place(address)
        try:
            # Twice: the first answer may only bring a new challenge.
            for _ in range(2):
                async with asyncio.timeout(timeout_s):
                    answer = await self._ask_once(method, address, limit_nbytes, body, where)
                if answer is not None:
                    return answer
        except TimeoutError as error:
            raise MonitorUnreachable(
                f"the monitor at {where} gave no answer within {timeout_s:g} s"
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise MonitorUnreachable(
                f"no monitor answers at {where}: {_reason(error.os_error)}"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise MonitorUnreachable(f"no monitor answers at {where}: {error}") from error
        raise MonitorUnreachable(
            f"the monitor at {where} refused our signature: it has another secret; does it monitor "
            f"another job? --job and --secret-file must be the same"
        )

    async def ask_object(
        self, address: str, timeout_s: float, limit_nbytes: int = 1 << 24
    ) -> dict[str, Any]:
        """Return the JSON object that is got from an address; arguments and errors as `ask`."""
        return parse_object(await self.ask("GET", address, timeout_s, limit_nbytes))

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    async def _ask_once(
        self,
        method: str,
        address: str,
        limit_nbytes: int,
        body: bytes,
        where: str,
    ) -> bytes | None:
        """Return the answer; None if it brought another challenge to sign."""
        url = URL(address)
        challenge = self._challenges.get(where, "")
        authorization = sign_request(
            self._secret, challenge, Request(method, url.raw_path_qs, body)
        )
        async with self._session.request(
            method, url, data=body or None, allow_redirects=False,
            headers={"Authorization": authorization},
        ) as response:  # fmt: skip
            if response.status == 401:
                self._challenges[where] = response.headers.get(CHALLENGE_HEADER, "")[:256]
                return None
            if not response.ok:
                raise MonitorUnreachable(
                    f"the monitor at {where} answered status {response.status}"
                )
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise ProtocolViolation(f"the monitor at {where} compresses what it sends")
            answer = await _read(response, limit_nbytes, where)
            signature = response.headers.get(SIGNATURE_HEADER)
            if not is_answer(self._secret, authorization, response.status, answer, signature):
                raise MonitorUnreachable(
                    f"what answers at {where} does not know this job's secret: it is no monitor of "
                    f"this job, or an older one"
                )
            return answer


def _place(address: str) -> str:
    """Return the host and the port that are asked.

    Raises:
        MonitorUnreachable: the address names none.
    """
    try:
        place = urlsplit(address).netloc
    except ValueError as error:
        raise MonitorUnreachable(f"{address} is no URL: {error}; write http://HOST:PORT") from error
    if not place:
        raise MonitorUnreachable(f"{address} names no host; write http://HOST:PORT")
    return place


def _reason(error: OSError) -> str:
    """Return for people why no connection came about."""
    if error.errno == errno.ECONNREFUSED:
        return "nothing listens there; start `keepstep monitor` there"
    # Those below zero are the resolver's.
    number = error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or str(error)


async def _read(response: aiohttp.ClientResponse, limit_nbytes: int, where: str) -> bytes:
    parts, nbytes = [], 0
    async for part in response.content.iter_chunked(_CHUNK_NBYTES):
        nbytes += len(part)
        if nbytes > limit_nbytes:
            raise ProtocolViolation(f"the monitor at {where} sends more than {limit_nbytes} bytes")
        parts.append(part)
    return b"".join(parts)


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object that the bytes encode.

    Raises:
        ProtocolViolation: they do not encode one.
    """
    try:
        value = json.loads(data)
    # RecursionError: nesting deeper than the interpreter's stack allows.
    except (ValueError, RecursionError) as error:
        raise ProtocolViolation(f"the answer is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ProtocolViolation("the answer is not a JSON object")
    return value
