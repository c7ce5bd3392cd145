"""The page in a real browser: what it shows of a job, in words and when pointed at, and what it says where there is nothing to show."""

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.monitor.daemon.daemon import DaemonComponents, Settings
from keepstep.monitor.secret import bearer_token
from keepstep.monitor.verdicts import Syndrome
from tests.integration.monitor.browser import CHROMIUM, DRIVER, Browser, browser
from tests.integration.monitor.running import SECRET, running
from tests.integration.monitor.sample import Plan, SampleReader, SampleTeller, verdict
from tests.integration.monitor.test_daemon import Probe, Says

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no Chromium with chromedriver is installed (Debian: apt-get install chromium chromium-driver)",
)

DRAWN = "return document.body.dataset.drawn === 'yes'"


def visit(parts: DaemonComponents, look: Callable[[Browser, str], None], **more: bool) -> None:
    """Serve a job and look at its page."""

    async def serve() -> None:
        # A name that would be markup, were it ever parsed as such.
        settings = Settings("<b>run7</b>", "node-a", SECRET, read_every_s=0.1)
        async with running(settings, parts) as url:

            def drive() -> None:
                with browser(**more) as page:
                    look(page, url)

            await asyncio.get_running_loop().run_in_executor(None, drive)

    asyncio.run(serve())


def with_token(url: str) -> str:
    return f"{url}/#token={bearer_token(SECRET)}"


def test_hang_is_the_first_thing_one_sees_and_its_step_is_shown(tmp_path: Path) -> None:
    def look(page: Browser, url: str) -> None:
        page.open(with_token(url))
        page.until(DRAWN)
        page.until("return document.querySelector('.verdict details') !== null")
        assert "non-communication hang" in page.text("#verdicts article")
        assert "rank 2 on node-a" in page.text("#verdicts article")
        assert "restart worker" in page.text("#verdicts .advice")
        assert (
            page.run("return document.querySelector('#verdicts').getBoundingClientRect().bottom")
            < 800
        )
        # The token is not left where shoulders and screenshots see it.
        assert "token" not in page.run("return location.href")
        assert page.text("#job") == "<b>run7</b>"
        assert "generation" in page.text("#facts")
        page.until("return document.querySelector('#step-number').textContent === 'step 41'")
        # The whole wait is there, and the step beside it can still be read.
        assert page.run("return document.getElementById('timeline').dataset.broken") == "yes"
        waited_s = re.search(r"has not ended in ([0-9.]+) s", page.hover("#timeline", 1100, 12))
        assert waited_s is not None
        assert 10 < float(waited_s[1]) < 60
        assert page.run("return document.getElementById('timeline').tell(600, 6 + 31)").startswith(
            "rank 1: forward\n"
        )
        assert "the usual" in page.hover("#heat", 300, 60)
        assert page.text("#ranks td.sick:first-child") == "2"
        assert "steps that were kept" in page.text("#story")
        assert "node-c joins" in page.text("#story")
        assert page.complaints() == []
        page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000

    reader = SampleReader(Plan(ranks=4, steps=60, step_s=0.2, hang=(2, 41)), time.monotonic() - 20)
    visit(
        DaemonComponents(
            Probe(), reader, Says(verdict(2)), job_status_source=SampleTeller(time.time() - 200)
        ),
        look,
    )


def test_slow_rank_is_told_by_its_cell_and_matrices_and_steps_can_be_chosen() -> None:
    def look(page: Browser, url: str) -> None:
        page.open(with_token(url))
        page.until(DRAWN)
        assert "No verdict holds. 6 ranks watched." in page.text("#verdicts")
        assert "Not a keepstep job" in page.text("#story")
        page.run("document.querySelectorAll('#heat-phase button')[2].click()")
        ratio = "parseFloat(/([0-9.]+) \\S the usual/.exec(document.getElementById('heat').tell(600, 5 + 4.5 * 30))?.[1])"
        page.until(f"return {ratio} > 1.4")
        assert "rank 4" in page.run(
            "return document.getElementById('heat').tell(600, 5 + 4.5 * 30)"
        )
        assert "waits for rank" in page.hover("#matrix", 200, 60)
        page.run("document.querySelectorAll('#matrix-kind button')[1].click()")
        page.until(
            "return document.getElementById('matrix-title').textContent.startsWith('Messages')"
        )
        page.run("document.getElementById('step-back').click()")
        # The job goes on, the step that was chosen stays: live, the two are never so far apart.
        at = "Number(document.getElementById('ranks').rows[1].cells[3].textContent)"
        page.until(
            f"return {at} > Number(/[0-9]+/.exec(document.getElementById('step-number').textContent)) + 30"
        )
        assert page.complaints() == []

    reader = SampleReader(
        Plan(ranks=6, steps=900, step_s=0.1, slow={4: 1.6}), time.monotonic() - 15
    )
    visit(DaemonComponents(Probe(), reader, Says()), look)


def test_page_lives_with_updates_in_light_and_dark() -> None:
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
        # Nothing is fetched from anywhere else: it works in a room without a way out.
        fetched = page.run(
            "return performance.getEntriesByType('resource').map((entry) => new URL(entry.name).origin)"
        )
        assert set(fetched) == {url}

    visit(
        DaemonComponents(
            Probe(),
            SampleReader(Plan(), time.monotonic() - 5),
            Says(verdict(1, Syndrome.DATA_STALL)),
        ),
        look,
    )


def test_page_without_token_asks_for_it_and_opens_with_it() -> None:
    def look(page: Browser, url: str) -> None:
        page.open(url)
        page.until("return !document.getElementById('door').hidden")
        assert page.run("return document.getElementById('board').hidden")
        page.run(
            "document.getElementById('token').value = arguments[0]; document.querySelector('#door button').click()",
            bearer_token(SECRET),
        )
        page.until(DRAWN)
        assert not page.run("return document.getElementById('board').hidden")

    visit(DaemonComponents(Probe(), SampleReader(Plan(), time.monotonic() - 5), Says()), look)


def test_empty_daemon_says_what_is_missing() -> None:
    def look(page: Browser, url: str) -> None:
        page.open(with_token(url))
        page.until(DRAWN)
        assert (
            "No rank of job <b>run7</b> is heard of yet; no job is recorded on this node"
            in page.text("#verdicts")
        )
        assert page.complaints() == []

    visit(DaemonComponents(Probe(), None, Says()), look)


def test_ranks_that_are_not_heard_of_any_more_are_not_said_to_be_alive() -> None:
    def look(page: Browser, url: str) -> None:
        page.open(with_token(url))
        page.until(
            "return document.getElementById('facts').textContent.includes('ranks not heard of2')"
        )
        assert "not heard of for" in page.text("#ranks")

    now_s = time.monotonic()
    visit(
        DaemonComponents(
            Probe(), SampleReader(Plan(ranks=2), now_s - 5, clock=lambda: now_s), Says()
        ),
        look,
    )
