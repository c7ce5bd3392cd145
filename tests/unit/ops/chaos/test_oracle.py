"""Claims about the oracle: a run that is as it must be passes, and each kind of harm is found."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from ops.bench.chaos.oracle import (
    Floor,
    GenerationEntry,
    Judgement,
    Line,
    entries,
    judge,
    parse_lines,
)

LAST = 20
FULL = 3
BATCH = 6


def samples(step: int, rank: int, world_size: int) -> tuple[int, ...]:
    share = BATCH // world_size
    first = step * BATCH + rank * share
    return tuple(range(first, first + share))


def loss(step: int, rank: int, world_size: int) -> str:
    """Return a loss whose mean over the ranks hardly depends on their number."""
    rounding = 0.0 if world_size == FULL else 1e-12
    return (5.0 / step + (rank - (world_size - 1) / 2) / 10 + rounding).hex()


def run(entered_s: float, steps: Iterable[int], world_size: int = FULL) -> list[Line]:
    return [
        Line(
            step=step,
            rank=rank,
            world_size=world_size,
            generation=1,
            entered_ns=int(entered_s * 1e9),
            at_s=entered_s + step,
            loss=loss(step, rank, world_size),
            samples=samples(step, rank, world_size),
        )
        for step in steps
        for rank in range(world_size)
    ]


(UNDISTURBED,) = entries(run(1, range(1, LAST + 1)))


def judged(lines: list[Line], *floors: Floor) -> Judgement:
    return judge(entries(lines), UNDISTURBED, floors, LAST)


def changed(lines: list[Line], step: int, rank: int, **changes: object) -> list[Line]:
    return [
        replace(line, **changes)  # type: ignore[arg-type]
        if (line.step, line.rank) == (step, rank)
        else line
        for line in lines
    ]


def test_undisturbed_run_is_bit_equal() -> None:
    judgement = judged(run(1, range(1, LAST + 1)))
    assert judgement.wrong == []
    assert (judgement.equal_losses, judgement.close_losses) == (LAST, 0)


def test_steps_that_were_lost_and_computed_again_count_once() -> None:
    judgement = judged(run(1, range(1, 13)) + run(2, range(9, LAST + 1)))
    assert judgement.wrong == []
    assert judgement.equal_losses == LAST


def test_other_world_sizes_are_compared_up_to_rounding_from_there_on() -> None:
    lines = run(1, range(1, 11)) + run(2, range(9, 15), 2) + run(3, range(15, LAST + 1))
    judgement = judged(lines)
    assert judgement.wrong == []
    assert (judgement.equal_losses, judgement.close_losses) == (8, 12)


def test_state_of_before_another_world_size_is_bit_equal_again() -> None:
    lines = run(1, range(1, 11)) + run(2, range(11, 15), 2) + run(3, range(5, LAST + 1))
    judgement = judged(lines)
    assert (judgement.equal_losses, judgement.wrong) == (10, [])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_lost_sample_is_found(world_size: int) -> None:
    lines = run(1, range(1, LAST + 1), world_size)
    step = samples(7, 0, world_size)
    judgement = judged(changed(lines, 7, 0, samples=step[:-1]))
    assert (judgement.lost_samples, judgement.repeated_samples) == (1, 0)
    assert judgement.wrong[0] == "samples of step 7: 1 lost, 0 repeated"


def test_repeated_sample_is_found() -> None:
    lines = run(1, range(1, LAST + 1))
    step = samples(7, 1, FULL)
    judgement = judged(changed(lines, 7, 1, samples=(*step, step[0])))
    assert (judgement.lost_samples, judgement.repeated_samples) == (0, 1)


def test_samples_of_the_step_before_are_lost_and_repeated() -> None:
    judgement = judged(changed(run(1, range(1, LAST + 1)), 7, 1, samples=samples(6, 1, FULL)))
    assert (judgement.lost_samples, judgement.repeated_samples) == (2, 2)


def test_samples_in_another_order_are_found() -> None:
    lines = run(1, range(1, LAST + 1))
    swapped = changed(lines, 7, 0, samples=samples(7, 1, FULL))
    swapped = changed(swapped, 7, 1, samples=samples(7, 0, FULL))
    assert judged(swapped).wrong == ["samples of step 7: in another order"]


def test_step_that_nobody_computed_is_found() -> None:
    judgement = judged(run(1, range(1, 10)) + run(2, range(11, LAST + 1)))
    assert judgement.lost_samples == BATCH
    assert any("steps skipped" in text for text in judgement.wrong)


def test_step_that_one_rank_has_not_recorded_is_found() -> None:
    lines = [line for line in run(1, range(1, LAST + 1)) if (line.step, line.rank) != (LAST, 2)]
    assert judged(lines).lost_samples == BATCH // FULL


def test_resuming_from_a_step_that_no_rank_has_completed_is_found() -> None:
    unfinished = [line for line in run(1, range(1, 11)) if (line.step, line.rank) != (10, 1)]
    judgement = judged(unfinished + run(2, range(11, LAST + 1)))
    assert any("resumed after step 10, but only 9 was reached" in text for text in judgement.wrong)


def test_loss_that_differs_in_its_last_bit_is_found() -> None:
    value = float.fromhex(loss(7, 1, FULL))
    judgement = judged(changed(run(1, range(1, LAST + 1)), 7, 1, loss=(value + 1e-15).hex()))
    assert judgement.wrong == ["loss of step 7 differs on ranks [1]"]
    assert not judgement.losses_are_equal


@pytest.mark.parametrize("wrong", [5.001, float("nan")])
def test_loss_of_another_world_size_that_is_far_off_is_found(wrong: float) -> None:
    lines = run(1, range(1, LAST + 1), 2)
    judgement = judged(changed(lines, 7, 1, loss=wrong.hex()))
    assert not judgement.losses_are_equal


def test_steps_after_the_last_one_are_found() -> None:
    judgement = judged(run(1, range(1, LAST + 3)))
    assert judgement.wrong == ["steps 21 to 22 are after the last one"]


def test_resuming_before_what_was_promised_is_found() -> None:
    lines = run(1, range(1, 13)) + run(2, range(9, LAST + 1))
    assert judged(lines, Floor(1.5, 8, "the committed snapshot")).wrong == []
    judgement = judged(lines, Floor(1.5, 9, "the committed snapshot"))
    assert judgement.wrong == [
        "resumed too early: an entry at 2.0 s began after step 8, promised was 9 "
        "(the committed snapshot)"
    ]


def test_only_the_newest_promise_counts() -> None:
    lines = run(1, range(1, 13)) + run(3, range(5, LAST + 1))
    assert judged(lines, Floor(1.5, 9, "committed"), Floor(2, 4, "stored")).wrong == []
    assert judged(lines, Floor(1.5, 9, "committed"), Floor(4, 4, "stored")).wrong


def test_promise_that_nothing_is_lost_is_about_what_was_completed() -> None:
    promise = Floor(1.5, None, "every completed step")
    assert judged(run(1, range(1, 13)) + run(2, range(13, LAST + 1)), promise).wrong == []
    assert judged(run(1, range(1, 13)) + run(2, range(12, LAST + 1)), promise).wrong


def test_promise_of_what_nodes_hold_allows_for_the_steps_that_were_under_way() -> None:
    promise = Floor(1.5, None, "what nodes hold", 2)
    assert judged(run(1, range(1, 13)) + run(2, range(11, LAST + 1)), promise).wrong == []
    assert judged(run(1, range(1, 13)) + run(2, range(10, LAST + 1)), promise).wrong


def test_line_that_a_killed_rank_left_incomplete_is_dropped() -> None:
    line = run(1, [1])[0]
    text = json.dumps({name: getattr(line, name) for name in Line.__slots__} | {"pid": 5})
    assert parse_lines([text + "\n", text[:20]]) == [line]


def test_an_entry_knows_where_it_resumed_and_what_it_completed() -> None:
    lines = [line for line in run(1, range(4, 9)) if (line.step, line.rank) != (8, 0)]
    entry = entries(lines)[0]
    assert isinstance(entry, GenerationEntry)
    assert (entry.resumed_step, entry.completed, entry.world_size) == (3, 7, FULL)
