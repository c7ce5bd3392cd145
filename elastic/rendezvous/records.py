"""Defines the documents that agents keep in the coordinator, as typed values.

Pure. Every document is JSON under `/keepstep/<job>/`; this module alone encodes and decodes them.
Node records carry the node's lease and die with it; everything else lives until the job ends.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import msgspec

from keepstep.checkpoint.format.layout.retention import Retention
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.rank_limits import decode_fitting

_SECRET_NBYTES = 32


class Record:
    """A frozen dataclass that round-trips through JSON.

    Fields that a newer version has added are ignored; a field of another type is refused.
    """

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    def encode(self) -> bytes:
        """Return the record as UTF-8 JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Parse a result of `to_json`.

        Raises:
            UsageError: the data is not such a record.
        """
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise unreadable(cls.__name__, error) from error

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Parse a result of `encode`. Raises as `from_json` does."""
        try:
            return msgspec.json.decode(data, type=cls)
        # RecursionError: nesting deeper than the interpreter's stack allows.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise unreadable(cls.__name__, error) from error


def decode_secret(data: bytes) -> bytes:
    """Parse the job's secret, 32 bytes or more in hexadecimal.

    Raises:
        UsageError: the data has another form.
    """
    try:
        secret = bytes.fromhex(data.decode())
    except ValueError as error:
        raise unreadable("secret", error) from error
    if len(secret) < _SECRET_NBYTES:
        raise unreadable("secret", ValueError(f"it has {len(secret)} bytes"))
    return secret


def decode_number(text: str) -> int:
    """Parse the rank or generation in a key.

    Raises:
        UsageError: the text is no such number.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise unreadable("key", ValueError(f"{text!r:.40} is not a number"))
    return int(text)


def unreadable(name: str, error: Exception) -> UsageError:
    """Return the error for a document of the coordinator that this version cannot read."""
    return UsageError(
        f"the coordinator holds a {name} that this version of keepstep cannot read "
        f"({error}); run one version of keepstep on all nodes, or choose another --job name"
    )


class NodePhase(enum.StrEnum):
    """A node's progress in the generation that its record names."""

    WAITING = "waiting"
    """No workers: not a member, or not yet started."""
    STARTING = "starting"
    """Workers are being started or are entering the generation."""
    RUNNING = "running"
    """Every worker has completed a step here, or runs a script that does not report."""
    DRAINED = "drained"
    """No worker of the generation will write again, and every shard that could be sealed is
    sealed."""
    DONE = "done"
    """Every worker has exited with success."""


@dataclass(frozen=True, slots=True)
class Eviction(Record):
    """Asks a node to leave. `may_return`: it may join again once its doctor finds nothing."""

    reason: str
    may_return: bool


class FailureKind(enum.StrEnum):
    """The place of a failure's cause, as far as it is known."""

    WORKER = "worker"
    """A worker of this node failed."""
    PEER = "peer"
    """A collective failed; its cause is on another node, or unknown."""
    RESTART = "restart"
    """A worker's script has to be restarted. Nothing failed, nor did the collectives that break by
    it."""
    STANDSTILL = "standstill"
    """No rank of this node has gone on for as long as the job allows."""
    FATAL = "fatal"
    """The job's input cannot work, so that another attempt is pointless."""

    @property
    def is_cause(self) -> bool:
        """Whether something failed here, and not elsewhere."""
        return self in (FailureKind.WORKER, FailureKind.STANDSTILL, FailureKind.FATAL)


@dataclass(frozen=True, slots=True)
class Failure(Record):
    """Why a node's part of a generation cannot go on. `at_s` in wall-clock seconds.

    `error` is the type of the user script's exception, the line that raised it and the step; "" for
    any other failure.
    """

    kind: FailureKind
    message: str
    at_s: float
    rank: int | None = None
    error: str = ""

    @property
    def summary(self) -> str:
        """The message without the traceback that may follow its first line."""
        return self.message.partition("\n")[0]


@dataclass(frozen=True, slots=True)
class PersistedPart(Record):
    """One holder's part of a checkpoint: written and checksummed, or the error that prevented it.

    `attempt` is the revision of the request that it answers: a snapshot may be asked for again.
    """

    step: int
    generation: int
    part: Mapping[str, Any]
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint(Record):
    """The checkpoint from which a generation resumed from storage, and its neighbours there.

    Attributes:
        step: the step that it resumed from.
        newest_generation: the greatest generation of any checkpoint there, damaged ones included.
    """

    step: int
    newest_generation: int


