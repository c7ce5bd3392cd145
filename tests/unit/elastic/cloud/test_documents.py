"""Claims about what is read from the clouds' documents, which have their documentation's form."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from keepstep.elastic.cloud.documents import (
    read_maintenance,
    read_maintenance_event,
    read_preempted,
    read_rebalance,
    read_scheduled_events,
    read_spot_action,
)
from keepstep.elastic.cloud.notice import Notice

NOON_S = datetime(2026, 11, 29, 12, 0, 43, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("text", "at_s"),
    [
        ('{"action": "terminate", "time": "2026-11-29T12:00:43Z"}', NOON_S),
        ('{"action": "stop", "time": "2026-11-29T12:00:43Z"}', NOON_S),
        ('{"action": "hibernate", "time": "2026-11-29T12:00:43Z"}', None),
        ('{"action": "terminate"}', None),
    ],
)
def test_spot_interruption_takes_the_machine_at_its_time_and_hibernation_at_once(
    text: str, at_s: float | None
) -> None:
    (notice,) = read_spot_action(text)
    assert (notice.at_s, notice.takes_machine) == (at_s, True)


def test_rebalance_recommendation_takes_nothing() -> None:
    (notice,) = read_rebalance('{"noticeTime": "2026-11-29T12:00:43Z"}')
    assert not notice.takes_machine


def maintenance(**fields: str) -> str:
    event = {
        "NotBefore": "29 Nov 2026 12:00:43 GMT",
        "Code": "system-reboot",
        "Description": "scheduled reboot",
        "EventId": "instance-event-0d59937288b749b32",
        "NotAfter": "29 Nov 2026 14:17:23 GMT",
        "State": "active",
    }
    return json.dumps([event | fields])


@pytest.mark.parametrize(
    "code",
    ["instance-reboot", "instance-retirement", "instance-stop", "system-maintenance",
     "system-reboot"],
)  # fmt: skip
def test_scheduled_maintenance_takes_the_machine_when_its_window_opens(code: str) -> None:
    (notice,) = read_maintenance(maintenance(Code=code), NOON_S - 86_400)
    assert (notice.at_s, notice.takes_machine) == (NOON_S, True)
    assert code in notice.what


@pytest.mark.parametrize(
    ("text", "now_s"),
    [
        ("[]", NOON_S),
        (maintenance(State="completed"), NOON_S),
        (maintenance(State="canceled"), NOON_S),
        (maintenance(Description="[Completed] scheduled reboot"), NOON_S),
        (maintenance(), NOON_S + 3 * 3600),
    ],
)
def test_maintenance_that_is_over_takes_nothing(text: str, now_s: float) -> None:
    assert read_maintenance(text, now_s) == ()


@pytest.mark.parametrize(
    ("read", "text", "takes_machine"),
    [
        (read_preempted, "FALSE", None),
        (read_preempted, "TRUE\n", True),
        (read_maintenance_event, "NONE", None),
        (read_maintenance_event, "TERMINATE_ON_HOST_MAINTENANCE", True),
        (read_maintenance_event, "MIGRATE_ON_HOST_MAINTENANCE", False),
        (read_maintenance_event, "SOMETHING_NEW", False),
    ],
)
def test_values_of_google_cloud(
    read: Callable[[str], tuple[Notice, ...]], text: str, takes_machine: bool | None
) -> None:
    taken = [(notice.at_s, notice.takes_machine) for notice in read(text)]
    assert taken == ([] if takes_machine is None else [(None, takes_machine)])


def scheduled(**fields: object) -> str:
    event = {
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EventStatus": "Scheduled",
        "EventType": "Reboot",
        "ResourceType": "VirtualMachine",
        "Resources": ["gpu_0", "gpu_1"],
        "NotBefore": "Sun, 29 Nov 2026 12:00:43 GMT",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }
    return json.dumps({"DocumentIncarnation": 2, "Events": [event | fields]})


@pytest.mark.parametrize(
    ("fields", "at_s", "takes_machine"),
    [
        ({"EventType": "Preempt"}, NOON_S, True),
        ({"EventType": "Terminate"}, NOON_S, True),
        ({"EventType": "Reboot"}, NOON_S, True),
        ({"EventType": "Redeploy"}, NOON_S, True),
        ({"EventType": "Freeze"}, NOON_S, False),
        ({"EventType": "Reboot", "EventStatus": "Started", "NotBefore": ""}, None, True),
    ],
)
def test_scheduled_event_of_azure(
    fields: dict[str, object], at_s: float | None, takes_machine: bool
) -> None:
    (notice,) = read_scheduled_events(scheduled(**fields), "GPU_0")
    assert (notice.at_s, notice.takes_machine) == (at_s, takes_machine)


def test_scheduled_event_of_another_machine_of_the_scale_set_is_none_of_this_one() -> None:
    assert read_scheduled_events(scheduled(), "gpu_2") == ()


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_spot_action, "<html>"),
        (read_spot_action, '{"action": "terminate", "time": "soon"}'),
        (read_rebalance, "{}"),
        (lambda text: read_maintenance(text, 0.0), '[{"Code": "system-reboot"}]'),
        (read_preempted, "perhaps"),
        (lambda text: read_scheduled_events(text, "gpu_0"), "[]"),
        (lambda text: read_scheduled_events(text, "gpu_0"), scheduled(NotBefore="soon")),
    ],
)
def test_document_of_another_form_is_refused(
    read: Callable[[str], tuple[Notice, ...]], text: str
) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - its text is that of the parser
        read(text)
