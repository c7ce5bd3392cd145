"""Claims about what a node tells its workers of committed snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from unittest.mock import AsyncMock, Mock

import pytest

from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.elastic.agent.node_snapshots import NodeSnapshots
from keepstep.elastic.worker.messages import SnapshotCommitted


@pytest.mark.parametrize(("generation", "told"), [(2, {0: 3}), (1, {})])
def test_workers_are_told_what_the_commits_of_their_own_generation_grant(
    generation: int, told: Mapping[int, int]
) -> None:
    """A step of an older one would name a buffer by a number of this one."""
    node = Mock()
    node.worker_group.generation = 2
    node.worker_group.broadcast = AsyncMock()
    snapshots = NodeSnapshots(node, Mock())
    snapshots.supervisor = Mock()
    snapshots.supervisor.server.commit = AsyncMock(return_value={0: 3})
    asyncio.run(snapshots.commit(SnapshotId(generation, 9)))
    node.worker_group.broadcast.assert_awaited_once_with(SnapshotCommitted(step=9, granted=told))
