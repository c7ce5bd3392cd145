"""Writes steps of all ranks as a trace in Chrome's format, which Perfetto reads. Pure.

A process of the trace is a rank. Its threads are its steps, their phases, and one for each process
group; slices of a group that overlap get further threads, since a viewer shows only nested ones.
Operations that belong together on different ranks (a collective, or a send with its receive) are
tied by a flow, in the order in which the ranks came.

Times are microseconds since `baseTimeNanoseconds`, which is the one that torch.profiler uses then,
so its traces of the same job lie on the same axis.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from keepstep.monitor.records import (
    DTYPES,
    Communicator,
    Flag,
    Kind,
    Operation,
    Phase,
    arrival_times,
)
from keepstep.monitor.telemetry.record_history import RankState
from keepstep.monitor.watch.step_times import display_name

Event = dict[str, Any]

_KINETO_PERIOD_S = 7_889_238
"""Kineto, torch.profiler's library, counts from the last multiple of this: a quarter of a year."""
_SHORTEST_NS = 1
"""A slice of no length is dropped by viewers, and the flow that begins in it."""
_STEPS, _PHASES = "steps", "phases"
_POINT_TO_POINT = (Operation.SEND, Operation.RECEIVE)


@dataclass(frozen=True, slots=True)
class TracedRank:
    """One writer's records of the steps.

    Args:
        state: the rank.
        records: its records of the steps, with the times of its node.
        to_unix_s: Unix time minus its node's clock.
    """

    state: RankState
    records: np.ndarray
    to_unix_s: float


@dataclass(frozen=True, slots=True)
class _Slice:
    """One record on its thread."""

    rank: int
    track: str
    name: str
    category: str
    begin_ns: int
    end_ns: int
    arguments: Mapping[str, Any]
    flow: tuple[int, ...] | None


