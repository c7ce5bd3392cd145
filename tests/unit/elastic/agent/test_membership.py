"""Claims about memberships: unconfirmed writes, concurrent joins and leaves, stale leaders."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.agent.membership import Membership
from keepstep.elastic.errors import (
    InvariantViolated,
    LeaseLost,
    StoreUnavailable,
    UsageError,
)
from keepstep.elastic.rendezvous.actions import Open, Publish
from keepstep.elastic.rendezvous.decide import decide
from keepstep.elastic.rendezvous.decision import Decision, LeaderState
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.rank_assignment import assign_ranks
from keepstep.elastic.rendezvous.records import (
    CommitAnnouncement,
    Generation,
    NodePhase,
    NodeRecord,
    NodeReport,
    Result,
)
from keepstep.elastic.rendezvous.view import Keys, from_listing
from keepstep.elastic.store.contract import (
    Change,
    Committed,
    Created,
    Delete,
    Listing,
    Modified,
    Put,
    Reset,
)
from keepstep.elastic.store.memory import MemoryStore
from tests.adaptive_timeouts import patient
from tests.unit.elastic.node_records import record_of
from tests.unit.elastic.rendezvous.test_join_protocol import held_view

RECORD = record_of(lease=0, warm=True)
POLICY = RendezvousPolicy(
    min_nodes=1, max_nodes=1, last_call_s=0.0, quorum_timeout_s=60.0, max_restarts=2
)


class Doubtful(MemoryStore):
    """Leaves half of the writes unconfirmed, by a seed: half of those are applied, half are not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)
        self.doubts = 0

    async def commit(
        self, conditions: Sequence[Modified | Created], operations: Sequence[Put | Delete]
    ) -> Committed:
        kind = self._chance.choice(["sure", "sure", "applied", "lost"])
        if kind == "lost":
            self.doubts += 1
            raise StoreUnavailable("it did not confirm a write", unknown=True)
        done = await super().commit(conditions, operations)
        if kind == "applied":
            self.doubts += 1
            raise StoreUnavailable("it did not confirm a write", unknown=True)
        return done


@pytest.mark.parametrize("seed", range(30))
def test_member_joins_leads_and_finishes_though_writes_are_not_confirmed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep.elastic.agent.membership._UNKNOWN_WRITE_WAIT_S", 0.01)

    async def publish(_: Publish) -> None:
        raise AssertionError("nothing is stored here")

    async def scenario() -> None:
        store, changed = Doubtful(seed), asyncio.Event()
        membership = Membership(store, "job", POLICY, RECORD, 30.0, changed.set, publish)
        await membership.join()
        running = asyncio.create_task(membership.run())

        async def until(field: str) -> None:
            while getattr(membership.view, field) is None:
                changed.clear()
                await changed.wait()

        async with asyncio.timeout(patient(30)):
            await until("generation")
            membership.update(phase=NodePhase.RUNNING, generation=1, step=3)
            membership.update(phase=NodePhase.DONE)
            await until("result")
        running.cancel()
        await asyncio.wait([running])
        assert membership.view.result is not None
        assert membership.view.result.succeeded
        assert membership.view.generation_number == 1
        view = from_listing(Keys("job"), await store.read(Keys("job").prefix))
        assert view.nodes["a"].record == replace(membership.record, phase=NodePhase.DONE)
        await membership.leave()

    asyncio.run(scenario())


async def publish_nothing(_: Publish) -> None:
    raise AssertionError("nothing is stored here")


def membership_of(store: MemoryStore, record: NodeRecord) -> Membership:
    return Membership(store, "job", POLICY, record, 30.0, lambda: None, publish_nothing)


async def show_all(store: MemoryStore, member: Membership) -> None:
    """Show a member all of the job's keys, as a leader sees them."""
    member._take_over(from_listing(Keys("job"), await store.read(Keys("job").prefix)))


OTHER = replace(RECORD, node="b", agent="h:3")


