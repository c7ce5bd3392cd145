"""Leaves a node's state in memory to its next agent, and finds what the last one has left.

Each snapshot server has a directory of its own, with its sockets and two files: `agent`, which the
agent holds locked as long as it lives, and `job`, by which the next agent of the same job and node
finds the server, and knows how to go on. The kernel releases the lock however the agent ends.

Invariants:
- Whoever holds the lock may use the server, and nobody else.
- `job` names a generation before the server opens it: what the server holds can be used by the
  next agent at every instant.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.kept_state import KeptState
from keepstep.private_files import (
    NotPrivate,
    created_directory,
    locked,
    read_file,
    runtime_directory,
    write_file,
)
from keepstep.transport import socket_name

CONTROL_SOCKET = "agent.sock"

_PREFIX = "state-"
_MAX_NBYTES = 2**28


class StateDirectory:
    """One snapshot server's directory, whose lock this process holds.

    `release` leaves it to the next agent, `remove` removes it.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls) -> StateDirectory:
        """Create one, and remove those of dead servers.

        Raises:
            NotPrivate: the runtime directory is not private.
            OSError: it cannot be created.
        """
        base = created_directory(runtime_directory())
        with locked(base):
            for left in _left_states(base):
                left.release()
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            lock = _take_lock(path)
        assert lock is not None, "nobody else looks at a directory that is being created"
        return cls(path, lock)

    def write(self, kept: KeptState) -> None:
        """Write what the next agent needs; if that fails, it finds nothing, and not what was.

        Raises:
            OSError: it cannot be written.
        """
        try:
            write_file(self.path / "job", kept.encode())
        except OSError:
            (self.path / "job").unlink(missing_ok=True)
            raise

    def read(self) -> KeptState:
        """Return what the last agent has written.

        Raises:
            NotPrivate, OSError: it cannot be read.
            UsageError: another version of keepstep has written it.
        """
        return _read(self.path)

    def release(self) -> None:
        """Leave it to the next agent, or to the server, which removes it."""
        os.close(self._lock)

    def remove(self) -> None:
        """Remove it; its server has ended."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def hold_states(place: str) -> tuple[StateDirectory, ...]:
    """Hold the states that agents of a place have left; one that lives keeps its own.

    Raises:
        NotPrivate, OSError: the runtime directory cannot be used.
    """
    base = created_directory(runtime_directory())
    held = []
    # All locks are taken under this one: nobody takes an agent that only looks for one that lives.
    with locked(base):
        for left in _left_states(base):
            if _is_of(left.path, place):
                held.append(left)
            else:
                left.release()
    return tuple(held)


def _left_states(base: Path) -> Iterator[StateDirectory]:
    """Hold each state that an agent has left; remove the directories of dead servers."""
    for path in sorted(base.glob(f"{_PREFIX}*")):
        lock = _take_lock(path)
        if lock is None:
            continue
        left = StateDirectory(path, lock)
        if _is_served(path):
            yield left
        else:
            left.remove()


def _read(path: Path) -> KeptState:
    return KeptState.decode(read_file(path / "job", max_nbytes=_MAX_NBYTES))


def _is_of(path: Path, place: str) -> bool:
    try:
        return _read(path).place == place
    except (NotPrivate, OSError, UsageError):
        return False


def _is_served(path: Path) -> bool:
    """Whether a server listens for agents."""
    try:
        with socket.socket(socket.AF_UNIX) as probe, socket_name(path / CONTROL_SOCKET) as name:
            probe.settimeout(1.0)
            probe.connect(name)
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        return True  # It does not answer now.
    return True


def _take_lock(path: Path) -> int | None:
    """Return a directory's lock; None if another process has it, or has just removed it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        lock = os.open(path / "agent", flags, mode=0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
