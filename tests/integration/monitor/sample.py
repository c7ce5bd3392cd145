"""Simulates the rings of a data-parallel job at any time, computed from a plan.

All records of all ranks are computed beforehand. A reading at a time contains those that have begun
by then; those that have not ended are open.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from keepstep.monitor.contracts import JobStatus, MemberStatus, RecoveryStatus, RingReading
from keepstep.monitor.records import (
    DTYPES,
    RECORD,
    Communicator,
    Kind,
    Measure,
    Operation,
    Phase,
    RankRecords,
)
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict

LAYERS = 6
WORLD = 7


@dataclass(frozen=True)
class Plan:
    ranks: int = 8
    steps: int = 200
    step_s: float = 0.25
    slow: dict[int, float] = field(default_factory=dict, hash=False)  # rank -> factor of compute
    slow_from: int = 1
    hang: tuple[int, int] | None = None  # rank, step in whose forward it stops
    neighbours: bool = True  # sends and receives around the ring
    slow_link: tuple[int, int] | None = None
    reports: bool = False  # whether the loop reports a loss of 2.5 and 512 tokens a rank
    seed: int = 1


@functools.lru_cache(maxsize=8)
def lay_out(plan: Plan, begin_s: float) -> tuple[list[np.ndarray], Communicator]:
    """Return every rank's records with their ends, which are infinite where there is none.

    Readers of one plan share them: every node and every daemon that starts again has a reader.
    """
    rng = np.random.default_rng(plan.seed)
    group = Communicator(WORLD, "world", tuple(range(plan.ranks)))
    rows: list[list[tuple[object, ...]]] = [[] for _ in range(plan.ranks)]
    clock = np.full(plan.ranks, begin_s)
    number = 0

    def phase(rank: int, code: Phase, step: int, began_s: float, ended_s: float) -> None:
        rows[rank].append((Kind.PHASE, code, 0, 0, step, 0, -1, step, began_s, began_s, ended_s))

    def operation(
        rank: int, code: Operation, of: int, nbytes: int, peer: int, step: int, a: float, b: float
    ) -> None:
        rows[rank].append(
            (Kind.OPERATION, code, DTYPES.index("float32"), WORLD, of, nbytes, peer, step, a, a, b)
        )

    for step in range(1, plan.steps + 1):
        began = clock.copy()
        factor = np.array(
            [plan.slow.get(r, 1.0) if step >= plan.slow_from else 1.0 for r in range(plan.ranks)]
        )
        jitter = rng.normal(1.0, 0.015, plan.ranks).clip(0.95, 1.1) * (
            1.15 if rng.random() < 0.03 else 1.0
        )
        hung = plan.hang is not None and step == plan.hang[1]
        for rank in range(plan.ranks):
            wait_s = plan.step_s * 0.04 * rng.random()
            phase(rank, Phase.DATA_WAIT, step, clock[rank], clock[rank] + wait_s)
            clock[rank] += wait_s
            forward_s = plan.step_s * 0.28 * factor[rank] * jitter[rank]
            stuck = hung and plan.hang is not None and rank == plan.hang[0]
            phase(
                rank, Phase.FORWARD, step, clock[rank], np.inf if stuck else clock[rank] + forward_s
            )
            clock[rank] = np.inf if stuck else clock[rank] + forward_s
        backward_began = clock.copy()
        for layer in range(LAYERS):
            number += 1
            clock += plan.step_s * 0.55 / LAYERS * factor * jitter
            arrivals = clock.copy()
            done_s = arrivals.max() + 0.002
            for rank in range(plan.ranks):
                if np.isfinite(arrivals[rank]):
                    nbytes = 4 << 20 if layer else 1 << 16
                    operation(
                        rank, Operation.ALL_REDUCE, number, nbytes, -1, step, arrivals[rank], done_s
                    )
            clock[:] = done_s
            if not np.isfinite(done_s):
                break
        for rank in range(plan.ranks):
            if np.isfinite(backward_began[rank]):
                phase(rank, Phase.BACKWARD, step, backward_began[rank], clock[rank])
        if np.isfinite(clock).all():
            for rank in range(plan.ranks):
                optimizer_s = plan.step_s * 0.06 * jitter[rank]
                phase(rank, Phase.OPTIMIZER, step, clock[rank], clock[rank] + optimizer_s)
                clock[rank] += optimizer_s
            if plan.neighbours:
                at = clock.copy()
                for rank in range(plan.ranks):
                    peer = (rank + 1) % plan.ranks
                    took_s = (
                        0.001
                        + rng.random() * 2e-4
                        + (0.006 if (rank, peer) == plan.slow_link else 0)
                    )
                    both = max(at[rank], at[peer])
                    operation(
                        rank, Operation.SEND, step, 1 << 18, peer, step, at[rank], both + took_s
                    )
                    operation(
                        peer, Operation.RECEIVE, step, 1 << 18, rank, step, at[peer], both + took_s
                    )
                    clock[peer] = max(clock[peer], both + took_s)
        for rank in range(plan.ranks):
            phase(rank, Phase.STEP, step, began[rank], clock[rank])
            for code, value in ((Measure.LOSS, 2.5), (Measure.TOKENS, 512.0)):
                if plan.reports:
                    at = clock[rank]
                    bits = int(np.float64(value).view(np.int64))
                    rows[rank].append((Kind.MEASURE, code, 0, 0, step, bits, -1, step, at, at, at))
        if hung:
            break
    return [_records(rank_rows) for rank_rows in rows], group


def _records(rows: Sequence[tuple[object, ...]]) -> np.ndarray:
    records = np.zeros(len(rows), RECORD)
    for place, (kind, code, dtype, identity, number, nbytes, peer, step, *times) in enumerate(rows):
        records[place] = (0, kind, code, dtype, 0, identity, number, nbytes, peer, step, *times)
    records = records[np.argsort(records["enqueued_s"], kind="stable")]
    for operation in (True, False):
        lane = (records["kind"] == Kind.OPERATION) == operation
        records["stamp"][lane] = 2 * np.arange(1, lane.sum() + 1)
    records.flags.writeable = False
    return records


class SampleReader:
    """Rings of the given ranks of a plan, as they are at `clock()`."""

    def __init__(
        self,
        plan: Plan,
        begin_s: float,
        node: str = "node-a",
        ranks: Sequence[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        kept: int = 2000,
        pids: dict[int, int] | None = None,
    ) -> None:
        laid_out, self.group = lay_out(plan, begin_s)
        self.ranks = list(ranks if ranks is not None else range(plan.ranks))
        self.planned = {rank: laid_out[rank] for rank in self.ranks}
        self.node, self.clock, self.kept = node, clock, kept
        self.pids = pids or {}
        self.closed = False

    def read(self) -> list[RingReading]:
        now_s = self.clock()
        readings = []
        for rank, planned in self.planned.items():
            until = int(np.searchsorted(planned["enqueued_s"], now_s, side="right"))
            records = planned[max(0, until - self.kept) : until].copy()
            records["ended_s"][records["ended_s"] > now_s] = 0.0
            readings.append(
                RingReading(
                    records=RankRecords(
                        rank=rank, node=self.node, records=records, read_at_s=now_s
                    ),
                    communicators=(self.group,),
                    pid=self.pids.get(rank, os.getpid()),
                    incarnation="first",
                )
            )
        return readings

    def read_all(self) -> list[RingReading]:
        return self.read()

    def close(self) -> None:
        self.closed = True


def verdict(
    rank: int, syndrome: Syndrome = Syndrome.NON_COMMUNICATION_HANG, since_s: float = 0.0
) -> Verdict:
    return Verdict(
        Subject("rank", (rank,), "node-a"),
        syndrome,
        since_s,
        (
            f"rank {rank} is in forward of step 41 and began no operation since",
            "7 of 8 ranks wait for it in all_reduce 246 of group world",
        ),
        0.97,
        float("inf") if "hang" in syndrome else 0.31,
        Advice.RESTART_WORKER if "hang" in syndrome else Advice.ALERT,
    )


class SampleJobStatus:
    """The status of a job that lost a node, which joined again later."""

    def __init__(self, began_at_s: float, step: int = 240) -> None:
        self.began_at_s, self.step, self.closed = began_at_s, step, False

    def job_status(self) -> JobStatus:
        lost_s, back_s = self.began_at_s + 40, self.began_at_s + 75
        return JobStatus(
            began_at_s=self.began_at_s,
            generation=3,
            members=tuple(
                MemberStatus(
                    node=f"node-{name}",
                    phase="training",
                    ranks=(2 * n, 2 * n + 1),
                    step=self.step,
                    snapshot_nbytes=48 << 20,
                )
                for n, name in enumerate("abcd")
            ),
            recoveries=(
                RecoveryStatus(
                    generation=2,
                    reason="node-c: its connection closed",
                    world_size=6,
                    detected_at_s=lost_s,
                    opened_at_s=lost_s + 0.02,
                    ready_at_s=lost_s + 0.2,
                    restored_at_s=lost_s + 0.55,
                    stepped_at_s=lost_s + 0.9,
                    resumed_step=118,
                    lost_steps=1,
                    source="memory, parity",
                ),
                RecoveryStatus(
                    generation=3,
                    reason="node-c joins",
                    world_size=8,
                    detected_at_s=back_s,
                    opened_at_s=back_s + 0.03,
                    ready_at_s=back_s + 0.3,
                    restored_at_s=back_s + 0.8,
                    stepped_at_s=back_s + 1.2,
                    resumed_step=205,
                    lost_steps=0,
                    source="memory, peers' memory",
                ),
            ),
            snapshot_step=self.step - 1,
            checkpoint_step=200,
            checkpoint_url="s3://bucket/run7",
            parity=1,
        )

    def close(self) -> None:
        self.closed = True
