"""Runs rendezvous cases: events and decisions as lines of text; `cases/*.txt` are written so.

A case begins with a comment that states its claim. A line that is not indented is an event, a
question or `decide`; indented lines are recorded output, which `test_cases.py` compares or
rewrites. Nodes are named a, b, c ...; a subject is one node, a list (`a, b and c`), or `everyone`:
the present members of the current generation. A rank stands for the node that has it there.

    policy nodes 2-4, last call 2 s, quorum 60 s, restarts 2, parity 1, groups of 8   (part or all)
    a joins with 2 workers [in rack r1] [cold]  takes a lease; `cold`: its workers still warm up
    a serves the coordinator          it runs there
    a is warm                            its workers can start at once
    a enters                             puts its workers into the current generation
    a runs [restored from parity]        every worker of it has completed a step
    a completes step 8                   as its record shows
    a seals step 7                       all its ranks sealed; the leader does not know yet
    a protects step 7                    its parity is complete, too; a report goes to the leader
    a learns that step 7 is committed    it learns it directly, and frees older ones
    a loses step 7                       its memory of the step is damaged
    a fences                             its server seals nothing more; its workers await the order
    a drains                             no worker of it writes any more; its record is final
    a finishes                           its workers did their last step and wait for it to be safe
    a is done                            its workers exited with success
    a ends the job                       its launcher does so, as torchrun's may
    a asks to leave                      a preemption notice, Ctrl-C, an eviction that it has seen
    lease of a ends                      its agent died, left or was cut off
    agent of a has ended                 found out where the leader asks it, as it waits for a
    a returns                            with its memory and 1 worker, after its lease has ended
    a rejoins                            its agent died and another joined before anybody looked
    a wants checkpoints in URL [every 10 steps | as often as best]
    a wants ranks in multiples of 4[, at most 8]    what its workers' mesh has places for
    a wants 3 4 8 ranks         one of these numbers, as a mesh of the user's own rule
    a writes its part                    of the checkpoint that is requested
    a cannot write its part: REASON
    the manifest cannot be written: REASON      at the next attempt
    rank 3 fails: MESSAGE                its process ended; `fails fatally`: trying again is useless
    rank 3 raises ERROR: MESSAGE         its script failed; the same ERROR shows that it comes again
    rank 3 loses a peer: MESSAGE         a collective broke
    a stands still: MESSAGE                 its ranks have made no step for too long
    the monitor names rank 3: SYNDROME      as the cause of a standstill
    rank 3 has computed wrongly: FINDING    as a comparison of replicas has shown to rank 0
    a is evicted: REASON                 by a person or the monitor
    restart of rank 3 is requested: REASON
    the job is paused: REASON            by a person
    the job is resumed
    the job is scaled to 1-2 nodes
    2.5 s pass
    given a, b and c run with 2 workers  joins, opening, entering and running, without output
    may a leave?                         whether it is needed no longer
    what if a and b are lost?            what `keepstep status --if-lost` tells
    decide                               the leader decides and acts until it has nothing to do

Decisions are checked against the invariants and applied to the coordinator's keys as the agents do
it, and what changed is shown.
Times count from the case's beginning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.rendezvous import actions, transactions
from keepstep.elastic.rendezvous.decide import decide, may_leave
from keepstep.elastic.rendezvous.decision import LeaderState
from keepstep.elastic.rendezvous.intervals import AUTO
from keepstep.elastic.rendezvous.invariants import check_action, check_transition
from keepstep.elastic.rendezvous.loss_forecast import describe_forecast, forecast_loss
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.rank_limits import RankLimits
from keepstep.elastic.rendezvous.records import (
    AbortOrder,
    CheckpointRecord,
    Closing,
    Eviction,
    Failure,
    FailureKind,
    Generation,
    History,
    Leadership,
    Member,
    NodePhase,
    NodeRecord,
    NodeReport,
    Pause,
    PersistedPart,
    PersistRequest,
    PublishedVerdict,
    PublishedVerdicts,
    Record,
    Release,
    ReplicaComparison,
    RestartRequest,
    Result,
    Scale,
    SnapshotCommit,
    StoreFailure,
)
from keepstep.elastic.rendezvous.view import Keys, View, from_listing, with_reports
from keepstep.elastic.store.contract import Delete, KeyValue, Listing, Put

KEYS = Keys("case")
WALL_CLOCK_START_S = 1000.0
"""The wall clock at the beginning; the monotonic one begins at 0, so confusing them shows."""
INDENT = "    "
_DOCUMENTS = transactions.LEADER_DOCUMENTS
_MAX_DECISIONS = 10


@dataclass
class Memory:
    """The snapshots that a node's server holds."""

    sealed: set[SnapshotId] = field(default_factory=set)
    protected: set[SnapshotId] = field(default_factory=set)
    known: SnapshotId | None = None

    def free_older_than(self, snapshot: SnapshotId, pinned: SnapshotId | None) -> None:
        self.sealed = {s for s in self.sealed if s >= snapshot or s == pinned}
        self.protected &= self.sealed


