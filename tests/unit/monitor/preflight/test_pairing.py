"""Claims about who is measured with whom, and about which nodes stand out."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.monitor.preflight.pairing import MIN_NODES, best_rates, outliers, rounds


@given(st.integers(0, 65))
def test_every_pair_meets_once_in_as_few_rounds_as_possible(count: int) -> None:
    scheduled = rounds(count)
    met = [pair for pairs in scheduled for pair in pairs]
    assert sorted(met) == list(combinations(range(count), 2))
    assert len(scheduled) == (0 if count < 2 else count - 1 if count % 2 == 0 else count)
    for pairs in scheduled:
        busy = [place for pair in pairs for place in pair]
        assert len(busy) == len(set(busy))


@given(
    st.lists(st.floats(0.97, 1.03), min_size=MIN_NODES, max_size=40),
    st.integers(0, 39),
    st.floats(0.05, 0.7),
    st.floats(1e-6, 1e12),
)
def test_much_worse_node_is_named_alone_in_any_unit(
    healthy: list[float], place: int, share: float, unit: float
) -> None:
    values = {f"n{index}": value * unit for index, value in enumerate(healthy)}
    assert outliers(values, 0.2, low_is_bad=True) == ()
    assert outliers(values, 0.2, low_is_bad=False) == ()
    sick = f"n{place % len(healthy)}"
    slow = {**values, sick: unit * share}
    assert [outlier.name for outlier in outliers(slow, 0.2, low_is_bad=True)] == [sick]
    assert outliers(slow, 0.2, low_is_bad=False) == ()


def test_fast_node_is_no_outlier_and_two_nodes_decide_nothing() -> None:
    assert outliers({"a": 1.0, "b": 1.0, "c": 9.0}, 0.2, low_is_bad=True) == ()
    assert outliers({"a": 1.0, "b": 0.1}, 0.2, low_is_bad=True) == ()


def test_best_rate_of_a_node_is_that_of_its_fastest_link() -> None:
    rates = [("a", 1.0), ("b", 5.0), ("a", 3.0), ("stranger", 9.0)]
    assert best_rates(rates, ("a", "b", "c")) == {"a": 3.0, "b": 5.0}
