"""Claims about what a node tells its workers and the coordinator of committed snapshots."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock, Mock

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.agent import node_snapshots
from keepstep.elastic.agent.node_snapshots import NodeSnapshots


@pytest.mark.parametrize(
    ("generation", "held", "withdrawn"),
    [
        (1, (SnapshotId(1, 8),), True),
        (2, (), False),
        (1, (SnapshotId(1, 8), SnapshotId(1, 9)), False),
    ],
)
def test_a_node_without_a_place_withdraws_at_once_what_its_server_has_freed(
    monkeypatch: pytest.MonkeyPatch, generation: int, held: tuple[SnapshotId, ...], withdrawn: bool
) -> None:
    """Members tell the leader by reports, and write nothing to the coordinator for that."""
    node = Mock()
    node.state.entered = 2
    node.worker_group.tell_stored = AsyncMock()
    node.membership.answered_s = 0.0
    node.config.keeping.keep_s = 0.0
    node.membership.record.generation = generation
    node.membership.record.sealed = (SnapshotId(1, 8), SnapshotId(1, 9))
    snapshots = NodeSnapshots(node, Mock())
    snapshots.supervisor = Mock()
    snapshots.supervisor.server.sealed = held
    monkeypatch.setattr(node_snapshots, "next_part", lambda *_: None)
    monkeypatch.setattr(node_snapshots, "next_commit", lambda *_: SnapshotId(2, 3))
    monkeypatch.setattr(snapshots, "commit", AsyncMock())
    asyncio.run(snapshots.follow())
    updates = [call.kwargs for call in node.membership.update.call_args_list]
    assert updates == (
        [{"sealed": held, "protected": snapshots.server.protected}] if withdrawn else []
    )
