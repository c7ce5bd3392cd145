"""Defines the protocols of the monitor daemon's parts; `monitor` therefore never imports `elastic`.

The daemon owns the parts that it is given and closes them. Rings are read and diagnosed on the
daemon's working thread, so `JobReader.read` and `Diagnosis` must not block. Alignment, publisher,
enforcer and job status source run on another thread and may block. Each part gets one call at a
time. An exception is logged with its consequence and the part is called again at the next turn, so
a defect in one part disables that part only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from keepstep.monitor.diagnosis.metrics import NodeMetrics
from keepstep.monitor.diagnosis.policy import ActionKind, EnforcementAction
from keepstep.monitor.diagnosis.tables import Digest
from keepstep.monitor.records import Communicator, JobRecords, RankRecords
from keepstep.monitor.verdicts import Verdict


@dataclass(frozen=True, slots=True)
class RingReading:
    """One rank's ring as it was read.

    Args:
        records: the rank's records: all that its ring holds, or only those that may have changed
            since the last reading.
        communicators: the ring's table of process groups.
        pid: the process that writes it.
        incarnation: identifies the writer among successive writers of the same rank; record
            positions restart with it.
        generation: of the job, as the ring states it; 0 if the job has no generations.
        world_size: number of ranks, as the ring states it; 0: not known.
        created_s: node's monotonic clock when the ring was created.
    """

    records: RankRecords
    communicators: tuple[Communicator, ...]
    pid: int
    incarnation: str
    generation: int = 0
    world_size: int = 0
    created_s: float = 0.0


class JobReader(Protocol):
    """Reads the rings of one job on this node."""

    def read(self) -> Sequence[RingReading]:
        """Return the current state of every rank's ring; ranks change with generations."""

    def read_all(self) -> Sequence[RingReading]:
        """Return everything that the rings hold. May be called on any thread."""

    def close(self) -> None:
        """Close the rings. Their writers are not affected."""


class Probe(Protocol):
    """Measures this node."""

    def sample(self, workers: Mapping[int, int]) -> NodeMetrics:
        """Return the current metrics of the node.

        Args:
            workers: process id of each rank on this node; their cgroup is the one that is measured.
        """

    def close(self) -> None:
        """Close the devices."""


class Diagnosis(Protocol):
    """Concludes verdicts from digests.

    Pure: the state to remember is returned and passed in again.
    """

    def __call__(
        self,
        new_digest: Digest,
        communicators: Mapping[int, Communicator],
        nodes: Mapping[int, str],
        metrics: Mapping[str, NodeMetrics],
        past: Any,
        now_s: float,
        /,
    ) -> tuple[Any, Sequence[Verdict]]:
        """Return the state to remember, and the verdicts that hold now.

        Args:
            new_digest: what all ranks recorded since the last call; ranks not in it are unchanged.
            communicators: of the job.
            nodes: each rank's node.
            metrics: the newest metrics of each node.
            past: the state that the last call returned; None at the first call. When ranks or
                their processes have changed, what its `renewed` returned, or None if it has none.
            now_s: this daemon's monotonic clock.
        """


@runtime_checkable
class Renewable(Protocol):
    """A state of diagnosis that remembers something beyond the processes that it is about."""

    def renewed(self) -> Any:
        """Return the state for other processes."""


class Alignment(Protocol):
    """Estimates the clock offsets between nodes. Pure."""

    def __call__(self, job: JobRecords, reference: str) -> JobRecords:
        """Return the same records with `offset_s` and `offset_error_s` filled in.

        Args:
            job: records of all ranks.
            reference: the node whose clock is the job's.
        """


class VerdictPublisher(Protocol):
    """Publishes current verdicts to the job's runtime (`elastic`: the coordinator).

    Like `Enforcer` and `JobStatusSource` it may raise RuntimeUnreachable, which is not a fault of
    the monitor: a job ends, and its coordinator with it.
    """

    def publish(self, verdicts: Sequence[Verdict], generation: int, now_s: float) -> bool:
        """Publish all verdicts that hold now; called until they are those published last.

        Returns whether they are published; if not, they are passed again in the next round.

        Args:
            verdicts: all of them; nodes are named as in the job status, if there is one.
            generation: of the job, to which they apply.
            now_s: the job's clock.
        """

    def close(self) -> None:
        """Close connections."""


class Enforcer(Protocol):
    """Carries out what the policy decided (`elastic`: requests it from the job's agents)."""

    def enforce(self, action: EnforcementAction, generation: int) -> ActionKind | None:
        """Have a worker restarted or a node replaced.

        Returns what is done: the action's kind; RESTART_WORKER if `fallback_ranks` are restarted
        because the job cannot do without a node to replace; None if nothing is, as the job has
        changed to another generation, or is about to.
        """

    def close(self) -> None:
        """Close connections."""


@dataclass(frozen=True, slots=True)
class RecoveryStatus:
    """One change of generation, in wall-clock seconds since the epoch.

    Args:
        generation: the new generation.
        reason: why the previous one ended.
        world_size: ranks in the new generation.
        detected_at_s: the failure was detected.
        opened_at_s: the members were decided.
        ready_at_s: process groups were ready.
        restored_at_s: every rank had its state.
        stepped_at_s: the first step was completed.
        resumed_step: step that it resumed from.
        lost_steps: steps that were repeated.
        source: where the state was restored from.
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


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One node of a job.

    Args:
        node: its name.
        phase: what it is doing.
        ranks: its ranks; empty for a spare.
        step: its newest completed step.
        snapshot_nbytes: memory that its snapshots use.
    """

    node: str
    phase: str
    ranks: tuple[int, ...]
    step: int
    snapshot_nbytes: int


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Facts about a job that only its runtime knows, and records do not contain.

    Args:
        began_at_s: wall clock at the job's first generation.
        generation: the current one.
        members: nodes that are present.
        recoveries: changes of generation, oldest first.
        snapshot_step: newest step that is committed in memory; None before the first.
        checkpoint_step: newest step in storage.
        checkpoint_url: where that checkpoint is stored.
        checkpoint_at_s: when it was published; 0.0: not known.
        store_failure: which step could not be stored, and why; "" if the newest one was.
        store_failed_at_s: when that was.
        changing: why the generation ends, while there is no next one; "" otherwise.
        parity: number of nodes of each group that may be lost without losing the state in memory.
        standstill_s: how long the job may stand still; 0.0: for ever, or not known.
        paused: why the job is paused; "" if it is not.
        paused_at_s: when it was.
    """

    began_at_s: float
    generation: int
    members: tuple[MemberStatus, ...]
    recoveries: tuple[RecoveryStatus, ...]
    snapshot_step: int | None = None
    checkpoint_step: int | None = None
    checkpoint_url: str = ""
    checkpoint_at_s: float = 0.0
    store_failure: str = ""
    store_failed_at_s: float = 0.0
    changing: str = ""
    parity: int = 0
    standstill_s: float = 0.0
    paused: str = ""
    paused_at_s: float = 0.0

    def places(self) -> dict[int, str]:
        """Return each rank's node."""
        return {rank: member.node for member in self.members for rank in member.ranks}


class JobStatusSource(Protocol):
    """Provides the job status of jobs that keepstep runs; other jobs have none."""

    def job_status(self) -> JobStatus | None:
        """Return the job status as far as it is known.

        None while there is no such job: it may begin later, or again.
        """

    def close(self) -> None:
        """Close connections."""


@dataclass(frozen=True, slots=True)
class JobRuntime:
    """The parts that a job's runtime provides to its monitor."""

    job_status_source: JobStatusSource
    publisher: VerdictPublisher
    enforcer: Enforcer
