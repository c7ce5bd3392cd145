"""Tests the delay matrix (cells, rows, columns) and communicators that are slow together."""

import itertools
from dataclasses import replace

import numpy as np

from keepstep.monitor.diagnosis.conclusion import NO_DIAGNOSIS_STATE, diagnose
from keepstep.monitor.diagnosis.delays import (
    LinkInputs,
    find_slow_links,
    link_keys,
    message_delays,
    unpack,
)
from keepstep.monitor.diagnosis.history import NOTHING, StepSeries
from keepstep.monitor.diagnosis.tables import MESSAGE, fold_messages
from keepstep.monitor.diagnosis.thresholds import SlowThresholds, Thresholds
from keepstep.monitor.diagnosis.transfers import TransferInputs, find_slow_transfers, transfer_keys
from keepstep.monitor.records import Communicator, JobRecords
from keepstep.monitor.verdicts import Verdict
from tests.unit.monitor.diagnosis.trace_text import parse

NODES = {rank: f"n{rank}" for rank in range(6)}
EXACT = dict.fromkeys(NODES, 0.0)
JOB = LinkInputs(counts={}, nodes=NODES, step_s=0.5, since_s=[float(step) for step in range(10)])
MESH = list(itertools.permutations(range(6), 2))


def delays(
    slow: set[tuple[int, int]], links: list[tuple[int, int]] = MESH, sigma: float = 0.1
) -> StepSeries:
    rng = np.random.default_rng(1)
    senders, receivers = np.array(links).T
    keys = link_keys(senders, receivers, np.full(len(links), 12))
    history = NOTHING
    for step in range(10):
        usual = 0.01 * rng.lognormal(0, sigma, len(links))
        factors = np.array([5.0 if link in slow else 1.0 for link in links])
        history = history.push(step, keys, usual * factors, 10)
    return history


def subjects(history: StepSeries) -> list[str]:
    verdicts, _ = find_slow_links(history, JOB, SlowThresholds())
    return sorted(str(verdict.subject) for verdict in verdicts)


def test_links_pack_and_unpack() -> None:
    keys = link_keys(np.array([0, 16383]), np.array([16383, 7]), np.array([0, 40]))
    assert [part.tolist() for part in unpack(keys)] == [[0, 16383], [16383, 7], [0, 40]]


def test_healthy_matrix_has_no_verdict() -> None:
    assert subjects(delays(set())) == []


def test_one_slow_cell_is_a_slow_link() -> None:
    assert subjects(delays({(1, 2)})) == ["link 1 -> 2"]


def test_two_slow_cells_of_a_row_of_five_are_two_links() -> None:
    assert subjects(delays({(1, 2), (1, 3)})) == ["link 1 -> 2", "link 1 -> 3"]


def test_slow_row_is_a_sender_and_slow_column_a_receiver() -> None:
    row, column = (
        {(1, other) for other in range(6) if other != 1},
        {(other, 4) for other in range(6) if other != 4},
    )
    assert subjects(delays(row)) == ["rank 1 on n1"]
    assert subjects(delays(column)) == ["rank 4 on n4"]
    verdicts, _ = find_slow_links(delays(row), JOB, SlowThresholds())
    assert "row" in verdicts[0].evidence[0]
    verdicts, _ = find_slow_links(delays(column), JOB, SlowThresholds())
    assert "column" in verdicts[0].evidence[0]


def test_three_ranks_suffice_to_find_a_slow_link_five_times_the_others() -> None:
    # With the ratio to the mean, a column among three must be many times slower to exceed three
    # times the mean.
    assert subjects(delays({(0, 1)}, list(itertools.permutations(range(3), 2)))) == ["link 0 -> 1"]


