"""Claims about what ranks do alike when one of them fails; the ranks are threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError, RankFailed
from keepstep.checkpoint.ranks import agreement
from keepstep.checkpoint.ranks.agreement import exchange, from_rank_0, on_all_ranks
from keepstep.checkpoint.ranks.collective import ByteExchange
from tests.unit.checkpoint.thread_ranks import ThreadRanks

# More than goes with a message's length.
LONG = 300_000


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> ThreadRanks:
    played = ThreadRanks(3)
    played.patch(monkeypatch)
    return played


def failing_on(rank: int, error: Exception, ranks: ThreadRanks) -> Callable[[], int]:
    def act() -> int:
        if ranks.get_rank() == rank:
            raise error
        return ranks.get_rank()

    return act


def test_what_fails_on_no_rank_returns_on_each(ranks: ThreadRanks) -> None:
    assert ranks.run(lambda rank: on_all_ranks(lambda: rank + 1)) == [1, 2, 3]


def test_what_fails_on_one_rank_is_raised_on_all_with_the_reason(ranks: ThreadRanks) -> None:
    act = failing_on(1, MemoryError("out of memory"), ranks)
    results = ranks.run(lambda _: on_all_ranks(act))
    assert [type(result) for result in results] == [RankFailed, MemoryError, RankFailed]
    assert str(results[0]) == "rank 1: out of memory"


def test_damage_that_one_rank_finds_is_damage_on_all(ranks: ThreadRanks) -> None:
    act = failing_on(2, CheckpointDamaged("a byte was changed"), ranks)
    results = ranks.run(lambda _: on_all_ranks(act))
    assert [type(result) for result in results] == [CheckpointDamaged] * 3


def test_each_rank_gets_the_messages_to_it(ranks: ThreadRanks) -> None:
    results = ranks.run(lambda rank: exchange(lambda: [b"%d" % rank * to for to in range(3)]))
    assert results == [[b"", b"", b""], [b"0", b"1", b"2"], [b"00", b"11", b"22"]]


def test_short_messages_take_one_collective_and_long_ones_arrive_too(ranks: ThreadRanks) -> None:
    for nbytes, collectives in ((1000, 1), (LONG, 3)):
        ranks.collectives.clear()

        def act(rank: int, nbytes: int = nbytes) -> list[bytes]:
            # One rank's message to one other decides for all.
            return [bytes(m) for m in exchange(lambda: [b"", b"1", b"x" * nbytes * (rank == 1)])]

        assert ranks.run(act) == [[b""] * 3, [b"1"] * 3, [b"", b"x" * nbytes, b""]]
        assert len(ranks.collectives) == collectives * 3


def test_what_rank_0_tells_takes_one_collective_if_it_is_short(ranks: ThreadRanks) -> None:
    for nbytes, collectives in ((1000, 1), (LONG, 3)):
        ranks.collectives.clear()
        told = [b"", b"x" * nbytes, b"end"]
        results = ranks.run(
            lambda _, told=told: [bytes(data) for data in from_rank_0(lambda: told)]
        )
        assert results == [told] * 3
        assert len(ranks.collectives) == collectives * 3


def test_an_error_with_a_long_message_of_rank_0_is_raised_on_all(ranks: ThreadRanks) -> None:
    act = failing_on(0, CheckpointDamaged("x" * LONG), ranks)
    results = ranks.run(lambda _: from_rank_0(lambda: [b"%d" % act()]))
    assert [type(result) for result in results] == [CheckpointDamaged] * 3
    assert {str(result) for result in results} == {"x" * LONG}


def test_a_message_that_one_rank_cannot_make_is_an_error_on_all(ranks: ThreadRanks) -> None:
    act = failing_on(1, MemoryError("out of memory"), ranks)

    def messages() -> Sequence[bytes]:
        return [b"%d" % act()] * 3

    results = ranks.run(lambda _: exchange(messages))
    assert [type(result) for result in results] == [RankFailed, MemoryError, RankFailed]


NO_MEMORY = [MemoryError("out of memory"), RuntimeError("DefaultCPUAllocator: not enough memory")]
"""Python's, and what PyTorch raises for memory of the CPU."""


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_messages_that_one_rank_has_no_memory_for_are_an_error_on_all(
    ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    act = failing_on(1, error, ranks)
    monkeypatch.setattr(ByteExchange, "reserve", lambda *_, **__: act())
    results = ranks.run(lambda rank: exchange(lambda: [b"0" * LONG] * 3))
    assert [type(result) for result in results] == [RankFailed, CheckpointError, RankFailed]
    assert str(results[1]) == f"could not prepare messages between ranks: {error}"


def test_message_that_rank_0_has_no_memory_for_is_an_error_on_all(
    ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    act = failing_on(0, MemoryError("out of memory"), ranks)
    framed = agreement._framed

    def lack(error: Exception | None, contents: Sequence[bytes]) -> bytes:
        if error is None:
            act()
        return framed(error, contents)

    monkeypatch.setattr(agreement, "_framed", lack)
    results = ranks.run(lambda _: from_rank_0(lambda: [b"0" * LONG]))
    assert [type(result) for result in results] == [MemoryError, RankFailed, RankFailed]


def test_what_rank_0_reads_is_told_to_all(ranks: ThreadRanks) -> None:
    def act(rank: int) -> list[bytes]:
        return from_rank_0(lambda: [b"%d" % rank, b"", b"of rank %d" % rank])

    assert ranks.run(act) == [[b"0", b"", b"of rank 0"]] * 3


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_what_rank_0_tells_and_one_rank_has_no_memory_for_is_an_error_on_all(
    ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    act = failing_on(1, error, ranks)

    def on_group_device(content: torch.Tensor) -> torch.Tensor:
        act()
        return content

    monkeypatch.setattr(agreement, "on_group_device", on_group_device)
    results = ranks.run(lambda _: from_rank_0(lambda: [b"0" * LONG]))
    assert [type(result) for result in results] == [RankFailed, CheckpointError, RankFailed]
