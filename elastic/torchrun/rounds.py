"""Decides how long a torchrun agent waits for a round, and why there are no more. Pure.

A round of torchrun is a generation of the job.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.elastic.rendezvous.records import Result
from keepstep.elastic.rendezvous.view import View


@dataclass(frozen=True, slots=True)
class Closed:
    """There are no more rounds for this node; `reason` says why, and what to do."""

    reason: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """No round came about in time; `reason` says why, and what to do."""

    reason: str


def awaits_nodes(view: View) -> bool:
    """Whether it is for nodes that the next round waits; not while one is open, or in a pause."""
    return (view.generation is None or view.is_closing) and view.pause is None


def timed_out(view: View, limit_s: float) -> TimedOut:
    """Return that no round has come about.

    Args:
        view: the node's view.
        limit_s: how long the node has waited.
    """
    what = "too few nodes have come"
    if view.generation is not None:
        what = "the nodes of the last round have not all come back, or too few are left"
    return TimedOut(
        f"no round within {limit_s:.0f} s: {what}; start more nodes, lower --nnodes, or raise "
        "--rdzv-conf join_timeout="
    )


def closed(view: View, node: str) -> Closed | None:
    """Return why a node that takes no more part in the job has no more rounds; None: unknown."""
    eviction = view.evictions.get(node)
    if eviction is not None:
        return Closed(
            f"node {node} was evicted: {eviction.reason}; `keepstep evict --undo "
            f"{node}` lets it come back"
        )
    if view.result is not None:
        return Closed(
            f"the job has ended: {view.result.message}; once the nodes that still run have ended, "
            "its --rdzv-id may be used again"
        )
    return None


def result_of(node: str, error: BaseException | None) -> Result:
    """Return the job's result once a node's agent has ended, by an error or without."""
    if error is None:
        return Result(True, f"the workers on {node} have finished")
    return Result(False, f"torchrun on {node} has ended ({type(error).__name__}); see its output")
