"""Claims about traces in Chrome's format: times, nesting, flows, and what viewers ask of them."""

import json
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from keepstep.monitor.records import (
    RECORD,
    Communicator,
    Ending,
    Flag,
    Kind,
    Operation,
    Phase,
    RankRecords,
)
from keepstep.monitor.telemetry.record_history import RankState
from keepstep.monitor.views.chrome_trace import (
    TracedRank,
    base_time_s,
    trace_events,
    trace_text,
)
from tests.integration.monitor.sample import Plan, SampleReader

BASE_S = base_time_s(1.8e9)
TO_UNIX_S = 1.8e9
WORLD = Communicator(7, "world", (0, 1))
STATE = RankState(
    rank=0,
    node="node-a",
    pid=11,
    incarnation="first",
    is_alive=True,
    ending=Ending.NONE,
    read_at_s=109.0,
    progress_at_s=109.0,
)
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "M": {"name": str, "args": dict},
    "X": {"name": str, "cat": str, "ts": float, "dur": float, "args": dict},
    "s": {"name": str, "cat": str, "ts": float, "id": int},
    "t": {"name": str, "cat": str, "ts": float, "id": int},
    "f": {"name": str, "cat": str, "ts": float, "id": int, "bp": str},
}
"""The fields of each kind of event, besides `ph`, `pid` and `tid`: Chrome's trace event format."""


def record(**fields: Any) -> np.ndarray:
    row = np.zeros(1, RECORD)
    for name, value in fields.items():
        row[name] = value
    if "started_s" not in fields:
        row["started_s"] = row["enqueued_s"]
    return row


def operation(
    code: Operation, number: int, begin_s: float, end_s: float, **more: Any
) -> np.ndarray:
    return record(
        kind=Kind.OPERATION, code=code, number=number, communicator=7, step=1, peer=-1,
        enqueued_s=begin_s, ended_s=end_s,
    ) if not more else record(
        **{"kind": Kind.OPERATION, "code": code, "number": number, "communicator": 7, "step": 1,
           "peer": -1, "enqueued_s": begin_s, "ended_s": end_s} | more
    )  # fmt: skip


def traced(rank: int, *records: np.ndarray) -> TracedRank:
    return TracedRank(replace(STATE, rank=rank), np.concatenate(records), TO_UNIX_S)


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == kind]


@pytest.fixture(scope="module")
def job() -> tuple[dict[int, RankRecords], list[dict[str, Any]]]:
    """Return the records of eight ranks with sends and receives, and their trace."""
    reader = SampleReader(Plan(ranks=8, steps=12, step_s=0.1), time.monotonic() - 60)
    ranks = {reading.records.rank: reading.records for reading in reader.read()}
    parts = [
        TracedRank(replace(STATE, rank=rank), records.records, TO_UNIX_S)
        for rank, records in ranks.items()
    ]
    return ranks, list(trace_events(parts, {reader.group.identity: reader.group}, BASE_S))


def test_every_event_has_the_fields_of_its_kind(
    job: tuple[dict[int, RankRecords], list[dict[str, Any]]],
) -> None:
    _, events = job
    text = "".join(trace_text(events, BASE_S, {"job": "run7"}, {}))
    decoded = json.loads(text)
    assert decoded["traceEvents"] == events
    assert decoded["displayTimeUnit"] == "ms"
    for event in events:
        fields = FIELDS[event["ph"]] | {"ph": str, "pid": int, "tid": int}
        assert event.keys() == fields.keys()
        assert all(isinstance(event[name], kind) for name, kind in fields.items()), event
        assert event.get("dur", 1.0) > 0


def test_times_of_each_ranks_phases_are_the_recorders(
    job: tuple[dict[int, RankRecords], list[dict[str, Any]]],
) -> None:
    ranks, events = job
    summed: dict[tuple[int, str, int], float] = defaultdict(float)
    for event in of_kind(events, "X"):
        if event["cat"] in ("phase", "step"):
            name = "step" if event["cat"] == "step" else event["name"]
            summed[event["pid"], name, event["args"]["step"]] += event["dur"] / 1e6
    recorded: dict[tuple[int, str, int], float] = defaultdict(float)
    for rank, each in ranks.items():
        for row in each.records[each.records["kind"] == Kind.PHASE]:
            name = Phase(row["code"]).name.lower().replace("_", " ")
            recorded[rank, name, int(row["step"])] += float(row["ended_s"] - row["enqueued_s"])
    assert len(recorded) == 8 * 12 * 5
    assert summed == pytest.approx(recorded, abs=5e-9)


def test_slices_of_a_thread_are_nested_or_apart(
    job: tuple[dict[int, RankRecords], list[dict[str, Any]]],
) -> None:
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in of_kind(job[1], "X"):
        begin_ns = round(event["ts"] * 1000)
        threads[event["pid"], event["tid"]].append(
            (begin_ns, begin_ns + round(event["dur"] * 1000))
        )
    for slices in threads.values():
        around: list[int] = []
        for begin_ns, end_ns in sorted(slices, key=lambda times: (times[0], -times[1])):
            while around and around[-1] <= begin_ns:
                around.pop()
            assert not around or end_ns <= around[-1]
            around.append(end_ns)


