"""Claims about what a server knows of the shards in its memory."""

from __future__ import annotations

from contextlib import closing

from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from tests.unit.checkpoint.server.sealed import open_memory, seal


def test_boxes_are_those_of_each_snapshot_also_if_they_change() -> None:
    with closing(open_memory()) as memory:
        for step, values in enumerate(({"a": 1}, {"a": 2}, {"a": 3, "b": 4}, {"b": 5}), start=1):
            snapshot = SnapshotId(1, step)
            seal(memory, snapshot, 0, values)
            index = memory.index(snapshot, 0)
            assert [entry.key for entry in index.entries] == list(values)


def test_boxes_of_a_rank_are_not_taken_for_those_of_another() -> None:
    with closing(open_memory()) as memory:
        snapshot = SnapshotId(1, 1)
        for rank, key in enumerate("ab"):
            seal(memory, snapshot, rank, {key: rank}, commit=False)
        assert [memory.index(snapshot, rank).entries[0].key for rank in range(2)] == ["a", "b"]


def test_boxes_that_have_not_changed_are_parsed_once() -> None:
    with closing(open_memory()) as memory:
        entries = []
        for step in (1, 2):
            seal(memory, SnapshotId(1, step), 0, {"a": step})
            entries.append(memory.index(SnapshotId(1, step), 0).entries)
        assert entries[0] is entries[1]
