"""Claims about a membership whose coordinator leaves it in doubt about writes: applied or not, nobody has said."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from keepstep.elastic.agent.membership import Membership
from keepstep.elastic.errors import StoreUnavailable
from keepstep.elastic.rendezvous.actions import Publish
from keepstep.elastic.rendezvous.decide import RendezvousPolicy
from keepstep.elastic.rendezvous.records import NodePhase, NodeRecord
from keepstep.elastic.rendezvous.view import Keys, from_listing
from keepstep.elastic.store.contract import Committed, Created, Delete, Modified, Put
from keepstep.elastic.store.memory import MemoryStore

RECORD = NodeRecord(
    node="a",
    host="h",
    nproc=2,
    agent="h:1",
    server="tcp:h:2",
    store_port=5,
    lease=0,
    digest="d",
    warm=True,
)
POLICY = RendezvousPolicy(
    min_nodes=1, max_nodes=1, last_call_s=0.0, quorum_timeout_s=60.0, max_restarts=2
)


class Doubtful(MemoryStore):
    """Does not confirm every other write, by a seed: half of those it has applied, half of them not."""

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

        async with asyncio.timeout(30):
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
