"""Aligns the clocks of nodes from the operations that they do together. Pure; trusts neither NTP nor any node.

Two things are known of an operation that several nodes take part in. What is certain: nobody leaves before everybody whose data it needs
has entered. If b entered by its clock at e and a left by its own at l, then b's clock is ahead of a's by no less than e - l, whatever the
network did: each operation bounds differences of offsets from one side, and the tightest bounds of many, followed along the graph of
nodes (shortest paths in a system of difference constraints), enclose each offset in an interval. That interval is the error we state:
it holds without assumptions on delays, but for the clocks' drift, which is allowed for. Sends and receives and rooted operations
bound as well, so stages of a pipeline are aligned though they share no collective (as NTP does it, after Cristian, 1989).

What is likely: all leave an all-reduce, all-gather, all-to-all or barrier nearly together, some a bit later. The differences of two nodes'
leaving times half_sample_mode around the difference of their clocks, with tails to both sides; the middle of the shortest
interval that holds an eighth of them, found by halving (after Bickel's half-sample mode), is where they half_sample_mode, also when one of the
two is usually late. It is the estimate, unless the certain bounds exclude it.
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

# Quartz is within 50 parts per million, and a clock that is being corrected runs off by as much again.
DRIFT = 1e-4
# Of each communicator; bounds from long ago are loosened by drift anyway.
LATEST_OPERATIONS = 512

_TOGETHER = (Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.ALL_TO_ALL, Operation.BARRIER)
_FROM_ROOT = (Operation.BROADCAST, Operation.SCATTER)
_TO_ROOT = (Operation.REDUCE, Operation.GATHER)
_PAIR = (Operation.SEND, Operation.RECEIVE)
_CODES = 256


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """What to add to a node's clock to have the job's, and how far that may be off; infinitely far if nothing is known."""

    offset_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class _SharedOperations:
    """Operations of one communicator: entering and leaving times, [operation, node]; NaN where they bound nothing."""

    nodes: Integers
    entered_s: Floats
    left_s: Floats
    is_together: npt.NDArray[np.bool_]


def align(job: JobRecords, reference: str | None = None) -> JobRecords:
    """Return the records with each rank's clock offset filled in. See `estimate_clocks`."""
    clocks = estimate_clocks(job.ranks, reference)
    ranks = {
        rank: replace(
            one, offset_s=clocks[one.node].offset_s, offset_error_s=clocks[one.node].error_s
        )
        for rank, one in job.ranks.items()
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
    names = sorted({one.node for one in ranks.values()})
    if not names:
        return {}
    index = {name: number for number, name in enumerate(names)}
    origin = index[reference] if reference is not None else 0
    meetings = _shared_operations(ranks, index)
    bounds = _bounds(meetings, len(names))
    above, below = _shortest(bounds, origin), _shortest(bounds.T, origin)
    likely = _likely(meetings, bounds, origin)
    clocks = {}
    for name, node in index.items():
        low, high = sorted((-float(below[node]), float(above[node])))
        if not (np.isfinite(low) and np.isfinite(high)):
            clocks[name] = ClockOffset(0.0, float("inf"))
            continue
        offset = (
            (low + high) / 2 if np.isnan(likely[node]) else min(max(float(likely[node]), low), high)
        )
        clocks[name] = ClockOffset(offset, max(high - offset, offset - low))
    return clocks


def half_sample_mode(values: Floats) -> float:
    """Return the middle of where values half_sample_mode: of the shortest half of the shortest half of the shortest half.

    Of a one-sided tail it finds the beginning, where a mean or median is drawn into the tail.
    """
    ordered = np.sort(values)
    for _ in range(3):
        half = len(ordered) // 2 + 1
        if half < 3 or half == len(ordered):
            break
        widths = ordered[half - 1 :] - ordered[: len(ordered) - half + 1]
        # Of equally short ones those in the middle, so that turning all signs turns the result's.
        shortest = np.flatnonzero(widths == widths.min())
        ordered = ordered[shortest[(len(shortest) - 1) // 2] : shortest[len(shortest) // 2] + half]
    return float((ordered[0] + ordered[-1]) / 2)


def _shared_operations(
    ranks: Mapping[int, RankRecords], index: Mapping[str, int]
) -> list[_SharedOperations]:
    """Bring together what the ranks told of the same operations."""
    told: dict[tuple[int, ...], list[tuple[int, Floats]]] = defaultdict(list)
    for rank, one in ranks.items():
        records = one.records
        called = records[(records["kind"] == Kind.OPERATION) & (records["communicator"] != 0)]
        # An operation without payload may be over before it began.
        called = called[(called["nbytes"] > 0) | (called["code"] == Operation.BARRIER)]
        if not len(called):
            continue
        is_over = (called["ended_s"] > 0) & (called["flags"] & (Flag.FAILED | Flag.UNOBSERVED) == 0)
        entered = called["enqueued_s"].copy()
        left = np.where(is_over, called["ended_s"], np.nan)
        code, peer = called["code"], called["peer"]
        entered[np.isin(code, _FROM_ROOT) & (peer != rank) | (code == Operation.RECEIVE)] = np.nan
        left[np.isin(code, _TO_ROOT) & (peer != rank)] = np.nan
        # What is done with whom: a collective of a communicator, or messages to, or from, one peer in it.
        is_send, is_receive = code == Operation.SEND, code == Operation.RECEIVE
        way = np.where(is_send, 1, np.where(is_receive, 2, 0))
        other = np.where(way > 0, peer.astype(np.int64), 0)
        family = (called["communicator"].astype(np.int64) << 30) + (other << 2) + way
        for kind in np.unique(family).tolist():
            mine = np.flatnonzero(family == kind)[-LATEST_OPERATIONS:]
            columns = np.column_stack(
                [called["number"][mine], code[mine], entered[mine], left[mine]]
            )
            first = mine[0]
            pair = {0: (-1, -1), 1: (rank, int(peer[first])), 2: (int(peer[first]), rank)}[
                int(way[first])
            ]
            told[int(called["communicator"][first]), *pair].append((index[one.node], columns))
    return [meeting for parts in told.values() if (meeting := _arrange_shared(parts)) is not None]


def _arrange_shared(parts: list[tuple[int, Floats]]) -> _SharedOperations | None:
    """Arrange what ranks told of one communicator (or pair) by operation and node."""
    nodes, column = np.unique([node for node, _ in parts], return_inverse=True)
    if len(nodes) < 2:
        return None
    # A send and its receive are one operation; other ranks that call a number differently are out of step, and bound nothing.
    called = np.concatenate([rows[:, :2] for _, rows in parts]).astype(np.int64)
    code = np.where(np.isin(called[:, 1], _PAIR), 0, called[:, 1])
    unique, row = np.unique(called[:, 0] * _CODES + code, return_inverse=True)
    at = np.repeat(column, [len(rows) for _, rows in parts])
    entered, left = (
        np.full((len(unique), len(nodes)), -np.inf),
        np.full((len(unique), len(nodes)), np.inf),
    )
    values = np.concatenate([rows[:, 2:] for _, rows in parts])
    # Ranks of one node share its clock: the last of them to enter and the first to leave bound most tightly.
    np.maximum.at(entered, (row, at), np.where(np.isnan(values[:, 0]), -np.inf, values[:, 0]))
    np.minimum.at(left, (row, at), np.where(np.isnan(values[:, 1]), np.inf, values[:, 1]))
    entered[np.isinf(entered)] = np.nan
    left[np.isinf(left)] = np.nan
    return _SharedOperations(nodes, entered, left, np.isin(unique % _CODES, _TOGETHER))


def _bounds(meetings: list[_SharedOperations], count: int) -> Floats:
    """Return, for each pair (a, b) of nodes, the most that b's offset may exceed a's; infinite if nothing says so."""
    bounds = np.full((count, count), np.inf)
    for meeting in meetings:
        left, entered = meeting.left_s, meeting.entered_s
        for at, node in enumerate(meeting.nodes):
            if np.isnan(left[:, at]).all():
                continue
            age_s = np.nanmax(left[:, at]) - left[:, at]
            spans = (left[:, at] + DRIFT * age_s)[:, None] - entered
            tightest = np.where(np.isnan(spans), np.inf, spans).min(axis=0)
            bounds[node, meeting.nodes] = np.minimum(bounds[node, meeting.nodes], tightest)
    np.fill_diagonal(bounds, 0.0)
    return bounds


def _shortest(lengths: Floats, origin: int) -> Floats:
    """Return the length of the shortest path from `origin` to each node (Bellman and Ford; lengths may be negative)."""
    found: Floats = lengths[origin].copy()
    for _ in range(len(lengths)):
        shorter = np.minimum(found, (found[:, None] + lengths).min(axis=0))
        if (shorter == found).all():
            break
        found = shorter
    return found


def _likely(meetings: list[_SharedOperations], bounds: Floats, origin: int) -> Floats:
    """Return each node's likely offset, along the tree of tightest pairs; NaN where no pair bounds both ways."""
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
        known = int(parent[node])
        offsets[node] = offsets[known] + _likely_difference(meetings, bounds, known, node)
        closer = waiting & (widths[node] < nearest)
        nearest[closer], parent[closer] = widths[node][closer], node
    return offsets


def _likely_difference(
    meetings: list[_SharedOperations], bounds: Floats, known: int, node: int
) -> float:
    """Return by how much one node's offset likely exceeds another's."""
    found = []
    for meeting in meetings:
        columns = [np.flatnonzero(meeting.nodes == one) for one in (known, node)]
        if all(len(column) for column in columns):
            left = meeting.left_s[meeting.is_together]
            differences = left[:, columns[0][0]] - left[:, columns[1][0]]
            found.append(differences[~np.isnan(differences)])
    differences = np.concatenate(found) if found else np.empty(0)
    low, high = -bounds[node, known], bounds[known, node]
    return half_sample_mode(differences) if len(differences) else float((low + high) / 2)
