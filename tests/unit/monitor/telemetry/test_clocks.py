"""Claims about the estimated offsets of clocks, on simulated nodes with known true offsets."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.monitor.records import RECORD, Flag, JobRecords, Kind, Operation, RankRecords
from keepstep.monitor.telemetry.clocks import ClockOffset, align, estimate_clocks, half_sample_mode
from tests.examples import examples

Generator = np.random.Generator
LATENCY_S = 200e-6
START_S = 500_000.0


@dataclass(frozen=True)
class Group:
    """A communicator, and the operation that its ranks repeat."""

    identity: int
    ranks: tuple[int, ...]
    operation: Operation = Operation.ALL_REDUCE


def simulate(
    rng: Generator,
    nodes: Sequence[str],
    ahead_s: Mapping[str, float],
    groups: Sequence[Group],
    count: int = 60,
    leave_jitter_s: Mapping[int, float] | float = 50e-6,
    drift: Mapping[str, float] | None = None,
    laggard: Callable[[int], int | None] = lambda number: None,
) -> dict[int, RankRecords]:
    """Return the records of ranks on nodes whose clocks differ; rank r is on nodes[r].

    A node's clock is ahead of true time by `ahead_s`, and gains `drift` seconds a second. Each rank
    enters at a random time. All leave a network latency after the last has entered, some a little
    later.
    """
    records: dict[int, list[tuple[object, ...]]] = {rank: [] for rank in range(len(nodes))}

    def clock(rank: int, at_s: float) -> float:
        node = nodes[rank]
        return round((at_s + ahead_s[node] + (drift or {}).get(node, 0.0) * at_s) / GRID_S) * GRID_S

    def record(
        rank: int, code: int, group: Group, number: int, peer: int, entered_s: float, left_s: float
    ) -> None:
        late = (
            leave_jitter_s if isinstance(leave_jitter_s, float) else leave_jitter_s.get(rank, 20e-6)
        )
        times = (
            clock(rank, entered_s),
            clock(rank, entered_s),
            clock(rank, left_s + rng.exponential(late)),
        )
        records[rank].append(
            (0, Kind.OPERATION, code, 9, 0, group.identity, number, 64, peer, 1, *times)
        )

    now_s = START_S
    for number in range(1, count + 1):
        for group in groups:
            entered = {rank: now_s + rng.exponential(2e-3) for rank in group.ranks}
            if (last := laggard(number)) is not None:
                entered[last] = max(entered.values()) + 1e-3
            if group.operation == Operation.SEND:
                # In both directions, like activations and gradients.
                for turn, (source, target) in enumerate((group.ranks, group.ranks[::-1])):
                    sent, requested = entered[source] + turn * 0.01, entered[target] + turn * 0.01
                    received = max(sent, requested) + LATENCY_S
                    # A send ends when it is buffered, whether or not the receive has begun.
                    record(source, Operation.SEND, group, number, target, sent, sent + 10e-6)
                    record(target, Operation.RECEIVE, group, number, source, requested, received)
            else:
                left_s = max(entered.values()) + LATENCY_S
                for rank in group.ranks:
                    record(rank, group.operation, group, number, -1, entered[rank], left_s)
            now_s += 0.02
    return {
        rank: RankRecords(
            rank=rank,
            node=nodes[rank],
            records=np.array(rows, RECORD),
            read_at_s=clock(rank, now_s),
        )
        for rank, rows in records.items()
    }


def true_offsets(ahead_s: Mapping[str, float], reference: str) -> dict[str, float]:
    return {node: ahead_s[reference] - ahead for node, ahead in ahead_s.items()}


def check(
    clocks: Mapping[str, ClockOffset], ahead_s: Mapping[str, float], reference: str, within_s: float
) -> None:
    for node, true_s in true_offsets(ahead_s, reference).items():
        assert abs(clocks[node].offset_s - true_s) <= clocks[node].error_s + 1e-9
        assert abs(clocks[node].offset_s - true_s) <= within_s


FOUR = ("a", "a", "b", "c")
AHEAD = {"a": 12.5, "b": -3.25, "c": 86400.0}
ALL = Group(1, (0, 1, 2, 3))
seeds = st.integers(0, 2**32 - 1)
# Times are multiples of this (about a nanosecond), so that shifting them rounds nothing.
GRID_S = 2.0**-30
shifts = st.integers(-(10**5) * 2**30, 10**5 * 2**30).map(lambda count: count * GRID_S)


@given(seed=seeds, ahead=st.lists(shifts, min_size=3, max_size=3))
def test_true_offset_lies_within_the_stated_error_and_near_the_estimate(
    seed: int, ahead: list[float]
) -> None:
    ahead_s = dict(zip("abc", ahead, strict=True))
    clocks = estimate_clocks(simulate(np.random.default_rng(seed), FOUR, ahead_s, [ALL]))
    check(clocks, ahead_s, "a", within_s=100e-6)
    assert clocks["a"] == ClockOffset(0.0, 0.0)
    assert max(clock.error_s for clock in clocks.values()) < 3e-3


@given(seed=seeds)
def test_node_that_leaves_late_does_not_bias_the_estimate(seed: int) -> None:
    late = {3: 2e-3}
    clocks = estimate_clocks(
        simulate(np.random.default_rng(seed), FOUR, AHEAD, [ALL], 200, leave_jitter_s=late)
    )
    check(clocks, AHEAD, "a", within_s=1e-3)


@settings(max_examples=examples(30))
@given(seed=seeds, shift=shifts)
def test_shifting_a_clock_shifts_its_offset_and_nothing_else(seed: int, shift: float) -> None:
    ranks = simulate(np.random.default_rng(seed), FOUR, AHEAD, [ALL])
    before = estimate_clocks(ranks)
    shifted = {}
    for rank, rank_records in ranks.items():
        records = rank_records.records.copy()
        if rank_records.node == "b":
            for field in ("enqueued_s", "started_s", "ended_s"):
                records[field] += shift
        shifted[rank] = replace(rank_records, records=records)
    after = estimate_clocks(shifted)
    for node in "abc":
        moved = shift if node == "b" else 0.0
        assert after[node].offset_s == pytest.approx(before[node].offset_s - moved, abs=1e-9)
        assert after[node].error_s == pytest.approx(before[node].error_s, abs=1e-9)


@settings(max_examples=examples(30))
@given(seed=seeds, order=st.permutations(range(4)))
def test_permuting_the_ranks_changes_no_offset(seed: int, order: list[int]) -> None:
    ranks = simulate(np.random.default_rng(seed), FOUR, AHEAD, [ALL])
    before = estimate_clocks(ranks)
    after = estimate_clocks(
        {order[rank]: replace(records, rank=order[rank]) for rank, records in ranks.items()}
    )
    for node in "abc":
        assert after[node].offset_s == pytest.approx(before[node].offset_s, abs=1e-9)
        assert after[node].error_s == pytest.approx(before[node].error_s, abs=1e-9)


@settings(max_examples=examples(30))
@given(seed=seeds, reference=st.sampled_from("abc"))
def test_offsets_refer_to_the_given_reference(seed: int, reference: str) -> None:
    clocks = estimate_clocks(simulate(np.random.default_rng(seed), FOUR, AHEAD, [ALL]), reference)
    check(clocks, AHEAD, reference, within_s=100e-6)


@settings(max_examples=examples(30))
@given(seed=seeds)
def test_nodes_that_share_no_communicator_are_aligned_through_others(seed: int) -> None:
    """A chain a - b - c - d: collectives, then sends and receives, then collectives again."""
    ahead_s = {"a": 0.0, "b": 7.0, "c": -900.0, "d": 3e4}
    groups = [
        Group(1, (0, 1)),
        Group(2, (1, 2), Operation.SEND),
        Group(3, (2, 3), Operation.BARRIER),
    ]
    clocks = estimate_clocks(simulate(np.random.default_rng(seed), tuple("abcd"), ahead_s, groups))
    check(clocks, ahead_s, "a", within_s=2e-3)
    assert clocks["d"].error_s >= clocks["c"].error_s


@settings(max_examples=examples(30))
@given(seed=seeds, rate=st.sampled_from([5e-5, -5e-5]))
def test_stated_error_allows_for_drift(seed: int, rate: float) -> None:
    """All bounds from one side come from the first half of ten seconds of records.

    The requested offset is that at the end.
    """
    ranks = simulate(
        np.random.default_rng(seed),
        ("a", "b"),
        {"a": 0.0, "b": 0.0},
        [Group(1, (0, 1), Operation.REDUCE_SCATTER)],
        500,
        drift={"b": rate},
        laggard=lambda number: 1 if number < 250 else 0,
    )
    clocks = estimate_clocks(ranks)["b"]
    end_s = START_S + 500 * 0.02
    assert abs(clocks.offset_s + rate * end_s) <= clocks.error_s


def test_node_without_shared_operations_has_an_infinite_error() -> None:
    ranks = simulate(np.random.default_rng(0), FOUR, AHEAD, [Group(1, (0, 2))])
    clocks = estimate_clocks(ranks)
    assert clocks["c"] == ClockOffset(0.0, math.inf)
    assert clocks["b"].error_s < 1e-2
    assert estimate_clocks({}) == {}


def test_broadcast_bounds_from_one_side_only() -> None:
    """A single root bounds when the others leave at the earliest, but not at the latest."""
    ranks = simulate(
        np.random.default_rng(0),
        ("a", "b"),
        {"a": 0.0, "b": 5.0},
        [Group(1, (0, 1), Operation.BROADCAST)],
    )
    for rank_records in ranks.values():
        rank_records.records["peer"] = 0
    assert estimate_clocks(ranks)["b"].error_s == math.inf


def with_operation(
    ranks: Mapping[int, RankRecords],
    operation: Operation,
    times_s: Mapping[int, tuple[float, float]],
) -> dict[int, RankRecords]:
    """Return the records with one more operation, entered and left when each rank's clock says."""
    more = {}
    for rank, (entered_s, left_s) in times_s.items():
        record = ranks[rank].records[-1:].copy()
        record["code"], record["communicator"] = operation, 99
        record["enqueued_s"], record["started_s"], record["ended_s"] = entered_s, entered_s, left_s
        records = np.concatenate([ranks[rank].records, record])
        more[rank] = replace(ranks[rank], records=records)
    return more


