"""Claims about streams: a position means the same samples for any world size, resumed or not."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from keepstep.elastic.data.datasets import is_stream
from keepstep.elastic.data.stream_batches import StreamBatches
from keepstep.elastic.errors import UsageError

GLOBAL_BATCH = 5


class Numbers:
    """A stream that shuffles by the epoch and draws from a global generator."""

    def __init__(self, size: int = 23) -> None:
        self.size = size
        self.epoch = 0
        self.reads = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self.from_number(0)

    def from_number(self, first: int) -> Iterator[Any]:
        for number in range(first, self.size):
            self.reads += 1
            yield self.epoch, number, random.random()


class PositionedNumbers(Numbers):
    """The same with a state."""

    def __init__(self, size: int = 23) -> None:
        super().__init__(size)
        self.next = self.start = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for sample in self.from_number(start):
            self.next = sample[1] + 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Any) -> None:
        self.next = self.start = state["next"]


def batches_of(stream: Any) -> StreamBatches[Any]:
    return StreamBatches(stream, GLOBAL_BATCH, 7, lambda samples: samples)


def read(end: int, world_size: int = 1) -> list[list[Any]]:
    """Return the first global batches, read by ranks with streams of their own."""
    ranks = [
        batches_of(Numbers()).from_position(0, end, rank, world_size) for rank in range(world_size)
    ]
    return [[sample for share in shares for sample in share] for shares in zip(*ranks, strict=True)]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_shares_of_any_world_size_add_up_to_the_global_batch(world_size: int) -> None:
    assert read(9, world_size) == read(9)


def test_an_epoch_ends_with_its_last_whole_batch_and_the_next_one_is_announced() -> None:
    numbers = [[sample[:2] for sample in batch] for batch in read(5)]
    assert numbers[3] == [(0, number) for number in range(15, 20)]
    assert numbers[4] == [(1, number) for number in range(5)]


@given(st.integers(1, 12), st.booleans())
def test_resumed_stream_goes_on_with_the_same_samples(first: int, is_positioned: bool) -> None:
    kind = PositionedNumbers if is_positioned else Numbers
    undisturbed = read(14)
    before = batches_of(kind())
    assert list(before.from_position(0, first, 0, 1)) == undisturbed[:first]
    state = before.state(first)
    assert (state is not None) == is_positioned
    stream = kind()
    after = batches_of(stream)
    assert list(after.from_position(first, 14, 1, 2, state)) == [
        batch[2:] for batch in undisturbed[first:]
    ]
    read_anew = 14 - first if is_positioned else 14
    assert stream.reads <= read_anew * GLOBAL_BATCH + 2 * (GLOBAL_BATCH - 1) + GLOBAL_BATCH


def test_state_of_another_position_is_not_given() -> None:
    batches = batches_of(PositionedNumbers())
    assert batches.state(0) is None
    next(batches.from_position(0, 4, 0, 1))
    assert batches.state(0) is None
    assert batches.state(1) is not None


def test_the_same_stream_is_read_again_from_a_position_before_it() -> None:
    """As after a failure in a process that stays."""
    batches = batches_of(PositionedNumbers())
    shares = batches.from_position(0, 9, 0, 1)
    next(shares)
    state = batches.state(1)
    undisturbed = read(9)
    assert [next(shares), next(shares)] == undisturbed[1:3]
    assert list(batches.from_position(1, 9, 0, 1, state)) == undisturbed[1:]


@pytest.mark.parametrize("stream", [Numbers(3), iter([(0, 1, 2.0)])])
def test_stream_without_one_whole_batch_is_an_error(stream: Any) -> None:
    with pytest.raises(UsageError, match="fewer than one global batch of 5"):
        list(batches_of(stream).from_position(0, 2, 0, 1))


def test_streams_are_told_from_datasets_with_an_index() -> None:
    class Iterated(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    assert is_stream(Iterated())
    assert is_stream(iter([1]))
    assert not is_stream([1])
