"""The rendezvous under invented disasters: seeded schedules of joins, crashes, failures, departures and stale leaders.

The real `decide` runs on every node, on views that may be old; actions take effect only under the conditions that the shell gives them.
What the agents do in between is played by `Simulation`. A failing seed belongs into the list below as a regression test.
"""

import random
from dataclasses import replace

import pytest

from elastic.records import Generation, NodeRecord, Phase, SnapshotId, Trouble
from elastic.rendezvous import Abandon, Close, Commit, Deliberation, Finish, Open, Policy, Remember, decide
from elastic.view import Joined, View

POLICY = Policy(min_nodes=1, max_nodes=3, last_call_s=2.0, quorum_timeout_s=1e9, max_restarts=10**9)


class Simulation:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.view = View(revision=1)
        self.old_views = [self.view]
        self.deliberations: dict[str, Deliberation] = {}
        self.names = 0
        self.memory: dict[str, set[SnapshotId]] = {}
        self.opened: list[Generation] = []

    def write(self, **changes: object) -> None:
        revision = self.view.revision + 1
        for name in {"generation", "snapshot"} & changes.keys():
            changes[f"{name}_revision"] = revision if changes[name] is not None else 0
        self.view = replace(self.view, revision=revision, **changes)  # type: ignore[arg-type]
        self.old_views = [*self.old_views[-5:], self.view]

    def write_node(self, record: NodeRecord) -> None:
        joined = self.view.nodes[record.node]
        self.write(nodes={**self.view.nodes, record.node: Joined(record, joined.created)})

    def join(self) -> None:
        self.names += 1
        name = f"n{self.names}"
        record = NodeRecord(name, "h", 2, "h:1", "tcp:h:2", 5, self.names, "d", warm=True)
        self.memory[name] = set()
        self.write(nodes={**self.view.nodes, name: Joined(record, self.view.revision + 1)})

    def crash(self, name: str) -> None:
        del self.memory[name]
        self.write(nodes={other: joined for other, joined in self.view.nodes.items() if other != name})

    def act_as_agent(self, name: str) -> None:
        """Take the one step that a node's agent would take now."""
        record, generation = self.view.nodes[name].record, self.view.generation
        if generation is None:
            return
        if generation.generation > record.generation:
            if generation.member(name) is not None:
                kept = {generation.resume.snapshot} if generation.resume else set()
                self.memory[name] &= kept
                self.write_node(
                    replace(
                        record,
                        generation=generation.generation,
                        phase=Phase.STARTING,
                        trouble=None,
                        sealed=tuple(sorted(self.memory[name])),
                        step=generation.resume.snapshot.step if generation.resume else 0,
                    )
                )
        elif self.view.is_closing or record.trouble:
            if record.generation == generation.generation and record.phase is not Phase.DRAINED:
                self.write_node(replace(record, phase=Phase.DRAINED, sealed=tuple(sorted(self.memory[name]))))
        elif record.phase is Phase.STARTING:
            self.write_node(replace(record, phase=Phase.RUNNING))
        elif record.phase is Phase.RUNNING:
            self.train(name, record, generation)

    def train(self, name: str, record: NodeRecord, generation: Generation) -> None:
        """Seal the next step, if the last one that this node sealed is committed: then all seal the same."""
        committed = self.view.snapshot
        begin = committed.snapshot.step if committed else 0
        snapshot = SnapshotId(generation.generation, begin + 1)
        if snapshot not in self.memory[name]:
            self.memory[name].add(snapshot)
            self.memory[name] -= {s for s in self.memory[name] if committed and s < committed.snapshot}
            self.write_node(replace(record, sealed=tuple(sorted(self.memory[name])), step=snapshot.step))

    def act_as_leader(self) -> None:
        view = self.random.choice(self.old_views) if self.random.random() < 0.3 else self.view
        name = view.leader
        if name is None:
            return
        decision = decide(POLICY, view, self.deliberations.get(name, Deliberation()), self.now_s, self.now_s)
        self.deliberations[name] = decision.deliberation
        holds = (
            name in self.view.nodes
            and self.view.nodes[name].created == view.nodes[name].created
            and self.view.generation_revision == view.generation_revision
            and self.view.snapshot_revision == view.snapshot_revision
        )
        if decision.action is None or not holds:
            return
        match decision.action:
            case Open(generation):
                self.check_open(generation)
                self.opened.append(generation)
                self.write(generation=generation, closing=None, persist=None, snapshot=generation.resume)
            case Close(closing):
                self.write(closing=closing)
            case Commit(commit):
                for holder in commit.holders:
                    assert holder.node not in self.memory or commit.snapshot in self.memory[holder.node]
                self.write(snapshot=commit)
            case Remember(history):
                self.write(history=history)
            case Finish() | Abandon():
                raise AssertionError(f"nothing ends this job: {decision.action}")

    def check_open(self, generation: Generation) -> None:
        assert generation.generation == self.view.number + 1
        assert POLICY.min_nodes <= len(generation.members) <= POLICY.max_nodes
        assert len({member.node for member in generation.members}) == len(generation.members)
        ranks = [rank for m in generation.members for rank in range(m.first_rank, m.first_rank + m.nproc)]
        assert ranks == list(range(generation.world_size))
        old = self.view.generation
        if old is not None:
            for member in old.members:
                if member.node in self.view.nodes:
                    record = self.view.nodes[member.node].record
                    assert record.generation == old.generation
                    assert record.phase is Phase.DRAINED
        if generation.resume is not None:
            for holder in generation.resume.holders:
                # A holder may have crashed since the leader looked; what must not be is one that lives without its part.
                assert holder.node not in self.memory or generation.resume.snapshot in self.memory[holder.node]

    def disturb(self) -> None:
        present = list(self.view.nodes)
        kind = self.random.random()
        if kind < 0.4 and len(present) < 5:
            self.join()
        elif present and kind < 0.6:
            self.crash(self.random.choice(present))
        elif present and kind < 0.8:
            record = self.view.nodes[self.random.choice(present)].record
            if self.view.generation and record.generation == self.view.number and record.phase is not Phase.DRAINED:
                self.write_node(replace(record, trouble=Trouble("worker", "killed", self.now_s, 0)))
        elif present and kind < 0.9:
            self.write_node(replace(self.view.nodes[self.random.choice(present)].record, leaving=True))

    def tick(self, disturbance: float) -> None:
        self.now_s += self.random.random()
        if self.random.random() < disturbance:
            self.disturb()
        for name in self.random.sample(list(self.view.nodes), len(self.view.nodes)):
            if self.random.random() < 0.7:
                self.act_as_agent(name)
        self.act_as_leader()


@pytest.mark.parametrize("chunk", range(10))
def test_any_schedule_keeps_the_invariants_and_ends_in_a_running_generation(chunk: int) -> None:
    for seed in range(chunk * 60, (chunk + 1) * 60):
        simulation = Simulation(seed)
        for _ in range(60):
            simulation.tick(disturbance=0.25)
        simulation.join()
        for _ in range(120):
            simulation.tick(disturbance=0.0)
        generation = simulation.view.generation
        assert generation is not None, seed
        members = [simulation.view.nodes.get(member.node) for member in generation.members]
        assert all(joined and joined.record.phase is Phase.RUNNING for joined in members), seed
        assert not simulation.view.is_closing, seed
        assert simulation.view.snapshot is not None, seed
        assert simulation.view.snapshot.snapshot.generation == generation.generation, seed


def test_equal_seeds_give_equal_histories() -> None:
    def history(seed: int) -> list[Generation]:
        simulation = Simulation(seed)
        for _ in range(100):
            simulation.tick(disturbance=0.2)
        return simulation.opened

    assert history(7) == history(7)
    assert len(history(7)) > 2
