"""Claims about messages between ranks, and about a rank that fails; the ranks are threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError, RankFailed
from keepstep.checkpoint.ranks import control_group
from keepstep.checkpoint.ranks.agreement import union_of_all_ranks
from tests.unit.checkpoint.thread_ranks import ThreadRanks

LONG = 300_000


@pytest.fixture
def ranks() -> ThreadRanks:
    return ThreadRanks(3)


def failing_on(rank: int, error: Exception, ranks: ThreadRanks) -> Callable[[], int]:
    def act() -> int:
        if ranks.rank() == rank:
            raise error
        return ranks.rank()

    return act


def test_what_fails_on_no_rank_returns_on_each(ranks: ThreadRanks) -> None:
    assert ranks.run(lambda rank: ranks.group.run_on_all_ranks(lambda: rank + 1)) == [1, 2, 3]


def test_what_fails_on_one_rank_is_raised_on_all_with_the_reason(ranks: ThreadRanks) -> None:
    act = failing_on(1, MemoryError("out of memory"), ranks)
    results = ranks.run(lambda _: ranks.group.run_on_all_ranks(act))
    assert [type(result) for result in results] == [RankFailed, MemoryError, RankFailed]
    assert str(results[0]) == "rank 1: out of memory"


def test_damage_that_one_rank_finds_is_damage_on_all(ranks: ThreadRanks) -> None:
    act = failing_on(2, CheckpointDamaged("a byte was changed"), ranks)
    results = ranks.run(lambda _: ranks.group.run_on_all_ranks(act))
    assert [type(result) for result in results] == [CheckpointDamaged] * 3


def test_each_rank_gets_the_messages_to_it(ranks: ThreadRanks) -> None:
    results = ranks.run(
        lambda rank: ranks.group.all_to_all(lambda: {to: b"%d" % rank * to for to in range(3)})
    )
    assert results == [[b"", b"", b""], [b"0", b"1", b"2"], [b"00", b"11", b"22"]]


def test_what_all_share_reaches_all_in_order(ranks: ThreadRanks) -> None:
    for shares in ([None] * 3, ["a", None, "b"], [["x" * LONG], {}, 0], ["é", "", "1" * 1024]):
        results = ranks.run(
            lambda rank, shares=shares: ranks.group.run_and_share(
                lambda: rank, lambda own: shares[own]
            )
        )
        assert results == [(rank, shares) for rank in range(3)]


def test_a_rank_that_gets_nothing_has_an_empty_message(ranks: ThreadRanks) -> None:
    def act(rank: int) -> list[bytes]:
        sent = {2: b"x" * LONG} if rank == 1 else {}
        return [bytes(message) for message in ranks.group.all_to_all(lambda: sent)]

    assert ranks.run(act) == [[b""] * 3, [b""] * 3, [b"", b"x" * LONG, b""]]


@pytest.mark.parametrize("source", [0, 2])
def test_one_rank_tells_all_any_number_of_contents(ranks: ThreadRanks, source: int) -> None:
    for told in ([], [b""], [b"", b"x" * LONG, b"end"]):
        results = ranks.run(
            lambda rank, told=told: ranks.group.broadcast(
                lambda: told if rank == source else 1 / 0, source=source
            )
        )
        assert [[bytes(data) for data in result] for result in results] == [told] * 3


@pytest.mark.parametrize("beyond", [-30, -1, 0, 1, LONG])
@pytest.mark.parametrize("room", [control_group._SHORT_NBYTES // 3, control_group._SHORT_NBYTES])
def test_messages_arrive_whether_or_not_they_travel_with_their_lengths(
    ranks: ThreadRanks, room: int, beyond: int
) -> None:
    """Also if one rank's alone is too long for that, on which all ranks have to agree."""
    data = [b"a", b"b" * (room + beyond), b""]

    def act(rank: int) -> tuple[list[bytes], list[bytes], list[object]]:
        group = ranks.group
        return (
            list(map(bytes, group.all_to_all(lambda: {2: data[rank]}))),
            list(map(bytes, group.broadcast(lambda: data, source=1))),
            list(group.gather(data[rank].decode())),
        )

    texts = [part.decode() for part in data]
    expected = [([b""] * 3, data, texts)] * 2 + [(data, data, texts)]
    assert ranks.run(act) == expected


def test_texts_that_any_rank_has_are_those_of_all(ranks: ThreadRanks) -> None:
    names = [f"block.{number}" for number in range(100)]
    for texts in ([names] * 3, [names[rank * 40 :] for rank in range(3)], [[], ["é"], []]):
        results = ranks.run(lambda rank, texts=texts: union_of_all_ranks(texts[rank], ranks.group))
        assert results == [set().union(*texts)] * 3


def test_an_error_with_a_long_message_of_rank_0_is_raised_on_all(ranks: ThreadRanks) -> None:
    act = failing_on(0, CheckpointDamaged("x" * LONG), ranks)
    results = ranks.run(lambda _: ranks.group.broadcast(lambda: [b"%d" % act()]))
    assert [type(result) for result in results] == [CheckpointDamaged] * 3
    assert {str(result) for result in results} == {"x" * LONG}


def test_a_message_that_one_rank_cannot_make_is_an_error_on_all(ranks: ThreadRanks) -> None:
    act = failing_on(1, MemoryError("out of memory"), ranks)

    results = ranks.run(lambda _: ranks.group.all_to_all(lambda: {0: b"%d" % act()}))
    assert [type(result) for result in results] == [RankFailed, MemoryError, RankFailed]


NO_MEMORY = [MemoryError("out of memory"), RuntimeError("DefaultCPUAllocator: not enough memory")]
"""Python's, and what PyTorch raises for memory of the CPU."""


def lack_memory(rank: int, error: Exception, ranks: ThreadRanks) -> Callable[..., torch.Tensor]:
    """Return what takes the place of `torch.empty` where a rank has no memory for a message."""
    act, empty = failing_on(rank, error, ranks), torch.empty

    def lack(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        if shape[0] >= LONG:
            act()
        return empty(*shape, dtype=dtype)

    return lack


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_messages_that_one_rank_has_no_memory_for_are_an_error_on_all(
    ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(control_group.torch, "empty", lack_memory(1, error, ranks))
    results = ranks.run(
        lambda _: ranks.group.all_to_all(lambda: dict.fromkeys(range(3), b"0" * LONG))
    )
    assert [type(result) for result in results] == [RankFailed, CheckpointError, RankFailed]
    assert str(results[1]) == f"could not prepare messages between ranks: {error}"


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_what_rank_0_tells_and_one_rank_has_no_memory_for_is_an_error_on_all(
    ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(control_group.torch, "empty", lack_memory(1, error, ranks))
    results = ranks.run(lambda _: ranks.group.broadcast(lambda: [b"0" * LONG]))
    assert [type(result) for result in results] == [RankFailed, CheckpointError, RankFailed]


def test_errors_name_ranks_by_their_numbers_in_the_default_group(ranks: ThreadRanks) -> None:
    ranks.group.global_ranks = (4, 6, 9)
    act = failing_on(1, MemoryError("out of memory"), ranks)
    results = ranks.run(lambda _: ranks.group.run_on_all_ranks(act))
    assert str(results[0]) == "rank 6: out of memory"
