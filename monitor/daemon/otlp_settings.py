"""Reads OpenTelemetry's environment variables: where to push what, and how. Pure.

The variables and their defaults are those of OpenTelemetry's specification. A value that is valid
there and not supported here is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from keepstep.monitor.errors import MonitorError

_Value = TypeVar("_Value")
_EXPORTER = "OTEL_EXPORTER_OTLP"


class Signal(StrEnum):
    """A kind of telemetry; the value is the last part of its path."""

    METRICS = "metrics"
    LOGS = "logs"
    TRACES = "traces"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one signal goes.

    Args:
        url: of the requests.
        headers: of each request.
        timeout_s: of each request.
        compresses: whether requests are compressed, by gzip.
    """

    url: str
    headers: Mapping[str, str]
    timeout_s: float
    compresses: bool

    @property
    def place(self) -> str:
        """The endpoint for logs: without what may be a secret."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpSettings:
    """The telemetry that is pushed to OpenTelemetry collectors.

    Args:
        endpoints: by signal; a signal without one is not pushed.
        resource: attributes of all telemetry.
        metrics_every_s: seconds between pushes of metrics.
        certificate: file with the certificates to trust; "" for those of the machine.
        client_certificate, client_key: files, for collectors that ask for them; "" for none.
    """

    endpoints: Mapping[Signal, Endpoint]
    resource: Mapping[str, str]
    metrics_every_s: float
    certificate: str = ""
    client_certificate: str = ""
    client_key: str = ""


def otlp_settings(environment: Mapping[str, str]) -> OtlpSettings | None:
    """Return what the environment asks for; None if nothing is to be pushed.

    Raises:
        MonitorError: a variable has a value that is invalid, or not supported.
    """
    # As the specification has it, an empty variable is one that is not set.
    given = {name: value.strip() for name, value in environment.items() if value.strip()}
    if given.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    endpoints = {
        signal: endpoint for signal in Signal if (endpoint := _endpoint(given, signal)) is not None
    }
    if not endpoints:
        return None
    resource = _pairs(given, "OTEL_RESOURCE_ATTRIBUTES")
    if name := given.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = name
    return OtlpSettings(
        endpoints=endpoints,
        resource=resource,
        metrics_every_s=_milliseconds(given, "OTEL_METRIC_EXPORT_INTERVAL", 60_000),
        certificate=given.get(f"{_EXPORTER}_CERTIFICATE", ""),
        client_certificate=given.get(f"{_EXPORTER}_CLIENT_CERTIFICATE", ""),
        client_key=given.get(f"{_EXPORTER}_CLIENT_KEY", ""),
    )


def _endpoint(given: Mapping[str, str], signal: Signal) -> Endpoint | None:
    own = f"{_EXPORTER}_{signal.name}"
    exporter = f"OTEL_{signal.name}_EXPORTER"
    _choice(given, exporter, "otlp", {"otlp": True, "none": False})
    if given.get(exporter) == "none":
        return None
    if f"{own}_ENDPOINT" in given:
        variable, url = f"{own}_ENDPOINT", given[f"{own}_ENDPOINT"]
    elif f"{_EXPORTER}_ENDPOINT" in given:
        variable = f"{_EXPORTER}_ENDPOINT"
        url = f"{given[variable].rstrip('/')}/v1/{signal}"
    else:
        return None
    if not _is_http(url):
        raise MonitorError(f"{variable} is no URL of HTTP; write http://HOST:4318")
    _choice(given, _set(given, own, "PROTOCOL"), "http/json", {"http/json": True})
    compression = _set(given, own, "COMPRESSION")
    return Endpoint(
        url=url,
        headers=_pairs(given, _set(given, own, "HEADERS")),
        timeout_s=_milliseconds(given, _set(given, own, "TIMEOUT"), 10_000),
        compresses=_choice(given, compression, "none", {"none": False, "gzip": True}),
    )


def _set(given: Mapping[str, str], own: str, name: str) -> str:
    """Return the variable that counts: that of the signal if it is set, or else that of all."""
    return f"{own}_{name}" if f"{own}_{name}" in given else f"{_EXPORTER}_{name}"


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _choice(
    given: Mapping[str, str], variable: str, default: str, choices: Mapping[str, _Value]
) -> _Value:
    value = given.get(variable, default)
    if value not in choices:
        raise MonitorError(
            f"{variable}={value} is not supported; keepstep pushes with {' or '.join(choices)}, or "
            "nothing with OTEL_SDK_DISABLED=true"
        )
    return choices[value]


def _pairs(given: Mapping[str, str], variable: str) -> dict[str, str]:
    """Return the pairs of a variable like `key=value,key=value`, whose values may be encoded."""
    pairs = {}
    for item in given.get(variable, "").split(","):
        key, separator, value = item.partition("=")
        if separator and key.strip():
            pairs[key.strip()] = unquote(value.strip())
        elif item.strip():
            raise MonitorError(f"{variable} must be KEY=VALUE,KEY=VALUE; one item has no =")
    return pairs


def _milliseconds(given: Mapping[str, str], variable: str, default: int) -> float:
    value = given.get(variable, str(default))
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise MonitorError(f"{variable}={value} must be a number of milliseconds, from 1")
    return int(value) / 1000
