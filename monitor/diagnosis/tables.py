"""Digests: what a node's records come to, in tables that merge up a tree.

A digest holds few numbers per rank and communicator. Tables keyed by rank are simply joined; those keyed by an operation (a collective,
a message) are folded, so that what ranks of different nodes tell of one operation becomes one row. Folding takes minima, maxima and
sums only: merging is associative and commutative, and any tree over the nodes gives the same result. Once a collective is known of
all its ranks, its row dissolves into sums per communicator and step.

`ranks` and `frontiers` are snapshots (the newest digest says all); the other tables are increments, to be merged exactly once.
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
        ("ending", "u1"),  # Ending: what it said of its end
        ("marks_steps", "?"),  # whether it ever told a STEP phase
        ("in_step", "?"),
        (
            "heard_from",
            "<i4",
        ),  # of whom it received a message since its last whole step ended, -1 if of nobody
        ("phase", "i1"),  # innermost phase under way, -1 if none
        ("step", "<u4"),  # highest step heard of
        ("failed", "<u4"),  # operations within reach that ended with an error
        ("read_at_s", "<f8"),  # by the node's clock, as are the next two
        ("moved_s", "<f8"),  # when it last began or ended anything
        ("phase_s", "<f8"),  # when the phase under way began
        ("offset_s", "<f8"),
        ("offset_error_s", "<f8"),  # how far that may be off; infinite if it was not measured
    ]
)

HISTORY = 8
"""Operations of which a frontier remembers what was called: enough to see where two ranks parted."""

FRONTIER = np.dtype(
    [
        ("rank", "<i4"),
        ("communicator", "<u4"),
        ("direction", "u1"),  # 0 for collectives, else Operation.SEND or RECEIVE
        ("peer", "<i4"),  # of send and receive, else -1
        ("entered", "<u8"),  # highest number begun
        ("ended", "<u8"),  # highest number ended
        ("open", "<u8"),  # lowest number under way, 0 if none
        ("open_nbytes", "<u8"),
        ("open_s", "<f8"),  # when that was called, by the node's clock
        ("asynchronous", "?"),  # of the open one
        (
            "history",
            "<u8",
            (HISTORY,),
        ),  # signatures of the last numbers, at number % HISTORY; 0: not known
    ]
)

STEP = np.dtype(
    [
        ("rank", "<i4"),
        ("step", "<u4"),
        ("role", "<u8"),  # hash of what it called: ranks with equal roles do equal work
        ("own_s", "<f8"),  # outside of any operation
        ("duration_s", "<f8"),
        ("data_s", "<f8"),
        ("checkpoint_s", "<f8"),
        ("garbage_s", "<f8"),
        ("ended_s", "<f8"),  # by the job's clock
    ]
)

COLLECTIVE = np.dtype(
    [
        ("communicator", "<u4"),
        ("number", "<u8"),
        ("step", "<u4"),
        ("size_class", "u1"),
        ("arrived", "<u4"),
        (
            "shortest_s",
            "<f8",
        ),  # of the last to arrive: the transfer alone; inf where ranks leave at different times
        ("last", "<i4"),  # who that was
        ("lowest", "<u8"),  # signatures: if they differ, ranks called different things
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
        ("sides", "u1"),  # 1: sender told, 2: receiver told
        ("shortest_s", "<f8"),  # of the later of the two
        ("later_s", "<f8"),  # when that one called, by the job's clock
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


@dataclass(frozen=True, slots=True)
class Digest:
    """What some ranks' records come to; see the tables' dtypes above."""

    ranks: np.ndarray
    frontiers: np.ndarray
    steps: np.ndarray
    collectives: np.ndarray
    transfers: np.ndarray
    last_arrivals: np.ndarray
    messages: np.ndarray
    measures: np.ndarray
    mismatches: np.ndarray
    """Collectives, of dtype COLLECTIVE, that ranks have completed though they called different things."""


EMPTY = Digest(
    np.zeros(0, RANK),
    np.zeros(0, FRONTIER),
    np.zeros(0, STEP),
    np.zeros(0, COLLECTIVE),
    np.zeros(0, TRANSFER),
    np.zeros(0, LAST_ARRIVAL),
    np.zeros(0, MESSAGE),
    np.zeros(0, MEASURE),
    np.zeros(0, COLLECTIVE),
)


def merge(digests: Iterable[Digest], communicators: Mapping[int, Communicator]) -> Digest:
    """Return the digest of all ranks of some digests of distinct ranks. Linear, but for sorting, in their rows."""
    parts = list(digests) or [EMPTY]
    collectives = fold_collectives(joined([part.collectives for part in parts]))
    whole, partial = split_whole(collectives, communicators)
    differing = whole[whole["lowest"] != whole["highest"]]
    return Digest(
        ranks=_sorted(parts, "ranks", "rank"),
        frontiers=_sorted(parts, "frontiers", "peer", "direction", "communicator", "rank"),
        steps=_sorted(parts, "steps", "rank", "step"),
        collectives=partial,
        transfers=_fold_transfers(
            joined([*(part.transfers for part in parts), transfers_of(whole)])
        ),
        last_arrivals=_fold_last_arrivals(
            joined([*(part.last_arrivals for part in parts), last_arrivals_of(whole)])
        ),
        messages=fold_messages(joined([part.messages for part in parts])),
        measures=_sorted(parts, "measures", "rank", "communicator", "code", "step"),
        mismatches=joined([*(part.mismatches for part in parts), differing]),
    )


def fold_collectives(rows: np.ndarray) -> np.ndarray:
    """Make one row of all rows of one collective."""
    if not len(rows):
        return rows
    # The last sort key is the first that counts; by duration within a collective, so that its first row is the last to arrive.
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
    """Divide folded collectives into those of which all ranks have told, and the others."""
    distinct, index = np.unique(rows["communicator"], return_inverse=True)
    sizes = np.array([_size(communicators, int(identity)) for identity in distinct], np.int64)
    whole = rows["arrived"] >= sizes[index] if len(rows) else np.zeros(0, bool)
    return rows.compress(whole), rows.compress(~whole)


def transfers_of(whole: np.ndarray) -> np.ndarray:
    """Return the transfers, not yet summed, of collectives of which all ranks have told."""
    whole = whole.compress(np.isfinite(whole["shortest_s"]))
    rows = np.zeros(len(whole), TRANSFER)
    for name in ("communicator", "size_class", "step"):
        rows[name] = whole[name]
    rows["count"], rows["sum_s"] = 1, whole["shortest_s"]
    return rows


def last_arrivals_of(whole: np.ndarray) -> np.ndarray:
    """Return who came last to the collectives of which all ranks have told."""
    whole = whole.compress(np.isfinite(whole["shortest_s"]))
    rows = np.zeros(len(whole), LAST_ARRIVAL)
    rows["rank"], rows["step"], rows["times"] = whole["last"], whole["step"], 1
    return rows


def fold_messages(rows: np.ndarray) -> np.ndarray:
    """Make one row of what sender and receiver tell of one message."""
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
    """Return where groups of equal values begin in columns that are sorted together."""
    changed = np.zeros(len(columns[0]), bool)
    changed[0] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changed)


def _sorted(parts: Iterable[Digest], table: str, *keys: str) -> np.ndarray:
    rows: np.ndarray = joined([getattr(part, table) for part in parts])
    return rows.take(np.lexsort(tuple(rows[key] for key in keys)))


def _size(communicators: Mapping[int, Communicator], identity: int) -> int:
    """Return how many ranks a communicator has; of an unknown one, more than can ever arrive."""
    known = communicators.get(identity)
    return len(known.ranks) if known else 2**31
