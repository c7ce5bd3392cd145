"""Claims about attempts to store a snapshot, and about when a node is informed of a commit."""

from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.format.layout.retention import Retention
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.format.stored.object_names import Attempt, StoredStep
from keepstep.elastic.errors import InvariantViolated
from keepstep.elastic.rendezvous.actions import Persist
from keepstep.elastic.rendezvous.checkpoint_schedule import (
    AUTO,
    PartAttempt,
    begin_persist_if_due,
    cancel_persist,
    is_over,
    is_stored,
    next_part,
    persist_before_leaving,
    record_loaded,
    retry_at_s,
)
from keepstep.elastic.rendezvous.invariants import check_transition
from keepstep.elastic.rendezvous.records import (
    CheckpointRecord,
    Generation,
    LoadedCheckpoint,
    Member,
    NodeRecord,
    PersistRequest,
    SnapshotCommit,
    StoreFailure,
)
from keepstep.elastic.rendezvous.view import JoinedNode, View
from tests.unit.elastic.node_records import record_of

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


def test_part_is_begun_once_by_each_holder_that_has_entered_the_generation() -> None:
    assert next_part(VIEW, HOLDER.server, entered=1, begun=None) is None
    assert next_part(VIEW, "tcp:h:9", entered=2, begun=None) is None
    begun = next_part(VIEW, HOLDER.server, entered=2, begun=None)
    assert begun is not None
    assert begun.revision == 39
    assert next_part(VIEW, HOLDER.server, entered=2, begun=begun) is None
    again = replace(VIEW, revisions={"persist": 41})
    assert next_part(again, HOLDER.server, entered=2, begun=begun) is not None


def resumed_from_storage(step: int, recorded: CheckpointRecord | None) -> View:
    """A view of generation 3, which rank 0 has resumed from a stored step."""
    record = record_of(generation=3, checkpoint_url="/c", loaded=LoadedCheckpoint(step, 2))
    return View(
        revision=50,
        nodes={"a": JoinedNode(record, 3)},
        generation=Generation(3, (HOLDER,), "h", 5, "lost a"),
        checkpoint=recorded,
        revisions={"generation": 40, "checkpoint": 30},
    )


def recorded(step: int, generation: int) -> CheckpointRecord:
    return CheckpointRecord(step=step, generation=generation, url="/c", at_s=1.0)


def test_checkpoint_that_was_found_damaged_does_not_count_as_stored() -> None:
    before = resumed_from_storage(201, recorded(240, 2))
    action = record_loaded(before, 9.0)
    assert action is not None
    assert (action.checkpoint.step, action.checkpoint.generation) == (201, 0)
    # Numbers in storage go on after that of the damaged one.
    assert action.checkpoint.base == 2
    after = replace(before, revision=51, checkpoint=action.checkpoint, revisions={"checkpoint": 51})
    check_transition(before, after)
    assert record_loaded(after, 9.0) is None


def test_checkpoint_that_stands_is_not_recorded_again() -> None:
    assert record_loaded(resumed_from_storage(201, None), 9.0) is not None
    for stands in (recorded(201, 2), recorded(240, 3)):
        # The one that was loaded, or one that this generation has stored since.
        assert record_loaded(resumed_from_storage(201, stands), 9.0) is None


def rolled_back(loaded: bool = True, **record: Any) -> View:
    """A view of generation 3: it had step 240 in memory, and has rolled back to step 201."""
    view = resumed_from_storage(201, recorded(240, 2))
    assert view.generation is not None
    undone = SnapshotCommit(SnapshotId(2, 241), (HOLDER,), 0)
    described = replace(
        view.nodes["a"].record,
        checkpoint_every=1, step=241, sealed=(SnapshotId(2, 241),), leaving=True,
        loaded=LoadedCheckpoint(201, 2) if loaded else None,
        **record,
    )  # fmt: skip
    return replace(
        view,
        generation=replace(view.generation, resume=undone),
        nodes={"a": JoinedNode(described, 3)},
        snapshot=undone,
    )


def test_checkpoint_that_was_undone_does_not_count_as_stored() -> None:
    before = rolled_back()
    action = record_loaded(before, 9.0)
    assert action is not None
    assert (action.checkpoint.step, action.checkpoint.base) == (201, 2)
    after = replace(before, revision=51, checkpoint=action.checkpoint, revisions={"checkpoint": 51})
    check_transition(before, after)


