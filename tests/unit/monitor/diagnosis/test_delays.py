"""The delay matrix: cells, rows and columns; and communicators that are slow together."""

import itertools
from dataclasses import replace

import numpy as np

from keepstep.monitor.diagnosis.conclusion import NO_DIAGNOSIS_STATE, diagnose
from keepstep.monitor.diagnosis.delays import (
    delay_matrix,
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
from tests.unit.monitor.diagnosis.trace_text import parse

NODES = {rank: f"n{rank}" for rank in range(6)}
EXACT = dict.fromkeys(NODES, 0.0)
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
    verdicts, _ = find_slow_links(
        history, {}, NODES, 0.5, [float(step) for step in range(10)], SlowThresholds()
    )
    return sorted(str(one.subject) for one in verdicts)


def test_links_pack_and_unpack() -> None:
    keys = link_keys(np.array([0, 16383]), np.array([16383, 7]), np.array([0, 40]))
    assert [part.tolist() for part in unpack(keys)] == [[0, 16383], [16383, 7], [0, 40]]


def test_healthy_matrix_has_no_verdict() -> None:
    assert subjects(delays(set())) == []


def test_one_cell_is_a_link() -> None:
    assert subjects(delays({(1, 2)})) == ["link 1 -> 2"]


def test_two_cells_of_a_row_of_five_are_two_links() -> None:
    assert subjects(delays({(1, 2), (1, 3)})) == ["link 1 -> 2", "link 1 -> 3"]


def test_row_is_a_sender_and_column_a_receiver() -> None:
    row, column = (
        {(1, other) for other in range(6) if other != 1},
        {(other, 4) for other in range(6) if other != 4},
    )
    assert subjects(delays(row)) == ["rank 1 on n1"]
    assert subjects(delays(column)) == ["rank 4 on n4"]
    verdicts, _ = find_slow_links(delays(row), {}, NODES, 0.5, [0.0] * 10, SlowThresholds())
    assert "row" in verdicts[0].evidence[0]
    verdicts, _ = find_slow_links(delays(column), {}, NODES, 0.5, [0.0] * 10, SlowThresholds())
    assert "column" in verdicts[0].evidence[0]


def test_three_ranks_suffice_to_find_a_slow_link_five_times_the_others() -> None:
    # By the ratio to the mean, a column among three must be many times slower before it passes three times the mean.
    assert subjects(delays({(0, 1)}, list(itertools.permutations(range(3), 2)))) == ["link 0 -> 1"]


def test_receiver_is_named_though_one_of_its_links_has_not_been_slow_for_long_enough() -> None:
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
    verdicts, _ = find_slow_links(history, {}, NODES, 0.1, ended_s, SlowThresholds())
    assert [str(one.subject) for one in verdicts] == ["rank 2 on n2"]


def test_matrix_shows_senders_in_rows_and_nothing_where_nothing_was_sent() -> None:
    matrix = delay_matrix(delays({(1, 2)}, [(0, 1), (1, 2)], 0.0), (0, 1, 2))
    np.testing.assert_allclose(matrix[0, 1], 0.01)
    np.testing.assert_allclose(matrix[1, 2], 0.05)
    assert np.isnan(matrix[2]).all()


def test_delay_runs_from_the_later_call_with_aligned_clocks_and_else_is_the_shorter_side() -> None:
    rows = np.zeros(1, MESSAGE)
    rows["sender"], rows["receiver"], rows["sides"] = 0, 1, 3
    rows["shortest_s"], rows["later_s"], rows["received_s"] = 0.001, 5.0, 5.2
    assert message_delays(rows, EXACT, NODES)[1].round(6).tolist() == [0.2]
    assert message_delays(rows, {0: 0.0, 1: np.inf}, NODES)[1].tolist() == [0.001]
    assert message_delays(rows, {}, {0: "a", 1: "a"})[1].round(6).tolist() == [0.2]


def test_clocks_that_may_be_off_never_make_a_link_look_slow() -> None:
    rows = np.zeros(1, MESSAGE)
    rows["sender"], rows["receiver"], rows["sides"] = 0, 1, 3
    rows["shortest_s"], rows["later_s"], rows["received_s"] = 0.001, 5.0, 5.004
    assert message_delays(rows, {0: 0.001, 1: 0.003}, NODES)[1].tolist() == [0.001]


def test_links_whose_clocks_are_better_known_look_no_slower_for_it() -> None:
    rows = np.zeros(2, MESSAGE)
    rows["sender"], rows["receiver"], rows["sides"] = (0, 1), (1, 2), 3
    rows["shortest_s"], rows["later_s"], rows["received_s"] = 1e-5, 5.0, 5.004
    delays_s = message_delays(rows, {0: 0.0, 1: 0.001, 2: 0.002}, NODES)[1]
    assert delays_s[0] == delays_s[1]
    # Where one is not known at all, none is trusted.
    assert message_delays(rows, {0: 0.0, 1: 0.001}, NODES)[1].tolist() == [1e-5, 1e-5]


def test_two_sides_of_a_message_become_one_row_with_the_shorter_duration_and_the_later_call() -> (
    None
):
    rows = np.zeros(2, MESSAGE)
    rows["sides"], rows["shortest_s"] = (1, 2), (0.3, 0.1)
    rows["later_s"], rows["received_s"] = (5.0, 5.2), (-np.inf, 5.3)
    for told in (rows, rows[::-1]):
        (one,) = fold_messages(told)
        assert (one["sides"], one["shortest_s"], one["later_s"], one["received_s"]) == (
            3,
            0.1,
            5.2,
            5.3,
        )


def test_message_of_which_one_side_told_has_no_delay() -> None:
    rows = np.zeros(2, MESSAGE)
    rows["sides"] = 1, 2
    assert len(message_delays(rows, EXACT, NODES)[1]) == 0


def test_node_that_all_slow_communicators_share_and_no_fast_one_is_named() -> None:
    nodes = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c", 6: "d", 7: "d"}
    pairs = [(0, 2), (1, 4), (3, 5), (2, 6), (4, 7), (3, 6), (5, 7)]
    known = {at: Communicator(at, f"pair {at}", pair) for at, pair in enumerate(pairs)}
    keys = transfer_keys(np.arange(len(pairs)), np.full(len(pairs), 20))
    history = NOTHING
    for step in range(10):
        history = history.push(step, keys, np.array([0.5, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1]), 10)
    fabric = TransferInputs(
        known, nodes, {}, 1.0, float("nan"), [float(step) for step in range(10)]
    )
    verdicts, _ = find_slow_transfers(history, fabric, SlowThresholds())
    assert [str(one.subject) for one in verdicts] == ["node a (ranks 0, 1)"]


def test_messages_told_before_clocks_were_known_are_not_read_off_both_sides_once_they_are() -> None:
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
    whole = trace.job()

    def told(ranks: tuple[int, ...], are_known: bool) -> JobRecords:
        some = {}
        for rank in ranks:
            one = whole.ranks[rank]
            records = one.records.copy()
            for name in ("enqueued_s", "started_s", "ended_s"):
                records[name] += 100.0 * (rank == 1)
            offset_s, error_s = (-100.0 * (rank == 1), 1e-4) if are_known else (0.0, float("inf"))
            some[rank] = replace(one, records=records, offset_s=offset_s, offset_error_s=error_s)
        return JobRecords(some, whole.communicators)

    thresholds = Thresholds()
    past, _ = diagnose(told((2,), False), {}, NO_DIAGNOSIS_STATE, 9.0, thresholds)
    # Steps wait for rank 2's news, which are of the start only.
    late = replace(whole.ranks[2], records=whole.ranks[2].records[:2])
    past, _ = diagnose(
        JobRecords({**told((0, 1), False).ranks, 2: late}, whole.communicators),
        {},
        NO_DIAGNOSIS_STATE,
        9.5,
        thresholds,
    )
    assert len(past.window.links.keys) == 0
    past, _ = diagnose(told((0, 1, 2), True), {}, past, 10.0, thresholds)
    assert past.window.newest >= 7
    assert np.exp(np.nanmax(past.window.links.values)) < 0.003
