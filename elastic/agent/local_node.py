"""Holds one node's present parts, and its progress in the job's generations."""

from __future__ import annotations

from keepstep.elastic.agent.config import AgentConfig
from keepstep.elastic.agent.membership import Membership
from keepstep.elastic.agent.peer_connections import PeerConnections
from keepstep.elastic.agent.worker_group import WorkerGroup
from keepstep.elastic.rendezvous.records import NodePhase


class LocalNode:
    """One node of a job, over all its memberships.

    Args:
        config: what runs here, and how.
        worker_group: its workers.

    Attributes:
        membership: the present one; set before anything uses it.
        connections: to other agents; set before anything uses it.
        drained: the newest generation that has ended here; 0: none.
        ordered: the newest one whose workers have the order to abort; 0: none.
        paused: the newest one whose workers ended because the job is paused; 0: none.
    """

    membership: Membership
    connections: PeerConnections

    def __init__(self, config: AgentConfig, worker_group: WorkerGroup) -> None:
        self.config = config
        self.worker_group = worker_group
        self.drained = self.ordered = self.paused = 0

    def forget(self) -> None:
        """Forget the generations of a job that is over."""
        self.worker_group.forget()
        self.drained = self.ordered = self.paused = 0

    @property
    def entered(self) -> int:
        """The newest generation that this node has entered, or that is over for it."""
        return max(self.worker_group.generation, self.drained)

    @property
    def ended(self) -> int:
        """The newest generation of which no announcement is believed here any more."""
        record = self.membership.record
        done = record.generation if record.phase is NodePhase.DONE else 0
        return max(self.drained, record.fenced, done)

    def phase(self) -> NodePhase:
        """Return what the node does now."""
        worker_group = self.worker_group
        if self.drained > worker_group.generation:
            return NodePhase.DRAINED
        if worker_group.generation == 0 or not worker_group.workers:
            is_paused = worker_group.generation and self.paused == worker_group.generation
            return NodePhase.DRAINED if is_paused else NodePhase.WAITING
        if worker_group.done and worker_group.failure is None:
            return NodePhase.DONE
        if self.drained == worker_group.generation:
            return NodePhase.DRAINED
        return NodePhase.RUNNING if worker_group.running else NodePhase.STARTING
