"""Plays runs of a job's data: many worlds in one process, real readers, stored positions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from keepstep.elastic.data import partition_batches
from keepstep.elastic.data.data_pass import DataPass
from keepstep.elastic.data.partition_batches import Piece, RankShares
from keepstep.elastic.data.position import Position, StreamPosition

SEED = 11


class LoaderInThisProcess:
    """Gives what torch's DataLoader gives for `RankShares`, from as many readers, in turn."""

    def __init__(self, shares: RankShares[Any], *, num_workers: int, **_: Any) -> None:
        self._shares = shares
        self._workers = num_workers

    def __iter__(self) -> Iterator[Piece]:
        count = max(1, self._workers)
        pieces = [self._shares.pieces(number, count) for number in range(count)]
        while True:
            for piece in pieces:
                try:
                    yield next(piece)
                except StopIteration:
                    return


@pytest.fixture
def loader_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_batches, "DataLoader", LoaderInThisProcess)


@dataclass(frozen=True)
class Run:
    """What runs until it is killed: `read` batches, of which the last `lost` are in no snapshot."""

    world_size: int
    workers: int
    read: int
    lost: int


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def data_pass(dataset: Any, global_batch: int, steps: int, workers: int = 0) -> DataPass[Any]:
    return DataPass(
        0, 0, SEED, dataset, global_batch, steps=steps, collate=as_list, workers=workers
    )


def play(
    make: Callable[[], Any], global_batch: int, steps: int, runs: list[Run]
) -> list[list[list[Any]]]:
    """Return all readings of each global batch, in their order.

    Args:
        make: returns the dataset, as each process makes it.
        global_batch: samples per step.
        steps: global batches in all; after `runs`, one rank reads the rest.
        runs: the runs before.
    """
    readings: list[list[list[Any]]] = [[] for _ in range(steps)]
    stored = Stored(0, None, {})
    for run in [*runs, Run(1, 0, steps, 0)]:
        end = min(steps, stored.batch + run.read)
        kept = max(stored.batch, end - run.lost)
        ranks = [
            rank_run(make(), global_batch, steps, run, rank, stored, end, kept)
            for rank in range(run.world_size)
        ]
        for number, shares in enumerate(zip(*(read for read, _ in ranks), strict=True)):
            readings[stored.batch + number].append([item for share in shares for item in share])
        stored = merged(kept, [position for _, position in ranks])
    return readings


@dataclass(frozen=True)
class Stored:
    """What a snapshot of all ranks holds of the data."""

    batch: int
    document: Any
    documents: dict[str, Any]


def rank_run(
    dataset: Any,
    global_batch: int,
    steps: int,
    run: Run,
    rank: int,
    stored: Stored,
    end: int,
    kept: int,
) -> tuple[list[list[Any]], StreamPosition | None]:
    """Return what a rank reads until it is killed, and its position in the last snapshot."""
    stream = StreamPosition.restore(stored.document, stored.documents, rank, run.world_size)
    position = Position(stored.batch, stored.batch, stream)
    data = data_pass(dataset, global_batch, steps, run.workers)
    batches = data.from_position(position, rank, run.world_size)
    read = []
    reached = data.stream_position(position)
    for batch in range(stored.batch + 1, end + 1):
        read.append(next(batches))
        if batch == kept:
            reached = data.stream_position(Position(batch, batch))
    return read, reached


def merged(batch: int, positions: list[StreamPosition | None]) -> Stored:
    """Return what is stored of all ranks; what two of them have read must be alike."""
    document, documents = None, {}
    for position in positions:
        if position is not None:
            document = position.document()
            for name, state in position.documents().items():
                assert documents.setdefault(name, state) == state
    return Stored(batch, *json.loads(json.dumps([document, documents])))
