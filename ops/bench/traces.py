"""Simulates traces of 3D-parallel jobs, as the rings of all their ranks would contain them.

It is a simulation: no process runs. The job trains with pipeline stages (GPipe's schedule: all
microbatches forward, then backward), tensor-parallel groups of one node, and data parallelism
across nodes. Every rank has a time, which advances through compute, tensor-parallel all-reduces,
messages between stages, the gradients' all-reduce and one all-reduce of the norm over all ranks; a
rank that waits for a late rank becomes late too. All ranks of a stage advance together, as arrays,
so the cost of a step is linear in ranks.

Jitter: log-normal compute per operation and per rank, a factor common to each step (sequence
length), hiccups (rare, exponential) of single ranks, log-normal transfers; nodes' clocks differ by
hours, and are aligned to within 0.2 ms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from keepstep.monitor.diagnosis.metrics import GpuMetrics, NodeMetrics
from keepstep.monitor.records import (
    DTYPES,
    RECORD,
    Communicator,
    Flag,
    JobRecords,
    Kind,
    Measure,
    Operation,
    Phase,
    RankRecords,
)

NODE = 8
WORLD, PIPE = 1, 2
BF16 = DTYPES.index("bfloat16")


@dataclass(frozen=True, slots=True)
class Shape:
    """Parallel dimensions of a job. Ranks count tensor-parallel, then replicas, then stages."""

    stages: int
    replicas: int
    tensor: int = NODE
    microbatches: int = 4

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas * self.tensor


@dataclass(frozen=True, slots=True)
class Jitter:
    """Noise of a healthy job: standard deviations of logarithms, and hiccups."""

    operation: float = 0.04
    step: float = 0.06
    rank: float = 0.01
    transfer: float = 0.15
    hiccup_probability: float = 2e-5
    hiccup_s: float = 0.3


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of `rank` from `step` on. `kind` is one of KINDS; `factor` is that of a slowdown."""

    kind: str
    rank: int
    step: int
    factor: float = 2.0


KINDS = (
    "dead process", "dead node", "hang", "stuck collective", "stuck link", "mismatch",
    "slow rank", "slow node", "throttled node", "slow link", "slow sender", "data stall",
    "corruption", "loss not finite", "device error",
)  # fmt: skip


@dataclass
class Block:
    """One operation, phase or measure of all ranks of a stage.

    Times are by the job's clock; inf: it never happens.
    """

    kind: Kind
    code: int
    communicator: np.ndarray
    number: np.ndarray
    nbytes: np.ndarray | int
    peer: np.ndarray | int
    began_s: np.ndarray
    ended_s: np.ndarray
    flags: int = 0
    # (position in the stage, code): a rank that calls another operation.
    changed: tuple[int, int] | None = None


