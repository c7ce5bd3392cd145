"""Claims about the page in a real browser: its texts, canvases, tooltips and empty states."""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.monitor.contracts import JobStatus
from keepstep.monitor.daemon.local_monitors import LocalMonitor
from keepstep.monitor.daemon.settings import DaemonComponents, Settings
from keepstep.monitor.secret import bearer_token
from keepstep.monitor.verdicts import Syndrome
from tests.adaptive_timeouts import patient
from tests.integration.monitor.browser import CHROMIUM, DRIVER, Browser, browser
from tests.integration.monitor.running import SECRET, running
from tests.integration.monitor.sample import Plan, SampleJobStatus, SampleReader, verdict
from tests.integration.monitor.test_daemon import FixedDiagnosis, Probe

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="Chromium with chromedriver is not installed "
    "(Debian: apt-get install chromium chromium-driver)",
)

DRAWN = "return document.body.dataset.drawn === 'yes'"
TIMELINE = "document.getElementById('timeline')"
HEAT = "document.getElementById('heat')"


def visit(parts: DaemonComponents, look: Callable[[Browser, str], None], **more: bool) -> None:
    """Serve a job and look at its page."""

    async def serve() -> None:
        # A name that would be markup if the page parsed it as such.
        settings = Settings(job="<b>run7</b>", node="node-a", secret=SECRET, read_every_s=0.1)
        async with running(settings, parts) as url:

            def drive() -> None:
                with browser(**more) as page:
                    look(page, url)

            await asyncio.get_running_loop().run_in_executor(None, drive)

    asyncio.run(serve())


def with_token(url: str) -> str:
    return f"{url}/#token={bearer_token(SECRET)}"


def test_hang_is_shown_at_the_top_and_its_step_in_the_timeline(tmp_path: Path) -> None:
    def look(page: Browser, url: str) -> None:
        page.open(with_token(url))
        page.until(DRAWN)
        page.until("return document.querySelector('.verdict details') !== null")
        assert "non-communication hang" in page.text("#verdicts article")
        assert "rank 2 on node-a" in page.text("#verdicts article")
        assert "restart worker" in page.text("#verdicts .advice")
        assert "kill the process of rank 2" in page.text("#verdicts .todo")
        # The header shows the present, and not what was usual before.
        assert "stands still for" in page.text("#facts")
        assert "stands still" in page.text("#job-status")
        page.until("return document.querySelector('#matrix-title').textContent.endsWith('now')")
        assert (
            page.run("return document.querySelector('#verdicts').getBoundingClientRect().bottom")
            < 800
        )
        # The token is removed from the address, which bystanders and screenshots could see.
        assert "token" not in page.run("return location.href")
        assert page.text("#job") == "<b>run7</b>"
        assert "generation" in page.text("#facts")
        page.until("return document.querySelector('#step-number').textContent === 'step 41'")
        # The whole wait is drawn, and the step next to it is still readable.
        assert page.run("return document.getElementById('timeline').dataset.broken") == "yes"
        waited_s = re.search(r"has not ended in ([0-9.]+) s", page.hover("#timeline", 1100, 12))
        assert waited_s is not None
        assert 10 < float(waited_s[1]) < patient(60)
        assert page.run(f"return {TIMELINE}.tooltip(600, 6 + 31)").startswith("rank 1: forward\n")
        assert "the usual" in page.hover("#heat", 300, 60)
        assert page.text("#ranks td.sick:first-child") == "2"
        assert "steps that were kept" in page.text("#job-status")
        assert "node-c joins" in page.text("#job-status")
        assert page.console_errors() == []
        page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000

    reader = SampleReader(Plan(ranks=4, steps=60, step_s=0.2, hang=(2, 41)), time.monotonic() - 20)
    visit(
        DaemonComponents(
            probe=Probe(),
            reader=reader,
            diagnosis=FixedDiagnosis(verdict(2)),
            job_status_source=SampleJobStatus(time.time() - 200),
        ),
        look,
    )


class PausedJobStatus(SampleJobStatus):
    """The status of a job that was paused an hour ago."""

    def job_status(self) -> JobStatus:
        paused_at_s = time.time() - 3600
        return replace(super().job_status(), paused="maintenance", paused_at_s=paused_at_s)