def base_time_s(unix_s: float) -> int:
    """Return the Unix time that a trace of this time counts from, as torch.profiler does."""
    return int(unix_s // _KINETO_PERIOD_S) * _KINETO_PERIOD_S


def trace_events(
    ranks: Sequence[TracedRank],
    communicators: Mapping[int, Communicator],
    base_s: int,
    step_name: str = "step {}",
) -> Iterator[Event]:
    """Yield the events of a trace: names, then slices, then flows.

    Args:
        ranks: what each writer recorded; several of one rank after a recovery.
        communicators: of the job.
        base_s: Unix time that the trace counts from.
        step_name: of the slices of steps, with a field for the number.
    """
    tied: dict[tuple[int, ...], list[tuple[_Slice, int]]] = {}
    by_rank: dict[int, list[TracedRank]] = {}
    for traced in ranks:
        by_rank.setdefault(traced.state.rank, []).append(traced)
    for _, parts in sorted(by_rank.items()):
        slices = list(
            chain.from_iterable(_slices(part, communicators, base_s, step_name) for part in parts)
        )
        threads = _threads(slices)
        state = parts[-1].state
        yield from _names(state, list(threads))
        # Perfetto takes the thread with the number of its process as the main one, here the steps.
        for thread, placed in enumerate(threads.values(), state.rank):
            for piece in placed:
                yield _complete_event(piece, thread)
                if piece.flow is not None:
                    tied.setdefault(piece.flow, []).append((piece, thread))
    yield from _flows(tied.values())


def trace_text(
    events: Iterable[Event], base_s: int, about: Mapping[str, Any], distributed: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the lines of a trace's file.

    Args:
        events: of the trace.
        base_s: Unix time that it counts from.
        about: what else to say of the trace.
        distributed: the `distributedInfo` of a trace of one rank; empty for all ranks.
    """
    head: dict[str, Any] = {"schemaVersion": 1}
    if distributed:
        head["distributedInfo"] = distributed
    head |= {"displayTimeUnit": "ms", "baseTimeNanoseconds": base_s * 1_000_000_000, **about}
    # HTA looks for the rank line by line, and for a blank before its number.
    yield json.dumps(head)[:-1] + ', "traceEvents": [\n'
    separator = ""
    for event in events:
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ",\n"
    yield "\n]}\n"


def _slices(
    traced: TracedRank, communicators: Mapping[int, Communicator], base_s: int, step_name: str
) -> Iterator[_Slice]:
    """Yield a slice for each phase and operation, by the time that it began."""
    records = traced.records
    records = records[(records["kind"] == Kind.PHASE) | (records["kind"] == Kind.OPERATION)]
    is_operation = records["kind"] == Kind.OPERATION
    began_s = np.where(is_operation, arrival_times(records), records["enqueued_s"])
    is_unobserved = (records["flags"] & Flag.UNOBSERVED) != 0
    unended_s = np.where(is_unobserved, began_s, traced.state.read_at_s)
    ended_s = np.where(records["ended_s"] > 0, records["ended_s"], unended_s)
    shift_s = traced.to_unix_s - base_s
    begin_ns = np.rint((began_s + shift_s) * 1e9).astype(np.int64)
    end_ns = np.maximum(
        np.rint((ended_s + shift_s) * 1e9).astype(np.int64), begin_ns + _SHORTEST_NS
    )
    for record, begin, end in zip(records, begin_ns.tolist(), end_ns.tolist(), strict=True):
        if record["kind"] == Kind.PHASE:
            yield _phase(traced.state.rank, record, begin, end, step_name)
        else:
            yield _operation(traced.state, record, communicators, begin, end)


def _phase(rank: int, record: np.void, begin_ns: int, end_ns: int, step_name: str) -> _Slice:
    step, is_step = int(record["step"]), record["code"] == Phase.STEP
    name = step_name.format(step) if is_step else display_name(Phase, int(record["code"]))
    arguments: dict[str, Any] = {"step": step}
    if record["ended_s"] <= 0:
        arguments["state"] = "has not ended"
    return _Slice(
        rank=rank,
        track=_STEPS if is_step else _PHASES,
        name=name,
        category="step" if is_step else "phase",
        begin_ns=begin_ns,
        end_ns=end_ns,
        arguments=arguments,
        flow=None,
    )


def _operation(
    state: RankState,
    record: np.void,
    communicators: Mapping[int, Communicator],
    begin_ns: int,
    end_ns: int,
) -> _Slice:
    identity, code, flags = int(record["communicator"]), int(record["code"]), int(record["flags"])
    number, peer = int(record["number"]), int(record["peer"])
    group = communicators.get(identity)
    is_pair = code in _POINT_TO_POINT
    arguments: dict[str, Any] = {
        "kind": display_name(Operation, code),
        "sequence": number,
        "bytes": int(record["nbytes"]),
        "dtype": DTYPES[record["dtype"]],
        "step": int(record["step"]),
    }
    if peer >= 0:
        arguments["peer" if is_pair else "root"] = peer
    if flags & Flag.ASYNCHRONOUS:
        arguments["asynchronous"] = True
    if flags & Flag.DEVICE_TIMES and record["started_s"] > 0:
        waited_us = float(record["started_s"] - record["enqueued_s"]) * 1e6
        arguments["called_us_before"] = round(waited_us, 3)
    if flags & Flag.FAILED:
        arguments["state"] = "failed"
    elif flags & Flag.UNOBSERVED:
        arguments["state"] = "end not seen"
    elif record["ended_s"] <= 0:
        arguments["state"] = "has not ended"
    ends = (-1, -1)
    if is_pair:
        ends = (state.rank, peer) if code == Operation.SEND else (peer, state.rank)
    return _Slice(
        rank=state.rank,
        track=(
            f"group {group.name} of {len(group.ranks)} ranks" if group else f"group {identity:08x}"
        ),
        name=display_name(Operation, code),
        category="point to point" if is_pair else "collective",
        begin_ns=begin_ns,
        end_ns=end_ns,
        arguments=arguments,
        flow=(state.generation, identity, number, *ends),
    )


def _threads(slices: Iterable[_Slice]) -> dict[str, list[_Slice]]:
    """Return the slices by thread, such that those of each thread are nested or apart."""
    tracks: dict[str, list[_Slice]] = {}
    for piece in slices:
        tracks.setdefault(piece.track, []).append(piece)
    order = sorted(tracks, key=lambda name: (name != _STEPS, name != _PHASES, name))
    threads: dict[str, list[_Slice]] = {}
    for track in order:
        lanes: list[tuple[list[int], list[_Slice]]] = []
        for piece in sorted(tracks[track], key=lambda piece: (piece.begin_ns, -piece.end_ns)):
            lane = next((lane for lane in lanes if _fits(lane[0], piece)), None)
            if lane is None:
                lane = ([], [])
                lanes.append(lane)
            lane[0].append(piece.end_ns)
            lane[1].append(piece)
        for number, (_, placed) in enumerate(lanes, 1):
            threads[track if number == 1 else f"{track} ({number})"] = placed
    return threads


def _fits(open_ends_ns: list[int], piece: _Slice) -> bool:
    """Return whether a slice is nested in those that are open, or after them; drop ended ones."""
    while open_ends_ns and open_ends_ns[-1] <= piece.begin_ns:
        open_ends_ns.pop()
    return not open_ends_ns or piece.end_ns <= open_ends_ns[-1]


def _names(state: RankState, threads: Sequence[str]) -> Iterator[Event]:
    def named(kind: str, thread: int, **arguments: Any) -> Event:
        return {"ph": "M", "name": kind, "pid": state.rank, "tid": thread, "args": arguments}

    yield named("process_name", state.rank, name=f"rank {state.rank} on {state.node}")
    yield named("process_labels", state.rank, labels=f"process {state.pid}")
    yield named("process_sort_index", state.rank, sort_index=state.rank)
    for thread, name in enumerate(threads, state.rank):
        yield named("thread_name", thread, name=name)
        yield named("thread_sort_index", thread, sort_index=thread)


def _complete_event(piece: _Slice, thread: int) -> Event:
    return {
        "ph": "X",
        "name": piece.name,
        "cat": piece.category,
        "pid": piece.rank,
        "tid": thread,
        "ts": piece.begin_ns / 1000,
        "dur": (piece.end_ns - piece.begin_ns) / 1000,
        "args": dict(piece.arguments),
    }


def _flows(tied: Iterable[Sequence[tuple[_Slice, int]]]) -> Iterator[Event]:
    """Yield a flow through each operation: as the ranks came, or from send to receive.

    A receive that was called before its send is joined where that begins, not against time.
    """
    for number, members in enumerate(tied, 1):
        if len(members) < 2:
            continue
        ordered = sorted(members, key=lambda member: (member[0].name == "receive", _begin(member)))
        at_ns = 0
        for place, (piece, thread) in enumerate(ordered):
            at_ns = min(max(piece.begin_ns, at_ns), piece.end_ns)
            kind = "s" if place == 0 else "f" if place == len(ordered) - 1 else "t"
            event = {
                "ph": kind,
                "id": number,
                "name": ordered[0][0].name,
                "cat": "flow",
                "pid": piece.rank,
                "tid": thread,
                "ts": at_ns / 1000,
            }
            yield event | {"bp": "e"} if kind == "f" else event


def _begin(member: tuple[_Slice, int]) -> int:
    return member[0].begin_ns
