"""Estimates the offsets of nodes' clocks from the operations that the nodes share.

Pure. Assumes neither NTP nor that any node's clock is right. An operation in which several nodes
take part gives a bound and an estimate.

The bound is certain: no rank leaves before every rank whose data it needs has entered. If b entered
at e by its clock and a left at l by its own, then b's clock is ahead of a's by at least e - l,
whatever the network did. So each operation bounds a difference of offsets from one side. The
tightest bounds of many operations, combined along the graph of nodes (shortest paths in a system of
difference constraints), enclose each offset in an interval. That interval is the stated error: it
holds without assumptions on delays, except for the clocks' drift, which is allowed for. Sends and
receives and rooted operations give bounds too, so stages of a pipeline are aligned though they
share no collective (as NTP does, after Cristian, 1989). An all-to-all gives none: where its splits
are uneven, two ranks may have nothing for each other, and records do not tell. Bounds that exclude
every offset are none: some record is wrong, and nobody knows which.

The estimate is likely: all ranks leave an all-reduce, all-gather, all-to-all or barrier at nearly
the same time, some a little later. The differences of two nodes' leaving times cluster around the
difference of their clocks, with tails on both sides. The center of the shortest interval that holds
an eighth of them, found by repeated halving (after Bickel's half-sample mode), locates the cluster,
even if one of the two nodes is usually late. It is the estimate, unless the bounds exclude it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from keepstep.monitor.records import Flag, JobRecords, Kind, Operation, RankRecords

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# Quartz is within 50 parts per million, and a clock that is being corrected deviates as much again.
DRIFT = 1e-4
# Of each communicator; drift loosens older bounds anyway.
LATEST_OPERATIONS = 512

_TOGETHER = (Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.ALL_TO_ALL, Operation.BARRIER)
_FROM_ROOT = (Operation.BROADCAST, Operation.SCATTER)
_TO_ROOT = (Operation.REDUCE, Operation.GATHER)
_PAIR = (Operation.SEND, Operation.RECEIVE)
_CODES = 256


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The offset of a node's clock from the job's.

    Args:
        offset_s: seconds to add to the node's monotonic clock to obtain the job's.
        error_s: the most that the offset may be wrong by; infinite if nothing is known.
    """

    offset_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class _SharedOperations:
    """Operations of one communicator.

    Args:
        nodes: index of the node of each column.
        entered_s, left_s: times of entering and leaving, [operation, node]; NaN where the time
            gives no bound.
        is_together: [operation]: whether all ranks leave at nearly the same time.
    """

    nodes: Integers
    entered_s: Floats
    left_s: Floats
    is_together: npt.NDArray[np.bool_]


def align(job: JobRecords, reference: str | None = None) -> JobRecords:
    """Return the records with each rank's clock offset filled in. See `estimate_clocks`."""
    clocks = estimate_clocks(job.ranks, reference)
    ranks = {
        rank: replace(
            records,
            offset_s=clocks[records.node].offset_s,
            offset_error_s=clocks[records.node].error_s,
        )
        for rank, records in job.ranks.items()
    }
    return JobRecords(ranks, job.communicators)


def estimate_clocks(
    ranks: Mapping[int, RankRecords], reference: str | None = None
) -> dict[str, ClockOffset]:
    """Estimate the offset of each node's clock.

    Args:
        ranks: records of ranks on several nodes, of about the same time.
        reference: the node whose clock is the job's; by default the first by name.
    """
    names = sorted({records.node for records in ranks.values()})
    if not names:
        return {}
    index = {name: number for number, name in enumerate(names)}
    origin = index[reference] if reference is not None else 0
    shared = _shared_operations(ranks, index)
    bounds = _bounds(shared, len(names))
    above, below = _shortest_paths(bounds, origin), _shortest_paths(bounds.T, origin)
    estimates = _estimates(shared, bounds, origin)
    clocks = {}
    for name, node in index.items():
        if node == origin:
            clocks[name] = ClockOffset(0.0, 0.0)
            continue
        low, high = -float(below[node]), float(above[node])
        if not (np.isfinite(low) and np.isfinite(high)) or low > high:
            clocks[name] = ClockOffset(0.0, float("inf"))
            continue
        estimate = float(estimates[node])
        offset = (low + high) / 2 if np.isnan(estimate) else min(max(estimate, low), high)
        clocks[name] = ClockOffset(offset, max(high - offset, offset - low))
    return clocks