class Case:
    """A job under construction: the coordinator's keys, the nodes' memory, and the clock."""

    def __init__(self) -> None:
        self.policy = RendezvousPolicy(
            min_nodes=1, max_nodes=4, last_call_s=2.0, quorum_timeout_s=60.0, max_restarts=2
        )
        self.now_s = 0.0
        self.memory: dict[str, Memory] = {}
        self._lost_memory: dict[str, Memory] = {}
        self._items: dict[str, KeyValue] = {}
        self._revision = 0
        self._leases = 0
        self._reports: dict[str, NodeReport] = {}
        self._leader: str | None = None
        self._leader_state = LeaderState()
        self._gone: frozenset[str] = frozenset()
        self._manifest_failure = ""
        self._steps: dict[str, int] = {}
        self._asked: tuple[Member, ...] = ()

    @property
    def view(self) -> View:
        """The coordinator's content."""
        return from_listing(KEYS, Listing(self._revision, tuple(self._items.values())))

    @property
    def wall_s(self) -> float:
        """The wall clock."""
        return WALL_CLOCK_START_S + self.now_s

    def run(self, line: str) -> list[str]:
        """Carry out one line that is not indented; return what it prints.

        Raises:
            ValueError: the line is none of those above.
        """
        if line == "decide":
            return self.decide()
        if found := re.fullmatch(r"policy (.+)", line):
            self._set_policy(found[1])
        elif found := re.fullmatch(r"([\d.]+) s pass", line):
            self.now_s += float(found[1])
        elif found := re.fullmatch(r"what if (.+) (?:is|are) lost\?", line):
            # What the nodes reported to the leader alone, a person's command does not see.
            forecast = forecast_loss(self.view, _names(found[1]), self.wall_s)
            return describe_forecast(forecast).splitlines()
        elif found := re.fullmatch(r"agents? of (.+) (?:has|have) ended", line):
            # The leader asks whom it waits for.
            ended = _names(found[1])
            self._gone |= {member.agent for member in self._asked if member.node in ended}
        elif found := re.fullmatch(r"the monitor names rank (\d+): (.+)", line):
            self._put(KEYS.single("verdicts"), self._verdicts(int(found[1]), found[2]))
        elif found := re.fullmatch(r"may (\w+) leave\?", line):
            return ["yes" if may_leave(self._leaders_view(), found[1]) else "no"]
        elif found := re.fullmatch(r"lease of (\w+) ends", line):
            self._delete(KEYS.node(found[1]))
            self._lost_memory[found[1]] = self.memory.pop(found[1])
        elif found := re.fullmatch(r"the manifest cannot be written: (.+)", line):
            self._manifest_failure = found[1]
        elif found := re.fullmatch(r"restart of rank (\d+) is requested: (.+)", line):
            request = RestartRequest(self.view.generation_number, int(found[1]), found[2])
            self._put(KEYS.restart(request.rank), request)
        elif found := re.fullmatch(r"rank (\d+) (fails|fails fatally|loses a peer): (.+)", line):
            self._fail(int(found[1]), found[2], found[3])
        elif found := re.fullmatch(r"rank (\d+) raises (.+): (.+)", line):
            self._fail(int(found[1]), "fails", found[3], error=found[2])
        elif found := re.fullmatch(r"rank (\d+) has computed wrongly: (.+)", line):
            self._find_wrong_replica(int(found[1]), found[2])
        elif found := re.fullmatch(r"the job is paused: (.+)", line):
            self._put(KEYS.single("pause"), Pause(found[1], self.wall_s))
        elif line == "the job is resumed":
            self._delete(KEYS.single("pause"))
        elif found := re.fullmatch(r"the job is scaled to (\d+)-(\d+) nodes", line):
            self._put(KEYS.single("scale"), Scale(int(found[1]), int(found[2])))
        elif found := re.fullmatch(r"given (.+) run with (\d+) workers?", line):
            self._start(_names(found[1]), int(found[2]))
        elif found := re.fullmatch(r"(\w+(?:(?:, | and )\w+)*?) (?!and )(\w+.*)", line):
            nodes = self._present() if found[1] == "everyone" else _names(found[1])
            for node in nodes:
                self._carry_out(node, found[2], line)
        else:
            raise ValueError(f"{line!r} is no line of a case")
        return []

    def decide(self) -> list[str]:
        """Let the leader decide and act until it waits; return each decision and its changes."""
        output: list[str] = []
        self._choose_leader()
        for _ in range(_MAX_DECISIONS):
            view = replace(self._leaders_view(), gone=self._gone)
            if view.leader is None:
                return ["nobody leads"]
            if view.leader != self._leader:
                self._leader, self._leader_state = view.leader, LeaderState()
            decision = decide(self.policy, view, self._leader_state, self.now_s, self.wall_s)
            self._leader_state = decision.leader_state
            self._asked = decision.asks
            if decision.action is None:
                return [*output, self._describe_wait(decision.again_at_s, decision.message)]
            before = dict(self._items)
            self._perform(decision.action)
            output.append(f"{view.leader}: {type(decision.action).__name__}")
            output += [f"  {text}" for text in self._describe_changes(before)]
        raise AssertionError(f"the leader still acts after {_MAX_DECISIONS} decisions: {output}")

    def _choose_leader(self) -> None:
        """Let who joined first take the lead if nobody has it."""
        nodes = self.view.nodes
        if self.view.leader is None and nodes:
            record = nodes[min(nodes, key=lambda node: nodes[node].created)].record
            self._put(
                KEYS.single("leadership"),
                Leadership(record.node, record.agent, record.lease, self.policy.limits),
                record.lease,
            )

    def _describe_wait(self, again_at_s: float | None, message: str) -> str:
        until = "" if again_at_s is None else f" until {again_at_s:g} s"
        if not until and not message:
            return f"{self._leader}: nothing to do"
        return f"{self._leader}: waits{until}: {message}"

    def _describe_changes(self, before: Mapping[str, KeyValue]) -> list[str]:
        lines = []
        for name in _DOCUMENTS:
            key = KEYS.single(name)
            if key in self._items and self._items[key] != before.get(key):
                head, *rest = describe(getattr(self.view, name))
                if name == "snapshot" and lines:
                    head, rest = "as resumed from", []
                lines += [f"{name}: {head}", *(f"  {text}" for text in rest)]
        # How members are written is not for a reader of cases.
        documents = (key for key in before if "/members/" not in key and "/placements/" not in key)
        deleted = sorted(KEYS.name(key) for key in documents if key not in self._items)
        return [*lines, *(f"{name}: deleted" for name in deleted)]

    def _leaders_view(self) -> View:
        return with_reports(self.view, self._reports)

    def _present(self) -> list[str]:
        view = self.view
        if view.generation is None:
            return sorted(view.nodes)
        return [m.node for m in view.generation.members if m.node in view.nodes]

    def _set_policy(self, text: str) -> None:
        for item in text.split(", "):
            if found := re.fullmatch(r"nodes (\d+)-(\d+)", item):
                self.policy = replace(self.policy, min_nodes=int(found[1]), max_nodes=int(found[2]))
            elif found := re.fullmatch(r"last call ([\d.]+) s", item):
                self.policy = replace(self.policy, last_call_s=float(found[1]))
            elif found := re.fullmatch(r"quorum ([\d.]+) s", item):
                self.policy = replace(self.policy, quorum_timeout_s=float(found[1]))
            elif found := re.fullmatch(r"restarts (\d+)", item):
                self.policy = replace(self.policy, max_restarts=int(found[1]))
            elif found := re.fullmatch(r"parity (\d+)", item):
                self.policy = replace(self.policy, parity=int(found[1]))
            elif found := re.fullmatch(r"groups of (\d+)", item):
                self.policy = replace(self.policy, group_size=int(found[1]))
            else:
                raise ValueError(f"policy {item!r} is not known")

    def _start(self, nodes: Sequence[str], workers: int) -> None:
        for node in nodes:
            self._join(node, workers)
        self.decide()
        self.now_s += self.policy.last_call_s
        self.decide()
        for node in nodes:
            self._enter(node)
            self._run_workers(node)
        self.decide()

    def _carry_out(self, node: str, what: str, line: str) -> None:
        """Carry out one node's part of a line."""
        if found := re.fullmatch(r"joins? with (\d+) workers?(?: in rack (\w+))?( cold)?", what):
            self._join(node, int(found[1]), domain=found[2] or "", warm=not found[3])
            return
        if what == "serves the coordinator":
            self._write(self._record(node), serves_coordinator=True)
            return
        if what in ("returns", "return"):
            number = self.view.generation_number
            self._join(node, 1)
            self.memory[node] = self._lost_memory.pop(node)
            holdings = self._holdings(node)
            record = self._record(node)
            self._write(record, generation=number, phase=NodePhase.DRAINED, **holdings)
            return
        record = self._record(node)
        memory = self.memory[node]
        if what in ("is warm", "are warm"):
            self._write(record, warm=True)
        elif what in ("enters", "enter"):
            self._enter(node)
        elif found := re.fullmatch(r"runs?(?: restored from (.+))?", what):
            self._run_workers(node, found[1])
        elif found := re.fullmatch(r"wants? ranks in multiples of (\d+)(?:, at most (\d+))?", what):
            self._write(record, rank_multiple=int(found[1]), max_ranks=int(found[2] or 0))
        elif found := re.fullmatch(r"wants? ((?:\d+ )+)ranks", what):
            limits = RankLimits.of(map(int, found[1].split()))
            self._write(
                record,
                rank_multiple=limits.multiple,
                max_ranks=limits.most,
                fitting_ranks=limits.fitting,
            )
        elif found := re.fullmatch(r"completes? step (\d+)", what):
            self._write(record, step=int(found[1]))
        elif found := re.fullmatch(r"seals? step (\d+)", what):
            memory.sealed.add(SnapshotId(record.generation, int(found[1])))
        elif found := re.fullmatch(r"protects? step (\d+)", what):
            self._protect(record, SnapshotId(record.generation, int(found[1])))
        elif found := re.fullmatch(r"learns? that step (\d+) is committed", what):
            memory.known = SnapshotId(record.generation, int(found[1]))
            memory.free_older_than(memory.known, None)
        elif found := re.fullmatch(r"loses? step (\d+)", what):
            memory.sealed = {s for s in memory.sealed if s.step != int(found[1])}
            memory.protected &= memory.sealed
            self._write(record, **self._holdings(node))
        elif what in ("fences", "fence"):
            self._write(record, fenced=record.generation, committed=memory.known)
        elif what in ("drains", "drain"):
            self._write(record, phase=NodePhase.DRAINED, **self._holdings(node))
        elif what in ("finishes", "finish"):
            self._write(record, finishing=True)
        elif what in ("is done", "are done"):
            self._write(record, phase=NodePhase.DONE, **self._holdings(node))
        elif what == "ends the job":
            self._write(record, ended=Result(True, f"the workers on {node} have finished"))
        elif found := re.fullmatch(r"stands? still: (.+)", what):
            failure = Failure(FailureKind.STANDSTILL, f"{node} {found[1]}", self.wall_s)
            self._write(record, failure=failure)
        elif what in ("asks to leave", "ask to leave"):
            self._write(record, leaving=True)
        elif what in ("rejoins", "rejoin"):
            self._delete(KEYS.node(node))
            self._join(node, record.nproc)
        elif found := re.fullmatch(
            r"wants? checkpoints in (\S+)(?: every (\d+) steps| (as often as best))?", what
        ):
            every = AUTO if found[3] else int(found[2]) if found[2] else None
            self._write(record, checkpoint_url=found[1], checkpoint_every=every)
        elif what in ("writes its part", "write their parts"):
            self._write_part(record, {"entry": f"parts/{node}"})
        elif found := re.fullmatch(r"cannot write its part: (.+)", what):
            self._write_part(record, {"error": found[1]})
        elif found := re.fullmatch(r"(?:is|are) evicted: (.+)", what):
            self._put(KEYS.eviction(node), Eviction(found[1], may_return=False))
        else:
            raise ValueError(f"{line!r} is no line of a case")

    def _verdicts(self, rank: int, syndrome: str) -> PublishedVerdicts:
        verdict = PublishedVerdict(
            f"rank {rank}", (rank,), "", syndrome, self.wall_s, ("evidence",), 0.9, None, "alert"
        )
        return PublishedVerdicts(self.view.generation_number, self.wall_s, (verdict,))

    def _find_wrong_replica(self, rank: int, finding: str) -> None:
        generation = self.view.generation
        assert generation is not None
        reporter = self._record(generation.members[0].node)
        comparison = ReplicaComparison(
            self._steps.get(reporter.node, 0), generation.world_size, (rank,), finding, (rank,)
        )
        self._write(reporter, replica_comparison=comparison)

    def _join(self, node: str, workers: int, *, domain: str = "", warm: bool = True) -> None:
        self._leases += 1
        self.memory[node] = Memory()
        record = NodeRecord(
            node=node, host=f"host-{node}", nproc=workers, agent=f"host-{node}:{self._leases}",
            server=f"tcp:host-{node}:{100 + self._leases}", store_port=200 + self._leases,
            lease=self._leases, digest="d", domain=domain, warm=warm,
        )  # fmt: skip
        self._put(KEYS.node(node), record, record.lease)

    def _enter(self, node: str) -> None:
        """Forget older attempts and begin again, as an agent does that sees a new generation."""
        view, record = self.view, self._record(node)
        assert view.generation is not None, "no generation is open"
        number, resume = view.generation.generation, view.generation.resume
        self.memory[node].free_older_than(
            resume.snapshot if resume else SnapshotId(number, -1), None
        )
        if view.generation.member(node) is not None:
            self._write(
                record, generation=number, phase=NodePhase.STARTING, failure=None, finishing=False,
                persisted=None, restored_from="", times={}, replica_comparison=None,
                **self._holdings(node),
            )  # fmt: skip

    def _run_workers(self, node: str, restored_from: str | None = None) -> None:
        generation = self.view.generation
        resume = generation.resume if generation else None
        times = dict.fromkeys(("ready", "restored", "stepped"), self.wall_s)
        times["resumed_step"] = resume.snapshot.step if resume else 0
        self._write(
            self._record(node), phase=NodePhase.RUNNING, times=times,
            restored_from=restored_from or ("memory" if resume else "start"),
        )  # fmt: skip

    def _protect(self, record: NodeRecord, snapshot: SnapshotId) -> None:
        memory = self.memory[record.node]
        memory.sealed.add(snapshot)
        memory.protected.add(snapshot)
        if record.phase is NodePhase.DRAINED:
            self._write(record, **self._holdings(record.node))
            return
        protected = tuple(sorted(memory.protected))
        self._reports[record.node] = NodeReport(
            node=record.node, lease=record.lease, generation=record.generation,
            server=record.server, step=snapshot.step, protected=protected,
        )  # fmt: skip

    def _write_part(self, record: NodeRecord, part: Mapping[str, str]) -> None:
        request = self.view.persist
        assert request is not None, "no checkpoint is requested"
        snapshot = request.commit.snapshot
        persisted = PersistedPart(
            step=snapshot.step,
            generation=snapshot.generation,
            part=part,
            attempt=self.view.revisions["persist"],
        )
        self._write(record, persisted=persisted)

    def _fail(self, rank: int, how: str, message: str, error: str = "") -> None:
        view = self.view
        assert view.generation is not None, "no generation is open"
        node = next(m.node for m in view.generation.members if rank in m.ranks)
        kind = {"fails": "worker", "fails fatally": "fatal", "loses a peer": "peer"}[how]
        failure = Failure(kind, f"rank {rank} on {node} {message}", self.wall_s, rank, error)
        self._write(self._record(node), failure=failure)

    def _record(self, node: str) -> NodeRecord:
        return self.view.nodes[node].record

    def _holdings(self, node: str) -> dict[str, object]:
        memory = self.memory[node]
        return {
            "sealed": tuple(sorted(memory.sealed)),
            "protected": tuple(sorted(memory.protected)),
            "committed": memory.known,
        }

    def _write(self, record: NodeRecord, **changes: object) -> None:
        self._put(KEYS.node(record.node), replace(record, **changes), record.lease)

    def _put(self, key: str, record: Record, lease: int = 0) -> None:
        self._apply((Put(key, record.encode(), lease),))

    def _delete(self, key: str) -> None:
        """Delete a key, and with a node's all that is under the same lease."""
        lease = self._items[key].lease
        self._apply(
            [Delete(k) for k, item in self._items.items() if lease and item.lease == lease]
            or [Delete(key)]
        )

    def _perform(self, action: actions.Action) -> None:
        if isinstance(action, actions.Publish) and self._manifest_failure:
            action = actions.CancelPersist(action.request, self._manifest_failure)
            self._manifest_failure = ""
        before = self.view
        check_action(self.policy, self._leaders_view(), action)
        self._apply(transactions.leader_operations(KEYS, self.view, action, self.wall_s))
        check_transition(before, self.view)
        if isinstance(action, actions.Commit):
            persist = self.view.persist
            for memory in self.memory.values():
                memory.free_older_than(
                    action.commit.snapshot, persist.commit.snapshot if persist else None
                )

    def _apply(self, operations: Sequence[Put | Delete]) -> None:
        self._revision += 1
        for operation in operations:
            if isinstance(operation, Put):
                old = self._items.get(operation.key)
                created = old.created if old else self._revision
                self._items[operation.key] = KeyValue(
                    operation.key, operation.value, created, self._revision, operation.lease
                )
            else:
                self._items = {
                    key: item
                    for key, item in self._items.items()
                    if not (
                        key.startswith(operation.key) if operation.prefix else key == operation.key
                    )
                }


