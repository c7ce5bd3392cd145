"""Claims about OpenTelemetry's variables: which are honoured, and which are refused by name."""

import pytest

from keepstep.monitor.daemon.otlp_settings import Signal, otlp_settings
from keepstep.monitor.errors import MonitorError

BASE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://user:key@collector:4318/otlp/"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": " "},
        {"OTEL_SERVICE_NAME": "training"},
        BASE | {"OTEL_SDK_DISABLED": "True"},
        BASE | {f"OTEL_{signal.name}_EXPORTER": "none" for signal in Signal},
    ],
)
def test_nothing_is_pushed_where_nothing_asks_for_it(environment: dict[str, str]) -> None:
    assert otlp_settings(environment) is None


def test_one_endpoint_serves_all_signals() -> None:
    settings = otlp_settings(
        BASE
        | {
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b, tenant=run",
            "OTEL_RESOURCE_ATTRIBUTES": "service.name=no,deployment.environment=prod",
            "OTEL_SERVICE_NAME": "training",
            "OTEL_METRIC_EXPORT_INTERVAL": "15000",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca.pem",
        }
    )
    assert settings is not None
    for signal, endpoint in settings.endpoints.items():
        assert endpoint.url == f"https://user:key@collector:4318/otlp/v1/{signal}"
        assert endpoint.headers == {"api-key": "a b", "tenant": "run"}
        assert (endpoint.timeout_s, endpoint.compresses) == (2.5, True)
        assert endpoint.place == "https://collector:4318"
    assert settings.endpoints.keys() == set(Signal)
    assert settings.resource == {"service.name": "training", "deployment.environment": "prod"}
    assert (settings.metrics_every_s, settings.certificate) == (15.0, "/ca.pem")


def test_variables_of_a_signal_take_the_place_of_those_of_all() -> None:
    settings = otlp_settings(
        {
            "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://logs:4318/in",
            "OTEL_EXPORTER_OTLP_LOGS_HEADERS": "a=1",
            "OTEL_EXPORTER_OTLP_HEADERS": "a=2",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "http/json",
        }
    )
    assert settings is not None
    assert settings.endpoints.keys() == {Signal.LOGS}
    assert settings.endpoints[Signal.LOGS].url == "http://logs:4318/in"
    assert settings.endpoints[Signal.LOGS].headers == {"a": "1"}
    assert settings.endpoints[Signal.LOGS].timeout_s == 10.0


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_METRICS_EXPORTER", "prometheus"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "1s"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "-1"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"),
        ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "https://[::1"),
        ("OTEL_RESOURCE_ATTRIBUTES", "prod"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(MonitorError, match=variable):
        otlp_settings(BASE | {variable: value})


def test_secrets_are_not_in_messages() -> None:
    for variable in ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        with pytest.raises(MonitorError, match=variable) as caught:
            otlp_settings(BASE | {variable: "s3cret"})
        assert "s3cret" not in str(caught.value)
