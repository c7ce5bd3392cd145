"""Publishes the monitor's verdicts at the coordinator, and requests actions from the agents.

Current verdicts are one key of the job; `keepstep status` shows them. The restart of a worker is a
request key, which its agent carries out and deletes. The replacement of a node is an eviction as
`keepstep evict` writes it, with the verdict as the reason.

The functions are pure; `CoordinatorVerdicts` reads and writes. A transaction makes every write
conditional on the verdicts' generation being the current one, and readers check the generation
again (`View.current_verdicts`, `View.restarts_on`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from keepstep.elastic.rendezvous.evictions import can_do_without
from keepstep.elastic.rendezvous.loss_forecast import limits_of
from keepstep.elastic.rendezvous.records import (
    Eviction,
    PublishedVerdict,
    PublishedVerdicts,
    RestartRequest,
)
from keepstep.elastic.rendezvous.view import Keys, View, from_listing
from keepstep.elastic.store.address import Address
from keepstep.elastic.store.blocking import BlockingStore
from keepstep.elastic.store.contract import Delete, Modified, Put
from keepstep.monitor.diagnosis.policy import ActionKind, EnforcementAction
from keepstep.monitor.verdicts import Verdict

_MAX_VERDICTS = 16
"""Only the costliest are published: further ones share a cause, and a coordinator key must stay
small."""
_MAX_EVIDENCE_LINES = 6
_MAX_CHARACTERS = 300
_MAX_RANKS = 64
_REPUBLISH_S = 5.0
"""Interval at which the evidence of unchanged verdicts is written again."""


def published_verdicts(
    verdicts: Sequence[Verdict], generation: int, now_s: float, wall_s: float
) -> PublishedVerdicts:
    """Return verdicts as the coordinator stores them: the costliest first, in bounded size.

    Args:
        verdicts: all verdicts that hold.
        generation: the generation that they are about.
        now_s: the job's clock, which the verdicts' times are in.
        wall_s: the wall clock at the same instant.
    """
    costliest_first = sorted(
        verdicts,
        key=lambda verdict: (-verdict.cost_s_per_step, -verdict.confidence, str(verdict.subject)),
    )
    return PublishedVerdicts(
        generation=generation,
        at_s=wall_s,
        verdicts=tuple(
            PublishedVerdict(
                subject=_truncate(str(verdict.subject)),
                ranks=verdict.subject.ranks[:_MAX_RANKS],
                node=verdict.subject.node,
                syndrome=str(verdict.syndrome),
                since_s=wall_s - max(0.0, now_s - verdict.since_s),
                evidence=tuple(map(_truncate, verdict.evidence[:_MAX_EVIDENCE_LINES])),
                confidence=verdict.confidence,
                cost_s_per_step=_finite(verdict.cost_s_per_step),
                advice=_truncate(verdict.instruction),
            )
            for verdict in costliest_first[:_MAX_VERDICTS]
        ),
        omitted=max(0, len(verdicts) - _MAX_VERDICTS),
    )


def needs_publishing(last: PublishedVerdicts | None, current: PublishedVerdicts) -> bool:
    """Whether to write the current verdicts: they differ from the last ones, or these are old."""
    if last is None:
        return True  # The key may hold the verdicts of an earlier monitor.
    if last.generation != current.generation:
        return bool(current.verdicts)  # A generation begins without verdicts.
    if _identities(last) != _identities(current):
        return True
    return bool(current.verdicts) and current.at_s - last.at_s >= _REPUBLISH_S


def enforceable_kind(view: View, action: EnforcementAction) -> ActionKind:
    """Return the kind of action that the job allows: a restart, where no node can be replaced.

    No node is replaced that the job cannot do without: it would stand still or end.
    """
    if action.kind is ActionKind.REPLACE_NODE and not _replaceable_nodes(view, action):
        return ActionKind.RESTART_WORKER
    return action.kind


def enforcement_operations(keys: Keys, view: View, action: EnforcementAction) -> tuple[Put, ...]:
    """Return the writes that make the job's agents carry out what `enforceable_kind` returns.

    There are none for a rank or node that the job does not have. A rank that hangs cannot hand over
    its state: if a node is replaced because of a hang, its ranks are restarted too, which ends the
    generation at once, without the time that a healthy node gets to leave.
    """
    generation = view.generation
    if generation is None:
        return ()
    verdict = action.verdict
    reason = _truncate(f"{verdict.syndrome}: {'; '.join(verdict.evidence)}")
    nodes = _replaceable_nodes(view, action)
    ranks = set(action.ranks if nodes else (*action.ranks, *action.fallback_ranks))
    is_standstill = math.isinf(verdict.cost_s_per_step)
    if nodes and is_standstill:
        ranks = set(verdict.subject.ranks)
    restarts = tuple(
        Put(
            keys.restart(rank),
            RestartRequest(view.generation_number, rank, reason, is_standstill).encode(),
        )
        for member in generation.members
        for rank in member.ranks
        if rank in ranks
    )
    evictions = tuple(
        Put(keys.eviction(node), Eviction(reason, may_return=True).encode())
        for node in nodes
        if node not in view.evictions
    )
    return (*evictions, *restarts)


def _replaceable_nodes(view: View, action: EnforcementAction) -> tuple[str, ...]:
    """Return the nodes to replace that are evicted already, or can be."""
    limits = limits_of(view)
    return tuple(
        node
        for node in action.nodes
        if node in view.nodes
        and (node in view.evictions or limits is None or can_do_without(limits, view, node))
    )


def _finite(cost_s: float) -> float | None:
    return cost_s if math.isfinite(cost_s) else None


def _identities(published: PublishedVerdicts) -> list[tuple[str, str]]:
    return [(verdict.subject, verdict.syndrome) for verdict in published.verdicts]


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}..."


class CoordinatorVerdicts:
    """Implements the monitor's `VerdictPublisher` and `Enforcer` over a coordinator.

    It may be used by one thread at a time. `close` ends its connection.
    """

    def __init__(self, address: Address, job: str) -> None:
        self._keys = Keys(job)
        self._store = BlockingStore(address)
        self._last: PublishedVerdicts | None = None

    def publish(self, verdicts: Sequence[Verdict], generation: int, now_s: float) -> bool:
        """Publish the verdicts that hold, if they changed and their generation is current.

        Returns whether nothing of them remains to be published; new evidence of unchanged verdicts
        may have to wait for the interval.
        """
        current = published_verdicts(verdicts, generation, now_s, time.time())
        if not needs_publishing(self._last, current):
            return not current.verdicts
        view = self._view()
        if view.generation_number != generation:
            return False
        key = self._keys.single("verdicts")
        operation = Put(key, current.encode()) if current.verdicts else Delete(key)
        if not self._store.commit((self._is_current(view),), (operation,)).succeeded:
            return False
        self._last = current
        return True

    def enforce(self, action: EnforcementAction, generation: int) -> ActionKind | None:
        """Request an action from the agents; return what was requested, see `Enforcer`.

        Nothing is if the action's generation has ended or is closing, or if the job has no such
        rank or node.
        """
        view = self._view()
        is_open = view.generation_number == generation and not view.is_closing
        operations = enforcement_operations(self._keys, view, action)
        if not is_open or view.result is not None or not operations:
            return None
        if not self._store.commit((self._is_current(view),), operations).succeeded:
            return None
        return enforceable_kind(view, action)

    def close(self) -> None:
        """End the connection."""
        self._store.close()

    def _view(self) -> View:
        return from_listing(self._keys, self._store.read(self._keys.prefix))

    def _is_current(self, view: View) -> Modified:
        return Modified(self._keys.single("generation"), view.generation_revision)