@pytest.mark.parametrize(
    ("loaded", "times", "stores"),
    [(True, {"restored": 1.0}, False), (False, {}, False), (False, {"restored": 1.0}, True)],
)
def test_snapshot_of_an_older_generation_is_stored_once_it_is_known_not_to_be_undone(
    loaded: bool, times: dict[str, float], stores: bool
) -> None:
    view = rolled_back(loaded, times=times)
    begun = begin_persist_if_due(view, [view.nodes["a"].record], 9.0)
    assert isinstance(begun, Persist) == stores


@pytest.mark.parametrize("restored", ["0", "a", "b"])
def test_nothing_is_stored_before_rank_0_reports_its_find_in_storage(
    restored: str,
) -> None:
    names = ("a", "0", "b")  # Rank 0's node is neither the first by name nor the last.
    members = tuple(
        Member(name, "h", 1, n, f"{name}:1", f"tcp:{name}:2") for n, name in enumerate(names)
    )
    nodes = {
        name: JoinedNode(
            NodeRecord(
                node=name, host="h", nproc=1, agent=f"{name}:1", server=f"tcp:{name}:2",
                store_port=5, lease=n, digest="", generation=1, step=4, checkpoint_url="/c",
                checkpoint_every=1, sealed=(SnapshotId(1, 4),),
                times={"restored": 1.0} if name == restored else {},
            ),
            n,
        )
        for n, name in enumerate(names, 1)
    }  # fmt: skip
    view = View(
        revision=9,
        nodes=nodes,
        generation=Generation(1, members, "h", 5, "start"),
        snapshot=SnapshotCommit(SnapshotId(1, 4), members),
    )
    present = [joined.record for joined in nodes.values()]
    begun = begin_persist_if_due(view, present, 9.0)
    assert isinstance(begun, Persist) == (restored == "a")


def test_recorded_checkpoint_goes_back_to_one_that_was_loaded_only() -> None:
    before = resumed_from_storage(201, recorded(240, 3))
    after = replace(before, revision=51, checkpoint=recorded(201, 0), revisions={"checkpoint": 51})
    with pytest.raises(InvariantViolated, match="recorded for the request"):
        check_transition(before, after)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_snapshots_are_stored_as_the_nodes_scripts_say(compression: Literal["zstd"] | None) -> None:
    view = resumed_from_storage(5, recorded(5, 3))
    record = replace(
        view.nodes["a"].record,
        checkpoint_every=1, checkpoint_compression=compression, step=7,
        checkpoint_retention=Retention(last=3, every=100),
        sealed=(SnapshotId(3, 7),), leaving=True,
    )  # fmt: skip
    commit = SnapshotCommit(SnapshotId(3, 7), (HOLDER,), 0)
    view = replace(view, nodes={"a": JoinedNode(record, 3)}, snapshot=commit)
    for action in (
        begin_persist_if_due(view, [record], 9.0),
        persist_before_leaving(view, [record], commit, 9.0),
    ):
        assert isinstance(action, Persist)
        assert (action.request.url, action.request.compression) == ("/c", compression)
        assert action.request.retention == Retention(last=3, every=100)
        assert PersistRequest.decode(action.request.encode()) == action.request


def training(step: int, **record: Any) -> View:
    """A view of generation 3, which has committed a step; a checkpoint is due every 10 steps."""
    described = replace(
        resumed_from_storage(0, None).nodes["a"].record,
        loaded=None, step=step, sealed=(SnapshotId(3, step),),
        **{"checkpoint_every": 10, "times": {"restored": 1.0}, **record},
    )  # fmt: skip
    return replace(
        resumed_from_storage(0, None),
        nodes={"a": JoinedNode(described, 3)},
        snapshot=SnapshotCommit(SnapshotId(3, step), (HOLDER,)),
    )


def begins(view: View, wall_s: float = 100.0) -> bool:
    begun = begin_persist_if_due(view, [view.nodes["a"].record], wall_s)
    assert isinstance(begun, Persist) or begun is None
    return begun is not None


