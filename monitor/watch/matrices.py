"""Computes matrices of delays between ranks, for people: waiting times and message times. Pure.

Diagnosis has its own statistics; these are means over the records at hand. In the waiting matrix an
outlying column is a rank that arrives late at collectives. In the transfer matrix an outlying cell
is a link, a row a sender, a column a receiver (after C4D, arXiv 2406.04594).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.records import (
    Communicator,
    Kind,
    Operation,
    RankRecords,
    arrival_times,
    is_open,
)
from keepstep.monitor.watch.step_times import group_ranks

_OPERATION = np.dtype(
    [
        ("rank", "i4"),
        ("code", "u1"),
        ("peer", "i4"),
        ("communicator", "u4"),
        ("number", "u8"),
        ("began_s", "f8"),
        ("ended_s", "f8"),
    ]
)


@dataclass(frozen=True, slots=True)
class DelayMatrices:
    """Mean seconds between pairs.

    Args:
        rows: ranks that each row, and likewise each column, represents.
        waiting: [i, j]: how long i waits for j in a collective, over all collectives of both; NaN
            if there are none.
        transfer: [i, j]: how long a message from i to j takes after both sides have begun; NaN if
            there are none.
    """

    rows: tuple[tuple[int, ...], ...]
    waiting: np.ndarray
    transfer: np.ndarray


def delays(ranks: Mapping[int, RankRecords], rows: int, newest: int = 512) -> DelayMatrices:
    """Return the matrices over the `newest` ended operations of each rank.

    Neighbouring ranks share a row, so that there are at most `rows` rows.
    """
    grouped = group_ranks(ranks, rows)
    row_of = {rank: row for row, members in enumerate(grouped) for rank in members}
    table = _operations([ranks[rank] for rank in sorted(ranks)], newest)
    return DelayMatrices(
        grouped, _waiting(table, row_of, len(grouped)), _transfer(table, row_of, len(grouped))
    )


def present_waits(
    ranks: Mapping[int, RankRecords],
    communicators: Mapping[int, Communicator],
    grouped: Sequence[Sequence[int]],
) -> np.ndarray:
    """Return how long ranks have waited so far for those that have not come to a collective.

    Args:
        ranks: their newest operations.
        communicators: of the job.
        grouped: the ranks of each row and column.

    Returns:
        [i, j]: seconds for which i has waited for j, the longest; NaN where it does not.
    """
    row_of = {rank: row for row, members in enumerate(grouped) for rank in members}
    waits = np.full((len(grouped), len(grouped)), np.nan)
    for rank, own in ranks.items():
        operations = own.records[own.records["kind"] == Kind.OPERATION]
        is_message = np.isin(operations["code"], (Operation.SEND, Operation.RECEIVE))
        for record in operations[is_open(operations) & ~is_message]:
            communicator = communicators.get(int(record["communicator"]))
            waited_s = own.read_at_s - float(arrival_times(record))
            for other in communicator.ranks if communicator else ():
                theirs = ranks.get(other)
                if other == rank or theirs is None or _has_come(theirs.records, record):
                    continue
                cell = row_of[rank], row_of[other]
                waits[cell] = np.fmax(waits[cell], waited_s)
    return waits


def _has_come(records: np.ndarray, operation: np.void) -> bool:
    """Return whether a rank has called an operation, or a later one of its group."""
    is_same = (records["kind"] == Kind.OPERATION) & (
        records["communicator"] == operation["communicator"]
    )
    return bool((records["number"][is_same] >= operation["number"]).any())


def _operations(all_records: Sequence[RankRecords], newest: int) -> np.ndarray:
    """Return the newest ended operations of all ranks in one table, times by the job's clock."""
    parts = []
    for rank_records in all_records:
        records = rank_records.records
        is_ended = (records["kind"] == Kind.OPERATION) & (records["ended_s"] > 0)
        ended = records[is_ended][-newest:]
        part = np.empty(len(ended), _OPERATION)
        part["rank"] = rank_records.rank
        for name in ("code", "peer", "communicator", "number"):
            part[name] = ended[name]
        part["began_s"] = arrival_times(ended) + rank_records.offset_s
        part["ended_s"] = ended["ended_s"] + rank_records.offset_s
        parts.append(part)
    return np.concatenate(parts) if parts else np.empty(0, _OPERATION)


def _waiting(table: np.ndarray, row_of: Mapping[int, int], rows: int) -> np.ndarray:
    table = table[(table["code"] != Operation.SEND) & (table["code"] != Operation.RECEIVE)]
    if not len(table):
        return np.full((rows, rows), np.nan)
    table = table[np.lexsort((table["began_s"], table["number"], table["communicator"]))]
    # A run of equal (communicator, number) is one collective, and its last row the rank that
    # arrived last.
    differs = (np.diff(table["communicator"]) != 0) | (np.diff(table["number"]) != 0)
    run = np.concatenate([[0], np.cumsum(differs)])
    last = np.concatenate([np.flatnonzero(differs), [len(table) - 1]])[run]
    shared = np.bincount(run)[run] > 1
    waits = table["began_s"][last] - table["began_s"]
    row = np.array([row_of[int(rank)] for rank in table["rank"]])
    total = np.zeros((rows, rows))
    # The mean of a pair is over all collectives of both, also those in which neither waited for the
    # other.
    np.add.at(total, (row[shared], row[last][shared]), waits[shared])
    together = np.zeros((run[-1] + 1, rows))
    together[run, row] = 1
    count = together.T @ together
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: np.ndarray = total / count
    np.fill_diagonal(mean, np.nan)
    return mean


def _transfer(table: np.ndarray, row_of: Mapping[int, int], rows: int) -> np.ndarray:
    total, count = np.zeros((rows, rows)), np.zeros((rows, rows))
    is_receive = table["code"] == Operation.RECEIVE
    messages = table[(table["code"] == Operation.SEND) | is_receive]
    is_receive = messages["code"] == Operation.RECEIVE
    source = np.where(is_receive, messages["peer"], messages["rank"])
    target = np.where(is_receive, messages["rank"], messages["peer"])
    # The two sides of a message become neighbours, the send before the receive.
    keys = (messages["number"], target, source, messages["communicator"])
    order = np.lexsort((is_receive, *keys))
    is_pair = is_receive[order][1:] & ~is_receive[order][:-1]
    for key in keys:
        is_pair &= key[order][1:] == key[order][:-1]
    sends, receives = order[:-1][is_pair], order[1:][is_pair]
    both_began_s = np.maximum(messages["began_s"][sends], messages["began_s"][receives])
    took_s = np.maximum(messages["ended_s"][receives] - both_began_s, 0.0)
    row = np.array([row_of[rank] for rank in messages["rank"].tolist()], np.int64)
    cells = row[sends], row[receives]
    np.add.at(total, cells, took_s)
    np.add.at(count, cells, 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: np.ndarray = total / count
    return mean
