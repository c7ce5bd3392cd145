"""Decides what a torchrun agent does in the job's rounds. Pure.

A round of torchrun is a generation of the job. A node of torchrun is a node without snapshots: its
workers start when a generation opens, and have ended when its agent asks for the next round. Ranks
of the generation are nodes; torchrun itself numbers the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.elastic.rendezvous.records import (
    Failure,
    FailureKind,
    Generation,
    NodePhase,
    NodeRecord,
    Result,
)
from keepstep.elastic.rendezvous.view import View


@dataclass(frozen=True, slots=True)
class Enter:
    """Enter a generation, as the node of this rank."""

    generation: Generation
    rank: int


@dataclass(frozen=True, slots=True)
class Closed:
    """There are no more rounds for this node; `reason` says why, and what to do."""

    reason: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """No round came about in time; `reason` says why, and what to do."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a change of the view, but not longer than `at_most_s`; None: for ever."""

    at_most_s: float | None


def changes_at_end(view: View, record: NodeRecord, wall_s: float) -> Mapping[str, Any]:
    """Return how a node's record changes when its workers have ended and it asks for a round.

    Where the generation is not closing for another reason, they have ended by themselves.

    Args:
        view: the node's view.
        record: its record.
        wall_s: wall-clock seconds.
    """
    if not record.generation or record.phase is NodePhase.DRAINED:
        return {}
    failure = None
    if not nodes_waiting(view, record.generation):
        failure = Failure(FailureKind.RESTART, f"workers on {record.node} have failed", wall_s)
    return {"phase": NodePhase.DRAINED, "failure": failure}


def awaits_nodes(view: View) -> bool:
    """Whether it is for nodes that the next round waits; not while one is open, or in a pause."""
    return (view.generation is None or view.is_closing) and view.pause is None


def next_step(
    view: View, record: NodeRecord, waited_s: float, limit_s: float
) -> Enter | Closed | TimedOut | Wait:
    """Return the next step of a node that wants to take part in a round.

    Args:
        view: the node's view.
        record: its record, in which no generation is running.
        waited_s: for how long the next round has been waiting for nodes.
        limit_s: for how long it may.
    """
    eviction = view.evictions.get(record.node)
    if eviction is not None:
        return Closed(
            f"node {record.node} was evicted: {eviction.reason}; `keepstep evict --undo "
            f"{record.node}` lets it come back"
        )
    if view.result is not None:
        return Closed(
            f"the job has ended: {view.result.message}; once the nodes that still run have ended, "
            "its --rdzv-id may be used again"
        )
    generation = view.generation
    if generation is not None and not view.is_closing:
        member = generation.member(record.node)
        is_own = member is not None and member.server == record.server
        if member is not None and is_own and generation.generation > record.generation:
            return Enter(generation, generation.members.index(member))
        return Wait(None)
    if not awaits_nodes(view):
        return Wait(None)
    if waited_s < limit_s:
        return Wait(limit_s - waited_s)
    missing = "the nodes of the last round have not all come back, or too few are left"
    return TimedOut(
        f"no round within {limit_s:.0f} s: {missing if generation else 'too few nodes have come'}; "
        "start more nodes, lower --nnodes, or raise --rdzv-conf join_timeout="
    )


def nodes_waiting(view: View, generation: int) -> int:
    """Return the number that makes torchrun's agent ask for the next round, or 0.

    It is not 0 when the generation of its workers closes or is over, and when the job has failed.

    Args:
        view: the node's view.
        generation: the one that the agent's workers belong to.
    """
    if view.result is not None:
        # After success on one node the others do their work to its end.
        return 0 if view.result.succeeded else 1
    return int(view.is_closing or view.generation_number != generation)


def result_of(node: str, error: BaseException | None) -> Result:
    """Return the job's result once a node's agent has ended, by an error or without."""
    if error is None:
        return Result(True, f"the workers on {node} have finished")
    return Result(False, f"torchrun on {node} has ended ({type(error).__name__}); see its output")
