"""Runs the snapshot server: a process per node that owns the memory its snapshots live in.

    python -m keepstep.checkpoint.snapshot.server.server --directory DIR --host ADDRESS --node NAME
        --control FD --parent PID --ranks N --keep SECONDS

So a worker's death loses nothing. The job's secret comes on the first line of standard input.
Workers of the node connect to `DIR/snapshots.sock` and map memory by descriptors; other nodes read
over TCP; the agent connects to the socket that listens on the control descriptor, and is sent an
event when a snapshot that all ranks of the node have sealed is protected. The messages are in
`checkpoint.snapshot.memory.messages`.

The server ends when the agent says so. When the agent's connection ends without that, the server
keeps what it holds for some seconds, in which another agent of the node may connect; then it
removes its directory and ends.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.messages import (
    CONTROL_PROTOCOL,
    SNAPSHOT_PROTOCOL,
    ClientRequest,
    EndServer,
    Protected,
    ServerReply,
    Serving,
)
from keepstep.checkpoint.snapshot.server.agent_control import (
    AgentChannel,
    AgentCommands,
    AgentConnection,
    redirect_output,
)
from keepstep.checkpoint.snapshot.server.client_session import ClientSession
from keepstep.checkpoint.snapshot.server.limits import RateLimits
from keepstep.checkpoint.snapshot.server.memory_budget import MemoryBudget
from keepstep.checkpoint.snapshot.server.persistence import Persistence
from keepstep.checkpoint.snapshot.server.plan_outbox import PlanOutbox
from keepstep.checkpoint.snapshot.server.protection import Protection
from keepstep.checkpoint.snapshot.server.rebuilding import Rebuilder
from keepstep.checkpoint.snapshot.server.restore_check import RestoreCheck
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory
from keepstep.log_format import log_to_stderr
from keepstep.notices import leave_notices
from keepstep.processes import die_with_parent, set_title
from keepstep.transport import (
    Connection,
    Identity,
    Listener,
    TransportError,
    accept,
    listen,
    tcp_address_of,
)

SOCKET_NAME = "snapshots.sock"

_FIRST_AGENT_S = 120.0
"""How long the agent that has started the server may take to connect."""
_CLOSE_S = 30
"""How long it may take to end what is under way when no agent has returned."""

log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The arguments of a server.

    Args:
        directory: where the Unix socket is made.
        host: the address of this node that other nodes reach.
        ranks: how many ranks the node has.
        limits: of sending and writing during training.
        keep_s: how long an agent may be away; 0: the server ends with its agent.
    """

    directory: Path
    host: str
    ranks: int
    limits: RateLimits
    keep_s: float


