"""Claims about a node's part in a job, by real workers and no coordinator but a local one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.elastic.agent.config import AgentConfig
from keepstep.elastic.agent.departure import Departure
from keepstep.elastic.agent.participation import Participation, describe_outage
from keepstep.elastic.agent.peer_connections import AgentListener
from keepstep.elastic.agent.store_socket import StoreSocket
from keepstep.elastic.agent.worker_group import WorkerGroup
from keepstep.elastic.errors import JobFailed, LeaseLost, StoreUnavailable, UsageError
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.records import Failure, FailureKind, Result
from keepstep.elastic.rendezvous.view import View
from keepstep.elastic.store.contract import Committed, Created, Delete, Modified, Put, Store
from keepstep.elastic.store.memory import MemoryStore
from keepstep.elastic.worker.messages import Command, CommandKind
from tests.adaptive_timeouts import patient
from tests.unit.elastic.agent.test_worker_group import play

NOTHING = Command(CommandKind.PROGRAM, "true", ())


@asynccontextmanager
async def participating(
    directory: Path,
    command: Command = NOTHING,
    grace_s: float = 30.0,
    store: Store | None = None,
    lease_ttl_s: float = 5.0,
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
        lease_ttl_s=lease_ttl_s,
    )
    wake = asyncio.Event()
    listener, store_socket = await AgentListener.open("a", "127.0.0.1"), StoreSocket("127.0.0.1")
    participation = Participation(
        config,
        store or MemoryStore(),
        agent_listener=listener,
        store_socket=store_socket,
        departure=Departure(wake.set),
        wake=wake,
        worker_group=WorkerGroup(command, 1, config.spares, os.environ, wake.set),
    )
    try:
        yield participation
    finally:
        await participation._node.worker_group.stop(0.0)
        store_socket.close()
        await listener.close()


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
        self._participation._node.membership.view = self._view
        raise LeaseLost("node a was declared gone")

    async def _end_work(self) -> None:
        return


@pytest.mark.parametrize("succeeded", [True, False])
def test_node_that_is_declared_gone_when_the_job_is_over_does_not_begin_it_again(
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


def test_job_that_was_lost_with_the_lease_is_restored_before_the_workers_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    async def scenario() -> None:
        async with participating(tmp_path) as participation:
            Lost(participation, View())

            async def note(what: str) -> None:
                done.append(what)

            monkeypatch.setattr(
                participation._node.membership, "restore_job", lambda: note("restored")
            )
            participation._end_work = lambda: note("ended")  # type: ignore[method-assign]
            assert await participation.run()

    play(scenario())
    assert done == ["restored", "ended"]


@pytest.mark.parametrize("error", [UsageError, StoreUnavailable, SnapshotUnavailable, LeaseLost])
@pytest.mark.parametrize("task", ["membership", "servers"])
def test_error_that_ends_a_nodes_part_is_raised_as_it_is_and_not_in_a_group(
    tmp_path: Path, task: str, error: type[Exception]
) -> None:
    """The command shows its message; a group's would be a trace of tasks."""

    async def fail() -> None:
        raise error("what happened")

    async def go_on(*_: object) -> bool:
        await asyncio.Event().wait()
        return False

    async def scenario() -> None:
        async with participating(tmp_path) as participation:
            participation._secret = bytes(16)
            participation._work = go_on  # type: ignore[method-assign]
            run, watch = (fail, go_on) if task == "membership" else (go_on, fail)
            participation._node.membership.run = run  # type: ignore[assignment]
            participation._snapshots.supervisor.watch = watch  # type: ignore[assignment]
            with pytest.raises(error, match="what happened"):
                await participation._take_part()

    play(scenario())


class NoServer:
    """Stands for the snapshot servers of a node: how often one was started, and after what."""

    def __init__(self, participation: Participation, before: Callable[[], Awaitable[None]]) -> None:
        self.started = 0
        self._before = before
        self._node = participation._node
        participation._snapshots.start = self._start  # type: ignore[method-assign]
        participation._take_part = self._take_part  # type: ignore[method-assign]

    async def _start(self, _: bytes) -> None:
        self.started += 1
        self._node.membership.update(server="tcp:h:2")
        await self._before()

    async def _take_part(self) -> bool:
        return True


def test_lease_is_renewed_while_a_snapshot_server_starts(tmp_path: Path) -> None:
    """On a loaded machine that took longer than the lease, and the node was declared gone."""

    async def scenario() -> None:
        store = MemoryStore()
        renewed = asyncio.Event()
        renew = store.renew

        async def noted(lease: int) -> float:
            renewed.set()
            return await renew(lease)

        async def slow_start() -> None:
            async with asyncio.timeout(patient(5)):
                for _ in range(3):
                    renewed.clear()
                    await renewed.wait()

        store.renew = noted  # type: ignore[method-assign]
        async with participating(tmp_path, store=store, lease_ttl_s=0.1) as participation:
            server = NoServer(participation, slow_start)
            assert await participation.run()
            assert server.started == 1

    play(scenario())


