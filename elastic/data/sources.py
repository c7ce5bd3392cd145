"""Adapts datasets with an index, and plain streams, to the interface of a source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset, default_collate

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.elastic.data.datasets import Dataset, Positioned, Source, Stream, is_stream
from keepstep.elastic.data.order import mix, permute, share
from keepstep.elastic.data.partitions import Partition
from keepstep.elastic.data.sample_randomness import seed_generators
from keepstep.elastic.data.split_stream import SplitStream
from keepstep.elastic.errors import UsageError

T = TypeVar("T")

AnySource = Source[T] | Dataset[T] | Stream[T]
"""The inputs that `Mixture` and `Packed` accept."""


def as_source(dataset: AnySource[T]) -> Source[T]:
    """Return any dataset as a source.

    Raises:
        UsageError: the dataset is empty, or can be read only once.
    """
    if isinstance(dataset, Source):
        return dataset
    if isinstance(dataset, DataLoader) and dataset.batch_size is not None:
        raise UsageError(_instead_of(dataset))
    if is_stream(dataset):
        if _is_read_once(dataset):
            raise UsageError(
                f"a {type(dataset).__name__} can be read only once, and after a recovery the job "
                "would go on with other samples: give an object whose __iter__ begins again, or "
                "keepstep.SplitStream(make, most=1), which makes the iterator when it is read"
            )
        # It can only be read as a whole: in one partition, by every rank.
        return SplitStream(_Whole(dataset), 1)
    return _Indexed(cast("Dataset[T]", dataset))


def _instead_of(loader: DataLoader[Any]) -> str:
    """Return the reason for refusing a loader, with the line to write instead."""
    arguments = ["dataset", f"global_batch={loader.batch_size} * NUMBER_OF_RANKS"]
    if loader.num_workers:
        arguments.append(f"workers={loader.num_workers}")
    if loader.collate_fn is not default_collate:
        arguments.append("collate=...")
    if isinstance(loader.dataset, IterableDataset):
        arguments.append("steps=...")
    return (
        f"a {type(loader).__name__} yields batches, which would be taken for samples: give "
        f"job.batches({', '.join(arguments)}), with the loader's dataset and the samples of one "
        "step over all ranks; shuffle, pin_memory and others are arguments of job.batches"
    )


def _is_read_once(stream: Iterable[T]) -> bool:
    """Return whether a stream is an iterator that cannot be rewound, such as a generator."""
    if isinstance(stream, Positioned | IterableDataset) or not isinstance(stream, Iterator):
        return False
    # `__iter__` of a class of the user's own may set it back; that of built-in types does not.
    begins = type(stream).__iter__
    return not hasattr(begins, "__code__") or begins is Iterator.__iter__


class _Whole(Generic[T]):
    """Returns a stream as its only part; a class, since it may be sent to loader processes."""

    def __init__(self, stream: Stream[T]) -> None:
        self._stream = stream

    def __call__(self, part: int, parts: int) -> Stream[T]:
        return self._stream


class _Indexed(Generic[T]):
    """A dataset with an index. Each partition reads its share of every epoch's permutation."""

    def __init__(self, dataset: Dataset[T]) -> None:
        if len(dataset) == 0:
            raise UsageError("the dataset has no samples; give one that has")
        self._dataset = dataset

    def most_partitions(self) -> int:
        return len(self._dataset)

    def open_partition(self, partition: Partition, state: Json) -> _IndexedReader[T]:
        return _IndexedReader(self._dataset, partition, 0 if state is None else state)


class _IndexedReader(Generic[T]):
    def __init__(self, dataset: Dataset[T], partition: Partition, read: int) -> None:
        self._dataset = dataset
        self._partition = partition
        self._read = read
        self._own = range(*share(len(dataset), partition.number, partition.count))

    def read(self) -> T:
        number, self._read = self._read, self._read + 1
        epoch, place = divmod(number, len(self._own))
        index = self._own[place]
        if self._partition.shuffle:
            index = permute(index, len(self._dataset), mix(self._partition.key, epoch))
        seed_generators(self._partition.seed(number))
        return self._dataset[index]

    def state(self) -> Json:
        return self._read
