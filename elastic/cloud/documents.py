"""Reads the documents in which the clouds announce what happens to a machine. Pure.

Their fields are those of the public documentation of AWS (instance metadata categories, spot
interruptions, scheduled events), Google Cloud (preemption, maintenance events) and Azure (scheduled
events), as of 2026.
"""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

import msgspec

from keepstep.elastic.cloud.notice import Notice

T = TypeVar("T")

_OVER = ("completed", "canceled", "cancelled")
_TAKES_MACHINE = ("Preempt", "Terminate", "Reboot", "Redeploy")


class _Fields(msgspec.Struct, rename="pascal"):
    """An object whose keys begin with a capital letter; unknown ones are ignored."""


class _SpotAction(msgspec.Struct):
    action: str
    time: str = ""


class _Rebalance(msgspec.Struct, rename="camel"):
    notice_time: str


class _Maintenance(_Fields):
    code: str
    not_before: str
    not_after: str = ""
    event_id: str = ""
    state: str = ""
    description: str = ""


class _ScheduledEvent(_Fields):
    event_id: str
    event_type: str
    event_status: str = ""
    not_before: str = ""
    resources: list[str] = []


class _ScheduledEvents(_Fields):
    events: list[_ScheduledEvent]


def read_spot_action(text: str) -> tuple[Notice, ...]:
    """Return the interruption of AWS's `spot/instance-action`.

    Raises:
        ValueError: the document has another form; so do the other functions here.
    """
    spot = _decode(text, _SpotAction)
    # Hibernation begins with the notice.
    at_s = None if spot.action == "hibernate" or not spot.time else _seconds(spot.time)
    return (Notice(identity="spot", what=f"a spot interruption ({spot.action})", at_s=at_s),)


def read_rebalance(text: str) -> tuple[Notice, ...]:
    """Return the recommendation of AWS's `events/recommendations/rebalance`: it takes nothing."""
    _seconds(_decode(text, _Rebalance).notice_time)
    what = "a rebalance recommendation (an interruption is likelier than usual)"
    return (Notice(identity="rebalance", what=what, takes_machine=False),)


def read_maintenance(text: str, now_s: float) -> tuple[Notice, ...]:
    """Return the events of AWS's `events/maintenance/scheduled` that are not over.

    Args:
        text: the document.
        now_s: the time, in seconds since 1970.
    """
    notices = []
    for event in _decode(text, list[_Maintenance]):
        is_over = event.state in _OVER or event.description.startswith(
            ("[Completed]", "[Canceled]")
        )
        if is_over or (event.not_after and _seconds(event.not_after) < now_s):
            continue
        at_s = _seconds(event.not_before)
        identity = event.event_id or f"{event.code} {event.not_before}"
        notices.append(Notice(identity=identity, what=f"maintenance ({event.code})", at_s=at_s))
    return tuple(notices)


def read_preempted(text: str) -> tuple[Notice, ...]:
    """Return the preemption that Google Cloud's `instance/preempted` shows."""
    match text.strip().upper():
        case "TRUE":
            return (Notice(identity="preempted", what="a preemption"),)
        case "FALSE":
            return ()
    raise ValueError(f"TRUE or FALSE was expected, not {text.strip()[:80]!r}")


def read_maintenance_event(text: str) -> tuple[Notice, ...]:
    """Return the event of Google Cloud's `instance/maintenance-event`; no time is in it."""
    value = text.strip()
    match value:
        case "NONE":
            return ()
        case "TERMINATE_ON_HOST_MAINTENANCE":
            return (Notice(identity=value, what="maintenance that ends this machine"),)
        case "MIGRATE_ON_HOST_MAINTENANCE":
            what = "a live migration"
        case _:
            what = f"a maintenance event that keepstep does not know ({value[:80]!r})"
    return (Notice(identity=value, what=what, takes_machine=False),)


def read_scheduled_events(text: str, machine: str) -> tuple[Notice, ...]:
    """Return Azure's scheduled events of one machine: the document has its neighbours' too.

    Args:
        text: the document.
        machine: the machine's name in Azure.
    """
    notices = []
    for event in _decode(text, _ScheduledEvents).events:
        if machine.lower() not in (name.lower() for name in event.resources):
            continue
        has_begun = event.event_status == "Started" or not event.not_before
        notices.append(
            Notice(
                identity=event.event_id,
                what=f"the event {event.event_type}",
                at_s=None if has_begun else _seconds(event.not_before),
                takes_machine=event.event_type in _TAKES_MACHINE,
            )
        )
    return tuple(notices)


def _decode(text: str, form: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=form)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{error}, in {text[:80]!r}") from None


def _seconds(text: str) -> float:
    """Return the seconds since 1970 of a time in ISO 8601 or as in HTTP's headers."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = parsedate_to_datetime(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
