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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.records import NodePhase, NodeRecord, Record, Result
from keepstep.elastic.rendezvous.view import View
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """How long an agent's state is kept for the next agent of its node, and how that one finds it.

    Attributes:
        keep_s: for how long; 0: it ends with its agent.
        place: names the job and the node.
        line: digest of what else has to be equal, such as the script's arguments.
    """

    keep_s: float = 0.0
    place: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState(Record):
    """The document that an agent leaves to the next one of its node, with its snapshot server.

    Attributes:
        place, line: as in `Keeping`.
        job: the job's name.
        secret: of this run of the job, in hexadecimal.
        record: the node's.
        view: the newest one that had a generation, without other nodes.
        may_restore: no other node can have gone on since without the coordinator's holding it.
    """

    place: str
    line: str
    job: str
    secret: str
    record: NodeRecord
    view: View
    may_restore: bool


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
        """Write what the next agent needs.

        Raises:
            OSError: it cannot be written.
        """
        write_file(self.path / "job", kept.encode())

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


def choose_state(states: Sequence[KeptState], keeping: Keeping) -> tuple[int | None, str]:
    """Return which of a place's states to go on from, and why the others are dropped. Pure.

    Args:
        states: what agents that are gone have left.
        keeping: of the agent that chooses.
    """
    if not keeping.keep_s:
        return None, "--keep-state is 0"
    equal = [number for number, state in enumerate(states) if state.line == keeping.line]
    if len(equal) > 1:
        return None, f"{len(equal)} runs of this line have left one; give each run a --job name"
    return (equal[0] if equal else None), "it is of another command line"


def is_kept(result: Result | None, view: View, node: str) -> bool:
    """Whether the state of a node that leaves its job is of use to its next agent. Pure.

    It is not if the job has succeeded, or goes on without the node.

    Args:
        result: the job's; None: it has none.
        view: the job, as the node sees it.
        node: the node's name.
    """
    if result is not None:
        return not result.succeeded
    return view.generation is not None and view.generation.member(node) is not None


def view_to_keep(view: View) -> View:
    """Return a view without what concerns other nodes, or nobody after a restart."""
    return replace(
        view, nodes={}, restarts={}, leadership=None, verdicts=None, unreadable={}, gone=frozenset()
    )


def view_to_go_on(view: View) -> View:
    """Return a kept view for the next agent: failures count from 0 again."""
    assert view.generation is not None, "without a generation nothing is kept"
    generation = replace(view.generation, failures=0, failing_node="", last_error="")
    return replace(view, generation=generation)


def record_to_go_on(
    own: NodeRecord,
    kept: NodeRecord,
    server: str,
    sealed: tuple[SnapshotId, ...],
    protected: tuple[SnapshotId, ...],
    committed: SnapshotId,
) -> NodeRecord:
    """Return the record of an agent that goes on with a server that another one has left.

    Args:
        own: the record of an agent that begins.
        kept: the last one of the agent before.
        server: the server's address.
        sealed: what it holds.
        protected: that of it whose parity is complete.
        committed: the newest snapshot that the server knows as committed.
    """
    is_of_generation = committed.generation == kept.generation and committed.step >= 0
    return replace(
        own,
        server=server,
        generation=kept.generation,
        phase=NodePhase.DRAINED,
        step=kept.step,
        sealed=sealed,
        protected=protected,
        committed=committed if is_of_generation else None,
        fenced=kept.generation,
    )


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
