"""Tests of the conclusions from computing a step again after replicas differed."""

from __future__ import annotations

import pytest

from keepstep.elastic.trainer.recomputation import (
    Contradiction,
    Recomputation,
    judge,
    step_to_repeat,
)


def remembered(contents: str, step: int = 8) -> list[Contradiction | None]:
    """Return what ranks remember; a dot stands for a rank that remembers nothing."""
    size = len(contents)
    return [None if c == "." else Contradiction(step, size, c) for c in contents]


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ("xy", "xx", Recomputation((1,), is_repeated=True)),
        ("yx", "xx", Recomputation((0,), is_repeated=True)),
        ("xyxz", "xxxx", Recomputation((1, 3), is_repeated=True)),
        ("yz", "xx", Recomputation((0, 1), is_repeated=False)),
        ("xy", "xy", None),
        ("xy", "xz", None),
        ("xx", "xx", None),
        (".y", "xx", None),
        ("..", "xx", None),
    ],
)
def test_who_held_something_else_before_was_wrong(
    before: str, now: str, expected: Recomputation | None
) -> None:
    assert judge(range(len(now)), remembered(before), 8, list(now)) == expected


def test_only_the_same_step_of_a_world_of_the_same_size_is_compared() -> None:
    assert judge((0, 1), remembered("xy", step=7), 8, ["x", "x"]) is None
    assert step_to_repeat(remembered("xy"), world_size=2) == 8
    assert step_to_repeat(remembered("xy"), world_size=4) == 0
    assert step_to_repeat(remembered(".."), world_size=2) == 0
    assert step_to_repeat([Contradiction(3, 2, "x"), None], world_size=2) == 3
