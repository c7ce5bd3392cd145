"""Decides which steps do not count, because a rank reported a value that shows it. Pure.

A rank that rejects a step leaves it before its end, as if it had failed. So no snapshot of the step
becomes complete, its peers' collectives break, and no rank has to ask the others in each step
whether all is well. All ranks learn what was rejected when they enter the next generation. From
then on it is part of the state, so the batches stay skipped whatever fails later.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.elastic.errors import StepRejected, UsageError

_MAD_OF_A_NORMAL_DISTRIBUTION = 0.6745
_LEAST_RELATIVE_DEVIATION = 0.01
"""Values that hardly differ from each other make no spike of the next small difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSteps:
    """A policy for steps that `Step.report` rejects; for `keepstep.join(on_bad_step=...)`.

    A rejected step is undone: the job returns to a snapshot before it, and its batch is skipped.

    Args:
        at_most: number of steps that may be rejected in the whole job; one more ends it.
        spike: also reject a value that is more than so many standard deviations above the median of
            the last ones, both estimated robustly: by the median of the distances from the median.
            The deviation counts as 1 % of the median at least. None: only values that are not
            finite are rejected.
        window: number of steps that a value is compared with. A spike is looked for once half of
            them are there.
        roll_back: return to a state that is at least so many steps older than the one before the
            rejected step, and skip the batches of these steps, too. A state that is older than the
            last snapshots comes from storage; without one there, the snapshot is taken.

    Raises:
        UsageError: a number is too small.
    """

    at_most: int = 10
    spike: float | None = None
    window: int = 100
    roll_back: int = 0

    def __post_init__(self) -> None:
        if self.at_most < 0 or self.roll_back < 0 or self.window < 2:
            raise UsageError(
                f"{self}: at_most and roll_back cannot be negative, and window is at least 2"
            )
        if self.spike is not None and not self.spike > 0:
            raise UsageError(f"BadSteps(spike={self.spike}): give a number above 0, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedStep:
    """A step that does not count, and what is skipped for it.

    Attributes:
        step: its number, counted from 1.
        rank: the rank that rejected it.
        reason: why, with the value.
        first_batch, last_batch: the global batches that are skipped, counted from 0 over the job.
        generation: the generation in which it was computed.
        newest_step: the newest state of that generation, or of one before, to go on from.
    """

    step: int
    rank: int
    reason: str
    first_batch: int
    last_batch: int
    generation: int
    newest_step: int

    @property
    def batches(self) -> range:
        """The global batches that are skipped."""
        return range(self.first_batch, self.last_batch + 1)

    def __str__(self) -> str:
        skipped = (
            f"global batch {self.last_batch} is skipped"
            if self.first_batch == self.last_batch
            else f"global batches {self.first_batch} to {self.last_batch} are skipped"
        )
        return f"rank {self.rank} rejected step {self.step}: {self.reason}; {skipped}"


def spike_in(value: float, before: Sequence[float], factor: float) -> bool:
    """Whether a value is more than `factor` robust standard deviations above those before it."""
    median = statistics.median(before)
    distance = statistics.median(abs(other - median) for other in before)
    deviation = max(
        distance / _MAD_OF_A_NORMAL_DISTRIBUTION, abs(median) * _LEAST_RELATIVE_DEVIATION
    )
    return value > median + factor * deviation


class StepJudge:
    """Judges the steps of one rank, and remembers those that any rank rejected.

    Args:
        policy: what to reject.
    """

    def __init__(self, policy: BadSteps) -> None:
        self._policy = policy
        self._values: dict[str, dict[int, float]] = defaultdict(dict)
        self._rejected: tuple[RejectedStep, ...] = ()
        self._reported: frozenset[RejectedStep] = frozenset()

    @property
    def rejected(self) -> tuple[RejectedStep, ...]:
        """The steps that were rejected, one for each that was undone."""
        return self._rejected

    def judge(self, step: int, values: Mapping[str, float]) -> str:
        """Return why a step is to be rejected, "" if it is not; remember its values.

        Args:
            step: its number.
            values: what the rank reports of it, by name.
        """
        reasons = []
        for name, value in values.items():
            if not math.isfinite(value):
                reasons.append(f"{name}={value}")
            elif self._policy.spike is not None:
                before = self._remember(name, step, value)
                if len(before) >= self._policy.window // 2 and spike_in(
                    value, before, self._policy.spike
                ):
                    median = statistics.median(before)
                    reasons.append(f"{name}={value:.6g}, after a median of {median:.6g}")
        return "; ".join(reasons)

    def _remember(self, name: str, step: int, value: float) -> list[float]:
        """Add a value to those of its name, and return those of the steps before."""
        before = [(at, old) for at, old in self._values[name].items() if at < step]
        before = before[-self._policy.window :]
        self._values[name] = dict([*before, (step, value)])
        return [old for _, old in before]

    def reject(
        self, reason: str, *, step: int, batch: int, begin: int, generation: int, rank: int
    ) -> RejectedStep:
        """Reject a step.

        Args:
            reason: why.
            step: its number, counted from 1.
            batch: its global batch.
            begin: the first global batch of the pass over the data.
            generation: the current generation.
            rank: this rank.

        Raises:
            StepRejected: more steps are rejected than the job survives.
        """
        steps_back = self._policy.roll_back
        found = RejectedStep(
            step=step,
            rank=rank,
            reason=reason,
            first_batch=min(batch, max(begin, batch - steps_back)),
            last_batch=batch,
            generation=generation,
            newest_step=max(0, step - 1 - steps_back),
        )
        if len(self._rejected) >= self._policy.at_most:
            raise StepRejected(
                f"rank {rank} rejected step {step} of global batch {batch}: {reason}. "
                f"{len(self._rejected)} steps were rejected before, and "
                f"BadSteps(at_most={self._policy.at_most}) lets the job go on after no more. Look "
                "at the data of these batches and at the learning rate, then start the job again "
                "from a checkpoint, or with a greater at_most or roll_back"
            )
        self.learn([found])
        return found

    def learn(self, rejected: Iterable[RejectedStep]) -> None:
        """Remember steps that this rank or others have rejected.

        Of several ranks that reject the same step, the lowest counts; and of what it and others
        know of it, what `resume` has settled.
        """
        found: dict[tuple[int, int], RejectedStep] = {}
        for one in sorted(
            (*self._rejected, *rejected), key=lambda one: (one.rank, -one.newest_step)
        ):
            found.setdefault((one.generation, one.step), one)
        self._rejected = tuple(found[key] for key in sorted(found))

    def is_skipped(self, batch: int) -> bool:
        """Whether a global batch is to be skipped."""
        return any(batch in one.batches for one in self._rejected)

    def newest_step(self, generation: int) -> int | None:
        """Return the newest step that a state of a generation may have to go on from it; or None.

        Args:
            generation: the one in which the state was computed. What was computed after a step was
                rejected has gone on from an older state already.
        """
        limits = [one.newest_step for one in self._rejected if one.generation >= generation]
        return min(limits, default=None)

    def resume(self, step: int) -> None:
        """Go on after a step: forget the values of later ones.

        For rejected steps that this is not old enough for, only their own batches are skipped.
        """
        self._rejected = tuple(
            replace(one, first_batch=one.last_batch, newest_step=one.step - 1)
            if one not in self._reported and one.newest_step < step < one.step
            else one
            for one in self._rejected
        )
        for values in self._values.values():
            for later in [at for at in values if at > step]:
                del values[later]

    def take_unreported(self) -> tuple[RejectedStep, ...]:
        """Return what was rejected since the state that this process was given, each once."""
        unreported = tuple(one for one in self._rejected if one not in self._reported)
        self._reported = frozenset(self._rejected)
        return unreported

    def to_json(self) -> Json:
        """Return what is remembered of rejected steps, for `from_json` at other ranks."""
        return [asdict(one) for one in self._rejected]

    @staticmethod
    def from_json(content: Json) -> tuple[RejectedStep, ...]:
        """Return the steps of a result of `to_json`."""
        return tuple(RejectedStep(**one) for one in content)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; see `keepstep.Stateful`."""
        return {
            "rejected": self.to_json(),
            "values": {name: list(map(list, old.items())) for name, old in self._values.items()},
        }

    def load_state_dict(self, state: Json, /) -> None:
        """Add a state to what this process knows.

        Its own values are those of its rank; only a process that has none takes those of the state,
        which are of any rank.
        """
        of_state = self.from_json(state["rejected"])
        self.learn(of_state)
        # Of the same step as another rank's, what was learned may have replaced it.
        steps = {(one.generation, one.step) for one in of_state}
        self._reported |= {one for one in self._rejected if (one.generation, one.step) in steps}
        if not self._values:
            for name, values in state["values"].items():
                self._values[name] = dict(values)
