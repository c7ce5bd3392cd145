"""Keeps the newest report of each node, and counts which snapshots all members protect.

A report costs the same at any number of nodes: at every snapshot the leader receives one of each
node, and looks at all of them, which costs time linear in nodes, once the last one has come.
"""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.rendezvous.records import Generation, NodeReport

_MAX_SNAPSHOTS = 8
"""How many snapshots are counted; a node has no more than three at a time."""


class Reports:
    """The reports of nodes to this one."""

    def __init__(self) -> None:
        self._newest: dict[str, NodeReport] = {}
        self._nodes: dict[SnapshotId, set[str]] = {}

    @property
    def newest(self) -> Mapping[str, NodeReport]:
        """The newest report of each node."""
        return self._newest

    def receive(self, report: NodeReport) -> None:
        """Keep a node's newest report."""
        self._newest[report.node] = report
        for snapshot in report.protected:
            self._nodes.setdefault(snapshot, set()).add(report.node)
        while len(self._nodes) > _MAX_SNAPSHOTS:
            del self._nodes[min(self._nodes)]

    def completes(self, report: NodeReport, generation: Generation) -> bool:
        """Whether as many nodes as the generation has protect the newest snapshot of a report.

        Some may have left since: that is for the leader's decision to see.
        """
        if not report.protected:
            return False
        nodes = self._nodes.get(report.protected[-1], set())
        return len(nodes) >= len(generation.members)

    def protected_by_all(self, generation: Generation) -> SnapshotId | None:
        """Return the newest snapshot of a generation that every member has reported as protected.

        It was true of each when it reported, and nobody forgets a snapshot before a newer one is
        committed: so it stays true of all that are not lost.
        """
        members = {member.node for member in generation.members}
        return max(
            (
                snapshot
                for snapshot, nodes in self._nodes.items()
                if snapshot.generation == generation.generation and members <= nodes
            ),
            default=None,
        )