@dataclass(frozen=True, slots=True)
class RestoreComparison(Record):
    """The state that ranks sealed after restoring, compared with the restored snapshot.

    Attributes:
        step: the step of both.
        nbytes: the number of bytes compared: the node's part of the older snapshot.
        differing: tensors that differ, the first few.
    """

    step: int
    nbytes: int
    differing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaComparison(Record):
    """Ranks that hold the same parts of the state, compared with each other.

    Attributes:
        step: after which step.
        replicas: the number of ranks that were compared.
        differing: ranks that differ from a majority; all of a group if it has no majority.
        finding: the result, as a sentence; "" if all are equal.
        to_replace: ranks that are known to have computed wrongly, and whose nodes are to leave.
    """

    step: int
    replicas: int
    differing: tuple[int, ...] = ()
    finding: str = ""
    to_replace: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeRecord(Record):
    """A node as its agent describes it.

    The revision at which its key was created, not this record, orders nodes by seniority. Times are
    wall-clock seconds.

    Attributes:
        host, agent, server: where peers reach the node, its agent and its snapshot server.
        store_port: open, and ready to serve the next generation's torch store.
        warm: the node's workers can start at once; nobody waits for a node that is not warm.
        domain: its failure domain, such as a rack or a switch.
        loaded: the checkpoint that its rank 0 found in storage; None if the rank is elsewhere, or
            did not look.
        restore_comparison: of this generation; None if nothing could be compared here.
        replica_comparison: the last one that its rank 0 has reported.
        fenced: the newest generation in which its snapshot server seals nothing more; its workers
            wait for the order to abort.
        rank_multiple: the number of ranks must be a multiple of this; 1 until its workers know.
        max_ranks: the greatest number of ranks for which the mesh has places; 0 for any.
        fitting_ranks: which multiples fit, as `RankLimits.fitting` has them; empty: all of them.
        sealed: snapshots that all of its ranks have sealed.
        protected: those of them whose parity is complete on this node.
        committed: the newest snapshot of its generation that it knows as committed, once it learns
            of no newer one: it is fenced, or has drained.
        checkpoint_every: steps between checkpoints; 0 to choose automatically.
        checkpoint_compression: how they are compressed; None: not at all.
        serves_coordinator: its agent runs the coordinator, which ends with it.
        checkpoint_retention: which of them are kept; None: all.
        processes: ids of its workers' processes, by local rank.
        snapshot_every: steps between snapshots that its ranks have chosen; 0 if the user has.
        snapshot_cost_s: seconds that each of these snapshots costs the training.
        ended: how the launcher of this node has ended the job for all, as torchrun's may.
    """

    node: str
    host: str
    nproc: int
    agent: str
    server: str
    store_port: int
    lease: int
    digest: str
    domain: str = ""
    processes: tuple[int, ...] = ()
    warm: bool = False
    generation: int = 0
    phase: NodePhase = NodePhase.WAITING
    leaving: bool = False
    failure: Failure | None = None
    step: int = 0
    sealed: tuple[SnapshotId, ...] = ()
    protected: tuple[SnapshotId, ...] = ()
    finishing: bool = False
    checkpoint_url: str | None = None
    checkpoint_every: int | None = None
    checkpoint_compression: Literal["zstd"] | None = None
    persisted: PersistedPart | None = None
    memory_nbytes: int = 0
    snapshot_every: int = 0
    snapshot_cost_s: float = 0.0
    times: Mapping[str, float] = field(default_factory=dict)
    restored_from: str = ""
    loaded: LoadedCheckpoint | None = None
    restore_comparison: RestoreComparison | None = None
    replica_comparison: ReplicaComparison | None = None
    fenced: int = 0
    rank_multiple: int = 1
    max_ranks: int = 0
    committed: SnapshotId | None = None
    fitting_ranks: str = ""
    serves_coordinator: bool = False
    checkpoint_retention: Retention | None = None
    ended: Result | None = None

    def __post_init__(self) -> None:
        """Refuse values that nobody could read later. Raises ValueError."""
        if self.fitting_ranks:
            decode_fitting(self.fitting_ranks)


@dataclass(frozen=True, slots=True)
class Limits(Record):
    """The limits of the job by which its leader decides, for forecasts of its decisions.

    `waits_s`: how long it waits for enough nodes. `standstill_s`: how long it may stand still; 0:
    for ever.
    """

    min_nodes: int
    max_nodes: int
    parity: int
    group_size: int
    waits_s: float
    standstill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Leadership(Record):
    """The node that decides, until its lease ends: how its agent is reached, and the lease."""

    node: str
    agent: str
    lease: int
    limits: Limits | None = None


