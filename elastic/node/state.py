"""Decides a node's next action from what the job asks for and what the node has done. Pure.

A shell looks at the job's view and at its workers, asks for `next_action`, performs it, records
what it has done, and asks again until nothing is left to do. So the order in which things happen
does not matter, and an action that takes long, such as draining, is returned until it is done.
The agent (`elastic/agent/generation_follower.py`) and the simulator (`tests/sim/node.py`) are such
shells.

Invariants:
- A generation is entered once, and in ascending order.
- Where an abort may leave garbage in memory, the snapshot server is fenced before any worker
  aborts, and no worker aborts before the leader has ordered it.
- Workers of a paused job end only after all of them have drained.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.elastic.rendezvous.records import (
    Failure,
    FailureKind,
    Generation,
    NodePhase,
    NodeRecord,
    RestartRequest,
)
from keepstep.elastic.rendezvous.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """A node's workers, as they are now.

    Attributes:
        generation: the newest generation that they were put into, or ended for; 0: none.
        present: whether there are any.
        done: whether every one has exited with status 0.
        running: whether every one has completed a step, or runs a script that does not report.
        failure: what has ended their generation here; None while nothing has.
        awaits_abort_order: whether an abort may leave garbage, so that they wait for the leader.
    """

    generation: int = 0
    present: bool = False
    done: bool = False
    running: bool = False
    failure: Failure | None = None
    awaits_abort_order: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node's place in the job's generations, and its workers.

    Attributes:
        record: what it has announced of itself, or will next.
        workers: its workers.
        drained: the newest generation that is over here; 0: none.
        ordered: the newest generation whose workers were ordered to abort; 0: none.
        paused: the newest generation whose workers ended because the job is paused; 0: none.
    """

    record: NodeRecord
    workers: Workers = field(default_factory=Workers)
    drained: int = 0
    ordered: int = 0
    paused: int = 0

    @property
    def entered(self) -> int:
        """The newest generation that the node has entered, or that is over for it."""
        return max(self.workers.generation, self.drained)

    @property
    def ended(self) -> int:
        """The newest generation of which no announcement is believed any more."""
        done = self.record.generation if self.record.phase is NodePhase.DONE else 0
        return max(self.drained, self.record.fenced, done)

    @property
    def phase(self) -> NodePhase:
        """The phase that the node announces; PROTOCOL.md has what it does next in each."""
        workers = self.workers
        if self.drained > workers.generation:
            return NodePhase.DRAINED
        if workers.generation == 0 or not workers.present:
            is_paused = workers.generation > 0 and self.paused == workers.generation
            return NodePhase.DRAINED if is_paused else NodePhase.WAITING
        if workers.done and workers.failure is None:
            return NodePhase.DONE
        if self.drained == workers.generation:
            return NodePhase.DRAINED
        return NodePhase.RUNNING if workers.running else NodePhase.STARTING


@dataclass(frozen=True, slots=True)
class Enter:
    """Put the workers into a generation, or end them where it has no place for this node."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Fence:
    """Have the snapshot server refuse whatever a generation's workers seal from now on."""

    generation: int


@dataclass(frozen=True, slots=True)
class OrderAbort:
    """Tell the workers to abort, as the leader has ordered."""

    generation: int


@dataclass(frozen=True, slots=True)
class Drain:
    """End the generation here: at once, or after the step in which all ranks agree to end."""

    generation: int
    abort: bool


@dataclass(frozen=True, slots=True)
class EndPaused:
    """End the drained workers of a job that is paused; what is in memory stays."""

    generation: int


Action = Enter | Fence | OrderAbort | Drain | EndPaused


def next_action(state: NodeState, view: View) -> Action | None:
    """Return what the node does next; None if it only waits.

    Args:
        state: the node.
        view: the job, as the node sees it.
    """
    generation = followed(state, view)
    if generation is None:
        return None
    if generation.generation > state.entered:
        return Enter(generation)
    workers, number = state.workers, generation.generation
    # A standstill breaks nothing: the others' stacks are taken before the leader ends it.
    failure = workers.failure
    has_failed = failure is not None and failure.kind is not FailureKind.STANDSTILL
    if not view.is_closing and not has_failed:
        return None
    if state.drained != number:
        abort = has_failed or (view.closing is not None and view.closing.abort)
        if abort and workers.awaits_abort_order:
            if state.record.fenced != number:
                return Fence(number)
            order = view.abort_order
            if order is not None and state.ordered != order.generation == number:
                return OrderAbort(number)
        return Drain(number, abort)
    if view.pause is not None and workers.present and not workers.done:
        return EndPaused(number)
    return None


def followed(state: NodeState, view: View) -> Generation | None:
    """Return the generation whose orders the node carries out; None without one.

    A place that names another snapshot server was given to an agent of this name that is gone; the
    leader will find it lost.
    """
    generation = view.generation
    if generation is None or generation.generation < state.entered:
        return None
    place = generation.member(state.record.node)
    return None if place is not None and place.server != state.record.server else generation


def drained_on_joining(state: NodeState) -> int:
    """Return the newest generation that is over here, for a node that is a member again.

    The open generation, if it counts on the node, is over for it. A job that was restored from
    another node's older view may be behind what this node's workers have entered.
    """
    if state.record.phase is not NodePhase.DRAINED:
        return state.drained
    return max(state.record.generation, state.entered)


def due_restarts(state: NodeState, view: View) -> tuple[RestartRequest, ...]:
    """Return the requests to restart workers of this node, once the leader closes for them.

    Not before: peers may report the connections that break sooner than the request is seen, and
    would be taken for the cause.
    """
    generation = followed(state, view)
    if generation is None or generation.generation > state.entered or not view.is_closing:
        return ()
    return view.restarts_on(state.record.node)
