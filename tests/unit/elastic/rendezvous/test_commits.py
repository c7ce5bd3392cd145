"""Claims about commits: who announces them, who believes it, when the coordinator gets them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.rendezvous.actions import Close, Commit, Persist
from keepstep.elastic.rendezvous.commits import (
    COMMIT_INTERVAL_S,
    Announcements,
    is_due,
    needs_decision,
    next_commit,
)
from keepstep.elastic.rendezvous.records import (
    Closing,
    CommitAnnouncement,
    Generation,
    Member,
    NodePhase,
    NodeRecord,
    NodeReport,
    PersistRequest,
    Result,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.reports import Reports
from keepstep.elastic.rendezvous.view import JoinedNode, View, with_reports

MEMBERS = tuple(Member(node, "h", 1, rank, "h:1", f"tcp:{node}") for rank, node in enumerate("ab"))
OLDER, NEWER, NEWEST = (
    SnapshotCommit(SnapshotId(2, step), MEMBERS, 1, at_s=50.0) for step in (6, 7, 8)
)
VIEW = View(
    revision=40,
    generation=Generation(2, MEMBERS, "h", 5, "start"),
    snapshot=NEWER,
    persist=PersistRequest(OLDER, "/c", 100.0, "ab"),
    revisions={"persist": 39},
)
IDLE = replace(VIEW, persist=None, revisions={})
NOW_S = 60.0
REQUEST = Persist(PersistRequest(NEWER, "/c", 100.0, "ab"))
CLOSING = Closing(2, "a leaves", False, 60.0)


def record_of(node: str, **changes: object) -> NodeRecord:
    fields = {"generation": 2, "step": 8, "sealed": (NEWEST.snapshot,), **changes}
    record = NodeRecord(node, "h", 1, "h:1", f"tcp:{node}", 5, 7, "d")
    return replace(record, **fields)  # type: ignore[arg-type]


def reports_of(*steps: int, nodes: str = "ab", generation: int = 2) -> Reports:
    reports = Reports()
    protected = tuple(SnapshotId(generation, step) for step in steps)
    for node in nodes:
        reports.receive(NodeReport(node, 7, generation, f"tcp:{node}", max(steps), protected))
    return reports


def test_newest_snapshot_that_all_members_protect_is_announced_once() -> None:
    announcements = Announcements()
    assert announcements.next(IDLE, reports_of(7, 8, nodes="a"), NOW_S) is None
    assert announcements.next(IDLE, reports_of(7, 8), NOW_S) == CommitAnnouncement(NEWEST.snapshot)
    assert announcements.next(IDLE, reports_of(7, 8), NOW_S) is None
    assert announcements.next(IDLE, reports_of(7), NOW_S) is None


def test_nodes_that_are_no_members_do_not_count() -> None:
    assert Announcements().next(IDLE, reports_of(8, nodes="ac"), NOW_S) is None
    assert Announcements().next(IDLE, reports_of(8, nodes="abc"), NOW_S) is not None


def test_nothing_is_announced_of_another_generation_or_of_one_that_ends() -> None:
    assert Announcements().next(IDLE, reports_of(8, generation=1), NOW_S) is None
    assert Announcements().next(replace(IDLE, closing=CLOSING), reports_of(8), NOW_S) is None
    assert (
        Announcements().next(replace(IDLE, result=Result(True, "")), reports_of(8), NOW_S) is None
    )


def test_nothing_is_announced_while_a_request_to_store_may_be_on_its_way() -> None:
    announcements, reports = Announcements(), reports_of(8)
    announcements.note_sent(REQUEST)
    announcements.note_sent(Close(CLOSING))
    assert announcements.next(IDLE, reports, NOW_S) is None
    assert announcements.next(VIEW, reports, NOW_S) == CommitAnnouncement(NEWEST.snapshot, after=39)
    announcements.note_sent(REQUEST)
    announcements.note_shown()
    assert announcements.next(IDLE, reports_of(9), NOW_S) == CommitAnnouncement(SnapshotId(2, 9))


def due_view() -> View:
    """Return a view in which every seventh step is to be stored."""
    records = [
        record_of(
            node,
            phase=NodePhase.RUNNING,
            checkpoint_every=7,
            checkpoint_url="/c",
            times={"restored": 1.0},
        )
        for node in "ab"
    ]
    joined = replace(IDLE, nodes={record.node: JoinedNode(record, 5) for record in records})
    return with_reports(joined, reports_of(7, 8).newest)


def test_nothing_is_announced_while_a_commit_that_is_to_be_stored_is_written_or_known() -> None:
    """Where snapshots are quicker than the coordinator, each would replace the one to be stored."""
    announcements, due = Announcements(), due_view()
    announcements.note_sent(Commit(NEWER))
    assert announcements.next(replace(due, snapshot=OLDER), reports_of(7, 8), NOW_S) is None
    announcements.note_shown()
    assert announcements.next(due, reports_of(7, 8), NOW_S) is None
    asked = replace(due, persist=VIEW.persist, revisions={"persist": 39})
    assert announcements.next(asked, reports_of(7, 8), NOW_S) is not None


def test_a_commit_that_is_written_and_not_to_be_stored_holds_nothing_back() -> None:
    announcements = Announcements()
    announcements.note_sent(Commit(NEWER))
    assert announcements.next(replace(IDLE, snapshot=OLDER), reports_of(8), NOW_S) is not None


@pytest.mark.parametrize("sent", [REQUEST, Commit(NEWER), None])
def test_in_an_outage_of_the_coordinator_commits_are_held_back_for_two_seconds_at_most(
    sent: Persist | Commit | None,
) -> None:
    """Newer snapshots would be lost if all leases end with the outage."""
    announcements, due = Announcements(), due_view()
    if sent is not None:
        announcements.note_sent(sent)
    assert announcements.next(due, reports_of(8), NOW_S) is None
    assert announcements.next(due, reports_of(8), NOW_S + 1.9) is None
    assert announcements.next(due, reports_of(8), NOW_S + 2.0) == CommitAnnouncement(
        NEWEST.snapshot
    )
    assert announcements.next(due, reports_of(9), NOW_S + 2.1) == CommitAnnouncement(
        SnapshotId(2, 9)
    )


def test_nothing_is_held_back_by_a_coordinator_that_has_answered_nothing_for_two_seconds() -> None:
    """Leases may end soon; the next step of that a timer has to make, as no report comes."""
    announcements, due = Announcements(), due_view()
    announcements.note_answer(NOW_S - 1.5)
    assert announcements.next(due, reports_of(8), NOW_S) is None
    assert announcements.held_until_s == NOW_S + 0.5
    assert announcements.next(due, reports_of(8), NOW_S + 0.5) is not None
    announcements.note_answer(NOW_S + 9)
    assert announcements.next(IDLE, reports_of(9), NOW_S + 9) is not None
    assert announcements.held_until_s is None


def decides(
    view: View = IDLE, step: int = 8, wall_s: float = NOW_S - 8, in_s: float | None = 2.9
) -> bool:
    return needs_decision(view, SnapshotId(2, step), wall_s, in_s)


def test_leader_decides_after_an_announcement_only_if_more_is_to_be_written() -> None:
    """The coordinator gets it 5 s after the last commit, which was at 50 s."""

    def nodes(**changes: object) -> dict[str, JoinedNode]:
        fields = {"phase": NodePhase.RUNNING, "checkpoint_url": "/c", "times": {"restored": 1.0}}
        return {n: JoinedNode(record_of(n, **{**fields, **changes}), 5) for n in "ab"}

    usual = replace(IDLE, nodes=nodes(checkpoint_every=25))
    assert not decides(usual)
    assert decides(usual, in_s=None), "it would never tell the coordinator"
    assert decides(usual, in_s=3.2), "it would tell it late"
    assert decides(usual, wall_s=55.0), "it is due"
    assert decides(replace(usual, nodes=nodes(checkpoint_every=8))), "it is to be stored"
    assert decides(replace(usual, nodes=nodes(finishing=True))), "it may be the last"
    assert decides(replace(usual, snapshot=None))
    older = replace(NEWER, snapshot=SnapshotId(1, 8))
    assert decides(replace(usual, snapshot=older)), "it is the generation's first"


def test_commit_is_passed_on_only_once_the_node_has_entered_the_generation() -> None:
    """The commit frees what the generation's request is about to store (simulator, seed 2260)."""
    announced = CommitAnnouncement(NEWEST.snapshot)
    assert next_commit(VIEW, 1, None, announced) is None
    assert next_commit(VIEW, 2, None) == NEWER.snapshot
    assert next_commit(VIEW, 2, OLDER.snapshot) == NEWER.snapshot
    assert next_commit(VIEW, 2, NEWER.snapshot) is None
    assert next_commit(replace(VIEW, snapshot=None), 2, None) is None


