"""Tests of goodput.py's conclusions from ranks' records."""

from ops.bench.goodput import GLOBAL_BATCH, Line, Times, draw, judge


def steps(epoch: int, first: int, last: int, began_s: float, step_s: float = 1.0) -> list[Line]:
    """Return the lines of two ranks that compute steps, each with half of the samples."""
    half = GLOBAL_BATCH // 2
    return [
        {
            "rank": rank,
            "step": step,
            "epoch": epoch,
            "world_size": 2,
            "at_s": began_s + (step - first + 1) * step_s,
            "samples": list(
                range(
                    (step - 1) * GLOBAL_BATCH + rank * half,
                    (step - 1) * GLOBAL_BATCH + (rank + 1) * half,
                )
            ),
        }
        for step in range(first, last + 1)
        for rank in range(2)
    ]


TIMES = Times(before=(0.0, 10.0), failures=(10.0, 30.0), after=(30.0, 40.0))


def test_job_that_nothing_disturbs_has_all_of_its_speed() -> None:
    result = judge(steps(1, 1, 40, 0.0), TIMES)
    assert result["goodput"] == 1.0
    assert (result["lost_steps"], result["missing_samples"], result["repeated_samples"]) == (
        0,
        0,
        0,
    )


def test_steps_that_are_computed_again_count_once() -> None:
    # Steps 16 to 20 are computed twice, and the recovery takes no time.
    lines = [*steps(1, 1, 20, 0.0), *steps(2, 16, 35, 20.0)]
    result = judge(lines, TIMES)
    assert result["lost_steps"] == 5
    assert result["goodput"] == 15 / 20
    assert (result["missing_samples"], result["repeated_samples"]) == (0, 0)


def test_samples_of_a_lost_share_are_missing_and_others_repeated() -> None:
    lines = steps(1, 1, 40, 0.0)
    lost = next(line for line in lines if line["step"] == 15 and line["rank"] == 1)
    again = next(line for line in lines if line["step"] == 16 and line["rank"] == 0)
    lost["samples"] = again["samples"]
    result = judge(lines, TIMES)
    assert result["missing_samples"] == GLOBAL_BATCH // 2
    assert result["repeated_samples"] == GLOBAL_BATCH // 2


def test_job_that_never_returns_to_full_strength_is_compared_with_its_beginning() -> None:
    lines = steps(1, 1, 20, 0.0)
    result = judge(lines, Times(TIMES.before, TIMES.failures, None))
    assert result["all_returned"] is False
    assert result["goodput"] == 0.5


def test_failures_depend_on_the_seed_alone_and_leave_the_end_alone() -> None:
    drawn = draw(1, 240.0, 20.0)
    assert drawn == draw(1, 240.0, 20.0)
    assert drawn != draw(2, 240.0, 20.0)
    assert {kill.kind for kill in drawn} == {"worker", "node"}
    assert all(0 < kill.at_s < 235 for kill in drawn)
