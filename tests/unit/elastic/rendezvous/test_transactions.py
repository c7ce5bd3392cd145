"""Claims about the conditions under which members write."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.rendezvous import transactions
from keepstep.elastic.rendezvous.actions import (
    Action,
    CancelPersist,
    Close,
    Commit,
    Finish,
    Open,
    OrderAbort,
    Persist,
    Publish,
    RecordRecovery,
    ReleaseMembers,
)
from keepstep.elastic.rendezvous.records import (
    AbortOrder,
    Closing,
    Generation,
    History,
    Leadership,
    Member,
    PersistRequest,
    Release,
    RestartRequest,
    Result,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.transactions import Operation
from keepstep.elastic.rendezvous.view import JoinedNode, Keys, View
from keepstep.elastic.store.contract import Created, Delete, Modified, Put
from tests.unit.elastic.node_records import record_of

KEYS = Keys("job")
MEMBERS = (Member("a", "h", 2, 0, "h:1", "tcp:h:2"),)
COMMIT = SnapshotCommit(SnapshotId(1, 4), MEMBERS)
GENERATION = Generation(2, MEMBERS, "h", 5, "start", resume=COMMIT)
REQUEST = PersistRequest(COMMIT, "/c", 100.0, "ab")
VIEW = View(
    revision=9,
    restarts={1: RestartRequest(1, 1, "hang")},
    revisions={"generation": 4, "snapshot": 6, "secret": 2, "last_join": 3},
    secret=b"00",
    members={1: MEMBERS},
)
ACTIONS: tuple[Action, ...] = (
    Open(GENERATION),
    Close(Closing(1, "lost b", True, 0.0)),
    OrderAbort(AbortOrder(1, all_fenced=True)),
    Commit(COMMIT),
    Persist(REQUEST),
    Publish(REQUEST, ({},), 6),
    CancelPersist(REQUEST, "no space"),
    RecordRecovery(History()),
    ReleaseMembers(Release(1)),
    Finish(Result(True, "done")),
)


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: type(action).__name__)
def test_every_action_depends_on_the_leader_and_on_all_documents(action: Action) -> None:
    (transaction,) = transactions.lead(KEYS, VIEW, 3, action, wall_s=110.0)
    assert transaction.conditions[0] == Created(KEYS.single("leadership"), 3)
    assert set(transaction.conditions[1:]) == {
        Modified(KEYS.single(name), VIEW.revisions.get(name, 0))
        for name in transactions.LEADER_DOCUMENTS
    }
    written = {operation.key for operation in transaction.operations}
    not_led = {KEYS.single("verdicts"), KEYS.restart(), KEYS.placement(2)}
    chunks = {key for key in written if key.startswith(KEYS.chunk())}
    assert written - not_led - chunks <= {
        KEYS.single(name) for name in transactions.LEADER_DOCUMENTS
    }


def test_leader_writes_only_while_its_own_membership_lasts() -> None:
    """A coordinator that has lost its data may come to the same revisions of other documents."""
    record = record_of()
    leading = replace(
        VIEW, leadership=Leadership("a", "h:1", 7), nodes={"a": JoinedNode(record, 4)}
    )
    conditions = transactions.leader_conditions(KEYS, leading, 5)
    assert Created(KEYS.node("a"), 4) in conditions


def test_preview_shows_what_a_transaction_will_make_of_the_view() -> None:
    opened = transactions.lead(KEYS, VIEW, 3, Open(GENERATION), wall_s=110.0)
    after = transactions.preview(KEYS, VIEW, opened)
    assert (after.revision, after.generation, after.snapshot) == (10, GENERATION, COMMIT)
    assert (after.generation_revision, dict(after.restarts)) == (10, {})
    for wall_s, took_s in ((110.0, 10.0), (99.5, 0.0)):  # A clock may be set back.
        published = transactions.lead(KEYS, VIEW, 3, Publish(REQUEST, ({},), 6), wall_s)
        after = transactions.preview(KEYS, VIEW, published)
        assert after.checkpoint is not None
        assert (after.checkpoint.step, after.checkpoint.took_s, after.persist) == (4, took_s, None)


def test_record_is_written_under_its_lease_over_the_last_version_only() -> None:
    record = record_of()
    transaction = transactions.write_record(KEYS, record, modified=8)
    assert transaction.conditions == (Modified(KEYS.node("a"), 8),)
    assert transaction.operations == (Put(KEYS.node("a"), record.encode(), lease=7),)


def test_join_needs_a_free_name_and_the_run_of_the_job_that_was_read() -> None:
    record = record_of("b")
    later = transactions.join(KEYS, VIEW, record, b"11")
    assert later.conditions == (Created(KEYS.node("b"), 0), Modified(KEYS.single("secret"), 2))
    assert KEYS.single("secret") not in {operation.key for operation in later.operations}
    first = transactions.join(KEYS, replace(VIEW, secret=None, revisions={}), record, b"11")
    assert first.conditions[1] == Modified(KEYS.single("secret"), 0)
    assert KEYS.single("secret") in {operation.key for operation in first.operations}


def test_lead_is_taken_by_a_member_under_its_lease_if_nobody_has_it() -> None:
    record = record_of()
    attempt = transactions.take_lead(KEYS, VIEW, record, 3)
    key = KEYS.single("leadership")
    assert attempt.conditions == (Created(KEYS.node("a"), 3), Modified(key, 0))
    assert attempt.operations == (Put(key, Leadership("a", "a:1", 7).encode(), lease=7),)


def test_removal_and_restart_requests_depend_on_what_was_read() -> None:
    removal = transactions.remove_job(KEYS, VIEW, "a", 3)
    assert removal.conditions == (
        Created(KEYS.node("a"), 3), Modified(KEYS.single("last_join"), 3)
    )  # fmt: skip
    request = RestartRequest(1, 1, "hang")
    done = transactions.complete_restart(KEYS, VIEW, "a", 3, request)
    assert done.conditions == (
        Created(KEYS.node("a"), 3), Modified(KEYS.single("generation"), 4)
    )  # fmt: skip


def test_last_member_of_a_failed_job_leaves_its_secret_and_its_end_for_as_long_as_a_lease() -> None:
    ended = Result(False, "it raised")
    view = replace(VIEW, result=ended, revisions={**VIEW.revisions, "result": 9})
    left = transactions.keep_failed_job(KEYS, view, "a", 3, lease=11)
    assert left.conditions == (
        Created(KEYS.node("a"), 3), Modified(KEYS.single("last_join"), 3)
    )  # fmt: skip
    written = {o.key: o for o in left.operations if isinstance(o, Put)}
    kept = replace(ended, kept=VIEW.generation_number)
    assert written == {
        KEYS.single("secret"): Put(KEYS.single("secret"), VIEW.secret or b"", lease=11),
        KEYS.single("result"): Put(KEYS.single("result"), kept.encode(), lease=11),
    }
    deleted = {o.key for o in left.operations if isinstance(o, Delete)}
    assert deleted >= {KEYS.single(name) for name in VIEW.revisions if name != "secret"}
    # etcd refuses a transaction that writes what it deletes.
    assert not any(key.startswith(gone) for key in written for gone in deleted)


@pytest.mark.parametrize("limit", ["operations", "nbytes"])
def test_members_are_written_in_as_few_transactions_as_the_limits_allow(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = tuple(Member(f"{n}", f"host-{n}", 2, 2 * n, "h:1", "tcp:h:2") for n in range(40 * 64))
    action = Open(Generation(2, members, "h", 5, "start"))
    view = replace(VIEW, members={})
    (whole,) = transactions.lead(KEYS, view, 3, action, wall_s=110.0)
    others = [o for o in whole.operations if not o.key.startswith(KEYS.chunk())]

    def nbytes(operations: Sequence[Operation]) -> int:
        return sum(len(o.key) + len(getattr(o, "value", b"")) for o in operations)

    if limit == "operations":
        # Three transactions to the last operation: 15, 15 and 10 chunks next to the documents.
        monkeypatch.setattr(transactions, "MAX_OPERATIONS", len(others) + 15)
        parts = transactions.lead(KEYS, view, 3, action, wall_s=110.0)
        assert [len(part.operations) for part in parts] == [15, 15, 10 + len(others)]
    else:
        chunks = [o for o in whole.operations if o.key.startswith(KEYS.chunk())]
        # The first seven are as large as the limit, to the byte.
        monkeypatch.setattr(transactions, "MAX_NBYTES", nbytes(others) + nbytes(chunks[:7]))
        parts = transactions.lead(KEYS, view, 3, action, wall_s=110.0)
        assert len(parts[0].operations) == 7
        sizes = [nbytes(part.operations) for part in parts[:-1]]
        assert max(sizes) <= nbytes(chunks[:7])
        assert min(sizes) > nbytes(chunks[:6])
    assert [o for part in parts for o in part.operations] == list(whole.operations)
    assert {part.conditions for part in parts} == {whole.conditions}
