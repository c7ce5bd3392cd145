"""The monitor's verdicts at the coordinator, and what its policy asks of the agents.

Verdicts that hold are one key of the job, which everyone sees (`keepstep status`). A worker's restart is a request key that its agent carries
out and takes away; a node's replacement is an eviction as `keepstep evict` writes it, with the verdict as the reason.

The first half is pure. `CoordinatorVerdicts` is the shell: every write is made only if the generation that the verdicts speak of is
still the current one, in the same transaction; and whoever reads compares once more (`View.current_verdicts`, `View.restarts_on`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from keepstep.elastic.rendezvous.records import (
    Eviction,
    PublishedVerdict,
    PublishedVerdicts,
    RestartRequest,
)
from keepstep.elastic.rendezvous.view import Keys, View, from_listing
from keepstep.elastic.store.blocking import BlockingStore
from keepstep.elastic.store.contract import Delete, Modified, Put
from keepstep.monitor.diagnosis.policy import ActionKind, EnforcementAction
from keepstep.monitor.verdicts import Verdict

_MAX_VERDICTS = 16
"""The costliest verdicts: where more hold, they have one cause, and the coordinator is no place for thousands."""
_MAX_EVIDENCE_LINES = 6
_MAX_CHARACTERS = 300
_MAX_RANKS = 64
_REPUBLISH_S = 5.0
"""Evidence of a verdict that stands grows older each second; it is written again this often."""


def published_verdicts(
    verdicts: Sequence[Verdict], generation: int, now_s: float, wall_s: float
) -> PublishedVerdicts:
    """Return verdicts as the coordinator keeps them, the costliest first, in bounded size.

    Args:
        verdicts: all that hold.
        generation: that they speak of.
        now_s: the job's clock, to which the verdicts' times belong.
        wall_s: the wall clock at the same instant.
    """
    worst_first = sorted(
        verdicts, key=lambda one: (-one.cost_s_per_step, -one.confidence, str(one.subject))
    )
    return PublishedVerdicts(
        generation,
        wall_s,
        tuple(
            PublishedVerdict(
                _truncate(str(one.subject)),
                one.subject.ranks[:_MAX_RANKS],
                one.subject.node,
                str(one.syndrome),
                wall_s - max(0.0, now_s - one.since_s),
                tuple(map(_truncate, one.evidence[:_MAX_EVIDENCE_LINES])),
                one.confidence,
                one.cost_s_per_step if math.isfinite(one.cost_s_per_step) else None,
                str(one.advice),
            )
            for one in worst_first[:_MAX_VERDICTS]
        ),
        max(0, len(verdicts) - _MAX_VERDICTS),
    )


def needs_publishing(before: PublishedVerdicts | None, now: PublishedVerdicts) -> bool:
    """Whether what holds now is worth a write: others than before, or enough later that the evidence has changed."""
    if before is None:
        return True  # What an earlier monitor wrote may stand there.
    if before.generation != now.generation:
        return bool(now.verdicts)  # A generation begins without any.
    if [(one.subject, one.syndrome) for one in before.verdicts] != [
        (o.subject, o.syndrome) for o in now.verdicts
    ]:
        return True
    return bool(now.verdicts) and now.at_s - before.at_s >= _REPUBLISH_S


def requests(keys: Keys, view: View, action: EnforcementAction) -> tuple[Put, ...]:
    """Return what to write for the job's agents to carry out an action; nothing for a rank or a node that the job does not have.

    Who hangs cannot hand anything over: on a node that is replaced for a standstill the ranks are restarted, too, which ends
    the generation at once instead of after the time that a healthy node gets.
    """
    generation = view.generation
    if generation is None:
        return ()
    verdict = action.verdict
    reason = _truncate(f"{verdict.syndrome}: {'; '.join(verdict.evidence)}")
    ranks = set(action.ranks)
    if action.kind is ActionKind.REPLACE_NODE and math.isinf(verdict.cost_s_per_step):
        ranks = set(verdict.subject.ranks)
    restarts = tuple(
        Put(keys.restart(rank), RestartRequest(view.generation_number, rank, reason).encode())
        for member in generation.members
        for rank in member.ranks
        if rank in ranks
    )
    evictions = tuple(
        Put(keys.eviction(node), Eviction(reason, may_return=True).encode())
        for node in action.nodes
        if node in view.nodes and node not in view.evictions
    )
    return (*evictions, *restarts)


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}..."


class CoordinatorVerdicts:
    """The monitor's `VerdictPublisher` and `Enforcer` over a coordinator. For one thread at a time."""

    def __init__(self, url: str, job: str) -> None:
        self._keys = Keys(job)
        self._store = BlockingStore(url)
        self._last: PublishedVerdicts | None = None

    def publish(self, verdicts: Sequence[Verdict], generation: int, now_s: float) -> None:
        """Write what holds, if that is news and its generation is the current one."""
        told = published_verdicts(verdicts, generation, now_s, time.time())
        if not needs_publishing(self._last, told):
            return
        view = self._view()
        if view.generation_number != generation:
            return
        key = self._keys.single("verdicts")
        done = self._store.commit(
            (self._is_current(view),), (Put(key, told.encode()) if told.verdicts else Delete(key),)
        )
        if done.succeeded:
            self._last = told

    def enforce(self, action: EnforcementAction, generation: int) -> bool:
        """Ask the agents to carry out an action; False if the job is going on to another generation, or has no such rank or node."""
        view = self._view()
        operations = requests(self._keys, view, action)
        if (
            view.generation_number != generation
            or view.is_closing
            or view.result is not None
            or not operations
        ):
            return False
        return self._store.commit((self._is_current(view),), operations).succeeded

    def close(self) -> None:
        """End the connection."""
        self._store.close()

    def _view(self) -> View:
        return from_listing(self._keys, self._store.read(self._keys.prefix))

    def _is_current(self, view: View) -> Modified:
        return Modified(self._keys.single("generation"), view.generation_revision)
