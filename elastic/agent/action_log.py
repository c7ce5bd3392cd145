"""Tells the user in the log what a leader does, and how far the job is when a node leaves."""

from __future__ import annotations

import logging

from keepstep.elastic.rendezvous import actions
from keepstep.elastic.rendezvous.rank_assignment import newest_committed
from keepstep.elastic.rendezvous.records import Generation, Result
from keepstep.elastic.rendezvous.view import View

log = logging.getLogger("keepstep")


def log_action(action: actions.Action, view: View) -> None:
    """Log an action of the leader, which was decided on a view."""
    match action:
        case actions.Open(generation):
            log.info(
                "generation %d: %s on %s (%s)",
                generation.generation,
                _counted(generation.world_size, "rank"),
                _counted(len(generation.members), "node"),
                generation.reason,
            )
            _log_what_is_lost(generation, view)
        case actions.Close(closing):
            log.warning("generation %d ends: %s", closing.generation, closing.reason)
        case actions.Evict(node, eviction):
            log.error("node %s is evicted: %s", node, eviction.reason)
        case actions.Publish(request=request):
            log.info("step %d is stored in %s", request.commit.snapshot.step, request.url)
        case actions.CancelPersist(reason=reason):
            log.error("checkpoint not stored: %s", reason)
        case actions.Finish(Result(succeeded=True)) if _reports_steps(view):
            _log_end("the job is done", view)
        case _:
            pass


def _log_what_is_lost(generation: Generation, view: View) -> None:
    """Log that a generation cannot resume from the committed snapshot."""
    last = view.generation
    committed = newest_committed(view, last) if last is not None else None
    if generation.resume is None and committed is not None and committed.snapshot.step > 0:
        log.warning(
            "no longer is all of step %d in memory: generation %d goes on from the newest stored "
            "checkpoint, or without one begins again",
            committed.snapshot.step,
            generation.generation,
        )


def log_departure(view: View) -> None:
    """Log, as a node leaves before the job has ended, how far the job is."""
    if _reports_steps(view):
        _log_end("left", view)


def _log_end(event: str, view: View) -> None:
    stored = view.checkpoint
    log.info(
        "%s after step %d; %s",
        event,
        max(joined.record.step for joined in view.nodes.values()),
        f"step {stored.step} is stored in {stored.url}" if stored else "nothing is stored",
    )


def _reports_steps(view: View) -> bool:
    """Whether the script has joined the job, and so has steps."""
    return any(joined.record.step for joined in view.nodes.values())


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"