def test_paused_job_is_neither_healthy_nor_dead_and_says_how_to_go_on(tmp_path: Path) -> None:
    def look(page: Browser, url: str) -> None:
        page.open(with_token(url))
        page.until("return document.querySelector('#paused') !== null")
        assert "maintenance" in page.text("#paused")
        assert "keepstep resume <b>run7</b> goes on" in page.text("#paused")
        assert "No verdict holds" not in page.text("#verdicts")
        assert "paused for" in page.text("#facts")
        assert "dead" not in page.text("#ranks")
        assert re.search(r"paused\s+maintenance", page.text("#events"))
        assert "generation 2: node-c: its connection closed" in page.text("#events")
        assert page.console_errors() == []
        page.screenshot(tmp_path / "paused.png")

    visit(
        DaemonComponents(
            probe=Probe(),
            reader=SampleReader(Plan(ranks=4, steps=60, step_s=0.2), time.monotonic() - 30),
            diagnosis=FixedDiagnosis(),
            job_status_source=PausedJobStatus(time.time() - 4000),
        ),
        look,
    )


def test_what_the_loop_reports_and_what_happened_are_shown(tmp_path: Path) -> None:
    class Storing(SampleJobStatus):
        def job_status(self) -> JobStatus:
            return replace(super().job_status(), checkpoint_at_s=time.time() - 60)

    def look(page: Browser, url: str) -> None:
        page.open(with_token(url))
        page.until("return document.querySelector('#events') !== null")
        facts = page.text("#facts")
        assert re.search(r"loss\s+2\.500", facts)
        assert re.search(r"tokens a second\s+[0-9],[0-9]{3}", facts)
        assert "a step takes" in facts
        assert re.search(r"step 200 stored\s+s3://bucket/run7", page.text("#events"))
        page.screenshot(tmp_path / "reported.png")

    visit(
        DaemonComponents(
            probe=Probe(),
            reader=SampleReader(Plan(ranks=4, reports=True), time.monotonic() - 10),
            diagnosis=FixedDiagnosis(),
            job_status_source=Storing(time.time() - 200),
        ),
        look,
    )


def test_other_jobs_of_this_machine_are_a_choice_away_at_the_host_of_the_page() -> None:
    def look(page: Browser, url: str) -> None:
        page.open(with_token(url.replace("127.0.0.1", "localhost")))
        page.until("return !document.querySelector('#jobs').hidden")
        options = (
            "return [...document.querySelectorAll('#jobs option')].map((o) => [o.text, o.value])"
        )
        assert page.run(options)[1:] == [
            ["<i>run8</i>", "http://localhost:8434/"],
            ["run9", "http://10.0.0.2:8433/"],
        ]

    pages = (
        LocalMonitor("<b>run7</b>", "http://127.0.0.1:8433", diagnoses=True),
        LocalMonitor("<i>run8</i>", "http://127.0.0.1:8434", diagnoses=True),
        LocalMonitor("run9", "http://10.0.0.2:8433", diagnoses=True),
        LocalMonitor("run9", "http://127.0.0.1:8435", diagnoses=False),
    )
    visit(
        DaemonComponents(
            probe=Probe(),
            reader=SampleReader(Plan(ranks=2), time.monotonic() - 5),
            diagnosis=FixedDiagnosis(),
            monitors=lambda: pages,
        ),
        look,
    )


def test_slow_rank_has_slow_cells_and_matrices_and_steps_can_be_chosen() -> None:
    def look(page: Browser, url: str) -> None:
        page.open(with_token(url))
        page.until(DRAWN)
        assert "No verdict holds. 6 ranks monitored." in page.text("#verdicts")
        assert "Not a keepstep job" in page.text("#job-status")
        page.run("document.querySelectorAll('#heat-phase button')[2].click()")
        cell = f"{HEAT}.tooltip(600, 5 + 4.5 * 30)"
        page.until(f"return parseFloat(/([0-9.]+) \\S the usual/.exec({cell})?.[1]) > 1.4")
        assert "rank 4" in page.run(f"return {cell}")
        assert "waits for rank" in page.hover("#matrix", 200, 60)
        page.run("document.querySelectorAll('#matrix-kind button')[1].click()")
        page.until(
            "return document.getElementById('matrix-title').textContent.startsWith('Messages')"
        )
        page.run("document.getElementById('step-back').click()")
        # The job continues while the chosen step remains; without a choice they stay close.
        current = "Number(document.getElementById('ranks').rows[1].cells[3].textContent)"
        chosen = "/[0-9]+/.exec(document.getElementById('step-number').textContent)"
        page.until(f"return {current} > Number({chosen}) + 30")
        assert page.console_errors() == []

    reader = SampleReader(
        Plan(ranks=6, steps=900, step_s=0.1, slow={4: 1.6}), time.monotonic() - 15
    )
    visit(DaemonComponents(probe=Probe(), reader=reader, diagnosis=FixedDiagnosis()), look)


