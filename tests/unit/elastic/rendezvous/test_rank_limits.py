"""Claims about which numbers of ranks fit: exact, and short."""

import base64
import math
import zlib
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.rank_limits import (
    MOST_RANKS,
    RankLimits,
    decode_fitting,
    largest_sum,
    largest_sum_of_few,
)
from keepstep.elastic.rendezvous.records import NodeRecord
from tests.unit.elastic.rendezvous.test_rank_assignment import record

NUMBERS = st.sets(st.integers(1, 300), min_size=1) | st.sets(
    st.integers(1, MOST_RANKS), min_size=1, max_size=5
)


@given(NUMBERS)
def test_exactly_the_numbers_that_fit_are_allowed(numbers: set[int]) -> None:
    limits = RankLimits.of(numbers)
    assert {ranks for ranks in range(-1, MOST_RANKS + 2) if limits.allow(ranks)} == numbers


@given(NUMBERS)
def test_a_number_that_fits_is_a_multiple(numbers: set[int]) -> None:
    assert RankLimits.of(numbers).multiple == math.gcd(*numbers)


@pytest.mark.parametrize(
    ("numbers", "most_characters"),
    [
        (range(8, MOST_RANKS + 1, 8), 0),
        ({2**power for power in range(15)}, 100),
        (set(range(1, MOST_RANKS + 1)) - {7}, 60),
        # Without any order: a bit for each number.
        ({n for n in range(1, MOST_RANKS + 1) if zlib.crc32(bytes([n >> 8, n & 255])) % 2}, 2800),
    ],
)
def test_record_stays_short(numbers: set[int], most_characters: int) -> None:
    limits = RankLimits.of(numbers)
    assert len(limits.fitting) <= most_characters
    assert all(limits.allow(ranks) == (ranks in numbers) for ranks in range(1, MOST_RANKS + 1))


@pytest.mark.parametrize("numbers", [(), (0, 4), (4, MOST_RANKS + 1)])
def test_numbers_out_of_range_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="from 1 to"):
        RankLimits.of(numbers)


def test_limits_say_in_words_what_they_allow() -> None:
    assert RankLimits(4).describe() == "a multiple of 4"
    assert RankLimits(4, 8).describe() == "a multiple of 4, at most 8"
    assert RankLimits.of([3, 4]).describe() == "one of 3, 4"
    powers = RankLimits.of(2**power for power in range(10))
    assert powers.describe() == "one of 1, 2, 4, 8, 16, 32, 64, 128, ..."


@pytest.mark.parametrize(
    "fitting",
    [
        "!",
        "aGk=",
        base64.b64encode(zlib.compress(bytes(10**6))).decode(),
        RankLimits.of([2, 3]).fitting[:-4],
    ],
)
def test_record_with_unreadable_numbers_is_refused(fitting: str) -> None:
    with pytest.raises(ValueError, match="numbers of ranks"):
        decode_fitting(fitting)
    good = record("a").to_json()
    with pytest.raises(UsageError, match="numbers of ranks"):
        NodeRecord.from_json(good | {"fitting_ranks": fitting})


def test_record_of_an_older_version_allows_what_its_multiple_allows() -> None:
    older = record("a").to_json() | {"rank_multiple": 4, "max_ranks": 8}
    del older["fitting_ranks"]
    read = NodeRecord.from_json(older)
    assert (read.rank_multiple, read.max_ranks, read.fitting_ranks) == (4, 8, "")


@given(st.lists(st.integers(1, 5), max_size=7), st.sets(st.integers(1, 30), min_size=1))
def test_largest_number_that_any_nodes_have_together_is_found(
    sizes: list[int], numbers: set[int]
) -> None:
    limits = RankLimits.of(numbers)
    chosen = largest_sum(sizes, limits)
    choices = [
        choice
        for count in range(1, len(sizes) + 1)
        for choice in combinations(range(len(sizes)), count)
        if limits.allow(sum(sizes[n] for n in choice))
    ]
    most = max((sum(sizes[n] for n in choice) for choice in choices), default=0)
    assert sum(sizes[n] for n in chosen) == most
    best = [choice for choice in choices if sum(sizes[n] for n in choice) == most]
    # Of equal choices the one that has the first nodes.
    assert tuple(chosen) == max(best, key=lambda c: [n in c for n in range(len(sizes))], default=())


@given(
    st.lists(st.integers(1, 5), max_size=7),
    st.integers(1, 7),
    st.sets(st.integers(1, 30), min_size=1),
)
def test_largest_number_that_so_many_nodes_have_together_is_found(
    sizes: list[int], most_nodes: int, numbers: set[int]
) -> None:
    limits = RankLimits.of(numbers)
    chosen = largest_sum_of_few(sizes, most_nodes, limits)
    most = max(
        (
            total
            for count in range(1, min(most_nodes, len(sizes)) + 1)
            for choice in combinations(sizes, count)
            if limits.allow(total := sum(choice))
        ),
        default=0,
    )
    assert sum(sizes[n] for n in chosen) == most
    assert len(set(chosen)) == len(chosen) <= most_nodes
