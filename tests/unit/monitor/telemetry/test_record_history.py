"""Claims about the record history: changes are reported once, and samples agree on all ranks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.monitor.diagnosis.metrics import GpuMetrics, NodeMetrics
from keepstep.monitor.errors import ProtocolViolation
from keepstep.monitor.node.node_series import metrics_to_json
from keepstep.monitor.records import RECORD, Communicator, Ending, Flag, Kind, Operation, Phase
from keepstep.monitor.telemetry.record_history import (
    RankState,
    RecordHistory,
    newest_of,
    sample_operations,
)
from keepstep.monitor.tree.digest_relay import Outbox
from keepstep.monitor.tree.summary import NodeFacts, decode, encode, summarize

STATE = RankState(
    rank=3,
    node="node-a",
    pid=41,
    incarnation="first",
    is_alive=True,
    ending=Ending.NONE,
    read_at_s=10.0,
    progress_at_s=0.0,
)


def operations(count: int, first: int = 1, ended: bool = True, communicator: int = 7) -> np.ndarray:
    records = np.zeros(count, RECORD)
    records["kind"], records["code"] = Kind.OPERATION, Operation.ALL_REDUCE
    records["number"] = np.arange(first, first + count)
    records["stamp"] = 2 * records["number"]
    records["communicator"] = communicator
    records["enqueued_s"] = records["number"]
    records["ended_s"] = records["number"] + 0.5 if ended else 0.0
    return records


def phases(count: int) -> np.ndarray:
    records = np.zeros(count, RECORD)
    records["kind"], records["code"] = Kind.PHASE, Phase.STEP
    records["step"] = np.arange(1, count + 1)
    records["stamp"] = 2 * np.arange(1, count + 1)
    records["enqueued_s"] = np.arange(1, count + 1) + 0.25
    return records


def test_known_record_is_no_change_and_its_end_is_a_change() -> None:
    history = RecordHistory(100)
    history.begin()
    open_records = operations(3, ended=False)
    assert len(history.merge(STATE, open_records)) == 3
    history.begin()
    assert len(history.merge(STATE, open_records)) == 0
    history.begin()
    ended = open_records.copy()
    ended["ended_s"][1] = 9.0
    changed = history.merge(STATE, ended)
    assert changed.records["number"].tolist() == [2]
    assert history.ranks[3].records["ended_s"].tolist() == [0.0, 9.0, 0.0]


def test_operation_whose_end_turns_out_not_to_be_seen_is_open_no_more() -> None:
    history = RecordHistory(100)
    history.begin()
    open_records = operations(3, ended=False)
    history.merge(STATE, open_records)
    history.begin()
    flagged = open_records.copy()
    flagged["flags"][0] = Flag.UNOBSERVED
    assert history.merge(STATE, flagged).records["number"].tolist() == [1]
    rank = history.ranks[3]
    assert rank.open_records()["number"].tolist() == [2, 3]
    assert rank.since_and_open(history.number)["number"].tolist() == [2, 3]
    assert rank.of_step(-1, include_later_open=True)["number"].tolist() == [2, 3]


def test_sample_counts_operations_whose_end_cannot_be_seen_as_over() -> None:
    records = operations(1000, ended=False)
    records["flags"] = Flag.UNOBSERVED
    assert len(sample_operations(records, 100)) < 130


def test_lanes_with_the_same_stamps_do_not_overwrite_each_other() -> None:
    history = RecordHistory(100)
    history.begin()
    history.merge(STATE, np.concatenate([operations(4), phases(4)]))
    records = history.ranks[3].records
    assert (records["kind"] == Kind.PHASE).sum() == 4
    assert len(records) == 8
    assert (np.diff(records["enqueued_s"]) >= 0).all()


def test_prolonged_phase_is_reported_with_its_previous_end() -> None:
    history = RecordHistory(100)
    history.begin()
    once = phases(1)
    once["ended_s"] = 2.0
    history.merge(STATE, once)
    history.begin()
    longer = once.copy()
    longer["ended_s"] = 3.5
    changed = history.merge(STATE, longer)
    assert changed.ended_before_s.tolist() == [2.0]


def test_new_incarnation_begins_with_an_empty_history() -> None:
    history = RecordHistory(100)
    history.begin()
    history.merge(STATE, operations(5))
    history.begin()
    history.merge(replace(STATE, incarnation="second"), operations(1))
    assert len(history.ranks[3].records) == 1


def test_rank_makes_progress_only_when_its_records_change() -> None:
    history = RecordHistory(100)
    history.begin()
    history.merge(STATE, operations(5))
    history.begin()
    history.merge(replace(STATE, read_at_s=20.0), operations(5))
    assert history.ranks[3].state.progress_at_s == 10.0
    assert history.ranks[3].state.read_at_s == 20.0


@pytest.mark.parametrize("is_read_at_once", [True, False])
def test_what_is_read_again_from_before_the_kept_records_is_progress_only_if_it_has_ended(
    is_read_at_once: bool,
) -> None:
    """A hung rank with an old open operation seemed to make progress with every reading."""
    history = RecordHistory(10)
    whole = operations(50)
    whole["ended_s"][3] = 0.0
    for first, last in ((0, 50),) if is_read_at_once else ((0, 8), (3, 30), (3, 50)):
        history.begin()
        history.merge(STATE, whole[first:last])
    kept = history.ranks[3].records.tobytes()

    def changed(fresh: np.ndarray, read_at_s: float) -> list[int]:
        history.begin()
        records = history.merge(replace(STATE, read_at_s=read_at_s), fresh).records
        return list(records["number"])

    assert changed(whole[3:], 20.0) == changed(whole[3:], 21.0) == []
    assert history.ranks[3].state.progress_at_s == 10.0
    whole["ended_s"][3] = 22.0
    assert changed(whole[3:], 23.0) == [4]
    assert changed(whole[3:], 24.0) == []
    assert history.ranks[3].state.progress_at_s == 23.0
    assert history.ranks[3].records.tobytes() == kept


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 30), st.booleans()), min_size=1, max_size=12
    ),
    st.integers(1, 40),
)
def test_repeated_requests_for_changes_give_the_childs_records(
    windows: list[tuple[int, int, bool]], capacity: int
) -> None:
    """Readings may overlap in any way; the parent requests the changes since its last number.

    It does not ask for records each time.
    """
    child, parent = RecordHistory(capacity), RecordHistory(capacity)
    since = records_since = 0
    end = 0
    for first, count, wants_records in [*windows, (60, 1, True)]:
        first = max(first, end - count)  # Positions in a ring only grow.
        end = max(end, first + count)
        child.begin()
        child.merge(STATE, operations(count, first + 1))
        asked = records_since if wants_records else None
        summary = decode(encode(summarize(child, Outbox(), {}, {}, "x", since, asked, 10**6)))
        assert summary.has_records == wants_records
        since = summary.number
        if wants_records:
            records_since = since
        parent.begin()
        for state, records in summary.ranks:
            parent.merge(state, records)
    assert parent.ranks[3].records.tobytes() == child.ranks[3].records.tobytes()


def test_rank_that_has_died_is_reported_without_records() -> None:
    history = RecordHistory(10)

    def reported(since: int) -> list[tuple[bool, int]]:
        summary = summarize(history, Outbox(), {}, {}, "x", since, None, 10)
        return [(state.is_alive, len(records)) for state, records in summary.ranks]

    history.begin()
    history.merge(STATE, operations(5))
    assert reported(0) == [(True, 0)]
    first = history.number
    history.begin()
    history.merge(replace(STATE, read_at_s=20.0), operations(6))
    assert reported(first) == []
    history.begin()
    history.merge(replace(STATE, is_alive=False), operations(6))
    assert reported(first) == [(False, 0)]


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 64))
def test_samples_of_different_strides_contain_the_same_collectives(
    a: int, b: int, budget: int
) -> None:
    one, other = sample_operations(operations(a), budget), sample_operations(operations(b), budget)
    assert len(one) <= budget + 1
    shorter, longer = sorted(
        (one, other), key=lambda kept: len(operations(a)) if kept is one else len(operations(b))
    )
    # The shorter sample contains all common operations of the longer one, except the newest of it.
    common = set(range(1, min(a, b) + 1))
    assert set(longer["number"][:-1].tolist()) & common <= set(shorter["number"].tolist())


def test_sample_contains_open_operations_and_all_phases() -> None:
    records = np.concatenate([operations(500), operations(3, 501, ended=False), phases(20)])
    kept = sample_operations(records, 10)
    assert (kept["ended_s"][kept["kind"] == Kind.OPERATION] == 0).sum() == 3
    assert (kept["kind"] == Kind.PHASE).sum() == 20


def test_summary_survives_encoding() -> None:
    history = RecordHistory(100)
    history.begin()
    history.merge(STATE, np.concatenate([operations(9), phases(2)]))
    history.learn([Communicator(7, "world", (3, 4))])
    metrics = NodeMetrics("node-a", 10.0, load=1.5, gpus=(GpuMetrics(0, xids=(48,)),))
    facts = NodeFacts(
        node="node-a",
        metrics=metrics_to_json(metrics),
        wall_s=1000.0,
        monotonic_s=10.0,
        monitor_cpu_s=0.25,
    )
    summary = decode(
        encode(
            summarize(history, Outbox(), {"node-a": facts}, {"http://x": "silent"}, "x", 0, 0, 1000)
        )
    )
    assert summary.ranks[0][0] == history.ranks[3].state
    assert summary.ranks[0][1].tobytes() == history.ranks[3].since(0).tobytes()
    assert summary.communicators == (Communicator(7, "world", (3, 4)),)
    assert summary.nodes == (facts,)
    assert summary.missing == {"http://x": "silent"}


@given(st.binary(max_size=200), st.integers(0, 500), st.integers(0, 255))
def test_damaged_summary_is_refused_without_another_error(
    noise: bytes, place: int, value: int
) -> None:
    history = RecordHistory(100)
    history.begin()
    history.merge(STATE, operations(3))
    good = bytearray(encode(summarize(history, Outbox(), {}, {}, "x", 0, 0, 1000)))
    with pytest.raises(ProtocolViolation):
        decode(bytes(good[:-1]))
    with pytest.raises(ProtocolViolation):
        decode(bytes(good) + b"x")
    good[place % len(good)] = value
    for data in (noise, bytes(good)):
        try:
            decode(data)
        except ProtocolViolation:
            pass


def test_parts_of_a_history_are_found_without_sorting_all_of_it() -> None:
    history = RecordHistory(100)
    history.begin()
    both = np.concatenate([operations(5), phases(7)])
    both["ended_s"] = np.where(both["stamp"] % 4 == 0, 99.0, 0.0)
    history.merge(STATE, both)
    rank = history.ranks[3]
    records = rank.records
    assert rank.highest_step == int(records["step"].max())
    assert (rank.open_records() == records[records["ended_s"] == 0]).all()
    assert rank.newest_operations(2)["number"].tolist() == [4, 5]
    assert len(rank.newest_operations(99)) == 5
    for step in range(9):
        in_step = records["step"] == step
        later = (records["step"] > step) & (records["ended_s"] == 0)
        assert (rank.of_step(step, include_later_open=False) == records[in_step]).all()
        assert (rank.of_step(step, include_later_open=True) == records[in_step | later]).all()


def test_copied_records_do_not_change_with_the_history() -> None:
    history = RecordHistory(100)
    history.begin()
    history.merge(STATE, operations(3, ended=False))
    copies = [
        history.ranks[3].newest_operations(3),
        history.ranks[3].open_records(),
        history.ranks[3].of_step(int(operations(1)["step"][0]), include_later_open=True),
    ]
    history.begin()
    history.merge(STATE, operations(3))
    for copy in copies:
        assert len(copy)
        assert (copy["ended_s"] == 0).all()


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 5), st.sets(st.integers(0, 3))),
        max_size=20,
    )
)
def test_newest_rank_is_known_however_ranks_live_and_are_dropped(
    readings: list[tuple[int, bool, int, set[int]]],
) -> None:
    history = RecordHistory(10)
    for rank, is_alive, created_at_s, dropped in readings:
        history.begin()
        state = replace(STATE, rank=rank, is_alive=is_alive, created_at_s=float(created_at_s))
        history.merge(state, operations(0))
        history.keep_only(history.ranks.keys() - dropped)
        states = [known.state for known in history.ranks.values()]
        found = newest_of(states)
        if found is None or history.newest is None:
            assert found is history.newest
            continue
        assert history.newest in states
        assert (history.newest.is_alive, history.newest.created_at_s) == (
            found.is_alive,
            found.created_at_s,
        )