def test_all_to_all_that_is_left_before_another_enters_excludes_no_offset() -> None:
    """With uneven splits two ranks may have nothing for each other, and need not wait."""
    ahead_s = {"a": 0.0, "b": 5.0}
    ranks = simulate(np.random.default_rng(0), ("a", "b"), ahead_s, [Group(1, (0, 1))])
    uneven = with_operation(
        ranks,
        Operation.ALL_TO_ALL,
        {0: (START_S, START_S + 0.01), 1: (START_S + 5.11, START_S + 5.12)},
    )
    clocks = estimate_clocks(uneven)
    check(clocks, ahead_s, "a", within_s=100e-6)
    assert clocks["b"].error_s < 3e-3


def test_bounds_that_exclude_every_offset_are_none() -> None:
    """A node's error was stated as small where its bounds contradicted each other."""
    ranks = simulate(np.random.default_rng(0), ("a", "b"), {"a": 0.0, "b": 5.0}, [Group(1, (0, 1))])
    wrong = with_operation(
        ranks,
        Operation.ALL_REDUCE,
        {0: (START_S, START_S + 0.01), 1: (START_S + 5.11, START_S + 5.12)},
    )
    clocks = estimate_clocks(wrong)
    assert clocks == {"a": ClockOffset(0.0, 0.0), "b": ClockOffset(0.0, math.inf)}


