"""Tests of names: a directory or object has one name, and no other name is taken for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.format.stored.manifest import Manifest, StoredObject
from keepstep.checkpoint.format.stored.object_names import Attempt, StoredStep


@given(st.integers(0, 10**8 - 1), st.integers(0, 10**6 - 1))
def test_a_directory_name_round_trips(step: int, generation: int) -> None:
    assert StoredStep.parse(StoredStep(step, generation).directory) == StoredStep(step, generation)


@pytest.mark.parametrize(
    "name", ["step-1-2", "step-00000001-000002x", "other", "step-00000001", ""]
)
def test_other_directory_names_are_not_steps(name: str) -> None:
    assert StoredStep.parse(name) is None


@given(st.from_regex(r"[0-9a-z][0-9a-z-]{0,63}", fullmatch=True))
def test_attempts_have_directories_of_their_own_below_the_step(name: str) -> None:
    attempt = Attempt(StoredStep(7, 2), name)
    step, _, leaf = attempt.directory.rpartition("/")
    assert step == StoredStep(7, 2).directory
    assert Attempt.is_directory(leaf)
    assert Manifest(7, 2, name, ()).directory == attempt.directory


@pytest.mark.parametrize("name", ["", "../x", "a/b", "A", "-a", "a" * 65, "a.b", "a\n"])
def test_other_names_of_attempts_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name an attempt"):
        Attempt(StoredStep(7, 2), name)
    assert not Attempt.is_directory(f"attempt-{name}")


def test_a_part_has_one_name_only() -> None:
    assert not StoredObject("parts/0000001.json", 1, 1).is_part