@dataclass
class Simulation:
    """A simulated job; `steps` yields the records of each step."""

    shape: Shape
    fault: Fault | None
    seed: int
    jitter: Jitter = field(default_factory=Jitter)
    compute_s: float = 0.10  # forward of one microbatch in one stage
    transfer_s: float = 0.010
    gradient_s: float = 0.15

    def __post_init__(self) -> None:
        shape = self.shape
        self.rng = np.random.default_rng(self.seed)
        self.nodes = {rank: f"n{rank // NODE:05d}" for rank in range(shape.ranks)}
        count = (shape.ranks + NODE - 1) // NODE
        self.offset_s = self.rng.uniform(-1e4, 1e4, count)
        self.offset_error_s = self.rng.normal(0, 1e-4, count)
        self.speed = np.exp(
            self.rng.normal(0, self.jitter.rank, (shape.stages, shape.replicas, shape.tensor))
        )
        self.time_s = np.full((shape.stages, shape.replicas, shape.tensor), 2e4)
        self.last_s = 2e4  # time of the last event
        self.fault_s = np.inf  # time at which a hang began
        self.written = [0] * shape.stages
        self.calls: dict[object, int] = {}
        ranks = np.arange(shape.ranks).reshape(self.time_s.shape)
        self.ranks = ranks
        self.tensor_id = 10 + ranks[:, :, 0] // shape.tensor
        self.data_id = 10 + shape.ranks + ranks[:, 0, :]
        self.communicators = {
            WORLD: Communicator(WORLD, "world", tuple(range(shape.ranks))),
            PIPE: Communicator(PIPE, "pipeline", tuple(range(shape.ranks))),
        }
        for stage in range(shape.stages):
            for replica in range(shape.replicas):
                identity = int(self.tensor_id[stage, replica])
                members = tuple(ranks[stage, replica].tolist())
                self.communicators[identity] = Communicator(
                    identity, f"tensor {stage}.{replica}", members
                )
            for place in range(shape.tensor):
                identity = int(self.data_id[stage, place])
                members = tuple(ranks[stage, :, place].tolist())
                self.communicators[identity] = Communicator(
                    identity, f"data {stage}.{place}", members
                )

    def steps(self) -> Iterator[tuple[int, list[np.ndarray], float]]:
        """Yield steps without end, or until a hang.

        A step is (number, records of each rank by its node's clock, time of the last event).
        """
        step = 0
        while True:
            step += 1
            blocks = self._step(step)
            records = self._records(blocks, step)
            yield step, records, self.last_s
            if not np.isfinite(self.time_s).all():
                return

    def read(self, records: list[np.ndarray], at_s: float, dead: frozenset[int]) -> JobRecords:
        """Return the rings at a time by the job's clock."""
        rings = {}
        for rank, rank_records in enumerate(records):
            place = rank // NODE
            offset_s = float(self.offset_s[place])
            rings[rank] = RankRecords(
                rank, self.nodes[rank], rank_records, at_s - offset_s, rank not in dead,
                offset_s=offset_s + float(self.offset_error_s[place]), offset_error_s=2e-4,
            )  # fmt: skip
        return JobRecords(rings, self.communicators)

    def metrics(self, at_s: float, step: int) -> dict[str, NodeMetrics]:
        """Return what the nodes' daemons would measure."""
        faulty_node = (
            f"n{self.fault.rank // NODE:05d}" if self.fault and step >= self.fault.step else ""
        )
        kind = self.fault.kind if self.fault else ""
        metrics = {}
        for place, node in enumerate(dict.fromkeys(self.nodes.values())):
            is_hot = node == faulty_node and kind == "throttled node"
            xids = (79,) if node == faulty_node and kind == "device error" else ()
            gpu = GpuMetrics(
                0, 92.0 if is_hot else 60.0, 1.1e9 if is_hot else 1.7e9, xids=xids, busy_share=0.9
            )
            metrics[node] = NodeMetrics(
                node,
                at_s - float(self.offset_s[place]),
                cpu_hz=3e9,
                memory_total=2**40,
                memory_available=2**39,
                gpus=(gpu,),
            )
        return metrics

    def dead(self, step: int) -> frozenset[int]:
        """Return the ranks whose process has ended."""
        if not self.fault or step < self.fault.step:
            return frozenset()
        if self.fault.kind == "dead process":
            return frozenset((self.fault.rank,))
        if self.fault.kind == "dead node":
            first = self.fault.rank // NODE * NODE
            return frozenset(range(first, first + NODE))
        return frozenset()

    def _step(self, step: int) -> list[list[Block]]:
        shape, time_s = self.shape, self.time_s
        blocks: list[list[Block]] = [[] for _ in range(shape.stages)]
        common = float(np.exp(self.rng.normal(0, self.jitter.step)))
        fault = self.fault if self.fault and step >= self.fault.step else None
        first = self.fault is not None and fault is not None and step == fault.step
        where = np.unravel_index(fault.rank, self.time_s.shape) if fault else (-1, -1, -1)
        began_s = time_s.copy()
        self._data_wait(blocks, fault, where)
        for backward in (False, True):
            order = range(shape.stages - 1, -1, -1) if backward else range(shape.stages)
            sends: dict[tuple[int, int], np.ndarray] = {}
            for stage in order:
                for micro in range(shape.microbatches):
                    previous = stage + (1 if backward else -1)
                    if 0 <= previous < shape.stages:
                        self._message(blocks, previous, stage, sends[previous, micro], fault)
                    if first and fault and micro == 1 and not backward and stage == where[0]:
                        self._stop(fault, where)
                    for half in range(2):
                        self._compute(stage, (2.0 if backward else 1.0) * common / 2, fault, where)
                        is_mismatch = first and fault is not None and fault.kind == "mismatch"
                        is_here = stage == where[0] and micro == half == 1 and not backward
                        self._tensor(blocks, stage, where if is_mismatch and is_here else None)
                    sends[stage, micro] = time_s[stage].copy()
        for stage in range(shape.stages):
            self._gradients(blocks, stage, fault, first, where)
        self._world(blocks)
        for stage in range(shape.stages):
            self._compute(stage, 0.1, fault, where)
            self._marks(blocks, stage, step, began_s[stage], fault, where)
        return blocks

    def _stop(self, fault: Fault, where: tuple[int, ...]) -> None:
        if fault.kind in ("hang", "dead process", "dead node"):
            self.fault_s = float(self.time_s[where])
        if fault.kind in ("hang", "dead process"):
            self.time_s[where] = np.inf
        elif fault.kind == "dead node":
            self.time_s[where[0], where[1], :] = np.inf

    def _compute(
        self, stage: int, work: float, fault: Fault | None, where: tuple[int, ...]
    ) -> None:
        size = self.time_s[stage].shape
        took_s = (
            self.compute_s
            * work
            * self.speed[stage]
            * np.exp(self.rng.normal(0, self.jitter.operation, size))
        )
        hiccups = self.rng.random(size) < self.jitter.hiccup_probability
        took_s[hiccups] += self.rng.exponential(self.jitter.hiccup_s, int(hiccups.sum()))
        if fault and stage == where[0]:
            if fault.kind == "slow rank":
                took_s[where[1], where[2]] *= fault.factor
            elif fault.kind in ("slow node", "throttled node"):
                took_s[where[1], :] *= fault.factor
        self.time_s[stage] += took_s

    def _transfer(self, base_s: float, size: tuple[int, ...]) -> np.ndarray:
        return base_s * np.exp(self.rng.normal(0, self.jitter.transfer, size))

    def _number(self, key: object) -> int:
        self.calls[key] = self.calls.get(key, 0) + 1
        return self.calls[key]

    def _tensor(
        self, blocks: list[list[Block]], stage: int, mismatched: tuple[int, ...] | None
    ) -> None:
        time_s = self.time_s[stage]
        ended_s = time_s.max(axis=1, keepdims=True) + self._transfer(
            self.transfer_s / 4, (time_s.shape[0], 1)
        )
        changed = None
        if mismatched is not None:
            ended_s[mismatched[1]] = np.inf
            self.fault_s = float(time_s[mismatched[1]].max())
            changed = (
                int(mismatched[1] * self.shape.tensor + mismatched[2]),
                int(Operation.BROADCAST),
            )
        ended_s = np.broadcast_to(ended_s, time_s.shape) + self._leaving(time_s.shape)
        number = np.full(time_s.shape, self._number(("tensor", stage)))
        identity = np.broadcast_to(self.tensor_id[stage][:, None], time_s.shape)
        block = Block(
            Kind.OPERATION,
            Operation.ALL_REDUCE,
            identity,
            number,
            2**24,
            -1,
            time_s.copy(),
            ended_s,
            0,
            changed,
        )
        blocks[stage].append(block)
        self.time_s[stage] = ended_s

    def _leaving(self, size: tuple[int, ...]) -> np.ndarray:
        """Return the differences between ranks' ends of a collective, in seconds."""
        return self.rng.exponential(2e-5, size)

    def _message(
        self,
        blocks: list[list[Block]],
        sender: int,
        receiver: int,
        sent_s: np.ndarray,
        fault: Fault | None,
    ) -> None:
        called_s = self.time_s[receiver].copy()
        delay_s = self._transfer(self.transfer_s, called_s.shape)
        if fault and fault.kind in ("slow link", "slow sender", "stuck link"):
            where = np.unravel_index(fault.rank, self.time_s.shape)
            if where[0] == sender and (
                fault.kind == "slow sender" or receiver == self._next(sender)
            ):
                if fault.kind == "stuck link":
                    self.fault_s = min(
                        self.fault_s, float(max(called_s[where[1:]], sent_s[where[1:]]))
                    )
                    delay_s[where[1], where[2]] = np.inf
                else:
                    delay_s[where[1], where[2]] *= fault.factor * 5
        ended_s = np.maximum(called_s, sent_s) + delay_s
        number = np.full(called_s.shape, self._number((sender, receiver)))
        pipe = np.full(called_s.shape, PIPE)
        blocks[sender].append(
            Block(
                Kind.OPERATION,
                Operation.SEND,
                pipe,
                number,
                2**23,
                self.ranks[receiver],
                sent_s,
                ended_s,
                Flag.ASYNCHRONOUS,
            )
        )
        blocks[receiver].append(
            Block(
                Kind.OPERATION,
                Operation.RECEIVE,
                pipe,
                number,
                2**23,
                self.ranks[sender],
                called_s,
                ended_s,
            )
        )
        self.time_s[receiver] = ended_s

    def _next(self, stage: int) -> int:
        return stage + 1 if stage + 1 < self.shape.stages else stage - 1

    def _gradients(
        self,
        blocks: list[list[Block]],
        stage: int,
        fault: Fault | None,
        first: bool,
        where: tuple[int, ...],
    ) -> None:
        time_s = self.time_s[stage]
        ended_s = time_s.max(axis=0, keepdims=True) + self._transfer(
            self.gradient_s, (1, time_s.shape[1])
        )
        if fault and first and fault.kind == "stuck collective" and stage == where[0]:
            ended_s[0, where[2]] = np.inf
            self.fault_s = float(time_s[:, where[2]].max())
        ended_s = np.broadcast_to(ended_s, time_s.shape) + self._leaving(time_s.shape)
        number = np.full(time_s.shape, self._number(("data", stage)))
        identity = np.broadcast_to(self.data_id[stage][None, :], time_s.shape)
        blocks[stage].append(
            Block(
                Kind.OPERATION,
                Operation.ALL_REDUCE,
                identity,
                number,
                2**30,
                -1,
                time_s.copy(),
                ended_s,
            )
        )
        self.time_s[stage] = ended_s

    def _world(self, blocks: list[list[Block]]) -> None:
        ended_s = self.time_s.max() + float(self._transfer(self.transfer_s, (1,))[0])
        number = self._number("world")
        for stage, stage_blocks in enumerate(blocks):
            began_s = self.time_s[stage].copy()
            size = began_s.shape
            over_s = np.full(size, ended_s) + self._leaving(size)
            stage_blocks.append(
                Block(
                    Kind.OPERATION,
                    Operation.ALL_REDUCE,
                    np.full(size, WORLD),
                    np.full(size, number),
                    4,
                    -1,
                    began_s,
                    over_s,
                )
            )
            self.time_s[stage] = over_s

    def _data_wait(
        self, blocks: list[list[Block]], fault: Fault | None, where: tuple[int, ...]
    ) -> None:
        for stage in (0, self.shape.stages - 1) if self.shape.stages > 1 else (0,):
            began_s = self.time_s[stage].copy()
            took_s = self._transfer(0.005, began_s.shape)
            if fault and fault.kind == "data stall" and stage == where[0]:
                # The factor is in twentieths of a step's compute, from the first stage to the last
                # and back.
                computed_s = 3 * self.compute_s * (self.shape.microbatches + self.shape.stages - 1)
                took_s[where[1], where[2]] += computed_s * fault.factor / 20
            self.time_s[stage] = began_s + took_s
            size = began_s.shape
            blocks[stage].append(
                Block(
                    Kind.PHASE,
                    Phase.DATA_WAIT,
                    np.zeros(size),
                    np.zeros(size),
                    0,
                    -1,
                    began_s,
                    self.time_s[stage].copy(),
                )
            )

    def _marks(
        self,
        blocks: list[list[Block]],
        stage: int,
        step: int,
        began_s: np.ndarray,
        fault: Fault | None,
        where: tuple[int, ...],
    ) -> None:
        now_s = self.time_s[stage].copy()
        size = now_s.shape
        none = np.zeros(size)
        blocks[stage].append(Block(Kind.PHASE, Phase.STEP, none, none, 0, -1, began_s, now_s))
        loss = np.full(size, (2 + 8 / (1 + step / 50)) * float(np.exp(self.rng.normal(0, 0.01))))
        if fault and fault.kind == "loss not finite" and stage == where[0]:
            loss[where[1], where[2]] = np.nan
        blocks[stage].append(
            Block(Kind.MEASURE, Measure.LOSS, none, none, loss.view(np.uint64), -1, now_s, now_s)
        )
        if step % 5 == 0:
            sums = np.broadcast_to(self.rng.integers(0, 2**32, size[1]).astype(float), size).copy()
            if fault and fault.kind == "corruption" and stage == where[0]:
                sums[where[1], where[2]] += 1
            identity = np.broadcast_to(self.data_id[stage][None, :], size)
            blocks[stage].append(
                Block(
                    Kind.MEASURE,
                    Measure.REPLICA_CHECKSUM,
                    identity,
                    none,
                    sums.view(np.uint64),
                    -1,
                    now_s,
                    now_s,
                )
            )

    def _records(self, blocks: list[list[Block]], step: int) -> list[np.ndarray]:
        """Return each rank's records of a step.

        Blocks that never began are left out; those that never end have `ended_s` 0.
        """
        by_rank: list[np.ndarray] = []
        for stage, stage_blocks in enumerate(blocks):
            count = self.time_s[stage].size
            table = np.zeros((count, len(stage_blocks)), RECORD)
            for place, block in enumerate(stage_blocks):
                for times in (block.began_s, block.ended_s):
                    self.last_s = max(
                        self.last_s, float(times[np.isfinite(times)].max(initial=0.0))
                    )
                column = table[:, place]
                column["kind"], column["code"], column["dtype"], column["flags"] = (
                    block.kind,
                    block.code,
                    BF16,
                    block.flags,
                )
                column["communicator"], column["number"] = (
                    block.communicator.ravel(),
                    block.number.ravel(),
                )
                column["nbytes"] = (
                    block.nbytes if isinstance(block.nbytes, int) else block.nbytes.ravel()
                )
                column["peer"] = block.peer if isinstance(block.peer, int) else block.peer.ravel()
                column["enqueued_s"] = column["started_s"] = block.began_s.ravel()
                column["ended_s"] = block.ended_s.ravel()
                if block.kind != Kind.OPERATION:
                    column["number"] = step
                if block.changed:
                    column["code"][block.changed[0]] = block.changed[1]
            table["step"] = step
            offsets_s = self.offset_s[self.ranks[stage].ravel() // NODE]
            for name in ("enqueued_s", "started_s", "ended_s"):
                table[name] -= offsets_s[:, None]
            began = np.isfinite(table["enqueued_s"])
            table["ended_s"][~np.isfinite(table["ended_s"])] = 0.0
            table["stamp"] = 2 * (self.written[stage] + np.arange(len(stage_blocks)) + 1)
            self.written[stage] += len(stage_blocks)
            by_rank.extend(row[mask] for row, mask in zip(table, began, strict=True))
        return by_rank


def mixture(rng: np.random.Generator, count: int, shape: Shape, step: int) -> list[Fault]:
    """Draw faults by published frequencies. The assignment of causes to our kinds is our own.

    Fail-stop: the 419 unexpected interruptions of Llama 3's 54 days on 16,384 GPUs
    (arXiv 2407.21783, table 5). Fail-slow: as often, mostly compute, some links (Greyhound).
    Mismatches and stalls: one in 20 each, without a source.
    """
    weights: Mapping[str, float] = {
        "dead process": 74 + 36, "device error": 74 + 36, "hang": 54 + 7 + 17,
        "stuck collective": 20, "stuck link": 15 + 7, "dead node": 32 + 19, "corruption": 6,
        "throttled node": 6 + 60, "slow rank": 150, "slow node": 60, "slow link": 50,
        "slow sender": 30, "mismatch": 40, "data stall": 40, "loss not finite": 20,
    }  # fmt: skip
    kinds, chances = list(weights), np.array(list(weights.values()))
    faults = []
    for kind in rng.choice(kinds, count, p=chances / chances.sum()).tolist():
        rank = int(rng.integers(shape.ranks))
        if kind == "data stall":
            # Only the first and the last stage load data.
            rank = rank % (shape.replicas * shape.tensor)
        faults.append(Fault(kind, rank, step, float(rng.choice([1.3, 1.5, 2.0, 3.0]))))
    return faults
