"""What stood still, and because of whom, told from records of a job that is over. Pure.

Where `hangs` watches a job and has patience, there is nothing to be patient about here: what is under way in the last records of a rank
never ended. Nor does anything tell when they were taken, so nothing is said of ages, only of moments. The records are Flight
Recorder's: without steps and phases, and with operations that were called long before the device gets to them.

Ranks do not write their dumps at one moment. Whoever took part in a collective that another has left has called it, whatever its own dump
says: that dump is of an earlier moment, or its buffer had gone round, and its rank is not blamed for what it may have done since.

If nothing stands still, whoever is waited for most is looked for: of each collective, the last to come costs what it came after the others,
as far as clocks tell. Links are not judged: of messages, dumps tell too coarse times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from keepstep.monitor.diagnosis.digest import digest
from keepstep.monitor.diagnosis.mismatches import CollectiveMismatch
from keepstep.monitor.diagnosis.signatures import SYMMETRIC, describe, signatures
from keepstep.monitor.diagnosis.subjects import group_subject, link_subject, rank_subject
from keepstep.monitor.diagnosis.waits import OpenOperation, wait_for
from keepstep.monitor.records import Communicator, Flag, JobRecords, Kind, Operation, joined
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict

INFINITE = float("inf")
_MESSAGES = (Operation.SEND, Operation.RECEIVE)

# A rank is slow if, of all time in which ranks waited for the last, so much was for it, on so many occasions, and if that
# is so much of the whole; the three longest waits for it are left out, for at its start a job waits for whom it likes.
_SLOW_SHARE = 0.7
_SLOW_TIMES = 10
_SLOW_COST = 0.1
_ODD_ONES = 3


@dataclass(frozen=True, slots=True)
class Wait:
    """An operation under way.

    Args:
        operation: what it is, for people.
        waiting: ranks that wait in it.
        missing: ranks that have not begun it.
        since_s: when the first of those that wait called it, by the job's clock.
    """

    operation: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    since_s: float


@dataclass(frozen=True, slots=True)
class Postmortem:
    """What there is to say of a job that is over.

    Args:
        ranks: whose records there are.
        missing: ranks of its process groups whose records there are not.
        waits: who waited for whom in the end.
        verdicts: roots only.
        remarks: what the records cannot tell, and why.
    """

    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    waits: tuple[Wait, ...]
    verdicts: tuple[Verdict, ...]
    remarks: tuple[str, ...]


def examine(job: JobRecords) -> Postmortem:
    """Return what stood still in a job, or who was slow, from each rank's last records, with clocks aligned as far as can be."""
    view = _PostmortemAnalysis(job)
    verdicts = [*_mismatches(view), *_hangs(view)]
    remarks = list(view.remarks)
    if not verdicts and not view.waits:
        slow, doubts = _slow(job)
        verdicts += slow
        remarks += doubts
    return Postmortem(
        tuple(sorted(job.ranks)), view.missing, view.waits, tuple(verdicts), tuple(remarks)
    )


