"""Provides the session of a process that torchrun has started, and that torchrun ends.

With `--rdzv-backend keepstep` torchrun's agent listens on a socket that the environment names. The
process sends its rank there, and receives what a worker of `keepstep run` inherits: its connection
to the agent, and its progress board.

torchrun counts each worker that exits with another status than 0 as a failure. So a process whose
generation is over does not exit: it waits, having handed over its state, for torchrun's SIGTERM.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from keepstep.elastic.errors import UsageError
from keepstep.elastic.worker.messages import Assignment, Finishing, Joined, WorkerMessage
from keepstep.elastic.worker.script_failure import failure_of, flush_output
from keepstep.elastic.worker.session import Session, begin_session
from keepstep.monitor.progress import ProgressBoard

log = logging.getLogger("keepstep")

VARIABLE = "KEEPSTEP_TORCHRUN_SOCKET"
"""Names the socket of torchrun's agent."""


class LaunchedSession(Session):
    """A session whose process torchrun ends; `Session` has the arguments."""

    answers_notices = False

    def __init__(self, channel: socket.socket, board: ProgressBoard) -> None:
        super().__init__(channel, board)
        self._unstored = ""

    def report(self, message: WorkerMessage) -> None:
        """Send a message, as `Session.report` does."""
        match message:
            case Joined(checkpoint_url=url):
                self._unstored = url or ""
            case Finishing():
                self._unstored = ""
        super().report(message)

    def wait_for_assignment(self, newer_than: int) -> Assignment:
        """Wait as `Session.wait_for_assignment` does.

        Raises:
            UsageError: torchrun has started another number of ranks than its back end counts on.
        """
        assigned = super().wait_for_assignment(newer_than)
        if os.environ["WORLD_SIZE"] != str(assigned.world_size):
            raise UsageError(
                f"torchrun has started {os.environ['WORLD_SIZE']} ranks, and its back end counts "
                f"on {assigned.world_size}: give --rdzv-conf nproc=N, the number of workers of "
                "this node, to each agent"
            )
        return assigned

    def on_abort(self, abort: Callable[[], None] | None, *, awaits_order: bool) -> None:
        """Leave it to torchrun to break off the collectives: its SIGTERM ends the process."""
        super().on_abort(None, awaits_order=awaits_order)

    def at_script_end(self, act: Callable[[], None]) -> None:
        """Say at exit what is not stored, since nothing calls `act` at the script's end."""
        atexit.register(self._report_unstored)

    def at_script_error(self, act: Callable[[BaseException], None]) -> None:
        """Have Python call the function with an exception that the script has not caught."""
        below = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            act(error)
            if isinstance(error, Exception):
                self.report(failure_of(error))
            self._unstored = ""
            below(kind, error, trace)

        sys.excepthook = hook

    def _end_for_another(self) -> NoReturn:
        flush_output()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            time.sleep(3600)

    def _report_unstored(self) -> None:
        if self._unstored:
            log.warning(
                "the script has ended without training.finish(), so its last steps may not be "
                "stored in %s: call it after the loop",
                self._unstored,
            )


def launched_session() -> Session | None:
    """Open the session with torchrun's agent; None if its back end has no part in this process.

    Raises:
        UsageError: the agent does not expect this process.
    """
    path = os.environ.pop(VARIABLE, "")
    if not path:
        return None
    rank = os.environ["RANK"]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.connect(path)
            asking.send(rank.encode())
            _, received, _, _ = socket.recv_fds(asking, 1, 2, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise UsageError(f"torchrun's agent does not answer at {path}: {error}") from error
    if len(received) != 2:
        raise UsageError(
            f"torchrun's agent expects no process of rank {rank}: another one has attached as "
            "that rank, or torchrun has another number of workers here than its back end counts "
            "on, which --rdzv-conf nproc=N corrects"
        )
    channel, board = received
    return begin_session(LaunchedSession(socket.socket(fileno=channel), ProgressBoard(board)))
