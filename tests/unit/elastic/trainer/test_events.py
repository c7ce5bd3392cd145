"""Claims about which events a training loop receives, and when."""

from __future__ import annotations

from keepstep.elastic.trainer.events import (
    Callbacks,
    CheckpointStored,
    EventReporter,
    GenerationEntered,
    Recovered,
    SnapshotCommitted,
)


def entered(generation: int, step: int) -> GenerationEntered:
    return GenerationEntered(generation, rank=1, world_size=2, step=step, source="memory")


def reporter(events_seen: list[object], url: str | None = "/run") -> EventReporter:
    callbacks = Callbacks(
        on_generation=events_seen.append,
        on_recovery=events_seen.append,
        on_snapshot=events_seen.append,
        on_checkpoint=events_seen.append,
    )
    return EventReporter(callbacks, url)


def test_first_generation_is_no_recovery() -> None:
    events_seen: list[object] = []
    reporter(events_seen).enter(entered(1, 0), now_s=5.0)
    assert events_seen == [entered(1, 0)]


def test_recovery_tells_what_is_computed_again_and_how_long_it_took() -> None:
    events_seen: list[object] = []
    events = reporter(events_seen)
    events.enter(entered(1, 0), now_s=5.0)
    events.leave(step=7, now_s=20.0)
    # The next generation has ended before it ran.
    events.leave(step=5, now_s=21.0)
    events.enter(entered(3, 5), now_s=22.5)
    assert events_seen[1:] == [entered(3, 5), Recovered(entered(3, 5), undone_steps=2, seconds=2.5)]


def test_new_process_knows_not_what_is_computed_again() -> None:
    events_seen: list[object] = []
    reporter(events_seen).enter(entered(3, 5), now_s=22.5)
    assert events_seen == [entered(3, 5), Recovered(entered(3, 5), undone_steps=None, seconds=None)]


def test_each_snapshot_and_checkpoint_is_reported_once() -> None:
    events_seen: list[object] = []
    events = reporter(events_seen)
    events.enter(entered(1, 0), now_s=0.0)
    del events_seen[:]
    for committed, stored in ((-1, -1), (2, -1), (2, -1), (3, 2), (3, 2)):
        events.progress(committed, stored)
    assert events_seen == [
        SnapshotCommitted(1, 2),
        SnapshotCommitted(1, 3),
        CheckpointStored(2, "/run"),
    ]


def test_snapshot_that_another_generation_takes_of_the_same_step_is_reported_again() -> None:
    events_seen: list[object] = []
    events = reporter(events_seen)
    events.enter(entered(1, 0), now_s=0.0)
    events.progress(3, -1)
    events.leave(step=4, now_s=1.0)
    events.enter(entered(2, 3), now_s=2.0)
    del events_seen[:]
    events.progress(3, -1)
    assert events_seen == [SnapshotCommitted(2, 3)]


def test_events_that_nobody_asks_for_are_passed_over() -> None:
    events = EventReporter(Callbacks(), None)
    events.enter(entered(2, 3), now_s=0.0)
    events.progress(3, 3)
