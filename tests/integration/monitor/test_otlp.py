"""Claims about the push to OpenTelemetry collectors, read by opentelemetry-proto's own messages."""

import asyncio
import base64
import time
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from prometheus_client.parser import text_string_to_metric_families

from keepstep.elastic.store.ports import ReservedPort
from keepstep.monitor.daemon.otlp_settings import OtlpSettings, otlp_settings
from keepstep.monitor.daemon.settings import DaemonComponents
from keepstep.monitor.errors import MonitorError
from tests.integration.monitor.collectors import Collector, collecting
from tests.integration.monitor.parts import FixedDiagnosis, Probe, settings
from tests.integration.monitor.running import get, running, until
from tests.integration.monitor.sample import Plan, SampleJobStatus, SampleReader, verdict

logs = pytest.importorskip("opentelemetry.proto.collector.logs.v1.logs_service_pb2")
metrics = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
traces = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")


def asked(url: str, **more: str) -> OtlpSettings:
    given = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_METRIC_EXPORT_INTERVAL": "100", **more}
    settings = otlp_settings(given)
    assert settings is not None
    return settings


def parts(diagnosis: FixedDiagnosis | None = None, **more: Any) -> DaemonComponents:
    return DaemonComponents(
        probe=Probe(),
        reader=SampleReader(Plan(ranks=4, step_s=0.1), time.monotonic() - 5),
        diagnosis=diagnosis or FixedDiagnosis(),
        **more,
    )


def parsed(kind: type[Message], requests: list[dict[str, Any]]) -> list[Any]:
    """Return the requests as protobuf messages; ids are hexadecimal in OTLP, and not base64."""

    def with_ids(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: base64.b64encode(bytes.fromhex(each)).decode()
                if key.endswith(("traceId", "spanId", "SpanId"))
                else with_ids(each)
                for key, each in value.items()
            }
        return [with_ids(each) for each in value] if isinstance(value, list) else value

    return [ParseDict(with_ids(request), kind()) for request in requests]


def records(collector: Collector) -> list[Any]:
    requests = parsed(logs.ExportLogsServiceRequest, collector.requests.get("/v1/logs", []))
    return [
        record
        for request in requests
        for of_resource in request.resource_logs
        for scope in of_resource.scope_logs
        for record in scope.log_records
    ]


def spans(collector: Collector) -> Iterator[Any]:
    requests = parsed(traces.ExportTraceServiceRequest, collector.requests.get("/v1/traces", []))
    for request in requests:
        for of_resource in request.resource_spans:
            for scope in of_resource.scope_spans:
                yield from scope.spans