def test_slow_receiver_is_named_while_one_of_its_links_became_slow_recently() -> None:
    links = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    sender, receiver = np.array(links).T
    keys = link_keys(sender, receiver, np.full(len(links), 15))
    history = NOTHING
    for step in range(10):
        slow = {(1, 2)} | ({(3, 2)} if step >= 4 else set())
        history = history.push(
            step, keys, np.array([0.04 if link in slow else 0.001 for link in links]), 10
        )
    ended_s = [float(step) for step in range(10)]
    verdicts, _ = find_slow_links(
        history, LinkInputs(counts={}, nodes=NODES, step_s=0.1, since_s=ended_s), SlowThresholds()
    )
    assert [str(verdict.subject) for verdict in verdicts] == ["rank 2 on n2"]


def test_delay_runs_from_the_later_call_or_is_the_shorter_side_without_aligned_clocks() -> None:
    rows = np.zeros(1, MESSAGE)
    rows["sender"], rows["receiver"], rows["sides"] = 0, 1, 3
    rows["shortest_s"], rows["later_s"], rows["received_s"] = 0.001, 5.0, 5.2
    assert message_delays(rows, EXACT, NODES)[1].round(6).tolist() == [0.2]
    assert message_delays(rows, {0: 0.0, 1: np.inf}, NODES)[1].tolist() == [0.001]
    assert message_delays(rows, {}, {0: "a", 1: "a"})[1].round(6).tolist() == [0.2]


def test_clock_error_never_makes_a_link_look_slow() -> None:
    rows = np.zeros(1, MESSAGE)
    rows["sender"], rows["receiver"], rows["sides"] = 0, 1, 3
    rows["shortest_s"], rows["later_s"], rows["received_s"] = 0.001, 5.0, 5.004
    assert message_delays(rows, {0: 0.001, 1: 0.003}, NODES)[1].tolist() == [0.001]


def test_smaller_clock_error_does_not_make_a_link_look_slower() -> None:
    rows = np.zeros(2, MESSAGE)
    rows["sender"], rows["receiver"], rows["sides"] = (0, 1), (1, 2), 3
    rows["shortest_s"], rows["later_s"], rows["received_s"] = 1e-5, 5.0, 5.004
    delays_s = message_delays(rows, {0: 0.0, 1: 0.001, 2: 0.002}, NODES)[1]
    assert delays_s[0] == delays_s[1]
    # If one clock is not aligned, no clock is trusted.
    assert message_delays(rows, {0: 0.0, 1: 0.001}, NODES)[1].tolist() == [1e-5, 1e-5]


def test_two_sides_of_a_message_fold_to_the_shorter_duration_and_the_later_call() -> None:
    rows = np.zeros(2, MESSAGE)
    rows["sides"], rows["shortest_s"] = (1, 2), (0.3, 0.1)
    rows["later_s"], rows["received_s"] = (5.0, 5.2), (-np.inf, 5.3)
    for sides in (rows, rows[::-1]):
        (row,) = fold_messages(sides)
        assert (row["sides"], row["shortest_s"], row["later_s"], row["received_s"]) == (
            3,
            0.1,
            5.2,
            5.3,
        )


def test_message_reported_by_one_side_has_no_delay() -> None:
    rows = np.zeros(2, MESSAGE)
    rows["sides"] = 1, 2
    assert len(message_delays(rows, EXACT, NODES)[1]) == 0


def test_node_in_all_slow_and_no_fast_communicators_is_named() -> None:
    nodes = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c", 6: "d", 7: "d"}
    pairs = [(0, 2), (1, 4), (3, 5), (2, 6), (4, 7), (3, 6), (5, 7)]
    communicators = {
        identity: Communicator(identity, f"pair {identity}", pair)
        for identity, pair in enumerate(pairs)
    }
    keys = transfer_keys(np.arange(len(pairs)), np.full(len(pairs), 20))
    history = NOTHING
    for step in range(10):
        history = history.push(step, keys, np.array([0.5, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1]), 10)
    inputs = TransferInputs(
        communicators=communicators,
        nodes=nodes,
        counts={},
        step_s=1.0,
        own_shift=float("nan"),
        since_s=[float(step) for step in range(10)],
    )
    verdicts, _ = find_slow_transfers(history, inputs, SlowThresholds())
    assert [str(verdict.subject) for verdict in verdicts] == ["node a (ranks 0, 1)"]


