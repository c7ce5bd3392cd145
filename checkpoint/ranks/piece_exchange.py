"""Exchanges pieces of chunks between the ranks that hold them and the ranks that write the chunks.

A writer holds some of its chunks only in part. It gets what it lacks in rounds of bounded size,
of which all ranks have as many; where there is one round and it is small, beside a message that is
sent anyway.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.stored.piece_rounds import Place, Round
from keepstep.checkpoint.live.tensors import LiveTensor, bytes_of
from keepstep.checkpoint.ranks.agreement import on_all_ranks, preparing
from keepstep.checkpoint.ranks.collective import ByteExchange, Bytes

_PIECES = "pieces that ranks exchange"


@dataclass(frozen=True, slots=True, eq=False)
class _RoundBuffers:
    """What a rank sends in a round, and where it receives."""

    sent: torch.Tensor
    received: torch.Tensor


class PieceExchange:
    """Gets the chunks that this rank writes but holds only in part, from the ranks that hold them.

    Memory for a round is taken before ranks depend on each other. For the first round `prepare`
    takes it; all ranks must have called it, or none.

    Args:
        rounds: the rounds that the ranks have planned; all have as many.
        tensors: what this rank holds.
        goes_beside: there is one round, and what each rank sends in it goes beside a message.
    """

    def __init__(
        self, rounds: Sequence[Round], tensors: Sequence[LiveTensor], *, goes_beside: bool
    ) -> None:
        self._rounds = rounds
        self._goes_beside = goes_beside
        self._held = tensors
        self._collected: dict[tuple[str, Box], Bytes] = {}
        self._bytes = ByteExchange()
        self._first: _RoundBuffers | None = None
        self._beside: torch.Tensor | None = None
        self.is_done = not rounds
        """Whether nothing is left to be exchanged."""

    def prepare(self) -> None:
        """Take memory for the first round, and copy what this rank sends in it.

        Raises:
            CheckpointError: there is no memory for it, or a tensor cannot be read.
        """
        with preparing(_PIECES):
            if self._goes_beside:
                self._take_chunks(self._rounds[0])
                self._beside = self._sent(self._rounds[0])
            elif self._rounds:
                self._first = self._prepared(self._rounds[0])

    def sent_beside(self) -> Sequence[memoryview]:
        """Return what goes to each rank beside a message, after `prepare`; nothing without room."""
        if not self._goes_beside:
            return ()
        assert self._beside is not None, "it was prepared"
        data = self._beside.numpy().data
        sizes = self._rounds[0].sent_nbytes
        ends = itertools.accumulate(sizes)
        return [data[end - nbytes : end] for end, nbytes in zip(ends, sizes, strict=True)]

    def receive_beside(self, contents: Sequence[memoryview]) -> None:
        """Take what each rank has sent to this one beside a message, if all follow one plan."""
        if self._goes_beside:
            current = self._rounds[0]
            places = iter(current.places)
            for content, nbytes in zip(contents, current.received_nbytes, strict=True):
                self._put(places, np.frombuffer(content, np.uint8, nbytes))
            self._beside = None
            self.is_done = True

    def run(self) -> dict[tuple[str, Box], Bytes]:
        """Exchange the pieces, unless it is done; return the chunks, by tensor key and box.

        Raises:
            CheckpointError: this rank could not prepare for it, or another rank could not.
        """
        for current in () if self.is_done else self._rounds:
            buffers, self._first = self._first, None
            if buffers is None:
                buffers = on_all_ranks(preparing(_PIECES)(partial(self._prepared, current)))
            self._bytes.run(
                buffers.sent, current.sent_nbytes, buffers.received, current.received_nbytes
            )
            # From here to the next round nothing takes memory that may be lacking.
            self._put(iter(current.places), buffers.received.numpy())
        return self._collected

    def _put(self, places: Iterator[Place], data: Bytes) -> None:
        """Put pieces into their chunks, as long as there are any."""
        start = 0
        while start < data.nbytes:
            place = next(places)
            end = start + place.nbytes
            self._collected[place.chunk][place.slices] = data[start:end].reshape(place.shape)
            start = end

    def _prepared(self, current: Round) -> _RoundBuffers:
        """Take all memory that a round needs, and fill in what this rank sends."""
        self._take_chunks(current)
        sent = self._sent(current)
        received = torch.empty(sum(current.received_nbytes), dtype=torch.uint8)
        self._bytes.reserve(sent_nbytes=sent.numel(), received_nbytes=received.numel())
        return _RoundBuffers(sent, received)

    def _take_chunks(self, current: Round) -> None:
        for place, shape in current.chunks:
            self._collected[place] = np.empty(shape, np.uint8)

    def _sent(self, current: Round) -> torch.Tensor:
        """Return what this rank sends in a round."""
        pieces = [bytes_of(self._held[position].data[part]) for position, part in current.sent]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
