"""Tests of how ranks commit over a store; the ranks are threads."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any, cast

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from keepstep.checkpoint.errors import CheckpointError, RankFailed
from keepstep.checkpoint.saving import commit_round as commit_rounds
from keepstep.checkpoint.saving.commit_round import CommitRound
from keepstep.checkpoint.saving.store_calls import StoreCalls

WORLD = 3


@contextmanager
def started(limit_s: float = 60.0) -> Iterator[StoreCalls]:
    calls = StoreCalls(limit_s, threading.Event())
    with closing(calls):
        calls.start()
        yield calls


def run_all(
    store: HashStore,
    act: Callable[[CommitRound, int], None],
    timeout_s: float = 60.0,
    *,
    forget: bool = False,
) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(WORLD) as pool:
        rounds = [
            CommitRound(store, rank, WORLD, "attempt", timeout_s, stack.enter_context(started()))
            for rank in range(WORLD)
        ]
        list(pool.map(act, rounds, range(WORLD)))
        if forget:
            for commit_round in rounds:
                commit_round.forget()


def test_rank_0_collects_all_reports_and_all_see_the_outcome() -> None:
    def commit(commit_round: CommitRound, rank: int) -> None:
        commit_round.tick()
        commit_round.report(f"report {rank}".encode())
        if rank == 0:
            assert commit_round.collect() == [b"report 0", b"report 1", b"report 2"]
            commit_round.conclude(None)
            commit_round.await_others(lambda: False)
        else:
            commit_round.outcome()
            commit_round.leave()

    store = HashStore()
    run_all(store, commit, forget=True)
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
            commit_round.await_others(lambda: False)
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


def test_others_are_not_waited_for_once_the_next_save_has_begun() -> None:
    with started() as calls:
        commit_round = CommitRound(HashStore(), 0, WORLD, "attempt", 60.0, calls)
        commit_round.conclude(None)
        began_s = time.monotonic()
        commit_round.await_others(lambda: time.monotonic() > began_s + 0.05)
        assert time.monotonic() < began_s + 30.0


def test_what_is_given_up_is_not_waited_for() -> None:
    with started() as calls:
        commit_round = CommitRound(HashStore(), 1, WORLD, "attempt", 60.0, calls)
        calls.given_up.set()
        with pytest.raises(CheckpointError, match="given up"):
            commit_round.outcome()


def test_a_store_without_an_answer_fails_the_save_and_is_left_alone_then() -> None:
    released = threading.Event()
    with started(0.1) as calls:
        commit_round = CommitRound(HashStore(), 1, WORLD, "attempt", 60.0, calls)
        with pytest.raises(RankFailed, match="has not answered"):
            calls.call(released.wait)
        with pytest.raises(RankFailed, match="has not answered"):
            commit_round.tick()
        commit_round.leave()
        commit_round.forget()
        released.set()


def test_rank_0_gives_signs_of_life_while_it_goes_over_many_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten thousand ranks took it longer than the others wait for one."""
    now_s, ranks = 0.0, 100

    class SlowStore:
        """Each of its answers takes half a second."""

        def __init__(self) -> None:
            self.beats: list[float] = []

        def check(self, keys: list[str]) -> bool:
            nonlocal now_s
            now_s += 0.5
            return True

        def get(self, key: str) -> bytes:
            nonlocal now_s
            now_s += 0.5
            return b"{}"

        def add(self, key: str, amount: int) -> int:
            nonlocal now_s
            now_s += 0.5
            if key == "alive/0" and amount:
                self.beats.append(now_s)
            return len(self.beats)

    monkeypatch.setattr(commit_rounds.time, "monotonic", lambda: now_s)
    with started() as calls:
        collecting = CommitRound(None, 0, ranks, "attempt", 6.0, calls)
        store = SlowStore()
        collecting._store = cast(Any, store)
        assert len(collecting.collect()) == ranks
        collected_s = now_s
        assert collecting._unreported(range(1, ranks)) == []
        collecting._check_alive(cast(Any, store), range(1, ranks))
    pauses = [later - sooner for sooner, later in itertools.pairwise([0.0, *store.beats, now_s])]
    assert collected_s > 50
    assert max(pauses) < 6.0
