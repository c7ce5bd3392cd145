"""Encodes telemetry as OTLP/JSON: events as logs, series as metrics, recoveries and steps as spans.

Pure. The form is that of opentelemetry-proto's messages in JSON, where numbers of 64 bits are texts
and ids are hexadecimal. A span's ids are derived from what it is about, so a restarted monitor
gives it the same ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
from prometheus_client.metrics_core import Metric

from keepstep.monitor.contracts import RecoveryStatus
from keepstep.monitor.records import Kind, Phase, RankRecords
from keepstep.monitor.watch.step_times import display_name

Message = dict[str, Any]

_CUMULATIVE = 2
_INTERNAL = 1
_PARTS = (
    ("members settle", "detected_at_s", "opened_at_s"),
    ("process groups form", "opened_at_s", "ready_at_s"),
    ("state comes back", "ready_at_s", "restored_at_s"),
    ("first step", "restored_at_s", "stepped_at_s"),
)


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which something happened.

    Args:
        key: what it is about; equal keys give equal ids.
        parent: the key of the span that it is a part of; the first of all for a whole trace.
        name: of the span.
        begin_s, end_s: Unix time.
        attributes: further facts.
    """

    key: tuple[object, ...]
    parent: tuple[object, ...]
    name: str
    begin_s: float
    end_s: float
    attributes: Mapping[str, Any] = field(default_factory=dict)


def logs_request(resource: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> Message:
    """Return the request for events, which have the form of the event file's lines."""
    records = [
        {
            "timeUnixNano": event["time_unix_nano"],
            "observedTimeUnixNano": event["time_unix_nano"],
            "severityNumber": event["severity_number"],
            "severityText": event["severity_text"],
            "eventName": event["event_name"],
            "body": _value(event["body"]),
            "attributes": _attributes(event["attributes"]),
        }
        for event in events
    ]
    return _request(resource, "resourceLogs", "scopeLogs", "logRecords", records)


def metrics_request(
    resource: Mapping[str, Any], families: Iterable[Metric], began_s: float, now_s: float
) -> Message:
    """Return the request for series.

    Args:
        resource: attributes.
        families: the series as Prometheus has them.
        began_s: Unix time since which counters count.
        now_s: Unix time.
    """
    metrics = []
    for family in families:
        points = [
            {
                "attributes": _attributes(sample.labels),
                "timeUnixNano": _nanoseconds(now_s),
                "asDouble": _double(sample.value),
            }
            for sample in family.samples
        ]
        if not points:
            continue
        content: Message = {"gauge": {"dataPoints": points}}
        if family.type == "counter":
            for point in points:
                point["startTimeUnixNano"] = _nanoseconds(began_s)
            content = {
                "sum": {
                    "dataPoints": points,
                    "aggregationTemporality": _CUMULATIVE,
                    "isMonotonic": True,
                }
            }
        # As Prometheus calls them after it has read OTLP: that adds _total to counters.
        name = f"{family.name}_info" if family.type == "info" else family.name
        metrics.append({"name": name, "description": family.documentation, **content})
    return _request(resource, "resourceMetrics", "scopeMetrics", "metrics", metrics)


def spans_request(resource: Mapping[str, Any], spans: Iterable[Span]) -> Message:
    """Return the request for spans."""
    encoded = [
        {
            "traceId": _identity(span.key[:2], 16),
            "spanId": _identity(span.key, 8),
            "parentSpanId": _identity(span.parent, 8) if span.parent else "",
            "name": span.name,
            "kind": _INTERNAL,
            "startTimeUnixNano": _nanoseconds(span.begin_s),
            "endTimeUnixNano": _nanoseconds(max(span.begin_s, span.end_s)),
            "attributes": _attributes(span.attributes),
        }
        for span in spans
    ]
    return _request(resource, "resourceSpans", "scopeSpans", "spans", encoded)


def recovery_spans(job: str, began_at_s: float, recovery: RecoveryStatus) -> list[Span]:
    """Return a recovery that is complete, and its parts.

    Args:
        job: its name.
        began_at_s: when it began; jobs of one name differ by it.
        recovery: a change of generation whose first step is done.
    """
    key = (f"{job} {began_at_s:.3f}", f"recovery {recovery.generation}")
    attributes = {
        "keepstep.generation": recovery.generation,
        "keepstep.recovery.reason": recovery.reason,
        "keepstep.recovery.source": recovery.source,
        "keepstep.recovery.lost_steps": recovery.lost_steps,
        "keepstep.recovery.resumed_step": recovery.resumed_step,
        "keepstep.world_size": recovery.world_size,
    }
    whole = Span(key, (), "recovery", recovery.detected_at_s, recovery.stepped_at_s, attributes)
    parts = [
        Span((*key, name), key, name, getattr(recovery, begin), getattr(recovery, end))
        for name, begin, end in _PARTS
    ]
    return [whole, *(part for part in parts if part.end_s >= part.begin_s > 0)]


def step_spans(
    job: str, generation: int, step: int, slowest: RankRecords, ranks: int, to_unix_s: float
) -> list[Span]:
    """Return one step of the rank that took longest for it, and its phases; nothing if not known.

    Args:
        job: its name.
        generation: of the job.
        step: its number.
        slowest: that rank's records of the step.
        ranks: how many ranks the job has.
        to_unix_s: Unix time minus the job's clock.
    """
    records = slowest.records
    phases = records[(records["kind"] == Kind.PHASE) & (records["ended_s"] > 0)]
    (steps,) = np.nonzero(phases["code"] == Phase.STEP)
    if not len(steps):
        return []
    whole, shift_s = steps[-1], slowest.offset_s + to_unix_s
    began_s = float(phases["enqueued_s"][whole]) + shift_s
    key = (f"{job} {generation} {began_s:.3f}", f"step {step}")
    attributes = {
        "keepstep.step": step,
        "keepstep.rank": slowest.rank,
        "keepstep.node": slowest.node,
        "keepstep.ranks": ranks,
        "keepstep.generation": generation,
    }
    return [
        Span(
            key if at == whole else (*key, at),
            () if at == whole else key,
            "step" if at == whole else display_name(Phase, int(phase["code"])),
            float(phase["enqueued_s"]) + shift_s,
            float(phase["ended_s"]) + shift_s,
            attributes if at == whole else {},
        )
        for at, phase in enumerate(phases)
        if at == whole or phase["code"] != Phase.STEP
    ]


def _request(
    resource: Mapping[str, Any], outer: str, inner: str, name: str, content: Sequence[Message]
) -> Message:
    scope = {"name": "keepstep.monitor", "version": version("keepstep")}
    return {
        outer: [
            {
                "resource": {"attributes": _attributes(resource)},
                inner: [{"scope": scope, name: content}],
            }
        ]
    }


def _attributes(values: Mapping[str, Any]) -> list[Message]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> Message:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": _double(value)}
        case list() | tuple():
            return {"arrayValue": {"values": [_value(each) for each in value]}}
        case _:
            return {"stringValue": str(value)}


def _double(value: float) -> float | str:
    """Return a number as JSON has it; it has no infinite ones."""
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _nanoseconds(unix_s: float) -> str:
    return str(int(unix_s * 1e9))


def _identity(key: tuple[object, ...], nbytes: int) -> str:
    text = "\0".join(map(str, key)).encode()
    return hashlib.blake2b(text, digest_size=nbytes).hexdigest()
