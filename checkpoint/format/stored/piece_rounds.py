"""Rounds in which ranks exchange the pieces of chunks that their writers do not hold.

Pure. A writer asks the holders of the pieces that it lacks, each piece with the number of a round;
a round is as many pieces as a writer receives at once. Sender and writer work out the same order of
pieces from that, so that the pieces themselves go without a description.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.checkpoint.format.layout.boxes import Box, Entry
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.stored.chunking import PlannedChunk
from keepstep.checkpoint.format.stored.shared_plan import WriterPlan

ROUND_NBYTES = 64 * 2**20
"""A writer's round ends with the piece with which it receives this, in bytes."""

Pieces = Sequence[Mapping[int, Sequence[tuple[PlannedChunk, Box]]]]
"""For each round, the pieces that a rank wants, by the rank that holds them."""

Request = tuple[int, str, Box]
"""The number of a round, the key of a tensor, and a box of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a piece goes that this rank gets: into this part of the array of a chunk's elements."""

    chunk: tuple[str, Box]
    slices: tuple[slice, ...]
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The pieces that this rank exchanges with all others at once, in the order of ranks.

    Attributes:
        sent: for each piece, which of the rank's tensors it is of, and which part of that.
        sent_nbytes: what each rank gets.
        places: where the pieces go that this rank gets.
        received_nbytes: what each rank sends.
        chunks: the chunks that get their first piece now, and the shape of their bytes.
    """

    sent: tuple[tuple[int, tuple[slice, ...]], ...]
    sent_nbytes: tuple[int, ...]
    places: tuple[Place, ...]
    received_nbytes: tuple[int, ...]
    chunks: tuple[tuple[tuple[str, Box], tuple[int, ...]], ...]


def wanted_by_round(own: WriterPlan) -> Pieces:
    """Return the pieces that a writer lacks, in rounds."""
    wanted: list[dict[int, list[tuple[PlannedChunk, Box]]]] = []
    nbytes = ROUND_NBYTES
    for holder, pieces in sorted(_pieces_by_holder(own).items()):
        for chunk, box in pieces:
            if nbytes >= ROUND_NBYTES:
                wanted.append(defaultdict(list))
                nbytes = 0
            wanted[-1][holder].append((chunk, box))
            nbytes += _nbytes(box, own, chunk.key)
    return wanted


def requests_of(wanted: Pieces) -> dict[int, list[Request]]:
    """Return the requests for pieces, by the rank that holds them."""
    requests: dict[int, list[Request]] = defaultdict(list)
    for number, pieces_of_round in enumerate(wanted):
        for holder, pieces in pieces_of_round.items():
            requests[holder] += [(number, chunk.key, box) for chunk, box in pieces]
    return requests


def rounds_of(
    wanted: Pieces,
    requests: Mapping[int, Sequence[Request]],
    count: int,
    own: WriterPlan,
    held: Sequence[Entry],
    ranks: int,
) -> tuple[Round, ...]:
    """Return what a rank sends and gets in each round.

    Args:
        wanted: what it gets.
        requests: what `requests_of` has returned for this rank on each rank that asks it.
        count: how many rounds all ranks have.
        own: what it writes.
        held: its boxes, which have all that it is asked for.
        ranks: how many ranks there are.
    """
    asked: list[dict[int, list[tuple[str, Box]]]] = [defaultdict(list) for _ in range(count)]
    for asker, request in requests.items():
        for number, key, box in request:
            asked[number][asker].append((key, box))
    positions: dict[str, list[int]] = defaultdict(list)
    for position, entry in enumerate(held):
        positions[entry.key].append(position)
    has_memory: set[tuple[str, Box]] = set()
    rounds = []
    for number in range(count):
        sent, sent_nbytes = [], []
        places: list[Place] = []
        received_nbytes: list[int] = []
        for peer in range(ranks):
            nbytes = 0
            for key, box in asked[number].get(peer, ()):
                position = next(i for i in positions[key] if box.is_within(held[i].box))
                entry = held[position]
                sent.append((position, box.slices_in(entry.box)))
                nbytes += box.size * numpy_dtype(entry.dtype).itemsize
            sent_nbytes.append(nbytes)
            pieces = wanted[number].get(peer, ()) if number < len(wanted) else ()
            from_peer = [_place(chunk, box, own) for chunk, box in pieces]
            received_nbytes.append(sum(place.nbytes for place in from_peer))
            places += from_peer
        fresh = {place.chunk: None for place in places if place.chunk not in has_memory}
        has_memory.update(fresh)
        rounds.append(
            Round(
                sent=tuple(sent),
                sent_nbytes=tuple(sent_nbytes),
                places=tuple(places),
                received_nbytes=tuple(received_nbytes),
                chunks=tuple(((key, box), (*box.shape, _itemsize(own, key))) for key, box in fresh),
            )
        )
    return tuple(rounds)


def _pieces_by_holder(plan: WriterPlan) -> dict[int, list[tuple[PlannedChunk, Box]]]:
    """Return the pieces that a writer needs, by the rank that holds them, in the plan's order."""
    needed: dict[int, list[tuple[PlannedChunk, Box]]] = defaultdict(list)
    for chunk in plan.chunks:
        for piece in chunk.pieces:
            needed[piece.holder].append((chunk, piece.box))
    return needed


def _place(chunk: PlannedChunk, box: Box, own: WriterPlan) -> Place:
    return Place(
        chunk=(chunk.key, chunk.box),
        slices=box.slices_in(chunk.box),
        shape=(*box.shape, _itemsize(own, chunk.key)),
        nbytes=_nbytes(box, own, chunk.key),
    )


def _nbytes(box: Box, own: WriterPlan, key: str) -> int:
    return box.size * _itemsize(own, key)


def _itemsize(own: WriterPlan, key: str) -> int:
    return numpy_dtype(own.tensors[key].dtype).itemsize
