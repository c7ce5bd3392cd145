"""The job's secret, and the bearer tokens derived from it that authorize requests to a monitor.

The secret itself is never sent. Each purpose has its own token, derived from the secret, so a token
that leaks from a scrape configuration gives access to the monitor only. Traffic is not encrypted:
it belongs on the cluster's own network.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import tempfile
from pathlib import Path

from keepstep.monitor.errors import MonitorError

MONITOR = "monitor"
DOCTOR = "doctor"
VARIABLE = "KEEPSTEP_SECRET"
_LEAST_NBYTES = 16


def job_secret(job: str, file: Path | None) -> bytes:
    """Return the job's secret.

    It is read from `file`, else from KEEPSTEP_SECRET, else from this user's own file for that job
    on this machine, which is created when it is first needed: sufficient for one machine only.

    Raises:
        MonitorError: the secret cannot be read, is too short, or others may read it.
    """
    if file is not None:
        return _read(file)
    if value := os.environ.get(VARIABLE):
        return _checked(value.encode(), f"${VARIABLE}")
    path = _private_directory() / f"monitor-{re.sub(r'[^A-Za-z0-9._-]', '_', job)[:128]}.secret"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _read(path)
    with open(descriptor, "w") as secret_file:
        secret_file.write(secrets.token_hex(32))
    return _read(path)


def bearer_token(secret: bytes, purpose: str = MONITOR) -> str:
    """Return the token for one purpose: HMAC-SHA256 of the purpose under the secret, in hex."""
    return hmac.new(secret, b"keepstep bearer " + purpose.encode(), hashlib.sha256).hexdigest()


def is_authorized(header: str | None, secret: bytes, purpose: str = MONITOR) -> bool:
    """Return whether an `Authorization` header carries the token. Compares in constant time."""
    scheme, _, token = (header or "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        token.strip().encode("utf-8", "replace"), bearer_token(secret, purpose).encode()
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


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_mode & 0o077:
            raise MonitorError(f"{path} holds a secret and others may read it; chmod 600 {path}")
        return _checked(path.read_bytes().strip(), str(path))
    except OSError as error:
        raise MonitorError(
            f"the job's secret cannot be read from {path}: {error.strerror}"
        ) from error


def _checked(secret: bytes, source: str) -> bytes:
    if len(secret) < _LEAST_NBYTES:
        raise MonitorError(
            f"the secret in {source} has {len(secret)} bytes; at least {_LEAST_NBYTES} are required"
        )
    return secret


def _private_directory() -> Path:
    """Return this user's directory for small private files, which `keepstep run` uses too."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = (
        Path(base) / "keepstep" if base else Path(tempfile.gettempdir()) / f"keepstep-{os.getuid()}"
    )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise MonitorError(
            f"{path} belongs to another user; set XDG_RUNTIME_DIR to a directory of your own"
        )
    return path