def test_past_of_one_of_two_links_learns_no_slow_messages() -> None:
    """The slow link became the norm, and with it the verdict inconclusive."""
    keys = link_keys(np.array([0, 1]), np.array([1, 0]), np.full(2, 15))
    history, thresholds, named = NOTHING, SlowThresholds(), set[str]()
    for step in range(200):
        slow_s = 0.05 if step >= 30 else 0.005
        history = history.push(step, keys, np.array([slow_s, 0.005]), thresholds.window)
        inputs = LinkInputs(counts={}, nodes=NODES, step_s=0.1, since_s=[float(step)])
        verdicts, hot = find_slow_links(history, inputs, thresholds)
        history = history.learn(hot, thresholds)
        if step >= 45:
            named.add(", ".join(str(verdict.subject) for verdict in verdicts))
    assert named == {"link 0 -> 1"}


def test_past_of_collectives_learns_nothing_while_machines_are_busy_too() -> None:
    world = {1: Communicator(1, "world", (0, 1, 2))}
    keys, history, thresholds = (
        transfer_keys(np.array([1]), np.array([20])),
        NOTHING,
        SlowThresholds(),
    )
    verdicts: tuple[Verdict, ...] = ()
    for step in range(200):
        took_s = 0.4 if step >= 30 else 0.05
        history = history.push(step, keys, np.array([took_s]), thresholds.window)
        inputs = TransferInputs(
            communicators=world,
            nodes=NODES,
            counts={},
            step_s=1.0,
            own_shift=2.0 if 40 <= step < 190 else 1.0,
            since_s=[float(step)],
        )
        verdicts, deviating = find_slow_transfers(history, inputs, thresholds)
        history = history.learn(deviating, thresholds)
    assert [str(verdict.subject) for verdict in verdicts] == ["the whole job"]


def test_messages_recorded_before_clock_alignment_use_one_sides_duration() -> None:
    # Rank 1's clock is ahead by 100 s; it calls long before rank 0 does.
    trace = parse("""
node a: 0
node b: 1
node c: 2
communicator pipe: 0 1
communicator all: 0 1 2
steps 1-9 every 1.0
pipe send 1k ->1     0.500-0.502  .            .
pipe receive 1k <-0  .            0.100-0.502  .
all all_reduce 1k    0.70-0.71    0.70-0.71    0.70-0.71
read 10.0
""")
    complete = trace.job()

    def records_of(ranks: tuple[int, ...], aligned: bool) -> JobRecords:
        ranks_by_number = {}
        for rank in ranks:
            recorded = complete.ranks[rank]
            records = recorded.records.copy()
            for name in ("enqueued_s", "started_s", "ended_s"):
                records[name] += 100.0 * (rank == 1)
            offset_s, error_s = (-100.0 * (rank == 1), 1e-4) if aligned else (0.0, float("inf"))
            ranks_by_number[rank] = replace(
                recorded, records=records, offset_s=offset_s, offset_error_s=error_s
            )
        return JobRecords(ranks_by_number, complete.communicators)

    thresholds = Thresholds()
    past, _ = diagnose(records_of((2,), False), {}, NO_DIAGNOSIS_STATE, 9.0, thresholds)
    # Steps wait for rank 2's records, which are of the start only.
    late = replace(complete.ranks[2], records=complete.ranks[2].records[:2])
    past, _ = diagnose(
        JobRecords({**records_of((0, 1), False).ranks, 2: late}, complete.communicators),
        {},
        NO_DIAGNOSIS_STATE,
        9.5,
        thresholds,
    )
    assert len(past.window.links.keys) == 0
    past, _ = diagnose(records_of((0, 1, 2), True), {}, past, 10.0, thresholds)
    assert past.window.newest >= 7
    assert np.exp(np.nanmax(past.window.links.values)) < 0.003
