"""Finds the root cause in the last records of a job that is over. Pure.

Unlike `hangs`, which watches a running job and waits for patience to run out, this module needs no
patience: an operation that is open in the last records of a rank never ended. The records do not
show when they were taken, so verdicts contain times and no ages. The records are Flight Recorder's:
without steps and phases, and with operations that were called long before the device runs them.

Ranks do not write their dumps at the same moment. A rank must have called every collective that
another rank has left. If its own dump does not show this, the dump is of an earlier moment, or its
buffer has wrapped around, and the rank is not blamed for what it may have done since.

If nothing hangs, the rank that others waited for most is looked for: for each collective, the cost
is the time between the last arrival and the one before, as far as clocks allow. Links are not
judged: times of messages in dumps are too coarse.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from keepstep.monitor.diagnosis.digest import digest
from keepstep.monitor.diagnosis.mismatches import CollectiveMismatch
from keepstep.monitor.diagnosis.signatures import SYMMETRIC, describe, signatures
from keepstep.monitor.diagnosis.standstill import hang_verdict
from keepstep.monitor.diagnosis.subjects import (
    group_name,
    group_subject,
    link_subject,
    rank_subject,
)
from keepstep.monitor.diagnosis.waits import OpenOperation, wait_for
from keepstep.monitor.records import Communicator, Flag, JobRecords, Kind, Operation, joined
from keepstep.monitor.verdicts import Advice, Syndrome, Verdict

_MESSAGES = (Operation.SEND, Operation.RECEIVE)

# A rank is slow if it caused this share of all waiting, on this many occasions, and if that is this
# share of the recorded time. Its longest waits are left out, because waits at the start of a job
# are arbitrary.
_SLOW_SHARE = 0.7
_SLOW_TIMES = 10
_SLOW_COST = 0.1
_IGNORED_WAITS = 3


@dataclass(frozen=True, slots=True)
class Wait:
    """An operation that did not end.

    Args:
        operation: its description, for people.
        waiting: ranks that wait in it.
        missing: ranks that have not begun it.
        since_s: when the first waiting rank called it, by the job's clock.
    """

    operation: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Postmortem:
    """Findings about a job that is over.

    Args:
        ranks: ranks with records.
        missing: ranks of its process groups without records.
        waits: which ranks waited for which in the end.
        verdicts: root causes only.
        remarks: what the records cannot show, and why.
    """

    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    waits: tuple[Wait, ...]
    verdicts: tuple[Verdict, ...]
    remarks: tuple[str, ...]


def examine(job: JobRecords) -> Postmortem:
    """Return what hung in a job, or which rank was slow.

    Args:
        job: the last records of each rank, with clocks aligned as far as possible.
    """
    analysis = _PostmortemAnalysis(job)
    verdicts = [*_mismatches(analysis), *_hangs(analysis)]
    remarks = list(analysis.remarks)
    if not verdicts and not analysis.waits:
        slow_verdicts, slow_remarks = _slow(job)
        verdicts += slow_verdicts
        remarks += slow_remarks
    return Postmortem(
        ranks=tuple(sorted(job.ranks)),
        missing=analysis.missing,
        waits=analysis.waits,
        verdicts=tuple(verdicts),
        remarks=tuple(remarks),
    )


class _PostmortemAnalysis:
    """The last moment of a job, computed once."""

    def __init__(self, job: JobRecords) -> None:
        self.job = job
        members = {rank for group in job.communicators.values() for rank in group.ranks}
        self.missing = tuple(sorted(members - set(job.ranks)))
        _, last_digest = digest(job.ranks.values(), job.communicators)
        self.operations = {
            rank: _operations(records.records) for rank, records in job.ranks.items()
        }
        self.mismatches = _first_mismatches(self.operations, job.communicators)
        self.frontiers, self.remarks, self.outdated = _advance(
            last_digest.frontiers, self.operations, job.communicators
        )
        self.graph = wait_for(self.frontiers, job.communicators)
        self.waits = tuple(
            Wait(
                self.name(operation),
                operation.waiting,
                self.all_missing(operation),
                self.since_s(operation),
            )
            for operation in self.graph.operations
            if operation.waiting
        )

    def all_missing(self, operation: OpenOperation) -> tuple[int, ...]:
        """Return all ranks that have not begun an operation."""
        missing = list(operation.missing)
        while operation.earlier >= 0:
            operation = self.graph.operations[operation.earlier]
            missing += operation.missing
        return tuple(sorted(missing))

    def group(self, identity: int) -> str:
        """Return a process group's name for people."""
        return group_name(self.job.communicators, identity)

    def call(self, operation: OpenOperation, rank: int) -> np.ndarray:
        """Return the record, at most one, with which a rank called an operation."""
        calls = self.operations[rank]
        is_call = (calls["communicator"] == operation.communicator) & (
            calls["number"] == operation.number
        )
        if operation.pair is None:
            is_call &= ~np.isin(calls["code"], _MESSAGES)
        else:
            code = Operation.SEND if rank == operation.pair[0] else Operation.RECEIVE
            peer = operation.pair[1] if rank == operation.pair[0] else operation.pair[0]
            is_call &= (calls["code"] == code) & (calls["peer"] == peer)
        call: np.ndarray = calls[is_call][:1]
        return call

    def name(self, operation: OpenOperation) -> str:
        """Return a description of an operation for people."""
        call = self.call(operation, operation.waiting[0])
        group = self.group(operation.communicator)
        if operation.pair is not None:
            sender, receiver = operation.pair
            size = f", {int(call['nbytes'][0])} bytes" if len(call) else ""
            return f"message {operation.number} from rank {sender} to {receiver} in {group}{size}"
        mismatch = self.mismatches.get(operation.communicator)
        signature = f", {describe(int(signatures(call)[0]))}" if len(call) else ""
        if mismatch is not None and mismatch.number <= operation.number:
            signature = ", which ranks call differently"
        return f"operation {operation.number} of {group}{signature}"

    def since_s(self, operation: OpenOperation) -> float:
        """Return when the first rank that waits in an operation called it, by the job's clock."""
        called = [
            float(self.call(operation, rank)["enqueued_s"][0]) + self.job.ranks[rank].offset_s
            for rank in operation.waiting
            if len(self.call(operation, rank))
        ]
        return min(called, default=0.0)

    def begun(self, operation: OpenOperation) -> tuple[int, ...]:
        """Return the ranks waiting in an operation whose device is known to have begun it."""
        calls = {rank: self.call(operation, rank) for rank in operation.waiting}
        return tuple(
            rank
            for rank, call in calls.items()
            if len(call) and call["started_s"][0] > call["enqueued_s"][0]
        )

    def last_call(self, rank: int) -> str:
        """Return a description of the last call of a rank, for people."""
        calls = self.operations[rank]
        if not len(calls):
            return f"the dump of rank {rank} contains no operation"
        last = calls[np.argmax(calls["enqueued_s"])]
        group, number = self.group(int(last["communicator"])), int(last["number"])
        called_at = _clock(float(last["enqueued_s"]) + self.job.ranks[rank].offset_s)
        if last["code"] in _MESSAGES:
            code = Operation(int(last["code"])).name.lower()
            description = f"{code} {number} with rank {int(last['peer'])} in {group}"
        else:
            signature = int(signatures(last[None])[0])
            description = f"operation {number} of {group}, {describe(signature)}"
        return f"the last call of rank {rank}, at {called_at}, is {description}"


