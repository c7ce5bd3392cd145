"""Where a command finds the job's secret: in a file, in the environment, or, on one machine, in a file that it makes itself."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from pathlib import Path

from monitor.errors import MonitorError

VARIABLE = "KEEPSTEP_SECRET"
_LEAST_NBYTES = 16


def job_secret(job: str, file: Path | None) -> bytes:
    """Return the job's secret.

    Taken from `file`, else from KEEPSTEP_SECRET, else from this user's own file for that job on this machine, which is made at first need:
    enough for one machine, and of no use to others.

    Raises:
        MonitorError: it cannot be read, is too short to be one, or others may read it.
    """
    if file is not None:
        return _read(file)
    if told := os.environ.get(VARIABLE):
        return _checked(told.encode(), f"${VARIABLE}")
    path = _private_directory() / f"monitor-{re.sub(r'[^A-Za-z0-9._-]', '_', job)[:128]}.secret"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _read(path)
    with open(descriptor, "w") as made:
        made.write(secrets.token_hex(32))
    return _read(path)


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_mode & 0o077:
            raise MonitorError(f"{path} holds a secret and others may read it; chmod 600 {path}")
        return _checked(path.read_bytes().strip(), str(path))
    except OSError as error:
        raise MonitorError(f"the job's secret cannot be read from {path}: {error.strerror}") from error


def _checked(secret: bytes, where: str) -> bytes:
    if len(secret) < _LEAST_NBYTES:
        raise MonitorError(f"the secret in {where} has {len(secret)} bytes; at least {_LEAST_NBYTES} are wanted")
    return secret


def _private_directory() -> Path:
    """Return this user's directory for small private files; the same that `keepstep run` keeps its own in."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "keepstep" if base else Path(tempfile.gettempdir()) / f"keepstep-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise MonitorError(f"{path} belongs to another user; set XDG_RUNTIME_DIR to a directory of your own")
    return path
