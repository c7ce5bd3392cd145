"""Reads the batches of a job from a stream of samples, which has no index.

Every rank reads the whole stream and keeps its share of each global batch, so a position means the
same samples for any number of ranks. A stream that has `state_dict` and `load_state_dict` resumes
at its own state; any other is read again from its beginning and skipped up to the position.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import default_collate

from keepstep.checkpoint.layout.boxes import Json
from keepstep.elastic.data.datasets import Positioned, Stream
from keepstep.elastic.data.json_values import from_json_value, to_json_value
from keepstep.elastic.data.order import loss_scale, mix, share
from keepstep.elastic.data.sample_randomness import kept_generators, seed_generators
from keepstep.elastic.errors import UsageError

log = logging.getLogger("keepstep")

T = TypeVar("T")


class StreamBatches(Generic[T]):
    """One pass of `Job.batches` over a stream. After the stream's end it is read once more.

    What the stream and `collate` draw from global generators is seeded anew for each batch, alike
    on all ranks; what is left of an epoch after its last whole batch is dropped.

    Args:
        stream: the samples.
        global_batch: samples per step over all ranks.
        key: seed of the pass, 64 bits.
        collate: makes a batch of a list of samples; default as in torch's DataLoader.
    """

    def __init__(
        self,
        stream: Stream[T],
        global_batch: int,
        key: int,
        collate: Callable[[list[T]], Any] | None,
    ) -> None:
        self._stream = stream
        self._global_batch = global_batch
        self._key = key
        self._collate = collate or default_collate
        self._epoch = 0
        self._read = -1

    def state(self, read: int) -> Json:
        """Return where the stream is after `read` batches of the pass; None if it is elsewhere."""
        if read != self._read or not isinstance(self._stream, Positioned):
            return None
        state = to_json_value("the stream's state", self._stream.state_dict())
        return {"read": read, "epoch": self._epoch, "state": state}

    def loss_scale(self, rank: int, world_size: int) -> float:
        """Return the weight of this rank's mean loss that keeps the average over ranks exact."""
        return loss_scale(self._global_batch, rank, world_size)

    def from_position(
        self, first: int, end: int, rank: int, world_size: int, state: Json = None
    ) -> Iterator[Any]:
        """Return an iterator over the rank's shares of global batches `first` to `end - 1`.

        Args:
            first: number of batches of the pass that were consumed.
            end: number of batches of the pass.
            rank: data-parallel rank.
            world_size: number of data-parallel ranks.
            state: what `state` returned for the position, if anything.

        Raises:
            UsageError: the global batch is smaller than `world_size`, or the stream has fewer
                samples than one global batch.
        """
        return self._shares(first, end, share(self._global_batch, rank, world_size), state)

    def _shares(self, first: int, end: int, kept: tuple[int, int], state: Json) -> Iterator[Any]:
        with kept_generators():
            resumed = self._resume(first, state)
        batches = self._batches(kept, resumed)
        while self._read < end:
            with kept_generators():
                # The same on all ranks, which must read the same samples.
                seed_generators(mix(self._key, self._read))
                batch = next(batches)
                is_wanted = self._read >= first
                collated = self._collate(batch) if is_wanted else None
                self._read += 1
            if is_wanted:
                yield collated

    def _resume(self, first: int, state: Json) -> bool:
        """Go to the position `first`, or to the stream's beginning; whether it is the former."""
        self._epoch, self._read = 0, 0
        if state is None or state["read"] != first or not isinstance(self._stream, Positioned):
            if first:
                log.info("reading past %d samples of the stream", first * self._global_batch)
            self._set_epoch()
            return False
        self._epoch, self._read = state["epoch"], first
        self._set_epoch()
        like = self._stream.state_dict()
        self._stream.load_state_dict(from_json_value(state["state"], like))
        return True

    def _batches(self, kept: tuple[int, int], resumed: bool) -> Iterator[list[T]]:
        """Yield the samples `kept[0]` to `kept[1] - 1` of each global batch, without an end."""
        while True:
            batch: list[T] = []
            number = whole = 0
            for sample in self._stream:
                if kept[0] <= number < kept[1]:
                    batch.append(sample)
                number += 1
                if number == self._global_batch:
                    yield batch
                    batch, number, whole = [], 0, whole + 1
            if not whole and not resumed:
                raise UsageError(
                    f"the stream has {number} samples, fewer than one global batch of "
                    f"{self._global_batch}; give a smaller global_batch, and a stream that can be "
                    "read more than once"
                )
            resumed = False
            self._epoch += 1
            self._set_epoch()

    def _set_epoch(self) -> None:
        """Tell the stream which epoch is read next, if it shuffles by that."""
        set_epoch = getattr(self._stream, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._epoch)
