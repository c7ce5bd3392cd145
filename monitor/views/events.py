"""Describes events as OpenTelemetry log records, and writes them to a file, a JSON object a line.

The fields are those of OpenTelemetry's log data model (timestamp, severity, event name, body,
attributes, resource), so any collector's file receiver accepts the file. A file that has grown to
its limit is renamed to `NAME.1`, replacing the previous one. If another program renames the file,
as logrotate does, the next event begins a new one.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from keepstep.monitor.diagnosis.policy import EnforcementAction
from keepstep.monitor.errors import MonitorError
from keepstep.monitor.verdicts import Syndrome
from keepstep.monitor.watch.verdict_log import HANGS, VerdictEntry
from keepstep.monitor.watch.verdict_notes import VerdictNote

Event = dict[str, Any]
"""A line of the event file."""

OPENED, CLOSED = "keepstep.verdict.opened", "keepstep.verdict.closed"
_LIMIT_NBYTES = 64 * 2**20
SERVICE = {"service.name": "keepstep-monitor"}
"""The resource of events that belong to no running monitor."""
_INFO, _WARN, _ERROR = (9, "INFO"), (13, "WARN"), (17, "ERROR")
_GRAVE = HANGS | {
    Syndrome.DEAD_PROCESS,
    Syndrome.DEVICE_ERROR,
    Syndrome.SILENT_CORRUPTION,
    Syndrome.LOSS_NOT_FINITE,
}


class EventSink(Protocol):
    """Receives events, each in the form of a line of the event file."""

    def write(self, event: Mapping[str, Any]) -> None:
        """Take one event.

        Raises:
            OSError: it cannot be written; the next event is tried again.
        """


class EventFile:
    """The file, open for appending until `close`.

    Raises:
        MonitorError: it cannot be opened.
    """

    def __init__(self, path: Path, limit_nbytes: int = _LIMIT_NBYTES) -> None:
        self._path = path
        self._limit_nbytes = limit_nbytes
        # Whether the last write failed in the middle of a line.
        self._is_torn = False
        try:
            self._descriptor = _open(path)
        except OSError as error:
            raise MonitorError(
                f"events cannot be appended to {path} ({error.strerror}); name another file"
            ) from error

    def write(self, event: Mapping[str, Any]) -> None:
        """Append one event and write it to the operating system at once: the node may die next.

        Raises:
            OSError: it cannot be written; the next event is tried again.
        """
        if os.fstat(self._descriptor).st_size >= self._limit_nbytes and self._is_in_place():
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        if not self._is_in_place():
            new_descriptor = _open(self._path)
            os.close(self._descriptor)
            self._descriptor, self._is_torn = new_descriptor, False
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        rest = b"\n" + line if self._is_torn else line
        while rest:
            written = os.write(self._descriptor, rest)
            rest = rest[written:]
            self._is_torn = bool(rest)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _is_in_place(self) -> bool:
        """Return whether the file at the path is the one that is open."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def resource_of(job: str, node: str) -> dict[str, str]:
    """Return what events come from, by OpenTelemetry's names."""
    return SERVICE | {
        "service.instance.id": node,
        "host.name": socket.gethostname(),
        "keepstep.job": job,
    }


def opened_event(entry: VerdictEntry, resource: Mapping[str, str]) -> Event:
    """Return the event that a verdict began to hold."""
    verdict = entry.verdict
    body = f"{verdict.subject}: {verdict.syndrome}. {'; '.join(verdict.evidence)}".strip()
    severity = _ERROR if verdict.syndrome in _GRAVE else _WARN
    return _event(OPENED, severity, body, _attributes(entry), entry.opened_at_s, resource)


def closed_event(entry: VerdictEntry, resource: Mapping[str, str]) -> Event:
    """Return the event that a verdict has ended."""
    verdict = entry.verdict
    ended_s = entry.reported_at_s if entry.closed_at_s is None else entry.closed_at_s
    body = f"{verdict.subject}: {verdict.syndrome} ended after {ended_s - entry.since_s:.1f} s"
    return _event(CLOSED, _INFO, body, _attributes(entry), ended_s, resource)


def stacks_event(
    entry: VerdictEntry,
    rank: int,
    stacks: Mapping[str, Any],
    wall_s: float,
    resource: Mapping[str, str],
) -> Event:
    """Return the event that the stacks of a suspect's threads were taken."""
    attributes = {
        "keepstep.verdict.number": entry.number,
        "keepstep.rank": rank,
        "keepstep.stacks": json.dumps(stacks),
    }
    body = f"stacks of rank {rank}"
    return _event("keepstep.verdict.stacks", _INFO, body, attributes, wall_s, resource)


def action_event(
    action: EnforcementAction, outcome: str, wall_s: float, resource: Mapping[str, str]
) -> Event:
    """Return what the policy did about a verdict: an alert, a restart or a replacement."""
    attributes = {
        "keepstep.action": str(action.kind),
        "keepstep.action.reason": action.reason,
        "keepstep.action.outcome": outcome,
        "keepstep.action.nodes": list(action.nodes),
        "keepstep.action.ranks": list(action.ranks),
        "keepstep.verdict.syndrome": str(action.verdict.syndrome),
        "keepstep.verdict.evidence": list(action.verdict.evidence),
    }
    body = f"{action}; {outcome}"
    return _event("keepstep.policy.acted", _WARN, body, attributes, wall_s, resource)


def note_event(
    number: int, note: VerdictNote | None, wall_s: float, resource: Mapping[str, str]
) -> Event:
    """Return the event that a person has muted or acknowledged a verdict, or ended that."""
    attributes: dict[str, Any] = {"keepstep.verdict.number": number}
    if note is not None:
        attributes |= {"keepstep.note.kind": str(note.kind), "keepstep.note.by": note.by}
    body = f"verdict {number}: {'its note is removed' if note is None else note.text}"
    return _event("keepstep.verdict.noted", _INFO, body, attributes, wall_s, resource)


def _event(
    name: str,
    severity: tuple[int, str],
    body: str,
    attributes: Mapping[str, Any],
    wall_s: float,
    resource: Mapping[str, str],
) -> Event:
    return {
        "timestamp": datetime.fromtimestamp(wall_s, UTC)
        .isoformat(timespec="microseconds")
        .replace("+00:00", "Z"),
        "time_unix_nano": str(int(wall_s * 1e9)),
        "severity_number": severity[0],
        "severity_text": severity[1],
        "event_name": name,
        "body": body,
        "attributes": dict(attributes),
        "resource": dict(resource),
    }


def _attributes(entry: VerdictEntry) -> dict[str, Any]:
    verdict = entry.verdict
    attributes = {
        "keepstep.verdict.number": entry.number,
        "keepstep.verdict.syndrome": str(verdict.syndrome),
        "keepstep.verdict.subject.kind": verdict.subject.kind,
        "keepstep.verdict.subject.ranks": list(verdict.subject.ranks),
        "keepstep.verdict.since_unix_nano": str(int(entry.since_s * 1e9)),
        "keepstep.verdict.confidence": verdict.confidence,
        "keepstep.verdict.advice": str(verdict.advice),
        "keepstep.verdict.to_do": verdict.instruction,
        "keepstep.verdict.evidence": list(verdict.evidence),
    }
    if verdict.subject.node:
        attributes["keepstep.verdict.subject.node"] = verdict.subject.node
    if verdict.cost_s_per_step != float("inf"):
        attributes["keepstep.verdict.cost_s_per_step"] = verdict.cost_s_per_step
    return attributes
