"""Kills nodes at any instant of copying, sealing, exchanging, committing: a whole step resumes.

Real servers, real SIGKILL, and the leader's own decision (`elastic.rendezvous.rank_assignment`) on
what the survivors report to hold. KEEPSTEP_SCHEDULES sets how many schedules are played.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.messages import FinishProtection
from keepstep.elastic.rendezvous.rank_assignment import newest_restorable, with_shard_rebuilds
from keepstep.elastic.rendezvous.records import Generation, Member, NodeRecord, SnapshotCommit
from keepstep.elastic.rendezvous.view import JoinedNode, View
from tests.adaptive_timeouts import patient
from tests.integration.checkpoint.servers import Cluster
from tests.integration.checkpoint.test_protection import check, take

NODES = 4
RANKS_PER_NODE = 2
STEPS = 6
SCHEDULES = int(os.environ.get("KEEPSTEP_SCHEDULES", "40"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), NODES, RANKS_PER_NODE)
    yield cluster
    cluster.close()


def state(schedule: int, step: int) -> list[torch.Tensor]:
    """Return what every rank holds after a step."""
    generator = torch.Generator().manual_seed(schedule * 1000 + step)
    return [
        torch.randn(20_000 + 9_000 * rank, generator=generator)
        for rank in range(NODES * RANKS_PER_NODE)
    ]


class Training:
    """Steps that all nodes snapshot and commit, one after the other, until a node is gone."""

    def __init__(self, cluster: Cluster, schedule: int) -> None:
        self.cluster = cluster
        self.schedule = schedule
        self.completed = 0
        self.committed = 0
        self.under_way = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        with (
            contextlib.suppress(SnapshotUnavailable, OSError, AssertionError),
            ThreadPoolExecutor(NODES) as pool,
        ):
            for step in range(1, STEPS + 1):
                shards = state(self.schedule, step)
                for done in [
                    pool.submit(take, self.cluster, step, n, shards) for n in range(NODES)
                ]:
                    done.result()
                self.completed = step
                self.cluster.commit(step, note=self.note_commit)
                self.under_way.set()

    def note_commit(self, step: int) -> None:
        self.committed = step


def view_after(
    cluster: Cluster, members: tuple[Member, ...], committed: int, parity: int
) -> tuple[View, Generation]:
    """Return what the coordinator holds once the survivors have drained."""
    generation = Generation(cluster.generation, members, "h", 1, "start", parity=parity)
    nodes = {}
    for position, server in enumerate(cluster.nodes):
        if server is None:
            continue
        holdings = server.ask(FinishProtection())
        sealed = [held.snapshot for held in holdings.sealed if len(held.ranks) == RANKS_PER_NODE]
        record = NodeRecord(
            f"n{position}", "h", RANKS_PER_NODE, "a", server.address, 1, 1, "d",
            sealed=tuple(sealed), protected=holdings.protected,
        )  # fmt: skip
        nodes[record.node] = JoinedNode(record, position + 1)
    snapshot = (
        SnapshotCommit(SnapshotId(cluster.generation, committed), members, parity)
        if committed
        else None
    )
    return View(nodes=nodes, generation=generation, snapshot=snapshot), generation


@pytest.mark.parametrize("schedule", range(SCHEDULES))
def test_survivors_of_a_kill_at_any_instant_resume_a_whole_step(
    cluster: Cluster, schedule: int
) -> None:
    chance = random.Random(schedule)
    parity = chance.choice([1, 1, 2])
    doomed = chance.sample(range(NODES), chance.randint(1, parity + (chance.random() < 0.15)))
    cluster.revive()
    cluster.begin(parity)
    addresses = [server.address for server in cluster.living]
    members = tuple(
        Member(f"n{n}", "h", RANKS_PER_NODE, n * RANKS_PER_NODE, "a", address)
        for n, address in enumerate(addresses)
    )
    training = Training(cluster, schedule)
    assert training.under_way.wait(patient(30))
    # The instant is what is drawn: nothing is waited for.
    threading.Event().wait(chance.uniform(0, 0.12))
    cluster.kill(*doomed)
    training.thread.join(patient(60))
    assert not training.thread.is_alive()
    view, generation = view_after(cluster, members, training.committed, parity)
    resume = newest_restorable(view, generation)
    if len(doomed) > parity:
        assert resume is None
        return
    assert resume is not None
    assert resume.snapshot.step >= max(training.committed, training.completed - 1)
    survivors = [member for n, member in enumerate(members) if n not in doomed]
    adopted = {
        adoption.rank for adoption in with_shard_rebuilds(resume, view, survivors).shard_rebuilds
    }
    assert adopted == {rank for n in doomed for rank in members[n].ranks}
    step = resume.snapshot.step
    check(cluster, step, cluster.rebuild(step, addresses), state(schedule, step))
