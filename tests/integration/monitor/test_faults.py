"""Claims about the verdicts of a real daemon on faults in real jobs.

`ops/bench/diagnosis.py` has many more faults.
"""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.monitor.daemon.assembly import assemble
from keepstep.monitor.daemon.settings import Settings
from tests.integration.monitor.jobs import DEADLINE_S, Job
from tests.integration.monitor.running import SECRET, get, running, until

RANKS = 3


def verdicts(
    base: Path, monkeypatch: pytest.MonkeyPatch, inject: Callable[[Job], None], **environment: str
) -> set[str]:
    """Return the first verdicts after an injection; before it there must be none."""
    monkeypatch.setenv("KEEPSTEP_MONITOR_DIR", str(base))
    settings = Settings(
        job="test", node="here", secret=SECRET, read_every_s=0.1, diagnose_every_s=0.2
    )

    async def check(job: Job) -> set[str]:
        async with running(settings, assemble("test", "here", diagnoses=True)) as url:
            seen: set[str] = set()

            async def look() -> bool:
                overview = await (await get(url, "/v1/overview")).json()
                seen.update(
                    f"{entry['verdict']['syndrome']}: {entry['subject']}"
                    for entry in overview["verdicts"]
                )
                return bool(seen)

            async def sees_all() -> bool:
                overview = await (await get(url, "/v1/overview")).json()
                return [rank["rank"] for rank in overview["ranks"]] == list(range(RANKS))

            await until(sees_all, DEADLINE_S)
            await look()
            assert seen == set()
            inject(job)
            await until(look, DEADLINE_S)
            return seen

    with Job(base, "trains", RANKS, **environment) as job:
        job.expect("ready")
        return asyncio.run(check(job))


def test_stopped_rank_is_diagnosed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(job: Job) -> None:
        job.proceed()
        job.workers[1].send_signal(signal.SIGSTOP)

    # Rings of an earlier launch of the same name, with more ranks and one restart, are ignored.
    with Job(tmp_path, "trains", RANKS + 1, TORCHELASTIC_RESTART_COUNT="1") as earlier:
        earlier.expect("ready")
    assert verdicts(tmp_path, monkeypatch, stop) == {"non-communication hang: rank 1 on here"}


def test_rank_that_reduces_more_than_the_others_is_diagnosed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdicts(tmp_path, monkeypatch, Job.proceed, PARTS="1") == {
        "mismatched collectives: rank 1 on here"
    }


def test_killed_rank_is_diagnosed_and_ranks_that_fail_because_of_it_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(job: Job) -> None:
        job.proceed()
        job.workers[2].kill()

    assert verdicts(tmp_path, monkeypatch, kill) == {"dead process: rank 2 on here"}
