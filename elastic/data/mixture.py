"""Mixes samples of several sources by weights."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.elastic.data.datasets import PartitionReader, Source
from keepstep.elastic.data.order import mix
from keepstep.elastic.data.partitions import Partition
from keepstep.elastic.data.sources import AnySource, as_source
from keepstep.elastic.errors import UsageError

T = TypeVar("T")


class Mixture(Generic[T]):
    """A stream that draws each sample from one of several sources, at random by their weights.

    The job's seed and the sample's place in the stream determine the source. Each source is read in
    its own order, again and again. A mixture has as many partitions as the source with the fewest;
    a plain iterable has a single one.

    Args:
        sources: datasets with an index, iterables, or other sources.
        weights: how often each is drawn from, in proportion.
    """

    def __init__(self, sources: Sequence[AnySource[T]], weights: Sequence[float]) -> None:
        if not sources or len(sources) != len(weights):
            raise UsageError(
                f"Mixture: {len(sources)} sources with {len(weights)} weights; give a weight for "
                "each of at least one source"
            )
        if not all(weight > 0 and math.isfinite(weight) for weight in weights):
            raise UsageError(f"Mixture(weights={list(weights)}): weights must be positive")
        self._sources: list[Source[T]] = [as_source(source) for source in sources]
        self._limits = [total / math.fsum(weights) for total in accumulate(weights)]

    def most_partitions(self) -> int | None:
        """Return the smallest of the sources' numbers."""
        numbers = [source.most_partitions() for source in self._sources]
        return min((number for number in numbers if number is not None), default=None)

    def open_partition(self, partition: Partition, state: Json) -> _MixtureReader[T]:
        """See `Source`.

        Raises:
            UsageError: the state is that of another number of sources.
        """
        states = [None] * len(self._sources) if state is None else state["sources"]
        if len(states) != len(self._sources):
            raise UsageError(
                f"the mixture had {len(states)} sources and now has {len(self._sources)}; give the "
                "same ones, or begin a new pass with the others"
            )
        readers = [
            source.open_partition(partition.of_source(number), source_state)
            for number, (source, source_state) in enumerate(zip(self._sources, states, strict=True))
        ]
        return _MixtureReader(
            readers, self._limits, partition, 0 if state is None else state["drawn"]
        )


class _MixtureReader(Generic[T]):
    def __init__(
        self,
        readers: Sequence[PartitionReader[T]],
        limits: Sequence[float],
        partition: Partition,
        drawn: int,
    ) -> None:
        self._readers = readers
        self._limits = limits
        self._key = mix(partition.key, partition.number)
        self._drawn = drawn

    def read(self) -> T:
        drawn = mix(self._key, self._drawn) / 2**64
        self._drawn += 1
        # Rounding may leave the last limit below the number drawn.
        return self._readers[min(bisect(self._limits, drawn), len(self._readers) - 1)].read()

    def state(self) -> Json:
        return {"drawn": self._drawn, "sources": [reader.state() for reader in self._readers]}