class _PostmortemAnalysis:
    """A job's last moment, worked out once."""

    def __init__(self, job: JobRecords) -> None:
        self.job = job
        members = {rank for group in job.communicators.values() for rank in group.ranks}
        self.missing = tuple(sorted(members - set(job.ranks)))
        _, told = digest(job.ranks.values(), job.communicators)
        self.operations = {rank: _operations(one.records) for rank, one in job.ranks.items()}
        self.partings = _first_mismatches(self.operations, job.communicators)
        self.frontiers, self.remarks, self.outdated = _advance(
            told.frontiers, self.operations, job.communicators
        )
        self.graph = wait_for(self.frontiers, job.communicators)
        self.waits = tuple(
            Wait(self.name(one), one.waiting, self.lacking(one), self.since_s(one))
            for one in self.graph.operations
        )

    def lacking(self, operation: OpenOperation) -> tuple[int, ...]:
        """Return the ranks that have not begun an operation, all of them."""
        missing = list(operation.missing)
        while operation.earlier >= 0:
            operation = self.graph.operations[operation.earlier]
            missing += operation.missing
        return tuple(sorted(missing))

    def group(self, identity: int) -> str:
        """Return a process group's name for people."""
        known = self.job.communicators.get(identity)
        return f"group {known.name if known else identity}"

    def call(self, operation: OpenOperation, rank: int) -> np.ndarray:
        """Return the records, one at most, with which a rank called an operation."""
        mine = self.operations[rank]
        chosen = (mine["communicator"] == operation.communicator) & (
            mine["number"] == operation.number
        )
        if operation.pair is None:
            chosen &= ~np.isin(mine["code"], _MESSAGES)
        else:
            code = Operation.SEND if rank == operation.pair[0] else Operation.RECEIVE
            peer = operation.pair[1] if rank == operation.pair[0] else operation.pair[0]
            chosen &= (mine["code"] == code) & (mine["peer"] == peer)
        found: np.ndarray = mine[chosen][:1]
        return found

    def name(self, operation: OpenOperation) -> str:
        """Return for people what an operation is."""
        call = self.call(operation, operation.waiting[0])
        group = self.group(operation.communicator)
        if operation.pair is not None:
            sender, receiver = operation.pair
            size = f", {int(call['nbytes'][0])} bytes" if len(call) else ""
            return f"message {operation.number} from rank {sender} to {receiver} in {group}{size}"
        parting = self.partings.get(operation.communicator)
        what = f", {describe(int(signatures(call)[0]))}" if len(call) else ""
        if parting is not None and parting.number <= operation.number:
            what = ", which ranks call differently"
        return f"operation {operation.number} of {group}{what}"

    def since_s(self, operation: OpenOperation) -> float:
        """Return when the first of those that wait in an operation called it, by the job's clock."""
        called = [
            float(self.call(operation, rank)["enqueued_s"][0]) + self.job.ranks[rank].offset_s
            for rank in operation.waiting
            if len(self.call(operation, rank))
        ]
        return min(called, default=0.0)

    def begun(self, operation: OpenOperation) -> tuple[int, ...]:
        """Return, of those that wait in an operation, whose device is known to have begun it."""
        calls = {rank: self.call(operation, rank) for rank in operation.waiting}
        return tuple(
            rank
            for rank, call in calls.items()
            if len(call) and call["started_s"][0] > call["enqueued_s"][0]
        )

    def last_call(self, rank: int) -> str:
        """Return for people what a rank did last."""
        mine = self.operations[rank]
        if not len(mine):
            return f"the dump of rank {rank} tells of no operation"
        last = mine[np.argmax(mine["enqueued_s"])]
        group, number = self.group(int(last["communicator"])), int(last["number"])
        at = _clock(float(last["enqueued_s"]) + self.job.ranks[rank].offset_s)
        if last["code"] in _MESSAGES:
            what = f"{Operation(int(last['code'])).name.lower()} {number} with rank {int(last['peer'])} in {group}"
        else:
            what = f"operation {number} of {group}, {describe(int(signatures(last[None])[0]))}"
        return f"the last that rank {rank} called, at {at}, is {what}"


def _operations(records: np.ndarray) -> np.ndarray:
    operations: np.ndarray = records[
        (records["kind"] == Kind.OPERATION) & (records["communicator"] != 0)
    ]
    return operations


def _collectives(operations: np.ndarray) -> np.ndarray:
    collectives: np.ndarray = operations[~np.isin(operations["code"], _MESSAGES)]
    return collectives


def _advance(
    frontiers: np.ndarray,
    operations: Mapping[int, np.ndarray],
    communicators: Mapping[int, Communicator],
) -> tuple[np.ndarray, tuple[str, ...], frozenset[int]]:
    """Move frontiers to where their ranks must have been; return with them what that says of dumps, and of whose."""
    remarks, outdated = list[str](), set[int]()
    for identity, (number, leaver) in _left(operations).items():
        rows = frontiers[(frontiers["communicator"] == identity) & (frontiers["direction"] == 0)]
        entered = dict(zip(rows["rank"].tolist(), rows["entered"].tolist(), strict=True))
        for rank in communicators[identity].ranks:
            if rank not in operations or entered.get(rank, 0) >= number:
                continue
            if rank not in entered and not _is_whole(operations[rank]):
                # What it did in this group has been overwritten since.
                row = np.zeros(1, frontiers.dtype)
                row["rank"], row["communicator"], row["peer"], row["entered"] = (
                    rank,
                    identity,
                    -1,
                    number,
                )
                frontiers = joined([frontiers, row])
                continue
            frontiers["open"][frontiers["rank"] == rank] = 0
            if rank not in outdated:
                outdated.add(rank)
                remarks.append(
                    f"rank {rank} is not judged: its dump ends at operation {entered.get(rank, 0)} of group "
                    f"{communicators[identity].name}, and rank {leaver} has left operation {number}; it was written earlier, or the "
                    "other's after the operation had failed"
                )
    return frontiers, tuple(remarks), frozenset(outdated)


