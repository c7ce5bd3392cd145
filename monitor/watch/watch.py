"""The mind of a monitor daemon: what it has heard, what it makes of it, and what it tells. No socket, no task; one thread
owns it.

A watch hears rings of its own node, summaries of daemons below, or both. One that diagnoses folds verdicts into its log; one
that relays only passes on. What it must not lose when the daemon restarts is the log; everything else is in the rings and
with the daemons below.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from keepstep.monitor.contracts import Diagnosis, JobReader, Probe, RingReading
from keepstep.monitor.diagnosis.digest import EMPTY_DIGEST_STATE, DigestState, digest
from keepstep.monitor.diagnosis.metrics import NodeMetrics
from keepstep.monitor.diagnosis.tables import EMPTY, Digest
from keepstep.monitor.errors import MonitorError
from keepstep.monitor.node.node_series import metrics_from_json, metrics_to_json
from keepstep.monitor.records import JobRecords, Kind, Phase, RankRecords
from keepstep.monitor.telemetry.record_history import (
    RankHistory,
    RankState,
    RecordHistory,
    is_stale,
    newest_of,
)
from keepstep.monitor.tree.child_registry import ChildRegistry
from keepstep.monitor.tree.digest_relay import Inbox, Outbox, without
from keepstep.monitor.tree.node_clocks import NodeClock, NodeClocks
from keepstep.monitor.tree.summary import NodeFacts, Summary, summarize
from keepstep.monitor.verdicts import Verdict
from keepstep.monitor.watch.matrices import DelayMatrices, delays
from keepstep.monitor.watch.step_times import (
    HeatMap,
    StepTable,
    TimelineSpan,
    heat_map,
    newest_step,
    stand_still_in,
    timeline,
    typical_step_s,
)
from keepstep.monitor.watch.verdict_log import VerdictChanges, VerdictLog, advance

_LOG = logging.getLogger("keepstep.monitor")
_Result = TypeVar("_Result")
_FAULT = "the monitor's %s failed (%d times so far); monitoring goes on without it"


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """What a watch keeps and tells at most.

    Args:
        records: newest records kept of each rank, 64 bytes each.
        steps: newest steps whose times are kept of each rank, about 50 bytes each.
        forget_s: seconds after which what a silent daemon below told is forgotten.
        aligned_nodes: clocks of more nodes are not aligned: that takes the square of their number.
    """

    records: int = 4096
    steps: int = 1024
    forget_s: float = 60.0
    aligned_nodes: int = 512


@dataclass(frozen=True, slots=True)
class DiagnosisRound:
    """What one diagnosis brought.

    Args:
        verdicts: all that hold.
        now_s: the job's clock.
        changes: in the log.
        generation: the job's newest that any living rank has told of; of the dead, if there is none.
        nodes: each rank's node, of the ranks of that generation.
        step_s: the job's step time; 0.0 if not known.
    """

    verdicts: tuple[Verdict, ...]
    now_s: float
    changes: VerdictChanges
    generation: int = 0
    nodes: Mapping[int, str] = field(default_factory=dict)
    step_s: float = 0.0

    @property
    def current(self) -> tuple[Verdict, ...]:
        """The verdicts that speak of ranks of the newest generation only.

        While a generation begins, some ranks have told of it and others not yet: whoever lags behind is on its way, not sick.
        """
        return tuple(one for one in self.verdicts if self.nodes.keys() >= set(one.subject.ranks))


class Watch:
    """See the module."""

    def __init__(
        self,
        node: str,
        reader: JobReader | None,
        probe: Probe,
        diagnosis: Diagnosis | None,
        limits: WatchLimits | None = None,
        log: VerdictLog | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        self.incarnation = f"{node}-{time.time_ns()}"
        self.log = log or VerdictLog()
        self.faults: dict[str, int] = {}
        self.tables: dict[int, StepTable] = {}
        self.nodes: dict[str, NodeFacts] = {}
        self.child_registry = ChildRegistry()
        self._limits = limits or WatchLimits()
        self._reader = reader
        self._probe = probe
        self._diagnosis = diagnosis
        self._clocks = NodeClocks(node)
        self._history = RecordHistory(self._limits.records)
        self._received_at_s: dict[int, float] = {}
        self._local: tuple[int, ...] = ()
        self._told: list[Digest] = []
        self._digested = 0
        self._past: Any = None
        self._memory: DigestState = EMPTY_DIGEST_STATE
        self._incarnations: dict[int, str] = {}
        self._inbox, self._outbox = Inbox(), Outbox()
        self._processes: frozenset[tuple[int, str]] = frozenset()
        self._measured: NodeMetrics | None = None
        self._measured_json: dict[str, Any] = {}
        self._now_s = now_s

    def read(self) -> None:
        """Read the rings and the node's measures: one heartbeat, which carries how far every rank has come."""
        self._history.begin()
        if self._reader is not None:
            reader = self._reader
            nothing: tuple[RingReading, ...] = ()
            readings = self.guarded("reader", lambda: tuple(reader.read()), nothing)
            states = [self._state(reading) for reading in readings]
            newest = self._newest(states)
            told = [
                pair for pair in zip(states, readings, strict=True) if not is_stale(pair[0], newest)
            ]
            for state, reading in told:
                self._merge_rank(state, reading.records.records)
                self._history.learn(reading.communicators)
            self._local = tuple(state.rank for state, _ in told)
        workers = {rank: self._history.ranks[rank].state.pid for rank in self._local}
        unknown: NodeMetrics | None = None
        metrics = self.guarded("probes", lambda: self._probe.sample(workers), unknown)
        if metrics is not self._measured:
            # Probes measure less often than rings are read.
            self._measured, self._measured_json = (
                metrics,
                metrics_to_json(metrics) if metrics else {},
            )
        self.nodes[self.node] = NodeFacts(
            self.node,
            self._measured_json,
            time.time(),
            self._now_s(),
            time.process_time(),
        )
        self._forget()

    def nodes_of_ranks(self) -> frozenset[str]:
        """Return the nodes that run ranks."""
        return frozenset(kept.state.node for kept in self._history.ranks.values())

    def to_align(self) -> tuple[JobRecords, str] | None:
        """Return from what clocks can be measured, and by whose; None where there is nothing to align. The arrays are not to be written to."""
        # Groups of two generations may have the same name and ranks, and number their operations from one.
        newest = max((kept.state.generation for kept in self._history.ranks.values()), default=0)
        node_of = {
            rank: kept.state.node
            for rank, kept in self._history.ranks.items()
            if kept.state.generation == newest
        }
        nodes = set(node_of.values())
        if not 1 < len(nodes) <= self._limits.aligned_nodes:
            return None
        job = self._history.job()
        ranks = {rank: job.ranks[rank] for rank in node_of}
        return JobRecords(ranks, job.communicators), self.node if self.node in nodes else min(nodes)

    def resolve_clocks(
        self, reference: str, measured: Mapping[str, NodeClock]
    ) -> Mapping[str, NodeClock]:
        """Return each node's clock, given what could be measured; nothing if there are no other nodes.

        Digests are made where the rings are, so the nodes have to be told.
        """
        return self._clocks.resolve(reference, measured, self._now_s())

    def set_clocks(self, clocks: Mapping[str, NodeClock]) -> None:
        """Take from now on the nodes' clocks to be so far off the job's."""
        self._clocks.update(clocks, self._now_s())

    def digest(self) -> None:
        """Bring together what this node's ranks and the daemons below told since the last time, for diagnosis here or above.

        Less often than reading: it costs more, and verdicts are a matter of seconds.
        """
        # A number of its own: the daemon above may have asked since the last reading, and then has that one's number already.
        number = self._history.begin()
        nothing: Digest | None = None
        own = self.guarded("digest", self._digest, nothing) if self._local else nothing
        for one in self._inbox.rounds(own, self._history.communicators):
            if self._diagnosis is not None:
                self._told.append(one)
            self._outbox.add(number, one)

    def receive(self, url: str, summary: Summary) -> None:
        """Take in what the daemon at `url` told."""
        self._history.begin()
        newest = self._newest([state for state, _ in summary.ranks])
        twice = {state.rank for state, _ in summary.ranks if self._is_superseded(state)}
        left = {state.rank for state, _ in summary.ranks if is_stale(state, newest)}
        unwanted = twice | left
        for state, records in summary.ranks:
            if state.rank not in unwanted:
                self._merge_rank(state, records)
        self._history.learn(summary.communicators)
        self.nodes.update({facts.node: facts for facts in summary.nodes})
        if not self.child_registry.record_answer(
            url, summary, [rank for rank in summary.present if rank not in unwanted], self._now_s()
        ):
            self._inbox.drop(url)
        self._inbox.add(url, (without(one, unwanted) for one in summary.digests))
        if both := (twice - left).intersection(self._local):
            named = ", ".join(map(str, sorted(both)))
            reason = f"tells of ranks that are read here too ({named}); start one of the two with --gather-only"
            self.child_registry.record_failure(url, reason)
        self._forget()

    def record_failure(self, url: str, reason: str) -> None:
        """Note that the daemon at `url` did not answer."""
        self.child_registry.record_failure(url, reason)
        self._forget()

    def release(self, urls: Sequence[str]) -> None:
        """Forget the daemons that are not among `urls`: they are no longer below this one."""
        for url in self.child_registry.release(urls):
            self._inbox.drop(url)
        self._forget()

    def diagnose(self) -> DiagnosisRound | None:
        """Draw conclusions from what was heard; None if this watch only relays, or diagnosis failed."""
        if self._diagnosis is None:
            return None
        diagnosis = self._diagnosis
        states = [kept.state for kept in self._history.ranks.values()]
        processes = frozenset((state.rank, state.incarnation) for state in states)
        if processes != self._processes:
            self._processes, self._past = processes, None
        nodes = {state.rank: state.node for state in states}
        metrics = {
            name: metrics_from_json(facts.metrics)
            for name, facts in self.nodes.items()
            if facts.metrics
        }
        now_s = self._now_s()
        # With nothing new time still passes, and with it the patience with those who are silent.
        told, self._told = self._told or [EMPTY], []
        verdicts: Sequence[Verdict] | None = None
        for one in told:
            concluded = self.guarded(
                "diagnosis",
                partial(
                    diagnosis, one, self._history.communicators, nodes, metrics, self._past, now_s
                ),
                None,
            )
            if concluded is not None:
                self._past, verdicts = concluded
        if verdicts is None:
            return None
        self.log, changes = advance(self.log, verdicts, now_s, time.time())
        # An earlier run that was killed leaves rings behind, and may have come further.
        living = [state.generation for state in states if state.is_alive]
        generation = max(living or (state.generation for state in states), default=0)
        current = {state.rank: state.node for state in states if state.generation == generation}
        return DiagnosisRound(
            tuple(verdicts), now_s, changes, generation, current, self.typical_step_s() or 0.0
        )

    def summary(self, incarnation: str, since: int, budget: int) -> Summary:
        """Return what is new since `since`, or everything if that was said by another incarnation."""
        asked = since if incarnation == self.incarnation else 0
        return summarize(
            self._history,
            self._outbox,
            self.nodes,
            self.child_registry.missing,
            self.incarnation,
            asked,
            budget,
        )

    def job(self) -> JobRecords:
        """Return all records, with clocks aligned as they were measured last."""
        job = self._history.job()
        now_s = self._now_s()
        clocks = {
            node: self._clocks.of(node, now_s) for node in {one.node for one in job.ranks.values()}
        }
        ranks = {
            rank: replace(
                one, offset_s=clocks[one.node].offset_s, offset_error_s=clocks[one.node].error_s
            )
            for rank, one in job.ranks.items()
        }
        return JobRecords(ranks, job.communicators)

    def ranks(self) -> list[RankHistory]:
        """Return every rank's history, by rank."""
        return [self._history.ranks[rank] for rank in sorted(self._history.ranks)]

    @property
    def diagnoses(self) -> bool:
        """Whether this watch draws conclusions, rather than only passing on."""
        return self._diagnosis is not None

    def group_name(self, identity: int) -> str:
        """Return the name of a process group, or its identity where no ring told the name."""
        group = self._history.communicators.get(identity)
        return group.name if group else f"{identity:08x}"

    def locate_rank(self, rank: int) -> tuple[int | None, str | None]:
        """Return the process that is this rank, if it is on this node, else the URL of the daemon below that knows it."""
        if rank in self._local:
            return self._history.ranks[rank].state.pid, None
        return None, self.child_registry.url_of_rank(rank)

    def record_stacks(self, number: int, rank: int, stacks: Mapping[str, Any]) -> None:
        """Keep the stacks of a suspect with the verdict."""
        self.log = self.log.with_stacks(number, rank, dict(stacks))

    def silence_s(self, rank: int) -> float:
        """Return how long ago a new reading of a rank's ring was heard of."""
        return self._now_s() - self._received_at_s[rank]

    def heat(self, columns: int, rows: int, phase: Phase) -> HeatMap:
        """Return times of steps or of one part of them, ranks by steps."""
        return heat_map(self.tables, columns, rows, phase)

    def typical_step_s(self) -> float | None:
        """Return the median of the newest steps' seconds."""
        return typical_step_s(self.tables)

    def delays(self, rows: int) -> DelayMatrices:
        """Return who waits for whom."""
        return delays(self.job().ranks, rows)

    def timeline(
        self, step: int | None, ranks: Sequence[int], limit: int
    ) -> tuple[int, float, dict[int, tuple[TimelineSpan, ...]]]:
        """Return what the given ranks did in a step (None: that of `newest_step`), and up to when that is told, by the job's clock."""
        job = self.job()
        chosen = step if step is not None else newest_step(job.ranks) or 0
        told = {rank: job.ranks[rank] for rank in ranks if rank in job.ranks}
        until_s = max((one.read_at_s + one.offset_s for one in told.values()), default=0.0)
        to_the_end = stand_still_in(job.ranks, chosen)
        return (
            chosen,
            until_s,
            timeline(told, job.communicators, chosen, limit, to_the_end=to_the_end),
        )

    def close(self) -> None:
        """Let go of the rings and of the probe."""
        for part in (self._reader, self._probe):
            if part is not None:
                self.guarded("end", part.close, None)

    def guarded(self, part: str, call: Callable[[], _Result], otherwise: _Result) -> _Result:
        """Return what a part returns; if it raises, log and count that, and return `otherwise`: the rest goes on."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - a part that fails must not take the others along; it is logged and counted
            self.fault(part, error)
            return otherwise

    def fault(self, part: str, error: Exception) -> None:
        """Count a failure, and log it at every power of two, for what fails may fail twice a second."""
        count = self.faults[part] = self.faults.get(part, 0) + 1
        if count & (count - 1) == 0:
            # What our own errors and the operating system's say is enough; of others one wants to know where.
            is_plain = isinstance(error, MonitorError | OSError)
            _LOG.error(_FAULT + ": %s", part, count, error, exc_info=None if is_plain else error)

    def _merge_rank(self, state: RankState, records: np.ndarray) -> None:
        if state.node != self.node:
            self._clocks.record_delay(state.node, self._now_s() - state.read_at_s)
        known = self._history.ranks.get(state.rank)
        if known is None or known.state.read_at_s != state.read_at_s:
            self._received_at_s[state.rank] = self._now_s()
        changed = self._history.merge(state, records)
        if known is not None and known is not self._history.ranks[state.rank]:
            # Its steps begin anew, often with a new generation of the job. Digests of the old ones would be taken for it.
            self._drop_digests()
        if known is not self._history.ranks[state.rank] or state.rank not in self.tables:
            self.tables[state.rank] = StepTable(self._limits.steps)
        self.tables[state.rank].feed(changed)

    def _state(self, reading: RingReading) -> RankState:
        told = reading.records
        return RankState(
            told.rank,
            self.node,
            reading.pid,
            reading.incarnation,
            told.is_alive,
            told.ending,
            told.read_at_s,
            0.0,
            reading.generation,
            reading.world_size,
            time.time() - self._now_s() + reading.created_s,
        )

    def _newest(self, told: Iterable[RankState]) -> RankState | None:
        return newest_of(chain((kept.state for kept in self._history.ranks.values()), told))

    def _drop_digests(self) -> None:
        self._told.clear()
        self._inbox.clear()
        self._outbox.clear()

    def _is_superseded(self, state: RankState) -> bool:
        """Return whether a rank is read on this node itself, or what is told of it is of a dead process and another node has a living one.

        A rank that moved to another node with a new generation leaves its old ring where it was.
        """
        if state.rank in self._local:
            return True
        known = self._history.ranks.get(state.rank)
        return (
            known is not None
            and known.state.node != state.node
            and known.state.is_alive
            and not state.is_alive
        )

    def _digest(self) -> Digest:
        """Return what this node's ranks told since the last digest."""
        local = [self._history.ranks[rank] for rank in self._local]
        incarnations = {kept.state.rank: kept.state.incarnation for kept in local}
        if any(self._incarnations.get(rank, told) != told for rank, told in incarnations.items()):
            self._memory = EMPTY_DIGEST_STATE  # Positions have begun anew.
        self._incarnations = incarnations
        clock = self._clocks.of(self.node, self._now_s())
        ranks = [
            RankRecords(
                kept.state.rank,
                self.node,
                kept.since_and_open(self._digested),
                kept.state.read_at_s,
                kept.state.is_alive,
                kept.state.ending,
                clock.offset_s,
                clock.error_s,
            )
            for kept in local
        ]
        self._digested = self._history.number
        self._memory, digested = digest(ranks, self._history.communicators, self._memory)
        return digested

    def _forget(self) -> None:
        """Forget ranks and nodes that nobody tells of any more, and ranks that a newer launch has left over."""
        ranks, nodes = self.child_registry.active_since(self._now_s() - self._limits.forget_s)
        ranks.update(self._local)
        nodes.add(self.node)
        newest = self._newest(())
        gone = {
            rank
            for rank, kept in self._history.ranks.items()
            if rank not in ranks or is_stale(kept.state, newest)
        }
        if gone:
            self._history.keep_only(self._history.ranks.keys() - gone)
            self._local = tuple(rank for rank in self._local if rank not in gone)
            for rank in gone:
                self.tables.pop(rank, None)
                self._received_at_s.pop(rank, None)
            # What they told before would be taken for news of ranks that are there.
            self._drop_digests()
        for name in set(self.nodes) - nodes:
            del self.nodes[name]
        self._clocks.keep_only(self.nodes_of_ranks())


