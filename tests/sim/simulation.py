"""Runs a job of several nodes under invented disasters, by a seed, and checks what must hold.

What runs is production's: `decide`, `transactions`, `join_protocol`, `view`, `checkpoint_schedule`,
`invariants`, `snapshot_table` and the in-memory store. What agents, workers and servers do in
between is played by `tests.sim.node`. Nodes join, crash, stall, lose their connection, their lease
or a worker, leave, are evicted and come back under their names; transactions are confirmed, late or
lost; announcements of commits come late, to some, or after their leader died; storage fails;
leaders decide on views that are out of date. Followers see what production's followers watch, and
large openings take several transactions, as those of thousands of nodes do.

Production's invariants are checked on every revision, on every record and on every action. The
rules here compare the coordinator's documents with what memory and storage really hold. In the end
the disasters stop: the job must run again, commit, store, and finish with its last step stored.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.rendezvous.invariants import check_view
from keepstep.elastic.rendezvous.join_protocol import was_restored
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.records import (
    CommitAnnouncement,
    Eviction,
    Generation,
    Member,
    NodePhase,
    NodeRecord,
    NodeReport,
    Pause,
    RestartRequest,
    Scale,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.transactions import Transaction
from keepstep.elastic.rendezvous.view import View
from keepstep.elastic.store.contract import Delete, Modified, Put
from tests.sim.coordinator import KEYS, Coordinator, Sender, small_requests
from tests.sim.node import RANKS, Node
from tests.sim.rules import must
from tests.sim.storage import Storage

_BASE = RendezvousPolicy(
    min_nodes=1, max_nodes=3, last_call_s=2.0, quorum_timeout_s=1e9, max_restarts=10**9
)
POLICIES = (
    _BASE,
    replace(_BASE, max_nodes=4, parity=2),
    replace(_BASE, max_nodes=5, group_size=3),
    replace(_BASE, parity=0),
    replace(_BASE, min_nodes=2),
)
MAX_NODES = 6
DISTURBED_TICKS = 80
CALM_TICKS = 400
MORE_STEPS = 2
OUTAGES = ("stops", "dies", "is mute", "loses all")
"""Outages of the whole coordinator: if it stops, all leases end with them; if it dies, none."""


class Simulation:
    """One job. `run` plays it from the first join to its end."""

    def __init__(
        self,
        seed: int,
        policy: RendezvousPolicy | None = None,
        *,
        is_operated: bool = False,
        has_outages: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self._operator = random.Random(f"operator {seed}") if is_operated else None
        """Draws when a person pauses, resumes or scales the job; not among the disasters."""
        self._outages = random.Random(f"outages {seed}") if has_outages else None
        """Draws when the whole coordinator is away for long; not among the other disasters."""
        self._outage_until_s = 0.0
        self.outages = Counter[str]()
        """How often each kind has been drawn."""
        self.policy = policy or POLICIES[seed % len(POLICIES)]
        self.checkpoint_every = self.rng.choice([1, 2, 4])
        self.awaits_abort_order = seed % 7 == 6
        """Whether an aborted collective leaves garbage, as with NCCL."""
        self.aborted: set[int] = set()
        """Generations in which collectives were aborted: what is sealed afterwards is garbage."""
        self.now_s = 0.0
        self.is_calm = False
        self.storage_is_away = False
        self.paused_until_s = 0.0
        """Workers evaluate until then, and take no steps."""
        self._hung_rank = 0
        self._hung_generation = 0
        self._hangs_again = False
        self.coordinator = Coordinator(self.rng, self._on_change)
        self.storage = Storage()
        self.nodes: list[Node] = []
        self.servers: dict[str, Node] = {}
        """Snapshot servers that answer, by address; those of nodes that were declared gone, too."""
        self.opened: dict[int, Generation] = {}
        self.history: list[Generation] = []
        self._restored: dict[int, int] = {}
        self._announcements: list[tuple[float, CommitAnnouncement, Node]] = []
        """Those that are on their way, and when each arrives."""
        self._known_at_order: SnapshotId | None = None
        self._servers_at_order: set[str] = set()
        self.announced_unasked = 0
        """The newest step that counted as committed although an older one was to be stored."""
        self.left_overdue: set[str] = set()
        """Nodes that have left because their time to leave was up."""
        self._losses = 0
        self._names = 0
        self._processes = 0

    @property
    def view(self) -> View:
        """The coordinator's newest view."""
        return self.coordinator.view

    def run(self) -> None:
        """Disturb, then leave in peace; the job must run again, commit, store, and finish."""
        with small_requests():
            self._run()

    def _run(self) -> None:
        for _ in range(self.policy.max_nodes):
            self._start_node()
        for _ in range(DISTURBED_TICKS):
            self.tick(disturbance=0.12)
        self._calm_down()
        stored = self.view.checkpoint
        self._run_until(lambda: self._has_recovered(stored), "the job runs, commits and stores")
        check_view(self.view)
        if self.rng.random() < 0.2:
            self._preempt_all()
        else:
            self._finish()

    def tick(self, disturbance: float) -> None:
        """Let half a second pass, on average."""
        self.now_s += self.rng.random()
        self.coordinator.advance(self.now_s)
        self._deliver_late_announcements()
        if self.rng.random() < disturbance:
            self._disturb()
        if self._operator is not None and self._operator.random() < disturbance / 2:
            self._operate(self._operator)
        if self._outages is not None and self._outages.random() < disturbance / 4:
            self._begin_outage(self._outages)
        if disturbance and self._hangs_again and self.rng.random() < 0.5:
            generation = self.view.generation
            if generation is not None and generation.generation > self._hung_generation:
                self._restart_rank()
        nodes = [node for node in self.nodes if node.is_alive]
        self.rng.shuffle(nodes)
        for node in nodes:
            if self.is_calm or self.rng.random() < 0.8:
                node.step()
            if node.is_alive:
                node.work()
        self.nodes = [node for node in self.nodes if node.is_alive]

    def probe(self, record: NodeRecord | Member) -> bool | None:
        """Ask whether an agent lives; None if that cannot be found out."""
        owner = next((n for n in self.nodes if n.agent == record.agent and n.is_alive), None)
        if owner is None:
            return None if self.rng.random() < 0.3 and not self.is_calm else False
        is_reached = self.now_s >= max(owner.cut_off_until_s, owner.stalled_until_s)
        return True if is_reached else None

    def has_double(self, node: Node) -> bool:
        """Whether, once all disasters are over, another process stays under a node's name."""
        return self.is_calm and any(
            other.name == node.name and other.is_member and other.leaving_since_s is None
            for other in self.nodes
            if other is not node
        )

    def deliver(self, report: NodeReport, address: str) -> bool:
        """Bring a report to the process that a node takes for the leader, if it is reached."""
        leader = next((n for n in self.nodes if n.agent == address and n.is_alive), None)
        is_reached = leader is not None and (leader.name == report.node or self.is_heard(leader))
        if leader is not None and is_reached:
            leader.receive_report(report)
        return is_reached

    def is_heard(self, node: Node) -> bool:
        """Whether a node's messages to other agents, and theirs to it, arrive."""
        return self.now_s >= node.unheard_until_s

    def announce(self, announcement: CommitAnnouncement, leader: Node) -> None:
        """Bring an announcement to all other agents: at once, late, or not at all.

        Sometimes the leader dies meanwhile.
        """
        others = [node for node in self.nodes if node is not leader]
        self.rng.shuffle(others)
        if not self.is_calm and self.rng.random() < 0.01:
            others = others[: self.rng.randint(0, len(others))]
            self._crash(leader)
        for node in others:
            chance = 0.0 if self.is_calm else self.rng.random()
            if chance < 0.75 and self.is_heard(leader) and self.is_heard(node):
                node.receive_announcement(announcement)
            elif chance < 0.95:
                delay_s = self.rng.choice([1.0, 3.0, 12.0]) * self.rng.random()
                self._announcements.append((self.now_s + delay_s, announcement, node))

    def _deliver_late_announcements(self) -> None:
        arrived = [late for late in self._announcements if late[0] <= self.now_s]
        self._announcements = [late for late in self._announcements if late[0] > self.now_s]
        for _, announcement, node in arrived:
            if node.is_alive:
                node.receive_announcement(announcement)

    def delay(self, transaction: Transaction, sender: Sender) -> None:
        """Have a transaction applied some time later."""
        self.coordinator.postpone(transaction, sender)

    def storage_fails(self) -> bool:
        """Whether a write to storage fails now."""
        return self.storage_is_away or (not self.is_calm and self.rng.random() < 0.03)

    def step_in_storage(self, generation: Generation) -> int:
        """Return the step that a generation restores from storage: all ranks agree on one."""
        newest = self.storage.newest
        return self._restored.setdefault(
            generation.generation, newest.step if newest is not None else 0
        )

    def note_unasked(self, snapshot: SnapshotId) -> None:
        """Note a commit that may free what is to be stored before a node is asked to store it."""
        self.announced_unasked = max(self.announced_unasked, snapshot.step)

    # Disasters

    def _disturb(self) -> None:
        members = [node for node in self.nodes if node.is_member]
        kind = self.rng.random()
        if kind < 0.30:
            if len(self.nodes) < MAX_NODES:
                self._start_node()
            return
        if not members:
            return
        node = self.rng.choice(members)
        if kind < 0.40:
            self._crash(node)
        elif kind < 0.52:
            self._isolate(node)
        elif kind < 0.63:
            node.fail_worker()
        elif kind < 0.68:
            node.leaving_since_s = node.leaving_since_s or self.now_s
        elif kind < 0.71:
            self._evict(node.name)
        elif kind < 0.79:
            self._restart_rank()
        elif kind < 0.84:
            self.storage_is_away = not self.storage_is_away
        elif kind < 0.88:
            self.paused_until_s = self.now_s + self.rng.uniform(2.0, 15.0)
        elif kind < 0.885:
            node.lose_server()
        elif kind < 0.892:
            self.cut_off_coordinator(self.rng.uniform(1.0, 12.0), dies=self.rng.random() < 0.5)
        elif kind < 0.90:
            for member in members:
                member.leaving_since_s = member.leaving_since_s or self.now_s
        elif kind < 0.94:
            # The other side of a partition: an agent declares this one dead.
            if node.lease is not None:
                self.coordinator.revoke(node.lease.id)
        else:
            self._crash(node)
            self._start_node(node.name)

    def cut_off_coordinator(self, for_s: float, *, dies: bool) -> None:
        """Let no node reach the coordinator; if it dies itself, then no lease ends meanwhile."""
        until_s = self.now_s + for_s
        for node in self.nodes:
            node.cut_off_until_s = max(node.cut_off_until_s, until_s)
        if dies:
            self.coordinator.go_away(until_s)

    def lose_answers(self, for_s: float) -> None:
        """Let the coordinator's answers to all nodes be lost; it performs what they ask for."""
        self.coordinator.mute_until_s = self.now_s + for_s

    def _begin_outage(self, rng: random.Random) -> None:
        """Let no node hear from the coordinator for a while, unless it is away already."""
        for_s = rng.choice([2.0, 5.0, 10.0, 30.0]) * rng.uniform(0.5, 1.5)
        kind = rng.choice(OUTAGES)
        if self.now_s < self._outage_until_s:
            return
        self.outages[kind] += 1
        self._outage_until_s = self.now_s + for_s
        if kind == "is mute":
            self.lose_answers(for_s)
        else:
            self.cut_off_coordinator(for_s, dies=kind != "stops")
            if kind == "loses all":
                self.coordinator.lose_keys()

    def _isolate(self, node: Node) -> None:
        """Stall a node or cut it off; somebody may start another under its name meanwhile."""
        until_s = self.now_s + self.rng.uniform(0.5, 8.0)
        kind = self.rng.random()
        if kind < 0.5:
            node.cut_off_until_s = max(node.cut_off_until_s, until_s)
        elif kind < 0.8:
            node.stalled_until_s = until_s
        if kind < 0.2 or kind >= 0.8:
            node.unheard_until_s = until_s
        if self.rng.random() < 0.2:
            self._start_node(node.name)

    def _start_node(self, name: str | None = None) -> None:
        if name is None:
            gone = {f"n{n}" for n in range(1, self._names + 1)} - {n.name for n in self.nodes}
            if gone and self.rng.random() < 0.3:
                name = self.rng.choice(sorted(gone))
            else:
                self._names += 1
                name = f"n{self._names}"
        self._lift_eviction(name)
        self._processes += 1
        node = Node(self, name, self._processes, self.rng.choice(["", "a", "b"]))
        node.cut_off_until_s = max(self.coordinator.away_until_s, self._outage_until_s)
        self.nodes.append(node)

    def _crash(self, node: Node) -> None:
        """End a process; most often its peers see that at once and revoke its lease."""
        node.crash()
        if node.lease is not None and self.rng.random() < 0.6:
            self.coordinator.revoke(node.lease.id)

    def _evict(self, name: str) -> None:
        if name in self.view.nodes and self.view.generation is not None:
            eviction = Eviction("slow", may_return=True)
            self._write_as_monitor(Put(KEYS.eviction(name), eviction.encode()))

    def _lift_eviction(self, name: str) -> None:
        if name in self.view.evictions:
            self._write_as_monitor(Delete(KEYS.eviction(name)))

    def _restart_rank(self) -> None:
        generation = self.view.generation
        if generation is not None and not self.view.is_closing and self.view.result is None:
            if not self._hangs_again:
                self._hung_rank = self.rng.randrange(generation.world_size)
            rank = min(self._hung_rank, generation.world_size - 1)
            # What the restart does not cure hangs again in the next generation.
            self._hangs_again = self.rng.random() < 0.5
            self._hung_generation = generation.generation
            request = RestartRequest(generation.generation, rank, "hang")
            self._write_as_monitor(Put(KEYS.restart(rank), request.encode()))

    def _operate(self, rng: random.Random) -> None:
        """Pause or resume the job, or scale it."""
        if rng.random() < 0.5:
            pause = Put(KEYS.single("pause"), Pause("maintenance", self.now_s).encode())
            self._write_as_monitor(Delete(pause.key) if self.view.pause else pause)
            return
        least = rng.randint(1, 2)
        scale = Scale(least, rng.randint(least, MAX_NODES))
        self._write_as_monitor(Put(KEYS.single("scale"), scale.encode()))

    def _write_as_monitor(self, operation: Put | Delete) -> None:
        """Write what a monitor or a person writes, which no lease covers."""
        condition = Modified(KEYS.single("generation"), self.view.generation_revision)
        transaction = Transaction((condition,), (operation,))
        self.coordinator.apply_now(transaction)

    # The end

    def _calm_down(self) -> None:
        self.is_calm = self.coordinator.is_reliable = True
        self.storage_is_away = False
        self.coordinator.mute_until_s = 0.0
        if self.coordinator.away_until_s:
            self.coordinator.go_away(self.now_s)
            self.coordinator.advance(self.now_s)
        for node in self.nodes:
            node.stalled_until_s = node.cut_off_until_s = node.unheard_until_s = 0.0
        self.paused_until_s = 0.0
        while len(self._staying()) < self.policy.min_nodes:
            self._start_node()
        for name in self.view.evictions:
            self._lift_eviction(name)
        if self._operator is not None:
            for key in ("pause", "scale"):
                self._write_as_monitor(Delete(KEYS.single(key)))

    def _staying(self) -> set[str]:
        return {node.name for node in self.nodes if node.leaving_since_s is None}

    def _run_until(self, is_reached: object, rule: str) -> None:
        for _ in range(CALM_TICKS):
            self.tick(disturbance=0.0)
            if is_reached():  # type: ignore[operator]
                return
        must(False, f"after all disasters, {rule}")

    def _has_recovered(self, stored: object) -> bool:
        view, generation = self.view, self.view.generation
        if generation is None or view.is_closing:
            return False
        records = [view.nodes.get(member.node) for member in generation.members]
        return (
            all(j is not None and j.record.phase is NodePhase.RUNNING for j in records)
            and view.snapshot is not None
            and view.snapshot.snapshot.generation == generation.generation
            and view.checkpoint is not None
            and view.checkpoint != stored
        )

    def _finish(self) -> None:
        """Let the job reach its last step.

        It must end well, with that step stored; or fail and give the reason if storage is away.
        """
        last = max((n._step() for n in self.nodes if n.workers), default=0) + MORE_STEPS
        for node in self.nodes:
            node.last_step = last
        self.storage_is_away = self.rng.random() < 0.1
        self.coordinator.is_reliable = self.rng.random() < 0.5
        self._run_until(lambda: self.view.result is not None, "the job ends")
        result = self.view.result
        assert result is not None
        if self.storage_is_away:
            must(not result.succeeded, "a job whose last step is not stored fails")
            must("could not be stored" in result.message, "and its result names the reason")
        else:
            must(result.succeeded, f"the job succeeds, not: {result.message}")
            newest = self.storage.newest
            must(newest is not None and newest.step >= last, "the last step is stored")
        if self.rng.random() < 0.3:
            self._begin_another_job()
            return
        self.coordinator.is_reliable = True
        self._run_until(lambda: not self.nodes, "everybody leaves")
        must(self.view.secret is None, "the last to leave removes the job's keys")

    def _preempt_all(self) -> None:
        """Ask all nodes to leave at nearly the same time: what was committed is stored first."""
        committed, storage = self.view.snapshot, self.storage
        assert committed is not None
        self.left_overdue.clear()
        for node in self.nodes:
            node.leaving_since_s = node.leaving_since_s or self.now_s
            if self.rng.random() < 0.3:
                self.tick(disturbance=0.0)
        self._run_until(lambda: not self.nodes, "everybody leaves")
        must(
            bool(self.left_overdue)
            or (storage.newest is not None and storage.newest.step >= committed.snapshot.step),
            "nodes that all leave store what is committed first, if they are given the time",
        )

    def _begin_another_job(self) -> None:
        """Have all members die after the result, and nodes begin a job under the same name."""
        self.coordinator.is_reliable = False
        for node in self.nodes:
            node.crash()
            if node.lease is not None:
                self.coordinator.revoke(node.lease.id)
        for _ in range(self.policy.min_nodes + 1):
            self._start_node()
        self._run_until(
            lambda: self.view.result is None and self.view.generation is not None,
            "another job begins under the name of one that has ended",
        )

    # Rules

    def _on_change(self, before: View, after: View) -> None:
        """Compare a revision with what memory and storage hold."""
        if before.generation is not None and after.generation is None:
            if self._losses == self.coordinator.losses:
                self._forget_job()
            self._losses = self.coordinator.losses
        elif was_restored(after, before) and after.generation in self.opened.values():
            must(self.coordinator.losses > 0, "only what was lost is restored")
        elif before.generation is None and self.opened and after.generation is not None:
            # Nodes that held the job's state were kept away until others had started it again.
            self._forget_job()
            self.opened[after.generation.generation] = after.generation
            self.history.append(after.generation)
        elif after.generation is not None and after.generation != before.generation:
            self._check_open(after.generation, before)
            self.opened[after.generation.generation] = after.generation
            self.history.append(after.generation)
        else:
            if after.snapshot is not None and after.snapshot != before.snapshot:
                self._check_commit(after.snapshot)
            if after.restarts != before.restarts:
                self._check_restarts(before, after)
            if after.abort_order is not None and before.abort_order is None:
                self._known_at_order = self._newest_known(before)
                self._servers_at_order = {joined.record.server for joined in before.nodes.values()}
        if after.store_failure is not None and after.store_failure != before.store_failure:
            reason = after.store_failure.reason
            allowed = ["the storage is away", "was gone", "had not taken"]
            if after.store_failure.step <= self.announced_unasked:
                allowed.append("is not held here")
            must(
                any(text in reason for text in allowed),
                "a checkpoint fails only if storage fails, a holder is lost, or the request to "
                f"store it was under way for too long, not: {reason}",
            )
        if after.checkpoint is not None and after.checkpoint != before.checkpoint:
            snapshot = SnapshotId(after.checkpoint.generation, after.checkpoint.step)
            must(self.storage.holds(snapshot), "a recorded checkpoint is stored")

    def _check_restarts(self, before: View, after: View) -> None:
        """A request of the current generation goes only once its node has carried it out."""
        generation = after.generation
        for rank, request in before.restarts.items():
            if rank in after.restarts or generation is None:
                continue
            if request.generation != generation.generation:
                continue
            member = next(m for m in generation.members if rank in m.ranks)
            node = self.servers.get(member.server)
            must(
                node is None
                or node.failure is not None
                or node.drained_generation == generation.generation,
                "a restart request stands until it is carried out",
            )

    def _forget_job(self) -> None:
        """The next job under this name starts from the beginning, with storage of its own."""
        self.opened.clear()
        self.aborted.clear()
        self.announced_unasked = 0
        self._restored.clear()
        self.storage = Storage()

    def _check_commit(self, commit: SnapshotCommit) -> None:
        """Whichever holders are lost from here on, up to the parity: the others have enough."""
        for holder in commit.holders:
            node = self.servers.get(holder.server)
            if node is None or commit.snapshot in node.memory.damaged:
                continue
            if node.memory.table.committed > commit.snapshot:
                continue  # The coordinator may learn of a commit when a newer one is announced.
            must(
                node.memory.is_intact(commit.snapshot, holder.ranks),
                "a holder holds what is committed",
            )
            if not node.has_drained:
                pulled = node.memory.pulled.get(commit.snapshot, set())
                must(pulled >= node.peers(commit.snapshot), "a holder has its parity")

    def check_commit(self, snapshot: SnapshotId) -> None:
        """All holders hold and protect a snapshot that a node takes for committed.

        But for those that are lost, and those that have gone on since.
        """
        generation = self.opened.get(snapshot.generation)
        if generation is None or snapshot.generation != self.view.generation_number:
            return
        for member in generation.members:
            node = self.servers.get(member.server)
            if node is None or snapshot in node.memory.damaged:
                continue
            table = node.memory.table
            if table.committed > snapshot or table.generation != snapshot.generation:
                continue
            must(node.memory.is_intact(snapshot, member.ranks), "what is committed is held by all")
            has_drained = node.has_drained
            pulled = node.memory.pulled.get(snapshot, set())
            must(has_drained or pulled >= node.peers(snapshot), "and protected by all")
            must(not node.memory.garbage.get(snapshot), "and not what an abort left behind")

    def check_known_commit(self, view: View, generation: Generation) -> None:
        """No generation resumes from before a commit that a member knows, if it need not.

        Args:
            view: what the leader saw that decided.
            generation: what it opens.
        """
        old, order = view.generation, view.abort_order
        known = self._known_at_order if order is not None else self._newest_known(view)
        if old is None or known is None:
            return
        lost: Counter[int] = Counter()
        for member in old.members:
            joined, node = view.nodes.get(member.node), self.servers.get(member.server)
            is_here = joined is not None and joined.record.server == member.server
            if node is None or not is_here or known in node.memory.damaged:
                lost[member.group] += 1
            elif node.memory.table.committed > known:
                continue  # A newer one was committed before a pause.
            elif not node.memory.is_intact(known, member.ranks):
                # A commit from a leader that nobody else heard, before the order.
                must(
                    order is not None and member.server not in self._servers_at_order,
                    "a member holds the commits that it knows",
                )
                lost[member.group] += 1
        resumed = generation.resume.snapshot.step if generation.resume is not None else -1
        must(
            max(lost.values(), default=0) > old.parity or resumed >= known.step,
            f"{known}, which members took for committed, is kept",
        )

    def check_held(self, view: View, generation: Generation) -> None:
        """No step is computed again that the present members of the last generation hold whole.

        Whatever the coordinator knows of it. Args as for `check_known_commit`.
        """
        old, order = view.generation, view.abort_order
        if old is None or self.view.generation_number != old.generation:
            return  # Memory has gone on since, and what is decided on this view is refused.
        held = self.newest_held(old, view)
        if order is not None and not order.all_fenced and held is not None:
            # What a lost member has sealed after the order may be what an abort left behind.
            held = old.resume.snapshot if held.generation < old.generation and old.resume else None
        resumed = generation.resume.snapshot.step if generation.resume is not None else -1
        must(
            held is None or resumed >= held.step,
            f"{held}, which the members hold whole, is not computed again",
        )

    def newest_held(self, generation: Generation, view: View) -> SnapshotId | None:
        """Return the newest snapshot of which a generation's members hold every shard, if any.

        Members that are present in a view count. One that is not is made up for by parity, where
        all others of its group say in their records that they have it.
        """
        nodes = [self._present(member, view) for member in generation.members]
        sealed = {
            snapshot
            for node in nodes
            if node is not None
            for snapshot in node.memory.sealed(RANKS)
            if snapshot.generation == generation.generation
        }
        candidates = [SnapshotCommit(s, generation.members, generation.parity) for s in sealed]
        resume = generation.resume
        if resume is not None and not resume.stored and not resume.shard_rebuilds:
            candidates.append(resume)
        whole = [commit.snapshot for commit in candidates if self._is_whole(commit, view)]
        return max(whole, key=lambda snapshot: (snapshot.step, snapshot.generation), default=None)

    def _is_whole(self, commit: SnapshotCommit, view: View) -> bool:
        snapshot = commit.snapshot
        holders = {member: self._present(member, view) for member in commit.holders}
        holding = {
            member
            for member, node in holders.items()
            if node is not None and node.memory.is_intact(snapshot, member.ranks)
        }
        lost = Counter(member.group for member in holders if member not in holding)
        return max(lost.values(), default=0) <= commit.parity and all(
            snapshot in view.nodes[member.node].record.protected
            for member in holding
            if member.group in lost
        )

    def _present(self, member: Member, view: View) -> Node | None:
        """Return the node of a member that is present in a view, with the server that it had."""
        joined = view.nodes.get(member.node)
        is_here = joined is not None and joined.record.server == member.server
        return self.servers.get(member.server) if is_here else None

    def _newest_known(self, view: View) -> SnapshotId | None:
        """Return the newest snapshot of the generation that present members know as committed."""
        known = []
        for member in view.generation.members if view.generation is not None else ():
            joined, node = view.nodes.get(member.node), self.servers.get(member.server)
            if joined is not None and node is not None and joined.record.server == member.server:
                known.append(node.known_commit)
        return max(
            (s for s in known if s is not None and s.generation == view.generation_number),
            default=None,
        )

    def _check_open(self, generation: Generation, before: View) -> None:
        old = before.generation
        for member in old.members if old is not None else ():
            node = self.servers.get(member.server)
            if node is not None and member.node in before.nodes and node.is_member:
                must(
                    node.has_drained
                    or before.nodes[member.node].record.server != member.server
                    or node.record.phase is NodePhase.DONE,
                    "no member of the old generation works when the next one is opened",
                )
        if generation.resume is not None and not generation.resume.stored:
            self._check_resume(generation.resume, before.generation)

    def _check_resume(self, resume: SnapshotCommit, old: Generation | None) -> None:
        """The resumed snapshot exists or can be rebuilt, if no node was lost since the decision."""
        orphans = {rebuild.rank for rebuild in resume.shard_rebuilds}
        for group in {holder.group for holder in resume.holders}:
            holders = [holder for holder in resume.holders if holder.group == group]
            lost = [holder for holder in holders if orphans & set(holder.ranks)]
            must(len(lost) <= resume.parity, "no more are lost than parity gives back")
            for holder in holders:
                node = self.servers.get(holder.server)
                if holder in lost or node is None:
                    continue
                is_awaited = old is not None and old.member(holder.node) is not None
                if not is_awaited and resume.snapshot in node.memory.damaged:
                    continue  # Nobody waits for what a spare finds when a generation closes.
                must(
                    node.memory.is_intact(resume.snapshot, holder.ranks),
                    "a holder that is counted on holds its shards",
                )
                if lost:
                    pulled = node.memory.pulled.get(resume.snapshot, set())
                    others = {other.server for other in holders if other != holder}
                    must(pulled >= others, "a holder that is counted on has its parity")
                    garbage = node.memory.garbage.get(resume.snapshot, set())
                    must(not garbage, "no shard is rebuilt from what an abort left behind")
