"""Claims about joining, leases, and records whose writes were not confirmed."""

from dataclasses import replace

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.errors import InvariantViolated, LeaseLost, UsageError
from keepstep.elastic.rendezvous import invariants, transactions
from keepstep.elastic.rendezvous.join_protocol import (
    AwaitHolders,
    AwaitPredecessor,
    Join,
    Lease,
    RemoveFinishedJob,
    Restart,
    RestoreJob,
    joining_again,
    keeps_state,
    led_since,
    may_revoke_predecessor,
    next_join_step,
    settle_record,
    without_state,
)
from keepstep.elastic.rendezvous.placements import encode_commit, encode_generation, place
from keepstep.elastic.rendezvous.records import (
    CheckpointRecord,
    Closing,
    Eviction,
    Generation,
    Leadership,
    Member,
    NodePhase,
    NodeRecord,
    Pause,
    Result,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.view import JoinedNode, Keys, View, apply
from keepstep.elastic.store.contract import Change, Delete, KeyValue, Modified, Put
from tests.unit.elastic.node_records import record_of

KEYS = Keys("job")
RECORD = record_of()


def view_of(*records: NodeRecord, **changes: object) -> View:
    nodes = {record.node: JoinedNode(record, at) for at, record in enumerate(records, 3)}
    return replace(View(revision=9, nodes=nodes), **changes)  # type: ignore[arg-type]


def test_lease_is_counted_from_the_request_and_given_up_when_an_outage_lasts_too_long() -> None:
    lease = Lease.granted(7, ttl_s=5.0, asked_s=10.0)
    assert lease.until_s == 15.0
    assert not lease.is_given_up(now_s=74.9, outage_s=60.0)
    assert lease.is_given_up(now_s=75.0, outage_s=60.0)
    assert lease.is_given_up(now_s=80.0, outage_s=60.0)
    assert lease.renewed(ttl_s=4.0, asked_s=12.0) == Lease(7, ttl_s=4.0, until_s=16.0)


def test_membership_leads_from_when_it_took_the_lead_under_its_lease() -> None:
    leadership = Leadership("a", "h:1", lease=7)
    view = view_of(RECORD, leadership=leadership, revisions={"leadership": 5})
    assert led_since(view, lease=7) == 5
    assert led_since(view, lease=8) == 0
    assert led_since(view_of(RECORD), lease=7) == 0


def test_free_name_is_joined_and_a_taken_one_waited_for() -> None:
    assert next_join_step(KEYS, View(), RECORD) == Join()
    predecessor = replace(RECORD, agent="h:9")
    assert next_join_step(KEYS, view_of(predecessor), RECORD) == AwaitPredecessor(predecessor)
    with pytest.raises(UsageError, match="already running something else on node b"):
        next_join_step(KEYS, view_of(replace(RECORD, node="b", digest="e")), RECORD)


def test_finished_job_is_removed_only_while_nobody_has_joined_it() -> None:
    ended = Result(True, "done")
    view = view_of(result=ended, revisions={"result": 8, "last_join": 4})
    step = next_join_step(KEYS, view, RECORD)
    assert isinstance(step, RemoveFinishedJob)
    assert set(step.transaction.conditions) == {
        Modified(KEYS.single("result"), 8),
        Modified(KEYS.single("last_join"), 4),
    }
    assert next_join_step(KEYS, view_of(replace(RECORD, node="b"), result=ended), RECORD) == Join()


def held_view(number: int = 3) -> View:
    """Return what a member of a generation saw at revision 90."""
    members = (Member("a", "h", 2, 0, "h:1", "tcp:h:2"), Member("b", "h", 2, 2, "h:3", "tcp:h:4"))
    placement, chunks = place(members)
    generation = Generation(number, members, "h", 5, "start", parity=0)
    commit = SnapshotCommit(SnapshotId(number, 41), members, 0)
    documents = {
        KEYS.single("secret"): b"ab" * 32,
        KEYS.placement(number): placement.encode(),
        KEYS.single("generation"): encode_generation(generation),
        KEYS.single("snapshot"): encode_commit(commit),
        KEYS.single("checkpoint"): CheckpointRecord(40, number, "/c", 1.0).encode(),
        KEYS.single("pause"): Pause("maintenance", 1.0).encode(),
        KEYS.single("closing"): Closing(number, "lost b", True, 1.0).encode(),
        KEYS.eviction("c"): Eviction("slow", may_return=True).encode(),
        **{KEYS.chunk(digest): data for digest, data in chunks.items()},
    }
    items = [KeyValue(key, value, created=80, modified=80) for key, value in documents.items()]
    view = apply(KEYS, View(), [Change(item.key, item, 80) for item in items])
    return replace(view, revision=90)


def test_job_that_a_new_coordinator_does_not_know_is_restored_from_what_a_member_knew() -> None:
    held = held_view()
    newcomer = View(revision=6, secret=b"cd" * 32, revisions={"secret": 5})
    for found in (View(revision=1), newcomer):
        step = next_join_step(KEYS, found, RECORD, held)
        assert isinstance(step, RestoreJob)
        (transaction,) = step.transactions
        written = [o for o in transaction.operations if isinstance(o, Put)]
        items = [KeyValue(put.key, put.value, created=7, modified=7) for put in written]
        restored = apply(KEYS, found, [Change(item.key, item, 7) for item in items])
        assert restored.secret == held.secret
        assert restored.generation == held.generation
        assert restored.snapshot == held.snapshot
        assert restored.checkpoint == held.checkpoint
        assert restored.pause == held.pause
        assert restored.evictions == held.evictions
        # Members that come back are known by their records; old requests bind nobody.
        assert restored.closing is None
        # Where the job has started again meanwhile, nothing is written.
        assert set(transaction.conditions) >= {
            Modified(KEYS.single("secret"), found.revisions.get("secret", 0)),
            Modified(KEYS.single("generation"), 0),
        }
        assert next_join_step(KEYS, replace(restored, revision=8), RECORD, held) == Join()


def test_nothing_is_restored_where_the_keys_were_deleted_or_a_generation_is_open() -> None:
    held = held_view()
    assert next_join_step(KEYS, View(revision=95), RECORD, held) == Join()
    other_run = replace(held_view(1), revision=20, secret=b"cd" * 32)
    assert next_join_step(KEYS, other_run, RECORD, held) == Join()
    assert next_join_step(KEYS, View(revision=1), RECORD, None) == Join()
    assert next_join_step(KEYS, View(revision=1), RECORD, View(revision=9)) == Join()


def kept_run(held: View, kept: int) -> View:
    """Return the keys of a failed run that all nodes have left, as the last of them kept them."""
    ended = Result(False, "it raised", kept)
    revisions = {"secret": 120, "result": 120}
    return View(revision=125, secret=held.secret, result=ended, revisions=revisions)


def test_failed_run_goes_on_from_the_view_of_an_agent_that_is_started_again() -> None:
    held, restart = held_view(3), Restart(may_restore=False)
    found = kept_run(held, 3)
    step = next_join_step(KEYS, found, RECORD, held, restart, may_wait=True)
    assert isinstance(step, RestoreJob)
    (transaction,) = step.transactions
    assert Delete(KEYS.single("result")) in transaction.operations
    # Its lease no longer ends the job's secret.
    assert Put(KEYS.single("secret"), held.secret or b"") in transaction.operations
    assert Modified(KEYS.single("result"), 120) in transaction.conditions


def test_failed_run_does_not_go_on_from_an_older_view_or_without_a_person() -> None:
    held, restart = held_view(3), Restart(may_restore=True)
    # Others went on without this node: one of them may come.
    later = kept_run(held, 4)
    assert next_join_step(KEYS, later, RECORD, held, restart, may_wait=True) == AwaitHolders()
    step = next_join_step(KEYS, later, RECORD, held, restart)
    assert isinstance(step, RemoveFinishedJob)
    # A member that had lost its lease learns how the job ended.
    assert next_join_step(KEYS, kept_run(held, 3), RECORD, held, may_wait=True) == Join()
    # A newcomer waits for those who hold the state, and then begins again.
    assert next_join_step(KEYS, later, RECORD, may_wait=True) == AwaitHolders()
    assert isinstance(next_join_step(KEYS, later, RECORD), RemoveFinishedJob)
    # Nobody holds anything of a job that has succeeded.
    done = replace(later, result=Result(True, "done"))
    step = next_join_step(KEYS, done, RECORD, held, restart, may_wait=True)
    assert isinstance(step, RemoveFinishedJob)


def test_agent_that_is_started_again_lets_the_others_leave_first() -> None:
    held, restart = held_view(3), Restart(may_restore=True)
    leaving = {"b": JoinedNode(replace(RECORD, node="b"), 100)}
    found = replace(kept_run(held, 0), nodes=leaving)
    assert next_join_step(KEYS, found, RECORD, held, restart, may_wait=True) == AwaitHolders()
    assert next_join_step(KEYS, found, RECORD, held, restart) == Join()


def test_new_coordinator_learns_the_job_from_nodes_without_which_nobody_went_on() -> None:
    held = held_view(3)
    new = View(revision=1)
    step = next_join_step(KEYS, new, RECORD, held, Restart(may_restore=True), may_wait=True)
    assert isinstance(step, RestoreJob)
    other = Restart(may_restore=False)
    assert next_join_step(KEYS, new, RECORD, held, other, may_wait=True) == AwaitHolders()
    assert next_join_step(KEYS, new, RECORD, held, other) == Join()
    assert not keeps_state(new, held.secret, held)
    older = restored_by_another(opened=False)
    assert isinstance(next_join_step(KEYS, older, RECORD, held, other), RestoreJob)


def test_node_does_not_join_an_older_copy_of_its_job() -> None:
    """Its newer snapshots would be given up without a word."""
    with pytest.raises(UsageError, match=r"holds generation 1 .* part in generation 3.*older copy"):
        next_join_step(KEYS, replace(held_view(1), revision=50), RECORD, held_view())


@pytest.mark.parametrize(
    ("agent", "lives", "waited_s", "expected"),
    [
        ("h:9", False, 1.0, True),
        ("h:9", None, 1.0, False),
        ("a:1", None, 1.0, True),
        ("a:1", True, 1.0, True),
        ("a:1", None, 10.1, True),
        ("h:9", True, 1.0, None),
        ("h:9", None, 10.0, False),
        ("h:9", None, 10.1, None),
    ],
    ids=[
        "dead",
        "unknown",
        "itself",
        "itself though it answers",
        "itself after a long outage",
        "alive",
        "unknown to the limit",
        "unknown too long",
    ],
)
def test_predecessor_is_revoked_only_if_it_is_dead(
    agent: str, lives: bool | None, waited_s: float, expected: bool | None
) -> None:
    predecessor = replace(RECORD, agent=agent)
    arguments = (KEYS, RECORD, predecessor, lives, waited_s, 10.0)
    if expected is None:
        with pytest.raises(UsageError, match="choose another --node name"):
            may_revoke_predecessor(*arguments)
    else:
        assert may_revoke_predecessor(*arguments) == expected


def test_refused_record_counts_as_written_only_if_it_is_there() -> None:
    stored = KeyValue(KEYS.node("a"), RECORD.encode(), created=3, modified=6, lease=7)
    assert settle_record(stored, 3, RECORD) == 6
    for gone in (None, replace(stored, created=5)):
        with pytest.raises(LeaseLost):
            settle_record(gone, 3, RECORD)
    with pytest.raises(InvariantViolated, match="written by its own membership"):
        settle_record(stored, 3, replace(RECORD, step=1))


def test_record_for_another_job_keeps_what_the_node_is_and_nothing_of_what_it_held() -> None:
    snapshot = SnapshotId(4, 9)
    held = replace(
        RECORD, domain="rack", warm=True, generation=4, phase=NodePhase.DRAINED, step=9,
        sealed=(snapshot,), protected=(snapshot,), leaving=True, times={"ready": 1.0},
    )  # fmt: skip
    bare = replace(RECORD, server="", domain="rack", leaving=True)
    assert without_state(held) == bare


def test_former_member_of_the_open_generation_joins_again_as_one_that_has_drained() -> None:
    """It may not enter it any more, for others may have found it lost (simulator, seed 2028)."""
    snapshot = SnapshotId(2, 9)
    held = replace(RECORD, generation=2, phase=NodePhase.DRAINED, sealed=(snapshot,))
    place = Member("a", "h", 2, 0, "h:1", RECORD.server)
    view = replace(View(), generation=Generation(3, (place,), "h", 5, "start"))
    assert joining_again(view, held) == replace(held, generation=3)
    assert joining_again(View(), held) == held
    elsewhere = replace(view, generation=Generation(3, (replace(place, server="x"),), "h", 5, ""))
    assert joining_again(elsewhere, held) == held


def restored_by_another(*, opened: bool = False) -> View:
    """Return the job as a node has restored it whose newest generation was an older one."""
    at = {"secret": 7, "generation": 9 if opened else 7}
    return replace(held_view(1), revision=9, revisions=at)


def test_the_newest_view_of_a_lost_job_replaces_an_older_one() -> None:
    """Else a generation's number is used again, for which a node waits that has seen it."""
    held = held_view(3)
    older = replace(restored_by_another(), closing=Closing(1, "lost b", True, 1.0))
    # The new coordinator may count further than the old one did.
    for found in (older, replace(older, revision=95)):
        step = next_join_step(KEYS, found, RECORD, held)
        assert isinstance(step, RestoreJob)
        (transaction,) = step.transactions
        assert Modified(KEYS.single("generation"), 7) in transaction.conditions
        after = transactions.preview(KEYS, found, (transaction,))
        assert (after.generation, after.snapshot) == (held.generation, held.snapshot)
        assert (after.closing, set(after.placements)) == (None, {3})
        invariants.check_transition(found, after)
        assert next_join_step(KEYS, after, RECORD, held) == Join()
    assert next_join_step(KEYS, restored_by_another(opened=True), RECORD, held) == Join()


@pytest.mark.parametrize(
    ("view", "held", "expected"),
    [
        (held_view(3), held_view(3), True),
        (restored_by_another(), held_view(3), True),
        (restored_by_another(opened=True), held_view(3), False),
        (restored_by_another(opened=True), restored_by_another(), True),
        (restored_by_another(opened=True), None, True),
    ],
)
def test_what_a_node_holds_counts_unless_a_lost_number_may_have_been_used_again(
    view: View, held: View | None, expected: bool
) -> None:
    assert keeps_state(view, b"ab" * 32, held) is expected
    assert not keeps_state(view, b"cd" * 32, held)
    assert keeps_state(view, None, held)