def test_members_that_join_a_finished_job_at_the_same_time_do_not_remove_each_other() -> None:
    async def scenario() -> None:
        store = Interleaved()
        await store.commit((), (Put(Keys("job").single("result"), Result(True, "").encode()),))
        members = [membership_of(store, record) for record in (RECORD, OTHER)]
        secrets = await asyncio.gather(*(member.join() for member in members))
        assert secrets[0] == secrets[1]
        view = from_listing(Keys("job"), await store.read(Keys("job").prefix))
        assert set(view.nodes) == {"a", "b"}
        assert view.result is None

    asyncio.run(scenario())


def test_record_of_a_member_that_was_declared_gone_is_not_written() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        member = membership_of(store, RECORD)
        await member.join()
        await store.revoke(member.record.lease)
        with pytest.raises(LeaseLost):
            await member._write_record(replace(member.record, step=3))
        assert not (await store.read(Keys("job").node())).items

    asyncio.run(scenario())


def test_member_that_joins_while_the_last_one_leaves_stays_or_begins_again() -> None:
    async def scenario() -> None:
        store = Interleaved()
        leaving, joining = membership_of(store, RECORD), membership_of(store, OTHER)
        await leaving.join()
        secret, _ = await asyncio.gather(joining.join(), leaving.leave())
        view = from_listing(Keys("job"), await store.read(Keys("job").prefix))
        assert set(view.nodes) == {"b"}
        assert view.secret == secret.hex().encode()

    asyncio.run(scenario())


def test_leader_whose_view_is_out_of_date_writes_nothing() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        member = membership_of(store, RECORD)
        await member.join()
        await show_all(store, member)
        generation = Generation(
            1, assign_ranks((), [replace(RECORD, lease=member.record.lease)], 1), "h", 5, "start"
        )
        key = Keys("job").single("generation")
        await store.commit((), (Put(key, replace(generation, reason="another").encode()),))
        before = await store.read(key)
        async with asyncio.timeout(patient(10)):
            await member._perform(member.view, Open(generation))
        assert await store.read(key) == before

    asyncio.run(scenario())


def test_leader_waits_until_its_view_shows_what_it_wrote() -> None:
    async def scenario() -> None:
        store, keys = MemoryStore(), Keys("job")
        member = membership_of(store, RECORD)
        await member.join()
        await show_all(store, member)
        generation = Generation(1, assign_ranks((), [member.record], 1), "h", 5, "start")
        perform = asyncio.create_task(member._perform(member.view, Open(generation)))
        async with asyncio.timeout(patient(30)):
            async with aclosing(
                store.watch(keys.single("generation"), member.view.revision)
            ) as written:
                await anext(written)
            assert not perform.done()
            await show_all(store, member)
            await perform

    asyncio.run(scenario())


def test_action_that_breaks_an_invariant_ends_its_leader_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown = replace(RECORD, node="c")
    generation = Generation(1, assign_ranks((), [unknown], 1), "h", 5, "start")
    decision = Decision(LeaderState(), Open(generation))
    monkeypatch.setattr("keepstep.elastic.agent.membership.decide", lambda *_: decision)

    async def scenario() -> None:
        store = MemoryStore()
        member = membership_of(store, RECORD)
        await member.join()
        with pytest.raises(InvariantViolated, match="members are present"):
            async with asyncio.timeout(patient(10)):
                await member.run()
        view = from_listing(Keys("job"), await store.read(Keys("job").prefix))
        assert view.leader is not None
        assert view.generation is None

    asyncio.run(scenario())


class Interleaved(MemoryStore):
    """Lets other tasks go on before each call, as a coordinator over a network does."""

    async def read(self, prefix: str, limit: int = 0) -> Listing:
        await asyncio.sleep(0)
        return await super().read(prefix, limit)

    async def commit(
        self, conditions: Sequence[Modified | Created], operations: Sequence[Put | Delete]
    ) -> Committed:
        await asyncio.sleep(0)
        return await super().commit(conditions, operations)


