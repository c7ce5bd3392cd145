"""Starts the process that writes a rank's checkpoints, and asks it."""

from __future__ import annotations

import os
import select
import socket
import subprocess
from collections.abc import Mapping
from typing import TypeVar

from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointExists,
    CheckpointMissing,
    LayoutMismatch,
    ProcessEnded,
)
from keepstep.checkpoint.saving.messages import (
    WRITER_PROTOCOL,
    Failed,
    Publish,
    UseBuffer,
    UsePlan,
    WritePart,
    WriterReply,
    WriterRequest,
)
from keepstep.notices import notices_blocked
from keepstep.processes import module_command
from keepstep.transport import Connection, TransportError

_END_S = 5.0

_ERRORS: Mapping[str, type[CheckpointError]] = {
    error.__name__: error
    for error in (CheckpointDamaged, CheckpointExists, CheckpointMissing, LayoutMismatch)
}

_ReplyT = TypeVar("_ReplyT", bound=WriterReply)


class WriterProcess:
    """One writing process. Made by `start`; `close` ends it.

    The kernel kills the process when the thread that started it ends, so that it never outlives
    the rank. All calls but `kill` come from one thread at a time. After an error that is not the
    storage's, the process has ended: `is_running` is False.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        end: socket.socket,
        connection: Connection[WriterRequest, WriterReply],
    ) -> None:
        self._process = process
        self._end = end
        self._connection = connection
        self.is_running = True
        self.is_busy = False
        """Whether something was begun that has no reply yet."""

    @classmethod
    def start(cls) -> WriterProcess:
        """Start a process; it becomes ready while the caller goes on.

        Raises:
            OSError: the system starts no process.
        """
        own_end, writer_end = socket.socketpair()
        with writer_end, notices_blocked():
            try:
                process = subprocess.Popen(
                    module_command(
                        "keepstep.checkpoint.saving.writer",
                        "--control", str(writer_end.fileno()), "--parent", str(os.getpid()),
                    ),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(writer_end.fileno(),),
                    # Signals for the rank's process group are the rank's.
                    start_new_session=True,
                )  # fmt: skip
            except BaseException:
                own_end.close()
                raise
        connection: Connection[WriterRequest, WriterReply] = Connection.over_pair(
            own_end, WRITER_PROTOCOL.client, "the process that writes checkpoints"
        )
        return cls(process, own_end, connection)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def use_buffer(self, descriptor: int, nbytes: int) -> None:
        """Have it read from this buffer from now on. Raises CheckpointError if it has ended."""
        self._send(UseBuffer(nbytes=nbytes), descriptor=descriptor)

    def use_plan(self, plan: bytes) -> None:
        """Have it follow this encoded `WriterPlan`. Raises CheckpointError if it has ended."""
        self._send(UsePlan(), plan)

    def begin(self, request: WritePart | Publish, payload: bytes = b"") -> None:
        """Begin to write this rank's part, or to commit the attempt.

        Raises:
            CheckpointError: the process has ended.
        """
        self._send(request, payload)
        self.is_busy = True

    def reply(self, expected: type[_ReplyT], limit_s: float | None) -> _ReplyT | None:
        """Wait for the end of what was begun, for so long at most; None if it goes on.

        Raises:
            CheckpointError: it has failed, or the process has ended.
        """
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        if not poll.poll(None if limit_s is None else limit_s * 1000):
            return None
        self.is_busy = False
        try:
            reply = self._connection.receive()
        except TransportError as error:
            raise self._ended() from error
        match reply:
            case None:
                raise self._ended()
            case Failed(error=name, reason=reason):
                raise _ERRORS.get(name, CheckpointError)(reason)
            case _ if isinstance(reply, expected):
                return reply
            case _:
                raise self._ended()

    def kill(self) -> None:
        """End it at once, from any thread: what another thread waits for fails."""
        self._process.kill()

    def close(self) -> None:
        """End it; what it is writing now is given up after some seconds."""
        self.is_running = self.is_busy = False
        # Forked processes, such as loaders, have this end too: closing it here would end nothing.
        self._connection.interrupt()
        self._connection.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(
        self, message: WriterRequest, payload: bytes = b"", descriptor: int | None = None
    ) -> None:
        try:
            self._connection.send(message, [payload] if payload else (), descriptor)
        except TransportError as error:
            raise self._ended() from error

    def _ended(self) -> CheckpointError:
        """Reap the process, which has ended or is of no use, and return the error to raise."""
        self._process.kill()
        code = self._process.wait()
        self.close()
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return ProcessEnded(
            f"the process that writes checkpoints ended ({how}; see its output above, or the "
            "system's log if memory ran out); the next save starts another one"
        )
