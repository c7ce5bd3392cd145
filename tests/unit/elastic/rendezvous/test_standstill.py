"""Claims about when a node's ranks stand still for too long."""

import pytest

from keepstep.elastic.rendezvous.standstill import NodeProgress, overdue_at_s


@pytest.mark.parametrize(
    ("has_stepped", "first_step_s", "limit_s", "overdue_s"),
    [
        (True, None, 60.0, 160.0),
        (True, 500.0, 60.0, 160.0),
        # What is compiled before the job's first step takes any time.
        (False, None, 60.0, None),
        # Later generations may compile again, but not take any time: they stand still there again.
        (False, 500.0, 60.0, 660.0),
        (True, None, 0.0, None),
        (False, 500.0, 0.0, None),
    ],
)
def test_ranks_stand_still_too_long_after_the_limit_and_the_first_step_has_its_own(
    *, has_stepped: bool, first_step_s: float | None, limit_s: float, overdue_s: float | None
) -> None:
    progress = NodeProgress(100.0, has_stepped, first_step_s)
    assert overdue_at_s(progress, limit_s) == overdue_s
