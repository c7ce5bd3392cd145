"""Snapshot servers in processes of their own, as agents have them, for tests."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.memory.memory_source import Holder
from keepstep.checkpoint.memory.wire import Connection, Message

SECRET = b"s" * 32


class Server:
    """A server, and the agent's end of its control connection."""

    def __init__(self, directory: Path, ranks: int, *options: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "keepstep.checkpoint.server.server", "--directory", str(directory), "--host", "127.0.0.1",
                    "--control", str(theirs.fileno()), "--parent", str(os.getpid()), "--ranks", str(ranks),
                    *options,
                ],
                stdin=subprocess.PIPE, pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        assert self.process.stdin is not None
        with self.process.stdin as pipe:
            pipe.write(SECRET.hex().encode() + b"\n")
        self.control = Connection(ours, "server")
        self.heard: list[Message] = []
        self.address = self.hear("serving")["address"]
        self.local = f"unix:{directory / 'snapshots.sock'}"

    def hear(self, event: str, **details: object) -> Message:
        """Return the next event of a kind with these details; other events before it are dropped."""
        while True:
            message = self.heard.pop(0) if self.heard else self._receive()
            if message.get("event") == event and details.items() <= message.items():
                return message

    def ask(self, **request: object) -> Message:
        """Return the answer to a request; events that come before it can be heard later."""
        self.control.send({"id": 1, **request})
        while "id" not in (message := self._receive()):
            self.heard.append(message)
        if "error" in message:
            raise AssertionError(message["error"])
        return message

    def _receive(self) -> Message:
        message = self.control.receive()
        if message is None:
            raise SnapshotUnavailable("the server has ended")
        return message

    def open_generation(
        self, generation: int, addresses: Sequence[str] = (), position: int = 0, parity: int = 0
    ) -> None:
        """Begin one that resumes from nothing, as an agent does."""
        group = list(addresses) or [self.address]
        self.ask(
            verb="open_generation",
            generation=generation,
            addresses=group,
            position=position,
            parity=parity,
        )
        self.ask(verb="commit", snapshot=[generation, -1])

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.wait()
        self.control.close()

    def close(self) -> None:
        self.control.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()


@dataclass
class Cluster:
    """Nodes in one erasure group; `kill` and `revive` change who lives, `begin` opens a generation of those."""

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
                (place / "snapshots.sock").unlink(missing_ok=True)
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
        """Commit a snapshot once all protect it, as the leader does; the commit is noted before the nodes are told."""
        for server in self.living:
            while [self.generation, step] not in server.ask(verb="finish_protection")["protected"]:
                # A server whose peer is gone tries again: it does not know yet that this generation is over.
                if self.is_broken.wait(0.01):
                    raise SnapshotUnavailable("a node is gone")
        note(step)
        for server in self.living:
            server.ask(verb="commit", snapshot=[self.generation, step])

    def rebuild(
        self, step: int, addresses: Sequence[str], lost: Sequence[int] = ()
    ) -> list[Holder]:
        """Have the living take turns in rebuilding what the dead, or else these, held; return who holds which rank now."""
        lost = list(lost) or [position for position, node in enumerate(self.nodes) if node is None]
        holders = []
        turns = itertools.cycle(self.living)
        for position, node in enumerate(self.nodes):
            ranks = self.ranks(position)
            if node is not None and position not in lost:
                holders.append(Holder(node.address, tuple(ranks)))
                continue
            for rank in ranks:
                adopter = next(turns)
                adopter.ask(
                    verb="rebuild",
                    snapshot=[self.generation, step],
                    addresses=list(addresses),
                    position=position,
                    parity=self.parity,
                    lost=lost,
                    ranks=[rank],
                )
                holders.append(Holder(adopter.address, (rank,), rebuilds=True))
        return holders
