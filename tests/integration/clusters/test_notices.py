"""Claims about clouds' notices: of what is asked, and of jobs whose node is announced to end."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from keepstep.elastic.cli.main import main
from keepstep.elastic.cloud.metadata import find_cloud, sources
from keepstep.elastic.cloud.notice import Cloud
from keepstep.elastic.cloud.watch import NoticeWatch
from keepstep.elastic.store.embedded import EmbeddedEtcd
from tests.adaptive_timeouts import patient
from tests.integration.clusters.metadata_services import MetadataService, metadata_service
from tests.integration.job.jobs import cluster, last_run_of_each_step, set_module_path, step_of
from tests.integration.job.test_torchrun import CONF, Nodes, running

SPOT = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
MAINTENANCE = "/latest/meta-data/events/maintenance/scheduled"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE_EVENT = "/computeMetadata/v1/instance/maintenance-event"
SCHEDULED_EVENTS = "/metadata/scheduledevents"


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataService]:
    set_module_path(monkeypatch)
    with metadata_service() as served:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", served.url)
        monkeypatch.setenv("GCE_METADATA_HOST", served.host)
        monkeypatch.setenv("KEEPSTEP_AZURE_METADATA_ENDPOINT", served.url)
        yield served


def in_seconds(seconds: float) -> datetime:
    return datetime.fromtimestamp(time.time() + seconds, UTC)


def spot_interruption(seconds: float) -> str:
    return json.dumps({"action": "terminate", "time": f"{in_seconds(seconds):%Y-%m-%dT%H:%M:%SZ}"})


def azure_event(kind: str, seconds: float, *machines: str) -> str:
    return json.dumps(
        {
            "DocumentIncarnation": 2,
            "Events": [
                {
                    "EventId": "E",
                    "EventStatus": "Scheduled",
                    "EventType": kind,
                    "ResourceType": "VirtualMachine",
                    "Resources": machines,
                    "NotBefore": format_datetime(in_seconds(seconds), usegmt=True),
                }
            ],
        }
    )


def maintenance(seconds: float) -> str:
    at = in_seconds(seconds)
    event = {"NotBefore": f"{at:%d %b %Y %H:%M:%S} GMT", "Code": "system-reboot", "EventId": "E"}
    return json.dumps([event])


def on_a_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run a test on an event loop."""

    @functools.wraps(test)
    def run(*arguments: object, **fixtures: object) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


