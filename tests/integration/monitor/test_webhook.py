"""Claims about verdicts that are posted to a webhook: each once, and no secret is shown."""

import asyncio
import time
from pathlib import Path

import pytest

from keepstep.monitor.daemon.settings import DaemonComponents
from keepstep.monitor.daemon.webhook import Webhook
from keepstep.monitor.tree.monitor_client import MonitorClient
from keepstep.monitor.views.events import opened_event, resource_of
from keepstep.monitor.views.webhook import WebhookAddress
from keepstep.monitor.watch.component_faults import ComponentFaults
from keepstep.monitor.watch.verdict_log import VerdictEntry
from keepstep.monitor.watch.verdict_notes import NoteKind, NoteRequest
from tests.integration.monitor.collectors import collecting
from tests.integration.monitor.parts import FixedDiagnosis, Probe, settings
from tests.integration.monitor.running import SECRET, get, running, until
from tests.integration.monitor.sample import Plan, SampleReader, verdict

SECRET_PATH = "/services/T0/s3cret"
ENTRY = VerdictEntry(1, verdict(2), 1.0, 2.0, 3.0)


def parts(diagnosis: FixedDiagnosis) -> DaemonComponents:
    reader = SampleReader(Plan(ranks=4), time.monotonic() - 5)
    return DaemonComponents(probe=Probe(), reader=reader, diagnosis=diagnosis)


def test_each_verdict_is_posted_when_it_opens_and_when_it_closes(tmp_path: Path) -> None:
    async def check() -> None:
        async with collecting() as collector:
            address = WebhookAddress.parse(collector.url + SECRET_PATH)
            state = tmp_path / "state.json"
            with_webhook = settings(webhook=address, state=state)
            async with running(with_webhook, parts(FixedDiagnosis(verdict(2), verdict(3)))):
                await until(lambda: len(collector.requests.get(SECRET_PATH, [])) == 2)
                await until(lambda: state.exists() and state.read_text().count("syndrome") >= 2)
            diagnosis = FixedDiagnosis(verdict(2))
            # The daemon that starts again knows what was posted.
            async with running(with_webhook, parts(diagnosis)):
                await until(lambda: len(collector.requests[SECRET_PATH]) == 3)
                diagnosis.verdicts = ()
                await until(lambda: len(collector.requests[SECRET_PATH]) == 4)
            posted = collector.requests[SECRET_PATH]
            about = [
                (event["event_name"].rpartition(".")[2], number)
                for event in posted
                for number in event["attributes"]["keepstep.verdict.subject.ranks"]
            ]
            assert about == [("opened", 2), ("opened", 3), ("closed", 3), ("closed", 2)]
            assert posted[0]["resource"]["keepstep.job"] == "run7"
            assert posted[0]["attributes"]["keepstep.verdict.to_do"]

    asyncio.run(check())


def test_muted_verdict_is_not_posted() -> None:
    async def check() -> None:
        async with collecting() as collector:
            address = WebhookAddress.parse(collector.url + SECRET_PATH)
            diagnosis = FixedDiagnosis(verdict(2))
            with_webhook = settings(webhook=address)
            async with running(with_webhook, parts(diagnosis)) as url:
                await until(lambda: len(collector.requests.get(SECRET_PATH, [])) == 1)
                client = MonitorClient(SECRET)
                mute = NoteRequest(NoteKind.MUTED, "ann", "known", 600.0).encode()
                await client.ask("POST", f"{url}/v1/verdicts/1/note", 5.0, 1 << 16, mute)
                await client.close()
                diagnosis.verdicts = (verdict(3),)
                await until(lambda: len(collector.requests[SECRET_PATH]) == 2)

                async def has_closed() -> bool:
                    overview = await (await get(url, "/v1/overview")).json()
                    return overview["verdicts"][-1]["closed_at_s"] is not None

                await until(has_closed)
                # In order: what is posted last shows that nothing was posted before.
                diagnosis.verdicts = (verdict(2), verdict(3), verdict(1))
                await until(lambda: len(collector.requests[SECRET_PATH]) == 3)
            posted = collector.requests[SECRET_PATH]
            ranks = [event["attributes"]["keepstep.verdict.subject.ranks"] for event in posted]
            assert ranks == [[2], [3], [1]]

    asyncio.run(check())


def test_slack_gets_a_text() -> None:
    async def check() -> None:
        async with collecting() as collector:
            address = WebhookAddress.parse(f"slack+{collector.url}{SECRET_PATH}")
            async with running(settings(webhook=address), parts(FixedDiagnosis(verdict(2)))):
                await until(lambda: bool(collector.requests.get(SECRET_PATH)))
            (posted,) = collector.requests[SECRET_PATH]
            assert posted.keys() == {"text"}
            assert posted["text"].startswith("run7: rank 2 on node-a: non-communication hang.")
            assert "\nwhat to do: " in posted["text"]

    asyncio.run(check())


@pytest.mark.parametrize(
    ("statuses", "tries", "is_posted"),
    [([503, 429], 3, True), ([500] * 9, 4, False), ([404], 1, False), ([302], 1, False)],
)
def test_tries_are_bounded_and_a_refusal_is_not_repeated(
    statuses: list[int], tries: int, is_posted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with collecting() as collector:
            collector.statuses = list(statuses)
            faults = ComponentFaults()
            address = WebhookAddress.parse(collector.url + SECRET_PATH)
            webhook = Webhook(address, faults, (0.0, 0.0, 0.0))
            webhook.write(opened_event(ENTRY, resource_of("run7", "node-a")))
            await webhook.close()
            assert collector.tries == tries
            assert (SECRET_PATH in collector.requests) == is_posted
            assert faults.counts == ({} if is_posted else {"webhook": 1})

    asyncio.run(check())
    assert "s3cret" not in caplog.text


def test_webhook_that_does_not_answer_is_said_without_its_path_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check() -> None:
        webhook = WebhookAddress.parse(f"http://127.0.0.1:9{SECRET_PATH}")
        diagnosis = FixedDiagnosis(verdict(2))
        async with running(settings(webhook=webhook), parts(diagnosis)) as url:

            async def goes_on() -> bool:
                overview = await (await get(url, "/v1/overview")).json()
                return bool(overview["verdicts"]) and len(diagnosis.digests) > 5

            await until(goes_on)

    asyncio.run(check())
    assert "s3cret" not in caplog.text
    assert "http://127.0.0.1:9: " in caplog.text
