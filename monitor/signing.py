"""Signs the requests of monitors to each other, and their answers. Pure, but for random numbers.

A daemon that asks at an address cannot know who listens there, so it sends nothing that would let
the listener ask others. It sends a signature of this one request, which the asked daemon accepts
once:

    client                                              server
    GET /v1/summary?...                             ->
                                                    <-  401, challenge
    GET /v1/summary?..., signature (over challenge,
    nonce, method, target and body)                 ->
                                                    <-  200, body, signature (over the request's
                                                        signature, status and body)

A challenge serves for many requests, for some minutes; a nonce for one. All signatures are HMACs
(SHA-256) under a key that is derived from the job's secret and serves no other purpose.

Promises: a request is accepted only from somebody who knows the secret, unchanged, once, and not
after the server has restarted. An answer is accepted only if the server knows the secret and gave
it to this request. Whoever stands in between can pass both on unchanged, and read them: the traffic
is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

SCHEME = "Keepstep"
CHALLENGE_HEADER = "Keepstep-Challenge"
SIGNATURE_HEADER = "Keepstep-Signature"
ROTATE_S = 300.0
_SEEN_LIMIT = 100_000


@dataclass(frozen=True, slots=True)
class Request:
    """The signed part of a request: the target is path and query as in the request line."""

    method: str
    target: str
    body: bytes = field(default=b"", repr=False)


def sign_request(secret: bytes, challenge: str, request: Request) -> str:
    """Return the value of the `Authorization` header; each call returns another."""
    nonce = secrets.token_hex(16)
    return f"{SCHEME} {challenge}.{nonce}.{_request_signature(secret, challenge, nonce, request)}"


def sign_answer(secret: bytes, authorization: str, status: int, body: bytes) -> str:
    """Return the signature of an answer to the request with this `Authorization` header."""
    return _signature(secret, "answer", authorization, str(status), _digest(body))


def is_answer(
    secret: bytes, authorization: str, status: int, body: bytes, signature: str | None
) -> bool:
    """Return whether this is the signature of an answer to the request; takes constant time."""
    expected = sign_answer(secret, authorization, status, body)
    return hmac.compare_digest(expected.encode(), (signature or "").encode("utf-8", "replace"))


class RequestVerifier:
    """Accepts each signed request once.

    Args:
        secret: the job's.
        new_challenge: returns a text that was never returned before and cannot be guessed.
    """

    def __init__(
        self, secret: bytes, new_challenge: Callable[[], str] = lambda: secrets.token_hex(16)
    ) -> None:
        self._secret = secret
        self._new_challenge = new_challenge
        self._began_s = float("-inf")
        # The current challenge, and the one before, with the signatures seen.
        self._seen: dict[str, set[str]] = {}

    def challenge(self, now_s: float) -> str:
        """Return the current challenge, at a time in monotonic seconds."""
        current = next(reversed(self._seen), None)
        is_full = current is not None and len(self._seen[current]) >= _SEEN_LIMIT
        if current is None or is_full or now_s - self._began_s >= ROTATE_S:
            current, previous = self._new_challenge(), current
            kept = {} if previous is None else {previous: self._seen[previous]}
            self._seen, self._began_s = {**kept, current: set()}, now_s
        return current

    def accepts(self, authorization: str | None, request: Request, now_s: float) -> bool:
        """Return whether this is a request of somebody who knows the secret, for the first time."""
        self.challenge(now_s)
        scheme, _, signed = (authorization or "").partition(" ")
        challenge, _, rest = signed.partition(".")
        nonce, _, signature = rest.partition(".")
        seen = self._seen.get(challenge)
        if scheme != SCHEME or seen is None:
            return False
        expected = _request_signature(self._secret, challenge, nonce, request)
        if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace")):
            return False
        if expected in seen:
            return False
        seen.add(expected)
        return True


def _request_signature(secret: bytes, challenge: str, nonce: str, request: Request) -> str:
    return _signature(
        secret, "request", challenge, nonce, request.method, request.target, _digest(request.body)
    )


def _signature(secret: bytes, *parts: str) -> str:
    key = hmac.new(secret, b"keepstep monitor requests 1", hashlib.sha256).digest()
    # No part contains a line break: they come from one line of a request each.
    return hmac.new(key, "\n".join(parts).encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