@pytest.mark.parametrize(
    ("stored", "step", "is_due"),
    [
        (None, 9, False), (None, 10, True), (None, 11, True), (10, 19, False), (10, 20, True),
        (19, 20, True), (20, 20, False), (20, 29, False), (21, 20, False),
    ],
)  # fmt: skip
def test_checkpoint_is_due_when_a_multiple_of_the_interval_was_passed_since_the_last(
    stored: int | None, step: int, is_due: bool
) -> None:
    checkpoint = recorded(stored, 3) if stored is not None else None
    assert begins(replace(training(step), checkpoint=checkpoint)) is is_due
    # The last step is stored whatever the interval is, unless it is stored already.
    finishing = replace(training(step, finishing=True), checkpoint=checkpoint)
    assert begins(finishing) is (stored is None or step > stored)
    behind = replace(finishing, snapshot=SnapshotCommit(SnapshotId(3, step), (HOLDER,)))
    later = replace(behind.nodes["a"].record, step=step + 1)
    assert begins(replace(behind, nodes={"a": JoinedNode(later, 3)})) is is_due


def test_checkpoints_without_an_interval_are_stored_at_the_end_only() -> None:
    assert not begins(training(10, checkpoint_every=None))
    assert begins(training(10, checkpoint_every=None, finishing=True))
    assert not begins(training(10, checkpoint_url=None))


def test_pause_after_failures_to_store_doubles_up_to_five_minutes() -> None:
    pauses_s = [retry_at_s(StoreFailure(4, "full", 100.0, count)) - 100.0 for count in range(1, 10)]
    assert pauses_s == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0]


@pytest.mark.parametrize(
    ("failed_step", "finishing", "wall_s", "tries"),
    [
        (10, False, 105.0, True),
        (10, False, 102.0, True),
        (10, False, 101.9, False),
        # The step that could not be stored is given up, unless it is the last one.
        (20, False, 105.0, False),
        (20, True, 105.0, True),
        (20, True, 101.9, False),
    ],
)
def test_what_could_not_be_stored_is_tried_again_with_a_later_step_or_at_the_end(
    failed_step: int, finishing: bool, wall_s: float, tries: bool
) -> None:
    view = replace(
        training(20, finishing=finishing), store_failure=StoreFailure(failed_step, "full", 100.0)
    )
    assert begins(view, wall_s) is tries


@pytest.mark.parametrize(
    ("failed", "stored_at_s", "count"),
    [
        (None, None, 1),
        (None, 5.0, 1),
        (StoreFailure(3, "full", 6.0, 2), None, 3),
        (StoreFailure(3, "full", 6.0, 2), 5.0, 3),
        (StoreFailure(3, "full", 6.0, 2), 6.0, 1),
        (StoreFailure(3, "full", 6.0, 2), 7.0, 1),
    ],
)
def test_failures_to_store_are_in_a_row_until_a_checkpoint_is_stored(
    failed: StoreFailure | None, stored_at_s: float | None, count: int
) -> None:
    checkpoint = replace(recorded(3, 1), at_s=stored_at_s) if stored_at_s is not None else None
    view = replace(STORING, store_failure=failed, checkpoint=checkpoint)
    assert cancel_persist(view, REQUEST, "full").count == count


def test_checkpoint_of_a_later_step_holds_an_earlier_one_too() -> None:
    view = replace(STORING, checkpoint=recorded(5, 1))
    assert [is_stored(view, step) for step in (4, 5, 6)] == [True, True, False]
    assert not is_stored(STORING, 0)


@pytest.mark.parametrize(
    ("stored", "failed", "stores"),
    [(6, 6, True), (7, 0, False), (0, 7, False), (8, 0, False), (0, 8, False), (0, 0, True)],
)
def test_leaving_stores_what_is_newer_than_what_is_stored_and_than_what_could_not_be(
    stored: int, failed: int, stores: bool
) -> None:
    view = replace(
        training(7, leaving=True),
        checkpoint=recorded(stored, 3) if stored else None,
        store_failure=StoreFailure(failed, "full", 1.0) if failed else None,
    )
    record = view.nodes["a"].record
    action = persist_before_leaving(view, [record], view.snapshot, 100.0)
    assert isinstance(action, Persist) is stores
    assert persist_before_leaving(view, [replace(record, leaving=False)], None, 100.0) is None


def test_times_that_lie_ahead_are_not_waited_for() -> None:
    """A leader's clock was an hour ahead, and it was lost: its successor stored nothing so long."""
    ahead = replace(recorded(3, 3), at_s=3700.0)
    assert begins(replace(training(10, checkpoint_every=AUTO), checkpoint=ahead))
    failed = StoreFailure(9, "full", 3700.0, 1)
    assert begins(replace(training(10), store_failure=failed))
    assert not begins(replace(training(10), store_failure=replace(failed, at_s=99.0)))
