"""Claims about how a node enters and ends generations, by real workers."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.messages import Protected
from keepstep.elastic.agent import supervisor
from keepstep.elastic.agent.node_snapshots import NodeSnapshots
from keepstep.elastic.agent.participation import Participation
from keepstep.elastic.agent.snapshot_process import ServerGone
from keepstep.elastic.cli.main import run
from keepstep.elastic.rendezvous.checkpoint_schedule import PartAttempt
from keepstep.elastic.rendezvous.records import (
    CheckpointRecord,
    Generation,
    Member,
    NodeReport,
    PersistRequest,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.view import View
from keepstep.elastic.worker.messages import AbortOrdered, AgentMessage, Command, CommandKind
from tests.unit.elastic.agent.test_participation import participating
from tests.unit.elastic.agent.test_supervisor import spawning
from tests.unit.elastic.agent.test_worker_group import JOIN, places, play

DRAIN = """
from pathlib import Path
session.report(Ready(generation=1, at_s=0.0))
if AWAITS_ORDER:
    session.wait_for_abort_order(1)
while not session.is_aborting(1) or not Path(GATE).exists():
    time.sleep(0.01)
session.report(Drained(generation=1))
time.sleep(600)
"""


DRAIN_TIMEOUT_S = {option.name: option.default for option in run.params}["drain_timeout"]


class Node:
    """A node whose worker drains by abort once a file is there; `ordered` has its orders."""

    def __init__(self, participation: Participation, gate: Path) -> None:
        self.participation = participation
        self.follower = participation._follower
        self.group = participation._node.worker_group
        self.gate = gate
        self.ordered: list[AgentMessage] = []
        self._changed = participation._wake
        self._broadcast = self.group.broadcast
        self.group.broadcast = self._record  # type: ignore[method-assign]

    async def _record(self, message: AgentMessage) -> None:
        self.ordered.append(message)
        await self._broadcast(message)

    async def until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            self._changed.clear()
            await self._changed.wait()


@asynccontextmanager
async def running(directory: Path, *, awaits_order: bool) -> AsyncIterator[Node]:
    gate, script = directory / "gate", directory / "script.py"
    code = JOIN.replace("awaits_abort_order=True", f"awaits_abort_order={awaits_order}")
    code = code.replace("Joined, Ready", "Drained, Joined, Ready")
    script.write_text(f"GATE, AWAITS_ORDER = {str(gate)!r}, {awaits_order}\n{code}{DRAIN}")
    async with participating(directory, Command(CommandKind.SCRIPT, str(script), ())) as part:
        node = Node(part, gate)
        node.group.warm_up()
        await node.until(lambda: node.group.warm)
        await node.group.enter(places(1, 1))
        await node.until(lambda: node.group.times().keys() == {"ready"})
        yield node


@pytest.mark.slow
@pytest.mark.parametrize("awaits_order", [True, False])
def test_node_that_is_alone_orders_its_workers_once_to_abort_if_they_wait_for_that(
    tmp_path: Path, awaits_order: bool
) -> None:
    """Its membership or its snapshot server is gone: no leader orders it, and nothing is sealed."""

    async def scenario() -> None:
        async with running(tmp_path, awaits_order=awaits_order) as node:
            for _ in range(3):
                assert not await node.follower.drain_at_once()
            assert node.ordered == [AbortOrdered(generation=1)] * awaits_order
            node.gate.touch()
            await node.until(lambda: not node.group.workers[0].can_write)
            assert await node.follower.drain_at_once()
            assert node.group.workers[0].is_alive, "it was not killed, and may be assigned again"
            assert len(node.ordered) == awaits_order

    play(scenario())


class Server:
    """A snapshot server that holds nothing."""

    address, local_address, secret = "unix:/none", "unix:/none", bytes(16)
    sealed = protected = ()

    async def open_generation(self, generation: Generation) -> None: ...

    async def commit(self, snapshot: SnapshotId) -> None: ...

    async def refresh(self) -> None: ...


class DyingServer(Server):
    async def refresh(self) -> None:
        raise ServerGone("the snapshot server has ended")


def next_generation(node: Node) -> Generation:
    member = Member("a", "127.0.0.1", 1, 0, "127.0.0.1:1", "unix:/none")
    return Generation(2, (member,), "127.0.0.1", node.follower._store_socket.port, "worker lost")


@pytest.mark.slow
def test_port_of_the_next_store_is_recorded_though_the_snapshot_server_dies_at_the_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record named the port that was in use, and the generation after this one failed."""

    async def scenario() -> None:
        async with running(tmp_path, awaits_order=False) as node:
            monkeypatch.setattr(NodeSnapshots, "server", property(lambda _: DyingServer()))
            await node.until(lambda: node.group.workers[0].has_joined)
            with pytest.raises(ServerGone):
                await node.follower._enter(next_generation(node))
            record = node.participation._node.membership.record
            assert record.store_port == node.follower._store_socket.port

    play(scenario())


