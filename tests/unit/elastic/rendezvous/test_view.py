"""Claims about reports: a leader uses those that are newer than a node's record, and no others."""

from dataclasses import replace

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.rendezvous.records import NodePhase, NodeRecord, NodeReport
from keepstep.elastic.rendezvous.view import JoinedNode, Keys, View, with_reports
from tests.unit.elastic.node_records import record_of

RECORD = record_of(generation=3, phase=NodePhase.RUNNING, step=10, sealed=(SnapshotId(3, 10),))
REPORT = NodeReport(
    "a", lease=7, generation=3, server="tcp:a:2", step=12,
    protected=(SnapshotId(3, 11), SnapshotId(3, 12)),
)  # fmt: skip


def view_of(record: NodeRecord) -> View:
    others = {"b": JoinedNode(replace(RECORD, node="b", lease=8), 2)}
    return View(revision=9, nodes={record.node: JoinedNode(record, 1), **others})


@pytest.mark.parametrize("other", ["llama/ablation", "llama/", "llama%2Fablation", "llama/control"])
def test_keys_of_a_job_lie_under_no_other_job(other: str) -> None:
    # The last member to leave deletes all keys under its job's prefix.
    keys, others = Keys("llama"), [Keys(other), Keys("llama/ablation/2")]
    assert keys.prefix == "/keepstep/llama/"
    for other_keys in others:
        assert not other_keys.node("a").startswith(keys.prefix)
        assert other_keys.name(other_keys.node("a")) == "nodes/a"
    assert len({keys.prefix, *(other_keys.prefix for other_keys in others)}) == 3
    assert Keys("llama%2Fablation").prefix != Keys("llama/ablation").prefix


@pytest.mark.parametrize("phase", [NodePhase.STARTING, NodePhase.RUNNING])
def test_a_report_replaces_what_the_record_says_is_held(phase: NodePhase) -> None:
    record = replace(RECORD, phase=phase)
    view = with_reports(view_of(record), {"a": REPORT})
    assert view == view_of(
        replace(record, step=12, sealed=REPORT.protected, protected=REPORT.protected)
    )


def test_a_record_that_names_a_newer_snapshot_than_the_report_counts() -> None:
    """The node does not reach this leader any more: nothing would ever be committed."""
    newest = SnapshotId(3, 40)
    record = replace(RECORD, sealed=(newest,), protected=(newest,))
    view = with_reports(view_of(record), {"a": REPORT})
    assert view.nodes["a"].record.protected == view.nodes["a"].record.sealed == (newest,)


def test_a_step_never_goes_back() -> None:
    view = with_reports(view_of(RECORD), {"a": replace(REPORT, step=9)})
    assert view == view_of(replace(RECORD, sealed=REPORT.protected, protected=REPORT.protected))


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(replace(REPORT, lease=6), id="an earlier membership's"),
        pytest.param(replace(REPORT, generation=2), id="an earlier generation's"),
        pytest.param(
            replace(REPORT, generation=4), id="a generation's that the record does not know yet"
        ),
        pytest.param(replace(REPORT, node="c"), id="a stranger's"),
        pytest.param(replace(REPORT, server="tcp:h:1"), id="a snapshot server's that died"),
    ],
)
def test_a_report_of_another_time_or_node_changes_nothing(report: NodeReport) -> None:
    view = view_of(RECORD)
    assert with_reports(view, {report.node: report}) == view


@pytest.mark.parametrize("phase", [NodePhase.WAITING, NodePhase.DRAINED, NodePhase.DONE])
def test_the_record_of_a_node_without_workers_is_the_last_word(phase: NodePhase) -> None:
    view = view_of(replace(RECORD, phase=phase))
    assert with_reports(view, {"a": REPORT}) == view
