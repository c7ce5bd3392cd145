"""Connects a worker to its agent: assignments and notices in, reports and progress out.

A worker process has one session. The bootstrap (`keepstep.elastic.worker.bootstrap`) opens it
before the user's script runs, and `keepstep.join` gets it from `current`. One daemon thread
receives; it records each message and wakes waiting threads, so it works while the main thread
computes.

Promise: a worker that no longer receives from its agent exits at once. If the agent is gone, nobody
supervises the worker; if the thread that receives fails, the worker would compute on without ever
learning that its generation is over. In both cases its state lives elsewhere.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from keepstep.elastic.worker.messages import (
    PROTOCOL,
    AbortOrdered,
    AgentMessage,
    Assign,
    Assignment,
    CloseGeneration,
    Drained,
    Exiting,
    Failed,
    ImportModules,
    Joined,
    RestartRequested,
    SnapshotCommitted,
    Stop,
    Stored,
    WorkerMessage,
    sendable,
)
from keepstep.elastic.worker.script_failure import flush_output
from keepstep.elastic.worker.script_signals import end_unless_handled
from keepstep.log_format import log_line
from keepstep.monitor.progress import ProgressBoard
from keepstep.processes import set_title
from keepstep.transport import Connection, PeerUnavailable

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

EXIT_AGENT_GONE = 70
EXIT_RECEIVING_FAILED = 71
EXIT_REPLACE = 72
EXIT_CUT_OFF = 73
_CUT_OFF = (
    "the script has closed descriptors that are not its own, such as by os.closerange, and with "
    "them the connection to its agent; close only what the script has opened"
)


class Session:
    """The worker's end of the connection to its agent. `start` begins to receive.

    Args:
        channel: the connection; the session closes it.
        board: where progress is recorded.

    Attributes:
        is_managed: an agent supervises this process, and replaces lost ones.
        answers_notices: the agent answers signals that announce the node's end.
        script: what the worker runs, for people; "" where another launcher has started it.
        own_modules: names of the modules that were imported before the script ran.
    """

    is_managed = True
    answers_notices = True

    def __init__(self, channel: socket.socket, board: ProgressBoard) -> None:
        self._descriptor = channel.fileno()
        self._socket = _identity(self._descriptor)
        self._connection: Connection[WorkerMessage, AgentMessage] = Connection.over_pair(
            channel, PROTOCOL.client, "the agent"
        )
        self._has_joined = False
        self.script = ""
        self.own_modules: frozenset[str] = frozenset()
        self._to_import: tuple[str, ...] = ()
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._board = board
        self._assignment: Assignment | None = None
        self._closing_generation = 0
        self._aborting_generation = 0
        self._ordered_generation = 0
        self._committed_step = -1
        self._stored = Stored(step=-1, generation=0)
        self._rolled_back: tuple[int, int] | None = None
        self._store: TCPStore | None = None
        self._abort: Callable[[], None] | None = None
        self._awaits_order = False
        self._at_script_end: Callable[[], None] | None = None
        self._at_script_error: Callable[[BaseException], None] | None = None
        self._thread = threading.Thread(
            target=self._receive_all, name="keepstep-agent-connection", daemon=True
        )

    def start(self) -> None:
        """Begin to receive."""
        self._thread.start()

    def report(self, message: WorkerMessage) -> None:
        """Send a message to the agent; if the agent is gone, the process ends.

        It also ends if the script has closed the connection, and the agent learns why. An exception
        of the script is still reported.
        """
        if self._is_cut_off:
            if isinstance(message, Exiting):
                return  # The exit status says it too.
            self._board.leave_note(PROTOCOL.requests.encode(_as_failed(message)))
            if isinstance(message, Failed):
                return
            os._exit(EXIT_CUT_OFF)
        self._has_joined |= isinstance(message, Joined)
        try:
            with self._sending:
                self._connection.send(message)
        except PeerUnavailable:
            os._exit(EXIT_AGENT_GONE)

    @property
    def has_joined(self) -> bool:
        """Whether the script has joined the job, or attached its objects."""
        return self._has_joined

    def at_script_end(self, act: Callable[[], None]) -> None:
        """Set the function to call once the script has run to its end."""
        self._at_script_end = act

    def at_script_error(self, act: Callable[[BaseException], None]) -> None:
        """Set the function to call with an exception that the script has not caught."""
        self._at_script_error = act

    def end_script(self) -> None:
        """Do what remains to be done once the script has run to its end."""
        if self._at_script_end is not None:
            self._at_script_end()

    def end_script_by(self, error: BaseException) -> None:
        """Do what remains to be done after an exception that the script has not caught.

        It does not return if the end of the generation has caused the exception.
        """
        if self._at_script_error is not None:
            self._at_script_error(error)

    def progress(self, generation: int, step: int) -> None:
        """Record in shared memory that `step` steps are completed."""
        self._board.write(generation, step)

    def wait_for_start(self) -> tuple[str, ...]:
        """Block until this worker is assigned, or has modules to import meanwhile; return them."""
        with self._changed:
            self._changed.wait_for(lambda: self._assignment is not None or bool(self._to_import))
            modules, self._to_import = self._to_import, ()
            return () if self._assignment is not None else modules

    def wait_for_assignment(self, newer_than: int) -> Assignment:
        """Block until this worker is assigned to a generation above `newer_than`; return it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._assignment is not None and self._assignment.generation > newer_than
            )
            assert self._assignment is not None
            assigned = self._assignment
        if self.script:
            # The environment that other processes see stays as it was when this one was started.
            set_title(
                f"keepstep rank {assigned.rank} of {assigned.job}: {self.script}",
                "keepstep.elastic.worker.bootstrap",
            )
        return assigned

    def is_closing(self, generation: int) -> bool:
        """Whether the agent has declared this generation over."""
        return self._closing_generation >= generation

    def is_aborting(self, generation: int) -> bool:
        """Whether the generation is over because something broke."""
        return self._aborting_generation >= generation

    def may_seal(self, generation: int) -> bool:
        """Whether a copy that is complete is what training computed, and not an abort's garbage."""
        return not (self._awaits_order and self.is_aborting(generation))

    def is_committed(self, step: int) -> bool:
        """Whether a snapshot of `step` or later is known to be committed."""
        return self._committed_step >= step

    @property
    def committed_step(self) -> int:
        """The newest step of this generation known to be committed as a snapshot; -1: none."""
        return self._committed_step

    @property
    def stored_step(self) -> int:
        """The newest step known to be in storage; -1: none."""
        stored = self._stored
        if self._rolled_back is not None:
            generation, step = self._rolled_back
            if stored.generation < generation and stored.step > step:
                return -1
        return stored.step

    def roll_back(self, generation: int, step: int) -> None:
        """Count no checkpoint of an older generation as stored if this one has undone its step.

        The leader may not know yet that the job has gone back to `step`.
        """
        with self._changed:
            self._rolled_back = generation, step

    def wait_for_commit(self, step: int, generation: int, *, also_closing: bool = False) -> bool:
        """Block until a snapshot of `step` or later is committed, or the generation closes.

        Args:
            step: the step to wait for.
            generation: the generation that the snapshot is of.
            also_closing: wait on while the generation closes, unless something broke: one that
                ends in good order still commits.

        Returns:
            Whether it is committed.
        """

        def will_not_commit() -> bool:
            return self.is_aborting(generation) if also_closing else self.is_closing(generation)

        with self._changed:
            self._changed.wait_for(lambda: self.is_committed(step) or will_not_commit())
            return self.is_committed(step)

    def wait_for_stored(self, step: int, generation: int) -> bool:
        """Block until a checkpoint of `step` or later is stored; return False if it closes
        first."""
        with self._changed:
            self._changed.wait_for(lambda: self.stored_step >= step or self.is_closing(generation))
            return self.stored_step >= step

    def wait_for_closing(self, generation: int, timeout_s: float | None = None) -> bool:
        """Block until the agent has declared this generation over; return whether it has in time.

        Args:
            generation: the generation.
            timeout_s: how long to wait at most; None waits for as long as it takes.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self.is_closing(generation), timeout_s)

    def wait_for_abort_order(self, generation: int) -> None:
        """Block until this rank may abort its collectives of a broken generation.

        The agent ends this process if that takes too long.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ordered_generation >= generation)

    def on_abort(self, abort: Callable[[], None] | None, *, awaits_order: bool) -> None:
        """Set the function to call, on the receiving thread, when the generation breaks.

        If it raises, the process ends, and the agent replaces the worker.

        Args:
            abort: breaks off the collectives under way.
            awaits_order: call it only after the leader has ordered it.
        """
        self._abort, self._awaits_order = abort, awaits_order

    def exit_for_replacement(self, reason: str, *, is_fault: bool = False) -> NoReturn:
        """End this process, which can enter no other generation, so that another one replaces it.

        Args:
            reason: why.
            is_fault: the cause is here, and counts as a failure of this worker.
        """
        if is_fault:
            self.report(Failed(error=sendable(reason), traceback=""))
        else:
            self.report(RestartRequested(reason=sendable(reason)))
        self._end_for_another()

    def restart_script(self, reason: str) -> NoReturn:
        """End this process, so that another one runs the script from its beginning.

        Args:
            reason: why the script cannot go on where it is.
        """
        self.report(RestartRequested(reason=sendable(reason), is_for_script=True))
        self._end_for_another()

    def end_for_successor(self, generation: int) -> NoReturn:
        """End this process with its generation, so that another one runs the script in the next.

        Any thread may call it.
        """
        self.report(Drained(generation=generation, ends=True))
        self._end_for_another()

    def _end_for_another(self) -> NoReturn:
        flush_output()
        os._exit(EXIT_REPLACE)

    @property
    def _is_cut_off(self) -> bool:
        """Return whether the connection's descriptor is closed, or is another file's by now."""
        return _identity(self._descriptor) != self._socket

    def _receive_all(self) -> None:
        try:
            while (message := self._connection.receive()) is not None:
                self._apply(message)
                if self._is_cut_off and not self._has_joined:
                    return  # A script that needs no agent runs on as without one.
        except PeerUnavailable:
            os._exit(EXIT_AGENT_GONE)
        except BaseException as error:  # noqa: BLE001 - reported, and it ends the process
            self._end_after(error)
        os._exit(EXIT_AGENT_GONE)

    def _end_after(self, error: BaseException) -> NoReturn:
        """End the process because its receiving thread failed, and make the agent replace it."""
        text = "this worker can no longer receive from its agent and is replaced"
        if self._is_cut_off:
            text = _CUT_OFF
        shown = "".join(traceback.format_exception(error))
        print(log_line(f"{text}: {shown}"), file=sys.stderr, flush=True)
        self.report(Failed(error=text, traceback=sendable(shown)))
        os._exit(EXIT_RECEIVING_FAILED)

    def _apply(self, message: AgentMessage) -> None:
        with self._changed:
            match message:
                case Assign(assignment=assignment, serves_store=serves_store):
                    self._assignment = assignment
                    # Steps may be done again in this generation: what older ones committed shows
                    # nothing about them, and what they stored may have been found damaged.
                    self._committed_step = -1
                    self._stored, self._rolled_back = Stored(step=-1, generation=0), None
                    if serves_store:
                        self._serve_store(assignment, self._connection.take_descriptor())
                case ImportModules(modules=modules):
                    self._to_import = modules
                case CloseGeneration(generation=generation, aborts=aborts):
                    self._closing_generation = max(self._closing_generation, generation)
                    if aborts:
                        self._aborting_generation = max(self._aborting_generation, generation)
                    # Ranks that still connect wait inside the torch store: its end wakes them.
                    self._store = None
                case AbortOrdered(generation=generation):
                    self._ordered_generation = max(self._ordered_generation, generation)
                case SnapshotCommitted(step=step):
                    self._committed_step = max(self._committed_step, step)
                case Stored():
                    self._stored = message
                case Stop():
                    end_unless_handled()
            self._changed.notify_all()
        # Outside the lock, for an abort may take long.
        abort = self._abort
        if abort is not None and self._lets_abort(message):
            abort()

    def _lets_abort(self, message: AgentMessage) -> bool:
        if self._awaits_order:
            return isinstance(message, AbortOrdered)
        return isinstance(message, CloseGeneration) and message.aborts

    def _serve_store(self, assignment: Assignment, descriptor: int) -> None:
        """Serve the generation's torch store on the agent's socket until the generation closes."""
        # Not imported above: programs that are not Python need no torch.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = None
        self._store = TCPStore(
            assignment.store_host,
            assignment.store_port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=descriptor,
            timeout=timedelta(seconds=60),
        )


def _identity(descriptor: int) -> tuple[int, int] | None:
    """Return the file that is open under a number; None if there is none."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _as_failed(message: WorkerMessage) -> Failed:
    return message if isinstance(message, Failed) else Failed(error=_CUT_OFF, traceback="")


_session: Session | None = None  # A process has one agent, and this is its connection to it.


def open_session() -> Session:
    """Open the connection that the environment names. Called once, by the bootstrap."""
    channel = socket.socket(fileno=int(os.environ.pop("KEEPSTEP_CHANNEL")))
    board = ProgressBoard(int(os.environ.pop("KEEPSTEP_PROGRESS")))
    return begin_session(Session(channel, board))


def begin_session(session: Session) -> Session:
    """Make a session this process's own, and begin to receive; return it."""
    global _session
    _session = session
    session.start()
    return session


def current() -> Session | None:
    """Return this process's session; None if no agent has started it."""
    return _session


def wall_clock_s() -> float:
    """Return the wall clock's time, by which the phases of a recovery compare across nodes."""
    return time.time()