def _operations(records: np.ndarray) -> np.ndarray:
    """Return the records of operations in known communicators."""
    operations: np.ndarray = records[
        (records["kind"] == Kind.OPERATION) & (records["communicator"] != 0)
    ]
    return operations


def _collectives(operations: np.ndarray) -> np.ndarray:
    """Return the operations that are not messages."""
    collectives: np.ndarray = operations[~np.isin(operations["code"], _MESSAGES)]
    return collectives


def _advance(
    frontiers: np.ndarray,
    operations: Mapping[int, np.ndarray],
    communicators: Mapping[int, Communicator],
) -> tuple[np.ndarray, tuple[str, ...], frozenset[int]]:
    """Move frontiers to where their ranks must have been.

    Returns the frontiers, remarks about outdated dumps, and the ranks of these dumps.
    """
    remarks, outdated = list[str](), set[int]()
    for identity, (number, leaver) in _newest_left(operations).items():
        rows = frontiers[(frontiers["communicator"] == identity) & (frontiers["direction"] == 0)]
        entered = dict(zip(rows["rank"].tolist(), rows["entered"].tolist(), strict=True))
        for rank in communicators[identity].ranks:
            if rank not in operations or entered.get(rank, 0) >= number:
                continue
            if rank not in entered and not _is_complete(operations[rank]):
                # Its calls in this group have been overwritten since.
                row = np.zeros(1, frontiers.dtype)
                row["rank"], row["communicator"] = rank, identity
                row["peer"], row["entered"], row["began"] = -1, number, number
                frontiers = joined([frontiers, row])
                continue
            frontiers["open"][frontiers["rank"] == rank] = 0
            if rank not in outdated:
                outdated.add(rank)
                remarks.append(
                    f"rank {rank} is not judged: its dump ends at operation "
                    f"{entered.get(rank, 0)} of group {communicators[identity].name}, and rank "
                    f"{leaver} has left operation {number}; it was written earlier, or the "
                    "other's after the operation had failed"
                )
    return frontiers, tuple(remarks), frozenset(outdated)


