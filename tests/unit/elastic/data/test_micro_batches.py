"""Claims about micro-batches: as many on all ranks, and a mean that stays exact."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.elastic.data.micro_batches import Division, divide
from keepstep.elastic.data.order import share
from keepstep.elastic.errors import UsageError


@given(st.integers(1, 70), st.integers(1, 80), st.data())
def test_micro_batches_of_all_ranks_are_equal_in_number_and_keep_the_mean(
    global_batch: int, at_most: int, data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, global_batch))
    ranks = [divide(global_batch, at_most, rank, world_size) for rank in range(world_size)]
    counts = {len(divisions) for divisions in ranks}
    shares = [share(global_batch, rank, world_size) for rank in range(world_size)]
    largest = max(end - begin for begin, end in shares)
    assert counts == {-(-largest // at_most)}
    weights = []
    for (begin, end), divisions in zip(shares, ranks, strict=True):
        own = [Fraction(0)] * (end - begin)
        for division in divisions:
            assert 1 <= division.end - division.begin <= at_most
            for sample in range(division.begin, division.end):
                own[sample] += Fraction(division.loss_scale).limit_denominator(10**6) / (
                    division.end - division.begin
                )
        weights += own
    # The average over ranks gives each sample the same weight.
    assert {weight / world_size for weight in weights} == {Fraction(1, global_batch)}


def test_a_share_with_fewer_samples_than_micro_batches_repeats_one_without_weight() -> None:
    assert divide(8, 1, 0, 3) == (Division(0, 1, 0.0), Division(0, 1, 3 / 8), Division(1, 2, 3 / 8))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="micro_batch=0: give at least 1"):
        divide(8, 0, 0, 1)
    with pytest.raises(UsageError, match="without a sample"):
        divide(2, 1, 0, 3)