def test_metrics_are_those_that_prometheus_reads() -> None:
    async def check() -> None:
        more = {
            "OTEL_RESOURCE_ATTRIBUTES": "zone=b",
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=k",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        }
        async with collecting() as collector:
            # Infinite for a hang: JSON has no such number.
            diagnosis = FixedDiagnosis(verdict(2))
            with_otlp = settings(otlp=asked(collector.url, **more))
            async with running(with_otlp, parts(diagnosis)) as url:

                def has_verdict() -> bool:
                    return "keepstep_verdict_active" in str(collector.requests)

                await until(has_verdict)
                text = await (await get(url, "/metrics")).text()
            request = parsed(
                metrics.ExportMetricsServiceRequest, collector.requests["/v1/metrics"][-1:]
            )[0]
            (of_resource,) = request.resource_metrics
            resource = {
                each.key: each.value.string_value for each in of_resource.resource.attributes
            }
            assert resource["service.name"] == "keepstep-monitor"
            assert (resource["keepstep.job"], resource["zone"]) == ("run7", "b")
            pushed = {
                metric.name: metric
                for scope in of_resource.scope_metrics
                for metric in scope.metrics
            }
            scraped = {
                family.name: family
                for family in text_string_to_metric_families(text)
                if family.samples
            }
            assert pushed.keys() == scraped.keys()
            for name, family in scraped.items():
                kind = "sum" if family.type == "counter" else "gauge"
                assert pushed[name].WhichOneof("data") == kind
                points = getattr(pushed[name], kind).data_points
                assert {
                    tuple(sorted((each.key, each.value.string_value) for each in point.attributes))
                    for point in points
                } == {tuple(sorted(sample.labels.items())) for sample in family.samples}
            assert pushed["keepstep_verdict_step_cost_seconds"].gauge.data_points[
                0
            ].as_double == float("inf")
            assert pushed["keepstep_verdicts"].sum.is_monotonic
            assert collector.headers[0]["api-key"] == "k"
            assert collector.headers[0]["Content-Encoding"] == "gzip"

    asyncio.run(check())


def test_verdicts_are_log_records_and_none_is_lost_while_the_collector_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check() -> None:
        port = ReservedPort()
        diagnosis = FixedDiagnosis(verdict(2))
        otlp = asked(f"http://127.0.0.1:{port.number}")
        async with running(settings(otlp=otlp), parts(diagnosis)) as url:

            async def is_shown() -> bool:
                overview = await (await get(url, "/v1/overview")).json()
                return bool(overview["verdicts"]) and "logs are not pushed" in caplog.text

            await until(is_shown)
            port.close()
            async with collecting(port.number) as collector:
                await until(lambda: len(records(collector)) > 0)
                await until(lambda: "again; 0 events and spans were dropped" in caplog.text)
                opened = records(collector)[0]
                assert opened.event_name == "keepstep.verdict.opened"
                assert opened.severity_text == "ERROR"
                assert "rank 2 on node-a: non-communication hang" in opened.body.string_value
                attributes = {each.key: each.value for each in opened.attributes}
                ranks = attributes["keepstep.verdict.subject.ranks"].array_value.values
                assert [rank.int_value for rank in ranks] == [2]
                assert attributes["keepstep.verdict.number"].int_value == 1
                diagnosis.verdicts = ()
                await until(
                    lambda: (
                        "keepstep.verdict.closed"
                        in [record.event_name for record in records(collector)]
                    )
                )
                names = [record.event_name for record in records(collector)]
                assert names.count("keepstep.verdict.opened") == 1

    with caplog.at_level("INFO", "keepstep.monitor"):
        asyncio.run(check())
    assert caplog.text.count("logs are not pushed to the collector at http://127.0.0.1") == 1


def test_recoveries_and_steps_are_spans_with_their_parts() -> None:
    async def check() -> None:
        # Its second recovery ends after the daemon began.
        status = SampleJobStatus(time.time() - 60)
        async with collecting() as collector:
            otlp = asked(collector.url)
            async with running(settings(otlp=otlp), parts(job_status_source=status)):
                await until(
                    lambda: {"recovery", "step"} <= {span.name for span in spans(collector)}
                )
            found = list(spans(collector))
        recoveries = [span for span in found if span.name == "recovery"]
        # The first was before the daemon began.
        assert len(recoveries) == 1
        attributes = {each.key: each.value for each in recoveries[0].attributes}
        assert attributes["keepstep.generation"].int_value == 3
        parts_of = [span for span in found if span.parent_span_id == recoveries[0].span_id]
        assert [span.name for span in parts_of] == [
            "members settle", "process groups form", "state comes back", "first step",
        ]  # fmt: skip
        assert {span.trace_id for span in parts_of} == {recoveries[0].trace_id}
        assert len(recoveries[0].trace_id) == 16
        assert len(recoveries[0].span_id) == 8
        step = next(span for span in found if span.name == "step")
        phases = [span for span in found if span.parent_span_id == step.span_id]
        assert {"forward", "backward", "optimizer"} <= {span.name for span in phases}
        assert abs(step.end_time_unix_nano / 1e9 - time.time()) < 60
        assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in found)
        assert len({span.span_id for span in found}) == len(found)

    asyncio.run(check())


def test_dropped_events_are_counted_and_the_daemon_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check() -> None:
        async with collecting() as collector:
            collector.statuses = [400] * 1000
            diagnosis = FixedDiagnosis(verdict(2))
            otlp = asked(collector.url, OTEL_METRICS_EXPORTER="none", OTEL_TRACES_EXPORTER="none")
            async with running(settings(otlp=otlp), parts(diagnosis)) as url:

                async def has_counted() -> bool:
                    text = await (await get(url, "/metrics")).text()
                    return 'part="OpenTelemetry export"' in text

                await until(has_counted)

    asyncio.run(check())
    assert caplog.text.count("it answers status 400") == 1


def test_relay_pushes_metrics_of_its_node_and_nothing_of_the_job() -> None:
    async def check() -> None:
        async with collecting() as collector:
            relay = DaemonComponents(
                probe=Probe(), reader=SampleReader(Plan(ranks=2), time.monotonic() - 5)
            )
            async with running(settings(otlp=asked(collector.url)), relay):
                await until(lambda: len(collector.requests.get("/v1/metrics", [])) > 1)
            assert collector.requests.keys() == {"/v1/metrics"}
            assert "keepstep_job_ranks" not in str(collector.requests)
            assert "keepstep_rank_step" in str(collector.requests)

    asyncio.run(check())


def test_certificate_that_cannot_be_read_is_refused() -> None:
    async def check() -> None:
        otlp = asked("http://127.0.0.1:9", OTEL_EXPORTER_OTLP_CERTIFICATE="/none/ca.pem")
        with pytest.raises(MonitorError, match="certificate of OTEL_EXPORTER_OTLP_"):
            async with running(settings(otlp=otlp), parts()):
                pass

    asyncio.run(check())
