"""Claims about what a server knows of the shards in its memory."""

from __future__ import annotations

from contextlib import closing

import pytest

from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.messages import ShardBox
from tests.unit.checkpoint.snapshot.server.sealed import TENSOR_NBYTES, open_memory, seal

WHOLE = Box.whole((TENSOR_NBYTES,))


def test_boxes_are_those_of_each_snapshot_also_if_they_change() -> None:
    with closing(open_memory()) as memory:
        for step, values in enumerate(({"a": 1}, {"a": 2}, {"a": 3, "b": 4}, {"b": 5}), start=1):
            snapshot = SnapshotId(1, step)
            seal(memory, snapshot, 0, values)
            assert [entry.key for entry in memory.index(snapshot, 0).entries] == list(values)
            for key, value in values.items():
                entry, arena = memory.find_box(snapshot, ShardBox(0, key, WHOLE))
                assert arena.bytes[entry.byte_offset] == value
            for key in {"a", "b"} - values.keys():
                with pytest.raises(ValueError, match="does not have the box"):
                    memory.find_box(snapshot, ShardBox(0, key, WHOLE))


def test_boxes_that_have_not_changed_are_parsed_once_in_a_generation() -> None:
    with closing(open_memory()) as memory:
        entries = []
        for generation, step in ((1, 1), (1, 2), (2, 3)):
            memory.open_generation(generation)
            snapshot = SnapshotId(generation, step)
            seal(memory, snapshot, 0, {"a": step})
            entries.append(memory.index(snapshot, 0).entries)
        assert entries[0] is entries[1]
        assert entries[2] is not entries[1]
        assert entries[2] == entries[1]
