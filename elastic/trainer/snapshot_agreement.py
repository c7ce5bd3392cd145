"""Decides, equally on all ranks, which snapshots begin, and which can never be committed.

Pure. All ranks must take the same snapshots; otherwise none would be complete. They agree by
reductions of `Votes`, of which a vote counts if all ranks give it. The first reduction of a step
begins after its forward pass (EARLY), and is over by the time that an optimizer writes. If the last
snapshot is then neither known to be committed nor known to be torn, the ranks reduce once more
(LATE): just before they write, or at the end of the step on ranks that do not write, as after an
overflow. By then each rank's copy is complete.

A copy is torn if the state was written to meanwhile: it is not sealed, and so the snapshot is never
committed. `tests/unit/elastic/trainer/test_snapshot_agreement.py` checks for any order of events
over any number of ranks:
- All ranks begin and discard the same snapshots, and end the generation after the same step.
- A snapshot begins only if the last one is committed, or is discarded by all ranks.
- A snapshot is discarded only if a rank's copy of it was torn; and after the next step all ranks
  have discarded it, so that none waits for a commit that never comes.
- After a final agreement (`LOOP_DONE`) that discards nothing no rank's copy is torn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from typing import TypeAlias

NO_SNAPSHOT = -1


class Phase(Enum):
    """How far the agreement of a step is."""

    OUTSIDE = auto()
    """No step is computed: ranks may do different things, as one may run an evaluation."""
    OPEN = auto()
    """A step is computed, and no reduction has begun."""
    EARLY = auto()
    """The reduction has begun that may be repeated."""
    LATE = auto()
    """The last reduction of the step has begun, with each rank's copy complete."""


class Fate(Enum):
    """A rank's knowledge of the last snapshot."""

    EXPECTED = auto()
    """It may be committed, or is."""
    TORN = auto()
    """This rank's copy is torn, which other ranks may not know."""
    DISCARDED = auto()
    """All ranks know that a rank's copy is torn."""


class Final(Enum):
    """The remaining work before the state of a step is sealed at a generation's end."""

    NOTHING = auto()
    BEGIN = auto()
    """Begin the snapshot."""
    AWAIT_COMMIT = auto()
    """Wait for the commit of the last snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes:
    """One rank's statements; or, reduced, those of all ranks.

    Attributes:
        is_wanted: a snapshot is wanted after this step.
        is_committed: the last snapshot is known to be committed.
        is_whole: the last snapshot is not known to be torn.
        generation_continues: the generation is not known to close.
        pass_continues: the pass over the data does not end after this step.
    """

    is_wanted: bool
    is_committed: bool
    is_whole: bool
    generation_continues: bool
    pass_continues: bool

    @classmethod
    def of(cls, values: Iterable[bool]) -> Votes:
        """Return votes of the values of all fields, in their order."""
        return cls(**dict(zip((field.name for field in fields(cls)), values, strict=True)))

    @property
    def may_begin(self) -> bool:
        """Whether a snapshot may begin: the last one is committed, or discarded by all ranks.

        Otherwise a later reduction may have another result. It is worth having where no snapshot is
        wanted, too: the generation may end after this step, and a rank that does not know of
        another's torn copy would wait for a commit that never comes.
        """
        return self.is_committed or not self.is_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The agreement of all ranks by a step.

    Attributes:
        takes_snapshot: a snapshot of the state after the step begins.
        is_ending: the generation ends after the step. So none is inside the next one, and what that
            would have begun to change besides the parameters is not sealed.
        is_stopping: a rank wanted the pass over the data to end when the step began.
    """

    takes_snapshot: bool = False
    is_ending: bool = False
    is_stopping: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The state of a rank's agreement.

    Attributes:
        phase: how far the agreement of the step is.
        reductions: how many this rank has begun in the generation.
        result: of the one that began last in the step; None while it is under way.
        outcome: of the step that was completed last.
        last_step: the step of the last snapshot that began.
        fate: of that snapshot.
        is_written: an optimizer has written since the last step was completed.
        wants_stop: this rank wants the step to be the last of the pass over the data.
        copies_synchronously: training waits for each copy: the state was written to during one.
    """

    phase: Phase = Phase.OUTSIDE
    reductions: int = 0
    result: Votes | None = None
    outcome: Outcome = Outcome()
    last_step: int = NO_SNAPSHOT
    fate: Fate = Fate.EXPECTED
    is_written: bool = False
    wants_stop: bool = False
    copies_synchronously: bool = False

    def vote(self, *, is_wanted: bool, is_committed: bool, is_closing: bool) -> Votes:
        """Return this rank's votes for a reduction that begins now.

        Args:
            is_wanted: this rank wants a snapshot after the step.
            is_committed: it knows that the last snapshot is committed.
            is_closing: it knows that the generation closes.
        """
        return Votes(
            is_wanted=is_wanted,
            is_committed=is_committed,
            is_whole=self.fate is Fate.EXPECTED,
            generation_continues=not is_closing,
            pass_continues=not self.wants_stop,
        )

    def may_begin(self, *, is_committed: bool) -> bool:
        """Whether a snapshot may begin here, outside of steps."""
        return is_committed or self.fate is Fate.DISCARDED

    def before_end(self, step: int, *, is_committed: bool) -> Final:
        """Return what is left to do to seal the state after `step`, once no copy is under way.

        Nothing where it cannot be sealed: it may be half that of the next step, or the last
        snapshot is torn and other ranks wait for it.
        """
        if self.is_written or self.fate is Fate.TORN or step in (0, self.last_step):
            return Final.NOTHING
        return Final.BEGIN if self.may_begin(is_committed=is_committed) else Final.AWAIT_COMMIT


@dataclass(frozen=True, slots=True)
class StepBegan:
    """A step begins: until `STEP_DONE` all ranks run the same collectives."""

    stops: bool = False
    """This rank wants it to be the last of the pass over the data."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """The reduction that began last has a result, which is the same on all ranks."""

    result: Votes


@dataclass(frozen=True, slots=True)
class SnapshotBegan:
    """A snapshot of the state after `step` has begun."""

    step: int


class Moment(Enum):
    """An event that says no more than that it is one."""

    FORWARD_DONE = auto()
    """The model has computed a forward pass."""
    COPY_TORN = auto()
    """The copy of the last snapshot is complete, and torn."""
    BEFORE_WRITE = auto()
    """An optimizer is about to write, inside a step; the last copy is complete."""
    WRITES_OVER = auto()
    """The step's code has ended; the last copy is complete."""
    STEP_DONE = auto()
    """A step is completed; no reduction is under way."""
    LOOP_DONE = auto()
    """The state does not change any more; its copy is complete."""


