"""Defines digests: summaries of nodes' records in tables that merge up a tree.

A digest holds a few numbers per rank and communicator. Tables keyed by rank are concatenated; those
keyed by an operation (a collective, a message) are folded, so rows of one operation from ranks of
different nodes become one row. Folding takes minima, maxima and sums only: merging is associative
and commutative, and any tree over the nodes gives the same result. Once all ranks of a collective
have reported it, its row becomes part of the sums per communicator and step.

`ranks` and `frontiers` are snapshots (the newest digest replaces older ones); the other tables are
increments, to be merged exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.records import Communicator, joined

RANK = np.dtype(
    [
        ("rank", "<i4"),
        ("alive", "?"),
        ("ending", "u1"),  # Ending, as the process recorded it
        ("marks_steps", "?"),  # whether it ever recorded a STEP phase
        ("in_step", "?"),
        # Sender of the last message received since its last complete step ended, -1 if none.
        ("received_from", "<i4"),
        ("phase", "i1"),  # innermost open phase, -1 if none
        ("step", "<u4"),  # highest step recorded
        ("failed", "<u4"),  # operations in this reading that ended with an error
        ("read_at_s", "<f8"),  # by the node's clock, as are the next two
        ("moved_s", "<f8"),  # when it last began or ended anything
        ("phase_s", "<f8"),  # when the open phase began
        ("offset_s", "<f8"),
        ("offset_error_s", "<f8"),  # largest error of offset_s; infinite if not measured
    ]
)

HISTORY = 8
"""Number of recent operations per frontier whose signatures are kept: enough to find where
two ranks diverged."""

FRONTIER = np.dtype(
    [
        ("rank", "<i4"),
        ("communicator", "<u4"),
        ("direction", "u1"),  # 0 for collectives, else Operation.SEND or RECEIVE
        ("peer", "<i4"),  # of send and receive, else -1
        ("entered", "<u8"),  # highest number called
        ("began", "<u8"),  # highest number called, before those that are queued
        ("ended", "<u8"),  # highest number ended
        ("open", "<u8"),  # lowest number that has begun and not ended, 0 if none
        ("open_nbytes", "<u8"),
        ("open_s", "<f8"),  # when the open operation began, by the node's clock
        ("asynchronous", "?"),  # whether the open operation is
        # Lowest number in a queue of the device that has not begun, 0 if none: the device does
        # other work of this rank first. And when it was called, by the node's clock.
        ("queued", "<u8"),
        ("queued_s", "<f8"),
        # Signatures of the last numbers, at number % HISTORY; 0: not known.
        ("history", "<u8", (HISTORY,)),
    ]
)

STEP = np.dtype(
    [
        ("rank", "<i4"),
        ("step", "<u4"),
        ("role", "<u8"),  # hash of its calls: ranks with equal roles do equal work
        ("own_s", "<f8"),  # outside of any operation
        ("duration_s", "<f8"),
        ("data_s", "<f8"),
        ("checkpoint_s", "<f8"),
        ("garbage_s", "<f8"),
        ("ended_s", "<f8"),  # by the job's clock
        # Payload of its all-to-alls and messages: tokens and activations, which grow with its load.
        ("routed_nbytes", "<f8"),
    ]
)

COLLECTIVE = np.dtype(
    [
        ("communicator", "<u4"),
        ("number", "<u8"),
        ("step", "<u4"),
        ("size_class", "u1"),
        ("arrived", "<u4"),
        # Duration at the rank that arrived last: the transfer alone; inf where ranks leave at
        # different times.
        ("shortest_s", "<f8"),
        ("last", "<i4"),  # the rank that arrived last
        # Signatures: if they differ, ranks called different operations.
        ("lowest", "<u8"),
        ("highest", "<u8"),
        ("lowest_rank", "<i4"),
        ("highest_rank", "<i4"),
    ]
)

TRANSFER = np.dtype(
    [
        ("communicator", "<u4"),
        ("size_class", "u1"),
        ("step", "<u4"),
        ("count", "<u4"),
        ("sum_s", "<f8"),
    ]
)

LAST_ARRIVAL = np.dtype([("rank", "<i4"), ("step", "<u4"), ("times", "<u4")])

MESSAGE = np.dtype(
    [
        ("sender", "<i4"),
        ("receiver", "<i4"),
        ("communicator", "<u4"),
        ("number", "<u8"),
        ("step", "<u4"),
        ("size_class", "u1"),
        ("sides", "u1"),  # 1: recorded by the sender, 2: by the receiver, 3: by both
        ("shortest_s", "<f8"),  # duration at the side that called later
        ("later_s", "<f8"),  # when that side called, by the job's clock
        ("received_s", "<f8"),  # by the job's clock
    ]
)

MEASURE = np.dtype(
    [
        ("rank", "<i4"),
        ("step", "<u4"),
        ("code", "u1"),
        ("communicator", "<u4"),
        ("value", "<f8"),
        ("at_s", "<f8"),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """Summary of some ranks' records; see the tables' dtypes above."""

    ranks: np.ndarray
    frontiers: np.ndarray
    steps: np.ndarray
    collectives: np.ndarray
    transfers: np.ndarray
    last_arrivals: np.ndarray
    messages: np.ndarray
    measures: np.ndarray
    mismatches: np.ndarray
    """Collectives, of dtype COLLECTIVE, that completed although ranks called different
    operations."""


EMPTY = Digest(
    ranks=np.zeros(0, RANK),
    frontiers=np.zeros(0, FRONTIER),
    steps=np.zeros(0, STEP),
    collectives=np.zeros(0, COLLECTIVE),
    transfers=np.zeros(0, TRANSFER),
    last_arrivals=np.zeros(0, LAST_ARRIVAL),
    messages=np.zeros(0, MESSAGE),
    measures=np.zeros(0, MEASURE),
    mismatches=np.zeros(0, COLLECTIVE),
)


def merge(digests: Iterable[Digest], communicators: Mapping[int, Communicator]) -> Digest:
    """Merge digests of distinct ranks into one.

    Takes n log n time in the number of rows.
    """
    parts = list(digests) or [EMPTY]
    collectives = fold_collectives(joined([part.collectives for part in parts]))
    complete, partial = split_whole(collectives, communicators)
    mismatched = complete[complete["lowest"] != complete["highest"]]
    return Digest(
        ranks=_sorted(parts, "ranks", "rank"),
        frontiers=_sorted(parts, "frontiers", "peer", "direction", "communicator", "rank"),
        steps=_sorted(parts, "steps", "rank", "step"),
        collectives=partial,
        transfers=_fold_transfers(
            joined([*(part.transfers for part in parts), transfers_of(complete)])
        ),
        last_arrivals=_fold_last_arrivals(
            joined([*(part.last_arrivals for part in parts), last_arrivals_of(complete)])
        ),
        messages=fold_messages(joined([part.messages for part in parts])),
        measures=_sorted(parts, "measures", "rank", "communicator", "code", "step"),
        mismatches=joined([*(part.mismatches for part in parts), mismatched]),
    )


def fold_collectives(rows: np.ndarray) -> np.ndarray:
    """Fold all rows of the same collective into one row."""
    if not len(rows):
        return rows
    # numpy.lexsort sorts by its last key first. Within a collective, rows are sorted by duration,
    # so the first row is that of the last rank to arrive.
    rows = rows.take(
        np.lexsort((rows["last"], rows["shortest_s"], rows["number"], rows["communicator"]))
    )
    starts = _starts(rows["communicator"], rows["number"])
    folded: np.ndarray = rows.take(starts)
    folded["arrived"] = np.add.reduceat(rows["arrived"], starts)
    folded["step"] = np.maximum.reduceat(rows["step"], starts)
    folded["size_class"] = np.maximum.reduceat(rows["size_class"], starts)
    lowest = np.minimum.reduceat(rows["lowest"], starts)
    highest = np.maximum.reduceat(rows["highest"], starts)
    for index in np.flatnonzero(lowest != highest):
        part = rows[starts[index] : (starts[index + 1] if index + 1 < len(starts) else len(rows))]
        folded["lowest_rank"][index] = part["lowest_rank"][part["lowest"] == lowest[index]].min()
        folded["highest_rank"][index] = part["highest_rank"][
            part["highest"] == highest[index]
        ].min()
    folded["lowest"], folded["highest"] = lowest, highest
    return folded


def split_whole(
    rows: np.ndarray, communicators: Mapping[int, Communicator]
) -> tuple[np.ndarray, np.ndarray]:
    """Split folded collectives into those that all ranks have reported, and the others."""
    distinct, index = np.unique(rows["communicator"], return_inverse=True)
    sizes = np.array([_size(communicators, int(identity)) for identity in distinct], np.int64)
    is_complete = rows["arrived"] >= sizes[index] if len(rows) else np.zeros(0, bool)
    return rows.compress(is_complete), rows.compress(~is_complete)


def transfers_of(collectives: np.ndarray) -> np.ndarray:
    """Return one TRANSFER row for each collective that all ranks have reported, not yet summed."""
    collectives = collectives.compress(np.isfinite(collectives["shortest_s"]))
    rows = np.zeros(len(collectives), TRANSFER)
    for name in ("communicator", "size_class", "step"):
        rows[name] = collectives[name]
    rows["count"], rows["sum_s"] = 1, collectives["shortest_s"]
    return rows


def last_arrivals_of(collectives: np.ndarray) -> np.ndarray:
    """Return the last rank to arrive at each collective that all ranks have reported."""
    collectives = collectives.compress(np.isfinite(collectives["shortest_s"]))
    rows = np.zeros(len(collectives), LAST_ARRIVAL)
    rows["rank"], rows["step"], rows["times"] = collectives["last"], collectives["step"], 1
    return rows


def fold_messages(rows: np.ndarray) -> np.ndarray:
    """Fold the sender's and the receiver's row of the same message into one row."""
    if len(rows) < 2:
        return rows
    rows = rows.take(
        np.lexsort(
            (rows["sides"], rows["number"], rows["communicator"], rows["receiver"], rows["sender"])
        )
    )
    starts = _starts(rows["sender"], rows["receiver"], rows["communicator"], rows["number"])
    folded: np.ndarray = rows.take(starts)
    folded["sides"] = np.bitwise_or.reduceat(rows["sides"], starts)
    folded["shortest_s"] = np.minimum.reduceat(rows["shortest_s"], starts)
    for name in ("later_s", "received_s", "step", "size_class"):
        folded[name] = np.maximum.reduceat(rows[name], starts)
    return folded


def _fold_transfers(rows: np.ndarray) -> np.ndarray:
    if not len(rows):
        return rows
    rows = rows.take(
        np.lexsort((rows["sum_s"], rows["step"], rows["size_class"], rows["communicator"]))
    )
    starts = _starts(rows["communicator"], rows["size_class"], rows["step"])
    folded: np.ndarray = rows.take(starts)
    folded["count"] = np.add.reduceat(rows["count"], starts)
    folded["sum_s"] = np.add.reduceat(rows["sum_s"], starts)
    return folded


def _fold_last_arrivals(rows: np.ndarray) -> np.ndarray:
    if not len(rows):
        return rows
    rows = rows.take(np.lexsort((rows["step"], rows["rank"])))
    starts = _starts(rows["rank"], rows["step"])
    folded: np.ndarray = rows.take(starts)
    folded["times"] = np.add.reduceat(rows["times"], starts)
    return folded


def _starts(*columns: np.ndarray) -> np.ndarray:
    """Return where runs of equal values begin in columns that are sorted together."""
    changed = np.zeros(len(columns[0]), bool)
    changed[0] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changed)


def _sorted(parts: Iterable[Digest], table: str, *keys: str) -> np.ndarray:
    rows: np.ndarray = joined([getattr(part, table) for part in parts])
    return rows.take(np.lexsort(tuple(rows[key] for key in keys)))


def _size(communicators: Mapping[int, Communicator], identity: int) -> int:
    """Return how many ranks a communicator has.

    For an unknown communicator, returns more than can ever arrive, so its collectives stay partial.
    """
    communicator = communicators.get(identity)
    return len(communicator.ranks) if communicator else 2**31