def describe(record: Record) -> list[str]:
    """Return a document in words, one or more lines."""
    match record:
        case Generation():
            return _describe_generation(record)
        case Closing():
            how = "abort" if record.abort else "in good order"
            return [
                f'generation {record.generation} "{record.reason}", {how}, '
                f"detected {_time(record.detected_at_s)}"
            ]
        case AbortOrder():
            of_all = "all are fenced" if record.all_fenced else "a lost one may still seal"
            return [f"generation {record.generation}, {of_all}"]
        case Release():
            return [f"those who leave generation {record.generation}"]
        case SnapshotCommit():
            return _describe_commit(record)
        case PersistRequest():
            asked = f", asked {_time(record.at_s)}" if record.at_s else ", asked at no time"
            return [*_describe_commit(record.commit), f"to {record.url}{asked}"]
        case CheckpointRecord():
            return [
                f"step {record.step} of generation {record.generation} in {record.url}, "
                f"at {_time(record.at_s)}, took {record.took_s:g} s"
            ]
        case StoreFailure():
            return [f'step {record.step} "{record.reason}"']
        case Result():
            return [f'{"succeeded" if record.succeeded else "failed"} "{record.message}"']
        case History():
            newest = record.recoveries[-1]
            failed = ", after a failure" if newest.after_failure else ""
            return [
                f'generation {newest.generation} "{newest.reason}"{failed}, '
                f"{newest.world_size} ranks",
                f"detected {_time(newest.detected_at_s)}, opened {_time(newest.opened_at_s)}, "
                f"stepped {_time(newest.stepped_at_s)}",
                f"resumed step {newest.resumed_step} from {newest.source}, "
                f"lost {newest.lost_steps} steps",
            ]
        case _:
            raise TypeError(f"{type(record).__name__} has no description")