class Watched:
    """A watch that runs, and whether it has ended."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.left = False
        self._caplog = caplog

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(patient(60)):
            while not condition():  # noqa: ASYNC110 - of another thread
                await asyncio.sleep(0.01)

    async def until_line(self, part: str) -> None:
        await self.until(lambda: any(part in line for line in self.lines))


@asynccontextmanager
async def watched(
    cloud: Cloud, caplog: pytest.LogCaptureFixture, lead_s: float = 120.0
) -> AsyncIterator[Watched]:
    caplog.set_level(logging.INFO, "keepstep")
    shown = Watched(caplog)
    asked = sources(cloud, os.environ)
    for source in asked:
        source.pause_s = 0.05

    def leave() -> None:
        shown.left = True

    task = asyncio.create_task(NoticeWatch(cloud, asked, lead_s, leave).run())
    try:
        yield shown
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.mark.parametrize(
    ("cloud", "path", "document"),
    [
        (Cloud.AWS, SPOT, spot_interruption(120)),
        (Cloud.AWS, MAINTENANCE, maintenance(60)),
        (Cloud.GCP, PREEMPTED, "TRUE"),
        (Cloud.GCP, MAINTENANCE_EVENT, "TERMINATE_ON_HOST_MAINTENANCE"),
        (Cloud.AZURE, SCHEDULED_EVENTS, azure_event("Preempt", 30, "node_0")),
    ],
)
@on_a_loop
async def test_node_leaves_when_its_machine_is_about_to_be_taken(
    service: MetadataService,
    caplog: pytest.LogCaptureFixture,
    cloud: Cloud,
    path: str,
    document: str,
) -> None:
    async with watched(cloud, caplog) as watch:
        await watch.until(lambda: path in service.asked)
        assert not watch.left
        await asyncio.to_thread(service.serve, path, document)
        await watch.until(lambda: watch.left)
    assert any(line.endswith("this node leaves now") for line in watch.lines)


@pytest.mark.parametrize(
    ("cloud", "path", "document"),
    [
        (Cloud.AWS, REBALANCE, '{"noticeTime": "2026-11-29T08:22:00Z"}'),
        (Cloud.GCP, MAINTENANCE_EVENT, "MIGRATE_ON_HOST_MAINTENANCE"),
        (Cloud.AZURE, SCHEDULED_EVENTS, azure_event("Freeze", 30, "node_0")),
    ],
)
@on_a_loop
async def test_node_stays_when_its_machine_goes_on(
    service: MetadataService,
    caplog: pytest.LogCaptureFixture,
    cloud: Cloud,
    path: str,
    document: str,
) -> None:
    async with watched(cloud, caplog) as watch:
        await asyncio.to_thread(service.serve, path, document)
        await watch.until_line("this node stays")
        asked = len(service.asked)
        if cloud is not Cloud.GCP:
            await watch.until(lambda: len(service.asked) > asked + 3)
        assert not watch.left
    assert sum("announces" in line for line in watch.lines) == 1


@on_a_loop
async def test_maintenance_days_ahead_keeps_the_node_until_shortly_before_and_may_be_withdrawn(
    service: MetadataService, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(Cloud.AWS, caplog) as watch:
        await asyncio.to_thread(service.serve, MAINTENANCE, maintenance(3 * 86_400))
        await watch.until_line("this node leaves at")
        assert not watch.left
        await asyncio.to_thread(service.serve, MAINTENANCE, "[]")
        await watch.until_line("no longer announces")
        assert not watch.left
        await asyncio.to_thread(service.serve, MAINTENANCE, maintenance(122))
        await watch.until(lambda: watch.left)


@on_a_loop
async def test_document_that_nobody_knows_is_named_and_hides_no_other(
    service: MetadataService, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(Cloud.AWS, caplog) as watch:
        await asyncio.to_thread(service.serve, MAINTENANCE, '[{"Code": 1}]')
        await watch.until_line("something in events/maintenance/scheduled that keepstep does not")
        assert not watch.left
        await asyncio.to_thread(service.serve, SPOT, spot_interruption(60))
        await watch.until(lambda: watch.left)


@on_a_loop
async def test_notice_that_was_read_stands_while_the_service_is_away(
    service: MetadataService, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(Cloud.AZURE, caplog, lead_s=2.0) as watch:
        event = azure_event("Reboot", 5, "node_0", "node_1")
        await asyncio.to_thread(service.serve, SCHEDULED_EVENTS, event)
        await watch.until_line("this node leaves at")
        service.refuses = True
        await watch.until(lambda: watch.left)


@on_a_loop
async def test_service_that_is_absent_refuses_or_is_silent_is_named_once_and_asked_again(
    service: MetadataService,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keepstep.elastic.cloud.watch._RETRY_S", 0.05)
    monkeypatch.setattr("keepstep.elastic.cloud.metadata._ANSWER_S", 0.3)
    service.refuses = True
    async with watched(Cloud.AWS, caplog) as watch:
        await watch.until(lambda: len(service.asked) > 3)
        service.refuses, service.is_silent = False, True
        asked = len(service.asked)
        await watch.until(lambda: len(service.asked) > asked + 1)
        service.is_silent = False
        await watch.until_line("notices are read from")
        named = [line for line in watch.lines if "no notices from" in line]
        assert len(named) == 1
        assert service.url in named[0]
        assert "503" in named[0]
        await asyncio.to_thread(service.expire_tokens)
        await asyncio.to_thread(service.serve, SPOT, spot_interruption(60))
        await watch.until(lambda: watch.left)


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2\n"}, Cloud.AWS),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, Cloud.GCP),
        (
            {
                "sys_vendor": "Microsoft Corporation",
                "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77",
            },
            Cloud.AZURE,
        ),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "123"}, None),
        ({}, None),
    ],
)
def test_cloud_is_found_by_what_the_firmware_names(
    tmp_path: Path, files: dict[str, str], cloud: Cloud | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert find_cloud(tmp_path) is cloud


def test_command_says_what_a_cloud_announces_or_that_it_does_not_answer(
    service: MetadataService,
) -> None:
    def ask(cloud: str) -> tuple[int, list[str]]:
        done = CliRunner().invoke(main, ["notices", cloud])
        return done.exit_code, done.output.splitlines()

    assert ask("aws") == (0, [f"AWS answers at {service.url}/latest, with 0 notices"])
    service.serve(PREEMPTED, "TRUE")
    assert ask("gcp") == (
        0,
        [
            f"GCP answers at {service.url}{PREEMPTED}, with 1 notices",
            "GCP announces a preemption: this node leaves now",
            f"GCP answers at {service.url}{MAINTENANCE_EVENT}, with 0 notices",
        ],
    )
    service.refuses = True
    status, (line,) = ask("azure")
    assert status == 1
    assert line.startswith(f"AZURE no answer from {service.url}/metadata: 503")


JOBS = {
    Cloud.AWS: (SPOT, lambda: spot_interruption(60)),
    Cloud.GCP: (PREEMPTED, lambda: "TRUE"),
    Cloud.AZURE: (SCHEDULED_EVENTS, lambda: azure_event("Preempt", 30, "node_0")),
}


@pytest.mark.parametrize(
    "cloud",
    [
        Cloud.AWS,
        pytest.param(Cloud.GCP, marks=pytest.mark.clusters),
        pytest.param(Cloud.AZURE, marks=pytest.mark.clusters),
    ],
)
def test_announced_node_hands_over_and_the_other_goes_on_without_a_lost_step(
    tmp_path: Path, service: MetadataService, cloud: Cloud
) -> None:
    path, document = JOBS[cloud]
    with cluster(tmp_path, held=True, workers=1) as nodes:
        nodes.start("a", "--notices", cloud)
        nodes.start("b")
        nodes.wait_until(lambda view: step_of(view) >= 6, 60)
        service.serve(path, document())
        assert nodes.wait("a", 60) == 128 + signal.SIGTERM, nodes.output()
        view = nodes.wait_until(
            lambda view: len(view.history.recoveries) == 2 and view.leader == "b", 60
        )
        (tmp_path / "log" / "release").touch()
        assert nodes.wait("b", 60) == 0, nodes.output()
        assert "this node leaves now" in nodes.output()
    recovery = view.history.recoveries[1]
    assert "memory" in recovery.source
    assert (recovery.world_size, recovery.lost_steps) == (1, 0)
    assert last_run_of_each_step(tmp_path).keys() == set(range(1, 31))


def test_node_that_is_started_on_an_announced_machine_leaves_before_it_takes_part(
    tmp_path: Path, service: MetadataService
) -> None:
    """So a service manager that starts it again and again disturbs no job."""
    service.serve(SPOT, spot_interruption(60))
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(600)\n")
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "keepstep", "run", "--notices", "aws", "--keep-state", "0",
         "--nnodes", "2", "--store", "etcd://127.0.0.1:9", script],
        capture_output=True, text=True, timeout=patient(60), check=False,
    )  # fmt: skip
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert "before this node took part" in ended.stderr


@pytest.mark.clusters
def test_announced_node_of_torchrun_leaves_and_the_other_goes_on(
    tmp_path: Path, etcd_server: EmbeddedEtcd, service: MetadataService
) -> None:
    with running(Nodes(tmp_path, etcd_server)) as nodes:
        nodes.start("a")
        nodes.start("b", conf=f"{CONF},notices=azure")
        nodes.steps(2, "a", "b")
        service.serve(SCHEDULED_EVENTS, azure_event("Preempt", 30, "node_0"))
        assert nodes.agents.pop("b").wait(patient(60)) != 0
        nodes.steps(1, "a")
        nodes.finish("a")
