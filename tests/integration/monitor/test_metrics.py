"""Claims about the Prometheus series: their names and units, and the rules that use them."""

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from keepstep.monitor.daemon.settings import DaemonComponents, Settings
from keepstep.monitor.diagnosis.metrics import GpuMetrics, NicMetrics, NodeMetrics
from keepstep.monitor.node.node_series import (
    GPU_SERIES,
    NODE_SERIES,
    metrics_from_json,
    metrics_to_json,
)
from keepstep.monitor.verdicts import Syndrome
from tests.integration.monitor.running import SECRET, get, running, until
from tests.integration.monitor.sample import Plan, SampleJobStatus, SampleReader, verdict
from tests.integration.monitor.test_daemon import FixedDiagnosis

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "ops" / "prometheus"
UNITS = ("_seconds", "_bytes", "_ratio", "_hertz", "_celsius", "_watts", "_info")
UNITLESS = (
    "_step", "_up", "_active", "_ranks", "_generation", "_load1", "_missing_children",
)  # fmt: skip
GPU = GpuMetrics(
    0, 60.0, 1.4e9, 400.0, 1 << 30, 80 << 30, 0, 3, (13,), 0.9, memory_celsius=71.0,
    power_limit_watts=700.0, nvlink_sent_nbytes=1 << 40, nvlink_received_nbytes=1 << 40,
)  # fmt: skip
NIC = NicMetrics(name="mlx5_0:1", sent_nbytes=1 << 40, received_nbytes=1 << 40)
FULL = NodeMetrics(
    "node-a", 10.0, 0.5, 2.0, 1.5, 9.0, 2.4e9, 64 << 30, 32 << 30, 0, 0.002, (GPU,), (3,),
    nics=(NIC,),
)  # fmt: skip


class FullProbe:
    def sample(self, workers: Mapping[int, int]) -> NodeMetrics:
        return FULL

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def scraped() -> str:
    async def scrape() -> str:
        reader = SampleReader(Plan(), time.monotonic() - 8)
        parts = DaemonComponents(
            probe=FullProbe(),
            reader=reader,
            diagnosis=FixedDiagnosis(verdict(3)),
            job_status_source=SampleJobStatus(time.time() - 100),
        )
        async with running(
            Settings(job="run7", node="node-a", secret=SECRET, read_every_s=0.05), parts
        ) as url:
            text = ""

            async def is_complete() -> bool:
                nonlocal text
                text = await (await get(url, "/metrics")).text()
                return "keepstep_job_goodput_ratio" in text and "keepstep_verdict_active{" in text

            await until(is_complete)
            return text

    return asyncio.run(scrape())


def test_names_end_in_base_units_and_counters_in_total(scraped: str) -> None:
    families = list(text_string_to_metric_families(scraped))
    assert len(families) > 25
    for family in families:
        assert family.name.startswith("keepstep_")
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name)
        assert family.documentation.endswith((".", "none."))
        assert not family.name.endswith(("_milliseconds", "_ms", "_mhz", "_kilobytes", "_percent"))
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        else:
            assert not family.name.endswith(("_total", "_count", "_sum", "_bucket"))
            assert family.name.endswith(UNITS + UNITLESS), family.name


def test_every_rank_and_verdict_is_exported_once(scraped: str) -> None:
    samples = [
        sample for family in text_string_to_metric_families(scraped) for sample in family.samples
    ]
    keys = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples]
    assert len(keys) == len(set(keys))
    by_name = {sample.name: sample for sample in samples}
    assert sum(sample.name == "keepstep_rank_up" for sample in samples) == 8
    assert by_name["keepstep_verdict_active"].labels["syndrome"] == Syndrome.NON_COMMUNICATION_HANG
    assert by_name["keepstep_verdict_step_cost_seconds"].value == float("inf")
    assert by_name["keepstep_node_cpu_frequency_hertz"].value == 2.4e9
    assert by_name["keepstep_node_cpu_throttled_seconds_total"].value == 1.5
    opened = {s.labels["syndrome"]: s.value for s in samples if s.name == "keepstep_verdicts_total"}
    assert opened[Syndrome.NON_COMMUNICATION_HANG] == 1
    assert opened[Syndrome.LOSS_SPIKE] == 0


def test_measures_survive_encoding_and_every_series_names_a_field() -> None:
    assert metrics_from_json(json.loads(json.dumps(metrics_to_json(FULL)))) == FULL
    assert {series.field for series in NODE_SERIES} <= set(NodeMetrics.__dataclass_fields__)
    assert {series.field for series in GPU_SERIES} <= set(GpuMetrics.__dataclass_fields__)


def test_rules_and_dashboard_use_only_series_that_are_exported(scraped: str) -> None:
    exported = {
        sample.name
        for family in text_string_to_metric_families(scraped)
        for sample in family.samples
    }
    # There is no series of faults or notes while there are none.
    exported |= {"keepstep_monitor_faults_total", "keepstep_verdict_note_active"}
    dashboard = json.loads((ROOT / "ops" / "grafana" / "keepstep.json").read_text())
    queries = {target["expr"] for panel in dashboard["panels"] for target in panel["targets"]}
    queries |= {note["expr"] for note in dashboard["annotations"]["list"]}
    queries.add((PROMETHEUS / "keepstep-rules.yml").read_text())
    names = {name for text in queries for name in re.findall(r"\bkeepstep_[a-z0-9_]+", text)}
    assert len(names) > 15
    assert names <= exported
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(places) == len(set(places))


def test_alerts_cover_every_syndrome(scraped: str) -> None:
    rules = (PROMETHEUS / "keepstep-rules.yml").read_text()
    patterns = re.findall(r'syndrome=~"([^"]+)"', rules)
    for syndrome in Syndrome:
        assert sum(bool(re.fullmatch(pattern, syndrome)) for pattern in patterns) == 1, syndrome


def test_promtool_reports_no_problem(scraped: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip(
            "promtool is not installed (Debian: apt-get install prometheus); "
            "the tests above check the names"
        )
    metrics = subprocess.run(
        [promtool, "check", "metrics"], input=scraped, capture_output=True, text=True
    )
    assert (metrics.returncode, metrics.stdout + metrics.stderr) == (0, "")
    rules = subprocess.run(
        [
            promtool,
            "check",
            "rules",
            "--lint=all",
            "--lint-fatal",
            str(PROMETHEUS / "keepstep-rules.yml"),
        ],
        capture_output=True,
        text=True,
    )
    assert rules.returncode == 0, rules.stdout + rules.stderr
    config = subprocess.run(
        [promtool, "check", "config", "--syntax-only", str(PROMETHEUS / "prometheus.yml")],
        capture_output=True,
        text=True,
    )
    assert config.returncode == 0, config.stdout + config.stderr
