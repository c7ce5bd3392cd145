"""Who waits for whom, and how long messages take between whom: matrices for people to look at. Pure.

Diagnosis has its own statistics; these are plain means over the records at hand. In the waiting matrix a column that stands
out is a rank that arrives late at collectives. In the transfer matrix a cell that stands out is a link, a row a sender, a
column a receiver (after C4D, arXiv 2406.04594).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.records import Kind, Operation, RankRecords


@dataclass(frozen=True, slots=True)
class DelayMatrices:
    """Mean seconds between pairs.

    Args:
        rows: ranks that each row, and likewise each column, stands for.
        waiting: [i, j]: how long i waits for j in a collective, over all collectives of both; not a number without any.
        transfer: [i, j]: how long a message from i to j takes once both sides are at it; not a number without any.
    """

    rows: tuple[tuple[int, ...], ...]
    waiting: np.ndarray
    transfer: np.ndarray


def delays(ranks: Mapping[int, RankRecords], rows: int, newest: int = 512) -> DelayMatrices:
    """Return the matrices over the `newest` finished operations of each rank, with at most `rows` rows of neighbouring ranks."""
    order = sorted(ranks)
    per_row = max(1, -(-len(order) // rows))
    grouped = tuple(
        tuple(order[first : first + per_row]) for first in range(0, len(order), per_row)
    )
    row_of = {rank: row for row, members in enumerate(grouped) for rank in members}
    table = _operations([ranks[rank] for rank in order], newest)
    return DelayMatrices(
        grouped, _waiting(table, row_of, len(grouped)), _transfer(table, row_of, len(grouped))
    )


def _operations(told: Sequence[RankRecords], newest: int) -> np.ndarray:
    """Return the newest finished operations of all ranks in one table, times by the job's clock."""
    parts = []
    for one in told:
        mine = one.records[(one.records["kind"] == Kind.OPERATION) & (one.records["ended_s"] > 0)][
            -newest:
        ]
        part = np.empty(
            len(mine),
            [
                ("rank", "i4"),
                ("code", "u1"),
                ("peer", "i4"),
                ("communicator", "u4"),
                ("number", "u8"),
                ("began_s", "f8"),
                ("ended_s", "f8"),
            ],
        )
        part["rank"] = one.rank
        for name in ("code", "peer", "communicator", "number"):
            part[name] = mine[name]
        part["began_s"] = mine["enqueued_s"] + one.offset_s
        part["ended_s"] = mine["ended_s"] + one.offset_s
        parts.append(part)
    return np.concatenate(parts) if parts else np.empty(0, [("code", "u1")])


def _waiting(table: np.ndarray, row_of: Mapping[int, int], rows: int) -> np.ndarray:
    table = table[(table["code"] != Operation.SEND) & (table["code"] != Operation.RECEIVE)]
    if not len(table):
        return np.full((rows, rows), np.nan)
    table = table[np.lexsort((table["began_s"], table["number"], table["communicator"]))]
    # One run of equal (communicator, number) is one collective; within it the last is who arrived last.
    differs = (np.diff(table["communicator"]) != 0) | (np.diff(table["number"]) != 0)
    run = np.concatenate([[0], np.cumsum(differs)])
    last = np.concatenate([np.flatnonzero(differs), [len(table) - 1]])[run]
    shared = np.bincount(run)[run] > 1
    waits = table["began_s"][last] - table["began_s"]
    into = np.array([row_of[int(rank)] for rank in table["rank"]])
    total = np.zeros((rows, rows))
    # A pair's mean is over all collectives that both took part in, also those for which it did not wait.
    np.add.at(total, (into[shared], into[last][shared]), waits[shared])
    together = np.zeros((run[-1] + 1, rows))
    together[run, into] = 1
    count = together.T @ together
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: np.ndarray = total / count
    np.fill_diagonal(mean, np.nan)
    return mean


def _transfer(table: np.ndarray, row_of: Mapping[int, int], rows: int) -> np.ndarray:
    total, count = np.zeros((rows, rows)), np.zeros((rows, rows))
    sent = {
        (int(one["communicator"]), int(one["rank"]), int(one["peer"]), int(one["number"])): float(
            one["began_s"]
        )
        for one in table[table["code"] == Operation.SEND]
    }
    for one in table[table["code"] == Operation.RECEIVE]:
        source, target = int(one["peer"]), int(one["rank"])
        began_s = sent.get((int(one["communicator"]), source, target, int(one["number"])))
        if began_s is None or source not in row_of:
            continue
        place = row_of[source], row_of[target]
        total[place] += max(0.0, float(one["ended_s"]) - max(began_s, float(one["began_s"])))
        count[place] += 1
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: np.ndarray = total / count
    return mean