def _describe_commit(commit: SnapshotCommit) -> list[str]:
    holders = ", ".join(member.node for member in commit.holders)
    return [
        f"step {commit.snapshot.step} of generation {commit.snapshot.generation}, "
        f"held by {holders}, parity {commit.parity}",
        *(f"rank {rebuild.rank} is rebuilt on {rebuild.node}" for rebuild in commit.shard_rebuilds),
        *([f"the rest is read from {commit.stored}"] if commit.stored else []),
    ]


def _describe_generation(generation: Generation) -> list[str]:
    after = ", after a failure" if generation.after_failure else ""
    resume = ["storage, or the start"]
    if generation.resume is not None:
        resume = _describe_commit(generation.resume)
    return [
        f'{generation.generation} "{generation.reason}", failures {generation.failures}{after}',
        *(
            f"{member.node}: ranks {member.ranks[0]}-{member.ranks[-1]}, group {member.group}"
            for member in generation.members
        ),
        f"parity {generation.parity}, torch store {generation.store_host}:{generation.store_port}",
        f"detected {_time(generation.detected_at_s)}, opened {_time(generation.opened_at_s)}, "
        f"reached step {generation.lost_from_step} before",
        f"resumes from {resume[0]}",
        *resume[1:],
    ]


def _time(wall_s: float) -> str:
    return f"{wall_s - WALL_CLOCK_START_S:g} s"


def _names(text: str) -> list[str]:
    return re.split(r", | and ", text)
