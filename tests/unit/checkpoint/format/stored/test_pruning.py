"""Tests of retention: which checkpoints are removed, and when their objects are deleted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.format.layout.retention import Retention
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.pruning import (
    Disposal,
    Note,
    RetentionPolicy,
    checkpoints_to_remove,
    dispose,
    names_crc,
    older_to_remove,
)

TENS = tuple(StoredStep(step, 1) for step in (10, 20, 30, 40, 50))
LOSS = dict(zip(TENS, (3.0, 1.0, 2.0, 5.0, 4.0), strict=True))

stored_steps = st.builds(StoredStep, st.integers(0, 8), st.integers(0, 3))
retentions = st.builds(
    RetentionPolicy,
    st.builds(
        Retention,
        last=st.integers(-1, 4),
        every=st.none() | st.integers(1, 4),
        behind=st.integers(0, 9),
    ),
    best=st.none() | st.tuples(st.integers(0, 3), st.sampled_from(["min", "max"])),
    pinned=st.frozensets(st.integers(0, 8), max_size=3),
)


NAMES = ("step-00000010-000001/attempt-a/zarr.json", "step-00000010-000001/attempt-a/x/c.0")
notes = st.builds(
    Note, at_s=st.floats(0, 1000), names_crc=st.just(names_crc(NAMES)), is_closed=st.booleans()
)


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (RetentionPolicy(), [50]),
        (RetentionPolicy(Retention(last=0)), [50]),
        (RetentionPolicy(Retention(last=3)), [30, 40, 50]),
        (RetentionPolicy(Retention(last=9)), [10, 20, 30, 40, 50]),
        (RetentionPolicy(Retention(every=20)), [20, 40, 50]),
        (RetentionPolicy(Retention(behind=10)), [40, 50]),
        (RetentionPolicy(Retention(behind=11)), [30, 50]),
        (RetentionPolicy(Retention(last=2, behind=50)), [40, 50]),
        (RetentionPolicy(best=(2, "min")), [20, 30, 50]),
        (RetentionPolicy(best=(1, "max")), [40, 50]),
        (RetentionPolicy(pinned=frozenset({10, 60})), [10, 50]),
        (
            RetentionPolicy(Retention(last=2, every=30), best=(1, "min"), pinned=frozenset({10})),
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
    retention = Retention(last=2, every=10)
    policy = RetentionPolicy(retention, best=(9, "min"), pinned=frozenset({10, 20}))
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


@given(st.lists(stored_steps, min_size=1, unique=True), retentions, st.data())
def test_what_a_job_has_just_published_stays_and_so_does_what_is_later(
    steps: list[StoredStep], policy: RetentionPolicy, data: st.DataObject
) -> None:
    """Later ones may be damaged, and then the job goes on from what it has just published."""
    published = data.draw(st.sampled_from(steps))
    retention = policy.retention
    removed = older_to_remove(steps, published, retention)
    assert all((s.step, s.generation) < (published.step, published.generation) for s in removed)
    left = {stored.step for stored in steps if stored not in removed}
    until = {stored.step for stored in steps if stored.step <= published.step - retention.behind}
    if retention.behind and until:
        assert max(until) in left, "a rejected step may lead back to it"


def test_an_idle_attempt_is_noted_closed_and_emptied_with_the_grace_time_between() -> None:
    seen = []
    note = None
    names: tuple[str, ...] = NAMES
    for now in range(0, 10000, 20):
        disposal = dispose(names, note, now=float(now), grace_s=60.0)
        seen.append(disposal)
        if disposal is Disposal.DELETE:
            break
        if disposal is Disposal.EMPTY:
            names = ()
        if disposal is not Disposal.KEEP:
            note = Note(float(now), names_crc(names), disposal is not Disposal.NOTE)
    waiting = [Disposal.KEEP, Disposal.KEEP]
    assert seen == [
        *(Disposal.NOTE, *waiting, Disposal.CLOSE, *waiting, Disposal.EMPTY),
        *[Disposal.KEEP] * (24 * 3 - 1),
        Disposal.DELETE,
    ]


@given(notes, st.floats(0, 1000), st.floats(1e-3, 1000))
def test_an_attempt_that_grew_since_it_was_noted_is_noted_again(
    note: Note, now: float, grace_s: float
) -> None:
    grown = replace(note, names_crc=names_crc(NAMES[:-1]))
    assert dispose(NAMES, grown, now=now, grace_s=grace_s) is Disposal.NOTE
    assert dispose(NAMES, None, now=now, grace_s=grace_s) is Disposal.NOTE


@given(notes, st.floats(0, 1000), st.floats(1e-3, 1000))
def test_an_attempt_is_neither_closed_nor_deleted_within_the_grace_time(
    note: Note, elapsed_s: float, grace_s: float
) -> None:
    now = note.at_s + elapsed_s
    disposal = dispose(NAMES, note, now=now, grace_s=grace_s)
    assert (disposal is Disposal.KEEP) == (now - note.at_s < grace_s)
    assert (disposal is Disposal.EMPTY) <= note.is_closed


@given(st.none() | notes, st.floats(0, 1000))
def test_without_grace_an_attempt_is_deleted_at_once(note: Note | None, now: float) -> None:
    assert dispose(NAMES, note, now=now, grace_s=0.0) is Disposal.DELETE


@given(notes)
def test_a_note_round_trips(note: Note) -> None:
    assert Note.decode(note.encode()) == note


@pytest.mark.parametrize(
    "data", [b"", b'{"at_s": ', b"[]", b"[" * 10**5, b'{"at_s": 1.0}', b'{"at_s": null}']
)
def test_a_note_of_another_form_counts_as_none(data: bytes) -> None:
    assert Note.decode(data) is None