class SnapshotServer:
    """Serves one node, and one agent after the other. `run` calls `close` on every path.

    Args:
        config: the server's arguments.
        identity: the node, and the job's secret.
        control: listens for agents.
    """

    def __init__(self, config: ServerConfig, identity: Identity, control: socket.socket) -> None:
        self._config = config
        self._identity = identity
        self._control = control
        self._agent = AgentChannel()
        budget = MemoryBudget()
        self._memory = SnapshotMemory(budget, self._retain_parity)
        self._protection = Protection(self._memory, identity, budget, self._report_protected)
        self._restore_check = RestoreCheck(self._memory, self._agent.send)
        self._rebuilder = Rebuilder(self._memory, identity, self._protection.mark_unprotected)
        self._plan_outbox = PlanOutbox()
        self._persistence = Persistence(
            self._memory, self._plan_outbox, identity, config.limits.storage, self._agent.send
        )
        self._commands = AgentCommands(
            config.ranks,
            self._memory,
            self._protection,
            self._rebuilder,
            self._restore_check,
            self._persistence,
        )
        local = listen(f"unix:{config.directory / SOCKET_NAME}")
        remote = listen(f"tcp:{config.host}:0")
        self._address = tcp_address_of(remote)
        self._listener = Listener([local, remote], SNAPSHOT_PROTOCOL, identity, self._serve)

    def run(self) -> None:
        """Serve until an agent ends the server, or none is there for too long."""
        try:
            self._listener.start()
            agent = self._next_agent(_FIRST_AGENT_S)
            while agent is not None and self._follow(agent) and self._may_return():
                agent = None
                with _ended_by_signals():
                    agent = self._next_agent(self._config.keep_s)
                if agent is None:
                    shutil.rmtree(self._config.directory, ignore_errors=True)
                    # Nobody is there to end it, if something hangs.
                    signal.alarm(_CLOSE_S)
        finally:
            self.close()

    def _next_agent(self, wait_s: float) -> AgentConnection | None:
        """Return the next agent's connection; None if none has connected in time."""
        until_s = time.monotonic() + wait_s
        while (left_s := until_s - time.monotonic()) > 0:
            if not select.select([self._control], [], [], left_s)[0]:
                return None
            try:
                raw, _ = self._control.accept()
                return accept(raw, CONTROL_PROTOCOL, self._identity)
            except (OSError, TransportError) as error:
                log.debug("an agent did not connect: %s", error)
        return None

    def _follow(self, agent: AgentConnection) -> bool:
        """Carry out an agent's commands until it is gone; return False if it ends the server."""
        self._agent.open(agent, Serving(address=self._address, pid=os.getpid()))
        while (request := self._agent.receive()) is not None:
            self._agent.reply(request.number, self._commands.carry_out(request.command))
            if isinstance(request.command, EndServer):
                return False
        self._agent.close()
        return True

    def _may_return(self) -> bool:
        """Prepare to be without an agent; return False if there is nothing to wait for."""
        if not self._config.keep_s or not self._commands.has_sealed:
            return False
        self._persistence.stop()
        # Whoever reads the agent's output waits for its end.
        redirect_output(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        return True

    def close(self) -> None:
        """End what is under way, then every connection and thread, and free the memory."""
        self._persistence.close()
        self._rebuilder.close()
        self._restore_check.close()
        # Sessions that wait for memory, a plan or protection end; then nothing uses their buffers.
        self._memory.stop()
        self._plan_outbox.close()
        self._protection.stop()
        self._listener.close()
        self._protection.close()
        self._memory.close()
        self._agent.close()
        self._control.close()

    def _serve(self, client: Connection[ServerReply, ClientRequest]) -> None:
        ClientSession(
            client,
            self._memory,
            self._protection,
            self._plan_outbox,
            self._protect,
            self._background_rate,
        ).run()

    def _protect(self, snapshot: SnapshotId, sealed: frozenset[int]) -> None:
        """Have a snapshot protected when the last of the node's ranks has sealed it."""
        if len(sealed) == self._config.ranks:
            self._restore_check.check_first(snapshot, self._protection.protect)

    def _report_protected(self, snapshot: SnapshotId) -> None:
        self._agent.send(Protected(snapshot=snapshot, nbytes=self._commands.nbytes))

    def _retain_parity(self, snapshots: set[SnapshotId]) -> None:
        self._protection.retain_only(snapshots)

    def _background_rate(self) -> int:
        """Return one connection's share of the limit: a group's nodes read at the same time."""
        return ceil_div(self._config.limits.exchange, max(1, self._protection.peers))


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end this process meanwhile, which otherwise leaves it to the agent."""

    def end(*_: object) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, end)
    try:
        with suppress(SystemExit):
            yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main() -> None:
    """Run a server as the agent's child."""
    leave_notices()
    parser = argparse.ArgumentParser(
        description="Own the memory of this node's snapshots (started by the agent)."
    )
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--exchange-limit", type=int, default=0)
    parser.add_argument("--storage-limit", type=int, default=0)
    parser.add_argument("--keep", type=float, default=0.0)
    options = parser.parse_args()
    if not options.keep:
        die_with_parent(options.parent)
    set_title(
        f"keepstep snapshot server of {options.node}", "keepstep.checkpoint.snapshot.server.server"
    )
    log_to_stderr(logging.WARNING, "snapshot server")
    secret = bytes.fromhex(sys.stdin.readline().strip())
    config = ServerConfig(
        directory=options.directory,
        host=options.host,
        ranks=options.ranks,
        limits=RateLimits(options.exchange_limit, options.storage_limit),
        keep_s=options.keep,
    )
    control = socket.socket(fileno=options.control)
    control.setblocking(False)
    # What has been imported stays: no garbage collection has to look at it again.
    gc.collect()
    gc.freeze()
    SnapshotServer(config, Identity(options.node, secret), control).run()


if __name__ == "__main__":
    main()