def half_sample_mode(values: Floats) -> float:
    """Return the center of the shortest half of the shortest half of the shortest half of values.

    If the values have a one-sided tail, this is near its beginning; a mean or median is not.
    """
    ordered = np.sort(values)
    for _ in range(3):
        half = len(ordered) // 2 + 1
        if half < 3 or half == len(ordered):
            break
        widths = ordered[half - 1 :] - ordered[: len(ordered) - half + 1]
        # Of equally short halves, those in the middle: negating all values negates the result.
        shortest = np.flatnonzero(widths == widths.min())
        ordered = ordered[shortest[(len(shortest) - 1) // 2] : shortest[len(shortest) // 2] + half]
    return float((ordered[0] + ordered[-1]) / 2)


def _shared_operations(
    ranks: Mapping[int, RankRecords], index: Mapping[str, int]
) -> list[_SharedOperations]:
    """Collect the times of the same operations from all ranks."""
    by_group: dict[tuple[int, ...], list[tuple[int, Floats]]] = defaultdict(list)
    for rank, rank_records in ranks.items():
        records = rank_records.records
        called = records[(records["kind"] == Kind.OPERATION) & (records["communicator"] != 0)]
        # An operation without payload may end on one rank before it begins on another.
        called = called[(called["nbytes"] > 0) | (called["code"] == Operation.BARRIER)]
        if not len(called):
            continue
        is_over = (called["ended_s"] > 0) & (called["flags"] & (Flag.FAILED | Flag.UNOBSERVED) == 0)
        entered = called["enqueued_s"].copy()
        left = np.where(is_over, called["ended_s"], np.nan)
        code, peer = called["code"], called["peer"]
        gives_no_bound = np.isin(code, (Operation.RECEIVE, Operation.ALL_TO_ALL))
        entered[np.isin(code, _FROM_ROOT) & (peer != rank) | gives_no_bound] = np.nan
        left[np.isin(code, _TO_ROOT) & (peer != rank)] = np.nan
        # Grouped by communicator and, for messages, by direction and peer.
        is_send, is_receive = code == Operation.SEND, code == Operation.RECEIVE
        direction = np.where(is_send, 1, np.where(is_receive, 2, 0))
        other = np.where(direction > 0, peer.astype(np.int64), 0)
        family = (called["communicator"].astype(np.int64) << 30) + (other << 2) + direction
        for key in np.unique(family).tolist():
            rows = np.flatnonzero(family == key)[-LATEST_OPERATIONS:]
            columns = np.column_stack(
                [called["number"][rows], code[rows], entered[rows], left[rows]]
            )
            first = rows[0]
            first_peer = int(peer[first])
            pair = ((-1, -1), (rank, first_peer), (first_peer, rank))[int(direction[first])]
            group = (int(called["communicator"][first]), *pair)
            by_group[group].append((index[rank_records.node], columns))
    arranged = map(_arrange_shared, by_group.values())
    return [operations for operations in arranged if operations is not None]


def _arrange_shared(parts: list[tuple[int, Floats]]) -> _SharedOperations | None:
    """Arrange the times of one communicator (or pair) by operation and node."""
    nodes, column = np.unique([node for node, _ in parts], return_inverse=True)
    if len(nodes) < 2:
        return None
    # A send and its receive are one operation. Ranks whose operations of one number differ
    # otherwise are out of step, and give no bound.
    called = np.concatenate([rows[:, :2] for _, rows in parts]).astype(np.int64)
    code = np.where(np.isin(called[:, 1], _PAIR), 0, called[:, 1])
    unique, row = np.unique(called[:, 0] * _CODES + code, return_inverse=True)
    at = np.repeat(column, [len(rows) for _, rows in parts])
    entered, left = (
        np.full((len(unique), len(nodes)), -np.inf),
        np.full((len(unique), len(nodes)), np.inf),
    )
    values = np.concatenate([rows[:, 2:] for _, rows in parts])
    # Ranks of one node share its clock: the last to enter and the first to leave give the tightest
    # bounds.
    np.maximum.at(entered, (row, at), np.where(np.isnan(values[:, 0]), -np.inf, values[:, 0]))
    np.minimum.at(left, (row, at), np.where(np.isnan(values[:, 1]), np.inf, values[:, 1]))
    entered[np.isinf(entered)] = np.nan
    left[np.isinf(left)] = np.nan
    return _SharedOperations(nodes, entered, left, np.isin(unique % _CODES, _TOGETHER))


def _bounds(shared: list[_SharedOperations], count: int) -> Floats:
    """Return for each pair (a, b) of nodes the most that b's offset may exceed a's, or infinity."""
    bounds = np.full((count, count), np.inf)
    for operations in shared:
        left, entered = operations.left_s, operations.entered_s
        for at, node in enumerate(operations.nodes):
            if np.isnan(left[:, at]).all():
                continue
            age_s = np.nanmax(left[:, at]) - left[:, at]
            spans = (left[:, at] + DRIFT * age_s)[:, None] - entered
            tightest = np.where(np.isnan(spans), np.inf, spans).min(axis=0)
            bounds[node, operations.nodes] = np.minimum(bounds[node, operations.nodes], tightest)
    np.fill_diagonal(bounds, 0.0)
    return bounds


def _shortest_paths(lengths: Floats, origin: int) -> Floats:
    """Return the length of the shortest path from `origin` to each node.

    The algorithm is that of Bellman and Ford: lengths may be negative.
    """
    distances: Floats = lengths[origin].copy()
    for _ in range(len(lengths)):
        shorter = np.minimum(distances, (distances[:, None] + lengths).min(axis=0))
        if (shorter == distances).all():
            break
        distances = shorter
    return distances


def _estimates(shared: list[_SharedOperations], bounds: Floats, origin: int) -> Floats:
    """Return each node's estimated offset, along the tree of the most tightly bounded pairs.

    NaN for nodes that no pair with bounds from both sides connects to the origin.
    """
    count = len(bounds)
    widths = bounds + bounds.T
    offsets = np.full(count, np.nan)
    offsets[origin] = 0.0
    nearest, parent = widths[origin].copy(), np.full(count, origin)
    waiting = np.ones(count, bool)
    waiting[origin] = False
    while waiting.any():
        node = int(np.argmin(np.where(waiting, nearest, np.inf)))
        if not waiting[node] or not np.isfinite(nearest[node]):
            break
        waiting[node] = False
        neighbour = int(parent[node])
        offsets[node] = offsets[neighbour] + _estimated_difference(shared, bounds, neighbour, node)
        closer = waiting & (widths[node] < nearest)
        nearest[closer], parent[closer] = widths[node][closer], node
    return offsets


def _estimated_difference(
    shared: list[_SharedOperations], bounds: Floats, known: int, node: int
) -> float:
    """Return by how much the offset of `node` is estimated to exceed that of `known`."""
    parts = []
    for operations in shared:
        columns = [np.flatnonzero(operations.nodes == index) for index in (known, node)]
        if all(len(column) for column in columns):
            left = operations.left_s[operations.is_together]
            differences = left[:, columns[0][0]] - left[:, columns[1][0]]
            parts.append(differences[~np.isnan(differences)])
    differences = np.concatenate(parts) if parts else np.empty(0)
    low, high = -bounds[node, known], bounds[known, node]
    return half_sample_mode(differences) if len(differences) else float((low + high) / 2)
