"""Plays runs of a job's data: many worlds in one process, real readers, stored positions.

Each rank of each run is a `DataPass` of its own, as `Job.batches` makes one, with a dataset of its
own and, where asked for, loader processes. Only a snapshot's content is kept between runs, as JSON
of all ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from keepstep.elastic.data.data_pass import DataPass
from keepstep.elastic.data.position import NO_POSITION, Position, StreamPosition

SEED = 11


@dataclass(frozen=True)
class Run:
    """One run until it is killed: of its `read` batches the last `lost` are in no snapshot."""

    world_size: int
    workers: int
    read: int
    lost: int


@dataclass
class Readings:
    """The samples of each global batch at each reading, and the seconds of each resumption."""

    batches: list[list[list[Any]]]
    resume_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Stored:
    """The part of all ranks' snapshot that is about the data."""

    batch: int
    document: Any
    documents: dict[str, Any]


def data_pass(dataset: Any, global_batch: int, steps: int, workers: int = 0) -> DataPass[Any]:
    return DataPass(
        0, 0, SEED, dataset, global_batch, steps=steps, collate=_as_list, workers=workers
    )


def _as_list(samples: list[Any]) -> list[Any]:
    return samples


def play(
    make: Callable[[], Any], global_batch: int, steps: int, runs: list[Run], workers: int = 0
) -> Readings:
    """Return all readings of each global batch, in their order.

    Args:
        make: returns the dataset, as each process makes it.
        global_batch: samples per step.
        steps: global batches in all; after `runs`, one rank reads the rest.
        runs: the runs before.
        workers: loader processes of that rank.
    """
    readings = Readings([[] for _ in range(steps)])
    stored = Stored(0, NO_POSITION, {})
    for run in [*runs, Run(1, workers, steps, 0)]:
        end = min(steps, stored.batch + run.read)
        kept = max(stored.batch, end - run.lost)
        shares, positions = [], []
        for rank in range(run.world_size):
            read, reached, first_s = _rank_run(
                make(), global_batch, steps, run, rank, stored, end, kept
            )
            shares.append(read)
            positions.append(reached)
            if stored.batch and read:
                readings.resume_s.append(first_s)
        for number, batch in enumerate(zip(*shares, strict=True), stored.batch):
            readings.batches[number].append([item for share in batch for item in share])
        stored = _merged(kept, positions)
    return readings


def _rank_run(
    dataset: Any,
    global_batch: int,
    steps: int,
    run: Run,
    rank: int,
    stored: Stored,
    end: int,
    kept: int,
) -> tuple[list[list[Any]], StreamPosition | None, float]:
    """Return what a rank reads until it is killed, and its position in the last snapshot."""
    begun_s = time.monotonic()
    first_s = 0.0
    stream = StreamPosition.restore(stored.document, stored.documents, rank, run.world_size)
    position = Position(stored.batch, stored.batch, stream)
    data = data_pass(dataset, global_batch, steps, run.workers)
    batches = data.from_position(position, rank, run.world_size)
    read = []
    reached = data.stream_position(position)
    for batch in range(stored.batch + 1, end + 1):
        read.append(next(batches))
        first_s = first_s or time.monotonic() - begun_s
        if batch == kept:
            reached = data.stream_position(Position(batch, batch))
    return read, reached, first_s


def _merged(batch: int, positions: list[StreamPosition | None]) -> Stored:
    """Return the stored state of all ranks; ranks that have read the same must agree."""
    document, documents = NO_POSITION, {}
    for position in positions:
        if position is not None:
            document = position.document()
            for name, state in position.documents().items():
                assert documents.setdefault(name, state) == state
    return Stored(batch, *json.loads(json.dumps([document, documents])))
