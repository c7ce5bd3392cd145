"""The rendezvous and the in-memory tier under invented disasters: seeded schedules of joins, crashes, partitions, departures, stale leaders.

The real `decide` runs on every node, on views that may be old; actions take effect only under the conditions that the shell gives them. Each
node's memory is kept by the real `keepstep.checkpoint.memory.snapshot_table`, its parity is pulled from peers as `keepstep.checkpoint.server.protection` does it, in any order
and with any delay. What the agents do in between is played by `Simulation`. A node that is cut off goes on for a while, its memory
still readable to those who know it. A failing seed belongs into the list below as a regression test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.memory import snapshot_table as retention
from keepstep.checkpoint.memory.snapshot_table import SnapshotId, SnapshotTable
from keepstep.elastic.rendezvous import decide as rendezvous
from keepstep.elastic.rendezvous import rank_assignment as succession
from keepstep.elastic.rendezvous.actions import (
    Action,
    CancelPersist,
    Close,
    Commit,
    Finish,
    Open,
    RecordRecovery,
)
from keepstep.elastic.rendezvous.decide import LeaderState, RendezvousPolicy, decide
from keepstep.elastic.rendezvous.records import (
    Failure,
    Generation,
    Member,
    NodePhase,
    NodeRecord,
    SnapshotCommit,
    group_of,
)
from keepstep.elastic.rendezvous.view import JoinedNode, View

PLENTY = 2**40
POLICIES = [
    RendezvousPolicy(1, 3, last_call_s=2.0, quorum_timeout_s=1e9, max_restarts=10**9),
    RendezvousPolicy(1, 4, last_call_s=2.0, quorum_timeout_s=1e9, max_restarts=10**9, parity=2),
    RendezvousPolicy(
        1, 5, last_call_s=2.0, quorum_timeout_s=1e9, max_restarts=10**9, parity=1, group_size=3
    ),
    RendezvousPolicy(1, 3, last_call_s=2.0, quorum_timeout_s=1e9, max_restarts=10**9, parity=0),
]


class BrokenRuleError(AssertionError):
    """An invariant does not hold."""


def must(holds: bool, rule: str) -> None:
    if not holds:
        raise BrokenRuleError(rule)


@dataclass
class Memory:
    """A node's snapshot server: buffers by number with what was last written there, and whose blocks its parity has."""

    snapshot_table: SnapshotTable = field(default_factory=SnapshotTable)
    buffers: dict[int, tuple[SnapshotId, int]] = field(default_factory=dict)
    pulled: dict[SnapshotId, set[str]] = field(default_factory=dict)
    workers: dict[int, SnapshotId] = field(default_factory=dict)

    def write(self, snapshot: SnapshotId, rank: int) -> None:
        """Have a rank copy and seal its part."""
        name = SnapshotId(snapshot.generation, snapshot.step)
        self.snapshot_table, held = retention.begin(self.snapshot_table, name, rank, 100, PLENTY)
        self.buffers[held.buffer] = (snapshot, rank)
        self.snapshot_table = retention.seal(self.snapshot_table, name, rank)

    def sealed(self, ranks: int) -> set[SnapshotId]:
        return {
            SnapshotId(s.generation, s.step)
            for s, done in self.snapshot_table.sealed().items()
            if len(done) == ranks
        }

    def is_intact(self, snapshot: SnapshotId, member: Member) -> bool:
        """Whether every shard is sealed, and its buffer still has what was written for it."""
        name = SnapshotId(snapshot.generation, snapshot.step)
        held = [self.snapshot_table.shards.get((name, rank)) for rank in member.ranks]
        return all(
            shard is not None and shard.sealed and self.buffers[shard.buffer] == (snapshot, rank)
            for shard, rank in zip(held, member.ranks, strict=True)
        )


