"""Holds the limits of a job, as its users have set them and change them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepstep.elastic.rendezvous.records import Limits, Scale


@dataclass(frozen=True, slots=True)
class RendezvousPolicy:
    """The job's limits, as the user has set them.

    Attributes:
        min_nodes, max_nodes: how many nodes a generation has.
        last_call_s: how long to wait for further nodes once there are enough.
        quorum_timeout_s: how long to wait for enough nodes.
        return_s: how long to wait for lost nodes that alone hold what is committed.
        max_restarts: generations in a row that may end in a worker failure without progress.
        parity: nodes of each erasure group that may be lost at once.
        group_size: about how many nodes an erasure group has.
        standstill_s: how long ranks may make no step before they are restarted; 0: for ever.
    """

    min_nodes: int
    max_nodes: int
    last_call_s: float = 1.0
    quorum_timeout_s: float = 600.0
    return_s: float = 5.0
    max_restarts: int = 3
    parity: int = 1
    group_size: int = 8
    standstill_s: float = 1800.0

    @property
    def limits(self) -> Limits:
        """The limits that the leader publishes."""
        return Limits(
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            parity=self.parity,
            group_size=self.group_size,
            waits_s=self.quorum_timeout_s,
            standstill_s=self.standstill_s,
        )

    def scaled(self, scale: Scale | None) -> RendezvousPolicy:
        """Return the limits with the numbers of nodes that hold now."""
        if scale is None:
            return self
        return replace(self, min_nodes=scale.min_nodes, max_nodes=scale.max_nodes)
