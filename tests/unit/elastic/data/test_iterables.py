"""Claims about plain iterables: every rank reads all of one, and resumes it, if it can, at once."""

import io
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import keepstep
from keepstep.elastic.data.datasets import is_stream
from keepstep.elastic.data.partitions import Partition
from keepstep.elastic.data.position import NO_POSITION, Position, StreamPosition
from keepstep.elastic.data.sources import as_source
from keepstep.elastic.data.split_stream import SplitStream
from keepstep.elastic.errors import UsageError
from ops.bench.data_runs import Run, data_pass, play

GLOBAL_BATCH = 5


class Numbers:
    """Shuffles by the epoch that is set, and counts its reads."""

    def __init__(self, size: int = 23) -> None:
        self.size = size
        self.epoch = 0
        self.reads = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self.from_number(0)

    def from_number(self, first: int) -> Iterator[tuple[int, int]]:
        for number in range(first, self.size):
            self.reads += 1
            yield self.epoch, number


class PositionedNumbers(Numbers):
    """The same with a state."""

    def __init__(self, size: int = 23) -> None:
        super().__init__(size)
        self.next = self.start = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        start, self.start = self.start, 0
        for sample in self.from_number(start):
            self.next = sample[1] + 1
            yield sample

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: Any) -> None:
        self.next = self.start = state["next"]


def test_a_batch_goes_on_in_the_next_epoch_which_is_announced() -> None:
    (batch,) = play(Numbers, GLOBAL_BATCH, 5, []).batches[4]
    assert batch == [(0, 20), (0, 21), (0, 22), (1, 0), (1, 1)]


@pytest.mark.parametrize("kind", [Numbers, PositionedNumbers])
def test_a_resumed_iterable_is_read_past_only_within_its_epoch_and_without_a_state(
    kind: type[Numbers], caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Numbers] = []

    def make() -> Numbers:
        made.append(kind())
        return made[-1]

    with caplog.at_level(logging.INFO):
        play(make, GLOBAL_BATCH, 12, [Run(1, 0, 8, 0)])
    last_epoch = 12 * GLOBAL_BATCH - 8 * GLOBAL_BATCH
    read_past = 8 * GLOBAL_BATCH - 23
    assert made[-1].reads == last_epoch + (read_past if kind is Numbers else 0)
    assert (f"reading past {read_past} samples" in caplog.text) == (kind is Numbers)


class DrawnNumbers(PositionedNumbers):
    """Draws its order when it is iterated or asked for its state first, as torchdata's loader."""

    order: list[int] | None = None

    def drawn(self) -> list[int]:
        self.order = self.order or torch.randperm(self.size).tolist()
        return self.order

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(self.epoch, number) for number in self.drawn()])

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.drawn()}


def test_order_does_not_depend_on_whether_the_position_is_asked_for_before_anything_is_read() -> (
    None
):
    """The state is a mixture's source without a draw so far; ranks read other orders of it."""
    orders = []
    for rank in range(3):
        partition = Partition(0, 1, key=5, shuffle=True)
        reader = SplitStream(lambda part, parts: DrawnNumbers()).open_partition(partition, None)
        torch.manual_seed(rank)
        if rank:
            reader.state()
        orders.append([reader.read() for _ in range(23)])
    assert orders[0] == orders[1] == orders[2]


def test_position_of_another_batch_is_not_given() -> None:
    data = data_pass(PositionedNumbers(), GLOBAL_BATCH, 4)
    assert data.stream_position(Position()) is None
    next(data.from_position(Position(), 0, 1))
    assert data.stream_position(Position()) is None
    assert data.stream_position(Position(1, 1)) is not None


def test_the_same_iterable_is_read_again_from_a_position_before_it() -> None:
    """As after a failure in a process that stays."""
    undisturbed = [batch for (batch,) in play(PositionedNumbers, GLOBAL_BATCH, 9, []).batches]
    data = data_pass(PositionedNumbers(), GLOBAL_BATCH, 9)
    batches = data.from_position(Position(), 0, 1)
    next(batches)
    reached = data.stream_position(Position(1, 1))
    assert [next(batches), next(batches)] == undisturbed[1:3]
    assert list(data.from_position(Position(1, 1, reached), 0, 1)) == undisturbed[1:]


def test_a_position_after_that_of_the_snapshot_is_reached_by_reading_up_to_it() -> None:
    """As when samples are left out after a roll back."""
    undisturbed = [batch for (batch,) in play(PositionedNumbers, GLOBAL_BATCH, 9, []).batches]
    before = data_pass(PositionedNumbers(), GLOBAL_BATCH, 9)
    next(before.from_position(Position(), 0, 1))
    reached = before.stream_position(Position(1, 1))
    dataset = PositionedNumbers()
    after = data_pass(dataset, GLOBAL_BATCH, 9)
    assert list(after.from_position(Position(1, 4, reached), 0, 1)) == undisturbed[4:]
    assert dataset.reads == 8 * GLOBAL_BATCH


