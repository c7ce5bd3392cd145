"""Imports PyTorch once on a node, and forks its workers.

    python -m keepstep.elastic.worker.fork_server CONTROL

The agent starts it with the workers' environment, and asks for workers over the socket CONTROL.
Importing PyTorch takes seconds of a core; forking takes milliseconds, and the imported modules'
memory is shared. The idea is that of `multiprocessing.forkserver`. There the server is the parent
of the processes that it forks; here the agent is, so that nothing depends on the server's life: a
process in between forks the worker and ends, upon which the kernel gives the worker to the agent
(PR_SET_CHILD_SUBREAPER). The worker then does the same as one that was started (`bootstrap`).

A forked process has no other threads than the one that forked, and no usable devices if its parent
used one. So nothing here computes: warming up by computation is left to the worker. If an imported
module has started threads, or has opened devices or connections, nothing is forked, and the agent
starts its workers one by one.
"""

from __future__ import annotations

import importlib
import os
import socket
import struct
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import BinaryIO

from keepstep.elastic.worker import bootstrap, telemetry
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
from keepstep.elastic.worker.seeds import Seeds, generator_states
from keepstep.notices import leave_notices
from keepstep.processes import die_with_parent, set_title
from keepstep.transport import Connection

_PROCESS_ID = struct.Struct("<q")
_HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_ACCELERATORS = ("cuda", "xpu", "mtia")


class ForkServer:
    """Forks workers for the agent at the other end of a connection.

    Args:
        connection: to the agent.
        seeds: of the workers' generators.
    """

    def __init__(self, connection: Connection[ForkReply, ForkRequest], seeds: Seeds) -> None:
        self._connection = connection
        self._seeds = seeds
        self._board = -1
        self._start = -1

    def run(self) -> None:
        """Serve until the agent closes the connection, or nothing can be forked."""
        while (request := self._connection.receive()) is not None:
            match request:
                case PassProgressBoard():
                    self._board = self._connection.take_descriptor()
                case PassStartSignal():
                    self._start = self._connection.take_descriptor()
                case ForkWorker():
                    channel = self._connection.take_descriptor()
                    try:
                        reply = self._fork(channel)
                    finally:
                        for descriptor in (channel, self._board, self._start):
                            os.close(descriptor)
                    self._connection.send(reply)
                    if isinstance(reply, Unable):
                        return

    def _fork(self, channel: int) -> Forked | Unable:
        threads = _other_threads()
        if threads:
            return Unable(reason=threads)
        # Data left in a buffer would be written by every process.
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            with _pipe() as (identity, named):
                between = os.fork()
                if between == 0:
                    with _ending_this_process():
                        if _fork_or_end() == 0:
                            identity.close()
                            self._connection.close()
                            self._become_worker(channel, named)
                named.close()
                text = identity.read(_PROCESS_ID.size)
                _, status = os.waitpid(between, 0)
                code = os.waitstatus_to_exitcode(status)
                if code or not text:
                    return Unable(reason=f"fork: {os.strerror(code) if code > 0 else 'it ended'}")
        except OSError as error:
            return Unable(reason=f"fork: {error.strerror}")
        return Forked(process=_PROCESS_ID.unpack(text)[0])

    def _become_worker(self, channel: int, named: BinaryIO) -> None:
        # Before the agent knows the process: it sends signals to the session.
        os.setsid()
        set_title("keepstep worker, not assigned yet", "keepstep.elastic.worker.bootstrap")
        with named:
            named.write(_PROCESS_ID.pack(os.getpid()))
        if not os.read(self._start, 1):
            return  # The agent does not know this process, and gives its place to another one.
        os.close(self._start)
        self._seeds.give()
        os.environ["KEEPSTEP_CHANNEL"] = str(channel)
        os.environ["KEEPSTEP_PROGRESS"] = str(self._board)
        bootstrap.main()


def obstacle_to_forking(own: frozenset[int]) -> str:
    """Return why a process forked from this one could not be a worker; "" if it could.

    Args:
        own: descriptors that this process was started with.
    """
    import torch

    from keepstep import torch_internals

    accelerators = _accelerators(torch)
    # A first fork. OpenBLAS ends its threads before one, and starts them again at their first use.
    child = os.fork()
    if child == 0:
        with _ending_this_process():
            if any(map(torch_internals.is_in_bad_fork, accelerators.values())):
                os._exit(1)
    _, status = os.waitpid(child, 0)
    used = [name for name, module in accelerators.items() if module.is_initialized()]
    if status or used:
        return f"an imported module used the accelerator ({', '.join(used or accelerators)})"
    return _other_threads() or _open_resource(own)


def _accelerators(torch: ModuleType) -> dict[str, ModuleType]:
    """Return the modules of accelerators that may be in use, by name."""
    from keepstep import torch_internals

    names = (*_ACCELERATORS, torch_internals.private_accelerator_name())
    return {
        name: module
        for name in names
        if isinstance(module := getattr(torch, name, None), ModuleType)
        and torch_internals.is_accelerator(module)
    }


def _other_threads() -> str:
    """Describe the threads of this process besides the calling one."""
    count = len(os.listdir("/proc/self/task")) - 1
    return f"an imported module has started threads ({count})" if count else ""


def _open_resource(own: frozenset[int]) -> str:
    """Describe an open file that processes must not share, besides those open at the start."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) in own:
            continue
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # The directory that was just listed.
        is_device = target.startswith("/dev/") and not target.startswith("/dev/shm/")
        if target.startswith(("socket:", "anon_inode:")) or (
            is_device and target not in _HARMLESS_DEVICES
        ):
            return f"an imported module has opened {target}"
    return ""


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable, unless the user has."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextmanager
def _pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as readable, open(writer, "wb", buffering=0) as writable:
        yield readable, writable


def _fork_or_end() -> int:
    """Fork; if there can be no more processes, end this one with the error's number."""
    try:
        return os.fork()
    except OSError as error:
        os._exit(error.errno or 1)


@contextmanager
def _ending_this_process() -> Iterator[None]:
    """End a forked process with its block, so that it does not do its parent's remaining work."""
    status = 0
    try:
        yield
    except BaseException:  # noqa: BLE001 - printed, and the process ends
        traceback.print_exc()
        status = 1
    finally:
        os._exit(status)


def main() -> None:
    """Import the workers' modules, then fork workers until the agent is gone."""
    leave_notices()
    set_title("keepstep fork server", "keepstep.elastic.worker.fork_server")
    # Workers take it from the environment too.
    die_with_parent(int(os.environ["KEEPSTEP_AGENT_PID"]))
    control = int(sys.argv[1])
    connection = Connection.over_pair(
        socket.socket(fileno=control), FORK_PROTOCOL.server, "the agent"
    )
    bootstrap.import_early()
    before = generator_states()
    # Asking whether there is a GPU is no use of one then; modules ask when they are imported.
    with _variable("PYTORCH_NVML_BASED_CUDA_CHECK", "1"):
        bootstrap.import_preloaded(Command.decode(os.environ["KEEPSTEP_COMMAND"]))
    seeds = Seeds.set_since(before)
    if telemetry.RECORD_VARIABLE in os.environ:
        importlib.import_module("keepstep.monitor.telemetry.attachment")
    obstacle = obstacle_to_forking(frozenset((0, 1, 2, control)))
    if obstacle:
        connection.send(Unable(reason=obstacle))
        return
    connection.send(Prepared())
    ForkServer(connection, seeds).run()


if __name__ == "__main__":
    main()
