"""Claims about what a leader does while the manifest of a checkpoint is written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.rendezvous.actions import CancelPersist, Close, Open, Publish
from keepstep.elastic.rendezvous.decision import Decision, LeaderState
from keepstep.elastic.rendezvous.publication import (
    OPENING_WAITS_S,
    Publication,
    conclude,
    follow,
)
from keepstep.elastic.rendezvous.records import (
    Closing,
    Generation,
    Member,
    PersistRequest,
    SnapshotCommit,
    StoreFailure,
)
from keepstep.elastic.rendezvous.view import View

MEMBER = Member("a", "h", 1, 0, "h:1", "tcp:h:2")
REQUEST = PersistRequest(SnapshotCommit(SnapshotId(1, 10), (MEMBER,)), "s3://b/run", 5.0, "run")
PUBLISH = Publish(REQUEST, ({"entry": []},), 7)
VIEW = View(persist=REQUEST, revisions={"persist": 7})
OPEN = Open(Generation(2, (MEMBER,), "h", 5, "worker lost"))


def decided(action: object) -> Decision:
    return Decision(LeaderState("something", 3.0), action)  # type: ignore[arg-type]


def test_a_manifest_is_begun_once_and_the_leader_goes_on() -> None:
    begun, decision = follow(None, decided(PUBLISH), VIEW, 1.0)
    assert begun == Publication(PUBLISH)
    assert decision == replace(decided(PUBLISH), action=None)
    again, _ = follow(begun, decided(PUBLISH), VIEW, 2.0)
    assert again == begun


def test_a_generation_is_closed_while_a_manifest_is_written() -> None:
    close = decided(Close(Closing(1, "worker lost", True, 0.5)))
    assert follow(Publication(PUBLISH), close, VIEW, 1.0) == (Publication(PUBLISH), close)


def test_the_next_generation_waits_for_a_manifest_for_a_while() -> None:
    waiting, decision = follow(Publication(PUBLISH), decided(OPEN), VIEW, 100.0)
    assert (decision.action, decision.again_at_s) == (None, 100.0 + OPENING_WAITS_S)
    waiting, decision = follow(waiting, decided(OPEN), VIEW, 99.0 + OPENING_WAITS_S)
    assert (decision.action, decision.again_at_s) == (None, 100.0 + OPENING_WAITS_S)
    given_up, decision = follow(waiting, decided(OPEN), VIEW, 100.0 + OPENING_WAITS_S)
    assert given_up is not None
    assert not given_up.is_under_way
    assert isinstance(decision.action, CancelPersist)
    assert "s3://b/run had not taken the manifest" in decision.action.reason
    without = replace(VIEW, persist=None, revisions={})
    assert follow(given_up, decided(OPEN), without, 120.0) == (None, decided(OPEN))


def test_without_a_manifest_under_way_the_next_generation_opens_at_once() -> None:
    assert follow(None, decided(OPEN), VIEW, 1.0) == (None, decided(OPEN))


def test_a_holder_that_is_gone_after_it_has_written_its_part_does_not_undo_the_manifest() -> None:
    cancel = decided(CancelPersist(REQUEST, "a was gone"))
    assert follow(Publication(PUBLISH), cancel, VIEW, 1.0)[1].action is None
    assert follow(None, cancel, VIEW, 1.0)[1] == cancel


@pytest.mark.parametrize("revision", [0, 8])
def test_the_manifest_of_a_request_that_stands_no_more_is_not_waited_for(revision: int) -> None:
    other = replace(VIEW, revisions={"persist": revision})
    assert follow(Publication(PUBLISH), decided(OPEN), other, 1.0) == (None, decided(OPEN))
    assert conclude(Publication(PUBLISH, ""), other) is None
    renewed = replace(PUBLISH, revision=8)
    assert follow(Publication(PUBLISH), decided(renewed), other, 1.0)[0] == Publication(renewed)


def test_what_became_of_a_manifest_is_recorded_while_its_request_stands() -> None:
    assert conclude(None, VIEW) is None
    assert conclude(Publication(PUBLISH), VIEW) is None
    assert conclude(Publication(PUBLISH, ""), VIEW) == PUBLISH
    failed_before = replace(VIEW, store_failure=StoreFailure(8, "no space", 4.0, 2))
    assert conclude(Publication(PUBLISH, "no space"), failed_before) == CancelPersist(
        REQUEST, "no space", 3
    )