class Away(MemoryStore):
    """Answers nothing while it is away."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.refused = asyncio.Event()
        self.renewal = asyncio.Event()

    def _answer(self) -> None:
        if self.is_away:
            self.refused.set()
            raise StoreUnavailable("no answer")

    async def read(self, prefix: str, limit: int = 0) -> Listing:
        self._answer()
        return await super().read(prefix, limit)

    async def commit(
        self, conditions: Sequence[Modified | Created], operations: Sequence[Put | Delete]
    ) -> Committed:
        self._answer()
        return await super().commit(conditions, operations)

    async def renew(self, lease: int) -> float:
        self.renewal.set()
        self._answer()
        return await super().renew(lease)


async def outlast(store: Away, membership: Membership) -> asyncio.Task[None]:
    """Run a membership whose lease would have ended; return its task when it was refused."""
    await membership.join()
    running = asyncio.create_task(membership.run())
    store.is_away = True
    membership.update(step=7)
    async with asyncio.timeout(patient(30)):
        while time.monotonic() < membership._lease.until_s:
            store.refused.clear()
            await store.refused.wait()
    return running


def test_member_outlasts_a_coordinator_that_is_away_for_longer_than_its_lease() -> None:
    async def scenario() -> None:
        store = Away()
        membership = Membership(store, "job", POLICY, RECORD, 0.1, lambda: None, publish_nothing)
        running = await outlast(store, membership)
        assert not running.done()
        store.is_away = False
        key = Keys("job").node("a")
        async with asyncio.timeout(patient(30)):
            async for changes in store.watch(key, 0):
                assert not isinstance(changes, Reset)
                value = changes[-1].value
                if value is not None and NodeRecord.decode(value.value).step == 7:
                    break
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(scenario())


class Granting(MemoryStore):
    """Notes when it is asked for a lease, or to renew it: from then on it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts_from_s: list[float] = []

    async def grant(self, ttl_s: float) -> int:
        self.counts_from_s.append(time.monotonic())
        return await super().grant(ttl_s)

    async def renew(self, lease: int) -> float:
        self.counts_from_s.append(time.monotonic())
        return await super().renew(lease)


def test_member_never_thinks_that_its_lease_lasts_longer_than_the_coordinator_does() -> None:
    async def scenario() -> None:
        store = Granting()
        membership = Membership(store, "job", POLICY, RECORD, 0.5, lambda: None, publish_nothing)
        await membership.join()
        assert membership._lease.until_s <= store.counts_from_s[-1] + 0.5
        granted = membership._lease
        running = asyncio.create_task(membership.run())
        async with asyncio.timeout(patient(30)):
            while membership._lease is granted:
                await asyncio.wait([running], timeout=0.01)
        assert membership._lease.until_s <= store.counts_from_s[-1] + 0.5
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(scenario())


def test_member_gives_up_when_the_coordinator_is_away_for_longer_than_the_job_waits() -> None:
    async def scenario() -> None:
        store, policy = Away(), replace(POLICY, quorum_timeout_s=0.3)
        membership = Membership(store, "job", policy, RECORD, 0.1, lambda: None, publish_nothing)
        running = await outlast(store, membership)
        with pytest.raises(LeaseLost, match="could not renew"):
            await running

    asyncio.run(scenario())


def test_member_tells_once_of_each_outage_and_once_of_its_end() -> None:
    seen: list[str] = []

    async def scenario() -> None:
        store = Away()

        def note() -> None:
            found = "away" if membership.outage else "back"
            if seen[-1:] != [found]:
                seen.append(found)

        membership = Membership(store, "job", POLICY, RECORD, 0.1, note, publish_nothing)
        await membership.join()
        running = asyncio.create_task(membership.run())

        async def renewal() -> None:
            store.renewal.clear()
            await store.renewal.wait()

        async with asyncio.timeout(patient(10)):
            for number in range(4):
                note()
                store.is_away = number % 2 == 0
                while bool(membership.outage) != store.is_away:
                    await renewal()
                for _ in range(3):
                    await renewal()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(scenario())
    assert seen == ["back", "away", "back", "away", "back"]


def test_member_tells_of_no_outage_that_its_lease_outlasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keepstep.elastic.agent.membership._RENEWALS_PER_TTL", 1000)

    async def scenario() -> None:
        store = Away()
        membership = Membership(store, "job", POLICY, RECORD, 60.0, lambda: None, publish_nothing)
        await membership.join()
        running = asyncio.create_task(membership.run())
        async with asyncio.timeout(patient(10)):
            store.is_away = True
            await store.refused.wait()
            for _ in range(3):
                store.renewal.clear()
                await store.renewal.wait()
        assert membership.outage == ""
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(scenario())