class Simulation:
    def __init__(self, seed: int, policy: RendezvousPolicy | None = None) -> None:
        self.random = random.Random(seed)
        self.policy = policy or POLICIES[seed % len(POLICIES)]
        self.now_s = 0.0
        self.view = View(revision=1)
        self.old_views = [self.view]
        self.leader_states: dict[str, LeaderState] = {}
        self.names = 0
        self.memory: dict[str, Memory] = {}
        self.cut_off: set[str] = set()
        self.opened: list[Generation] = []
        self.commits: dict[SnapshotId, SnapshotCommit] = {}

    def write(self, **changes: object) -> None:
        revision = self.view.revision + 1
        for name in {"generation", "snapshot"} & changes.keys():
            changes[f"{name}_revision"] = revision if changes[name] is not None else 0
        self.view = replace(self.view, revision=revision, **changes)  # type: ignore[arg-type]
        self.old_views = [*self.old_views[-5:], self.view]

    def write_node(self, record: NodeRecord) -> None:
        """Write a record under the condition that its node's key is still the one it created."""
        joined = self.view.nodes.get(record.node)
        if joined is not None and joined.record != record:
            self.write(nodes={**self.view.nodes, record.node: JoinedNode(record, joined.created)})

    def join(self) -> None:
        self.names += 1
        name = f"n{self.names}"
        domain = self.random.choice(["", "a", "b"])
        record = NodeRecord(name, "h", 2, "h:1", "tcp:h:2", 5, self.names, "d", domain, warm=True)
        self.memory[name] = Memory()
        self.write(nodes={**self.view.nodes, name: JoinedNode(record, self.view.revision + 1)})

    def declare_gone(self, name: str) -> None:
        self.write(
            nodes={other: joined for other, joined in self.view.nodes.items() if other != name}
        )

    def crash(self, name: str) -> None:
        self.memory.pop(name)
        self.cut_off.discard(name)
        if name in self.view.nodes:
            self.declare_gone(name)

    def holdings(self, name: str) -> dict[str, Any]:
        """What a server tells its agent: snapshots that its ranks have sealed, and those whose parity it has."""
        record, memory = self.view.nodes[name].record, self.memory[name]
        sealed = memory.sealed(record.nproc)
        protected = [s for s in sealed if memory.pulled.get(s, set()) >= self.peers(name, s)]
        return {"sealed": tuple(sorted(sealed)), "protected": tuple(sorted(protected))}

    def peers(self, name: str, snapshot: SnapshotId) -> set[str]:
        """Whose blocks a node's parity of a snapshot is made of."""
        generation = next(g for g in self.opened if g.generation == snapshot.generation)
        group = group_of(generation.members, name)
        return (
            {member.node for member in group if member.node != name} if generation.parity else set()
        )

    def pull(self, name: str) -> None:
        """Have a node fetch one block for its parity of one of its snapshots, if whoever has it is reached."""
        memory = self.memory[name]
        for snapshot in memory.sealed(2):
            if snapshot.generation != memory.snapshot_table.generation:
                continue
            missing = self.peers(name, snapshot) - memory.pulled.setdefault(snapshot, set())
            for peer in self.random.sample(sorted(missing), min(1, len(missing))):
                if peer in self.memory and snapshot in self.memory[peer].sealed(2):
                    memory.pulled[snapshot].add(peer)

    def act_as_agent(self, name: str) -> None:
        """Take the one step that a node's agent would take now."""
        record, generation, memory = (
            self.view.nodes[name].record,
            self.view.generation,
            self.memory[name],
        )
        if generation is None:
            return
        if self.view.snapshot is not None:
            committed = self.view.snapshot.snapshot
            memory.snapshot_table = retention.commit(
                memory.snapshot_table, SnapshotId(committed.generation, committed.step)
            )
        if generation.generation > record.generation:
            self.enter(record, generation, memory)
        elif self.view.is_closing or record.failure:
            if record.generation == generation.generation:
                self.write_node(replace(record, phase=NodePhase.DRAINED, **self.holdings(name)))
        elif record.phase is NodePhase.STARTING:
            self.write_node(replace(record, phase=NodePhase.RUNNING))
        elif record.phase is NodePhase.RUNNING:
            self.train(name, record, generation)

    def enter(self, record: NodeRecord, generation: Generation, memory: Memory) -> None:
        memory.snapshot_table = retention.open_generation(
            memory.snapshot_table, generation.generation
        )
        resume = generation.resume
        back_to = resume.snapshot if resume else SnapshotId(generation.generation, -1)
        memory.snapshot_table = retention.commit(
            memory.snapshot_table, SnapshotId(back_to.generation, back_to.step)
        )
        if generation.member(record.node) is None:
            return
        step = resume.snapshot.step if resume else 0
        memory.workers = dict.fromkeys(
            generation.member(record.node).ranks, SnapshotId(generation.generation, step)
        )  # type: ignore[union-attr]
        self.write_node(
            replace(
                record,
                generation=generation.generation,
                phase=NodePhase.STARTING,
                failure=None,
                step=step,
                **self.holdings(record.node),
            )
        )

    def train(self, name: str, record: NodeRecord, generation: Generation) -> None:
        """Have one rank take the next snapshot, if it knows that its last one is committed; otherwise it trains on without one."""
        memory, committed = self.memory[name], self.view.snapshot
        rank = self.random.choice(list(memory.workers))
        last = memory.workers[rank]
        is_new = committed is None or committed.snapshot.generation < generation.generation
        known = -1 if is_new or committed is None else committed.snapshot.step
        # Ranks take the same snapshots: here by taking every one, and the first as soon as they have resumed.
        is_taken = (SnapshotId(last.generation, last.step), rank) in memory.snapshot_table.shards
        waits = last.step > max(known, 0) or (is_new and last.step > 0 and not is_taken)
        following = last if waits else replace(last, step=last.step + 1)
        try:
            memory.write(following, rank)
            memory.workers[rank] = following
        except SnapshotUnavailable:
            pass  # The last one is not committed yet.
        self.write_node(
            replace(
                record, step=max(s.step for s in memory.workers.values()), **self.holdings(name)
            )
        )

    def act_as_leader(self) -> None:
        view = self.random.choice(self.old_views) if self.random.random() < 0.3 else self.view
        name = view.leader
        if name is None:
            return
        decision = decide(
            self.policy, view, self.leader_states.get(name, LeaderState()), self.now_s, self.now_s
        )
        self.leader_states[name] = decision.leader_state
        if decision.action is not None and self.may_act(name, view):
            self.perform(decision.action, view)

    def may_act(self, name: str, view: View) -> bool:
        """The conditions of a leader's transactions (`keepstep.elastic.agent.membership`)."""
        return (
            name in self.view.nodes
            and self.view.nodes[name].created == view.nodes[name].created
            and self.view.generation_revision == view.generation_revision
            and self.view.snapshot_revision == view.snapshot_revision
        )

    def perform(self, action: Action, seen: View) -> None:
        match action:
            case Open(generation):
                self.check_open(generation, seen)
                self.opened.append(generation)
                self.write(
                    generation=generation, closing=None, persist=None, snapshot=generation.resume
                )
            case Close(closing):
                self.write(closing=closing)
            case Commit(commit):
                self.check_commit(commit)
                self.write(snapshot=commit)
            case RecordRecovery(history):
                self.write(history=history)
            case Finish() | CancelPersist():
                raise AssertionError(f"nothing ends this job: {action}")

    def check_commit(self, commit: SnapshotCommit) -> None:
        """Whichever holders of each group are lost from here on, up to the parity: what the others have is enough."""
        must(
            commit.snapshot.generation == self.view.generation_number,
            "only the present generation's snapshots are committed",
        )
        before = self.commits.setdefault(commit.snapshot, commit)
        must(before == commit, "a step has one commit")
        current = self.view.snapshot
        must(current is None or current.snapshot < commit.snapshot, "commits only go forward")
        for member in commit.holders:
            if member.node in self.memory:
                must(
                    self.memory[member.node].is_intact(commit.snapshot, member),
                    "a holder holds what is committed",
                )
                pulled = self.memory[member.node].pulled.get(commit.snapshot, set())
                must(pulled >= self.peers(member.node, commit.snapshot), "a holder has its parity")

    def check_open(self, generation: Generation, seen: View) -> None:
        must(
            generation.generation == self.view.generation_number + 1, "the generation grows by one"
        )
        must(
            self.policy.min_nodes <= len(generation.members) <= self.policy.max_nodes,
            "min to max nodes",
        )
        must(
            len({member.node for member in generation.members}) == len(generation.members),
            "one place a node",
        )
        must(
            [r for m in generation.members for r in m.ranks] == list(range(generation.world_size)),
            "ranks in order",
        )
        old = self.view.generation
        if old is not None:
            for member in old.members:
                if member.node in self.view.nodes:
                    record = self.view.nodes[member.node].record
                    must(
                        record.generation == old.generation and record.phase is NodePhase.DRAINED,
                        "all have drained",
                    )
        if generation.resume is not None:
            self.check_resume(generation.resume, seen)
        elif seen.snapshot is not None and seen.snapshot.snapshot in self.commits:
            self.check_nothing_was_left(seen.snapshot, seen)

    def check_resume(self, resume: SnapshotCommit, seen: View) -> None:
        """What is to be resumed from is there, or can be rebuilt, if nobody has been lost since the leader looked."""
        orphans = {adoption.rank for adoption in resume.shard_rebuilds}
        for group in {member.group for member in resume.holders}:
            members = [member for member in resume.holders if member.group == group]
            lost = [member for member in members if orphans & set(member.ranks)]
            left = [
                member for member in members if member not in lost and member.node in self.memory
            ]
            must(len(lost) <= resume.parity, "no more are lost than parity gives back")
            for member in left:
                memory = self.memory[member.node]
                must(
                    memory.is_intact(resume.snapshot, member), "who is counted on holds its shards"
                )
                if lost:
                    must(
                        memory.pulled.get(resume.snapshot, set())
                        >= {m.node for m in members if m != member},
                        "who is counted on has its parity",
                    )

    def check_nothing_was_left(self, commit: SnapshotCommit, seen: View) -> None:
        """Storage is the last resort: some group of the committed snapshot's holders has lost more than its parity."""
        present = {m.node for m in commit.holders if m.node in seen.nodes}
        worst = max(
            sum(member.group == group and member.node not in present for member in commit.holders)
            for group in {member.group for member in commit.holders}
        )
        must(worst > commit.parity, "what memory can give back is not taken from storage")

    def disturb(self) -> None:
        present = list(self.view.nodes)
        kind = self.random.random()
        if kind < 0.4 and len(present) < 6:
            self.join()
        elif present and kind < 0.55:
            self.crash(self.random.choice(present))
        elif present and kind < 0.65:
            name = self.random.choice(present)
            self.cut_off.add(name)
            self.declare_gone(name)
        elif self.cut_off and kind < 0.7:
            self.crash(self.random.choice(sorted(self.cut_off)))
        elif present and kind < 0.85:
            record = self.view.nodes[self.random.choice(present)].record
            if (
                self.view.generation
                and record.generation == self.view.generation_number
                and record.phase is not NodePhase.DRAINED
            ):
                self.write_node(replace(record, failure=Failure("worker", "killed", self.now_s, 0)))
        elif present and kind < 0.9:
            self.write_node(
                replace(self.view.nodes[self.random.choice(present)].record, leaving=True)
            )

    def tick(self, disturbance: float) -> None:
        self.now_s += self.random.random()
        if self.random.random() < disturbance:
            self.disturb()
        for name in self.random.sample(list(self.memory), len(self.memory)):
            if self.random.random() < 0.7 and name in self.view.nodes:
                self.act_as_agent(name)
            if self.random.random() < 0.5:
                self.pull(name)
        self.act_as_leader()

    def run(self) -> None:
        """Disturb, then leave in peace; the job must be at work again, with new snapshots committed."""
        for _ in range(60):
            self.tick(disturbance=0.25)
        self.join()
        for _ in range(150):
            self.tick(disturbance=0.0)
        generation, snapshot = self.view.generation, self.view.snapshot
        must(generation is not None and not self.view.is_closing, "a generation is open in the end")
        assert generation is not None
        members = [self.view.nodes.get(member.node) for member in generation.members]
        must(
            all(joined and joined.record.phase is NodePhase.RUNNING for joined in members),
            "and all of it runs",
        )
        must(
            snapshot is not None and snapshot.snapshot.generation == generation.generation,
            "and commits",
        )


