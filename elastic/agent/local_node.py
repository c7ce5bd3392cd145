"""Holds one node's present parts, and its progress in the job's generations."""

from __future__ import annotations

from keepstep.elastic.agent.config import AgentConfig
from keepstep.elastic.agent.membership import Membership
from keepstep.elastic.agent.peer_connections import PeerConnections
from keepstep.elastic.agent.worker_group import WorkerGroup
from keepstep.elastic.node.state import NodeState, Workers


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
    def state(self) -> NodeState:
        """The state from which the next action is decided."""
        group = self.worker_group
        return NodeState(
            record=self.membership.record,
            workers=Workers(
                generation=group.generation,
                present=bool(group.workers),
                done=group.done,
                running=group.running,
                failure=group.failure,
                awaits_abort_order=group.awaits_abort_order,
            ),
            drained=self.drained,
            ordered=self.ordered,
            paused=self.paused,
        )