Event: TypeAlias = StepBegan | SnapshotBegan | Reduced | Moment


def advance(state: Agreement, event: Event) -> Agreement:
    """Return the state after an event. If it counts another reduction, this rank begins it now."""
    match event:
        case StepBegan(stops=stops):
            # A step that the script left by an exception has begun a reduction: it is this step's.
            is_open = state.phase in (Phase.OUTSIDE, Phase.OPEN)
            phase = Phase.OPEN if is_open else Phase.EARLY
            return replace(state, phase=phase, wants_stop=stops)
        case Moment.FORWARD_DONE if state.phase is Phase.OPEN:
            return _reducing(state, Phase.EARLY)
        case Moment.FORWARD_DONE:
            return state
        case Moment.COPY_TORN:
            fate = Fate.DISCARDED if state.fate is Fate.DISCARDED else Fate.TORN
            return replace(state, fate=fate, copies_synchronously=True)
        case Moment.BEFORE_WRITE:
            written = replace(state, is_written=True)
            if state.phase is Phase.OPEN:
                return _reducing(written, Phase.LATE)
            return _repeated(written)
        case Moment.WRITES_OVER:
            return _repeated(state)
        case Moment.LOOP_DONE:
            return _reducing(state, Phase.LATE)
        case Reduced(result=result):
            fate = state.fate if result.is_whole else Fate.DISCARDED
            return replace(state, result=result, fate=fate)
        case Moment.STEP_DONE:
            return replace(
                state,
                phase=Phase.OUTSIDE,
                result=None,
                outcome=_outcome(state.result),
                is_written=False,
            )
        case SnapshotBegan(step=step):
            return replace(state, last_step=step, fate=Fate.EXPECTED)


def _reducing(state: Agreement, phase: Phase) -> Agreement:
    return replace(state, phase=phase, reductions=state.reductions + 1, result=None)


def _repeated(state: Agreement) -> Agreement:
    """Return the state with the last reduction of the step begun, if it may have another result."""
    if state.phase is Phase.EARLY and state.result is not None and not state.result.may_begin:
        return _reducing(state, Phase.LATE)
    return state


def _outcome(result: Votes | None) -> Outcome:
    if result is None:
        return Outcome()
    return Outcome(
        takes_snapshot=result.is_wanted and result.may_begin,
        is_ending=not result.generation_continues,
        is_stopping=not result.pass_continues,
    )
