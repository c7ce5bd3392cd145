"""Collects steps of all ranks from a daemon's answers, and says which of them are missing. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from keepstep.monitor.cli.options import StepRange
from keepstep.monitor.records import Communicator, Ending, Kind, is_open, joined
from keepstep.monitor.telemetry.clocks import ClockOffset
from keepstep.monitor.telemetry.record_history import RankState
from keepstep.monitor.tree.step_records import HeldSteps, held_steps
from keepstep.monitor.tree.summary import NodeFacts, Summary
from keepstep.monitor.views.chrome_trace import TracedRank


class StepRecording:
    """The records of some steps, from one or more answers; the steps that they lack.

    Args:
        steps: those to record.
    """

    def __init__(self, steps: StepRange) -> None:
        self.steps = steps
        self.complete = steps.first - 1
        """All ranks have ended this step, and its records are collected."""
        self.is_over = False
        """Whether no process of the job is left."""
        self.newest = 0
        """The newest step that some rank has begun."""
        self.held_from = 0
        """All rings hold everything from this step on."""
        self.communicators: dict[int, Communicator] = {}
        self.nodes: dict[str, NodeFacts] = {}
        self.missing: Mapping[str, str] = {}
        """The daemons that do not answer, with the reason."""
        self.lost: dict[int, StepRange] = {}
        """By rank, the steps that its ring did not hold any more when they were asked for."""
        self._parts: dict[tuple[int, str], tuple[RankState, list[np.ndarray]]] = {}

    def add(self, answer: Summary) -> None:
        """Add what a daemon answered about the steps after `complete`, of one rank or more."""
        held = {state.rank: held_steps(records) for state, records in answer.ranks}
        for state, records in answer.ranks:
            self._note_loss(state.rank, held[state.rank])
            is_inside = (records["step"] >= self.steps.first) & (records["step"] <= self.steps.last)
            _, parts = self._parts.get((state.rank, state.incarnation), (state, []))
            self._parts[state.rank, state.incarnation] = state, [*parts, records[is_inside]]
        self.communicators |= {group.identity: group for group in answer.communicators}
        self.nodes |= {facts.node: facts for facts in answer.nodes}
        self.missing = answer.missing
        self.held_from = max(each.first for each in held.values())
        self.newest = max(each.newest for each in held.values())
        living = [
            held[state.rank].newest
            for state, _ in answer.ranks
            if state.is_alive and state.ending is Ending.NONE
        ]
        self.is_over = not living
        # A rank that lives is in its newest step; one that does not has no more of it.
        ended = min(living) - 1 if living else min(each.newest for each in held.values())
        self.complete = max(self.complete, min(ended, self.steps.last))

    @property
    def has_open_records(self) -> bool:
        """Whether something of these steps has not ended."""
        return any(is_open(traced.records).any() for traced in self.traced({}))

    def traced(self, to_unix_s: Mapping[str, float]) -> list[TracedRank]:
        """Return each writer's records, given Unix time minus the clock of each node."""
        return [
            TracedRank(state, _newest_of_each(joined(parts)), to_unix_s.get(state.node, 0.0))
            for _, (state, parts) in sorted(self._parts.items())
            if any(len(part) for part in parts)
        ]

    def _note_loss(self, rank: int, held: HeldSteps) -> None:
        last = min(held.first - 1, self.steps.last)
        if last > self.complete:
            before = self.lost.get(rank)
            first = self.complete + 1 if before is None else before.first
            self.lost[rank] = StepRange(first, last)


def lost_text(lost: Mapping[int, StepRange]) -> list[str]:
    """Return which steps of which ranks are not held any more, a sentence for each range."""
    ranks_of: dict[StepRange, list[int]] = {}
    for rank, steps in sorted(lost.items()):
        ranks_of.setdefault(steps, []).append(rank)
    return [
        f"{steps} of {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        for steps, ranks in ranks_of.items()
    ]


def unix_offsets(
    nodes: Mapping[str, NodeFacts], clocks: Mapping[str, ClockOffset]
) -> tuple[dict[str, float], frozenset[str]]:
    """Return Unix time minus each node's clock, and the nodes whose clocks are not aligned.

    Aligned nodes share the Unix time of the one whose offset is known best; others have their own.
    """
    unknown = ClockOffset(0.0, math.inf)
    own_s = {node: facts.wall_s - facts.monotonic_s for node, facts in nodes.items()}
    offsets = {node: clocks.get(node, unknown) for node in nodes}
    aligned = {node for node, clock in offsets.items() if math.isfinite(clock.error_s)}
    if aligned:
        best = min(aligned, key=lambda node: (offsets[node].error_s, node))
        job_to_unix_s = own_s[best] - offsets[best].offset_s
        own_s |= {node: job_to_unix_s + offsets[node].offset_s for node in aligned}
    return own_s, frozenset(nodes) - aligned


def _newest_of_each(records: np.ndarray) -> np.ndarray:
    """Return each record as it was read last."""
    keys = records["stamp"] * 2 + (records["kind"] == Kind.OPERATION)
    _, from_end = np.unique(keys[::-1], return_index=True)
    return records[len(records) - 1 - from_end]
