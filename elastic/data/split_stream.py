"""Reads streams that another library can divide into parts, and loaders of other libraries.

A part is any iterable. One with `state_dict` and `load_state_dict`, such as torchdata's
`StatefulDataLoader`, goes on where it was; any other is read again up to there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from keepstep.checkpoint.layout.boxes import Json
from keepstep.elastic.data.datasets import Positioned
from keepstep.elastic.data.json_values import from_json_value, to_json_value
from keepstep.elastic.data.partitions import Partition
from keepstep.elastic.data.sample_randomness import seed_generators
from keepstep.elastic.errors import UsageError

log = logging.getLogger("keepstep")

T = TypeVar("T")
_END = object()


class SplitStream(Generic[T]):
    """A stream in parts, each of which is an iterable by itself.

    At the end of a part it is iterated again; if it, or its `sampler`, has `set_epoch`, that is
    called before with the number of times that the part was read.

    Args:
        make: returns a part by its number and the number of parts: always the same samples, and no
            two parts the same. How many ranks there are does not matter: a part is read by one
            rank after another, and a rank may read several.
        most: into how many parts it can be divided; None: as many as a global batch has samples.
    """

    def __init__(self, make: Callable[[int, int], Iterable[T]], most: int | None = None) -> None:
        if most is not None and most < 1:
            raise UsageError(f"SplitStream(most={most}): give at least 1, or None")
        self._make = make
        self._most = most

    def most_partitions(self) -> int | None:
        """Return `most`."""
        return self._most

    def open_partition(self, partition: Partition, state: Json) -> _PartReader[T]:
        """See `Source`."""
        # A loader may draw the seed of its order already when it is made.
        seed_generators(partition.seed(-1))
        return _PartReader(self._make(partition.number, partition.count), partition, state)


class _PartReader(Generic[T]):
    def __init__(self, part: Iterable[T], partition: Partition, state: Json) -> None:
        self._part = part
        self._partition = partition
        self._epoch = self._read = self._read_of_epoch = 0
        self._iterator: Iterator[T] | None = None
        if state is None:
            self._set_epoch()
            return
        self._epoch, self._read = state["epoch"], state["read"]
        if state["state"] is not None and isinstance(part, Positioned):
            self._set_epoch()
            self._read_of_epoch = state["of_epoch"]
            part.load_state_dict(from_json_value(state["state"], part.state_dict()))
        elif "whole_batches" in state:
            self._epoch = self._read = 0
            self._set_epoch()
            self._read_past(state["read"], state["whole_batches"])
        else:
            self._set_epoch()
            self._read -= state["of_epoch"]
            self._read_past(state["of_epoch"])

    def _read_past(self, samples: int, whole_batches: int = 1) -> None:
        """Read up to a position; batches of `whole_batches` are refused that epochs are part of."""
        log.info(
            "part %d of %d of a stream without load_state_dict: reading past %d samples",
            self._partition.number, self._partition.count, samples,
        )  # fmt: skip
        for sample in range(samples):
            epoch = self._epoch
            self.read()
            if self._epoch != epoch and sample % whole_batches:
                raise UsageError(
                    "the position in the stream is that of an earlier version of keepstep, which "
                    f"left out what did not fill a batch of {whole_batches} at the end of an "
                    "epoch; as the stream has no load_state_dict, it would mean other samples now: "
                    "begin a new job with keepstep.join(start_from=...)"
                )

    def read(self) -> T:
        sample = self._next()
        while sample is _END:
            self._begin_iteration()
            sample = self._next()
        self._read += 1
        self._read_of_epoch += 1
        return sample  # type: ignore[no-any-return]

    def _next(self) -> Any:
        seed_generators(self._partition.seed(self._read))
        return _END if self._iterator is None else next(self._iterator, _END)

    def _begin_iteration(self) -> None:
        if self._iterator is not None:
            if not self._read_of_epoch:
                raise UsageError(
                    f"part {self._partition.number} of {self._partition.count} of the stream gave "
                    "no sample; give parts that have some, and that can be iterated more than once"
                )
            self._epoch, self._read_of_epoch = self._epoch + 1, 0
            self._set_epoch()
        # What a loader draws here does not shift what is drawn for the sample: `_next` seeds anew.
        self._iterator = iter(self._part)

    def state(self) -> Json:
        if self._iterator is None:
            # Asked for its position a loader draws the seed of its order, if it has not yet.
            seed_generators(self._partition.seed(self._read))
        position = None
        if isinstance(self._part, Positioned):
            position = to_json_value("the stream's state", self._part.state_dict())
        return {
            "epoch": self._epoch,
            "read": self._read,
            "of_epoch": self._read_of_epoch,
            "state": position,
        }

    def _set_epoch(self) -> None:
        """Tell the part how often it was read, if it shuffles by that."""
        for told in (self._part, getattr(self._part, "sampler", None)):
            set_epoch = getattr(told, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
