"""Connects the snapshot server to its agent: commands and their replies, and events."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import TypeAlias

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.snapshot.memory.messages import (
    AgentCommand,
    AgentReply,
    AgentRequest,
    CommitSnapshot,
    EndPersist,
    EndServer,
    Fence,
    FinishProtection,
    NodeHoldings,
    OpenGeneration,
    PersistPart,
    PublishManifest,
    Rebuild,
    Refused,
    ReportHoldings,
    ServerEvent,
    TakeOutput,
    Verify,
)
from keepstep.checkpoint.snapshot.server.persistence import Persistence
from keepstep.checkpoint.snapshot.server.protection import Protection
from keepstep.checkpoint.snapshot.server.rebuilding import Rebuilder
from keepstep.checkpoint.snapshot.server.restore_check import RestoreCheck
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory
from keepstep.transport import Connection, TransportError

_DRAIN_TIMEOUT_S = 1.0

log = logging.getLogger("keepstep")


AgentConnection: TypeAlias = Connection[AgentReply | ServerEvent, AgentRequest]


class AgentChannel:
    """Sends to the present agent from any thread, and receives its requests.

    What is sent while there is none is dropped: the next agent asks what the server holds.
    """

    def __init__(self) -> None:
        self._connection: AgentConnection | None = None
        self._sending = threading.Lock()

    def open(self, connection: AgentConnection, first: ServerEvent) -> None:
        """Go on with an agent that has connected; `first` is sent before anything else."""
        with self._sending:
            self._connection = connection
            self._send(first)

    def send(self, event: ServerEvent) -> None:
        """Send an event. When the agent is gone, `receive` notices it."""
        with self._sending:
            self._send(event)

    def reply(self, number: int, result: Callable[[], NodeHoldings | Refused]) -> None:
        """Reply to the request of this number.

        The result is made while nothing else is sent: a reply that follows an event of another
        thread must include what the event has reported.
        """
        with self._sending:
            self._send(AgentReply(number=number, result=result()))

    def receive(self) -> AgentRequest | None:
        """Return the agent's next request; None when it has gone."""
        assert self._connection is not None, "an agent has connected"
        try:
            request = self._connection.receive()
            if request is not None and isinstance(request.command, TakeOutput):
                redirect_output(self._connection.take_descriptor())
        except TransportError as error:
            log.error("the agent's connection ended: %s", error)
            return None
        return request

    def close(self) -> None:
        """End the connection, if there is one."""
        with self._sending:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _send(self, message: AgentReply | ServerEvent) -> None:
        if self._connection is None:
            return
        try:
            self._connection.send(message)
        except TransportError as error:
            log.debug("the agent is gone: %s", error)


def redirect_output(descriptor: int) -> None:
    """Write to this descriptor from now on, instead of to this process's output; it is closed."""
    for output in (1, 2):
        os.dup2(descriptor, output)
    os.close(descriptor)


class AgentCommands:
    """Carries out the agent's commands, one after the other.

    Args:
        ranks: how many ranks the node has.
        memory: the node's snapshots.
        protection: their parity.
        rebuilder: makes lost shards good.
        restore_check: compares what was restored.
        persistence: stores snapshots.
    """

    def __init__(
        self,
        ranks: int,
        memory: SnapshotMemory,
        protection: Protection,
        rebuilder: Rebuilder,
        restore_check: RestoreCheck,
        persistence: Persistence,
    ) -> None:
        self._ranks = ranks
        self._memory = memory
        self._protection = protection
        self._rebuilder = rebuilder
        self._restore_check = restore_check
        self._persistence = persistence

    @property
    def nbytes(self) -> int:
        """The memory that the server uses for snapshots and parity."""
        return self._memory.nbytes + self._protection.nbytes

    @property
    def has_sealed(self) -> bool:
        """Whether all ranks of the node have sealed a snapshot that is still held."""
        return any(len(held.ranks) == self._ranks for held in self._memory.sealed())

    def carry_out(self, command: AgentCommand) -> Callable[[], NodeHoldings | Refused]:
        """Carry out a command; what is returned makes the result: what is held, or a refusal."""
        try:
            self._carry_out(command)
        except (CheckpointError, ValueError) as error:
            refused = Refused(reason=str(error))
            return lambda: refused
        return self._holdings

    def _carry_out(self, command: AgentCommand) -> None:
        match command:
            case OpenGeneration(group=group):
                self._rebuilder.stop()
                self._restore_check.stop()
                self._memory.open_generation(group.generation)
                self._protection.open_generation(group)
                self._persistence.stop()
            case Fence(generation=generation):
                self._memory.fence(generation)
            case Rebuild(snapshot=snapshot, ranks=ranks):
                self._memory.expect(snapshot, ranks)
                self._rebuilder.rebuild(snapshot, command.group, command.lost, ranks)
            case FinishProtection():
                held = self._memory.sealed()
                sealed = {each.snapshot for each in held if len(each.ranks) == self._ranks}
                self._protection.finish_protection(sealed, _DRAIN_TIMEOUT_S)
            case Verify():
                self._discard_damaged()
            case CommitSnapshot(snapshot=snapshot):
                self._memory.commit(snapshot)
            case PersistPart(task=task, part=part):
                self._persistence.start(task, part)
            case EndPersist(attempt=attempt):
                self._persistence.end(attempt)
            case PublishManifest(task=task, listings=listings):
                self._persistence.publish(task, listings)
            case ReportHoldings() | TakeOutput() | EndServer():
                pass

    def _discard_damaged(self) -> None:
        """Forget snapshots whose bytes have changed since they were sealed.

        They are rebuilt from parity, if there is any. So are those of which a rank of this node has
        given up its shard for the next step: parity is of all shards of a node together.
        """
        for sealed in self._memory.sealed():
            is_intact = self._protection.is_intact(sealed.snapshot)
            if not is_intact:
                log.error(
                    "memory of step %d has changed since it was sealed; it is not used",
                    sealed.snapshot.step,
                )
            if not is_intact or not self._protection.is_complete(sealed.snapshot):
                self._memory.discard(sealed.snapshot)

    def _holdings(self) -> NodeHoldings:
        sealed = tuple(
            held
            for held in self._memory.sealed()
            if not self._restore_check.is_unchecked(held.snapshot)
        )
        return NodeHoldings(
            sealed=sealed,
            protected=tuple(
                held.snapshot for held in sealed if self._protection.is_protected(held.snapshot)
            ),
            nbytes=self.nbytes,
            committed=self._memory.committed,
        )
