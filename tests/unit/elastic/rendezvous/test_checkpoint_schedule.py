"""Claims about when a node is informed of a commit, and when it begins its part of a checkpoint."""

from dataclasses import replace

from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.elastic.rendezvous.checkpoint_schedule import next_commit, next_part
from keepstep.elastic.rendezvous.records import (
    Generation,
    Member,
    PersistRequest,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.view import View

MEMBER = Member("a", "h", 1, 0, "h:1", "tcp:h:2")
OLDER = SnapshotCommit(SnapshotId(2, 6), (MEMBER,), 0)
NEWER = SnapshotCommit(SnapshotId(2, 7), (MEMBER,), 0)
VIEW = View(
    revision=40,
    generation=Generation(2, (MEMBER,), "h", 5, "start"),
    snapshot=NEWER,
    persist=PersistRequest(OLDER, "/c", 100.0),
    revisions={"persist": 39},
)


def test_commit_is_passed_on_only_once_the_node_has_entered_the_generation() -> None:
    """The commit frees what the generation's request is about to store (simulator, seed 2260)."""
    assert next_commit(VIEW, entered=1, known=None) is None
    assert next_commit(VIEW, entered=2, known=None) == NEWER.snapshot
    assert next_commit(VIEW, entered=2, known=OLDER.snapshot) == NEWER.snapshot
    assert next_commit(VIEW, entered=2, known=NEWER.snapshot) is None
    assert next_commit(replace(VIEW, snapshot=None), entered=2, known=None) is None


def test_part_is_begun_once_by_each_holder_that_has_entered_the_generation() -> None:
    assert next_part(VIEW, MEMBER.server, entered=1, begun=None) is None
    assert next_part(VIEW, "tcp:h:9", entered=2, begun=None) is None
    begun = next_part(VIEW, MEMBER.server, entered=2, begun=None)
    assert begun is not None
    assert begun.revision == 39
    assert next_part(VIEW, MEMBER.server, entered=2, begun=begun) is None
    again = replace(VIEW, revisions={"persist": 41})
    assert next_part(again, MEMBER.server, entered=2, begun=begun) is not None
