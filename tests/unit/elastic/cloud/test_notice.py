"""Claims about when a node leaves because of notices, and what it says of them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from keepstep.elastic.cloud.notice import Notice, describe_changes, leaving_time_s

NOON_S = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()
SPOT = Notice(identity="spot", what="a spot interruption (terminate)", at_s=NOON_S)
REBOOT = Notice(identity="e1", what="maintenance (system-reboot)", at_s=NOON_S + 3 * 86_400)
PREEMPTED = Notice(identity="preempted", what="a preemption")
FREEZE = Notice(identity="e2", what="the event Freeze", at_s=NOON_S, takes_machine=False)


@pytest.mark.parametrize(
    ("notices", "leaving_s"),
    [
        ((), None),
        ((FREEZE,), None),
        ((SPOT,), NOON_S - 120),
        ((REBOOT, SPOT), NOON_S - 120),
        ((REBOOT,), NOON_S + 3 * 86_400 - 120),
        ((REBOOT, PREEMPTED), float("-inf")),
    ],
)
def test_node_leaves_some_time_before_the_first_event_that_takes_its_machine(
    notices: tuple[Notice, ...], leaving_s: float | None
) -> None:
    assert leaving_time_s(notices, 120.0) == leaving_s


def test_changes_are_described_once_each() -> None:
    first = describe_changes((), (SPOT, REBOOT, FREEZE), 120.0, NOON_S - 120)
    assert first == [
        "announces a spot interruption (terminate) at 2026-11-29 12:00:00 UTC: "
        "this node leaves now",
        "announces maintenance (system-reboot) at 2026-12-02 12:00:00 UTC: "
        "this node leaves at 2026-12-02 11:58:00 UTC",
        "announces the event Freeze at 2026-11-29 12:00:00 UTC: this node stays",
    ]
    assert describe_changes((SPOT, REBOOT), (SPOT, REBOOT), 120.0, NOON_S) == []
    assert describe_changes((REBOOT,), (), 120.0, NOON_S) == [
        "no longer announces maintenance (system-reboot) at 2026-12-02 12:00:00 UTC"
    ]


def test_another_time_of_an_event_is_described_as_it_is_then() -> None:
    later = Notice(identity=REBOOT.identity, what=REBOOT.what, at_s=NOON_S + 4 * 86_400)
    (line,) = describe_changes((REBOOT,), (later,), 120.0, NOON_S)
    assert line.startswith("announces")
    assert "12-03 12:00:00" in line
