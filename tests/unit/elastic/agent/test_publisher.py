"""Claims about a member that leads while a manifest is written: over a store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.agent.membership import Membership
from keepstep.elastic.errors import JobFailed
from keepstep.elastic.rendezvous import publication
from keepstep.elastic.rendezvous.actions import Publish
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.records import (
    Failure,
    FailureKind,
    NodePhase,
    PersistedPart,
)
from keepstep.elastic.store.memory import MemoryStore
from tests.adaptive_timeouts import patient
from tests.unit.elastic.node_records import record_of

URL = "s3://b/run"
STEP_4 = SnapshotId(1, 4)


class Storage:
    """Takes a manifest once the test allows it, or refuses it; `asked` lists those begun."""

    def __init__(self) -> None:
        self.asked: list[Publish] = []
        self.is_asked = asyncio.Event()
        self.takes = asyncio.Event()
        self.refusal = ""
        self.cancelled = 0

    async def publish(self, action: Publish) -> None:
        self.asked.append(action)
        self.is_asked.set()
        try:
            await self.takes.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.refusal:
            raise JobFailed(self.refusal)


class Leader:
    """The only member of a job, which has stored its part of step 4."""

    def __init__(self, membership: Membership, changed: asyncio.Event) -> None:
        self.membership = membership
        self._changed = changed

    async def until(self, is_reached: Callable[[], Any]) -> None:
        async with asyncio.timeout(patient(20)):
            while not is_reached():
                self._changed.clear()
                await self._changed.wait()

    async def fail(self) -> None:
        """Have a worker fail, and close and drain the generation."""
        failure = Failure(FailureKind.WORKER, "rank 0 died", 1.0)
        self.membership.update(failure=failure)
        await self.until(lambda: self.membership.view.closing)
        self.membership.update(phase=NodePhase.DRAINED)


@asynccontextmanager
async def leading(storage: Storage) -> AsyncIterator[Leader]:
    changed = asyncio.Event()
    policy = RendezvousPolicy(
        min_nodes=1, max_nodes=1, last_call_s=0.0, quorum_timeout_s=60.0, max_restarts=2
    )
    record = record_of(nproc=1, lease=0, warm=True)
    member = Membership(MemoryStore(), "job", policy, record, 30.0, changed.set, storage.publish)
    await member.join()
    running = asyncio.create_task(member.run())
    try:
        leader = Leader(member, changed)
        await leader.until(lambda: member.view.generation)
        member.update(
            phase=NodePhase.RUNNING, generation=1, step=4, sealed=(STEP_4,), protected=(STEP_4,),
            checkpoint_url=URL, checkpoint_every=2, times={"restored": 1.0},
        )  # fmt: skip
        await leader.until(lambda: member.view.persist)
        revision = member.view.revisions["persist"]
        part = PersistedPart(step=4, generation=1, part={"entry": []}, attempt=revision)
        member.update(persisted=part)
        await storage.is_asked.wait()
        yield leader
    finally:
        running.cancel()
        await asyncio.wait([running])


def play(scenario: Callable[[Storage, Leader], Any]) -> Storage:
    async def run() -> Storage:
        storage = Storage()
        async with leading(storage) as leader:
            await scenario(storage, leader)
        return storage

    return asyncio.run(run())


def test_a_checkpoint_is_recorded_once_storage_has_taken_its_manifest() -> None:
    async def scenario(storage: Storage, leader: Leader) -> None:
        assert leader.membership.view.checkpoint is None
        storage.takes.set()
        await leader.until(lambda: leader.membership.view.checkpoint)
        assert leader.membership.view.persist is None
        assert leader.membership.view.store_failure is None

    assert len(play(scenario).asked) == 1


def test_a_refused_manifest_is_recorded_as_a_failure_to_store() -> None:
    async def scenario(storage: Storage, leader: Leader) -> None:
        storage.refusal = "no space"
        storage.takes.set()
        await leader.until(lambda: leader.membership.view.store_failure)
        assert leader.membership.view.store_failure is not None
        assert leader.membership.view.store_failure.reason == "no space"
        assert leader.membership.view.checkpoint is None

    play(scenario)


def test_a_generation_that_failed_is_closed_while_storage_hangs_and_the_checkpoint_counts() -> None:
    async def scenario(storage: Storage, leader: Leader) -> None:
        await leader.fail()
        assert leader.membership.view.generation_number == 1
        storage.takes.set()
        await leader.until(lambda: leader.membership.view.generation_number == 2)
        stored = leader.membership.view.checkpoint
        assert stored is not None
        assert stored.step == 4

    assert len(play(scenario).asked) == 1


def test_the_next_generation_opens_though_storage_never_takes_the_manifest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publication, "OPENING_WAITS_S", 0.05)

    async def scenario(storage: Storage, leader: Leader) -> None:
        await leader.fail()
        await leader.until(lambda: leader.membership.view.generation_number == 2)
        failed = leader.membership.view.store_failure
        assert failed is not None
        assert "had not taken the manifest" in failed.reason

    storage = play(scenario)
    assert (len(storage.asked), storage.cancelled) == (1, 1)


def test_a_member_that_ends_waits_for_no_manifest() -> None:
    async def scenario(storage: Storage, leader: Leader) -> None:
        assert storage.cancelled == 0

    assert play(scenario).cancelled == 1
