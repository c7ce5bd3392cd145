"""Claims about how outages.py counts the steps that ranks have completed."""

from ops.bench.outages import Line, gap_s, recomputed


def lines(*steps: tuple[int, int, float]) -> list[Line]:
    return [{"rank": rank, "step": step, "at_s": at_s} for rank, step, at_s in steps]


def test_steps_that_a_rank_has_completed_twice_are_counted_for_the_rank_with_the_most() -> None:
    before = lines((0, 1, 1.0), (1, 1, 1.0), (0, 2, 2.0), (1, 2, 2.0), (0, 3, 3.0))
    went_on = lines((0, 4, 9.0), (1, 3, 8.0), (1, 4, 9.0))
    assert recomputed([*before, *went_on], 5.0) == 0
    went_back = lines((0, 2, 8.0), (1, 2, 8.0), (0, 3, 9.0), (1, 3, 9.0), (0, 4, 10.0))
    assert recomputed([*before, *went_back], 5.0) == 2
    assert recomputed([*before, *went_back], 8.5) == 1, "what was before the outage is not its"


def test_steps_that_are_lost_twice_count_twice() -> None:
    assert recomputed(lines((0, 1, 1.0), (0, 2, 2.0), (0, 2, 3.0), (0, 2, 4.0)), 2.5) == 2


def test_gap_is_the_longest_time_without_a_step_since_the_outage_began() -> None:
    steps = lines((0, 1, 1.0), (0, 2, 6.0), (0, 3, 8.0))
    assert gap_s(steps, 0.5) == 5.0
    assert gap_s(steps, 5.0) == 2.0
