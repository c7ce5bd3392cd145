"""Claims about single decisions of the rendezvous."""

from dataclasses import replace
from typing import Any

import pytest

from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.elastic.rendezvous.actions import Close, Commit, Finish, Open, Persist, RecordRecovery
from keepstep.elastic.rendezvous.decide import (
    LeaderState,
    RendezvousPolicy,
    assign_ranks,
    decide,
    may_leave,
)
from keepstep.elastic.rendezvous.intervals import AUTO, best_interval_s, failures_per_s
from keepstep.elastic.rendezvous.records import (
    CheckpointRecord,
    Closing,
    Eviction,
    Failure,
    FailureKind,
    Generation,
    NodePhase,
    NodeRecord,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.view import JoinedNode, View

POLICY = RendezvousPolicy(
    min_nodes=1, max_nodes=4, last_call_s=2.0, quorum_timeout_s=60.0, max_restarts=2
)


def node(name: str, **changes: Any) -> NodeRecord:
    changes.setdefault("protected", changes.get("sealed", ()))
    record = NodeRecord(
        node=name,
        host="h",
        nproc=2,
        agent="h:1",
        server="tcp:h:2",
        store_port=5,
        lease=7,
        digest="d",
        warm=True,
    )
    return replace(record, **changes)


def view_of(*records: NodeRecord, **changes: Any) -> View:
    nodes = {record.node: JoinedNode(record, created) for created, record in enumerate(records, 1)}
    return replace(View(revision=9, nodes=nodes), **changes)


def generation_of(*names: str, number: int = 1, **changes: Any) -> Generation:
    members = assign_ranks((), [node(name) for name in names], len(names))
    return replace(Generation(number, members, "h", 5, "start"), **changes)


def decided(
    view: View,
    policy: RendezvousPolicy = POLICY,
    now_s: float = 0.0,
    since: LeaderState | None = None,
) -> Any:
    return decide(policy, view, since or LeaderState(), now_s, 1000.0)


def test_first_generation_opens_at_once_when_all_places_are_taken() -> None:
    decision = decided(view_of(node("a"), node("b")), replace(POLICY, max_nodes=2))
    assert isinstance(decision.action, Open)
    assert [m.node for m in decision.action.generation.members] == ["a", "b"]
    assert decision.action.generation.world_size == 4


def test_last_call_waits_and_restarts_with_each_arrival() -> None:
    first = decided(view_of(node("a")), now_s=10.0)
    assert first.action is None
    assert first.again_at_s == 12.0
    second = decided(view_of(node("a"), node("b")), now_s=11.0, since=first.leader_state)
    assert second.again_at_s == 13.0
    third = decided(view_of(node("a"), node("b")), now_s=13.0, since=second.leader_state)
    assert isinstance(third.action, Open)


def test_too_few_nodes_wait_with_a_message_then_fail_the_job() -> None:
    policy = replace(POLICY, min_nodes=2)
    waiting = decided(view_of(node("a")), policy, now_s=5.0)
    assert waiting.action is None
    assert "1 of at least 2" in waiting.message
    ended = decided(view_of(node("a")), policy, now_s=65.0, since=waiting.leader_state)
    assert isinstance(ended.action, Finish)
    assert not ended.action.result.succeeded


def test_lost_member_closes_the_generation_and_aborts() -> None:
    decision = decided(view_of(node("a", generation=1), generation=generation_of("a", "b")))
    assert isinstance(decision.action, Close)
    assert decision.action.closing.abort
    assert "b" in decision.action.closing.reason


def test_member_that_lost_its_lease_and_joined_again_is_a_lost_one_even_if_nobody_saw_it_go() -> (
    None
):
    again = node("a", server="tcp:h:3")
    for others in ((), (node("b", generation=1),)):
        old = generation_of("a", *(record.node for record in others))
        decision = decided(view_of(again, *others, generation=old))
        assert isinstance(decision.action, Close)
        assert decision.action.closing.reason == "lost a"
        closed = view_of(
            again,
            *(replace(one, phase=NodePhase.DRAINED) for one in others),
            generation=old,
            closing=decision.action.closing,
        )
        opened = decided(closed, replace(POLICY, max_nodes=len(others) + 1)).action
        assert isinstance(opened, Open)
        assert opened.generation.members[0].server == "tcp:h:3"


def test_leaving_member_closes_without_abort() -> None:
    view = view_of(
        node("a", generation=1),
        node("b", generation=1, leaving=True),
        generation=generation_of("a", "b"),
    )
    decision = decided(view)
    assert isinstance(decision.action, Close)
    assert not decision.action.closing.abort


def test_next_generation_waits_until_every_present_member_has_drained() -> None:
    closing = Closing(1, "lost c", True, 0.0)
    old = generation_of("a", "b", "c")
    drained = node("a", generation=1, phase=NodePhase.DRAINED)
    view = view_of(drained, node("b", generation=1), generation=old, closing=closing)
    assert decided(view).action is None
    view = view_of(
        drained, node("b", generation=1, phase=NodePhase.DRAINED), generation=old, closing=closing
    )
    decision = decided(view)
    assert isinstance(decision.action, Open)
    assert decision.action.generation.generation == 2


def test_record_of_an_older_generation_does_not_count_as_drained() -> None:
    view = view_of(
        node("a", generation=4, phase=NodePhase.DRAINED),
        generation=generation_of("a", number=5),
        closing=Closing(5, "x", True, 0.0),
    )
    assert decided(view).action is None


def test_survivors_keep_their_places_and_a_newcomer_takes_the_free_one() -> None:
    old = generation_of("a", "b", "c").members
    members = assign_ranks(old, [node("d"), node("c"), node("a")], 4)
    assert [m.node for m in members] == ["a", "d", "c"]
    assert [m.first_rank for m in members] == [0, 2, 4]


def test_old_members_come_before_spares_when_places_are_few() -> None:
    old = generation_of("a", "b").members
    assert {m.node for m in assign_ranks(old, [node("s"), node("b"), node("a")], 2)} == {"a", "b"}


def test_survivor_beyond_the_last_place_moves_into_a_gap() -> None:
    old = generation_of("a", "b", "c").members
    assert [m.node for m in assign_ranks(old, [node("a"), node("c")], 4)] == ["a", "c"]


def test_snapshot_is_committed_only_when_every_member_protects_it() -> None:
    old = generation_of("a", "b")
    seal = (SnapshotId(1, 3),)
    a, b = node("a", generation=1, sealed=seal), node("b", generation=1, sealed=seal, protected=())
    assert decided(view_of(a, b, generation=old)).action is None
    decision = decided(view_of(a, replace(b, protected=(*seal, SnapshotId(1, 4))), generation=old))
    assert isinstance(decision.action, Commit)
    assert decision.action.commit.snapshot == SnapshotId(1, 3)


def test_seals_of_an_older_generation_are_never_committed() -> None:
    old = generation_of("a", number=2)
    assert (
        decided(view_of(node("a", generation=2, sealed=(SnapshotId(1, 3),)), generation=old)).action
        is None
    )


def closed_view(sealed: dict[str, tuple[SnapshotId, ...]], *present: str, **changes: Any) -> View:
    records = [
        node(name, generation=1, phase=NodePhase.DRAINED, sealed=sealed[name], step=8)
        for name in present
    ]
    return view_of(
        *records, generation=generation_of("a", "b"), closing=Closing(1, "x", True, 0.0), **changes
    )


def test_resumes_from_the_newest_snapshot_that_all_holders_still_have() -> None:
    sealed = {"a": (SnapshotId(1, 6), SnapshotId(1, 7)), "b": (SnapshotId(1, 6),)}
    decision = decided(closed_view(sealed, "a", "b"))
    assert isinstance(decision.action, Open)
    opened = decision.action.generation
    assert opened.resume is not None
    assert opened.resume.snapshot == SnapshotId(1, 6)
    assert opened.lost_from_step == 8


def test_resumes_from_storage_when_a_holder_is_lost() -> None:
    sealed = {"a": (SnapshotId(1, 6),)}
    commit = SnapshotCommit(SnapshotId(1, 6), generation_of("a", "b").members)
    decision = decided(closed_view(sealed, "a", snapshot=commit))
    assert isinstance(decision.action, Open)
    assert decision.action.generation.resume is None


def test_leaving_holder_still_serves_its_snapshot_to_the_next_generation() -> None:
    sealed = {"a": (SnapshotId(1, 6),), "b": (SnapshotId(1, 6),)}
    view = closed_view(sealed, "a", "b")
    leaver = replace(view.nodes["b"].record, leaving=True)
    view = replace(view, nodes={**view.nodes, "b": JoinedNode(leaver, 2)})
    decision = decided(view)
    assert isinstance(decision.action, Open)
    opened = decision.action.generation
    assert [m.node for m in opened.members] == ["a"]
    assert opened.resume is not None
    assert not may_leave(POLICY, replace(view, generation=opened, snapshot=opened.resume), "b")


def test_repeated_worker_failures_without_progress_end_the_job() -> None:
    failure = Failure(FailureKind.WORKER, "rank 1 on a exited with status 1", 0.0, 1)
    record = node("a", generation=3, phase=NodePhase.DRAINED, failure=failure)
    old = generation_of("a", number=3, failures=2)
    decision = decided(view_of(record, generation=old, closing=Closing(3, "x", True, 0.0)))
    assert isinstance(decision.action, Finish)
    assert "rank 1" in decision.action.result.message


def test_progress_refills_the_restart_budget() -> None:
    failure = Failure(FailureKind.WORKER, "killed", 0.0, 1)
    record = node(
        "a", generation=3, phase=NodePhase.DRAINED, failure=failure, sealed=(SnapshotId(3, 9),)
    )
    old = generation_of("a", number=3, failures=2)
    decision = decided(view_of(record, generation=old, closing=Closing(3, "x", True, 0.0)))
    assert isinstance(decision.action, Open)
    assert decision.action.generation.failures == 1


def test_losing_nodes_costs_no_restart() -> None:
    record = node("a", generation=3, phase=NodePhase.DRAINED)
    old = generation_of("a", "b", number=3, failures=2)
    decision = decided(view_of(record, generation=old, closing=Closing(3, "lost b", True, 0.0)))
    assert isinstance(decision.action, Open)
    assert decision.action.generation.failures == 2


def test_fatal_trouble_ends_the_job_without_a_restart() -> None:
    record = node("a", generation=1, failure=Failure(FailureKind.FATAL, "no such bucket", 0.0, 0))
    decision = decided(view_of(record, generation=generation_of("a")))
    assert isinstance(decision.action, Finish)


@pytest.mark.parametrize("phase", [NodePhase.STARTING, NodePhase.RUNNING])
def test_spare_is_let_in_only_once_the_generation_runs(phase: NodePhase) -> None:
    view = view_of(node("a", generation=1, phase=phase), node("s"), generation=generation_of("a"))
    policy = replace(POLICY, max_nodes=2)
    assert isinstance(decided(view, policy).action, Close) == (phase is NodePhase.RUNNING)


def test_extra_node_is_parked_when_there_is_no_room() -> None:
    view = view_of(
        node("a", generation=1, phase=NodePhase.RUNNING), node("s"), generation=generation_of("a")
    )
    assert decided(view, replace(POLICY, max_nodes=1)).action is None


def test_evicted_node_is_not_taken_again() -> None:
    view = view_of(
        node("a", generation=1, phase=NodePhase.DRAINED),
        node("b", generation=1, phase=NodePhase.DRAINED),
        generation=generation_of("a", "b"),
        closing=Closing(1, "evicted b", False, 0.0),
        evictions={"b": Eviction("slow", may_return=True)},
    )
    decision = decided(view)
    assert isinstance(decision.action, Open)
    assert [m.node for m in decision.action.generation.members] == ["a"]


def test_checkpoint_is_due_when_a_multiple_has_been_passed() -> None:
    old = generation_of("a")
    commit = SnapshotCommit(SnapshotId(1, 11), old.members)
    record = node(
        "a", generation=1, checkpoint_url="/c", checkpoint_every=5, sealed=(commit.snapshot,)
    )
    stored = CheckpointRecord(9, 1, "/c", 0.0)
    due = decided(view_of(record, generation=old, snapshot=commit, checkpoint=stored))
    assert isinstance(due.action, Persist)
    stored = CheckpointRecord(10, 1, "/c", 0.0)
    assert (
        decided(view_of(record, generation=old, snapshot=commit, checkpoint=stored)).action is None
    )


def test_a_checkpoint_of_the_jobs_own_choosing_is_due_when_the_best_interval_has_passed() -> None:
    old = generation_of("a")
    commit = SnapshotCommit(SnapshotId(1, 11), old.members)
    record = node(
        "a", generation=1, checkpoint_url="/c", checkpoint_every=AUTO, sealed=(commit.snapshot,)
    )
    view = view_of(record, generation=old, snapshot=commit)
    first = decided(view).action
    assert isinstance(first, Persist)
    assert first.request.at_s == 1000.0
    interval_s = best_interval_s(2.0, failures_per_s((), 1, 1000.0))
    for waited_s, is_due in ((interval_s + 1, True), (interval_s - 1, False)):
        stored = CheckpointRecord(9, 1, "/c", 1000.0 - waited_s, took_s=2.0)
        assert (decided(replace(view, checkpoint=stored)).action is not None) == is_due


def test_what_ended_because_something_broke_counts_as_a_failure() -> None:
    record = node("a", generation=1, phase=NodePhase.DRAINED)
    for abort in (True, False):
        view = view_of(
            record, generation=generation_of("a"), closing=Closing(1, "because", abort, 0.0)
        )
        opened = decided(view, replace(POLICY, max_nodes=1)).action
        assert isinstance(opened, Open)
        assert opened.generation.after_failure == abort


def test_last_nodes_to_leave_bring_their_memory_to_storage_first() -> None:
    seal = (SnapshotId(1, 6),)
    record = node(
        "a",
        generation=1,
        phase=NodePhase.DRAINED,
        sealed=seal,
        leaving=True,
        checkpoint_url="/c",
        step=6,
    )
    view = view_of(
        record, generation=generation_of("a"), closing=Closing(1, "a leaves", False, 0.0)
    )
    assert not may_leave(POLICY, view, "a")
    first = decided(view)
    assert isinstance(first.action, Commit)
    second = decided(replace(view, snapshot=first.action.commit))
    assert isinstance(second.action, Persist)
    stored = replace(
        view, snapshot=first.action.commit, checkpoint=CheckpointRecord(6, 1, "/c", 0.0)
    )
    assert may_leave(POLICY, stored, "a")


@pytest.mark.parametrize("phase", [NodePhase.RUNNING, NodePhase.DONE])
def test_recovery_is_recorded_of_a_job_that_commits_all_the_time_or_is_done_already(
    phase: NodePhase,
) -> None:
    times = {"ready": 1.0, "restored": 2.0, "stepped": 3.0}
    record = node("a", generation=1, phase=phase, times=times, sealed=(SnapshotId(1, 3),))
    decision = decided(view_of(record, generation=generation_of("a")))
    assert isinstance(decision.action, RecordRecovery)
    assert [recovery.generation for recovery in decision.action.history.recoveries] == [1]


def test_job_succeeds_when_all_members_are_done() -> None:
    record = node("a", generation=1, phase=NodePhase.DONE)
    decision = decided(view_of(record, generation=generation_of("a")))
    assert isinstance(decision.action, Finish)
    assert decision.action.result.succeeded