def test_state_is_carried_into_the_next_membership_of_the_same_job_only() -> None:
    snapshot = SnapshotId(0, 4)
    held = replace(RECORD, phase=NodePhase.DRAINED, sealed=(snapshot,), protected=(snapshot,))

    def joining(store: MemoryStore, secret: bytes) -> Membership:
        return Membership(store, "job", POLICY, held, 30.0, lambda: None, publish_nothing, secret)

    async def scenario() -> None:
        store = MemoryStore()
        other = membership_of(store, OTHER)
        secret = await other.join()
        member = joining(store, secret)
        assert await member.join() == secret
        assert member.record.sealed == (snapshot,)
        another = MemoryStore()
        member = joining(another, secret)
        assert await member.join() != secret
        assert member.record.sealed == ()

    asyncio.run(scenario())


def test_job_that_the_coordinator_has_lost_is_restored_before_others_begin_it_again() -> None:
    held = held_view()

    async def scenario() -> None:
        empty = MemoryStore()
        lost = Membership(
            empty, "job", POLICY, RECORD, 30.0, lambda: None, publish_nothing, held=held
        )
        await lost.restore_job()
        newcomer = membership_of(empty, OTHER)
        assert (await newcomer.join()).hex().encode() == held.secret
        assert newcomer.view.generation == held.generation
        # Once it is there it is left alone.
        before = newcomer.view.revision
        await lost.restore_job()
        assert (await empty.read("/", limit=1)).revision == before

    asyncio.run(scenario())


class Watched(MemoryStore):
    """Counts the changes that its watchers receive, by the first part of their keys."""

    def __init__(self) -> None:
        super().__init__()
        self.notified: Counter[str] = Counter()

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[tuple[Change, ...] | Reset]:
        async for item in super().watch(prefix, after):
            assert not isinstance(item, Reset)
            sections = (change.key.removeprefix(Keys("job").prefix) for change in item)
            self.notified.update(section.partition("/")[0] for section in sections)
            yield item


