"""Reads streams that another library can divide into parts, and loaders of other libraries.

A part is any iterable. One with `state_dict` and `load_state_dict`, such as torchdata's
`StatefulDataLoader`, resumes at its position; any other is read again up to there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.elastic.data.datasets import Positioned
from keepstep.elastic.data.json_values import from_json_value, to_json_value
from keepstep.elastic.data.known_streams import (
    epoch_receivers,
    ordered_by_chance,
    samples_outside_state,
)
from keepstep.elastic.data.partitions import Partition
from keepstep.elastic.data.sample_randomness import seed_generators
from keepstep.elastic.errors import UsageError

log = logging.getLogger("keepstep")

T = TypeVar("T")
_END = object()


class SplitStream(Generic[T]):
    """A stream in parts, each an iterable by itself.

    At the end of a part it is iterated again; if it, its `sampler` or its `dataset` has
    `set_epoch`, that is called first with the number of times that the part was read.

    Args:
        make: returns a part, given its number and the number of parts. A part always has the same
            samples, and no two parts share any. The number of ranks does not matter: a part is read
            by one rank after another, and a rank may read several.
        most: greatest number of parts; None: as many as a global batch has samples.
    """

    def __init__(self, make: Callable[[int, int], Iterable[T]], most: int | None = None) -> None:
        if most is not None and most < 1:
            raise UsageError(f"SplitStream(most={most}): give at least 1, or None")
        self._make = make
        self._most = most
        self._has_named = False

    def most_partitions(self) -> int | None:
        """Return `most`."""
        return self._most

    def open_partition(self, partition: Partition, state: Json) -> _PartReader[T]:
        """See `Source`.

        Raises:
            UsageError: the part is known to give other samples each time that it is read.
        """
        # A loader may draw the seed of its order already when it is made.
        seed_generators(partition.seed(-1))
        part = self._make(partition.number, partition.count)
        by_chance = ordered_by_chance(part)
        if by_chance:
            raise UsageError(
                f"the stream has {by_chance}. As it is, it gives other samples each time that it "
                "is read, so that after a recovery samples would be lost or repeated"
            )
        lost_samples = samples_outside_state(part)
        if lost_samples and not self._has_named and partition.number == 0:
            self._has_named = True
            log.warning(
                "the stream has %s, which its state leaves out: after a recovery its epoch is read "
                "again up to where it was. keepstep.Shuffled(source, block) goes on at once",
                lost_samples,
            )
        return _PartReader(part, partition, state, has_whole_state=not lost_samples)


class _PartReader(Generic[T]):
    def __init__(
        self, part: Iterable[T], partition: Partition, state: Json, *, has_whole_state: bool
    ) -> None:
        self._part = part
        # A stream without a state is read again up to the position.
        self._positioned = part if has_whole_state and isinstance(part, Positioned) else None
        self._partition = partition
        self._epoch_receivers = epoch_receivers(part)
        self._epoch = self._read = self._read_of_epoch = 0
        self._iterator: Iterator[T] | None = None
        if state is None:
            self._set_epoch()
            return
        self._epoch, self._read = state["epoch"], state["read"]
        if state["state"] is not None and self._positioned is not None:
            self._set_epoch()
            self._read_of_epoch = state["of_epoch"]
            like = self._positioned.state_dict()
            self._positioned.load_state_dict(from_json_value(state["state"], like))
        else:
            self._set_epoch()
            self._read -= state["of_epoch"]
            self._read_past(state["of_epoch"])

    def _read_past(self, samples: int) -> None:
        """Read up to a position."""
        log.info(
            "part %d of %d of a stream that is read again: reading past %d samples",
            self._partition.number, self._partition.count, samples,
        )  # fmt: skip
        for _ in range(samples):
            self.read()

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
        # Random numbers of a loader do not shift those of the sample: `_next` seeds again.
        self._iterator = iter(self._part)

    def state(self) -> Json:
        if self._iterator is None:
            # A loader that is asked for its position draws the seed of its order, if it has not
            # yet.
            seed_generators(self._partition.seed(self._read))
        position = None
        if self._positioned is not None:
            position = to_json_value("the stream's state", self._positioned.state_dict())
        return {
            "epoch": self._epoch,
            "read": self._read,
            "of_epoch": self._read_of_epoch,
            "state": position,
        }

    def _set_epoch(self) -> None:
        """Call `set_epoch` with the number of times that the part was read, if it has that."""
        for receiver in self._epoch_receivers:
            receiver.set_epoch(self._epoch)