def activity(kept: RankHistory) -> dict[str, Any]:
    """Return what a rank is doing now, as JSON: heartbeat, step, open phase and operation with their ages in seconds."""
    state, records = kept.state, kept.records
    open_ones = records[records["ended_s"] == 0]
    phases = open_ones[(open_ones["kind"] == Kind.PHASE) & (open_ones["code"] != Phase.STEP)]
    operations = open_ones[open_ones["kind"] == Kind.OPERATION]
    told: dict[str, Any] = {
        "rank": state.rank,
        "node": state.node,
        "pid": state.pid,
        "is_alive": state.is_alive,
        "ending": state.ending.name.lower(),
        "step": int(records["step"].max()) if len(records) else 0,
        "silent_s": max(0.0, state.read_at_s - state.progress_at_s),
        "phase": None,
        "operation": None,
    }
    if len(phases):
        told["phase"] = {
            "code": int(phases[-1]["code"]),
            "age_s": state.read_at_s - float(phases[-1]["enqueued_s"]),
        }
    if len(operations):
        oldest = operations[0]
        told["operation"] = {
            "code": int(oldest["code"]),
            "communicator": int(oldest["communicator"]),
            "number": int(oldest["number"]),
            "age_s": state.read_at_s - float(oldest["enqueued_s"]),
        }
    return told
