"""Runs the snapshot server: a process per node that owns the memory its snapshots live in.

    python -m keepstep.checkpoint.snapshot.server.server --directory DIR --host ADDRESS --node NAME
        --control FD --parent PID --ranks N

So a worker's death loses nothing. The job's secret comes on the first line of standard input.
Workers of the node connect to `DIR/snapshots.sock` and map memory by descriptors; other nodes read
over TCP; the agent owns the other end of the control descriptor, and is sent an event when a
snapshot that all ranks of the node have sealed is protected. The server ends when the agent's end
of the control connection closes. The messages are in `checkpoint.snapshot.memory.messages`.
"""

from __future__ import annotations

import argparse
import gc
import logging
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.messages import (
    SNAPSHOT_PROTOCOL,
    ClientRequest,
    Protected,
    ServerReply,
    Serving,
)
from keepstep.checkpoint.snapshot.server.agent_control import AgentChannel, AgentCommands
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
from keepstep.transport import Connection, Identity, Listener, listen, tcp_address_of

SOCKET_NAME = "snapshots.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The arguments of a server.

    Args:
        directory: where the Unix socket is made.
        host: the address of this node that other nodes reach.
        ranks: how many ranks the node has.
        limits: of sending and writing during training.
    """

    directory: Path
    host: str
    ranks: int
    limits: RateLimits


class SnapshotServer:
    """Serves one node. `run` returns when the agent has gone; it calls `close` on every path."""

    def __init__(self, config: ServerConfig, identity: Identity, control: socket.socket) -> None:
        self._config = config
        self._agent = AgentChannel(control)
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
        """Serve until the agent's end of the control connection closes."""
        try:
            self._listener.start()
            self._agent.send(Serving(address=self._address))
            while (request := self._agent.receive()) is not None:
                self._agent.reply(request.number, self._commands.carry_out(request.command))
        finally:
            self.close()

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
    options = parser.parse_args()
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
    )
    control = socket.socket(fileno=options.control)
    # What has been imported stays: no garbage collection has to look at it again.
    gc.collect()
    gc.freeze()
    SnapshotServer(config, Identity(options.node, secret), control).run()


if __name__ == "__main__":
    main()
