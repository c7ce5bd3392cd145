"""Claims about attempts to store a snapshot, and about when a node is informed of a commit."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.checkpoint.stored.format import Attempt, StoredStep
from keepstep.elastic.rendezvous.checkpoint_schedule import (
    PartAttempt,
    is_over,
    next_commit,
    next_part,
)
from keepstep.elastic.rendezvous.records import Generation, Member, PersistRequest, SnapshotCommit
from keepstep.elastic.rendezvous.view import View

HOLDER = Member("a", "h", 2, 0, "h:1", "tcp:h:2")
COMMIT = SnapshotCommit(SnapshotId(1, 4), (HOLDER,))
REQUEST = PersistRequest(COMMIT, "/c", 100.0, "ab")
STORING = View(
    revision=9,
    generation=Generation(1, (HOLDER,), "h", 5, "start"),
    persist=REQUEST,
    revisions={"persist": 9},
)

attempts = st.builds(
    PartAttempt,
    st.builds(
        PersistRequest, st.just(COMMIT), st.just("/c"), st.just(1.0), st.sampled_from(["ab", "cd"])
    ),
    st.integers(0, 2**63),
)


@given(attempts, attempts)
def test_attempts_of_another_revision_or_request_have_other_names(
    first: PartAttempt, second: PartAttempt
) -> None:
    assert (first.name == second.name) == (first == second)
    assert Attempt(StoredStep(4, 1), first.name).name == first.name


def test_an_attempt_is_over_when_its_request_is_gone_or_was_written_again() -> None:
    attempt = next_part(STORING, HOLDER.server, 1, None)
    assert attempt is not None
    assert not is_over(STORING, attempt)
    assert is_over(replace(STORING, persist=None, revisions={}), attempt)
    assert is_over(replace(STORING, revisions={"persist": 12}), attempt)


OLDER = Member("a", "h", 1, 0, "h:1", "tcp:h:2")
OLDER = SnapshotCommit(SnapshotId(2, 6), (HOLDER,), 0)
NEWER = SnapshotCommit(SnapshotId(2, 7), (HOLDER,), 0)
VIEW = View(
    revision=40,
    generation=Generation(2, (HOLDER,), "h", 5, "start"),
    snapshot=NEWER,
    persist=PersistRequest(OLDER, "/c", 100.0, "ab"),
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
    assert next_part(VIEW, HOLDER.server, entered=1, begun=None) is None
    assert next_part(VIEW, "tcp:h:9", entered=2, begun=None) is None
    begun = next_part(VIEW, HOLDER.server, entered=2, begun=None)
    assert begun is not None
    assert begun.revision == 39
    assert next_part(VIEW, HOLDER.server, entered=2, begun=begun) is None
    again = replace(VIEW, revisions={"persist": 41})
    assert next_part(again, HOLDER.server, entered=2, begun=begun) is not None