@pytest.mark.parametrize("chunk", range(10))
def test_any_schedule_keeps_the_invariants_and_ends_in_a_running_generation(chunk: int) -> None:
    for seed in range(chunk * 300, (chunk + 1) * 300):
        try:
            Simulation(seed).run()
        except BrokenRuleError as broken:
            raise AssertionError(f"seed {seed}: {broken}") from broken


def commits_what_is_only_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rendezvous._commit

    def wrong(view: View, generation: Generation, present: list[NodeRecord]) -> Commit | None:
        return right(
            view, generation, [replace(record, protected=record.sealed) for record in present]
        )

    monkeypatch.setattr(rendezvous, "_commit", wrong)


def counts_on_parity_that_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    right = succession._is_restorable

    def wrong(view: View, commit: SnapshotCommit) -> bool:
        nodes = {
            n: JoinedNode(replace(j.record, protected=j.record.sealed), j.created)
            for n, j in view.nodes.items()
        }
        return right(replace(view, nodes=nodes), commit)

    monkeypatch.setattr(succession, "_is_restorable", wrong)


def counts_on_more_than_the_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    right = succession._is_restorable
    monkeypatch.setattr(
        succession, "_is_restorable", lambda v, c: right(v, replace(c, parity=c.parity + 1))
    )