def _left(operations: Mapping[int, np.ndarray]) -> dict[int, tuple[int, int]]:
    """Return, by communicator, the highest number of a collective that somebody has left who could not before all had come, and who."""
    left: dict[int, tuple[int, int]] = {}
    for rank, mine in operations.items():
        ended = mine[
            np.isin(mine["code"], SYMMETRIC)
            & (mine["ended_s"] > 0)
            & (mine["flags"] & Flag.FAILED == 0)
        ]
        for identity in np.unique(ended["communicator"]).tolist():
            number = int(ended["number"][ended["communicator"] == identity].max())
            left[identity] = max(left.get(identity, (0, -1)), (number, rank))
    return left


def _is_whole(operations: np.ndarray) -> bool:
    """Return whether nothing before a rank's records was overwritten: stamps begin at 2."""
    return not len(operations) or int(operations["stamp"].min()) == 2


def _first_mismatches(
    operations: Mapping[int, np.ndarray], communicators: Mapping[int, Communicator]
) -> dict[int, CollectiveMismatch]:
    """Return, by communicator, the first number at which ranks called different things."""
    parts = [(rank, _collectives(mine)) for rank, mine in operations.items()]
    rows = joined([mine for _, mine in parts])
    if not len(rows):
        return {}
    owner = np.repeat([rank for rank, _ in parts], [len(mine) for _, mine in parts])
    calls = signatures(rows)
    order = np.lexsort((calls, rows["number"], rows["communicator"]))
    rows, owner, calls = rows.take(order), owner[order], calls[order]
    same = (rows["communicator"][1:] == rows["communicator"][:-1]) & (
        rows["number"][1:] == rows["number"][:-1]
    )
    differ = np.flatnonzero(same & (calls[1:] != calls[:-1]))
    found: dict[int, CollectiveMismatch] = {}
    for at in differ.tolist():
        identity, number = int(rows["communicator"][at]), int(rows["number"][at])
        if identity in found or identity not in communicators:
            continue
        chosen = (rows["communicator"] == identity) & (rows["number"] == number)
        by_call: dict[int, list[int]] = defaultdict(list)
        for rank, call in zip(owner[chosen].tolist(), calls[chosen].tolist(), strict=True):
            by_call[call].append(rank)
        found[identity] = CollectiveMismatch(
            identity, number, {call: tuple(sorted(ranks)) for call, ranks in by_call.items()}
        )
    return found


def _mismatches(view: _PostmortemAnalysis) -> list[Verdict]:
    verdicts = []
    for identity, parting in view.partings.items():
        culprits = parting.minority
        subject = group_subject(culprits or parting.ranks, {})
        called = [
            float(mine["enqueued_s"][0]) + view.job.ranks[rank].offset_s
            for rank in parting.ranks
            if len(mine := _numbered(view.operations[rank], identity, parting.number))
        ]
        evidence = [f"ranks call different things in {view.group(identity)}", *parting.told()]
        cost_s = INFINITE
        if not any(one.communicator == identity for one in view.graph.operations):
            evidence.append(
                "it went through: a wrong result, or the beginning of what happened later"
            )
            cost_s = 0.0
        verdict = _verdict(
            subject,
            Syndrome.MISMATCH,
            min(called),
            evidence,
            0.95 if culprits else 0.6,
            Advice.ALERT,
        )
        verdicts.append(replace(verdict, cost_s_per_step=cost_s))
    return verdicts


def _numbered(operations: np.ndarray, identity: int, number: int) -> np.ndarray:
    mine = _collectives(operations)
    found: np.ndarray = mine[(mine["communicator"] == identity) & (mine["number"] == number)]
    return found


