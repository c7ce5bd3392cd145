"""Tests of retention: which checkpoints are removed, and when their directories are deleted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.stored.format import MANIFEST, REMOVED, StoredStep
from keepstep.checkpoint.stored.pruning import RetentionPolicy, checkpoints_to_remove, find_garbage

TENS = tuple(StoredStep(step, 1) for step in (10, 20, 30, 40, 50))
LOSS = dict(zip(TENS, (3.0, 1.0, 2.0, 5.0, 4.0), strict=True))

stored_steps = st.builds(StoredStep, st.integers(0, 8), st.integers(0, 3))
retentions = st.builds(
    RetentionPolicy,
    last=st.integers(-1, 4),
    every=st.none() | st.integers(1, 4),
    best=st.none() | st.tuples(st.integers(0, 3), st.sampled_from(["min", "max"])),
    pinned=st.frozensets(st.integers(0, 8), max_size=3),
)
directories = stored_steps.map(lambda stored: stored.directory) | st.sampled_from(
    ["other", "step-1-2"]
)
names = st.lists(
    st.builds(
        "{}/{}".format, directories, st.sampled_from([MANIFEST, REMOVED, "parts/000000.json"])
    )
    | st.sampled_from([MANIFEST, "step-00000001-000001"])
)


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (RetentionPolicy(), [50]),
        (RetentionPolicy(last=0), [50]),
        (RetentionPolicy(last=3), [30, 40, 50]),
        (RetentionPolicy(last=9), [10, 20, 30, 40, 50]),
        (RetentionPolicy(every=20), [20, 40, 50]),
        (RetentionPolicy(best=(2, "min")), [20, 30, 50]),
        (RetentionPolicy(best=(1, "max")), [40, 50]),
        (RetentionPolicy(pinned=frozenset({10, 60})), [10, 50]),
        (
            RetentionPolicy(last=2, every=30, best=(1, "min"), pinned=frozenset({10})),
            [10, 20, 30, 40, 50],
        ),
    ],
)
def test_checkpoints_that_a_policy_does_not_name_are_removed(
    retention: RetentionPolicy, kept: list[int]
) -> None:
    removed = checkpoints_to_remove(TENS[::-1], retention, LOSS)
    assert removed == tuple(stored for stored in TENS if stored.step not in kept)


def test_a_policy_by_a_metric_that_was_not_saved_keeps_the_newest() -> None:
    assert checkpoints_to_remove(TENS, RetentionPolicy(best=(2, "min"))) == TENS[:-1]


@pytest.mark.parametrize("direction", ["min", "max"])
def test_a_nan_loss_is_never_the_best(direction: str) -> None:
    diverged = {**LOSS, TENS[0]: math.nan, TENS[2]: math.nan}
    best = TENS[1] if direction == "min" else TENS[3]
    assert best not in checkpoints_to_remove(TENS, RetentionPolicy(best=(1, direction)), diverged)
    assert TENS[0] in checkpoints_to_remove(TENS, RetentionPolicy(best=(9, direction)), diverged)


def test_only_the_newest_generation_of_a_step_is_kept() -> None:
    stored = [StoredStep(step, generation) for step in (10, 20) for generation in (3, 1, 2)]
    policy = RetentionPolicy(last=2, every=10, best=(9, "min"), pinned=frozenset({10, 20}))
    removed = checkpoints_to_remove(stored, policy, dict.fromkeys(stored, 1.0))
    assert removed == tuple(
        StoredStep(step, generation) for step in (10, 20) for generation in (1, 2)
    )


@given(
    st.lists(stored_steps, min_size=1, unique=True),
    retentions,
    st.dictionaries(stored_steps, st.floats()),
)
def test_the_newest_checkpoint_is_never_removed(
    steps: list[StoredStep], retention: RetentionPolicy, metric: dict[StoredStep, float]
) -> None:
    removed = checkpoints_to_remove(steps, retention, metric)
    newest = max(steps, key=lambda stored: (stored.step, stored.generation))
    assert newest not in removed


def test_a_directory_without_a_manifest_is_noted_first_and_deleted_after_the_grace_time() -> None:
    committed, abandoned, removed = (stored.directory for stored in TENS[:3])
    present = [
        f"{committed}/{MANIFEST}",
        f"{committed}/zarr.json",
        f"{abandoned}/zarr.json",
        f"{removed}/zarr.json",
        f"{removed}/{REMOVED}",
    ]
    assert find_garbage(present, {removed: 100.0}, now=159.0, grace_s=60.0) == ((abandoned,), ())
    noted = {removed: 100.0, abandoned: 159.0}
    assert find_garbage(present, noted, now=160.0, grace_s=60.0) == ((), (removed,))


def test_without_grace_directories_without_a_manifest_are_deleted_at_once() -> None:
    committed, abandoned = (stored.directory for stored in TENS[:2])
    present = [f"{committed}/{MANIFEST}", f"{abandoned}/zarr.json", "notes/zarr.json", "zarr.json"]
    assert find_garbage(present, {}, now=0.0, grace_s=0.0) == ((), (abandoned,))


@given(names, st.dictionaries(directories, st.floats(0, 100)), st.floats(0, 200), st.floats(0, 100))
def test_a_directory_with_a_manifest_is_neither_noted_nor_deleted(
    present: list[str], noted: dict[str, float], now: float, grace_s: float
) -> None:
    to_note, to_delete = find_garbage(present, noted, now=now, grace_s=grace_s)
    for directory in to_note + to_delete:
        assert StoredStep.parse(directory)
        assert f"{directory}/{MANIFEST}" not in present
        assert any(name.startswith(f"{directory}/") for name in present)
    assert not set(to_note) & (set(to_delete) | noted.keys())
