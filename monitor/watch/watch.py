"""Holds the state of a monitor daemon: records, clocks, digests and verdicts. Owned by one thread.

A watch reads rings of its own node, receives summaries of child daemons, or both. A watch that
diagnoses folds verdicts into its log; a watch that relays only passes digests on. Only the log must
survive a restart of the daemon; everything else is in the rings and at the child daemons. It opens
no socket and starts no task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from keepstep.monitor.contracts import Diagnosis, JobReader, Probe, RingReading
from keepstep.monitor.diagnosis.metrics import NodeMetrics
from keepstep.monitor.diagnosis.tables import Digest
from keepstep.monitor.node.node_series import metrics_from_json, metrics_to_json
from keepstep.monitor.records import JobRecords
from keepstep.monitor.telemetry.clocks import ClockOffset
from keepstep.monitor.telemetry.record_history import (
    RankState,
    is_stale,
    newest_of,
)
from keepstep.monitor.tree.child_registry import ChildRegistry, Cursor
from keepstep.monitor.tree.digest_relay import Inbox, Outbox, without
from keepstep.monitor.tree.node_clocks import NodeClocks
from keepstep.monitor.tree.step_records import select_steps
from keepstep.monitor.tree.summary import NodeFacts, Summary, summarize
from keepstep.monitor.watch.component_faults import ComponentFaults
from keepstep.monitor.watch.diagnosis_rounds import (
    DiagnosisRound,
    DiagnosisRunner,
    newest_generation,
)
from keepstep.monitor.watch.local_digests import LocalDigests
from keepstep.monitor.watch.rank_store import RankStore, WatchLimits
from keepstep.monitor.watch.rank_views import RankViews
from keepstep.monitor.watch.verdict_log import VerdictLog, advance
from keepstep.monitor.watch.verdict_notes import NoteRequest, VerdictNote


class Watch:
    """The state of one daemon; see the module.

    Args:
        node: name of this node.
        reader: this node's rings; None for a daemon that only receives summaries.
        probe: measures this node.
        diagnosis: None for a daemon that only relays.
        limits: of what is kept.
        log: verdicts of an earlier daemon.
        now_s: monotonic clock.
    """

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
        self.component_faults = ComponentFaults()
        self.nodes: dict[str, NodeFacts] = {}
        self.child_registry = ChildRegistry()
        self._limits = limits or WatchLimits()
        self._reader = reader
        self._probe = probe
        self._runner = (
            None if diagnosis is None else DiagnosisRunner(diagnosis, self.component_faults)
        )
        self._clocks = NodeClocks(node)
        self._store = RankStore(node, self._limits)
        self._history = self._store.history
        self.rank_views = RankViews(
            self._store, self._clocks, now_s, self.child_registry.records_age_s
        )
        self._local: tuple[int, ...] = ()
        self._local_digests = LocalDigests(node)
        self._inbox, self._outbox = Inbox(), Outbox()
        self._metrics: NodeMetrics | None = None
        self._metrics_json: dict[str, Any] = {}
        self._now_s = now_s

    @property
    def number(self) -> int:
        """The number of the newest reading or summary: what pages show changes with it."""
        return self._history.number

    @property
    def faults(self) -> Mapping[str, int]:
        """The number of failures of each component."""
        return self.component_faults.counts

    @property
    def diagnoses(self) -> bool:
        """Whether this watch diagnoses, rather than only relays."""
        return self._runner is not None

    def read(self) -> None:
        """Read the rings and the node's measures."""
        self._history.begin()
        if self._reader is not None:
            self._read_rings(self._reader)
        workers = {rank: self._history.ranks[rank].state.pid for rank in self._local}
        no_metrics: NodeMetrics | None = None
        metrics = self.component_faults.guard(
            "probes", lambda: self._probe.sample(workers), no_metrics
        )
        if metrics is not self._metrics:
            # A probe measures less often than rings are read, and returns the same object again.
            self._metrics = metrics
            self._metrics_json = metrics_to_json(metrics) if metrics else {}
        self.nodes[self.node] = NodeFacts(
            node=self.node,
            metrics=self._metrics_json,
            wall_s=time.time(),
            monotonic_s=self._now_s(),
            monitor_cpu_s=time.process_time(),
        )
        self._drop_inactive()

    def receive(self, url: str, summary: Summary) -> None:
        """Merge the summary of the child daemon at `url`."""
        self._history.begin()
        newest = self._newest([state for state, _ in summary.ranks])
        superseded = {state.rank for state, _ in summary.ranks if self._is_superseded(state)}
        stale = {state.rank for state, _ in summary.ranks if is_stale(state, newest)}
        moved = self._moved(summary)
        ignored = superseded | stale | moved
        for state, records in summary.ranks:
            if state.rank not in ignored:
                self._merge_rank(state, records)
        self._history.learn(summary.communicators)
        self.nodes.update({facts.node: facts for facts in summary.nodes})
        accepted = [rank for rank in summary.present if rank not in ignored]
        if not self.child_registry.record_answer(url, summary, accepted, self._now_s()):
            self._inbox.drop(url)
        self._inbox.add(url, (without(digest, ignored) for digest in summary.digests))
        if read_twice := (superseded - stale).intersection(self._local):
            ranks = ", ".join(map(str, sorted(read_twice)))
            reason = (
                f"reports ranks that this daemon reads too ({ranks}); "
                "start one of the two with --gather-only"
            )
            self.child_registry.record_failure(url, reason)

    def record_failure(self, url: str, reason: str) -> None:
        """Record that the child daemon at `url` did not answer."""
        self.child_registry.record_failure(url, reason)

    def release(self, urls: Sequence[str]) -> None:
        """Drop the daemons that are not among `urls`: they are no longer children."""
        for url in self.child_registry.release(urls):
            self._inbox.drop(url)

    def summary(self, cursor: Cursor, budget: int) -> Summary:
        """Return the changes since `cursor`; everything if it is of another incarnation."""
        if cursor.incarnation != self.incarnation:
            cursor = replace(
                cursor, since=0, records_since=None if cursor.records_since is None else 0
            )
        return summarize(
            self._history,
            self._outbox,
            self.nodes,
            self.child_registry.missing,
            self.incarnation,
            cursor.since,
            cursor.records_since,
            budget,
        )

    def steps(self, readings: Sequence[RingReading], first: int, last: int) -> Summary:
        """Return the records of steps `first` to `last` that this node's rings hold.

        Args:
            readings: of everything that the rings hold.
            first, last: steps, both included.
        """
        groups = {group.identity: group for each in readings for group in each.communicators}
        return Summary(
            incarnation=self.incarnation,
            number=self._history.number,
            present=tuple(reading.records.rank for reading in readings),
            ranks=tuple(
                (self._state(reading), select_steps(reading.records.records, first, last))
                for reading in readings
            ),
            communicators=tuple(groups.values()),
            nodes=tuple(self.nodes.values()),
        )

    def clocks(self) -> Mapping[str, ClockOffset]:
        """Return the offset of each node's clock, as aligned last."""
        now_s = self._now_s()
        return {node: self._clocks.of(node, now_s) for node in self.nodes}

    def digest(self) -> None:
        """Digest the changes of this node's ranks and merge them with the children's digests.

        The result goes to the diagnosis here and to the parent. Called less often than `read`: it
        costs more, and verdicts take seconds anyway.
        """
        self._drop_inactive()
        # Needs its own number: the parent may have requested changes since the last reading, and
        # then has that number already.
        number = self._history.begin()
        no_digest: Digest | None = None
        local = (
            self.component_faults.guard("digest", self._digest_local, no_digest)
            if self._local
            else no_digest
        )
        for digest in self._inbox.rounds(local, self._history.communicators):
            if self._runner is not None:
                self._runner.add(digest)
            self._outbox.add(number, digest)

    def diagnose(self) -> DiagnosisRound | None:
        """Diagnose, and advance the log; None if this watch only relays, or diagnosis failed."""
        if self._runner is None:
            return None
        states = [rank.state for rank in self._history.ranks.values()]
        metrics = {
            name: metrics_from_json(facts.metrics)
            for name, facts in self.nodes.items()
            if facts.metrics
        }
        now_s = self._now_s()
        verdicts = self._runner.run(states, self._history.communicators, metrics, now_s)
        if verdicts is None:
            return None
        wall_s = time.time()
        self.log, changes = advance(self.log, verdicts, now_s, wall_s)
        generation = newest_generation(states)
        return DiagnosisRound(
            verdicts=tuple(verdicts),
            now_s=now_s,
            changes=changes,
            generation=generation,
            nodes={state.rank: state.node for state in states if state.generation == generation},
            step_s=self.rank_views.typical_step_s() or 0.0,
            notes=self.log.notes_in_force(wall_s),
        )

    def note_verdict(self, number: int, request: NoteRequest) -> VerdictNote | None:
        """Record a person's note on the verdict of this number; return it, None if it ends one.

        Raises:
            KeyError: no verdict of this number holds, nor is one muted.
        """
        self.log = self.log.with_note(number, request, time.time())
        return next((note for note in self.log.notes if note.number == number), None)

    def record_stacks(self, number: int, rank: int, stacks: Mapping[str, Any]) -> None:
        """Add the stacks of a suspect to the log entry with this number."""
        self.log = self.log.with_stacks(number, rank, dict(stacks))

    def nodes_of_ranks(self) -> frozenset[str]:
        """Return the nodes that run ranks."""
        return frozenset(rank.state.node for rank in self._history.ranks.values())

    def to_align(self) -> tuple[JobRecords, str] | None:
        """Return the records to measure clocks from, and the node whose clock is the reference.

        None if there is nothing to align. The arrays must not be written to.
        """
        # Only of one generation: groups of two generations may have the same name and ranks, and
        # number their operations from one.
        newest = max((rank.state.generation for rank in self._history.ranks.values()), default=0)
        node_of = {
            rank: history.state.node
            for rank, history in self._history.ranks.items()
            if history.state.generation == newest
        }
        nodes = set(node_of.values())
        if not 1 < len(nodes) <= self._limits.aligned_nodes:
            return None
        job = self._history.job()
        ranks = {rank: job.ranks[rank] for rank in node_of}
        return JobRecords(ranks, job.communicators), self.node if self.node in nodes else min(nodes)

    def resolve_clocks(
        self, reference: str, measured: Mapping[str, ClockOffset]
    ) -> Mapping[str, ClockOffset]:
        """Return each node's offset, given the measured ones; empty if there are no other nodes."""
        return self._clocks.resolve(reference, measured, self._now_s())

    def set_clocks(self, clocks: Mapping[str, ClockOffset]) -> None:
        """Set the offsets of the nodes' clocks."""
        self._clocks.update(clocks, self._now_s())

    def locate_rank(self, rank: int) -> tuple[int | None, str | None]:
        """Return the process id of a rank on this node, else the URL of the child that has it."""
        if rank in self._local:
            return self._history.ranks[rank].state.pid, None
        return None, self.child_registry.url_of_rank(rank)

    def close(self) -> None:
        """Close the rings and the probe."""
        for component in (self._reader, self._probe):
            if component is not None:
                self.component_faults.guard("end", component.close, None)

    def _read_rings(self, reader: JobReader) -> None:
        no_readings: tuple[RingReading, ...] = ()
        readings = self.component_faults.guard("reader", lambda: tuple(reader.read()), no_readings)
        states = [self._state(reading) for reading in readings]
        newest = self._newest(states)
        current = [
            (state, reading)
            for state, reading in zip(states, readings, strict=True)
            if not is_stale(state, newest)
        ]
        for state, reading in current:
            self._merge_rank(state, reading.records.records)
            self._history.learn(reading.communicators)
        self._local = tuple(state.rank for state, _ in current)

    def _merge_rank(self, state: RankState, records: np.ndarray) -> None:
        if state.node != self.node:
            self._clocks.record_delay(state.node, self._now_s() - state.read_at_s)
        if self._store.merge(state, records, self._now_s()):
            # A new writer: its steps begin again, often with a new generation of the job. Digests
            # of the previous writer would be attributed to it.
            self._drop_digests()

    def _state(self, reading: RingReading) -> RankState:
        return RankState(
            rank=reading.records.rank,
            node=self.node,
            pid=reading.pid,
            incarnation=reading.incarnation,
            is_alive=reading.records.is_alive,
            ending=reading.records.ending,
            read_at_s=reading.records.read_at_s,
            progress_at_s=0.0,
            generation=reading.generation,
            world_size=reading.world_size,
            created_at_s=time.time() - self._now_s() + reading.created_s,
        )

    def _newest(self, states: Sequence[RankState]) -> RankState | None:
        """Return the newest of all known ranks and of the given ones."""
        newest = self._history.newest
        return newest_of(states if newest is None else (newest, *states))

    def _digest_local(self) -> Digest:
        ranks = [self._history.ranks[rank] for rank in self._local]
        clock = self._clocks.of(self.node, self._now_s())
        return self._local_digests.make(ranks, self._history, clock)

    def _drop_digests(self) -> None:
        if self._runner is not None:
            self._runner.clear()
        self._inbox.clear()
        self._outbox.clear()

    def _is_superseded(self, state: RankState) -> bool:
        """Return whether a better source of a rank is known than the one reported.

        A better one is this node's own ring, or a ring of another node that is alive where the
        reported one is not, or newer: a rank that moved to another node with a new generation
        leaves its old ring behind, and a process that cannot be killed keeps a living one.
        """
        if state.rank in self._local:
            return True
        stored = self._history.ranks.get(state.rank)
        return (
            stored is not None
            and stored.state.node != state.node
            and (stored.state.is_alive, stored.state.created_at_s)
            > (state.is_alive, state.created_at_s)
        )

    def _moved(self, summary: Summary) -> set[int]:
        """Return the ranks that a summary has without their states, and that other nodes have."""
        reported_ranks = {state.rank for state, _ in summary.ranks}
        nodes = {facts.node for facts in summary.nodes}
        stored_ranks = self._history.ranks
        return {
            rank
            for rank in summary.present
            if rank not in reported_ranks
            and rank in stored_ranks
            and stored_ranks[rank].state.node not in nodes
        }

    def _drop_inactive(self) -> None:
        """Drop ranks and nodes that no daemon reports any more, and ranks of earlier launches."""
        ranks, nodes = self.child_registry.active_since(self._now_s() - self._limits.forget_s)
        ranks.update(self._local)
        nodes.add(self.node)
        newest = self._history.newest
        dropped = {
            rank
            for rank, history in self._history.ranks.items()
            if rank not in ranks or is_stale(history.state, newest)
        }
        if dropped:
            # Children tell what they have learnt once: groups of these ranks are dropped with them.
            self.child_registry.start_over(
                {self._history.ranks[rank].state.node for rank in dropped}
            )
            self._store.drop(dropped)
            self._local = tuple(rank for rank in self._local if rank not in dropped)
            # Their digests would be attributed to ranks that exist.
            self._drop_digests()
        for name in set(self.nodes) - nodes:
            del self.nodes[name]
        self._clocks.keep_only(self.nodes_of_ranks())
