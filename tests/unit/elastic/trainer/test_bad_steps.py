"""Claims about which steps are rejected, what is skipped for them, and who remembers it."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.elastic.data.json_values import from_json_value, to_json_value
from keepstep.elastic.errors import StepRejected, UsageError
from keepstep.elastic.trainer.bad_steps import BadSteps, RejectedStep, StepJudge, spike_in
from keepstep.elastic.trainer.passes import StopRequest


def rejected_by(judge: StepJudge, step: int, *, rank: int = 0, generation: int = 1) -> RejectedStep:
    return judge.reject(
        "loss=nan", step=step, batch=step - 1, begin=0, generation=generation, rank=rank
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_rejected_from_the_first_step_on(value: float) -> None:
    assert StepJudge(BadSteps()).judge(1, {"loss": value, "norm": 1.0}) == f"loss={value}"


def test_without_a_factor_no_finite_value_is_rejected() -> None:
    judge = StepJudge(BadSteps())
    assert not any(judge.judge(step, {"loss": 10.0**step}) for step in range(1, 300))


def test_a_spike_is_rejected_once_there_is_something_to_compare_it_with() -> None:
    judge = StepJudge(BadSteps(spike=5.0, window=10))
    losses = [9.0, 1.0, 1.1, 0.9, 1.0]
    assert [judge.judge(step, {"loss": loss}) for step, loss in enumerate(losses, 1)] == [""] * 5
    assert judge.judge(6, {"loss": 1.8}) == "loss=1.8, after a median of 1"
    judge.resume(5)
    assert judge.judge(6, {"loss": 1.3}) == ""


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=50), st.floats(0.5, 20))
def test_a_spike_is_the_same_in_any_unit_and_never_the_median(
    before: list[float], factor: float
) -> None:
    middle = sorted(before)[len(before) // 2 - (len(before) % 2 == 0)]
    assert not spike_in(middle, before, factor)
    top = max(map(abs, before)) * (2 + 4 * factor) + 1
    assert spike_in(top, before, factor) == spike_in(
        top * 2.0**8, [value * 2.0**8 for value in before], factor
    )


def test_values_of_steps_that_are_computed_again_are_forgotten() -> None:
    policy = BadSteps(spike=3.0, window=4)
    once, twice = StepJudge(policy), StepJudge(policy)
    values = [1.0, 1.1, 1.0, 1.2, 1.3]
    for step, value in enumerate(values, 1):
        once.judge(step, {"loss": value})
    for step, value in [(1, 1.0), (2, 1.1), (3, 90.0), (4, 90.0)]:
        twice.judge(step, {"loss": value})
    twice.resume(2)
    for step, value in list(enumerate(values, 1))[2:]:
        twice.judge(step, {"loss": value})
    assert once.state_dict() == twice.state_dict()


def test_the_batch_of_a_rejected_step_is_skipped_and_those_that_are_rolled_back() -> None:
    judge = StepJudge(BadSteps())
    assert str(rejected_by(judge, 12)) == (
        "rank 0 rejected step 12: loss=nan; global batch 11 is skipped"
    )
    assert [batch for batch in range(100) if judge.is_skipped(batch)] == [11]
    judge = StepJudge(BadSteps(roll_back=3))
    rejected = rejected_by(judge, 12, generation=2)
    assert str(rejected).endswith("global batches 8 to 11 are skipped")
    assert [batch for batch in range(100) if judge.is_skipped(batch)] == [8, 9, 10, 11]
    # What was computed in a later generation has gone on from a state that was old enough.
    assert [judge.newest_step(generation) for generation in (1, 2, 3)] == [8, 8, None]


def test_only_the_rejected_steps_batch_is_skipped_where_there_is_no_state_to_roll_back_to() -> None:
    """Whether batches before it were computed again depends on which snapshot was complete."""
    judge = StepJudge(BadSteps(roll_back=3))
    rejected_by(judge, 12)
    judge.resume(10)
    assert [batch for batch in range(100) if judge.is_skipped(batch)] == [11]
    assert judge.newest_step(1) == 11
    reported = judge.take_unreported()
    assert len(reported) == 1
    judge.resume(5)
    # Ranks that have not come as far still say what was wanted.
    other = StepJudge(BadSteps(roll_back=3))
    wanted = rejected_by(other, 12)
    for order in ((wanted, *reported), (*reported, wanted)):
        learner = StepJudge(BadSteps(roll_back=3))
        learner.learn(order)
        assert learner.rejected == reported


def test_batches_of_an_earlier_pass_are_not_skipped() -> None:
    judge = StepJudge(BadSteps(roll_back=10))
    rejected = judge.reject("x", step=12, batch=21, begin=20, generation=1, rank=0)
    assert rejected.batches == range(20, 22)
    assert rejected.newest_step == 1


def test_one_more_than_the_job_survives_ends_it_with_rank_step_and_value() -> None:
    judge = StepJudge(BadSteps(at_most=2))
    rejected_by(judge, 3)
    rejected_by(judge, 3, generation=2)
    with pytest.raises(StepRejected, match=r"rank 1 rejected step 7 of global batch 6: loss=nan\."):
        rejected_by(judge, 7, rank=1, generation=3)


def test_a_step_that_several_ranks_reject_counts_once() -> None:
    judges = [StepJudge(BadSteps(at_most=1)) for _ in range(3)]
    for rank in (2, 1):
        rejected_by(judges[rank], 5, rank=rank)
    states = [json.loads(json.dumps(judge.to_json())) for judge in judges]
    for judge in judges:
        for content in states:
            judge.learn(StepJudge.from_json(content))
        assert [found.rank for found in judge.rejected] == [1]
        assert [found.rank for found in judge.take_unreported()] == [1]
        assert judge.take_unreported() == ()


def test_a_new_process_takes_what_it_needs_of_the_state_and_tells_nothing_of_it() -> None:
    old = StepJudge(BadSteps(spike=4.0, window=6))
    for step in range(1, 9):
        old.judge(step, {"loss": 1 / step, "norm": 2.0})
    rejected_by(old, 9, rank=3)
    state = json.loads(json.dumps(to_json_value("state", old.state_dict())))
    new = StepJudge(BadSteps(spike=4.0, window=6))
    new.load_state_dict(from_json_value(state, new.state_dict()))
    assert new.state_dict() == old.state_dict()
    assert new.take_unreported() == ()
    assert old.take_unreported() == new.rejected


def test_policies_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="at_most and roll_back cannot be negative"):
        BadSteps(roll_back=-1)
    with pytest.raises(UsageError, match="give a number above 0, or None"):
        BadSteps(spike=0.0)


def test_a_wish_to_stop_holds_from_its_step_on_in_its_pass() -> None:
    request = StopRequest(step=5, pass_number=2)
    held = {
        (step, number) for step in range(9) for number in range(4) if request.holds(step, number)
    }
    assert held == {(5, 2), (6, 2), (7, 2), (8, 2)}
