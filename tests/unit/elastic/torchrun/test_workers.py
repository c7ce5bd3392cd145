"""Claims about workers that torchrun starts and ends: real processes, which this test reaps."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from keepstep.elastic.agent.assignments import JobContext, assignments_of
from keepstep.elastic.rendezvous.records import FailureKind, Generation, Member
from keepstep.elastic.torchrun.workers import TorchrunWorkers, WorkerSocket
from keepstep.elastic.worker.launched_session import VARIABLE
from keepstep.elastic.worker.messages import AbortOrdered
from tests.adaptive_timeouts import patient

pytestmark = pytest.mark.slow

CONTEXT = JobContext(job="job", secret=b"", server="unix:/none", max_restarts=3)
MEMBER = Member("b", "h", 2, 2, "h:1", "tcp:h:2")
GENERATION = Generation(4, (Member("a", "h", 2, 0, "h:3", "tcp:h:4"), MEMBER), "h", 1, "start")

ATTACH = """
import signal, sys, time
from keepstep.elastic.worker.launched_session import launched_session
from keepstep.elastic.worker.messages import Finishing, Joined
session = launched_session()
assignment = session.wait_for_assignment(0)
url = sys.argv[2] if len(sys.argv) > 2 else None
session.report(Joined(checkpoint_url=url, checkpoint_every=None,
                      awaits_abort_order=sys.argv[1] == "by order"))