@dataclass(frozen=True, slots=True)
class NodeReport(Record):
    """A report that an agent sends to the leader directly, because it changes at every step.

    `lease`, `generation` and `server` name the membership, the generation and the snapshot server
    that it is about.
    """

    node: str
    lease: int
    generation: int
    server: str
    step: int
    protected: tuple[SnapshotId, ...]


@dataclass(frozen=True, slots=True)
class CommitAnnouncement(Record):
    """Announces to members that all of them protect a snapshot, before the coordinator holds it.

    `after` is the revision that a node's view has to show first: by then it shows the request to
    store that was pending when this was announced. 0 if none was.
    """

    snapshot: SnapshotId
    after: int = 0


@dataclass(frozen=True, slots=True)
class Member(Record):
    """A node's place in a generation: ranks `first_rank` to `first_rank + nproc - 1`.

    Members of the same `group` protect each other's snapshots, in the order of the members. A node
    fails together with others of its `domain`, if that is known.
    """

    node: str
    host: str
    nproc: int
    first_rank: int
    agent: str
    server: str
    group: int = 0
    domain: str = ""

    @property
    def ranks(self) -> range:
        """The ranks of its workers."""
        return range(self.first_rank, self.first_rank + self.nproc)


@dataclass(frozen=True, slots=True)
class ShardRebuild(Record):
    """A lost rank's shard, and the node whose snapshot server rebuilds it from parity."""

    rank: int
    node: str
    server: str


@dataclass(frozen=True, slots=True)
class SnapshotCommit(Record):
    """A snapshot that every rank of its generation has sealed, and who holds it.

    The coordinator holds it without `holders`: they are the members of the snapshot's generation,
    but for those in `absent` (`keepstep.elastic.rendezvous.placements`).

    Attributes:
        snapshot: which one.
        holders: the nodes that hold its shards.
        parity: how many holders of each group may be lost.
        shard_rebuilds: who rebuilds the shards of lost holders, when a generation resumes from it.
        stored: URL of the checkpoint that has the shards of lost holders, if more were lost than
            parity gives back; `holders` are then those that are left.
        stored_generation: the generation that the checkpoint has in storage.
        absent: the nodes that are not among `holders` although they were members.
        at_s: when it was written to the coordinator, in wall-clock seconds.
    """

    snapshot: SnapshotId
    holders: tuple[Member, ...] = ()
    parity: int = 0
    shard_rebuilds: tuple[ShardRebuild, ...] = ()
    stored: str = ""
    stored_generation: int = 0
    absent: tuple[str, ...] = ()
    at_s: float = 0.0

    def group_of(self, node: str) -> tuple[Member, ...]:
        """Return the members of a holder's erasure group, by position."""
        return group_of(self.holders, node)


