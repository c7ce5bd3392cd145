"""Claims about streams of other libraries whose state, or whose order, is not what it seems.

Those of the libraries themselves are run where they are installed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from keepstep.elastic.data.known_streams import epoch_receivers
from keepstep.elastic.data.partitions import Partition
from keepstep.elastic.data.split_stream import SplitStream
from keepstep.elastic.errors import UsageError
from ops.bench.data_runs import Run, play

SIZE = 24


def of_library(module: str) -> Callable[[type], type]:
    """Have a class look like one of a library."""

    def set_module(kind: type) -> type:
        kind.__module__ = module
        return kind

    return set_module


@of_library("datasets.iterable_dataset")
class BufferShuffledExamplesIterable:
    """Shuffles in a buffer that its state does not hold, and refills it when a state is loaded."""

    def __init__(self, buffer_size: int, seed: int | None = 1) -> None:
        self.buffer_size = buffer_size
        self.generator = np.random.default_rng(seed)
        self.next = self.start = 0

    def __iter__(self) -> Iterator[int]:
        rng, buffer = np.random.default_rng(1), []
        start, self.start = self.start, 0
        for self.next in range(start + 1, SIZE + 1):
            buffer.append(self.next - 1)
            if len(buffer) == self.buffer_size:
                yield buffer.pop(int(rng.integers(self.buffer_size)))
        yield from buffer

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = self.start = state["next"]


class Wrapper:
    """A stream of a user's own over another one."""

    def __init__(self, *streams: Any) -> None:
        self.streams = streams

    def __iter__(self) -> Iterator[Any]:
        return iter(self.streams[0])

    def state_dict(self) -> Any:
        return self.streams[0].state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.streams[0].load_state_dict(state)