@pytest.mark.slow
def test_snapshot_that_is_protected_while_its_node_enters_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for one of the generation before: it was never committed, and none after it."""
    snapshot = SnapshotId(2, 9)

    async def scenario() -> None:
        async with running(tmp_path, awaits_order=False) as node:
            part = node.participation

            class FastServer(Server):
                protected = sealed = (snapshot,)

                async def refresh(self) -> None:
                    part._snapshots._on_event(Protected(snapshot=snapshot, nbytes=1))

            monkeypatch.setattr(NodeSnapshots, "server", property(lambda _: FastServer()))
            reports: list[NodeReport] = []
            monkeypatch.setattr(part._node.membership, "receive_report", reports.append)
            part._node.connections = Mock()
            await node.until(lambda: node.group.workers[0].has_joined)
            part._node.membership.update(generation=1)
            part._node.drained = 1
            await node.follower._enter(next_generation(node))
            assert [(report.generation, report.protected) for report in reports] == [
                (2, (snapshot,))
            ]

    play(scenario())


@pytest.mark.slow
def test_workers_of_a_new_generation_receive_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is new would wait for ever for the end of a job whose last step is stored."""

    async def scenario() -> None:
        async with running(tmp_path, awaits_order=False) as node:
            part = node.participation
            stored = CheckpointRecord(step=30, generation=1, url="/run", at_s=0.0)
            membership = part._node.membership
            membership.view = replace(membership.view, checkpoint=stored)
            monkeypatch.setattr(NodeSnapshots, "server", property(lambda _: Server()))
            await node.until(lambda: node.group.workers[0].has_joined)
            await part._snapshots.follow()
            assert node.group.workers[0].stored == (30, 1)
            await node.follower._enter(next_generation(node))
            assert node.group.workers[0].stored == (-1, 0)
            await node.until(lambda: node.group.workers[0].has_joined)
            await part._snapshots.follow()
            assert node.group.workers[0].stored == (30, 1)

    play(scenario())


def test_worker_in_a_guard_is_killed_once_its_node_may_drain_no_longer_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has failed, so the node waits for an evaluation as long as docs/limits.md says."""
    monkeypatch.setattr(supervisor, "_spawn", spawning("sleep", "600"))

    async def scenario() -> None:
        async with participating(tmp_path) as participation:
            follower, node = participation._follower, participation._node
            node.config = replace(node.config, drain_timeout_s=DRAIN_TIMEOUT_S)
            await node.worker_group.enter(places(1, 1))
            worker = node.worker_group.workers[0]
            worker.has_joined = True
            for _ in range(3):
                await follower._drain(1, abort=False)
            until_s = node.worker_group.drain_until_s
            assert until_s is not None
            assert 200.0 < until_s - time.monotonic() <= 300.0
            assert not worker.is_stopping
            node.worker_group._drain_until_s = time.monotonic()
            await follower._drain(1, abort=False)
            await worker._exited.wait()
            assert worker.code == -signal.SIGKILL

    play(scenario())


def test_node_begins_to_store_a_snapshot_before_it_passes_on_a_newer_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit frees what is to be stored."""
    calls: list[str] = []

    class Server:
        address, sealed, protected = "unix:/none", (), ()

        async def persist(self, attempt: PartAttempt) -> None:
            calls.append(f"persist {attempt.request.commit.snapshot.step}")

        async def commit(self, snapshot: SnapshotId) -> None:
            calls.append(f"commit {snapshot.step}")

    async def scenario() -> None:
        async with participating(tmp_path) as participation:
            monkeypatch.setattr(NodeSnapshots, "server", property(lambda _: Server()))
            member = Member("a", "h", 1, 0, "h:1", Server.address)
            asked, newer = (SnapshotCommit(SnapshotId(0, step), (member,)) for step in (6, 7))
            request = PersistRequest(asked, "/checkpoint", 0.0, "ab")
            membership = participation._node.membership
            membership.view = View(snapshot=newer, persist=request, revisions={"persist": 3})
            await participation._snapshots.follow()
            assert calls == ["persist 6", "commit 7"]

    play(scenario())