def test_lease_that_is_lost_while_a_snapshot_server_starts_is_taken_again_with_that_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        lost = asyncio.Event()
        renew = store.renew

        async def refused(lease: int) -> float:
            try:
                return await renew(lease)
            except LeaseLost:
                lost.set()
                raise

        async def stall() -> None:
            await store.advance(100.0)
            async with asyncio.timeout(patient(5)):
                await lost.wait()

        store.renew = refused  # type: ignore[method-assign]
        async with participating(tmp_path, store=store, lease_ttl_s=0.1) as participation:
            server = NoServer(participation, stall)
            ended: list[bytes | None] = []

            async def end_work() -> None:
                ended.append(participation._secret)
                record = participation._node.membership.record
                participation._node.membership = participation._new_membership(record)

            monkeypatch.setattr(participation, "_end_work", end_work)
            assert await participation.run()
            assert server.started == 1
            assert len(ended) == 1
            assert ended[0] is not None

    play(scenario())


def test_node_whose_lease_ends_before_its_first_write_joins_again(tmp_path: Path) -> None:
    """No snapshot server has been started yet, of which the end of the work would ask anything."""

    class Stalling(MemoryStore):
        """The coordinator stands still for longer than the lease, once."""

        has_stalled = False

        async def commit(
            self, conditions: Sequence[Modified | Created], operations: Sequence[Put | Delete]
        ) -> Committed:
            if not self.has_stalled:
                self.has_stalled = True
                await self.advance(100.0)
            return await super().commit(conditions, operations)

    async def scenario() -> None:
        async def at_once() -> None:
            return

        async with participating(tmp_path, store=Stalling()) as participation:
            server = NoServer(participation, at_once)
            assert await participation.run()
            assert server.started == 1

    play(scenario())


def test_node_with_a_worker_that_cannot_be_killed_gives_up_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        store = MemoryStore()

        async def stop(_: float) -> None:
            raise JobFailed("process 7 cannot be killed")

        async with participating(tmp_path, store=store) as participation:
            membership = participation._node.membership
            await membership.join()
            assert (await store.read("/keepstep/job/nodes/")).items
            with monkeypatch.context() as patched:
                patched.setattr(participation._node.worker_group, "stop", stop)
                running = asyncio.create_task(membership.run())
                with pytest.raises(JobFailed, match="process 7 cannot be killed"):
                    await participation._leave(running)
            assert not (await store.read("/keepstep/job/nodes/")).items

    play(scenario())


def test_node_that_cannot_join_again_pauses_and_says_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd without space refuses writes at once: a node wrote thousands of lines."""
    pauses: list[float] = []
    monkeypatch.setattr("keepstep.elastic.agent.participation._REJOIN_S", 1e-4)
    sleep = asyncio.sleep

    async def noted(pause_s: float) -> None:
        pauses.append(pause_s)
        await sleep(0)

    async def scenario() -> None:
        async with participating(tmp_path) as participation:
            lost = Lost(participation, View(), is_away=True)
            monkeypatch.setattr("keepstep.elastic.agent.participation.asyncio.sleep", noted)
            running = asyncio.ensure_future(participation.run())
            while lost.joined < 20:
                await sleep(0)
            running.cancel()
            await asyncio.wait({running})
            waited = [pause for pause in pauses if pause > 0]
            assert len(waited) >= lost.joined - 2
            assert (waited[0], waited[-1]) == (1e-4, 1.0)

    play(scenario())
    assert [m for m in caplog.messages if "again" in m] == [
        "node a was declared gone; its workers stop, joining again",
        "no answer; trying again",
    ]


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


def test_outage_that_has_lasted_as_long_as_the_job_waits_is_not_waited_for_again(
    tmp_path: Path,
) -> None:
    """Agents ended after several times the time that is documented."""

    async def scenario() -> None:
        async with participating(tmp_path) as participation:
            lost = Lost(participation, View(), is_away=True)
            limit_s = participation._config.policy.quorum_timeout_s
            participation._node.membership.answered_s = time.monotonic() - limit_s - 1
            with pytest.raises(StoreUnavailable, match="no answer"):
                await participation.run()
            assert lost.joined == 2

    play(scenario())


def test_outage_in_which_a_node_stands_still_is_described_with_what_ends_it() -> None:
    """Who was left said for minutes that training goes on, without a step."""
    failure = Failure(FailureKind.PEER, "a collective of rank 1 broke\nTraceback", 1.0, 1)
    assert describe_outage("", failure, 600.0) == ""
    goes_on = describe_outage("no answer from etcd", None, 600.0)
    assert "training goes on" in goes_on
    stands = describe_outage("no answer from etcd", failure, 600.0)
    assert stands.startswith("training stands still: a peer is lost, and")
    assert "running that node's line again, within 600 s" in stands
