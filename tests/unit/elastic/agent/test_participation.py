"""Claims about a node's part in a job, by real workers and no coordinator but a local one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.elastic.agent.config import AgentConfig
from keepstep.elastic.agent.departure import Departure
from keepstep.elastic.agent.participation import Participation
from keepstep.elastic.agent.peer_connections import AgentListener
from keepstep.elastic.agent.store_socket import StoreSocket
from keepstep.elastic.errors import JobFailed, LeaseLost, StoreUnavailable
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.records import CheckpointRecord, Generation, Member, Result
from keepstep.elastic.rendezvous.view import View
from keepstep.elastic.store.memory import MemoryStore
from keepstep.elastic.worker.messages import (
    AbortOrdered,
    AgentMessage,
    Command,
    CommandKind,
)
from tests.patience import patient
from tests.unit.elastic.agent.test_worker_group import JOIN, places, play

NOTHING = Command(CommandKind.PROGRAM, "true", ())
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


@asynccontextmanager
async def participating(
    directory: Path, command: Command = NOTHING, grace_s: float = 30.0
) -> AsyncIterator[Participation]:
    config = AgentConfig(
        job="job",
        node="a",
        host="127.0.0.1",
        workers=1,
        command=command,
        policy=RendezvousPolicy(1, 1, quorum_timeout_s=patient(5)),
        environment=os.environ,
        run_directory=directory,
        digest="d",
        abort_timeout_s=patient(60),
        grace_s=grace_s,
    )
    wake = asyncio.Event()
    listener, store_socket = await AgentListener.open("a", "127.0.0.1"), StoreSocket("127.0.0.1")
    participation = Participation(
        config,
        MemoryStore(),
        agent_listener=listener,
        store_socket=store_socket,
        departure=Departure(wake.set),
        wake=wake,
    )
    try:
        yield participation
    finally:
        await participation._worker_group.stop(0.0)
        store_socket.close()
        await listener.close()


class Node:
    """A node whose worker drains by abort once a file is there; `ordered` is what it was told."""

    def __init__(self, participation: Participation, gate: Path) -> None:
        self.participation = participation
        self.group = participation._worker_group
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


@pytest.mark.parametrize("awaits_order", [True, False])
def test_node_that_is_alone_orders_its_workers_once_to_abort_if_they_wait_for_that(
    tmp_path: Path, awaits_order: bool
) -> None:
    """Its membership or its snapshot server is gone: no leader orders it, and nothing is sealed."""

    async def scenario() -> None:
        async with running(tmp_path, awaits_order=awaits_order) as node:
            for _ in range(3):
                assert not await node.participation._drain_at_once()
            assert node.ordered == [AbortOrdered(generation=1)] * awaits_order
            node.gate.touch()
            await node.until(lambda: not node.group.workers[0].can_write)
            assert await node.participation._drain_at_once()
            assert node.group.workers[0].is_alive, "it was not killed, and may be assigned again"
            assert len(node.ordered) == awaits_order

    play(scenario())


class Lost:
    """A membership that ends after it has begun; what the node does then is recorded."""

    def __init__(self, participation: Participation, view: View, *, is_away: bool = False) -> None:
        self.joined = 0
        self._is_away = is_away
        self._participation = participation
        self._view = view
        participation._join = self._join  # type: ignore[method-assign]
        participation._take_part = self._take_part  # type: ignore[method-assign]
        participation._end_work = self._end_work  # type: ignore[method-assign]

    async def _join(self) -> None:
        await asyncio.sleep(0)
        self.joined += 1
        if self.joined > 1 and self._is_away:
            raise StoreUnavailable("no answer")

    async def _take_part(self) -> bool:
        if self.joined > 1:
            return True
        self._participation._membership.view = self._view
        raise LeaseLost("node a was declared gone")

    async def _end_work(self) -> None:
        return


@pytest.mark.parametrize("succeeded", [True, False])
def test_node_that_is_declared_gone_when_the_job_is_over_does_not_begin_it_anew(
    tmp_path: Path, succeeded: bool
) -> None:
    async def scenario() -> None:
        async with participating(tmp_path) as participation:
            lost = Lost(participation, View(result=Result(succeeded, "its outcome")))
            if succeeded:
                assert await participation.run()
            else:
                with pytest.raises(JobFailed, match="its outcome"):
                    await participation.run()
            assert lost.joined == 1

    play(scenario())


def test_node_that_is_declared_gone_joins_again_while_the_job_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with participating(tmp_path) as participation:
            lost = Lost(participation, View())
            assert await participation.run()
            assert lost.joined == 2

    play(scenario())


def test_node_that_is_to_leave_does_not_wait_longer_than_its_grace_for_the_coordinator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with participating(tmp_path, grace_s=0.2) as participation:
            lost = Lost(participation, View(), is_away=True)
            participation._departure.begin("leaving")
            assert not await participation.run()
            assert lost.joined > 2, "it tried until the grace was over"

    play(scenario())
    assert caplog.messages[-1] == "left without joining again: no answer"


def test_workers_of_a_new_generation_are_told_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is new would wait for ever for the end of a job whose last step is stored."""

    class Server:
        address, local_address, secret = "unix:/none", "unix:/none", bytes(16)
        sealed = protected = ()

        async def open_generation(self, generation: Generation) -> None: ...

        async def commit(self, snapshot: SnapshotId) -> None: ...

        async def refresh(self) -> None: ...

    async def scenario() -> None:
        async with running(tmp_path, awaits_order=False) as node:
            part = node.participation
            stored = CheckpointRecord(step=30, generation=1, url="/run", at_s=0.0)
            part._membership.view = replace(part._membership.view, checkpoint=stored)
            monkeypatch.setattr(Participation, "_snapshots", property(lambda _: Server()))
            await node.until(lambda: node.group.workers[0].has_joined)
            await part._follow_commits()
            assert node.group.workers[0].stored == (30, 1)
            member = Member("a", "127.0.0.1", 1, 0, "127.0.0.1:1", "unix:/none")
            port = part._store_socket.port
            await part._enter(Generation(2, (member,), "127.0.0.1", port, "worker lost"))
            assert node.group.workers[0].stored == (-1, 0)
            await node.until(lambda: node.group.workers[0].has_joined)
            await part._follow_commits()
            assert node.group.workers[0].stored == (30, 1)

    play(scenario())