@pytest.mark.parametrize("flag", [Flag.FAILED, Flag.UNOBSERVED])
def test_failed_or_unobserved_ends_give_no_bound(flag: Flag) -> None:
    ranks = simulate(np.random.default_rng(0), ("a", "b"), {"a": 0.0, "b": 5.0}, [Group(1, (0, 1))])
    for rank_records in ranks.values():
        rank_records.records["ended_s"] = rank_records.records["enqueued_s"]
        rank_records.records["flags"] |= np.uint8(flag)
    assert estimate_clocks(ranks)["b"].error_s == math.inf


def test_mismatched_and_open_operations_are_ignored() -> None:
    ranks = simulate(
        np.random.default_rng(0), ("a", "b"), {"a": 0.0, "b": 5.0}, [Group(1, (0, 1))], 20
    )
    before = estimate_clocks(ranks)
    extra = np.zeros(1, RECORD)
    extra["kind"], extra["communicator"], extra["number"], extra["nbytes"] = (
        Kind.OPERATION,
        1,
        21,
        64,
    )
    with_others = {}
    for rank, rank_records in ranks.items():
        extra["code"] = (Operation.ALL_REDUCE, Operation.ALL_GATHER)[rank]
        extra["enqueued_s"], extra["ended_s"] = 1e9 * (rank + 1), 1e9 * (rank + 1)
        waiting = extra.copy()
        waiting["number"], waiting["code"], waiting["ended_s"] = 22, Operation.BARRIER, 0.0
        records = np.concatenate([rank_records.records, extra, waiting])
        with_others[rank] = replace(rank_records, records=records)
    after = estimate_clocks(with_others)
    assert after["b"].offset_s == before["b"].offset_s


def test_aligned_records_have_their_nodes_offset() -> None:
    ranks = simulate(np.random.default_rng(0), FOUR, AHEAD, [ALL])
    aligned = align(JobRecords(ranks, {}))
    clocks = estimate_clocks(ranks)
    for rank, records in aligned.ranks.items():
        clock = clocks[FOUR[rank]]
        assert (records.offset_s, records.offset_error_s) == (clock.offset_s, clock.error_s)


@given(st.lists(st.integers(-1000, 1000), min_size=1))
def test_half_sample_mode_is_negated_and_shifted_with_the_values(values: list[int]) -> None:
    array = np.array(values, float)
    assert half_sample_mode(-array) == -half_sample_mode(array)
    assert half_sample_mode(array + 512.0) == half_sample_mode(array) + 512.0
    assert array.min() <= half_sample_mode(array) <= array.max()


@given(seeds)
def test_half_sample_mode_is_near_the_beginning_of_a_one_sided_tail(seed: int) -> None:
    modes = [
        half_sample_mode(np.random.default_rng([seed, draw]).exponential(1.0, 400))
        for draw in range(25)
    ]
    assert min(modes) > 0
    # The median of the distribution is 0.69.
    assert np.median(modes) < 0.3
