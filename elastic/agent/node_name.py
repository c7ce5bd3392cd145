"""Names a node that the user has not named; the name stays when its agent is started again.

A node that was evicted is known by its name; under another one it would return without the check of
`keepstep.elastic.agent.readmission`.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import re
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from keepstep.private_files import created_directory, is_held, runtime_directory


@contextmanager
def own_node_name(job: str) -> Iterator[str]:
    """Hold a name of this machine for a job: the first agent on it has the first name.

    The name is the host's name, and a digest of that and the network address, since hosts may share
    a name. Further agents of the job on this machine get `-2`, `-3` and so on; an agent that is
    started again gets the first free one.

    Raises:
        NotPrivate, OSError: the directory for locks cannot be used.
    """
    host = socket.gethostname()
    identity = hashlib.sha256(f"{host} {uuid.getnode()}".encode()).hexdigest()[:6]
    label = re.sub(r"[^A-Za-z0-9_-]", "-", host.split(".")[0])[:40] or "node"
    directory = created_directory(runtime_directory())
    for number in itertools.count(1):
        path = directory / _lock_name(job, number)
        descriptor = _locked(path)
        if descriptor is None:
            continue
        try:
            yield f"{label}-{identity}" + (f"-{number}" if number > 1 else "")
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)
        return


def holds_name(job: str) -> bool:
    """Return whether an agent of the job on this machine holds a name."""
    for path in runtime_directory().glob(_lock_name(job, "*")):
        with suppress(FileNotFoundError):  # Its agent has just ended.
            if is_held(path):
                return True
    return False


def _lock_name(job: str, number: int | str) -> str:
    return f"name-{hashlib.sha256(job.encode()).hexdigest()[:12]}-{number}.lock"


def _locked(path: Path) -> int | None:
    """Return the descriptor of a lock file that this process holds; None if another holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed it meanwhile: a lock on a removed file excludes
            # nobody.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass  # Removed; created again in the next turn.
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.close(descriptor)