def forgets_that_parity_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    right = succession._is_restorable
    monkeypatch.setattr(succession, "_is_restorable", lambda v, c: right(v, replace(c, parity=0)))


def a_stale_leader_goes_back_behind_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Simulation.may_act
    monkeypatch.setattr(
        Simulation,
        "may_act",
        lambda s, name, view: right(
            s, name, replace(view, snapshot_revision=s.view.snapshot_revision)
        ),
    )


def a_snapshot_begins_before_the_last_one_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = retention.begin

    def wrong(snapshot_table: SnapshotTable, snapshot: SnapshotId, *rest: Any) -> Any:
        kept = {key: held for key, held in snapshot_table.shards.items() if key[1] != rest[0]}
        return right(retention._retain_only(snapshot_table, kept), snapshot, *rest)

    monkeypatch.setattr(retention, "begin", wrong)


def commits_an_older_generations_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rendezvous._commit

    def wrong(view: View, generation: Generation, present: list[NodeRecord]) -> Commit | None:
        return right(view, replace(generation, generation=generation.generation - 1), present)

    monkeypatch.setattr(rendezvous, "_commit", wrong)


def opens_before_all_have_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rendezvous._open_next_generation

    def wrong(policy: RendezvousPolicy, view: View, old: Generation, *rest: Any) -> Any:
        nodes = {
            n: JoinedNode(
                replace(j.record, phase=NodePhase.DRAINED, generation=old.generation), j.created
            )
            for n, j in view.nodes.items()
        }
        return right(policy, replace(view, nodes=nodes), old, *rest)

    monkeypatch.setattr(rendezvous, "_open_next_generation", wrong)


BROKEN: list[Callable[[pytest.MonkeyPatch], None]] = [
    commits_what_is_only_sealed,
    counts_on_parity_that_is_not_complete,
    counts_on_more_than_the_parity,
    forgets_that_parity_gives_back,
    a_stale_leader_goes_back_behind_commits,
    a_snapshot_begins_before_the_last_one_is_committed,
    commits_an_older_generations_snapshot,
    opens_before_all_have_drained,
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda rule: rule.__name__)
def test_a_rule_that_is_broken_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)

    def run_all() -> None:
        for seed in range(300):
            Simulation(seed).run()

    with pytest.raises(BrokenRuleError):
        run_all()


def test_equal_seeds_give_equal_histories() -> None:
    def history(seed: int) -> list[Generation]:
        simulation = Simulation(seed)
        for _ in range(100):
            simulation.tick(disturbance=0.2)
        return simulation.opened

    assert history(7) == history(7)
    assert len(history(7)) > 2