def test_announcement_counts_until_the_node_is_fenced_or_has_drained() -> None:
    announced = CommitAnnouncement(NEWEST.snapshot)
    assert next_commit(VIEW, 2, NEWER.snapshot, announced, ended=1) == NEWEST.snapshot
    assert next_commit(VIEW, 2, NEWER.snapshot, announced, ended=2) is None
    of_another = CommitAnnouncement(SnapshotId(3, 8))
    assert next_commit(VIEW, 2, NEWER.snapshot, of_another) is None


def test_announcement_counts_once_the_request_that_stood_then_is_seen() -> None:
    announced = CommitAnnouncement(NEWEST.snapshot, after=41)
    assert next_commit(VIEW, 2, NEWER.snapshot, announced) is None
    assert next_commit(replace(VIEW, revision=41), 2, NEWER.snapshot, announced) == NEWEST.snapshot


def test_announcement_counts_if_the_request_is_not_seen_for_two_seconds() -> None:
    """All ranks wait for this node: in an outage nothing newer would be protected by any."""
    announced = CommitAnnouncement(NEWEST.snapshot, after=41)
    assert next_commit(VIEW, 2, NEWER.snapshot, announced, waited_s=1.9) is None
    assert next_commit(VIEW, 2, NEWER.snapshot, announced, waited_s=2.0) == NEWEST.snapshot


