"""Claims about what a node's record says while its workers run."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.agent.node_snapshots import NodeSnapshots
from tests.unit.elastic.agent.test_participation import participating
from tests.unit.elastic.agent.test_worker_group import play

HELD = (SnapshotId(1, 7),)


class Server:
    address, sealed, protected, memory_nbytes = "unix:/none", HELD, HELD, 5


def test_progress_has_what_is_protected_for_a_leader_that_reports_do_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was committed any more, though the coordinator was there."""
    monkeypatch.setattr(NodeSnapshots, "server", property(lambda _: Server()))

    async def scenario() -> None:
        async with participating(tmp_path) as participation:
            participation._updates.update()
            record = participation._node.membership.record
            assert record.sealed == record.protected == HELD

    play(scenario())