def _newest_left(operations: Mapping[int, np.ndarray]) -> dict[int, tuple[int, int]]:
    """Return, by communicator, the newest collective that some rank has left, and that rank.

    Only collectives that no rank can leave before all have arrived.
    """
    newest: dict[int, tuple[int, int]] = {}
    for rank, calls in operations.items():
        ended = calls[
            np.isin(calls["code"], SYMMETRIC)
            & (calls["ended_s"] > 0)
            & (calls["flags"] & Flag.FAILED == 0)
        ]
        for identity in np.unique(ended["communicator"]).tolist():
            number = int(ended["number"][ended["communicator"] == identity].max())
            newest[identity] = max(newest.get(identity, (0, -1)), (number, rank))
    return newest


def _is_complete(operations: np.ndarray) -> bool:
    """Return whether none of a rank's earlier records were overwritten: stamps begin at 2."""
    return not len(operations) or int(operations["stamp"].min()) == 2


def _first_mismatches(
    operations: Mapping[int, np.ndarray], communicators: Mapping[int, Communicator]
) -> dict[int, CollectiveMismatch]:
    """Return, by communicator, the first number at which ranks called different operations."""
    parts = [(rank, _collectives(rank_calls)) for rank, rank_calls in operations.items()]
    rows = joined([rank_calls for _, rank_calls in parts])
    if not len(rows):
        return {}
    owner = np.repeat([rank for rank, _ in parts], [len(rank_calls) for _, rank_calls in parts])
    calls = signatures(rows)
    order = np.lexsort((calls, rows["number"], rows["communicator"]))
    rows, owner, calls = rows.take(order), owner[order], calls[order]
    is_same = (rows["communicator"][1:] == rows["communicator"][:-1]) & (
        rows["number"][1:] == rows["number"][:-1]
    )
    differing = np.flatnonzero(is_same & (calls[1:] != calls[:-1]))
    mismatches: dict[int, CollectiveMismatch] = {}
    for at in differing.tolist():
        identity, number = int(rows["communicator"][at]), int(rows["number"][at])
        if identity in mismatches or identity not in communicators:
            continue
        is_call = (rows["communicator"] == identity) & (rows["number"] == number)
        by_call: dict[int, list[int]] = defaultdict(list)
        for rank, call in zip(owner[is_call].tolist(), calls[is_call].tolist(), strict=True):
            by_call[call].append(rank)
        mismatches[identity] = CollectiveMismatch(
            identity, number, {call: tuple(sorted(ranks)) for call, ranks in by_call.items()}
        )
    return mismatches


