"""Defines what `Job.batches` reads from: datasets with an index, streams, and sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

from torch.utils.data import IterableDataset

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.elastic.data.partitions import Partition

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Dataset(Protocol[T_co]):
    """A map-style dataset: `len(dataset)` samples, `dataset[i]`."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> T_co:
        """Return one sample."""
        ...


class Stream(Protocol[T_co]):
    """A sequence of samples without an index, the same on every rank and each time it is read."""

    def __iter__(self) -> Iterator[T_co]:
        """Read from the first sample, or from the position that `load_state_dict` has set."""
        ...


@runtime_checkable
class Positioned(Protocol):
    """A stream that can resume at a stored position."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return its position: numbers, strings, lists, dictionaries, small tensors and arrays."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Make the next iteration begin at a result of `state_dict`."""
        ...


class PartitionReader(Protocol[T_co]):
    """Reads the samples of one partition, one after another, without an end."""

    def read(self) -> T_co:
        """Return the next sample."""
        ...

    def state(self) -> Json:
        """Return the position of the next sample, for `open_partition`."""
        ...


@runtime_checkable
class Source(Protocol[T_co]):
    """A stream that is read in partitions: `ShardedStream`, `Mixture` and others."""

    def most_partitions(self) -> int | None:
        """Return the greatest number of partitions that it can be read in; None: any."""
        ...

    def open_partition(self, partition: Partition, state: Json) -> PartitionReader[T_co]:
        """Return a reader that begins at the partition's first sample, or at a state (not None)."""
        ...


def is_stream(dataset: Dataset[T] | Iterable[T]) -> TypeGuard[Stream[T]]:
    """Return whether a dataset can only be read in order."""
    # torch's IterableDataset inherits a `__getitem__` that raises.
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
