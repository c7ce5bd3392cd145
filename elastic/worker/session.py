"""A worker's side of the line to its agent: what it was assigned, what it was told, what it reports.

There is one session per worker process, opened by the bootstrap (`keepstep.elastic.worker.bootstrap`) before the user's script runs and found by
`keepstep.join` through `current`. One daemon thread receives; it only notes what it hears and wakes whoever waits, so it works while
the main thread computes. A worker whose agent is gone exits at once: its state lives elsewhere.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.records import Record, SnapshotCommit
from keepstep.elastic.worker.channel import Message, WorkerChannel
from keepstep.monitor.progress import ProgressBoard

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_EXIT_AGENT_GONE = 70


@dataclass(frozen=True, slots=True)
class Assignment(Record):
    """One worker's place in one generation.

    `server` is the local snapshot server's address, `unix:PATH`; `failures_per_s` is how often something of the job fails.
    """

    generation: int
    node: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_count: int
    store_host: str
    store_port: int
    server: str
    secret: str
    job: str
    max_restarts: int
    resume: SnapshotCommit | None = None
    failures_per_s: float = 0.0

    def environment(self) -> Mapping[str, str]:
        """Return the variables that torchrun would set, for scripts that read them."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.node_count),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.store_host,
            "MASTER_PORT": str(self.store_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.generation - 1),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RUN_ID": self.job,
        }


class Session:
    """The worker's line to its agent. Created once per process by `open_session`."""

    def __init__(self, channel: WorkerChannel, board: ProgressBoard) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._board = board
        self._assignment: Assignment | None = None
        self._closing = 0
        self._aborting = 0
        self._committed = -1
        self._stored = -1
        self._rendezvous: TCPStore | None = None
        self._on_abort: Callable[[], None] | None = None
        self._thread = threading.Thread(
            target=self._listen, name="keepstep-agent-line", daemon=True
        )

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def report(self, what: str, **details: Any) -> None:
        """Tell the agent something. If the agent is gone the worker ends, for nobody supervises it any more."""
        try:
            with self._sending:
                self._channel.send({"type": what, **details})
        except OSError:
            os._exit(_EXIT_AGENT_GONE)

    def progress(self, generation: int, step: int) -> None:
        """Note that `step` steps are completed, in shared memory."""
        self._board.write(generation, step)

    def wait_for_assignment(self, newer_than: int) -> Assignment:
        """Block until this worker is assigned to a generation above `newer_than`, and return the assignment."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._assignment is not None and self._assignment.generation > newer_than
            )
            assert self._assignment is not None
            return self._assignment

    def is_closing(self, generation: int) -> bool:
        """Whether the agent has declared this generation over."""
        return self._closing >= generation

    def is_committed(self, step: int) -> bool:
        """Whether a snapshot of `step` or later is known to be committed."""
        return self._committed >= step

    def is_aborting(self, generation: int) -> bool:
        """Whether the generation is over because something broke."""
        return self._aborting >= generation

    def wait_for_commit(self, step: int, generation: int, *, also_closing: bool = False) -> bool:
        """Block until a snapshot of `step` or later is committed; False if the generation closes first.

        With `also_closing`, False only if it closes because something broke: a generation that ends in good order still commits.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._committed >= step
                    or (self._aborting if also_closing else self._closing) >= generation
                )
            )
            return self._committed >= step

    def wait_for_stored(self, step: int, generation: int) -> bool:
        """Block until a checkpoint of `step` or later is in storage; False if the generation closes first."""
        with self._changed:
            self._changed.wait_for(lambda: self._stored >= step or self._closing >= generation)
            return self._stored >= step

    def on_abort(self, act: Callable[[], None] | None) -> None:
        """Have `act` called, on the listening thread, when a generation closes because something broke."""
        self._on_abort = act

    def _listen(self) -> None:
        while True:
            received = self._channel.receive()
            if received is None:
                os._exit(_EXIT_AGENT_GONE)
            self._on_message(*received)

    def _on_message(self, message: Message, descriptor: int | None) -> None:
        what = message["type"]
        with self._changed:
            if what == "assign":
                self._assignment = Assignment.from_json(message["assignment"])
                # Steps may be done again in this generation: what older ones committed says nothing about them.
                self._committed = -1
                if descriptor is not None:
                    self._serve_rendezvous(self._assignment, descriptor)
            elif what == "closing":
                self._closing = max(self._closing, message["generation"])
                if message["abort"]:
                    self._aborting = max(self._aborting, message["generation"])
                # Ranks still connecting wait inside the torch store: its end is what wakes them.
                self._rendezvous = None
            elif what == "committed":
                self._committed = max(self._committed, message["step"])
            elif what == "stored":
                self._stored = max(self._stored, message["step"])
            self._changed.notify_all()
        if what == "closing" and message["abort"] and self._on_abort is not None:
            self._on_abort()

    def _serve_rendezvous(self, assignment: Assignment, descriptor: int) -> None:
        """Serve the generation's torch store on the socket that the agent opened; it ends when the generation closes."""
        # Not above: programs that are not Python need no torch.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._rendezvous = None
        self._rendezvous = TCPStore(
            assignment.store_host,
            assignment.store_port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=descriptor,
            timeout=timedelta(seconds=60),
        )


_session: Session | None = None  # A process has one agent; this is the process's end of that line.


def open_session() -> Session:
    """Open the line that the agent left in the environment. Called once, by the bootstrap."""
    global _session
    channel = WorkerChannel(int(os.environ.pop("KEEPSTEP_CHANNEL")))
    board = ProgressBoard(int(os.environ.pop("KEEPSTEP_PROGRESS")))
    _session = Session(channel, board)
    _session.start()
    return _session


def current() -> Session:
    """Return this process's session.

    Raises:
        UsageError: the process was not started by an agent.
    """
    if _session is None:
        raise UsageError(
            "this process was not started by keepstep; start the script with "
            "`keepstep run --nproc-per-node 1 SCRIPT` (it needs no cluster)"
        )
    return _session


def wall_clock_s() -> float:
    """Wall-clock time, for the phases of a recovery that people compare across nodes."""
    return time.time()
