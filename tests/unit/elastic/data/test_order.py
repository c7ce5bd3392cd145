"""Claims about the order of data: it depends on seed and step, never on the world size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.elastic.data.order import DataOrder, permute
from keepstep.elastic.errors import UsageError

orders = st.integers(1, 40).flatmap(
    lambda batch: st.builds(
        DataOrder,
        samples=st.integers(batch, 300),
        global_batch=st.just(batch),
        seed=st.integers(0, 2**31),
        shuffle=st.booleans(),
    )
)


@given(orders, st.integers(0, 50), st.data())
def test_shares_of_any_world_size_add_up_to_the_global_batch(
    order: DataOrder, step: int, data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, order.global_batch))
    shares = [list(order.local_indices(step, rank, world_size)) for rank in range(world_size)]
    assert [index for share in shares for index in share] == list(order.indices(step))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    weights = [order.loss_scale(rank, world_size) for rank in range(world_size)]
    assert sum(weights) == pytest.approx(world_size)


@given(orders, st.integers(0, 5))
def test_an_epoch_contains_each_of_its_samples_once(order: DataOrder, epoch: int) -> None:
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    seen = [index for step in steps for index in order.indices(step)]
    assert len(seen) == len(set(seen)) == order.steps_per_epoch * order.global_batch
    assert all(0 <= index < order.samples for index in seen)


@given(st.integers(1, 500), st.integers(0, 2**63))
def test_permute_is_a_permutation_for_every_size_and_key(size: int, key: int) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    first, other = DataOrder(1000, 100, seed=1), DataOrder(1000, 100, seed=2)
    assert list(first.indices(0)) != list(first.indices(10))
    assert list(first.indices(0)) != list(other.indices(0))
    assert list(first.indices(0)) != sorted(first.indices(0))


def test_impossible_sizes_are_rejected_and_the_error_names_the_least_possible() -> None:
    with pytest.raises(UsageError, match="fewer than one global batch"):
        DataOrder(3, 4)
    with pytest.raises(UsageError, match="at least 8"):
        DataOrder(100, 4).local_indices(0, 0, 8)