def _mismatches(analysis: _PostmortemAnalysis) -> list[Verdict]:
    """Return verdicts on ranks that called different operations."""
    verdicts = []
    for identity, mismatch in analysis.mismatches.items():
        minority = mismatch.minority
        subject = group_subject(minority or mismatch.ranks, {})
        called_s = [
            float(calls["enqueued_s"][0]) + analysis.job.ranks[rank].offset_s
            for rank in mismatch.ranks
            if len(calls := _numbered(analysis.operations[rank], identity, mismatch.number))
        ]
        evidence = [
            f"ranks call different operations in {analysis.group(identity)}",
            *mismatch.describe_calls(),
        ]
        cost_s = math.inf
        if not any(operation.communicator == identity for operation in analysis.graph.operations):
            evidence.append("it completed: its result is wrong, or it caused what happened later")
            cost_s = 0.0
        verdict = hang_verdict(
            subject,
            Syndrome.MISMATCH,
            min(called_s),
            evidence,
            0.95 if minority else 0.6,
            Advice.ALERT,
        )
        verdicts.append(replace(verdict, cost_s_per_step=cost_s))
    return verdicts


def _numbered(operations: np.ndarray, identity: int, number: int) -> np.ndarray:
    """Return a rank's call of a collective, at most one."""
    calls = _collectives(operations)
    call: np.ndarray = calls[(calls["communicator"] == identity) & (calls["number"] == number)]
    return call


def _hangs(analysis: _PostmortemAnalysis) -> list[Verdict]:
    """Return verdicts on ranks that never arrived, and on operations that do not end.

    Consequences of either are left out. In a group whose ranks call different operations, numbers
    do not show which operation a rank has reached.
    """
    graph = analysis.graph
    matching = [
        operation
        for operation in graph.operations
        if operation.communicator not in analysis.mismatches
    ]
    missed_by: dict[int, list[OpenOperation]] = defaultdict(list)
    for operation in matching:
        for rank in operation.missing:
            if rank in graph.absent and rank not in analysis.outdated:
                missed_by[rank].append(operation)
    verdicts = [
        _absent_rank(analysis, rank, missed_by[rank])
        for rank in sorted(missed_by)
        if rank in analysis.job.ranks
    ]
    without_dump = [rank for rank in sorted(missed_by) if rank not in analysis.job.ranks]
    if without_dump:
        verdicts.insert(0, _ranks_without_dump(analysis, without_dump, missed_by))
    explained_ranks = {
        rank
        for operation in graph.operations
        if analysis.all_missing(operation) or operation.communicator in analysis.mismatches
        for rank in operation.waiting
    }
    stuck = [
        operation
        for operation in graph.stuck
        if operation in matching and not explained_ranks.intersection(operation.waiting)
    ]
    roots = [operation for operation in stuck if not _is_queued(analysis, operation, stuck)]
    verdicts += [_stuck_operation(analysis, operation) for operation in roots]
    if stuck and not roots:
        members = sorted({rank for operation in stuck for rank in operation.waiting})
        evidence = [
            "ranks run these operations in different orders, each queued behind another:",
            *map(analysis.name, stuck[:6]),
        ]
        since_s = min(map(analysis.since_s, stuck))
        verdicts.append(
            hang_verdict(
                group_subject(members, {}), Syndrome.MISMATCH, since_s, evidence, 0.7, Advice.ALERT
            )
        )
    if not verdicts and graph.cycle and not analysis.mismatches:
        cycle = " -> ".join(map(str, (*graph.cycle, graph.cycle[0])))
        cycle_operations = [
            operation for operation in matching if set(operation.waiting) & set(graph.cycle)
        ]
        evidence = [f"ranks wait for each other in a cycle: {cycle}"]
        evidence += [
            f"{_ranks(operation.waiting)} in {analysis.name(operation)}"
            for operation in cycle_operations[:6]
        ]
        since_s = min(map(analysis.since_s, cycle_operations))
        subject = group_subject(graph.cycle, {})
        verdicts.append(
            hang_verdict(subject, Syndrome.MISMATCH, since_s, evidence, 0.9, Advice.ALERT)
        )
    return verdicts


