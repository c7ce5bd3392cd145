"""Claims about a pass over a dataset with an index that a job resumes in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from keepstep.elastic.data.data_pass import DataPass
from keepstep.elastic.data.position import Position
from keepstep.elastic.errors import UsageError

SAMPLES = 64


class Numbers:
    """A stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def indexed(
    global_batch: int = 4,
    samples: int = SAMPLES,
    *,
    number: int = 1,
    begin: int = 16,
    steps: int | None = None,
) -> DataPass[int]:
    """The second pass of a job, whose first had 16 batches, if nothing else is said."""
    return DataPass(number, begin, 0, range(samples), global_batch, steps=steps)


def located(batch: int) -> Position:
    """A position as it is stored while the second pass is the current one."""
    return indexed().located(Position(batch, batch))


@pytest.mark.parametrize(("global_batch", "samples"), [(8, 64), (2, 64), (4, 63), (4, 128)])
@pytest.mark.parametrize("batch", [17, 31])
def test_pass_that_goes_on_with_other_data_is_refused(
    global_batch: int, samples: int, batch: int
) -> None:
    """Also where the other data are so few that the pass would be over."""
    with pytest.raises(
        UsageError,
        match=f"{batch - 16} batches into a pass over 64 samples with global_batch=4, and the pass "
        f"is now over {samples} samples with global_batch={global_batch}",
    ):
        indexed(global_batch, samples).check_continues(located(batch))


def test_data_that_earlier_passes_have_now_are_not_taken_for_those_of_the_restored_one() -> None:
    """With half the global batch the first pass is so long that the position is in it."""
    with pytest.raises(UsageError, match="8 batches into a pass over 64 samples"):
        indexed(2, number=0, begin=0).check_continues(located(24))


@pytest.mark.parametrize(
    ("data", "position"),
    [
        pytest.param(indexed(), located(20), id="the same data"),
        pytest.param(indexed(steps=100), located(32), id="the pass becomes longer"),
        pytest.param(indexed(8), located(16), id="nothing of the pass is read"),
        pytest.param(indexed(8, steps=16), located(32), id="the pass is over"),
        pytest.param(indexed(8, begin=32, number=2), located(32), id="a later pass"),
        pytest.param(indexed(8, 128, number=0, begin=0), located(20), id="an earlier pass"),
        pytest.param(indexed(8), Position(20, 20), id="no pass"),
    ],
)
def test_pass_that_may_have_these_data_is_not_refused(
    data: DataPass[int], position: Position
) -> None:
    data.check_continues(position)


def test_pass_of_a_restored_position_is_kept_until_the_script_has_come_to_it() -> None:
    restored = located(20)
    assert restored.indexed_pass is not None
    first = indexed(number=0, begin=0)
    assert first.located(restored).indexed_pass == restored.indexed_pass
    assert first.located(Position(3, 3)).indexed_pass == replace(
        restored.indexed_pass, begin=0, end=16
    )


def test_position_in_a_stream_is_in_no_pass_with_an_index() -> None:
    stream: DataPass[Any] = DataPass(1, 16, 0, Numbers(), 4, steps=16)
    assert stream.located(located(20)).indexed_pass is None
    stream.check_continues(located(20))


def test_a_pass_of_numpys_numbers_is_stored_as_json() -> None:
    data = DataPass(1, 16, 0, range(SAMPLES), np.int64(4), steps=np.int64(20))  # type: ignore[arg-type]
    stored = data.located(Position(20, 20)).indexed_pass
    assert stored is not None
    assert json.loads(json.dumps(stored.document())) == {
        "begin": 16, "end": 36, "global_batch": 4, "samples": SAMPLES
    }  # fmt: skip


@pytest.mark.parametrize("samples", [range(SAMPLES), Numbers()], ids=["indexed", "stream"])
@pytest.mark.parametrize("steps", [0, -1])
def test_pass_without_a_step_is_refused(samples: Any, steps: int) -> None:
    with pytest.raises(UsageError, match="trains nothing: give steps or epochs of 1 or more"):
        DataPass(0, 0, 0, samples, 4, steps=steps)
    with pytest.raises(UsageError, match="trains nothing"):
        DataPass(0, 0, 0, range(SAMPLES), 4, epochs=steps)
