"""Claims about what production refuses to write, or to act upon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.errors import InvariantViolated
from keepstep.elastic.rendezvous.actions import (
    Action,
    Commit,
    Open,
    OrderAbort,
    Persist,
    Publish,
    ReleaseMembers,
)
from keepstep.elastic.rendezvous.invariants import (
    check_action,
    check_generation,
    check_record,
    check_transition,
    check_view,
)
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.rank_assignment import assign_ranks
from keepstep.elastic.rendezvous.records import (
    AbortOrder,
    CheckpointRecord,
    Closing,
    Eviction,
    Generation,
    Leadership,
    NodePhase,
    NodeRecord,
    PersistedPart,
    PersistRequest,
    Release,
    Result,
    ShardRebuild,
    SnapshotCommit,
    StoreFailure,
)
from keepstep.elastic.rendezvous.view import JoinedNode, View
from tests.unit.elastic.node_records import record_of

POLICY = RendezvousPolicy(min_nodes=1, max_nodes=2)
SNAPSHOT = SnapshotId(1, 4)


def drained(node: str) -> NodeRecord:
    return record_of(
        node,
        warm=True,
        generation=1,
        phase=NodePhase.DRAINED,
        sealed=(SNAPSHOT,),
        protected=(SNAPSHOT,),
        persisted=PersistedPart(step=4, generation=1, part={"entry": []}, attempt=6),
    )


MEMBERS = assign_ranks((), [drained("a"), drained("b")], 2)
COMMIT = SnapshotCommit(SNAPSHOT, MEMBERS, parity=1)
REQUEST = PersistRequest(COMMIT, "/c", 100.0, "ab")
FIRST = Generation(1, MEMBERS, "h", 5, "start", parity=1)
SECOND = Generation(2, MEMBERS, "h", 5, "lost c", resume=COMMIT, parity=1)
CLOSING = Closing(1, "lost c", True, 0.0)
OPEN = View(
    revision=9,
    nodes={name: JoinedNode(drained(name), at) for at, name in enumerate("ab")},
    generation=FIRST,
    snapshot=COMMIT,
    secret=b"00",
    members={1: MEMBERS},
    revisions={"generation": 4, "snapshot": 5},
)
CLOSED = replace(OPEN, closing=CLOSING, revisions={**OPEN.revisions, "closing": 7})
OPENED = replace(OPEN, generation=SECOND)
STORING = replace(OPEN, persist=REQUEST, revisions={**OPEN.revisions, "persist": 6})
LEADERSHIP = Leadership("a", "a:1", 7)
STORED = CheckpointRecord(step=4, generation=1, url="/c", at_s=0.0)


def with_record(view: View, node: str, **changes: object) -> View:
    joined = view.nodes[node]
    changed = replace(joined.record, **changes)  # type: ignore[arg-type]
    return replace(view, nodes={**view.nodes, node: JoinedNode(changed, joined.created)})


def without(view: View, node: str) -> View:
    return replace(view, nodes={n: joined for n, joined in view.nodes.items() if n != node})


def changed(before: View, **documents: object) -> Callable[[], None]:
    revisions = {**before.revisions, **dict.fromkeys(documents, before.revision + 1)}
    after = replace(before, revisions=revisions, **documents)  # type: ignore[arg-type]
    return lambda: check_transition(before, after)


def acted(view: View, action: Action) -> Callable[[], None]:
    return lambda: check_action(POLICY, view, action)


ORDER = AbortOrder(1, all_fenced=True)
REBUILD = ShardRebuild(2, "a", "tcp:a:2")

NEWER = SnapshotId(1, 5)

ALLOWED: dict[str, Callable[[], None]] = {
    "a view": lambda: check_view(STORING),
    "closing": changed(OPEN, closing=CLOSING),
    "giving up a snapshot that is only kept to be stored": acted(
        with_record(with_record(CLOSED, "a", committed=NEWER), "b", committed=NEWER),
        Open(replace(SECOND, resume=None)),
    ),
    "opening": changed(CLOSED, generation=SECOND, closing=None),
    "opening, checked": acted(CLOSED, Open(SECOND)),
    "opening without a lost member": acted(
        without(CLOSED, "b"),
        Open(
            replace(
                SECOND,
                members=MEMBERS[:1],
                parity=0,
                resume=replace(COMMIT, shard_rebuilds=(REBUILD, replace(REBUILD, rank=3))),
            )
        ),
    ),
    "a leader after another": changed(OPEN, leadership=LEADERSHIP),
    "a release": changed(CLOSED, release=Release(1)),
    "a release, checked": acted(CLOSED, ReleaseMembers(Release(1))),
    "an order to abort": changed(CLOSED, abort_order=ORDER),
    "an order to abort, checked": acted(
        with_record(CLOSED, "b", phase=NodePhase.RUNNING, fenced=1), OrderAbort(ORDER)
    ),
    "a newer commit": changed(OPEN, snapshot=replace(COMMIT, snapshot=SnapshotId(1, 5))),
    "commit": acted(OPEN, Commit(COMMIT)),
    "a request to store": changed(OPEN, persist=REQUEST),
    "publishing": acted(STORING, Publish(REQUEST, ({}, {}), 6)),
    "a checkpoint": changed(STORING, persist=None, checkpoint=STORED),
    "a failure to store": changed(STORING, persist=None, store_failure=StoreFailure(4, "")),
    "the job's end": lambda: check_transition(without(OPEN, "b"), View(revision=10)),
}

REFUSED: dict[str, tuple[str, Callable[[], None]]] = {
    "used number": (
        "a generation's number grows by one",
        changed(CLOSED, generation=replace(SECOND, generation=1, resume=None), closing=None),
    ),
    "skipped number": (
        "a generation's number grows by one",
        changed(CLOSED, generation=replace(SECOND, generation=3), closing=None),
    ),
    "opened twice": (
        "a generation is opened after the last one was closed",
        changed(OPEN, generation=SECOND),
    ),
    "stale requests": (
        "a generation begins without requests",
        changed(CLOSED, generation=SECOND),
    ),
    "another snapshot": (
        "a generation begins with the snapshot that it resumes from",
        changed(CLOSED, generation=SECOND, closing=None, snapshot=None),
    ),
    "gap in ranks": (
        "ranks are contiguous",
        lambda: check_generation(replace(FIRST, members=MEMBERS[1:])),
    ),
    "two places": (
        "each node has one place",
        lambda: check_generation(
            replace(FIRST, members=(MEMBERS[0], replace(MEMBERS[0], first_rank=2)))
        ),
    ),
    "too much parity": (
        "a group has more nodes than may be lost",
        lambda: check_generation(replace(FIRST, parity=2)),
    ),
    "resumed from itself": (
        "a generation resumes from an older one's snapshot",
        lambda: check_generation(replace(SECOND, generation=1)),
    ),
    "too many members": (
        "a generation has min to max nodes",
        lambda: check_action(replace(POLICY, max_nodes=1), CLOSED, Open(SECOND)),
    ),
    "an evicted member": (
        "members are present, warm, and stay",
        acted(replace(CLOSED, evictions={"b": Eviction("slow", True)}), Open(SECOND)),
    ),
    "a member that works": (
        "all that remain of the last one have drained",
        acted(with_record(CLOSED, "b", phase=NodePhase.RUNNING), Open(SECOND)),
    ),
    "more lost than parity": (
        "a snapshot that can be restored",
        acted(with_record(with_record(CLOSED, "a", sealed=()), "b", sealed=()), Open(SECOND)),
    ),
    "incomplete parity": (
        "a snapshot that can be restored",
        acted(with_record(with_record(CLOSED, "a", protected=()), "b", sealed=()), Open(SECOND)),
    ),
    "a shard that nobody rebuilds": (
        "members rebuild exactly the shards that are lost",
        acted(with_record(CLOSED, "b", sealed=()), Open(SECOND)),
    ),
    "a snapshot given up": (
        "a committed snapshot that can be restored is kept",
        acted(CLOSED, Open(replace(SECOND, resume=None))),
    ),
    "an unsealed commit": (
        "all of its holders have sealed it",
        acted(with_record(OPEN, "b", sealed=()), Commit(COMMIT)),
    ),
    "an unprotected commit": (
        "all of its holders have its parity",
        acted(with_record(OPEN, "b", protected=(), phase=NodePhase.RUNNING), Commit(COMMIT)),
    ),
    "a commit of some members": (
        "a commit's holders are the members of its generation",
        acted(
            OPEN,
            Commit(SnapshotCommit(SnapshotId(1, 5), MEMBERS[:1])),
        ),
    ),
    "a commit of absent members": (
        "a snapshot's holders are members of its generation",
        acted(replace(OPEN, members={1: MEMBERS[:1]}), Commit(COMMIT)),
    ),
    "an older commit": (
        "commits never go back",
        changed(OPEN, snapshot=replace(COMMIT, snapshot=SnapshotId(1, 3))),
    ),
    "a commit of another generation": (
        "only the current generation's snapshots are committed",
        changed(replace(OPENED, snapshot=None), snapshot=COMMIT),
    ),
    "a second leader": (
        "a leader leads until its lease ends",
        changed(replace(OPEN, leadership=LEADERSHIP), leadership=Leadership("b", "b:1", 8)),
    ),
    "a release while the generation is open": (
        "members are released from a generation that closes",
        changed(OPEN, release=Release(1)),
    ),
    "a release before all have drained": (
        "all that remain of the last one have drained",
        acted(with_record(CLOSED, "b", phase=NodePhase.RUNNING), ReleaseMembers(Release(1))),
    ),
    "an order to abort before all are fenced": (
        "collectives are aborted when nobody can seal what they leave",
        acted(with_record(CLOSED, "b", phase=NodePhase.RUNNING, fenced=0), OrderAbort(ORDER)),
    ),
    "an order to abort what is open": (
        "only a generation that closes is aborted",
        acted(OPEN, OrderAbort(ORDER)),
    ),
    "an order to abort that is taken back": (
        "an order to abort is given once",
        changed(replace(CLOSED, abort_order=ORDER), abort_order=None),
    ),
    "another order to abort": (
        "an order to abort is given once",
        changed(replace(CLOSED, abort_order=ORDER), abort_order=replace(ORDER, all_fenced=False)),
    ),
    "an order to abort of an older generation": (
        "an order to abort is given once",
        changed(CLOSED, abort_order=replace(ORDER, generation=0)),
    ),
    "an opening that leaves an order to abort": (
        "a generation begins without requests of the last one",
        changed(CLOSED, generation=SECOND, closing=None, abort_order=ORDER),
    ),
    "closed twice": ("a generation is closed once", changed(CLOSED, closing=None)),
    "an abort that becomes a closing in good order": (
        "a generation is closed once",
        changed(
            replace(CLOSED, closing=replace(CLOSING, abort=True)),
            closing=replace(CLOSING, abort=False),
        ),
    ),
    "a closing that becomes another one": (
        "a generation is closed once",
        changed(
            replace(CLOSED, closing=replace(CLOSING, abort=False)),
            closing=replace(CLOSING, abort=True, detected_at_s=9.0),
        ),
    ),
    "closing of an older generation": (
        "only the open generation is closed",
        changed(OPENED, closing=CLOSING),
    ),
    "a request for what is not committed": (
        "only the committed snapshot is stored",
        changed(replace(OPEN, snapshot=None), persist=REQUEST),
    ),
    "two requests": (
        "one snapshot is stored at a time",
        changed(STORING, persist=replace(REQUEST, at_s=1.0)),
    ),
    "a request for what is stored": (
        "a snapshot is stored once",
        changed(replace(OPEN, checkpoint=STORED), persist=REQUEST),
    ),
    "a request without a holder": (
        "a snapshot is stored by all of its holders",
        acted(without(OPEN, "b"), Persist(REQUEST)),
    ),
    "a checkpoint nobody asked for": (
        "a checkpoint is recorded for the request",
        changed(OPEN, checkpoint=STORED),
    ),
    "a part that is missing": (
        "all of its parts are written",
        acted(with_record(STORING, "b", persisted=None), Publish(REQUEST, ({}, {}), 6)),
    ),
    "a part of an earlier attempt": (
        "all of its parts are written",
        acted(
            replace(STORING, revisions={**STORING.revisions, "persist": 8}),
            Publish(REQUEST, ({}, {}), 6),
        ),
    ),
    "a part that failed": (
        "all of its parts are written",
        acted(
            with_record(
                STORING, "b", persisted=PersistedPart(4, 1, {"error": "no space"}, attempt=6)
            ),
            Publish(REQUEST, ({}, {}), 6),
        ),
    ),
    "an answer to no request": (
        "a request to store is answered while it stands",
        acted(OPEN, Publish(REQUEST, ({}, {}), 6)),
    ),
    "a decision after the end": (
        "nothing is decided after the result",
        changed(replace(OPEN, result=Result(True, "")), closing=CLOSING),
    ),
    "keys deleted under a member": (
        "a job's keys are deleted by its last member only",
        lambda: check_transition(OPEN, View(revision=10)),
    ),
    "a record of a generation to come": (
        "a record names a generation that was opened",
        lambda: check_record(OPEN, None, replace(drained("a"), generation=2)),
    ),
    "a record that goes back": (
        "a record's generation never decreases",
        lambda: check_record(OPENED, replace(drained("a"), generation=2), drained("a")),
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_keeps_the_invariants_is_accepted(name: str) -> None:
    ALLOWED[name]()


@pytest.mark.parametrize("name", REFUSED)
def test_what_breaks_an_invariant_is_refused_by_its_name(name: str) -> None:
    invariant, check = REFUSED[name]
    with pytest.raises(InvariantViolated) as refused:
        check()
    assert invariant in refused.value.invariant
    assert "Nothing was written" in str(refused.value)