def _hangs(view: _PostmortemAnalysis) -> list[Verdict]:
    """Name who never arrived, and operations that all have begun and that do not end; what follows from either is not told.

    In a group whose ranks call different things, numbers do not say who is where.
    """
    graph = view.graph
    sound = [one for one in graph.operations if one.communicator not in view.partings]
    lacking: dict[int, list[OpenOperation]] = defaultdict(list)
    for one in sound:
        for rank in one.missing:
            if rank in graph.absent and rank not in view.outdated:
                lacking[rank].append(one)
    verdicts = [
        _absent(view, rank, lacking[rank]) for rank in sorted(lacking) if rank in view.job.ranks
    ]
    gone = [rank for rank in sorted(lacking) if rank not in view.job.ranks]
    if gone:
        verdicts.insert(0, _gone(view, gone, lacking))
    held = {
        rank
        for one in graph.operations
        if view.lacking(one) or one.communicator in view.partings
        for rank in one.waiting
    }
    stuck = [one for one in graph.stuck if one in sound and not held.intersection(one.waiting)]
    roots = [one for one in stuck if not _is_queued(view, one, stuck)]
    verdicts += [_stuck(view, one) for one in roots]
    if stuck and not roots:
        members = sorted({rank for one in stuck for rank in one.waiting})
        evidence = [
            "ranks run these operations in different orders, each behind another:",
            *map(view.name, stuck[:6]),
        ]
        since_s = min(map(view.since_s, stuck))
        verdicts.append(
            _verdict(
                group_subject(members, {}), Syndrome.MISMATCH, since_s, evidence, 0.7, Advice.ALERT
            )
        )
    if not verdicts and graph.cycle and not view.partings:
        circle = " -> ".join(map(str, (*graph.cycle, graph.cycle[0])))
        within = [one for one in sound if set(one.waiting) & set(graph.cycle)]
        evidence = [f"ranks wait for each other in a circle: {circle}"]
        evidence += [f"{_ranks(one.waiting)} in {view.name(one)}" for one in within[:6]]
        since_s = min(map(view.since_s, within))
        subject = group_subject(graph.cycle, {})
        verdicts.append(_verdict(subject, Syndrome.MISMATCH, since_s, evidence, 0.9, Advice.ALERT))
    return verdicts


def _absent(view: _PostmortemAnalysis, rank: int, lacking: Sequence[OpenOperation]) -> Verdict:
    first = min(lacking, key=view.since_s)
    evidence = [f"rank {rank} never came to {view.name(first)}", _awaited(view, first)]
    evidence += [f"nor to {view.name(one)}" for one in lacking if one is not first][:3]
    evidence.append(view.last_call(rank))
    syndrome = Syndrome.NON_COMMUNICATION_HANG
    return _verdict(
        rank_subject(rank, {}), syndrome, view.since_s(first), evidence, 0.9, Advice.RESTART_WORKER
    )


def _gone(
    view: _PostmortemAnalysis, ranks: Sequence[int], lacking: Mapping[int, Sequence[OpenOperation]]
) -> Verdict:
    first = min((one for rank in ranks for one in lacking[rank]), key=view.since_s)
    evidence = [
        f"there is no dump of {_ranks(ranks)}, and others wait: dead, or not collected",
        f"missing in {view.name(first)}",
        _awaited(view, first),
    ]
    return _verdict(
        group_subject(ranks, {}),
        Syndrome.DEAD_PROCESS,
        view.since_s(first),
        evidence,
        0.6,
        Advice.ALERT,
    )


def _awaited(view: _PostmortemAnalysis, operation: OpenOperation) -> str:
    return f"{_ranks(operation.waiting)} waited in it, the first since {_clock(view.since_s(operation))}"


def _is_queued(
    view: _PostmortemAnalysis, operation: OpenOperation, stuck: Collection[OpenOperation]
) -> bool:
    """Return whether the devices that have not begun an operation, others having, all wait in another one."""
    begun = view.begun(operation)
    queued = set(operation.waiting) - set(begun)
    others = {rank for one in stuck if one is not operation for rank in one.waiting}
    return bool(begun) and bool(queued) and queued <= others


