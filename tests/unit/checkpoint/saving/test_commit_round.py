"""Tests of how ranks commit over a store; the ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from keepstep.checkpoint.errors import CheckpointError, RankFailed
from keepstep.checkpoint.saving.commit_round import CommitRound

WORLD = 3


def run_all(
    store: HashStore, act: Callable[[CommitRound, int], None], timeout_s: float = 60.0
) -> list[CommitRound]:
    rounds = [
        CommitRound(store, rank, WORLD, "attempt", timeout_s, threading.Event())
        for rank in range(WORLD)
    ]
    with ThreadPoolExecutor(WORLD) as pool:
        list(pool.map(act, rounds, range(WORLD)))
    return rounds


def test_rank_0_collects_all_reports_and_all_see_the_outcome() -> None:
    def commit(commit_round: CommitRound, rank: int) -> None:
        commit_round.tick()
        commit_round.report(f"report {rank}".encode())
        if rank == 0:
            assert commit_round.collect() == [b"report 0", b"report 1", b"report 2"]
            commit_round.conclude(None)
            commit_round.await_others()
        else:
            commit_round.outcome()
            commit_round.leave()

    store = HashStore()
    for commit_round in run_all(store, commit):
        commit_round.forget()
    assert store.num_keys() == 0


def test_a_rank_without_a_part_fails_the_save_of_all() -> None:
    def commit(commit_round: CommitRound, rank: int) -> None:
        if rank == 1:
            commit_round.report_failure("the disk is full")
            commit_round.leave()
            return
        commit_round.report(b"{}")
        if rank == 0:
            with pytest.raises(RankFailed, match="rank 1: the disk is full") as caught:
                commit_round.collect()
            commit_round.conclude(caught.value)
            commit_round.await_others()
        else:
            with pytest.raises(RankFailed, match=r"^rank 1: the disk is full"):
                commit_round.outcome()
            commit_round.leave()

    run_all(HashStore(), commit)


def test_a_rank_that_gives_no_sign_of_life_is_not_waited_for() -> None:
    def commit(commit_round: CommitRound, rank: int) -> None:
        if rank == 0:
            commit_round.report(b"{}")
            with pytest.raises(RankFailed, match=r"rank 2 gave no sign of life for 0\.2 s"):
                commit_round.collect()
        if rank == 1:
            commit_round.report(b"{}")

    run_all(HashStore(), commit, 0.2)


def test_what_is_given_up_is_not_waited_for() -> None:
    given_up = threading.Event()
    commit_round = CommitRound(HashStore(), 1, WORLD, "attempt", 60.0, given_up)
    given_up.set()
    with pytest.raises(CheckpointError, match="given up"):
        commit_round.outcome()