@pytest.mark.parametrize("stream", [Numbers(0), SplitStream(lambda *_: iter([(0, 1)]))])
def test_iterable_that_ends_for_good_is_an_error(stream: Any) -> None:
    with pytest.raises(UsageError, match="gave no sample; give parts that have some, and that can"):
        list(data_pass(stream, GLOBAL_BATCH, 2).from_position(Position(), 0, 1))


class Once(Iterator[int]):
    def __next__(self) -> int:
        return 1


@pytest.mark.parametrize(
    "stream",
    [iter(Numbers()), zip([1], [2], strict=True), map(abs, [1]), io.StringIO("a"), Once()],
    ids=lambda stream: type(stream).__name__,
)
def test_what_can_be_read_only_once_is_refused(stream: Any) -> None:
    """After a recovery in a process that stays, it was read on from where it was."""
    refused = rf"a {type(stream).__name__} can be read only once.*keepstep\.SplitStream\(make"
    with pytest.raises(UsageError, match=refused):
        data_pass(stream, GLOBAL_BATCH, 2)
    with pytest.raises(UsageError, match=refused):
        keepstep.Mixture([Numbers(), stream], [1, 1])


class SetBack(Numbers):
    """Is its own iterator, which begins again whenever it is asked for."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self._numbers = super().__iter__()
        return self

    def __next__(self) -> tuple[int, int]:
        return next(self._numbers)


class PositionedOnce(PositionedNumbers):
    """Is its own iterator, and goes where it is sent."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        self.next += 1
        return self.epoch, self.next - 1


def generated(*_: int) -> SplitStream[tuple[int, int]]:
    return SplitStream(lambda part, parts: iter(Numbers()), most=1)


@pytest.mark.parametrize("make", [SetBack, PositionedOnce, generated])
def test_iterator_that_can_be_set_back_is_read_again_after_a_recovery(make: Any) -> None:
    undisturbed = [batch for (batch,) in play(Numbers, GLOBAL_BATCH, 4, []).batches]
    data = data_pass(make(), GLOBAL_BATCH, 4)
    batches = data.from_position(Position(), 0, 1)
    next(batches)
    reached = data.stream_position(Position(1, 1))
    assert [next(batches), next(batches)] == undisturbed[1:3]
    assert list(data.from_position(Position(1, 1, reached), 0, 1)) == undisturbed[1:]


def test_streams_are_distinguished_from_datasets_with_an_index() -> None:
    class Iterated(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    assert is_stream(Iterated())
    assert is_stream(iter([1]))
    assert not is_stream([1])


def test_an_iterable_can_be_sent_to_loader_processes_that_are_not_forked() -> None:
    assert ForkingPickler.dumps(as_source(PositionedNumbers()))


def test_a_state_comes_back_in_the_types_that_the_iterable_uses() -> None:
    class Counting(PositionedNumbers):
        def state_dict(self) -> dict[str, Any]:
            return {"next": self.next, "seen": Counter(a=self.next), "order": OrderedDict(b=1)}

        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state)
            assert (type(state["seen"]), type(state["order"])) == (Counter, OrderedDict)
            loaded.append(state)

    loaded: list[Any] = []
    play(Counting, GLOBAL_BATCH, 3, [Run(1, 0, 2, 0)])
    assert [state["next"] for state in loaded] == [2 * GLOBAL_BATCH]


def test_a_state_is_asked_for_only_where_it_is_stored() -> None:
    class Asked(PositionedNumbers):
        asked = 0

        def state_dict(self) -> dict[str, int]:
            self.asked += 1
            return super().state_dict()

    dataset = Asked()
    data = data_pass(dataset, GLOBAL_BATCH, 9)
    batches = data.from_position(Position(), 0, 1)
    for _ in range(4):
        next(batches)
    assert dataset.asked == 0
    reached = data.stream_position(Position(4, 4))
    assert data.stream_position(Position(4, 4)) == reached
    assert dataset.asked == 1
    next(batches)
    assert next(iter(data.from_position(Position(4, 4, reached), 0, 1)))[0] == (0, 20)


def test_no_position_is_given_while_a_batch_was_read_in_part() -> None:
    class Damaged(PositionedNumbers):
        def from_number(self, first: int) -> Iterator[tuple[int, int]]:
            for sample in super().from_number(first):
                if sample[1] == 2 * GLOBAL_BATCH + 1:
                    raise OSError("the file ends")
                yield sample

    data = data_pass(Damaged(), GLOBAL_BATCH, 4)
    batches = data.from_position(Position(), 0, 1)
    next(batches), next(batches)
    with pytest.raises(OSError, match="the file ends"):
        next(batches)
    assert data.stream_position(Position(2, 2)) is None


def test_no_position_is_restored_where_no_stream_was_read() -> None:
    assert StreamPosition.restore(NO_POSITION, {}, 0, 1) is None