session.at_script_end(lambda: None)
session.at_script_error(lambda error: None)
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
"""
WAIT = "time.sleep(1000)"
HAND_OVER = """
session.wait_for_closing(assignment.generation)
session.end_for_successor(assignment.generation)
"""
FAIL = """
import atexit
atexit.register(lambda: time.sleep(1000))
raise ValueError("the script's own")
"""


class Torchrun:
    """torchrun's part: it starts the processes of a round, and ends and reaps them."""

    def __init__(self, directory: Path) -> None:
        self.workers = TorchrunWorkers("b", 2, lambda: None)
        self._path = directory / "workers.sock"
        self.socket = WorkerSocket(self._path, self.workers)
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(
        self, rank: int, code: str, *arguments: str, aborts: str = "at once", ranks: int = 4
    ) -> subprocess.Popen[str]:
        environment = {VARIABLE: str(self._path), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
        process = subprocess.Popen(
            [sys.executable, "-c", ATTACH + code, aborts, *arguments],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.setdefault(rank, process)
        return process

    async def enter(self, *codes: str, aborts: str = "at once") -> None:
        await self.workers.enter(assignments_of(GENERATION, MEMBER, CONTEXT))
        assert self.workers.take_place() is not None
        for rank, code in zip((2, 3), codes, strict=False):
            self.start(rank, code, aborts=aborts)
        await until(lambda: self.joined == len(codes))

    @property
    def joined(self) -> int:
        return sum(worker.has_joined for worker in self.workers.workers.values())

    async def end(self, *ranks: int) -> list[int]:
        """End processes as torchrun does, and return their statuses."""
        for rank in ranks:
            self.processes[rank].terminate()
        return [await asyncio.to_thread(self.processes[rank].wait, 30) for rank in ranks]


async def until(is_reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(patient(30)):
        while not is_reached():  # noqa: ASYNC110 - conditions of any kind
            await asyncio.sleep(0.01)


def play(directory: Path, work: Callable[[Torchrun], Awaitable[None]]) -> None:
    @asynccontextmanager
    async def torchrun() -> AsyncIterator[Torchrun]:
        it = Torchrun(directory)
        try:
            yield it
        finally:
            for process in it.processes.values():
                process.kill()
                process.communicate()
            it.workers.end(1)
            await it.workers.stop(0.0)
            await it.socket.close()

    async def run() -> None:
        async with torchrun() as it:
            await work(it)

    asyncio.run(run())


def test_killed_worker_is_a_failure_that_no_budget_of_the_job_counts(tmp_path: Path) -> None:
    async def work(torchrun: Torchrun) -> None:
        await torchrun.enter(WAIT, WAIT)
        torchrun.processes[3].kill()
        await until(lambda: torchrun.workers.failure is not None)
        failure = torchrun.workers.failure
        assert failure is not None
        assert (failure.kind, failure.rank) == (FailureKind.RESTART, 3)
        assert failure.message == "rank 3 on b was killed by SIGKILL"
        # It was left to torchrun to reap it.
        assert torchrun.processes[3].wait() == -signal.SIGKILL

    play(tmp_path, work)


def test_drained_workers_wait_for_the_end_that_torchrun_is_asked_for(tmp_path: Path) -> None:
    async def work(torchrun: Torchrun) -> None:
        workers = torchrun.workers
        await torchrun.enter(HAND_OVER, HAND_OVER)
        assert not workers.restart_is_due
        assert not await workers.drain(abort=False, limit_s=60.0)
        await until(lambda: workers.restart_is_due)
        # They may still be there: only their end lets the next generation begin.
        assert not await workers.drain(abort=False, limit_s=60.0)
        # By SIGTERM, although the script handles it.
        assert await torchrun.end(2, 3) == [-signal.SIGTERM] * 2
        workers.end(1)
        assert await workers.drain(abort=False, limit_s=60.0)
        assert workers.failure is None

    play(tmp_path, work)


def test_restart_is_due_in_good_order_once_all_have_drained(tmp_path: Path) -> None:
    async def work(torchrun: Torchrun) -> None:
        workers = torchrun.workers
        await torchrun.enter(HAND_OVER, WAIT)
        await workers.drain(abort=False, limit_s=1.0)
        await until(lambda: workers.workers[0].has_drained)
        assert not workers.restart_is_due
        await asyncio.sleep(1.0)
        # The limit is over.
        await workers.drain(abort=False, limit_s=1.0)
        await until(lambda: workers.restart_is_due)

    play(tmp_path, work)


@pytest.mark.parametrize("aborts", ["at once", "by order"])
def test_restart_is_due_when_workers_are_to_abort(tmp_path: Path, aborts: str) -> None:
    async def work(torchrun: Torchrun) -> None:
        workers = torchrun.workers
        await torchrun.enter(WAIT, WAIT, aborts=aborts)
        await workers.drain(abort=True, limit_s=60.0)
        assert workers.restart_is_due == (aborts == "at once")
        await workers.broadcast(AbortOrdered(generation=4))
        assert workers.restart_is_due

    play(tmp_path, work)


def test_script_that_fails_by_itself_has_time_to_end_so_that_torchrun_counts_it(
    tmp_path: Path,
) -> None:
    async def work(torchrun: Torchrun) -> None:
        workers = torchrun.workers
        await torchrun.enter(WAIT, FAIL)
        await until(lambda: workers.failure is not None)
        assert workers.failure is not None
        assert "ValueError: the script's own" in workers.failure.message
        assert workers.failure.kind is FailureKind.RESTART
        await workers.drain(abort=True, limit_s=0.5)
        assert not workers.restart_is_due
        await asyncio.sleep(0.5)
        await workers.drain(abort=True, limit_s=0.5)
        await until(lambda: workers.restart_is_due)

    play(tmp_path, work)


def test_scripts_that_have_not_attached_are_ended_at_once(tmp_path: Path) -> None:
    async def work(torchrun: Torchrun) -> None:
        workers = torchrun.workers
        await torchrun.enter(WAIT)
        await workers.drain(abort=False, limit_s=60.0)
        assert workers.restart_is_due
        workers.end(1)
        assert await workers.drain(abort=False, limit_s=60.0)

    play(tmp_path, work)


def test_exit_with_success_is_no_failure_and_torchrun_says_of_which_workers_it_is_the_end(
    tmp_path: Path,
) -> None:
    async def work(torchrun: Torchrun) -> None:
        await torchrun.enter("")
        await until(lambda: torchrun.workers.workers[0].code == 0)
        assert not torchrun.workers.done
        torchrun.workers.end(0)
        assert torchrun.workers.done
        assert torchrun.workers.failure is None

    play(tmp_path, work)


def test_node_that_has_no_place_any_more_waits_for_the_end_of_its_workers(tmp_path: Path) -> None:
    """It learns of the generation that goes on without it before it has drained."""

    async def work(torchrun: Torchrun) -> None:
        workers = torchrun.workers
        await torchrun.enter()
        standing_by = asyncio.create_task(workers.enter_as_spare(5))
        await until(lambda: workers.restart_is_due)
        workers.end(1, 4)
        await standing_by
        assert workers.failure is None

    play(tmp_path, work)


def test_round_that_has_begun_is_not_ended_with_the_last_one(tmp_path: Path) -> None:
    async def work(torchrun: Torchrun) -> None:
        await torchrun.enter()
        torchrun.workers.end(1, 3)
        assert all(worker.is_alive for worker in torchrun.workers.workers.values())

    play(tmp_path, work)


def test_failure_that_only_torchrun_has_seen_is_the_reason_of_the_next_round(
    tmp_path: Path,
) -> None:
    async def work(torchrun: Torchrun) -> None:
        await torchrun.enter()
        torchrun.workers.end(1)
        assert torchrun.workers.failure is not None
        assert torchrun.workers.failure.message == "workers on b have failed"

    play(tmp_path, work)


@pytest.mark.parametrize(
    ("rank", "ranks", "message"),
    [
        (2, 4, "expects no process of rank 2: another one has attached as that rank"),
        (1, 4, "expects no process of rank 1"),
        (3, 8, "torchrun has started 8 ranks, and its back end counts on 4: give --rdzv-conf"),
    ],
    ids=["second process of a rank", "rank of another node", "other number of ranks"],
)
def test_process_that_is_not_expected_is_refused(
    tmp_path: Path, rank: int, ranks: int, message: str
) -> None:
    async def work(torchrun: Torchrun) -> None:
        await torchrun.enter(WAIT)
        refused = torchrun.start(rank, WAIT, ranks=ranks)
        _, shown = await asyncio.to_thread(refused.communicate, timeout=patient(30))
        assert refused.returncode == 1
        assert message in shown

    play(tmp_path, work)


@pytest.mark.parametrize("code", ["", "session.report(Finishing(step=4))"])
def test_script_that_ends_without_finish_says_what_is_not_stored(tmp_path: Path, code: str) -> None:
    async def work(torchrun: Torchrun) -> None:
        await torchrun.enter()
        process = torchrun.start(2, code, "s3://bucket/run7")
        _, shown = await asyncio.to_thread(process.communicate, timeout=patient(30))
        assert process.returncode == 0
        assert ("last steps may not be stored in s3://bucket/run7" in shown) == (not code)

    play(tmp_path, work)