def test_flows_tie_each_collective_over_all_ranks_and_each_send_to_its_receive(
    job: tuple[dict[int, RankRecords], list[dict[str, Any]]],
) -> None:
    ranks, events = job
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    slices = of_kind(events, "X")
    for flow in flows.values():
        kinds = "".join(event["ph"] for event in flow)
        assert kinds == "s" + "t" * (len(flow) - 2) + "f"
        assert [event["ts"] for event in flow] == sorted(event["ts"] for event in flow)
        ranks_of_flow = [event["pid"] for event in flow]
        if flow[0]["name"] == "send":
            assert (ranks_of_flow[0] + 1) % 8 == ranks_of_flow[1]
        else:
            assert sorted(ranks_of_flow) == list(range(8))
    names = [flow[0]["name"] for flow in flows.values()]
    collectives = sum(
        row["code"] == Operation.ALL_REDUCE
        for row in ranks[0].records[ranks[0].records["kind"] == Kind.OPERATION]
    )
    assert names.count("all reduce") == collectives > 0
    assert names.count("send") == 8 * 12
    # A viewer finds the slice of an event by thread and time.
    first = flows[1][0]
    assert any(
        (piece["pid"], piece["tid"]) == (first["pid"], first["tid"])
        and piece["ts"] <= first["ts"] <= piece["ts"] + piece["dur"]
        for piece in slices
    )


def test_flow_goes_from_the_rank_that_came_first_to_the_one_that_all_waited_for() -> None:
    late = operation(Operation.ALL_REDUCE, 3, 101.0, 101.1)
    early = operation(Operation.ALL_REDUCE, 3, 100.0, 101.1)
    events = list(trace_events([traced(0, late), traced(1, early)], {7: WORLD}, BASE_S))
    flow = [event for event in events if event["ph"] in "sf"]
    assert [(event["ph"], event["pid"]) for event in flow] == [("s", 1), ("f", 0)]


def test_flow_of_an_early_receive_begins_at_the_send_and_ends_not_before_it() -> None:
    receive = operation(Operation.RECEIVE, 1, 100.0, 102.0, peer=1)
    send = operation(Operation.SEND, 1, 101.0, 101.5, peer=0)
    events = list(trace_events([traced(0, receive), traced(1, send)], {7: WORLD}, BASE_S))
    flow = [event for event in events if event["ph"] in "sf"]
    assert [(event["ph"], event["pid"]) for event in flow] == [("s", 1), ("f", 0)]
    assert flow[0]["ts"] == flow[1]["ts"]


def test_generations_number_their_operations_from_one_and_are_not_tied() -> None:
    before, after = (operation(Operation.BARRIER, 1, at_s, at_s + 1) for at_s in (100.0, 105.0))
    later = replace(STATE, rank=1, generation=2)
    parts = [traced(0, before), TracedRank(later, after, TO_UNIX_S)]
    assert not [e for e in trace_events(parts, {7: WORLD}, BASE_S) if e["ph"] == "s"]


def test_slice_of_a_device_begins_there_and_says_when_it_was_called() -> None:
    queued = operation(
        Operation.ALL_REDUCE, 1, 100.0, 100.5,
        started_s=100.2, flags=Flag.DEVICE_TIMES | Flag.ASYNCHRONOUS, nbytes=64,
    )  # fmt: skip
    (piece,) = of_kind(list(trace_events([traced(0, queued)], {7: WORLD}, BASE_S)), "X")
    assert piece["ts"] == pytest.approx((TO_UNIX_S - BASE_S + 100.2) * 1e6, abs=0.001)
    assert piece["dur"] == pytest.approx(3e5, abs=0.001)
    assert piece["args"] == {
        "kind": "all reduce", "sequence": 1, "bytes": 64, "dtype": "none", "step": 1,
        "asynchronous": True, "called_us_before": pytest.approx(2e5, abs=0.1),
    }  # fmt: skip


def test_what_has_not_ended_lasts_until_it_was_read_and_says_so() -> None:
    waits = operation(Operation.ALL_REDUCE, 1, 100.0, 0.0)
    blind = operation(Operation.ALL_REDUCE, 2, 100.0, 0.0, flags=Flag.UNOBSERVED)
    first, second = of_kind(list(trace_events([traced(0, waits, blind)], {}, BASE_S)), "X")
    assert {first["args"]["state"], second["args"]["state"]} == {"has not ended", "end not seen"}
    lasting = {piece["args"]["state"]: piece["dur"] for piece in (first, second)}
    assert lasting == {"has not ended": pytest.approx(9e6), "end not seen": 0.001}


def test_operations_that_overlap_get_threads_of_their_own() -> None:
    one = operation(Operation.ALL_REDUCE, 1, 100.0, 102.0)
    two = operation(Operation.ALL_REDUCE, 2, 101.0, 103.0)
    events = list(trace_events([traced(1, one, two)], {7: WORLD}, BASE_S))
    named = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    # The first has the number of its process: Perfetto's main thread.
    assert named == {1: "group world of 2 ranks", 2: "group world of 2 ranks (2)"}
    assert {event["tid"] for event in of_kind(events, "X")} == {1, 2}


def test_trace_of_one_rank_names_it_where_hta_looks() -> None:
    lines = "".join(trace_text([], BASE_S, {}, {"rank": 3, "world_size": 4})).splitlines()
    assert '"rank": 3' in lines[0]
    assert json.loads("".join(lines))["distributedInfo"] == {"rank": 3, "world_size": 4}


def test_base_time_is_the_one_that_torch_profiler_has() -> None:
    # Read from a trace of torch 2.13 of 2026-11-29.
    assert base_time_s(1795912672.57) == 1790857026