def assert_exact(make: Callable[[], Any], size: int, stride: int = 1) -> None:
    """Check that a part goes on with the same samples wherever it stops, into its next epoch."""
    source: SplitStream[Any] = SplitStream(lambda *_: make(), most=1)
    partition = Partition(0, 1, 7, shuffle=True)
    reader = source.open_partition(partition, None)
    states, samples = [], []
    for _ in range(size + size // 2):
        states.append(json.loads(json.dumps(reader.state())))
        samples.append(repr(reader.read()))
    for begin in range(1, len(states) - 4, stride):
        resumed = source.open_partition(partition, states[begin])
        assert [repr(resumed.read()) for _ in range(4)] == samples[begin : begin + 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda: BufferShuffledExamplesIterable(5),
        lambda: Wrapper(BufferShuffledExamplesIterable(5)),
        lambda: Wrapper(Wrapper(BufferShuffledExamplesIterable(5)), [1]),
    ],
)
def test_a_stream_with_samples_outside_its_state_is_read_again_and_named_once(
    make: Callable[[], Iterable[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Those in the buffer would be lost, and others come twice."""
    with caplog.at_level(logging.WARNING):
        assert_exact(make, SIZE)
        run = play(make, 4, 9, [Run(1, 0, 4, 0), Run(2, 0, 7, 0)])
    undisturbed = play(make, 4, 9, [])
    assert run.batches == undisturbed.batches
    assert "a shuffle buffer of 5 samples, which its state leaves out" in caplog.text


def test_a_stream_whose_buffer_holds_one_sample_goes_on_by_its_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert_exact(lambda: BufferShuffledExamplesIterable(1), SIZE)
    assert caplog.text == ""


def _shuffle() -> None:
    return


@of_library("webdataset.filters")
class FilterFunction:
    def __init__(self, *args: Any, **kw: Any) -> None:
        self.f, self.args, self.kw = _shuffle, args, kw


@of_library("webdataset.filters")
class detshuffle:
    pass


@of_library("webdataset.shardlists")
class ResampledShards:
    def __init__(self, *, deterministic: bool) -> None:
        self.deterministic = deterministic

    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


def refusal_of(part: Any) -> str:
    source: SplitStream[Any] = SplitStream(lambda *_: Wrapper(range(SIZE), part))
    try:
        source.open_partition(Partition(0, 1, 7, shuffle=True), None)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("part", "remedy"),
    [
        (BufferShuffledExamplesIterable(5, seed=None), "without a seed"),
        (FilterFunction(100), "shuffle without a seed: give shuffle(size, seed=...)"),
        (detshuffle(), "give shuffle(size, seed=...)"),
        (ResampledShards(deterministic=False), "deterministic=True"),
    ],
)
def test_an_order_by_chance_is_refused_when_the_job_begins(part: Any, remedy: str) -> None:
    assert remedy in refusal_of(part)
    assert "samples would be lost or repeated" in refusal_of(part)


def test_an_order_by_a_seed_is_taken() -> None:
    parts = (FilterFunction(100, seed=3), FilterFunction(100, 10, None, 3), range(3))
    assert [refusal_of(part) for part in (*parts, ResampledShards(deterministic=True))] == [""] * 4


@of_library("datasets.iterable_dataset")
class IterableDataset:
    def __iter__(self) -> Iterator[int]:
        return iter(())

    def set_epoch(self, epoch: int) -> None:
        return


def test_the_epoch_is_set_on_a_loaders_dataset_and_on_what_is_known_to_need_it() -> None:
    inner = IterableDataset()
    loader = Wrapper(range(3))
    loader.dataset = IterableDataset()  # type: ignore[attr-defined]
    assert epoch_receivers(Wrapper(Wrapper(inner))) == [inner]
    assert epoch_receivers(loader) == [loader.dataset]  # type: ignore[attr-defined]
    assert epoch_receivers(range(3)) == []


def numbers(datasets: Any, shards: int = 4) -> Any:
    rows = {"i": list(range(SIZE))}
    return datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=shards)


STREAMS: dict[str, Callable[[Any], Any]] = {
    "plain": numbers,
    "shuffle": lambda d: numbers(d).shuffle(seed=1, buffer_size=5),
    "shuffle, wrapped": lambda d: Wrapper(numbers(d).shuffle(seed=1, buffer_size=5)),
    "shuffle, batch": lambda d: numbers(d).shuffle(seed=1, buffer_size=5).batch(3),
    "shuffle, map": lambda d: numbers(d).shuffle(seed=1, buffer_size=5).map(lambda row: row),
    "batch": lambda d: numbers(d).batch(5),
    "map": lambda d: numbers(d).map(lambda rows: rows, batched=True, batch_size=5),
    "filter": lambda d: numbers(d).filter(lambda row: row["i"] % 3),
    "interleave": lambda d: d.interleave_datasets(
        [numbers(d), numbers(d, 2)], probabilities=[0.3, 0.7], seed=3
    ),
    "interleave shuffled": lambda d: d.interleave_datasets(
        [numbers(d).shuffle(seed=1, buffer_size=5), numbers(d, 2)]
    ),
    "concatenate": lambda d: d.concatenate_datasets([numbers(d), numbers(d, 2)]),
    "take": lambda d: numbers(d).shuffle(seed=1, buffer_size=5).take(20),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams_of_hugging_face_go_on_exactly(name: str) -> None:
    datasets = pytest.importorskip("datasets")
    assert_exact(lambda: STREAMS[name](datasets), SIZE)


@pytest.mark.parametrize("loader_processes", [0, 2])
@pytest.mark.parametrize("name", ["plain", "shuffle", "interleave"])
def test_torchdatas_loader_over_streams_of_hugging_face_goes_on_exactly(
    name: str, loader_processes: int
) -> None:
    datasets = pytest.importorskip("datasets")
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return loaders.StatefulDataLoader(
            STREAMS[name](datasets), batch_size=3, collate_fn=list, num_workers=loader_processes
        )

    assert_exact(make, SIZE // 3, stride=3)
