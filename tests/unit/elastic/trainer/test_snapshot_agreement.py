"""Claims about the agreement on snapshots, for any order of events over any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.elastic.trainer.snapshot_agreement import (
    NO_SNAPSHOT,
    Agreement,
    Event,
    Fate,
    Final,
    Moment,
    Outcome,
    Phase,
    Reduced,
    SnapshotBegan,
    StepBegan,
    Votes,
    advance,
)
from tests.examples import examples

ALL = Votes(
    is_wanted=True,
    is_committed=True,
    is_whole=True,
    generation_continues=True,
    pass_continues=True,
)


@dataclass
class Copy:
    """One rank's copy of the last snapshot."""

    is_complete: bool = False
    is_torn: bool = False


@dataclass
class Job:
    """The ranks' reductions, copies and commits, and the chances that decide what happens."""

    data: st.DataObject
    size: int
    forwards: bool
    votes: list[list[Votes]] = field(default_factory=list)
    """The votes of each reduction, by rank, in the order in which they come."""
    copies: dict[int, list[Copy]] = field(default_factory=dict)
    """The ranks' copies of each snapshot."""
    committed_step: int = NO_SNAPSHOT
    is_closing: bool = False
    is_settling: bool = False
    """Nothing bad happens any more, and all that can happen does: ranks that still wait hang."""

    def chance(self) -> bool:
        return self.is_settling or self.data.draw(st.booleans())

    def mishap(self) -> bool:
        return not self.is_settling and self.data.draw(st.integers(0, 5)) == 0

    def happens_meanwhile(self) -> None:
        """Let the leader commit what all ranks have sealed, or close the generation."""
        for step, copies in self.copies.items():
            sealed = [copy.is_complete and not copy.is_torn for copy in copies]
            if len(copies) == self.size and all(sealed) and self.chance():
                self.committed_step = max(self.committed_step, step)
        self.is_closing = self.is_closing or self.mishap()

    def result(self, number: int) -> Votes | None:
        """Return the result of a reduction once all ranks have voted."""
        if len(self.votes) <= number or len(self.votes[number]) < self.size:
            return None
        return Votes.of(map(all, zip(*map(astuple, self.votes[number]), strict=True)))


