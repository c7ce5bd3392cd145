"""Claims about a shard of which a first copy was sealed, and that is taken again."""

from __future__ import annotations

import pytest

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from tests.unit.checkpoint.snapshot.server.sealed import open_memory, seal

STEP = SnapshotId(1, 7)


def test_nothing_of_the_first_copy_is_served_while_the_second_one_is_written() -> None:
    """Another rank's first copy was torn. Readers were given the buffer that was overwritten."""
    retained: list[set[SnapshotId]] = []
    memory = open_memory(on_retained=retained.append)
    seal(memory, STEP, 0, {"w": 1}, commit=False)
    assert memory.held_ranks(STEP) == (0,)
    given = memory.begin(STEP, 0, 8192, (), discard_uncommitted=True)
    assert given.descriptor is not None
    assert memory.held_ranks(STEP) == ()
    with pytest.raises(SnapshotUnavailable, match="not held here"):
        memory.open_shard(STEP, 0)
    assert retained[-1] == set(), "parity and table of the first copy are forgotten, too"
    memory.close()
