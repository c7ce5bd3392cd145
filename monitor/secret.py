"""Reads the job's secret, and derives the bearer token that authorizes requests to a monitor.

The secret itself is never sent. The token is derived from it for this one purpose, so a token that
leaks from a scrape configuration gives access to the monitor only. Traffic is not encrypted:
it belongs on the cluster's own network.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keepstep.monitor.errors import MonitorError
from keepstep.private_files import (
    MIN_SECRET_NBYTES,
    NotPrivate,
    own_secret,
    read_secret,
    runtime_directory,
)

VARIABLE = "KEEPSTEP_SECRET"


def job_secret(job: str, file: Path | None) -> bytes:
    """Return the job's secret.

    It is read from `file`, else from KEEPSTEP_SECRET, else from this user's own file for that job
    on this machine, which is created when it is first needed: sufficient for one machine only.

    Raises:
        MonitorError: the secret cannot be read, is too short, or others may use its file.
    """
    if file is not None:
        with _translate_errors(file):
            return read_secret(file, follow_links=True)
    if value := os.environ.get(VARIABLE):
        if len(value.encode()) < MIN_SECRET_NBYTES:
            raise MonitorError(
                f"the secret in ${VARIABLE} has {len(value.encode())} bytes; at least "
                f"{MIN_SECRET_NBYTES} are required"
            )
        return value.encode()
    name = re.sub(r"[^A-Za-z0-9._-]", "_", job)[:128]
    path = runtime_directory() / f"monitor-{name}.secret"
    with _translate_errors(path):
        return own_secret(path)


def bearer_token(secret: bytes) -> str:
    """Return the token: HMAC-SHA256 of a text that names its purpose under the secret, in hex."""
    return hmac.new(secret, b"keepstep bearer monitor", hashlib.sha256).hexdigest()


def is_authorized(header: str | None, secret: bytes) -> bool:
    """Return whether an `Authorization` header carries the token. Compares in constant time."""
    scheme, _, token = (header or "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        token.strip().encode("utf-8", "replace"), bearer_token(secret).encode()
    )


def is_loopback(host: str) -> bool:
    """Return whether a host, from an address or a `Host` header, is this machine's loopback.

    Only literal addresses and `localhost` count: a name that resolves to loopback may be an attack
    (DNS rebinding).
    """
    bare = host.strip()
    if bare.startswith("["):
        bare = bare[1:].partition("]")[0]
    elif bare.count(":") == 1:
        bare = bare.partition(":")[0]
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except NotPrivate as error:
        raise MonitorError(str(error)) from error
    except OSError as error:
        raise MonitorError(
            f"the job's secret cannot be read from {path}: {error.strerror}"
        ) from error
