"""Keeps a node's record up to date: what its workers do, and now and then how far they are."""

from __future__ import annotations

import time

from keepstep.elastic.agent.local_node import LocalNode
from keepstep.elastic.agent.node_snapshots import NodeSnapshots
from keepstep.elastic.rendezvous.records import NodePhase

_PROGRESS_WRITES_PER_S = 20
"""How often all nodes together write how far they are, while nothing else is to be written.

People read that, and a leader that a node's reports do not reach."""
_LEAST_PROGRESS_PAUSE_S = 5.0
"""How long a node pauses between such writes at least: each takes several ms of a processor."""


class RecordUpdates:
    """Changes of one node's record.

    Args:
        node: whose record it is.
        snapshots: its snapshots.
    """

    def __init__(self, node: LocalNode, snapshots: NodeSnapshots) -> None:
        self._node = node
        self._snapshots = snapshots
        self._progress_due_s = 0.0

    @property
    def due_s(self) -> float | None:
        """When to record how far the workers are, in monotonic seconds; None: there are none."""
        return self._progress_due_s if self._node.worker_group.workers else None

    def update(self) -> None:
        """Bring the node's record up to date."""
        membership, worker_group = self._node.membership, self._node.worker_group
        membership.update(
            # Members that have drained go on with the workers that they have.
            warm=worker_group.warm or (membership.record.warm and bool(worker_group.workers)),
            failure=worker_group.failure,
            finishing=worker_group.finishing,
            checkpoint_url=worker_group.checkpoint_url,
            checkpoint_every=worker_group.checkpoint_every,
            checkpoint_compression=worker_group.checkpoint_compression,
            checkpoint_retention=worker_group.checkpoint_retention,
            rank_multiple=worker_group.rank_multiple,
            max_ranks=worker_group.max_ranks,
            fitting_ranks=worker_group.fitting_ranks,
            phase=self._node.state.phase,
        )
        if membership.record.phase is NodePhase.DONE:
            # Reports end with the workers; the record is what remains.
            self._snapshots.record()
        if membership.has_unwritten_changes or time.monotonic() >= self._progress_due_s:
            generation = membership.view.generation
            nodes = len(generation.members) if generation is not None else 1
            pause_s = max(_LEAST_PROGRESS_PAUSE_S, nodes / _PROGRESS_WRITES_PER_S)
            self._progress_due_s = time.monotonic() + pause_s
            server = self._snapshots.server
            membership.update(
                # A leader that this node's reports do not reach learns of them here, if late.
                sealed=server.sealed,
                protected=server.protected,
                step=worker_group.step,
                processes=tuple(
                    worker.pid for _, worker in sorted(worker_group.workers.items()) if worker.pid
                ),
                memory_nbytes=server.memory_nbytes,
                snapshot_every=worker_group.snapshot_every,
                snapshot_cost_s=worker_group.snapshot_cost_s,
            )
