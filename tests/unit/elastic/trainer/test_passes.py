"""Claims about a script's passes over its data, and about ending one early."""

from __future__ import annotations

import pytest

from keepstep.elastic.data.data_pass import DataPass
from keepstep.elastic.data.position import Position
from keepstep.elastic.trainer.passes import Passes

EARLIER_BATCHES = 3


@pytest.fixture
def passes() -> Passes:
    """A first pass of three batches, and a second one of five."""
    passes = Passes()
    for steps in (EARLIER_BATCHES, 5):
        passes.begin(DataPass(passes.place.count, passes.place.end, 1, range(10), 2, steps=steps))
    return passes


def test_batches_are_counted_through_all_passes(passes: Passes) -> None:
    assert passes.current is not None
    assert (passes.place.count, passes.place.end) == (2, 8)
    assert (passes.current.begin, passes.current.end) == (3, 8)


def test_before_its_first_pass_a_script_has_no_more_batches() -> None:
    passes = Passes()
    assert not passes.has_more(Position())
    passes.request_stop(Position())
    assert not passes.is_stop_requested(Position())


@pytest.mark.parametrize(("batch", "is_over"), [(3, False), (7, False), (8, True), (9, True)])
def test_a_pass_has_more_batches_before_its_end(passes: Passes, batch: int, is_over: bool) -> None:
    assert passes.has_more(Position(batch, batch)) is not is_over


def test_a_stop_holds_in_its_pass_and_in_no_state_from_before_it(passes: Passes) -> None:
    passes.request_stop(Position(5, 5))
    assert not passes.is_stop_requested(Position(4, 4))
    assert passes.is_stop_requested(Position(5, 5))
    assert passes.is_stop_requested(Position(6, 6))
    passes.begin(DataPass(passes.place.count, passes.place.end, 1, range(10), 2, steps=5))
    assert not passes.is_stop_requested(Position(8, 8))


def test_a_stop_at_the_end_of_a_pass_has_no_effect(passes: Passes) -> None:
    passes.request_stop(Position(8, 8))
    assert not passes.is_stop_requested(Position(8, 8))


def test_a_rank_that_did_not_ask_learns_of_the_stop_for_the_step_that_is_computed_again(
    passes: Passes,
) -> None:
    assert passes.stop(Position(6, 6)) == Position(6, 8)
    assert passes.is_stop_requested(Position(5, 5))
    assert not passes.is_stop_requested(Position(4, 4))


def test_a_rank_that_asked_keeps_the_state_in_which_it_did(passes: Passes) -> None:
    passes.request_stop(Position(4, 4))
    passes.stop(Position(6, 6))
    assert passes.is_stop_requested(Position(4, 4))
