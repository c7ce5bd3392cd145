"""Claims about who must restart a script, and which guards a process leaves out.

`tests/sim/test_scripts.py` proves them together, on whole scripts.
"""

from __future__ import annotations

import pytest

from keepstep.elastic.trainer.script_place import ScriptPlace


@pytest.fixture
def place() -> ScriptPlace:
    """In the loop over a second pass, of batches 3 to 7."""
    place = ScriptPlace()
    for length in (3, 5):
        place.begin_pass(length)
    return place


def test_a_process_in_a_loop_goes_on_at_any_batch_of_the_pass(place: ScriptPlace) -> None:
    assert (place.count, place.end, place.is_in_loop) == (2, 8, True)
    assert [batch for batch in range(9) if place.reason_to_restart(batch)] == [0, 1, 2]


def test_a_process_outside_of_loops_goes_on_at_their_end_only(place: ScriptPlace) -> None:
    place.leave_loop()
    assert [batch for batch in range(9) if not place.reason_to_restart(batch)] == [8]


def test_before_the_first_pass_a_process_goes_on_at_the_beginning() -> None:
    assert not ScriptPlace().reason_to_restart(0)


def test_a_guard_is_over_once_a_batch_of_a_later_pass_was_consumed(place: ScriptPlace) -> None:
    assert not place.come_to_guard(9)
    place.leave_loop()
    assert [place.come_to_guard(batch) for batch in (7, 8, 9)] == [False, False, True]


@pytest.mark.parametrize("is_left_out", [False, True])
def test_who_has_passed_a_guard_restarts_where_new_ranks_run_it(
    place: ScriptPlace, is_left_out: bool
) -> None:
    place.leave_loop()
    if is_left_out:
        assert place.come_to_guard(9)
    else:
        place.complete_guard()
    place.begin_pass(4)
    assert "run the guards outside of the loop" in place.reason_to_restart(8)
    assert not place.reason_to_restart(9)


def test_guards_in_a_loop_do_not_count_as_passed(place: ScriptPlace) -> None:
    place.enter_guard(is_unconditional=True)
    place.complete_guard()
    assert not place.reason_to_restart(3)


def test_who_ran_a_guard_that_is_never_left_out_restarts_wherever_it_is(
    place: ScriptPlace,
) -> None:
    place.leave_loop()
    place.enter_guard(is_unconditional=True)
    place.begin_pass(4)
    assert "while not guard.completed" in place.reason_to_restart(10)
