"""Judges the ranks' records against an undisturbed run of the same job. Pure.

A rank records a line in every step, before the step can be committed. Lines of one entry into a
generation have the same `entered_ns`, which grows from entry to entry. An entry resumes after the
step before its first one. Later steps of earlier entries are lost, and computed again. So the job's
lineage consists of each entry's steps, in order, up to the step from which the next one resumes.

- Its samples, by step and then by rank, are those of the undisturbed run: none lost, none repeated.
- Its losses equal those of the undisturbed run bit by bit while every entry had the full world
  size; after another world size they are equal up to rounding, as sums have another order.
- An entry resumes from a step that an earlier one has completed, no older than promised.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

RELATIVE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A rank's record of a step; `loss` is hexadecimal, `at_s` monotonic."""

    step: int
    rank: int
    world_size: int
    generation: int
    entered_ns: int
    at_s: float
    loss: str
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationEntry:
    """One entry into a generation: its lines by step and rank."""

    entered_ns: int
    steps: Mapping[int, Mapping[int, Line]]

    @property
    def resumed_step(self) -> int:
        """The step whose state it began with; 0 for the beginning."""
        return min(self.steps) - 1

    @property
    def world_size(self) -> int:
        """Number of its ranks."""
        return next(line.world_size for lines in self.steps.values() for line in lines.values())

    @property
    def completed(self) -> int:
        """The last step that all of its ranks recorded; `resumed_step` if there is none."""
        whole = (step for step, lines in self.steps.items() if len(lines) == self.world_size)
        return max(whole, default=self.resumed_step)


@dataclass(frozen=True, slots=True)
class Floor:
    """From `at_s` on no entry may resume from a step before `step`; why, for the report.

    None stands for the step that the entry before has completed, but for the last `allowance` ones.
    A later floor replaces an earlier one.
    """

    at_s: float
    step: int | None
    why: str
    allowance: int = 0


@dataclass(slots=True)
class Judgement:
    """The findings about a run, in words, and the number of comparisons."""

    lost_samples: int = 0
    repeated_samples: int = 0
    equal_losses: int = 0
    close_losses: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def losses_are_equal(self) -> bool:
        """Whether every loss is right."""
        return not any(text.startswith("loss") for text in self.wrong)


def parse_lines(texts: Iterable[str]) -> list[Line]:
    """Parse the output of `chaos_worker.py`, without an incomplete last line of a killed rank.

    Raises:
        ValueError: another line is incomplete.
    """
    lines = []
    for text in texts:
        if not text.endswith("\n"):
            continue
        values = json.loads(text)
        values.pop("pid", None)
        lines.append(Line(**values | {"samples": tuple(values["samples"])}))
    return lines


def entries(lines: Iterable[Line]) -> list[GenerationEntry]:
    """Group lines by their entry, in the order of time."""
    grouped: dict[int, dict[int, dict[int, Line]]] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        grouped[line.entered_ns][line.step][line.rank] = line
    return [GenerationEntry(entered_ns, grouped[entered_ns]) for entered_ns in sorted(grouped)]


def lineage(
    history: Sequence[GenerationEntry],
) -> dict[int, tuple[GenerationEntry, Mapping[int, Line]]]:
    """Return, for each step, the entry and the lines that the job's last state rests on."""
    rests_on: dict[int, tuple[GenerationEntry, Mapping[int, Line]]] = {}
    for entry in history:
        rests_on = {step: of for step, of in rests_on.items() if step <= entry.resumed_step}
        rests_on |= {step: (entry, lines) for step, lines in entry.steps.items()}
    return rests_on


def judge(
    history: Sequence[GenerationEntry],
    undisturbed: GenerationEntry,
    floors: Sequence[Floor],
    last_step: int,
) -> Judgement:
    """Compare a run with an undisturbed one.

    Args:
        history: the run's entries, in order.
        undisturbed: the only entry of the undisturbed run, with at least `last_step` steps.
        floors: the promises, in the order of time.
        last_step: the step that the job is to end with.
    """
    judgement = Judgement()
    judgement.wrong += _wrong_resumptions(history, floors)
    rests_on = lineage(history)
    pure_until = _steps_of_one_world_size(history, undisturbed.world_size)
    for step in range(1, last_step + 1):
        expected = undisturbed.steps[step]
        entry, lines = rests_on.get(step, (undisturbed, {}))
        _judge_samples(judgement, step, _samples(expected), _samples(lines))
        if len(lines) != entry.world_size:
            continue  # Lost samples say so.
        if step <= pure_until:
            judgement.equal_losses += 1
            if differing := [r for r in expected if expected[r].loss != lines[r].loss]:
                judgement.wrong.append(f"loss of step {step} differs on ranks {differing}")
        else:
            judgement.close_losses += 1
            loss, right = _mean_loss(lines), _mean_loss(expected)
            if not abs(loss - right) <= RELATIVE_TOLERANCE * abs(right):
                judgement.wrong.append(f"loss of step {step} is {loss}, not about {right}")
    if beyond := [step for step in rests_on if step > last_step]:
        judgement.wrong.append(f"steps {min(beyond)} to {max(beyond)} are after the last one")
    return judgement


def _wrong_resumptions(history: Sequence[GenerationEntry], floors: Sequence[Floor]) -> list[str]:
    wrong = []
    reached = 0
    for entry in history:
        at_s = entry.entered_ns / 1e9
        if entry.resumed_step > reached:
            wrong.append(
                f"steps skipped: an entry at {at_s:.1f} s resumed after step {entry.resumed_step}, "
                f"but only {reached} was reached"
            )
        floor = next((floor for floor in reversed(floors) if floor.at_s <= at_s), None)
        if floor is not None:
            promised = reached - floor.allowance if floor.step is None else floor.step
            if entry.resumed_step < promised:
                wrong.append(
                    f"resumed too early: an entry at {at_s:.1f} s began after step "
                    f"{entry.resumed_step}, promised was {promised} ({floor.why})"
                )
        # A step that some ranks have not recorded is completed by none: the ranks reduce over it.
        reached = entry.completed
    return wrong


def _steps_of_one_world_size(history: Sequence[GenerationEntry], world_size: int) -> float:
    """Return up to which step no entry has ever had another world size; infinity for all."""
    others = [entry.resumed_step for entry in history if entry.world_size != world_size]
    return min(others, default=float("inf"))


def _judge_samples(
    judgement: Judgement, step: int, expected: Sequence[int], actual: Sequence[int]
) -> None:
    if actual == expected:
        return
    lost = (Counter(expected) - Counter(actual)).total()
    repeated = (Counter(actual) - Counter(expected)).total()
    judgement.lost_samples += lost
    judgement.repeated_samples += repeated
    what = f"{lost} lost, {repeated} repeated" if lost or repeated else "in another order"
    judgement.wrong.append(f"samples of step {step}: {what}")


def _samples(lines: Mapping[int, Line]) -> tuple[int, ...]:
    return tuple(sample for rank in sorted(lines) for sample in lines[rank].samples)


def _mean_loss(lines: Mapping[int, Line]) -> float:
    return sum(float.fromhex(line.loss) for line in lines.values()) / len(lines)
