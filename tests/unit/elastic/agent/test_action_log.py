"""Claims about what the user reads of a leader's actions."""

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.agent.action_log import log_action, log_departure
from keepstep.elastic.rendezvous.actions import Publish
from keepstep.elastic.rendezvous.records import PersistRequest, SnapshotCommit
from keepstep.elastic.rendezvous.view import JoinedNode, View
from tests.unit.elastic.node_records import record_of


def test_stored_step_is_logged_with_its_url(caplog: pytest.LogCaptureFixture) -> None:
    request = PersistRequest(SnapshotCommit(SnapshotId(2, 30)), "s3://bucket/run7", 0.0, "ab")
    with caplog.at_level("INFO", logger="keepstep"):
        log_action(Publish(request, (), 1), View())
    assert caplog.messages == ["step 30 is stored in s3://bucket/run7"]


def test_node_that_leaves_says_how_far_the_job_is(caplog: pytest.LogCaptureFixture) -> None:
    joined = JoinedNode(record_of(step=12), 1)
    with caplog.at_level("INFO", logger="keepstep"):
        log_departure(View(nodes={"a": joined}))
    assert caplog.messages == ["left after step 12; nothing is stored"]