def _stuck(view: _PostmortemAnalysis, operation: OpenOperation) -> Verdict:
    evidence = [
        f"all ranks have called {view.name(operation)}, and it does not end",
        _awaited(view, operation),
    ]
    since_s, syndrome = view.since_s(operation), Syndrome.COMMUNICATION_HANG
    if operation.pair is not None:
        return _verdict(
            link_subject(*operation.pair, {}), syndrome, since_s, evidence, 0.8, Advice.ALERT
        )
    members = view.job.communicators[operation.communicator].ranks
    begun = view.begun(operation)
    queued = tuple(rank for rank in operation.waiting if rank not in begun)
    if begun and queued:
        evidence.append(
            f"the device of {_ranks(queued)} never began it: something before it on the device does not end"
        )
        syndrome = Syndrome.NON_COMMUNICATION_HANG
        return _verdict(
            group_subject(queued, {}), syndrome, since_s, evidence, 0.8, Advice.RESTART_WORKER
        )
    if len(operation.waiting) <= (len(members) - 1) // 2:
        evidence.append(
            f"{len(members) - len(operation.waiting)} ranks have left it, {len(operation.waiting)} have not"
        )
        members = operation.waiting
    return _verdict(group_subject(members, {}), syndrome, since_s, evidence, 0.7, Advice.ALERT)


def _slow(job: JobRecords) -> tuple[list[Verdict], list[str]]:
    """Name who was waited for most, and return why not if that cannot be told.

    All leave a collective nearly together. By how much they seem not to is how far times and clocks are to be trusted.
    """
    arrived: dict[tuple[int, int], dict[int, tuple[float, float]]] = defaultdict(dict)
    for rank, one in job.ranks.items():
        mine = _operations(one.records)
        mine = mine[
            np.isin(mine["code"], SYMMETRIC)
            & (mine["ended_s"] > 0)
            & (mine["flags"] & Flag.UNOBSERVED == 0)
        ]
        for identity, number, began_s, ended_s in mine[
            ["communicator", "number", "started_s", "ended_s"]
        ].tolist():
            arrived[identity, number][rank] = (began_s + one.offset_s, ended_s + one.offset_s)
    comparable = {rank for rank, one in job.ranks.items() if np.isfinite(one.offset_error_s)}
    whole = [
        came
        for (identity, _), came in arrived.items()
        if len(came) > 1
        and len(came) == len(job.communicators[identity].ranks)
        and comparable.issuperset(came)
    ]
    if not whole:
        return [], [
            "slow ranks were not looked for: of no collective do the dumps tell when all of its ranks began and ended it"
        ]
    ends = [[ended_s for _, ended_s in came.values()] for came in whole]
    error_s = float(np.median([max(ended) - min(ended) for ended in ends]))
    waited: dict[int, list[float]] = defaultdict(list)
    for came in whole:
        (others_s, _), (last_s, last) = sorted(
            (began_s, rank) for rank, (began_s, _) in came.items()
        )[-2:]
        if last_s - others_s > error_s:
            waited[last].append(last_s - others_s)
    begin_s = min(began_s for came in whole for began_s, _ in came.values())
    span_s = max(map(max, ends)) - begin_s
    counted = {rank: sorted(times)[:-_ODD_ONES] for rank, times in waited.items()}
    total_s = sum(map(sum, counted.values()))
    for rank, times in counted.items():
        cost_s = sum(times)
        if (
            len(times) < _SLOW_TIMES
            or cost_s < _SLOW_SHARE * total_s
            or cost_s < _SLOW_COST * span_s
        ):
            continue
        evidence = (
            f"rank {rank} came last to {len(waited[rank])} of {len(whole)} collectives, by {float(np.median(times)):.3f} s in the median",
            f"that is {cost_s / span_s:.0%} of {span_s:.1f} s, and {cost_s / total_s:.0%} of all such waiting",
        )
        slow = Syndrome.NON_COMMUNICATION_SLOW
        return [
            Verdict(rank_subject(rank, {}), slow, begin_s, evidence, 0.6, 0.0, Advice.ALERT)
        ], []
    return [], []


def _verdict(
    subject: Subject,
    syndrome: Syndrome,
    since_s: float,
    evidence: Iterable[str],
    confidence: float,
    advice: Advice,
) -> Verdict:
    return Verdict(subject, syndrome, since_s, tuple(evidence), confidence, INFINITE, advice)


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 6} more" if len(ranks) > 6 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:6]))}{more}"


def _clock(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"
