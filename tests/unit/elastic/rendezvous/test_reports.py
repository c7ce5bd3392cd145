"""Claims about reports: the leader decides once the last member's has come."""

from dataclasses import replace
from typing import NoReturn

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.rendezvous.records import Generation, Member, NodeReport
from keepstep.elastic.rendezvous.reports import Reports

MEMBERS = tuple(Member(node, "h", 1, rank, "h:1", "tcp:h:2") for rank, node in enumerate("abc"))
GENERATION = Generation(2, MEMBERS, "h", 5, "start")


def report_of(node: str, *steps: int) -> NodeReport:
    protected = tuple(SnapshotId(2, step) for step in steps)
    return NodeReport(node, 7, 2, "s", max(steps, default=0), protected)


def completing(*reports: NodeReport) -> list[bool]:
    received = Reports()
    found = []
    for report in reports:
        received.receive(report)
        found.append(received.completes(report, GENERATION))
    return found


def test_last_members_report_completes_a_snapshot() -> None:
    first, second, third = (report_of(node, 4) for node in "abc")
    assert completing(first, second, first, third) == [False, False, False, True]


def test_members_that_went_on_still_count_for_an_older_snapshot() -> None:
    reports = report_of("a", 4, 5), report_of("b", 4, 5), report_of("c", 4)
    assert completing(*reports) == [False, False, True]


def test_report_of_nothing_completes_nothing() -> None:
    assert completing(*(report_of(node) for node in "abc")) == [False, False, False]


def test_newest_report_of_a_node_is_kept_and_old_snapshots_are_forgotten() -> None:
    received = Reports()
    for step in range(100):
        received.receive(report_of("a", step))
    assert received.newest == {"a": report_of("a", 99)}
    assert len(received._nodes) < 10


def test_report_costs_the_same_at_any_number_of_nodes() -> None:
    """How many members there are is asked for, and never who."""

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a report is looked at with all others")

    class Members(tuple[Member, ...]):
        __iter__ = __contains__ = __getitem__ = refuse

    class Newest(dict[str, NodeReport]):
        __iter__ = __getitem__ = keys = values = items = refuse

    generation, received = replace(GENERATION, members=Members(MEMBERS)), Reports()
    received._newest = Newest()
    for node in "abc":
        report = report_of(node, 4)
        received.receive(report)
        assert received.completes(report, generation) == (node == "c")
