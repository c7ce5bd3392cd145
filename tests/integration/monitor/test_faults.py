"""Faults in real jobs, told by a real daemon that reads their rings: who it was, and what. `ops/bench/diagnosis.py` has many more."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.monitor.daemon.assembly import assemble
from keepstep.monitor.daemon.daemon import Settings
from tests.integration.monitor.jobs import DEADLINE_S, Job
from tests.integration.monitor.running import SECRET, get, running, until

RANKS = 3


def verdicts(
    base: Path, monkeypatch: pytest.MonkeyPatch, inject: Callable[[Job], None], **environment: str
) -> set[str]:
    """Return the verdicts that hold once there is one after an injection; before it there must be none."""
    monkeypatch.setenv("KEEPSTEP_MONITOR_DIR", str(base))
    settings = Settings("test", "here", SECRET, read_every_s=0.1, conclude_every_s=0.2)

    async def check(job: Job) -> set[str]:
        async with running(settings, assemble("test", "here", diagnoses=True)) as url:
            found: set[str] = set()

            async def look() -> bool:
                told = await (await get(url, "/v1/overview")).json()
                found.update(
                    f"{one['verdict']['syndrome']}: {one['subject']}" for one in told["verdicts"]
                )
                return bool(found)

            async def sees_all() -> bool:
                told = await (await get(url, "/v1/overview")).json()
                return [rank["rank"] for rank in told["ranks"]] == list(range(RANKS))

            await until(sees_all, DEADLINE_S)
            await look()
            assert found == set()
            inject(job)
            await until(look, DEADLINE_S)
            return found

    with Job(base, "trains", RANKS, **environment) as job:
        job.expect("ready")
        return asyncio.run(check(job))


def test_stopped_rank_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(job: Job) -> None:
        job.proceed()
        job.workers[1].send_signal(signal.SIGSTOP)

    # What an earlier launch of the same name left, of more ranks and restarted once, is in nobody's way.
    with Job(tmp_path, "trains", RANKS + 1, TORCHELASTIC_RESTART_COUNT="1") as earlier:
        earlier.expect("ready")
    assert verdicts(tmp_path, monkeypatch, stop) == {"non-communication hang: rank 1 on here"}


def test_rank_that_reduces_more_than_the_others_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdicts(tmp_path, monkeypatch, Job.proceed, PARTS="1") == {
        "mismatched collectives: rank 1 on here"
    }


def test_rank_killed_between_or_in_steps_is_found_and_not_those_that_fail_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(job: Job) -> None:
        job.proceed()
        job.workers[2].kill()

    assert verdicts(tmp_path, monkeypatch, kill) == {"dead process: rank 2 on here"}
