"""Claims about sources: whatever ranks, loader processes and failures there are, one order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keepstep
from keepstep.elastic.data import partition_batches
from keepstep.elastic.data.collation import ShareCollate
from keepstep.elastic.data.data_pass import DataPass
from keepstep.elastic.data.datasets import Source
from keepstep.elastic.data.partition_batches import RankShares
from keepstep.elastic.data.partitions import Partitioning
from keepstep.elastic.data.position import Position
from keepstep.elastic.data.sample_randomness import seed_generators
from keepstep.elastic.data.sources import as_source
from keepstep.elastic.errors import UsageError
from ops.bench.data_runs import Run, data_pass, play
from tests.examples import examples
from tests.unit.elastic.data.simulation import loader_in_this_process

__all__ = ["loader_in_this_process"]

STEPS = 12
Make = Callable[[], Any]


def drawn() -> tuple[float, float, float]:
    """Draw from all global generators, as an augmentation does."""
    return torch.rand(()).item(), random.random(), float(np.random.rand())


class Indexed:
    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.name, index, drawn()


class Iterated:
    """An iterable without a state, of which a part can be made."""

    def __init__(self, name: str, size: int, part: int = 0, parts: int = 1) -> None:
        self.name = name
        self.numbers = range(part, size, parts)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers:
            yield self.name, self.epoch, number, drawn()


class Loader(Iterated):
    """The same with a state, of types that JSON has not."""

    start = next = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for place, number in enumerate(self.numbers[start:], start):
            self.next = place + 1
            yield self.name, self.epoch, number, drawn()

    def state_dict(self) -> dict[str, Any]:
        return {"next": torch.tensor([self.next]), 3: (self.next,)}

    def load_state_dict(self, state: Any) -> None:
        assert state[3] == (state["next"].item(),)
        self.next = self.start = state[3][0]


def read_shard(shard: tuple[str, int, int], offset: int) -> Iterator[Any]:
    """Read every other number, so that offsets are not numbers of samples."""
    name, number, size = shard
    for place in range(offset, 2 * size, 2):
        yield (name, number, place, drawn()), place + 2


def sharded(name: str, sizes: list[int]) -> Any:
    return keepstep.ShardedStream([(name, n, size) for n, size in enumerate(sizes)], read_shard)


def document(sample: Any) -> list[int]:
    """Return as many tokens as follows from what the sample is and drew."""
    text = repr(sample)
    return list(text.encode()[: 3 + int(sample[-1][1] * 40)])


class Tokenized:
    """A source of documents."""

    def __init__(self, source: Any) -> None:
        self._source: Source[Any] = as_source(source)

    def most_partitions(self) -> int | None:
        return self._source.most_partitions()

    def open_partition(self, partition: Any, state: Any) -> Any:
        return TokenizedReader(self._source.open_partition(partition, state))


class TokenizedReader:
    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.state = reader.state

    def read(self) -> list[int]:
        return document(self._reader.read())


names = st.sampled_from("abc")
indexed: st.SearchStrategy[Make] = st.builds(
    lambda n, size: lambda: Indexed(n, size), names, st.integers(8, 30)
)
streams: st.SearchStrategy[Make] = st.one_of(
    st.builds(lambda n, size: lambda: Iterated(n, size), names, st.integers(1, 30)),
    st.builds(lambda n, size: lambda: Loader(n, size), names, st.integers(1, 30)),
    st.builds(
        lambda n, kind, size: (
            lambda: keepstep.SplitStream(lambda part, parts: kind(n, size, part, parts))
        ),
        names,
        st.sampled_from([Iterated, Loader]),
        st.integers(8, 40),
    ),
    st.builds(
        lambda n, sizes: lambda: sharded(n, sizes),
        names,
        st.lists(st.integers(1, 9), min_size=1, max_size=12),
    ),
)


def mixtures(inner: st.SearchStrategy[Make]) -> st.SearchStrategy[Make]:
    return st.lists(st.tuples(inner, st.floats(0.1, 9)), min_size=1, max_size=3).map(
        lambda pairs: (
            lambda: keepstep.Mixture([make() for make, _ in pairs], [weight for _, weight in pairs])
        )
    )


def composed(inner: st.SearchStrategy[Make]) -> st.SearchStrategy[Make]:
    shuffled = st.builds(
        lambda make, block: lambda: keepstep.Shuffled(make(), block), inner, st.integers(1, 7)
    )
    return mixtures(inner) | shuffled


sources = st.recursive(indexed | streams, composed, max_leaves=4)
packed = st.builds(
    lambda make, length: lambda: keepstep.Packed(Tokenized(make()), length),
    sources,
    st.integers(1, 90),
)
read_in_order = st.one_of(streams, composed(sources), packed)
runs = st.integers(1, 8).flatmap(
    lambda global_batch: st.tuples(
        st.just(global_batch),
        st.lists(
            st.builds(
                Run,
                world_size=st.integers(1, global_batch),
                workers=st.integers(0, 3),
                read=st.integers(0, 7),
                lost=st.integers(0, 3),
            ),
            max_size=4,
        ),
    )
)


def plain(sample: Any) -> Any:
    if isinstance(sample, keepstep.PackedRow):
        return sample.tokens.tolist(), sample.documents.tolist()
    return sample


KINDS: dict[str, Make] = {
    "sharded": lambda: sharded("a", [3, 5, 2, 7, 4, 4]),
    "split": lambda: keepstep.SplitStream(lambda part, parts: Iterated("a", 30, part, parts)),
    "loaders": lambda: keepstep.SplitStream(lambda part, parts: Loader("a", 30, part, parts)),
    "mixture": lambda: keepstep.Mixture([sharded("a", [4] * 7), Indexed("b", 30)], [2, 1]),
    "shuffled": lambda: keepstep.Shuffled(sharded("a", [4] * 7), 3),
    "packed": lambda: keepstep.Packed(Tokenized(sharded("a", [4] * 7)), 40),
    "iterable": lambda: Iterated("a", 30),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_read_in_one_order(kind: str, loader_in_this_process: None) -> None:
    failures = [Run(3, 2, 5, 2), Run(2, 0, 4, 1), Run(4, 3, 2, 0), Run(1, 2, 0, 0)]
    assert_same_reads(KINDS[kind], 5, failures)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(read_in_order, runs)
def test_order_does_not_depend_on_ranks_loader_processes_or_failures(
    loader_in_this_process: None, make: Make, schedule: tuple[int, list[Run]]
) -> None:
    assert_same_reads(make, *schedule)


def assert_same_reads(make: Make, global_batch: int, failures: list[Run]) -> None:
    """Assert that every reading of every batch is what an undisturbed run reads."""
    undisturbed = play(make, global_batch, STEPS, []).batches
    disturbed = play(make, global_batch, STEPS, failures).batches
    for read, (expected,) in zip(disturbed, undisturbed, strict=True):
        assert read
        for samples in read:
            assert list(map(plain, samples)) == list(map(plain, expected))


def samples_of(source: Any, global_batch: int, steps: int) -> list[Any]:
    batches = play(lambda: source, global_batch, steps, []).batches
    return [sample for (samples,) in batches for sample in samples]


def test_an_epoch_of_a_sharded_stream_has_each_sample_once() -> None:
    samples = samples_of(sharded("a", [3] * 8), 4, 12)
    epochs = [{sample[:3] for sample in samples[begin : begin + 24]} for begin in (0, 24)]
    assert epochs == [{("a", shard, 2 * number) for shard in range(8) for number in range(3)}] * 2
    assert [s[:3] for s in samples[:24]] != [s[:3] for s in samples[24:]]


def test_a_resumed_shard_is_opened_at_its_offset_and_by_the_ranks_of_its_partition_only() -> None:
    opened: list[tuple[int, int, int]] = []

    def read(shard: int, offset: int) -> Iterator[tuple[int, int]]:
        opened.append((rank, shard, offset))
        return ((shard, place + 1) for place in range(offset, 100))

    rank = 0
    stream = keepstep.ShardedStream(range(4), read)
    before = data_pass(stream, 4, 50)
    batches = before.from_position(Position(), 0, 1)
    for _ in range(9):
        next(batches)
    reached = before.stream_position(Position(9, 9))
    opened.clear()
    for rank in range(2):
        after = data_pass(stream, 4, 50)
        next(after.from_position(Position(9, 9, reached), rank, 2))
    assert [(reader, offset) for reader, _, offset in opened] == [(0, 9), (0, 9), (1, 9), (1, 9)]
    assert {shard for _, shard, _ in opened} == {0, 1, 2, 3}


def test_a_mixture_draws_by_weight_and_reads_each_source_in_an_order_of_its_own() -> None:
    mixture = keepstep.Mixture([Indexed("a", 90), Indexed("b", 90)], [3, 1])
    samples = samples_of(mixture, 1, 600)
    of_a, of_b = ([s[1] for s in samples if s[0] == name] for name in "ab")
    # The standard deviation is 10.6.
    assert 400 < len(of_a) < 500
    assert of_a[:60] != of_b[:60]


def test_shuffled_samples_are_those_of_each_block_in_another_order() -> None:
    numbers = [s[2] for s in samples_of(keepstep.Shuffled(Loader("a", 1000), 50), 10, 10)]
    assert [sorted(numbers[:50]), sorted(numbers[50:])] == [list(range(50)), list(range(50, 100))]
    assert numbers[:50] != sorted(numbers[:50])
    assert numbers[:50] != [number - 50 for number in numbers[50:]]


def test_rows_have_every_token_of_every_document_in_order() -> None:
    documents = [[number] * length for number, length in enumerate([5, 1, 11, 0, 3])]
    rows = samples_of(keepstep.Packed(iter_twice(documents), 4), 2, 5)
    tokens = torch.cat([row.tokens for row in rows]).tolist()
    assert tokens == [token for document in documents * 2 for token in document][:40]
    assert [row.documents.tolist() for row in rows[:3]] == [[0] * 4, [0, 1, 2, 2], [0] * 4]


def iter_twice(samples: list[Any]) -> Any:
    """Return an iterable that has no index."""

    class Iterable:
        def __iter__(self) -> Iterator[Any]:
            return iter(samples)

    return Iterable()


def test_a_loader_draws_the_same_that_draws_also_when_it_is_made_or_begins_to_iterate() -> None:
    class Drawing(Loader):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.name += str(torch.rand(()).item())

        def __iter__(self) -> Iterator[Any]:
            torch.rand(3)
            return super().__iter__()

    def make() -> Any:
        return keepstep.SplitStream(lambda part, parts: Drawing("a", 20, part, parts))

    undisturbed = play(make, 4, 12, []).batches
    disturbed = play(make, 4, 12, [Run(2, 0, 5, 1), Run(3, 0, 3, 0)]).batches
    assert [batch[-1] for batch in disturbed] == [batch[0] for batch in undisturbed]


def test_a_position_in_an_earlier_pass_is_not_one_in_the_next() -> None:
    def second_pass() -> Any:
        return DataPass(1, 2, 11, sharded("a", [5] * 8), 4, steps=3, collate=list)

    stored = stored_of(sharded("a", [5] * 8))
    begun = list(second_pass().from_position(Position(2, 2, stored), 0, 1))
    assert begun == list(second_pass().from_position(Position(2, 2), 0, 1))


def test_collate_draws_the_same_after_a_resumption_and_reading_leaves_the_generators_alone() -> (
    None
):
    def read(first: int, stored: Any) -> list[Any]:
        data: DataPass[Any] = DataPass(
            0, 0, 11, sharded("a", [5] * 8), 4, steps=3, collate=lambda samples: drawn()
        )
        return list(data.from_position(Position(first, first, stored), 0, 1))

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    undisturbed = read(0, None)
    assert read(2, stored_of(sharded("a", [5] * 8))) == undisturbed[2:]
    assert len(set(undisturbed)) == 3
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert before[0].equal(after[0])
    assert before[1:] == after[1:]


def test_collate_draws_the_same_in_whichever_process_it_runs() -> None:
    shares: RankShares[Any] = RankShares(
        sharded("a", [5] * 8), Partitioning(4, 4), range(4), range(4), {}, range(3), 0, 11, True,
        ShareCollate(lambda samples: drawn()),
    )  # fmt: skip
    collated = []
    for process in (1, 2):
        seed_generators(process)
        collated.append([shares.collated(batch, []) for batch in range(2)])
    assert collated[0] == collated[1]
    assert collated[0][0] != collated[0][1]


def refused(dataset: Any, global_batch: int = 4, stored: Any = None) -> str:
    with pytest.raises(UsageError) as raised:
        list(data_pass(dataset, global_batch, 3).from_position(Position(2, 2, stored), 0, 1))
    return str(raised.value)


def stored_of(dataset: Any, global_batch: int = 4) -> Any:
    data = data_pass(dataset, global_batch, 3)
    batches = data.from_position(Position(), 0, 1)
    for _ in range(2):
        next(batches)
    return data.stream_position(Position(2, 2))


def test_a_position_that_would_mean_other_samples_is_refused() -> None:
    stored = stored_of(sharded("a", [5] * 8))
    assert "had 8 shards and now has 9" in refused(sharded("a", [5] * 9), stored=stored)
    others = refused(sharded("a", [5] * 8), 5, stored)
    assert "4 partitions with global_batch=4, and is now to be read in 5" in others
    mixture = keepstep.Mixture([sharded("a", [5] * 8)] * 2, [1, 1])
    other = keepstep.Mixture([sharded("a", [5] * 8)] * 3, [1, 1, 1])
    assert "had 2 sources and now has 3" in refused(other, stored=stored_of(mixture))


def test_impossible_sources_are_refused_and_the_message_says_what_to_do() -> None:
    stream = sharded("a", [5])
    assert "yield pairs of a sample" in refused(keepstep.ShardedStream([1], lambda *_: [1, 2]))
    assert "no samples; leave empty shards out" in refused(sharded("a", [0, 0]))
    assert "a document of shape (1, 1)" in refused(keepstep.Packed([torch.zeros(1, 1)] * 9, 4))
    blocks = keepstep.Shuffled(Loader("a", 30), 7)
    other_blocks = keepstep.Shuffled(Loader("a", 30), 8)
    assert "one in blocks of 7" in refused(other_blocks, stored=stored_of(blocks))
    assert "10000 documents in a row are empty" in refused(keepstep.Packed([[]], 4), 1)
    impossible: list[tuple[Callable[[], Any], str]] = [
        (lambda: keepstep.ShardedStream([], read_shard), "there are no shards"),
        (lambda: keepstep.ShardedStream([1], read_shard, partitions=0), "at least 1, or None"),
        (lambda: keepstep.SplitStream(lambda *_: [], 0), "at least 1, or None"),
        (lambda: keepstep.Mixture([stream], []), "1 sources with 0 weights"),
        (lambda: keepstep.Mixture([stream], [0]), "weights must be positive"),
        (lambda: keepstep.Mixture([[]], [1]), "the dataset has no samples"),
        (lambda: keepstep.Shuffled(stream, 0), "give at least 1"),
        (lambda: keepstep.Packed(stream, 0), "give at least 1"),
        (lambda: data_pass(stream, 0, 1), "global_batch=0: give at least 1"),
        (
            lambda: data_pass(
                torch.utils.data.DataLoader(range(9), batch_size=2, num_workers=3), 4, 1
            ),  # type: ignore[arg-type]
            r"job\.batches\(dataset, global_batch=2 \* NUMBER_OF_RANKS, workers=3\)",
        ),
        (lambda: data_pass(stream, 1, None), "give job.batches"),  # type: ignore[arg-type]
    ]
    for make, message in impossible:
        with pytest.raises(UsageError, match=message):
            make()


@pytest.mark.parametrize(("asked", "has_accelerator"), [(True, True), (True, False), (False, True)])
def test_batches_of_a_source_are_pinned_if_asked_for_and_there_is_an_accelerator(
    asked: bool, has_accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, once they are whole: a loader process gives only a piece of a share."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    monkeypatch.setattr(partition_batches, "pin_memory", lambda batch: ("pinned", batch))
    source = sharded("a", [8])
    batches, pinned = (
        DataPass(0, 0, 11, source, 4, steps=2, collate=repr, loader_options=options)
        for options in ({}, {"pin_memory": asked})
    )
    expected = list(batches.from_position(Position(), 0, 1))
    assert len(expected) == 2
    if asked and has_accelerator:
        expected = [("pinned", batch) for batch in expected]
    assert list(pinned.from_position(Position(), 0, 1)) == expected
