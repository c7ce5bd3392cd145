"""Tests of how ranks commit a checkpoint together; the ranks are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from keepstep.checkpoint.errors import CheckpointError, RankFailed
from keepstep.checkpoint.ranks.control_group import ControlGroup
from keepstep.checkpoint.saving.commit import commit_together
from tests.adaptive_timeouts import patient
from tests.unit.checkpoint.thread_ranks import ThreadRanks

LONG_S = 60.0


@dataclass
class Part:
    """The part of one rank; it is written, or published, when the function says so or raises."""

    rank: int
    write_once: Callable[[], bool] = lambda: True
    publish_once: Callable[[], bool] = lambda: True
    is_written: bool = False
    published: list[list[bytes]] = field(default_factory=list)

    def write(self, limit_s: float | None) -> bool:
        assert not self.is_written, "a part is written once"
        self.is_written = self.write_once()
        return self.is_written

    def report(self) -> bytes:
        return b"report %d" % self.rank

    def publish(self, reports: Sequence[memoryview], limit_s: float | None) -> bool:
        is_published = self.publish_once()
        if is_published:
            self.published.append([bytes(report) for report in reports])
        return is_published


@pytest.fixture
def ranks() -> ThreadRanks:
    return ThreadRanks(3)


def commit_all(
    ranks: ThreadRanks, parts: Sequence[Part], peer_timeout_s: float | None = LONG_S
) -> list[Any]:
    return ranks.run(lambda rank: commit_together(parts[rank], ranks.group, peer_timeout_s))


def after(calls: int) -> Callable[[], bool]:
    """Return what is true from its so-and-so-many-th call on."""
    left = [calls]

    def is_done() -> bool:
        left[0] -= 1
        return left[0] < 0

    return is_done


def failing(text: str) -> Callable[[], bool]:
    def fail() -> bool:
        raise CheckpointError(text)

    return fail


def texts(results: Sequence[object]) -> list[str]:
    return [str(result) for result in results]


@pytest.mark.parametrize("peer_timeout_s", [None, LONG_S])
def test_rank_0_publishes_the_reports_of_all_once_and_nobody_else_does(
    ranks: ThreadRanks, peer_timeout_s: float | None
) -> None:
    parts = [Part(rank, after(rank), after(2)) for rank in range(3)]
    assert commit_all(ranks, parts, peer_timeout_s) == [None] * 3
    reports = [b"report 0", b"report 1", b"report 2"]
    assert [part.published for part in parts] == [[reports], [], []]


def test_one_process_commits_alone() -> None:
    part = Part(0, after(3), after(3))
    commit_together(part, ControlGroup(), LONG_S)
    assert part.published == [[b"report 0"]]


@pytest.mark.parametrize("failed", [0, 1])
def test_a_rank_without_a_part_fails_the_save_of_all(ranks: ThreadRanks, failed: int) -> None:
    """Also of ranks that still write."""
    parts = [Part(rank, lambda: False) for rank in range(3)]
    parts[failed] = Part(failed, failing("the disk is full"))
    results = commit_all(ranks, parts)
    own = texts(results).index("the disk is full")
    assert own == failed
    others = [result for rank, result in enumerate(results) if rank != failed]
    assert texts(others) == [f"rank {failed}: the disk is full"] * 2
    assert not any(part.published for part in parts)


def test_what_fails_in_publishing_is_told_to_all(ranks: ThreadRanks) -> None:
    parts = [Part(rank, publish_once=failing("it exists")) for rank in range(3)]
    results = commit_all(ranks, parts)
    assert texts(results) == ["it exists", "rank 0: it exists", "rank 0: it exists"]


def commit_without(ranks: ThreadRanks, silent: int, parts: Sequence[Part]) -> list[Any]:
    """Commit, while one rank says nothing; return the others' errors."""
    may_end = threading.Event()

    def commit(rank: int) -> None:
        if rank == silent:
            assert may_end.wait(patient(LONG_S))
            return
        try:
            commit_together(parts[rank], ranks.group, 0.2)
        finally:
            ended.append(rank)
            if len(ended) == 2:
                may_end.set()

    ended: list[int] = []
    results = ranks.run(commit)
    return [result for rank, result in enumerate(results) if rank != silent]


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_rank_that_gives_no_sign_of_life_is_named_by_all_others(
    ranks: ThreadRanks, silent: int
) -> None:
    parts = [Part(rank) for rank in range(3)]
    errors = commit_without(ranks, silent, parts)
    expected = (
        f"rank {silent} has ended, or sent no heartbeat for 0.2 s while the checkpoint was "
        "stored; nothing is committed"
    )
    assert texts(errors) == [expected] * 2
    assert all(isinstance(error, RankFailed) for error in errors)


def test_a_rank_that_writes_for_longer_than_others_are_patient_is_waited_for(
    ranks: ThreadRanks,
) -> None:
    began_s = time.monotonic()
    timeout_s = patient(0.3)

    def write_slowly() -> bool:
        time.sleep(timeout_s / 6)
        return time.monotonic() > began_s + 2 * timeout_s

    parts = [Part(0), Part(1, write_slowly), Part(2)]
    assert commit_all(ranks, parts, timeout_s) == [None] * 3


def test_others_are_told_that_it_may_be_committed_if_rank_0_is_lost_while_it_publishes(
    ranks: ThreadRanks,
) -> None:
    parts = [Part(rank) for rank in range(3)]
    others_have_ended = threading.Semaphore(0)

    def publish_for_ever() -> bool:
        for _ in range(2):
            assert others_have_ended.acquire(timeout=patient(LONG_S))
        return True

    parts[0].publish_once = publish_for_ever

    def commit(rank: int) -> None:
        try:
            commit_together(parts[rank], ranks.group, 0.2)
        finally:
            others_have_ended.release()

    results = ranks.run(commit)
    for error in results[1:]:
        assert "rank 0 has ended, or sent no heartbeat" in str(error)
        assert "it may be committed: see `keepstep ckpt ls`" in str(error)