@dataclass(frozen=True, slots=True)
class DomainLoss(Record):
    """A node of a failure domain was lost; `at_s` in wall-clock seconds."""

    domain: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Generation(Record):
    """Who takes part, as which ranks, resuming from where: enough to rebuild any worker.

    The coordinator holds it without `members`, which its `Placement` names.

    Attributes:
        resume: the snapshot to resume from; None for the newest checkpoint, or the beginning.
        failures: generations in a row that a failure ended without progress.
        failing_node: the node on which all of these failures were; "" if that is unknown.
        last_error: `Failure.error` of the last failure of a worker that ended a generation.
        reached: the step that could be resumed from when the generation was opened.
        lost_from_step: the step that the generation before had reached.
        parity: how many nodes of each erasure group may be lost.
        after_failure: something failed in the generation before.
        failures_per_s: how often something of the job fails, as far as that is known.
        losses: nodes that were lost in the last hour, as far as their failure domains are known.
    """

    generation: int
    members: tuple[Member, ...]
    store_host: str
    store_port: int
    reason: str
    resume: SnapshotCommit | None = None
    failures: int = 0
    failing_node: str = ""
    last_error: str = ""
    reached: int = 0
    lost_from_step: int = 0
    detected_at_s: float = 0.0
    opened_at_s: float = 0.0
    parity: int = 0
    after_failure: bool = False
    failures_per_s: float = 0.0
    losses: tuple[DomainLoss, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(member.nproc for member in self.members)

    def member(self, node: str) -> Member | None:
        """Return the node's place, or None if it has none."""
        return next((member for member in self.members if member.node == node), None)


@dataclass(frozen=True, slots=True)
class Placement(Record):
    """Names the members of one generation, in the order of their ranks.

    Attributes:
        chunks: digests of the lists of members, each under a key of its own. Generations that place
            the same nodes in the same way share them.
        groups: the members' erasure groups, compressed.
    """

    chunks: tuple[str, ...]
    groups: str


def group_of(members: tuple[Member, ...], node: str) -> tuple[Member, ...]:
    """Return the members of a node's erasure group, by position; none if the node is no member."""
    group = next((member.group for member in members if member.node == node), None)
    return tuple(member for member in members if member.group == group)


@dataclass(frozen=True, slots=True)
class Closing(Record):
    """Ends a generation: its members drain.

    `abort`: something has failed, so that no member waits for the end of its step. `pauses`: the
    next generation waits until somebody resumes the job. `is_unexplained`: the cause of the
    failure that is the reason is elsewhere, or unknown.
    """

    generation: int
    reason: str
    abort: bool
    detected_at_s: float
    pauses: bool = False
    is_unexplained: bool = False


@dataclass(frozen=True, slots=True)
class Release(Record):
    """Lets members leave that want to: too few stay, and their snapshots are not needed."""

    generation: int


@dataclass(frozen=True, slots=True)
class AbortOrder(Record):
    """Lets workers abort their collectives: no snapshot server seals garbage that those leave.

    `all_fenced`: that holds for every member. A lost member may still seal, so that only committed
        snapshots of the generation are used. `committed` is the newest snapshot of the generation
        that a member knew as committed before it was fenced.
    """

    generation: int
    all_fenced: bool
    committed: SnapshotId | None = None


@dataclass(frozen=True, slots=True)
class PersistRequest(Record):
    """Asks the holders of a committed snapshot to write it to storage; `at_s` is when.

    `run` is the same for all requests of one run of the job, and for no other run's. `base` is
    added to the generation in storage, so that no earlier run has stored under it. `compression` is
    that of the stored tensors. `retention` says which checkpoints are kept then; None: all.
    """

    commit: SnapshotCommit
    url: str
    at_s: float
    run: str
    base: int = 0
    compression: Literal["zstd"] | None = None
    retention: Retention | None = None

    @property
    def stored_generation(self) -> int:
        """The generation that the checkpoint has in storage."""
        return self.base + self.commit.snapshot.generation


@dataclass(frozen=True, slots=True)
class CheckpointRecord(Record):
    """The newest checkpoint in storage: when it was published, and how long storing it took.

    `generation` is 0 if an earlier launch of the job has stored it. `base` is what this launch adds
    to the numbers of its generations in storage.
    """

    step: int
    generation: int
    url: str
    at_s: float
    took_s: float = 0.0
    base: int = 0


@dataclass(frozen=True, slots=True)
class StoreFailure(Record):
    """The newest step that could not be stored: why, when, and how many have failed in a row."""

    step: int
    reason: str
    at_s: float = 0.0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Recovery(Record):
    """One change of generation, phase by phase, in wall-clock seconds.

    `after_failure`: a failure caused it.
    """

    generation: int
    reason: str
    world_size: int
    detected_at_s: float
    opened_at_s: float
    ready_at_s: float
    restored_at_s: float
    stepped_at_s: float
    resumed_step: int
    lost_steps: int
    source: str
    after_failure: bool = False


@dataclass(frozen=True, slots=True)
class History(Record):
    """The newest recoveries, oldest first."""

    recoveries: tuple[Recovery, ...] = ()


@dataclass(frozen=True, slots=True)
class PublishedVerdict(Record):
    """A verdict of the monitor.

    `since_s` in wall-clock seconds; `cost_s_per_step` None for a standstill; `advice` says what a
    person should do.
    """

    subject: str
    ranks: tuple[int, ...]
    node: str
    syndrome: str
    since_s: float
    evidence: tuple[str, ...]
    confidence: float
    cost_s_per_step: float | None
    advice: str


@dataclass(frozen=True, slots=True)
class PublishedVerdicts(Record):
    """The monitor's verdicts about one generation's ranks at a time.

    `omitted` counts those that are not among `verdicts`.
    """

    generation: int
    at_s: float
    verdicts: tuple[PublishedVerdict, ...]
    omitted: int = 0


@dataclass(frozen=True, slots=True)
class RestartRequest(Record):
    """The worker that is this rank in this generation is to be killed, and so replaced.

    `is_standstill`: because the job stands still.
    """

    generation: int
    rank: int
    reason: str
    is_standstill: bool = False


@dataclass(frozen=True, slots=True)
class Scale(Record):
    """How many nodes a generation has from now on, in place of what the nodes were started with."""

    min_nodes: int
    max_nodes: int


@dataclass(frozen=True, slots=True)
class Pause(Record):
    """Stops training, with its state stored, as long as this is there; `at_s` is when it began."""

    reason: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Result(Record):
    """How the job ended.

    `kept`: the generation in which it failed, where its nodes keep the state in memory for a while.
    """

    succeeded: bool
    message: str
    kept: int = 0