class Rank:
    """Plays what `SnapshotManager` does of a rank; a generator yields where others may come in."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.state = Agreement()
        self.known_step = NO_SNAPSHOT
        self.knows_closing = False
        self.outcomes: list[Outcome] = []
        self.begun: list[int] = []
        self.discarded: list[int] = []
        self.copy: Copy | None = None

    def apply(self, event: Event) -> None:
        before, self.state = self.state, advance(self.state, event)
        assert self.state.reductions in (before.reductions, before.reductions + 1)
        if self.state.reductions == before.reductions:
            return
        self.learn()
        votes = self.state.vote(
            is_wanted=self._job.chance(),
            is_committed=self.is_committed(),
            is_closing=self.knows_closing,
        )
        if before.reductions == len(self._job.votes):
            self._job.votes.append([])
        self._job.votes[before.reductions].append(votes)

    def is_committed(self) -> bool:
        return self.known_step >= self.state.last_step

    def learn(self) -> None:
        """Learn, by chance, what has become of the job meanwhile."""
        self._job.happens_meanwhile()
        if self._job.chance():
            self.known_step = self._job.committed_step
        self.knows_closing = self.knows_closing or (self._job.is_closing and self._job.chance())

    def wait_for_copy(self) -> None:
        if self.copy is None or self.copy.is_complete:
            return
        self.copy.is_complete = True
        self.copy.is_torn = self._job.mishap()
        if self.copy.is_torn:
            self.apply(Moment.COPY_TORN)

    def receive(self) -> Iterator[None]:
        if self.state.reductions == 0 or self.state.result is not None:
            return
        if self.state.phase not in (Phase.EARLY, Phase.LATE):
            return
        while (result := self._job.result(self.state.reductions - 1)) is None:
            yield
        self.apply(Reduced(result))

    def begin(self, step: int) -> None:
        """Begin a snapshot; no rank may until the last one is committed, or never will be."""
        last_step = self.state.last_step
        if self.state.fate is Fate.DISCARDED:
            self.discarded.append(last_step)
            assert any(copy.is_torn for copy in self._job.copies[last_step])
        else:
            assert self._job.committed_step >= last_step
        self.copy = Copy()
        self._job.copies.setdefault(step, []).append(self.copy)
        self.apply(SnapshotBegan(step))
        self.begun.append(step)

    def run(self, steps: int) -> Iterator[None]:
        """Compute steps until the generation ends, then seal; as the only end, the final one."""
        step = 0
        while step < steps and not self.state.outcome.is_ending:
            step += 1
            yield from self.compute(step)
            outcome = self.state.outcome
            self.outcomes.append(outcome)
            if any(copy.is_torn for copy in self._job.copies.get(self.state.last_step, ())):
                assert self.state.fate is Fate.DISCARDED
            if outcome.takes_snapshot:
                self.begin(step)
                yield
        yield from self.seal(step)
        if not self.state.outcome.is_ending:
            self.apply(Moment.LOOP_DONE)
            yield from self.receive()

    def compute(self, step: int) -> Iterator[None]:
        if self._job.forwards and self._job.mishap():
            # The script catches an exception of its step, where other ranks have none.
            self.apply(StepBegan())
            self.wait_for_copy()
            self.apply(Moment.BEFORE_WRITE)
        self.apply(StepBegan(stops=self._job.mishap()))
        for _ in range((1 + self._job.chance()) * self._job.forwards):
            self.apply(Moment.FORWARD_DONE)
            yield
        # Without a hook after the forward pass all ranks write: nothing else begins a reduction.
        is_skipped = self._job.forwards and self._job.mishap()
        for _ in range(0 if is_skipped else 1 + self._job.chance()):
            self.wait_for_copy()
            if not self.state.is_written:
                yield from self.receive()
            self.apply(Moment.BEFORE_WRITE)
            yield
        yield from self.receive()
        if self.state.phase is Phase.EARLY:
            self.wait_for_copy()
            self.apply(Moment.WRITES_OVER)
            yield from self.receive()
        self.apply(Moment.STEP_DONE)

    def seal(self, step: int) -> Iterator[None]:
        while True:
            self.wait_for_copy()
            match self.state.before_end(step, is_committed=self.is_committed()):
                case Final.NOTHING:
                    return
                case Final.BEGIN:
                    self.begin(step)
                case Final.AWAIT_COMMIT:
                    self.learn()
            yield


@settings(max_examples=examples(400))
@given(data=st.data(), size=st.integers(1, 4), forwards=st.booleans())
def test_in_any_order_of_events_all_ranks_agree_and_none_keeps_what_another_tore(
    data: st.DataObject, size: int, forwards: bool
) -> None:
    job = Job(data, size, forwards)
    ranks = [Rank(job) for _ in range(size)]
    running = [rank.run(5) for rank in ranks]
    for turn in range(2_000):
        if not running:
            break
        job.is_settling = turn > 150
        chosen = turn if job.is_settling else data.draw(st.integers(0, size))
        rank = running[chosen % len(running)]
        if next(rank, job) is job:
            running.remove(rank)
    assert not running, "ranks wait for each other for ever"
    first = ranks[0]
    for rank in ranks[1:]:
        assert rank.outcomes == first.outcomes
        assert rank.begun == first.begun
        assert rank.discarded == first.discarded
        assert rank.state.reductions == first.state.reductions
    is_torn = any(copy.is_torn for copy in job.copies.get(first.state.last_step, ()))
    for rank in ranks:
        assert rank.state.last_step == first.state.last_step
        if not first.state.outcome.is_ending:
            assert (rank.state.fate is Fate.DISCARDED) == is_torn


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (ALL, Outcome(takes_snapshot=True)),
        (replace(ALL, is_wanted=False), Outcome()),
        (replace(ALL, is_committed=False), Outcome()),
        (replace(ALL, is_committed=False, is_whole=False), Outcome(takes_snapshot=True)),
        (
            replace(ALL, is_wanted=False, is_committed=False, is_whole=False),
            Outcome(),
        ),
        (
            replace(ALL, is_wanted=False, generation_continues=False),
            Outcome(is_ending=True),
        ),
        (replace(ALL, is_wanted=False, pass_continues=False), Outcome(is_stopping=True)),
    ],
)
def test_outcome_of_a_step_is_what_all_ranks_say(result: Votes, outcome: Outcome) -> None:
    state = Agreement()
    for event in (StepBegan(), Moment.FORWARD_DONE, Reduced(result), Moment.STEP_DONE):
        state = advance(state, event)
    assert state.outcome == outcome
    assert advance(state, Moment.STEP_DONE).outcome == Outcome(), "another step has another outcome"


def test_a_rank_votes_for_what_it_knows() -> None:
    state = advance(Agreement(), StepBegan(stops=True))
    assert state.vote(is_wanted=True, is_committed=False, is_closing=True) == replace(
        ALL, is_committed=False, generation_continues=False, pass_continues=False
    )
    assert Agreement().vote(is_wanted=True, is_committed=True, is_closing=False) == ALL


def test_what_an_optimizer_has_begun_to_change_is_not_sealed() -> None:
    state = advance(advance(Agreement(), StepBegan()), Moment.BEFORE_WRITE)
    assert state.before_end(1, is_committed=True) is Final.NOTHING
    assert advance(state, Moment.STEP_DONE).before_end(1, is_committed=True) is Final.BEGIN
    assert advance(state, Moment.STEP_DONE).before_end(0, is_committed=True) is Final.NOTHING


def test_a_rank_whose_copy_is_torn_waits_for_no_commit_of_it() -> None:
    """A step without a reduction, of a model compiled whole that overflowed, tells nobody."""
    state = Agreement()
    for event in (SnapshotBegan(1), Moment.COPY_TORN, StepBegan(), Moment.STEP_DONE):
        state = advance(state, event)
    assert state.before_end(2, is_committed=False) is Final.NOTHING


def test_ranks_agree_again_during_the_optimizer_if_the_commit_was_not_known() -> None:
    state = Agreement()
    for event in (StepBegan(), Moment.FORWARD_DONE, Reduced(replace(ALL, is_committed=False))):
        state = advance(state, event)
    again = advance(state, Moment.BEFORE_WRITE)
    assert (again.phase, again.reductions, again.result) == (Phase.LATE, 2, None)
    assert advance(again, Moment.BEFORE_WRITE).reductions == 2
    assert advance(replace(state, result=ALL), Moment.BEFORE_WRITE).reductions == 1


def test_a_torn_copy_makes_all_later_ones_synchronous() -> None:
    state = advance(advance(Agreement(), SnapshotBegan(1)), Moment.COPY_TORN)
    assert (state.fate, state.copies_synchronously) == (Fate.TORN, True)
    state = advance(state, SnapshotBegan(2))
    assert (state.fate, state.copies_synchronously) == (Fate.EXPECTED, True)