class Job:
    """Members of one job; the first one leads."""

    def __init__(self, store: MemoryStore, policy: RendezvousPolicy) -> None:
        self.members: list[Membership] = []
        self._store = store
        self._policy = policy
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, node: str) -> None:
        record = record_of(node, lease=0, warm=True)
        member = Membership(
            self._store, "job", self._policy, record, 30.0, self._changed.set, publish_nothing
        )
        await member.join()
        self.members.append(member)
        self._tasks.append(asyncio.create_task(member.run()))
        await self.until(lambda: self.members[0].leads)

    async def until(self, is_reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(patient(10)):
            while not is_reached():
                self._changed.clear()
                await self._changed.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def running(store: MemoryStore, nodes: Sequence[str]) -> AsyncIterator[Job]:
    """Run members that join in this order, until all have seen the first generation."""
    job = Job(store, replace(POLICY, min_nodes=len(nodes), max_nodes=len(nodes)))
    try:
        for node in nodes:
            await job.start(node)
        await job.until(lambda: all(m.view.generation_number == 1 for m in job.members))
        yield job
    finally:
        await job.close()


def test_followers_receive_nothing_of_other_nodes_records() -> None:
    async def scenario() -> None:
        store = Watched()
        async with running(store, "abc") as job:
            members = job.members
            before = store.notified["nodes"]
            for step in range(1, 11):
                for member in members:
                    member.update(generation=1, phase=NodePhase.RUNNING, step=step)
                await job.until(
                    lambda step=step: all(  # type: ignore[misc]
                        joined.record.step == step for joined in members[0].view.nodes.values()
                    )
                )
            assert store.notified["nodes"] - before == 30
            assert [len(member.view.nodes) for member in members] == [3, 0, 0]

    asyncio.run(scenario())


def test_last_member_to_leave_removes_the_jobs_keys_and_no_other_does() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        first, last = (membership_of(store, record_of(node, lease=0, warm=True)) for node in "ab")
        for member in (first, last):
            await member.join()
        kept = {item.key for item in (await store.read("")).items} - {Keys("job").node("a")}
        await first.leave()
        assert {item.key for item in (await store.read("")).items} == kept
        await last.leave()
        assert not (await store.read("")).items

    asyncio.run(scenario())


@pytest.mark.parametrize("agent", ["A:1", "z:1"])
def test_living_agent_of_the_same_name_keeps_its_lease(
    agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lives(_: NodeRecord) -> bool:
        return True

    monkeypatch.setattr("keepstep.elastic.agent.membership.probe", lives)

    async def scenario() -> None:
        store = MemoryStore()
        other = membership_of(store, replace(RECORD, agent=agent))
        await other.join()
        with pytest.raises(UsageError, match="choose another --node name"):
            await membership_of(store, RECORD)._await_predecessor(other.record, 0.0)
        assert await store.renew(other.record.lease) > 0.0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("agent", "lives", "stays"),
    [("h:9", False, False), ("h:9", None, True), (RECORD.agent, None, False)],
)
def test_lease_of_a_predecessor_is_revoked_only_if_its_agent_is_certainly_gone(
    agent: str, lives: bool | None, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probed(_: NodeRecord) -> bool | None:
        return lives

    monkeypatch.setattr("keepstep.elastic.agent.membership.probe", probed)
    monkeypatch.setattr("keepstep.elastic.agent.membership._PREDECESSOR_POLL_S", 0.0)

    async def scenario() -> None:
        store = MemoryStore()
        other = membership_of(store, replace(RECORD, agent=agent))
        await other.join()
        await membership_of(store, RECORD)._await_predecessor(other.record, 0.0)
        assert bool((await store.read(Keys("job").node("a"))).items) is stays

    asyncio.run(scenario())


def test_record_that_cannot_be_read_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def logged() -> list[str]:
        return [text.split()[0] for text in caplog.messages if "counts as absent" in text]

    async def scenario() -> None:
        store = MemoryStore()
        async with running(store, "ab") as job:
            for count, name in enumerate("xy", 1):
                await store.commit((), (Put(Keys("job").node(name), b"no record"),))
                await job.until(lambda count=count: len(logged()) >= count)  # type: ignore[misc]

    with caplog.at_level("WARNING", logger="keepstep"):
        asyncio.run(scenario())
    assert logged() == ["nodes/x", "nodes/y"]


def test_follower_forgets_members_that_its_generation_does_not_list() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        async with running(store, "ab") as job:
            _, follower = job.members
            listed = follower.view.chunks
            (members,) = listed.values()
            follower.view = replace(follower.view, chunks={**listed, "of generation 0": members})
            item = (await store.read(Keys("job").placement(1))).items[0]
            assert await follower._fold((Change(item.key, item, follower.view.revision + 1),))
            assert follower.view.chunks == listed

    asyncio.run(scenario())


def test_leader_logs_what_it_waits_for_whenever_that_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def logged() -> list[str]:
        return [text for text in caplog.messages if text.startswith("waiting for nodes")]

    async def scenario() -> None:
        store = MemoryStore()
        job = Job(store, replace(POLICY, min_nodes=3, max_nodes=3))

        async def until_logged(times: int) -> None:
            async with asyncio.timeout(patient(10)):
                while len(logged()) < times:  # noqa: ASYNC110 - it is logged after the change
                    await asyncio.sleep(0.001)

        try:
            for times, node in enumerate("ab", 1):
                await job.start(node)
                await until_logged(times)
            await store.revoke(job.members[1].record.lease)
            await until_logged(3)
        finally:
            await job.close()

    with caplog.at_level("INFO", logger="keepstep"):
        asyncio.run(scenario())
    here = [text.split(": ")[1].split()[0] for text in logged()]
    assert here == ["1", "2", "1"]


def test_leader_logs_what_it_waits_for_once_though_other_decisions_come_between(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as commits, which come at every snapshot while nodes warm up."""
    soon = ["1 node joins soon", "2 nodes join soon"]
    decided, is_exhausted = iter([soon[0], "", soon[0], "", soon[1], "", soon[1]]), asyncio.Event()

    def decide(*_: object) -> Decision:
        message = next(decided, None)
        if message is None:
            is_exhausted.set()
            return Decision(LeaderState())
        return Decision(LeaderState(), again_at_s=time.monotonic(), message=message)

    async def scenario() -> None:
        member = membership_of(MemoryStore(), RECORD)
        await member.join()
        leading = asyncio.create_task(member.run())
        async with asyncio.timeout(patient(10)):
            await is_exhausted.wait()
        leading.cancel()
        await asyncio.wait([leading])

    monkeypatch.setattr("keepstep.elastic.agent.membership.decide", decide)
    with caplog.at_level("INFO", logger="keepstep"):
        asyncio.run(scenario())
    assert [text for text in caplog.messages if text in soon] == soon


def test_member_that_has_lost_the_lead_decides_no_more() -> None:
    async def scenario() -> None:
        async with running(MemoryStore(), "ab") as job:
            leader = job.members[0]
            assert leader.leads
            leader.view = replace(leader.view, leadership=None)
            assert not leader.leads

    asyncio.run(scenario())


def test_follower_that_takes_the_lead_reads_all_nodes_and_decides() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        async with running(store, "abc") as job:
            members = job.members
            await store.revoke(members[0].record.lease)
            others = members[1:]
            await job.until(lambda: any(member.leads for member in others))
            await job.until(lambda: all(member.view.is_closing for member in others))
            assert [member.leads for member in others].count(True) == 1
            (leader,) = (member for member in others if member.leads)
            assert set(leader.view.nodes) == {"b", "c"}
            assert leader.view.closing is not None
            assert leader.view.closing.reason == "lost a"

    asyncio.run(scenario())


def test_follower_that_missed_a_generation_whose_members_are_removed_reads_again() -> None:
    async def scenario() -> None:
        store = Watched()
        keys = Keys("job")
        async with running(store, "ab") as job:
            leader, follower = job.members
            listing = await store.read(keys.chunk())
            follower.view = replace(follower.view, chunks={})
            await store.commit((), tuple(Delete(item.key) for item in listing.items))
            item = (await store.read(keys.placement(1))).items[0]
            change = Change(item.key, item, follower.view.revision + 1)
            assert not await follower._fold((change,))
            await store.commit((), tuple(Put(item.key, item.value) for item in listing.items))
            view = await follower._reader.followed(follower.view)
            assert view.generation == leader.view.generation

    asyncio.run(scenario())


def test_leader_decides_nothing_about_snapshots_that_only_their_record_is_left_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It decided after each step, to write nothing; the coordinator learns of one in 5 s."""
    decisions = 0

    def counted(*arguments: Any) -> Decision:
        nonlocal decisions
        decisions += 1
        return decide(*arguments)

    monkeypatch.setattr("keepstep.elastic.agent.membership.decide", counted)

    async def scenario() -> None:
        store, changed = MemoryStore(), asyncio.Event()
        announced: list[CommitAnnouncement] = []
        membership = Membership(
            store, "job", POLICY, RECORD, 30.0, changed.set, publish_nothing, None, announced.append
        )
        await membership.join()
        running = asyncio.create_task(membership.run())

        async def until(condition: Callable[[], bool]) -> None:
            while not condition():  # noqa: ASYNC110 - conditions of any kind
                await asyncio.sleep(0)

        def report(step: int) -> None:
            membership.receive_report(
                NodeReport("a", membership.record.lease, 1, RECORD.server, step, (at(step),))
            )

        def at(step: int) -> SnapshotId:
            return SnapshotId(1, step)

        def committed() -> SnapshotId | None:
            commit = membership.view.snapshot
            return None if commit is None else commit.snapshot

        async with asyncio.timeout(patient(30)):
            await until(lambda: membership.view.generation is not None)
            membership.update(phase=NodePhase.RUNNING, generation=1)
            await until(lambda: membership.view.nodes["a"].record.phase is NodePhase.RUNNING)
            report(1)
            await until(lambda: committed() == at(1))
            report(2)
            await until(lambda: membership._decides_at_s is not None)
            before = decisions
            for step in range(3, 12):
                report(step)
                for _ in range(20):
                    await asyncio.sleep(0)
            assert [found.snapshot for found in announced] == [at(step) for step in range(1, 12)]
            assert decisions == before
            assert committed() == at(1)
            # What a node's record says is decided upon at once.
            membership.update(finishing=True)
            await until(lambda: committed() == at(11))
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(scenario())
