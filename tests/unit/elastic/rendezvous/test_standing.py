"""Claims about joining, leases, and records whose writes were not confirmed."""

from dataclasses import replace

import pytest

from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.elastic.errors import InvariantViolated, LeaseLost, UsageError
from keepstep.elastic.rendezvous.records import (
    Generation,
    Leadership,
    Member,
    NodePhase,
    NodeRecord,
    Result,
)
from keepstep.elastic.rendezvous.standing import (
    AwaitPredecessor,
    Join,
    Lease,
    RemoveFinishedJob,
    joining_again,
    led_since,
    may_revoke_predecessor,
    next_join_step,
    settle_record,
    without_state,
)
from keepstep.elastic.rendezvous.view import JoinedNode, Keys, View
from keepstep.elastic.store.contract import KeyValue, Modified

KEYS = Keys("job")
RECORD = NodeRecord(
    node="a",
    host="h",
    nproc=2,
    agent="h:1",
    server="tcp:h:2",
    store_port=5,
    lease=7,
    digest="d",
)


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


@pytest.mark.parametrize(
    ("agent", "lives", "waited_s", "expected"),
    [
        ("h:9", False, 1.0, True),
        ("h:9", None, 1.0, False),
        ("h:1", None, 1.0, True),
        ("h:1", True, 1.0, True),
        ("h:1", None, 10.1, True),
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
