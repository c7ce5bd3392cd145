"""Runs snapshot servers in processes of their own, as agents do, for tests."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.client import translated_transport_errors
from keepstep.checkpoint.snapshot.memory.erasure_group import ErasureGroup
from keepstep.checkpoint.snapshot.memory.memory_source import Holder
from keepstep.checkpoint.snapshot.memory.messages import (
    CONTROL_PROTOCOL,
    AgentCommand,
    AgentReply,
    AgentRequest,
    CommitSnapshot,
    NodeHoldings,
    OpenGeneration,
    Protected,
    Rebuild,
    Refused,
    ReportHoldings,
    ServerEvent,
    Serving,
)
from keepstep.transport import Connection, Identity, connect, listen
from tests.adaptive_timeouts import patient

SECRET = b"s" * 32

_Event = TypeVar("_Event", bound=ServerEvent)


class Server:
    """A server, and its agent's connection.

    Args:
        directory: where its Unix socket is made.
        ranks: how many ranks its node has.
        options: further arguments on its command line.
        max_descriptors: how many files it may have open; None is what this process may.
    """

    def __init__(
        self, directory: Path, ranks: int, *options: str, max_descriptors: int | None = None
    ) -> None:
        limit = [] if max_descriptors is None else ["prlimit", f"--nofile={max_descriptors}"]
        with listen(f"unix:{directory / 'agent.sock'}") as control:
            self.process = subprocess.Popen(
                [
                    *limit, sys.executable, "-m", "keepstep.checkpoint.snapshot.server.server",
                    "--directory", str(directory), "--host", "127.0.0.1",
                    "--node", directory.name[:100], "--control", str(control.fileno()),
                    "--parent", str(os.getpid()), "--ranks", str(ranks), *options,
                ],
                stdin=subprocess.PIPE, pass_fds=(control.fileno(),),
            )  # fmt: skip
        assert self.process.stdin is not None
        with self.process.stdin as pipe:
            pipe.write(SECRET.hex().encode() + b"\n")
        self.directory = directory
        self.events: list[ServerEvent] = []
        self.numbers = itertools.count()
        self.control: Connection[AgentRequest, AgentReply | ServerEvent]
        self.connect()
        self.local = f"unix:{directory / 'snapshots.sock'}"

    def connect(self) -> None:
        """Connect as the first agent, or as another one after that."""
        identity = Identity(self.directory.name[:100], SECRET)
        self.control = connect(
            f"unix:{self.directory / 'agent.sock'}",
            CONTROL_PROTOCOL,
            identity,
            handshake_s=patient(60),
            idle_s=None,
        )
        serving = self._receive()
        assert isinstance(serving, Serving)
        assert serving.pid == self.process.pid
        self.address = serving.address

    def wait_until_protected(self, snapshot: SnapshotId) -> None:
        """Wait for the event that a snapshot is protected; other events before it are dropped."""
        while True:
            event = self.events.pop(0) if self.events else self._receive()
            if isinstance(event, Protected) and event.snapshot == snapshot:
                return

    def wait_for_event(self, *kinds: type[_Event]) -> _Event:
        """Wait for an event of these kinds; other events before it are dropped."""
        while True:
            event = self.events.pop(0) if self.events else self._receive()
            if isinstance(event, kinds):
                return event

    def ask(self, command: AgentCommand) -> NodeHoldings:
        """Return the reply to a command; events that come before it are kept."""
        number = next(self.numbers)
        with translated_transport_errors():
            self.control.send(AgentRequest(number=number, command=command))
        while not isinstance(message := self._receive(), AgentReply):
            self.events.append(message)
        assert message.number == number
        if isinstance(message.result, Refused):
            raise AssertionError(message.result.reason)
        return message.result

    def holdings(self) -> NodeHoldings:
        """Return what it holds."""
        return self.ask(ReportHoldings())

    def commit(self, snapshot: SnapshotId) -> NodeHoldings:
        """Commit a snapshot on this node."""
        return self.ask(CommitSnapshot(snapshot=snapshot))

    def _receive(self) -> AgentReply | ServerEvent:
        with translated_transport_errors():
            message = self.control.receive()
        if message is None:
            raise SnapshotUnavailable("the server has ended")
        return message

    def open_generation(
        self, generation: int, addresses: Sequence[str] = (), position: int = 0, parity: int = 0
    ) -> None:
        """Begin one that resumes from nothing, as an agent does."""
        group = ErasureGroup(
            generation=generation,
            addresses=tuple(addresses) or (self.address,),
            position=position,
            parity=parity,
        )
        self.ask(OpenGeneration(group=group))
        self.commit(SnapshotId(generation, -1))

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.wait()
        self.control.close()

    def close(self) -> None:
        """End it as an agent does."""
        self.control.close()
        try:
            self.process.wait(patient(10))
        finally:
            self.process.kill()
            self.process.wait()


@dataclass
class Cluster:
    """Nodes in one erasure group.

    `kill` and `revive` change which of them live; `begin` opens a generation of those.
    """

    directory: Path
    size: int
    ranks_per_node: int
    nodes: list[Server | None] = field(default_factory=list)
    generation: int = 0
    parity: int = 0
    is_broken: threading.Event = field(default_factory=threading.Event)
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.nodes = [None] * self.size
        self.revive()

    def revive(self) -> None:
        """Start a server for every node that has none."""
        for position, node in enumerate(self.nodes):
            if node is None:
                place = self.directory / f"node{position}"
                place.mkdir(exist_ok=True)
                for name in ("snapshots.sock", "agent.sock"):
                    (place / name).unlink(missing_ok=True)
                self.nodes[position] = Server(place, self.ranks_per_node, *self.options)

    def begin(self, parity: int) -> int:
        """Open a generation with all nodes in one group."""
        self.generation += 1
        self.parity = parity
        self.is_broken.clear()
        addresses = [server.address for server in self.living]
        for position, server in enumerate(self.living):
            server.open_generation(self.generation, addresses, position, parity)
        return self.generation

    @property
    def living(self) -> list[Server]:
        return [node for node in self.nodes if node is not None]

    def kill(self, *positions: int) -> None:
        """Kill nodes, all at once."""
        doomed = [node for position in positions if (node := self.nodes[position]) is not None]
        for node in doomed:
            node.process.kill()
        self.is_broken.set()
        for node in doomed:
            node.kill()
        for position in positions:
            self.nodes[position] = None

    def close(self) -> None:
        for server in self.living:
            server.close()

    def ranks(self, position: int) -> range:
        """Return the ranks of a node."""
        return range(position * self.ranks_per_node, (position + 1) * self.ranks_per_node)

    def commit(self, step: int, note: Callable[[int], None] = lambda _: None) -> None:
        """Commit a snapshot once all protect it, as the leader does.

        The commit is noted before the nodes learn of it.
        """
        snapshot = SnapshotId(self.generation, step)
        for server in self.living:
            while snapshot not in server.holdings().protected:
                # A server whose peer is gone tries again: its generation is not over yet.
                if self.is_broken.wait(0.01):
                    raise SnapshotUnavailable("a node is gone")
        note(step)
        for server in self.living:
            server.commit(snapshot)

    def rebuild(
        self, step: int, addresses: Sequence[str], lost: Sequence[int] = ()
    ) -> list[Holder]:
        """Have living nodes, in turn, rebuild the shards of the dead ones, or else of `lost`.

        Returns who holds which rank's shard then.
        """
        lost = list(lost) or [position for position, node in enumerate(self.nodes) if node is None]
        holders = []
        turns = itertools.cycle(self.living)
        for position, node in enumerate(self.nodes):
            ranks = self.ranks(position)
            if node is not None and position not in lost:
                holders.append(Holder(node.address, tuple(ranks)))
                continue
            group = ErasureGroup(
                generation=self.generation,
                addresses=tuple(addresses),
                position=position,
                parity=self.parity,
            )
            for rank in ranks:
                adopter = next(turns)
                adopter.ask(
                    Rebuild(
                        snapshot=SnapshotId(self.generation, step),
                        group=group,
                        lost=tuple(lost),
                        ranks=(rank,),
                    )
                )
                holders.append(Holder(adopter.address, (rank,), rebuilds=True))
        return holders