def _absent_rank(
    analysis: _PostmortemAnalysis, rank: int, missed: Sequence[OpenOperation]
) -> Verdict:
    """Return the verdict on a rank that never called an operation in which others wait."""
    first = min(missed, key=analysis.since_s)
    evidence = [f"rank {rank} never came to {analysis.name(first)}", _awaited(analysis, first)]
    evidence += [
        f"nor to {analysis.name(operation)}" for operation in missed if operation is not first
    ][:3]
    evidence.append(analysis.last_call(rank))
    syndrome = Syndrome.NON_COMMUNICATION_HANG
    return hang_verdict(
        rank_subject(rank, {}),
        syndrome,
        analysis.since_s(first),
        evidence,
        0.9,
        Advice.RESTART_WORKER,
    )


def _ranks_without_dump(
    analysis: _PostmortemAnalysis,
    ranks: Sequence[int],
    missed_by: Mapping[int, Sequence[OpenOperation]],
) -> Verdict:
    """Return the verdict on ranks without a dump for which others wait."""
    first = min(
        (operation for rank in ranks for operation in missed_by[rank]), key=analysis.since_s
    )
    evidence = [
        f"there is no dump of {_ranks(ranks)}, and others wait: dead, or not collected",
        f"missing in {analysis.name(first)}",
        _awaited(analysis, first),
    ]
    return hang_verdict(
        group_subject(ranks, {}),
        Syndrome.DEAD_PROCESS,
        analysis.since_s(first),
        evidence,
        0.6,
        Advice.ALERT,
    )


def _awaited(analysis: _PostmortemAnalysis, operation: OpenOperation) -> str:
    """Return which ranks waited in an operation, and since when, for people."""
    since = _clock(analysis.since_s(operation))
    return f"{_ranks(operation.waiting)} waited in it, the first since {since}"


def _is_queued(
    analysis: _PostmortemAnalysis, operation: OpenOperation, stuck: Collection[OpenOperation]
) -> bool:
    """Return whether an operation only waits behind others on some devices.

    This is so if some devices have begun it, and all that have not wait in another operation.
    """
    begun = analysis.begun(operation)
    queued = set(operation.waiting) - set(begun)
    others = {rank for other in stuck if other is not operation for rank in other.waiting}
    return bool(begun) and bool(queued) and queued <= others


def _stuck_operation(analysis: _PostmortemAnalysis, operation: OpenOperation) -> Verdict:
    """Return the verdict on an operation that all ranks have called and that does not end."""
    evidence = [
        f"all ranks have called {analysis.name(operation)}, and it does not end",
        _awaited(analysis, operation),
    ]
    since_s, syndrome = analysis.since_s(operation), Syndrome.COMMUNICATION_HANG
    if operation.pair is not None:
        return hang_verdict(
            link_subject(*operation.pair, {}), syndrome, since_s, evidence, 0.8, Advice.ALERT
        )
    members = analysis.job.communicators[operation.communicator].ranks
    begun = analysis.begun(operation)
    queued = tuple(rank for rank in operation.waiting if rank not in begun)
    if begun and queued:
        evidence.append(
            f"the device of {_ranks(queued)} never began it: "
            "an earlier operation on the device does not end"
        )
        syndrome = Syndrome.NON_COMMUNICATION_HANG
        return hang_verdict(
            group_subject(queued, {}), syndrome, since_s, evidence, 0.8, Advice.RESTART_WORKER
        )
    if len(operation.waiting) <= (len(members) - 1) // 2:
        evidence.append(
            f"{len(members) - len(operation.waiting)} ranks have left it, "
            f"{len(operation.waiting)} have not"
        )
        members = operation.waiting
    return hang_verdict(group_subject(members, {}), syndrome, since_s, evidence, 0.7, Advice.ALERT)


