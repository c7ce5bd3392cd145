"""Claims about the rounds in which ranks exchange pieces: chunks are whole, rounds are bounded."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.format.layout.boxes import Box, Entry
from keepstep.checkpoint.format.stored import piece_rounds
from keepstep.checkpoint.format.stored.piece_rounds import (
    Pieces,
    Round,
    requests_of,
    rounds_of,
    wanted_by_round,
)
from keepstep.checkpoint.format.stored.shared_plan import (
    WriterPlan,
    entries_by_planner,
    merged_writer_plan,
    plan_share,
    planner_count,
)

WIDTH = 2**16
"""Elements of a row: a few rows are as large as a chunk, so that some tensors have several."""
ITEMSIZES = {"float32": 4, "int16": 2}
Held = Sequence[Entry]


@st.composite
def ranks_with_shards(draw: st.DrawFn) -> list[list[Entry]]:
    """Return what each of some ranks holds: rows of a tensor or all of it, on one rank or more."""
    ranks = draw(st.integers(1, 9))
    held: list[list[Entry]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(1, 4))):
        rows = draw(st.integers(1, 12))
        dtype = draw(st.sampled_from(sorted(ITEMSIZES)))
        cuts = draw(st.sets(st.integers(1, rows - 1)) if rows > 1 else st.just(set[int]()))
        bounds = [0, *sorted(cuts), rows]
        for first, end in itertools.pairwise(bounds):
            box = Box((first, 0), (end - first, WIDTH))
            entry = Entry(
                key=f"w{number}",
                dtype=dtype,
                global_shape=(rows, WIDTH),
                box=box,
                byte_offset=0,
                nbytes=box.size * ITEMSIZES[dtype],
            )
            for holder in draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=3)):
                held[holder].append(entry)
    return held


def plans_of(held: Sequence[Held]) -> list[WriterPlan]:
    """Return what each rank writes, as the planners have planned it."""
    planners = planner_count(len(held))
    split = [entries_by_planner(entries, planners) for entries in held]
    shares = [plan_share([part[number] for part in split], number)[0] for number in range(planners)]
    return [
        merged_writer_plan(share[writer] for share in shares if writer in share)
        for writer in range(len(held))
    ]


def planned(
    held: Sequence[Held], round_nbytes: int
) -> tuple[list[WriterPlan], list[Pieces], list[tuple[Round, ...]]]:
    """Return, for each rank, what it writes, what it lacks of that, and its rounds of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piece_rounds, "ROUND_NBYTES", round_nbytes)
        plans = plans_of(held)
        wanted = [wanted_by_round(plan) for plan in plans]
    requests = [requests_of(pieces) for pieces in wanted]
    rounds = [
        rounds_of(
            wanted[rank],
            {asker: request[rank] for asker, request in enumerate(requests) if rank in request},
            max(map(len, wanted)),
            plans[rank],
            held[rank],
            len(held),
        )
        for rank in range(len(held))
    ]
    return plans, wanted, rounds


def content(key: str, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Return a whole tensor, in which elements that are near each other differ."""
    seed = int(key[1:])
    return np.random.default_rng(seed).integers(0, 2**15, shape).astype(dtype)


def box_bytes(entry: Entry, box: Box) -> np.ndarray:
    values = content(entry.key, entry.dtype, entry.global_shape)[box.slices]
    return np.ascontiguousarray(values).view(np.uint8).reshape(*box.shape, -1)


def exchanged(
    held: Sequence[Held], rounds: Sequence[tuple[Round, ...]]
) -> list[dict[tuple[str, Box], np.ndarray]]:
    """Send each rank's pieces as one run of bytes a round; return the chunks that each has got."""
    collected: list[dict[tuple[str, Box], np.ndarray]] = [{} for _ in held]
    for current in zip(*rounds, strict=True):
        sent = [sent_by_peer(entries, own) for entries, own in zip(held, current, strict=True)]
        for rank, own in enumerate(current):
            for place, shape in own.chunks:
                assert place not in collected[rank]
                collected[rank][place] = np.zeros(shape, np.uint8)
            received = [peer[rank] for peer in sent]
            assert tuple(map(len, received)) == own.received_nbytes
            put(b"".join(received), own, collected[rank])
    return collected


def sent_by_peer(entries: Held, own: Round) -> list[bytes]:
    data = b"".join(
        box_bytes(entries[position], entries[position].box)[part].tobytes()
        for position, part in own.sent
    )
    ends = np.cumsum(own.sent_nbytes).tolist()
    assert ends[-1] == len(data)
    return [data[end - size : end] for end, size in zip(ends, own.sent_nbytes, strict=True)]


def put(data: bytes, own: Round, chunks: Mapping[tuple[str, Box], np.ndarray]) -> None:
    start = 0
    for place in own.places:
        piece = np.frombuffer(data, np.uint8, place.nbytes, start).reshape(place.shape)
        chunks[place.chunk][place.slices] = piece
        start += place.nbytes
    assert start == len(data)


@given(held=ranks_with_shards(), round_nbytes=st.integers(1, 2**20))
def test_after_the_rounds_each_writer_has_all_of_its_chunks(
    held: list[list[Entry]], round_nbytes: int
) -> None:
    plans, _, rounds = planned(held, round_nbytes)
    collected = exchanged(held, rounds)
    entries = {entry.key: entry for rank_entries in held for entry in rank_entries}
    written: dict[str, int] = dict.fromkeys(entries, 0)
    for plan, own_entries, chunks in zip(plans, held, collected, strict=True):
        for chunk in plan.chunks:
            entry = entries[chunk.key]
            written[chunk.key] += chunk.box.size
            if (chunk.key, chunk.box) in chunks:
                assert np.array_equal(chunks[chunk.key, chunk.box], box_bytes(entry, chunk.box))
            else:
                assert any(
                    own.key == chunk.key and chunk.box.is_within(own.box) for own in own_entries
                )
    assert written == {key: Box.whole(entry.global_shape).size for key, entry in entries.items()}


@given(held=ranks_with_shards(), round_nbytes=st.integers(1, 2**20))
def test_a_rank_receives_no_more_in_a_round_than_its_size_and_a_piece(
    held: list[list[Entry]], round_nbytes: int
) -> None:
    _, wanted, rounds = planned(held, round_nbytes)
    for pieces, own in zip(wanted, rounds, strict=True):
        for number, current in enumerate(own):
            sizes = [place.nbytes for place in current.places]
            assert sum(sizes[:-1]) < round_nbytes
            # No piece waits for a later round than it must.
            if number + 1 < len(pieces):
                assert sum(sizes) >= round_nbytes
