"""What the monitor daemon needs of others, as protocols, so that `monitor` imports neither `elastic` nor a diagnosis in
particular.

The daemon owns what it is given and closes it. RingReading and diagnosis are called on the daemon's working thread and must not block;
alignment, publisher, enforcer and the job status source on another thread, where they may. Each gets one call at a
time. Whatever raises is logged with its consequence and called again at the next turn, so a defect in one part blinds that
part only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from keepstep.monitor.diagnosis.metrics import NodeMetrics
from keepstep.monitor.diagnosis.policy import EnforcementAction
from keepstep.monitor.diagnosis.tables import Digest
from keepstep.monitor.records import Communicator, JobRecords, RankRecords
from keepstep.monitor.verdicts import Verdict


@dataclass(frozen=True, slots=True)
class RingReading:
    """One rank's ring as it was found.

    Args:
        records: what the rank told: all that its ring holds, or only what may have changed since the last reading.
        communicators: the ring's table of process groups.
        pid: the process that writes it.
        incarnation: tells one writer from the next of the same rank; record positions begin anew with it.
        generation: of the job, as the ring has it; 0 where nobody counts them.
        world_size: number of ranks, as the ring has it; 0: not known.
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
        """Return every rank's ring as it is now; ranks come and go with generations."""

    def close(self) -> None:
        """Let go of the rings. Their writers are not touched."""


class Probe(Protocol):
    """Measures this node."""

    def sample(self, workers: Mapping[int, int]) -> NodeMetrics:
        """Return the measures as they are now. `workers`: process id of each rank on this node, whose cgroup it is that counts."""

    def close(self) -> None:
        """Let go of devices."""


class Diagnosis(Protocol):
    """Draws conclusions from digests. Pure: what it must remember it returns and gets back."""

    def __call__(
        self,
        told: Digest,
        communicators: Mapping[int, Communicator],
        nodes: Mapping[int, str],
        metrics: Mapping[str, NodeMetrics],
        past: Any,
        now_s: float,
    ) -> tuple[Any, Sequence[Verdict]]:
        """Return what to remember, and the verdicts that hold now.

        Args:
            told: what all ranks told since the last call; ranks not in it are as they were.
            communicators: of the job.
            nodes: each rank's node.
            metrics: the newest measures of each node.
            past: what the last call returned first; None at the first, and when ranks or their processes have changed.
            now_s: this daemon's monotonic clock.
        """


class Alignment(Protocol):
    """Estimates the clocks' offsets between nodes. Pure."""

    def __call__(self, job: JobRecords, reference: str) -> JobRecords:
        """Return the same records with `offset_s` and `offset_error_s` filled in; `reference` is the node whose clock is the job's."""


class VerdictPublisher(Protocol):
    """Takes the verdicts that hold to where decisions are made (`elastic`: the coordinator).

    Like `Enforcer` and `JobStatusSource` it may raise RuntimeUnreachable, which is no fault of the monitor's: a job ends, and its coordinator
    with it.
    """

    def publish(self, verdicts: Sequence[Verdict], generation: int, now_s: float) -> None:
        """Publish all verdicts that hold now, after every diagnosis whose verdicts differ from the last.

        Args:
            verdicts: all of them; nodes are named as the job status names them, where there is one.
            generation: of the job, that they speak of.
            now_s: the job's clock.
        """

    def close(self) -> None:
        """Let go of connections."""


class Enforcer(Protocol):
    """Carries out what the policy decided (`elastic`: by asking the job's agents)."""

    def enforce(self, action: EnforcementAction, generation: int) -> bool:
        """Have a worker restarted or a node replaced; False if the job is going on to another generation, or has."""

    def close(self) -> None:
        """Let go of connections."""


@dataclass(frozen=True, slots=True)
class RecoveryStatus:
    """One change of generation, in wall-clock seconds since the epoch.

    Args:
        generation: the one that began.
        reason: why the one before it ended.
        world_size: ranks in it.
        detected_at_s: the trouble was known.
        opened_at_s: members settled.
        ready_at_s: process groups up.
        restored_at_s: every rank has its state.
        stepped_at_s: the first step is done.
        resumed_step: step that it resumed from.
        lost_steps: steps that were done again.
        source: where state came from.
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
    """A node of the job: its name, what it is doing, its ranks (empty for a spare), and the bytes its snapshots take."""

    node: str
    phase: str
    ranks: tuple[int, ...]
    step: int
    snapshot_nbytes: int


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What a job's runtime knows of it that records do not tell.

    Args:
        began_at_s: wall clock at the job's first generation.
        generation: the current one.
        members: nodes that are present.
        recoveries: changes of generation, oldest first.
        snapshot_step: newest step that is committed in memory; None before the first.
        snapshot_at_s: wall clock of that commit; None where not known.
        checkpoint_step: newest step in storage.
        checkpoint_url: where.
        parity: nodes of each group whose loss memory survives.
    """

    began_at_s: float
    generation: int
    members: tuple[MemberStatus, ...]
    recoveries: tuple[RecoveryStatus, ...]
    snapshot_step: int | None = None
    snapshot_at_s: float | None = None
    checkpoint_step: int | None = None
    checkpoint_url: str = ""
    parity: int = 0

    def places(self) -> dict[int, str]:
        """Return each rank's node."""
        return {rank: member.node for member in self.members for rank in member.ranks}


class JobStatusSource(Protocol):
    """Where the job status comes from, for jobs that keepstep runs; other jobs have none."""

    def job_status(self) -> JobStatus | None:
        """Return the job status as far as it is known; None while there is no such job: it may begin later, or again."""

    def close(self) -> None:
        """Let go of connections."""


@dataclass(frozen=True, slots=True)
class JobRuntime:
    """What a job's own runtime offers to its monitor."""

    job_status_source: JobStatusSource
    publisher: VerdictPublisher
    enforcer: Enforcer
