"""Runs this node's fork server for the agent, which asks it for workers.

The workers it forks are children of the agent: the end of the fork server ends none of them. If it
cannot fork, ends or does not answer, it is closed and asked no more, and workers are started one by
one; one line says why.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self, TypeAlias, TypeVar

from keepstep.elastic.worker.fork_messages import (
    FORK_PROTOCOL,
    Forked,
    ForkReply,
    ForkRequest,
    ForkWorker,
    PassProgressBoard,
    PassStartSignal,
    Prepared,
    Unable,
)
from keepstep.elastic.worker.messages import Command
from keepstep.notices import notices_blocked
from keepstep.processes import adopting_orphans, module_command
from keepstep.transport import StreamConnection, TransportError

log = logging.getLogger("keepstep")

_PREPARE_S = 120.0
"""To import PyTorch takes seconds; on a machine that is overloaded, more."""

_FORK_S = 30.0
"""To fork takes milliseconds; on a machine that is overloaded, more."""

ForkConnection: TypeAlias = StreamConnection[ForkRequest, ForkReply]
ReplyT = TypeVar("ReplyT", Prepared, Forked)


class ForkingUnavailable(Exception):
    """Workers cannot be forked on this node; they are started one by one."""


class ForkServerProcess:
    """One fork server. Made by `start`; `close` ends it."""

    def __init__(self, process: subprocess.Popen[bytes], connection: ForkConnection) -> None:
        self._process = process
        self._connection = connection
        self._one_at_a_time = asyncio.Lock()
        self._requests: set[asyncio.Task[int]] = set()
        self._is_prepared = False
        self._is_closed = False

    @classmethod
    def start(cls, command: Command, environment: Mapping[str, str]) -> Self:
        """Start a fork server, which begins to import PyTorch.

        Call this on the main thread, for the server ends when the thread that started it does.

        Args:
            command: what the workers run.
            environment: the workers' environment.

        Raises:
            OSError: it cannot be started.
        """
        own_end, server_end = socket.socketpair()
        with server_end, notices_blocked():
            try:
                process = subprocess.Popen(
                    module_command("keepstep.elastic.worker.fork_server", str(server_end.fileno())),
                    env={
                        **environment,
                        "KEEPSTEP_COMMAND": command.encode(),
                        "KEEPSTEP_AGENT_PID": str(os.getpid()),
                    },
                    pass_fds=(server_end.fileno(),),
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                )
            except OSError:
                own_end.close()
                raise
        return cls(
            process,
            StreamConnection.over_pair(own_end, FORK_PROTOCOL.client, "the fork server"),
        )

    async def fork(self, channel: int, board: int) -> int:
        """Have a worker forked, once PyTorch is imported; return its process id.

        It is this process's child, which nobody has waited for. If this is cancelled, the worker is
        killed when it comes.

        Args:
            channel: the worker's end of its connection to the agent, a descriptor.
            board: the descriptor of its progress board.

        Raises:
            ForkingUnavailable: start it otherwise, now and later.
        """
        # Descriptors of its own: those of a caller who is cancelled are closed.
        try:
            own_channel = os.dup(channel)
            try:
                own_board = os.dup(board)
            except OSError:
                os.close(own_channel)
                raise
        except OSError as error:
            raise self._unavailable(str(error)) from error
        request = asyncio.create_task(self._fork(own_channel, own_board))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
        try:
            return await asyncio.shield(request)
        except asyncio.CancelledError:
            request.add_done_callback(_kill_forked)
            raise

    async def close(self) -> None:
        """End the fork server; what it has forked lives on. Safe to call twice."""
        self._end()
        if self._requests:
            await asyncio.wait(self._requests)
        await asyncio.to_thread(self._process.wait)

    async def _fork(self, channel: int, board: int) -> int:
        try:
            async with self._one_at_a_time:
                try:
                    if not self._is_prepared:
                        async with asyncio.timeout(_PREPARE_S):
                            await self._receive(Prepared)
                        self._is_prepared = True
                    with _pipe() as (start, started):
                        with adopting_orphans():
                            async with asyncio.timeout(_FORK_S):
                                await self._connection.send(PassProgressBoard(), board)
                                await self._connection.send(PassStartSignal(), start)
                                await self._connection.send(ForkWorker(), channel)
                                process = (await self._receive(Forked)).process
                        if not _is_own_child(process):
                            raise self._unavailable("the kernel gives it to another process")
                        os.write(started, b".")
                        return process
                except (TransportError, TimeoutError) as error:
                    raise self._unavailable("the fork server has ended or hangs") from error
                except OSError as error:
                    raise self._unavailable(str(error)) from error
        finally:
            os.close(channel)
            os.close(board)

    async def _receive(self, kind: type[ReplyT]) -> ReplyT:
        """Receive a reply that is awaited.

        Raises:
            ForkingUnavailable: it does not come.
        """
        reply = await self._connection.receive()
        if isinstance(reply, kind):
            return reply
        raise self._unavailable(
            reply.reason if isinstance(reply, Unable) else "the fork server has ended"
        )

    def _unavailable(self, reason: str) -> ForkingUnavailable:
        if not self._is_closed:
            log.warning("workers are started one by one, which takes longer: %s", reason)
        self._end()
        return ForkingUnavailable(reason)

    def _end(self) -> None:
        self._is_closed = True
        self._connection.close()
        self._process.kill()


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def _is_own_child(process: int) -> bool:
    try:
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _kill_forked(request: asyncio.Task[int]) -> None:
    """Kill the worker that nobody waits for any more."""
    if request.cancelled() or request.exception() is not None:
        return
    os.kill(request.result(), signal.SIGKILL)
    os.waitpid(request.result(), 0)