def _slow(job: JobRecords) -> tuple[list[Verdict], list[str]]:
    """Return a verdict on the rank that others waited for most, or remarks why none is possible.

    All ranks leave a collective nearly together. The apparent distance of their ends is the error
    of times and clocks.
    """
    arrivals = _complete_collectives(job)
    if not arrivals:
        return [], [
            "slow ranks were not looked for: for no collective do the dumps show "
            "when all of its ranks began and ended it"
        ]
    ends = [[ended_s for _, ended_s in times.values()] for times in arrivals]
    error_s = float(np.median([max(ended_s) - min(ended_s) for ended_s in ends]))
    waits_s: dict[int, list[float]] = defaultdict(list)
    for times in arrivals:
        in_order = sorted((began_s, rank) for rank, (began_s, _) in times.items())
        (others_s, _), (last_s, last) = in_order[-2:]
        if last_s - others_s > error_s:
            waits_s[last].append(last_s - others_s)
    begin_s = min(began_s for times in arrivals for began_s, _ in times.values())
    span_s = max(map(max, ends)) - begin_s
    counted_s = {rank: sorted(waited_s)[:-_IGNORED_WAITS] for rank, waited_s in waits_s.items()}
    total_s = sum(map(sum, counted_s.values()))
    for rank, waited_s in counted_s.items():
        cost_s = sum(waited_s)
        is_often = len(waited_s) >= _SLOW_TIMES
        if not is_often or cost_s < _SLOW_SHARE * total_s or cost_s < _SLOW_COST * span_s:
            continue
        verdict = Verdict(
            subject=rank_subject(rank, {}),
            syndrome=Syndrome.NON_COMMUNICATION_SLOW,
            since_s=begin_s,
            evidence=(
                f"rank {rank} arrived last at {len(waits_s[rank])} of {len(arrivals)} collectives, "
                f"by {float(np.median(waited_s)):.3f} s in the median",
                f"that is {cost_s / span_s:.0%} of {span_s:.1f} s, "
                f"and {cost_s / total_s:.0%} of all such waiting",
            ),
            confidence=0.6,
            cost_s_per_step=0.0,
            advice=Advice.ALERT,
        )
        return [verdict], []
    return [], []


def _complete_collectives(job: JobRecords) -> list[dict[int, tuple[float, float]]]:
    """Return when each rank began and ended each collective, by the job's clock.

    Only collectives that are known of all their ranks, and whose ranks have aligned clocks.
    """
    times: dict[tuple[int, int], dict[int, tuple[float, float]]] = defaultdict(dict)
    for rank, records in job.ranks.items():
        calls = _operations(records.records)
        calls = calls[
            np.isin(calls["code"], SYMMETRIC)
            & (calls["ended_s"] > 0)
            & (calls["flags"] & Flag.UNOBSERVED == 0)
        ]
        columns = calls[["communicator", "number", "started_s", "ended_s"]]
        for identity, number, began_s, ended_s in columns.tolist():
            offset_s = records.offset_s
            times[identity, number][rank] = (began_s + offset_s, ended_s + offset_s)
    comparable = {
        rank for rank, records in job.ranks.items() if np.isfinite(records.offset_error_s)
    }
    return [
        times_of
        for (identity, _), times_of in times.items()
        if len(times_of) > 1
        and len(times_of) == len(job.communicators[identity].ranks)
        and comparable.issuperset(times_of)
    ]


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 6} more" if len(ranks) > 6 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:6]))}{more}"


def _clock(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"