def test_node_does_not_go_back_to_what_the_coordinator_knows() -> None:
    assert next_commit(VIEW, 2, NEWEST.snapshot, CommitAnnouncement(NEWEST.snapshot)) is None


def test_coordinator_gets_the_first_commit_of_a_generation_and_then_seldom() -> None:
    soon, later = 50.0 + COMMIT_INTERVAL_S / 2, 50.0 + COMMIT_INTERVAL_S
    assert is_due(replace(IDLE, snapshot=None), NEWEST, (), soon)
    of_older = replace(NEWER, snapshot=SnapshotId(1, 7))
    assert is_due(replace(IDLE, snapshot=of_older), NEWEST, (), soon)
    assert not is_due(IDLE, NEWEST, (), soon)
    assert is_due(IDLE, NEWEST, (), later)
    assert is_due(IDLE, NEWEST, (), 49.0), "the clock was set back"


def test_coordinator_gets_what_is_to_be_stored_and_the_last_step() -> None:
    wants = {"checkpoint_url": "/c", "times": {"restored": 1.0}}
    for every, finishing, expected in ((8, False, True), (9, False, False), (9, True, True)):
        records = [
            record_of(node, checkpoint_every=every, finishing=finishing, **wants) for node in "ab"
        ]
        nodes = {record.node: JoinedNode(record, 5) for record in records}
        view = replace(IDLE, nodes=nodes)
        assert is_due(view, NEWEST, records, 50.5) is expected
        if every == 8:
            assert not is_due(replace(view, persist=VIEW.persist), NEWEST, records, 50.5)