def test_page_updates_itself_and_has_a_light_and_a_dark_theme() -> None:
    def look(page: Browser, url: str) -> None:
        page.open(with_token(url))
        page.until(DRAWN)
        first = int(page.text("#facts dd"))
        page.until(f"return Number(document.querySelector('#facts dd').textContent) > {first}")
        colours = []
        for _ in range(2):
            colours.append(page.run("return getComputedStyle(document.body).backgroundColor"))
            page.run("document.getElementById('theme').click()")
        assert colours[0] != colours[1]
        # Nothing is fetched from other hosts: the page works without access to the internet.
        fetched = page.run(
            "return performance.getEntriesByType('resource')"
            ".map((entry) => new URL(entry.name).origin)"
        )
        assert set(fetched) == {url}

    visit(
        DaemonComponents(
            probe=Probe(),
            # It goes on for four minutes: a browser may take long to start.
            reader=SampleReader(Plan(ranks=2, steps=1000), time.monotonic() - 5),
            diagnosis=FixedDiagnosis(verdict(1, Syndrome.DATA_STALL)),
        ),
        look,
    )


def test_page_without_token_requests_it_and_opens_with_it() -> None:
    def look(page: Browser, url: str) -> None:
        page.open(url)
        page.until("return !document.getElementById('sign-in').hidden")
        assert page.run("return document.getElementById('board').hidden")
        page.run(
            "document.getElementById('token').value = arguments[0];"
            "document.querySelector('#sign-in button').click()",
            bearer_token(SECRET),
        )
        page.until(DRAWN)
        assert not page.run("return document.getElementById('board').hidden")

    visit(
        DaemonComponents(
            probe=Probe(),
            reader=SampleReader(Plan(), time.monotonic() - 5),
            diagnosis=FixedDiagnosis(),
        ),
        look,
    )


def test_page_of_a_daemon_without_ranks_explains_what_is_missing() -> None:
    def look(page: Browser, url: str) -> None:
        page.open(with_token(url))
        page.until(DRAWN)
        assert (
            "No rank of job <b>run7</b> is known yet; no job is recorded on this node"
            in page.text("#verdicts")
        )
        assert page.console_errors() == []

    visit(DaemonComponents(probe=Probe(), reader=None, diagnosis=FixedDiagnosis()), look)


def test_ranks_without_recent_reading_are_not_shown_as_alive() -> None:
    def look(page: Browser, url: str) -> None:
        page.open(with_token(url))
        page.until(
            "return document.getElementById('facts').textContent.includes('ranks not reporting2')"
        )
        assert "no report for" in page.text("#ranks")

    now_s = time.monotonic()
    visit(
        DaemonComponents(
            probe=Probe(),
            reader=SampleReader(Plan(ranks=2), now_s - 5, clock=lambda: now_s),
            diagnosis=FixedDiagnosis(),
        ),
        look,
    )


def test_verdict_is_muted_on_the_page_and_shown_as_muted() -> None:
    def look(page: Browser, url: str) -> None:
        page.open(with_token(url))
        page.until("return document.querySelector('.verdict .noting') !== null")
        page.run(
            """[...document.querySelectorAll('.noting button')]
                .find((one) => one.textContent.startsWith('mute')).click();
            const type = (field, text) => {
                field.value = text;
                field.dispatchEvent(new Event('input'));
            };
            type(document.querySelector('.noting input'), 'ann');
            type(document.querySelector('.noting .reason'), '<i>ticket</i> 12');"""
        )
        # Another verdict draws the panel again, and what was typed stays.
        diagnosis.verdicts = (verdict(2), verdict(3))
        page.until("return document.querySelectorAll('#verdicts > article').length === 2")
        page.run("document.querySelector('.noting form').requestSubmit()")
        page.until("return document.querySelector('.verdict.noted') !== null")
        assert "Muted by ann" in page.text(".verdict.noted .note")
        assert "<i>ticket</i> 12" in page.text(".verdict.noted .note")
        assert page.text(".verdict.noted .advice") == "muted"
        assert page.text(".verdict.noted .who") == "rank 2 on node-a"
        page.run("document.querySelector('.verdict.noted .noting button').click()")
        page.until("return document.querySelector('.verdict.noted') === null")
        assert page.console_errors() == []

    diagnosis = FixedDiagnosis(verdict(2))
    visit(
        DaemonComponents(
            probe=Probe(),
            reader=SampleReader(Plan(ranks=4), time.monotonic() - 5),
            diagnosis=diagnosis,
        ),
        look,
    )
