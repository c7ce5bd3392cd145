"""Tests of the list of frameworks, and of how their benchmark counts samples and lines."""

from ops.bench.frameworks.plan import GLOBAL_BATCH, STEPS, STEPS_PER_EPOCH
from ops.bench.integrations import CONTENDERS, lines_changed, samples_of
from ops.integrations import DOCUMENTED_LINES, OF_PYTORCH, ROOT, TESTS, frameworks


def test_no_test_of_a_framework_is_left_out_and_each_has_what_it_needs() -> None:
    known = frameworks()
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / TESTS).glob("test_*.py")}
    assert {it.test for name, it in known.items() if name not in OF_PYTORCH} == files - {
        DOCUMENTED_LINES
    }
    assert all((ROOT / framework.test).exists() for framework in known.values())
    assert [name for name, framework in known.items() if not framework.requirements] == [
        *OF_PYTORCH
    ]


def test_samples_are_those_of_the_steps_as_they_were_computed_last() -> None:
    lines = [
        {"step": step, "rank": 0, "samples": [*range(begin, begin + GLOBAL_BATCH)]}
        for step in range(1, STEPS + 1)
        for begin in ((step - 1) % STEPS_PER_EPOCH * GLOBAL_BATCH,)
    ]
    assert samples_of(lines) == (0, 0)
    # Computed again with samples of another step, which misses its own and repeats the other's.
    assert samples_of([*lines, {**lines[1], "samples": lines[0]["samples"]}]) == (16, 16)
    assert samples_of([*lines, {**lines[1], "samples": []}]) == (16, 0)


def test_each_framework_is_attached_by_at_most_five_lines() -> None:
    changed = {name: lines_changed(contender) for name, contender in CONTENDERS.items()}
    assert all(1 < lines <= 5 for lines in changed.values()), changed
