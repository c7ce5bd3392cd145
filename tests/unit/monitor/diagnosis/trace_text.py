"""Traces as small tables of text, the form of `cases/*.txt`: a column per rank, a row per record.

node a: 0 1                       ranks on a node; also `node b: 2 3 offset 100`: its clock
                                  minus the job's
communicator world: 0 1 2 3
steps 1-12 every 1.0              what follows is repeated, a second apart; numbers count up
data_wait           0.00-0.05  0.00-0.05  0.00-0.05  0.00-0.05
world all_reduce 4k 0.50-0.60  0.52-0.60  0.51-0.60  0.55-0.60
pair send 1k ->1    0.61-0.62  .          .          .
pair receive 1k <-0 .          0.55-0.62  .          .
loss                2.5        2.5        2.5        2.5
step 13 at 12.0                   once, times relative to 12.0; `0.52-?` has not ended, `.` did
                                  not begin; on a device: `0.52+0.60-0.70` was called at 0.52 and
                                  began at 0.60, `0.52+?-?` has not begun, and `0.52-!` has an end
                                  that cannot be seen; `0.52+-?` is not launched yet
dead 2                            process gone; finished 2, raised 2, failed 2: and it recorded
                                  this end (`Ending`)
read 20.0                         when the rings are read, by the job's clock
expect non-communication hang: rank 1
"""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from keepstep.monitor.records import (
    DTYPES,
    RECORD,
    Communicator,
    Ending,
    Flag,
    JobRecords,
    Kind,
    Measure,
    Operation,
    Phase,
    RankRecords,
)

_PHASES = {phase.name.lower(): phase for phase in Phase}
_MEASURES = {measure.name.lower(): measure for measure in Measure}


@dataclass
class Trace:
    """A trace under construction: times by the job's clock."""

    nodes: dict[int, str] = field(default_factory=dict)
    offsets_s: dict[str, float] = field(default_factory=dict)
    communicators: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rows: dict[int, list[tuple[float, np.ndarray]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    numbers: dict[tuple, int] = field(default_factory=lambda: defaultdict(int))
    dead: set[int] = field(default_factory=set)
    endings: dict[int, Ending] = field(default_factory=dict)
    read_s: float = 0.0
    read_of: dict[int, float] = field(default_factory=dict)
    expected: list[str] = field(default_factory=list)

    def identity(self, name: str) -> int:
        return sorted(self.communicators).index(name) + 1

    def operation(
        self,
        rank: int,
        communicator: str,
        operation: Operation,
        began_s: float,
        ended_s: float,
        nbytes: int = 4096,
        step: int = 1,
        peer: int = -1,
        dtype: str = "float32",
        asynchronous: bool = False,
        failed: bool = False,
        started_s: float | None = None,
        unobserved: bool = False,
        is_launched: bool = True,
    ) -> None:
        pair = peer if operation in (Operation.SEND, Operation.RECEIVE) else None
        direction = operation if pair is not None else None
        key = (rank, communicator, direction, pair)
        self.numbers[key] += 1
        row = np.zeros((), RECORD)
        row["kind"], row["code"], row["dtype"] = Kind.OPERATION, operation, DTYPES.index(dtype)
        row["flags"] = (
            (Flag.ASYNCHRONOUS if asynchronous else 0)
            | (Flag.FAILED if failed else 0)
            | (Flag.DEVICE_TIMES if started_s is not None else 0)
            | (Flag.LAUNCHED if started_s is not None and is_launched else 0)
            | (Flag.DEVICE_TIMES | Flag.UNOBSERVED if unobserved else 0)
        )
        row["communicator"], row["number"] = self.identity(communicator), self.numbers[key]
        row["nbytes"], row["peer"], row["step"] = nbytes, peer, step
        row["enqueued_s"] = row["started_s"] = began_s
        if row["flags"] & Flag.DEVICE_TIMES:
            row["started_s"] = started_s or 0.0
        row["ended_s"] = ended_s
        self.rows[rank].append((began_s, row))

    def phase(self, rank: int, phase: Phase, began_s: float, ended_s: float, step: int) -> None:
        row = np.zeros((), RECORD)
        row["kind"], row["code"], row["number"], row["step"] = Kind.PHASE, phase, step, step
        row["peer"], row["enqueued_s"], row["ended_s"] = -1, began_s, ended_s
        self.rows[rank].append((began_s, row))

    def measure(
        self,
        rank: int,
        measure: Measure,
        value: float,
        at_s: float,
        step: int,
        communicator: str = "",
    ) -> None:
        row = np.zeros((), RECORD)
        row["kind"], row["code"], row["number"], row["step"] = Kind.MEASURE, measure, step, step
        row["communicator"] = self.identity(communicator) if communicator else 0
        row["nbytes"] = struct.unpack("<Q", struct.pack("<d", value))[0]
        row["peer"], row["enqueued_s"], row["ended_s"] = -1, at_s, at_s
        self.rows[rank].append((at_s, row))

    def job(self, at_s: float | None = None, since_s: float = -np.inf) -> JobRecords:
        """Return what rings hold at a moment, the end if none is given."""
        return Recording(self).job(self.read_s if at_s is None else at_s, since_s)


class Recording:
    """The records of a trace, arranged once to be read at many moments.

    Later additions to the trace are not part of it.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._began_s: dict[int, np.ndarray] = {}
        self._records: dict[int, np.ndarray] = {}
        for rank in trace.nodes:
            rows = sorted(trace.rows[rank], key=lambda item: item[0])
            self._began_s[rank] = np.array([began_s for began_s, _ in rows])
            records = np.array([row for _, row in rows], RECORD) if rows else np.zeros(0, RECORD)
            records["stamp"] = 2 * (np.arange(len(records)) + 1)
            self._records[rank] = records

    def job(self, at_s: float, since_s: float) -> JobRecords:
        """Return what rings hold at a moment.

        Later records are left out, and operations that end later have not ended.
        """
        trace = self._trace
        ranks = {}
        for rank, node in trace.nodes.items():
            offset_s = trace.offsets_s.get(node, 0.0)
            reading_s = min(at_s, trace.read_of.get(rank, at_s))
            count = np.searchsorted(self._began_s[rank], reading_s, side="right")
            records = self._records[rank][:count]
            is_held = (
                (records["ended_s"] > since_s)
                | (records["ended_s"] == 0)
                | (records["ended_s"] > reading_s)
            )
            records = records.compress(is_held)
            for name in ("started_s", "ended_s"):
                records[name][records[name] > reading_s] = 0.0
            for name in ("enqueued_s", "started_s", "ended_s"):
                records[name] = np.where(records[name] != 0, records[name] - offset_s, 0.0)
            ranks[rank] = RankRecords(
                rank=rank,
                node=node,
                records=records,
                read_at_s=reading_s - offset_s,
                is_alive=rank not in trace.dead,
                ending=trace.endings.get(rank, Ending.NONE) if rank in trace.dead else Ending.NONE,
                offset_s=offset_s,
                offset_error_s=1e-6 if trace.offsets_s else float("inf"),
            )
        communicators = {
            trace.identity(name): Communicator(trace.identity(name), name, members)
            for name, members in trace.communicators.items()
        }
        return JobRecords(ranks, communicators)


def parse(text: str) -> Trace:
    """Read a trace from its text."""
    trace = Trace()
    block: list[list[str]] = []
    steps, every_s, at_s = (1, 1), 0.0, 0.0

    def flush() -> None:
        for count, step in enumerate(range(steps[0], steps[1] + 1)):
            for words in block:
                _row(trace, words, step, at_s + count * every_s)
        block.clear()

    for line in text.splitlines():
        words = line.split("#")[0].split()
        match words:
            case []:
                continue
            case ["node", name, *rest]:
                ranks = rest[: rest.index("offset")] if "offset" in rest else rest
                trace.nodes |= {int(rank): name.rstrip(":") for rank in ranks}
                if "offset" in rest:
                    trace.offsets_s[name.rstrip(":")] = float(rest[-1])
            case ["communicator", name, *ranks]:
                trace.communicators[name.rstrip(":")] = tuple(map(int, ranks))
            case ["steps", span, "every", period, *rest]:
                flush()
                first, last = span.split("-")
                steps, every_s = (int(first), int(last)), float(period)
                at_s = float(rest[1]) if rest else 0.0
            case ["step", number, "at", begin]:
                flush()
                steps, every_s, at_s = (int(number), int(number)), 0.0, float(begin)
            case ["dead", *ranks]:
                trace.dead |= set(map(int, ranks))
            case ["finished" | "raised" | "failed" as ending, *ranks]:
                trace.dead |= set(map(int, ranks))
                trace.endings |= dict.fromkeys(map(int, ranks), Ending[ending.upper()])
            case ["read", time]:
                trace.read_s = float(time)
            case ["unread", rank, "since", time]:
                trace.read_of[int(rank)] = float(time)
            case ["expect", *rest]:
                trace.expected.append(" ".join(rest))
            case _:
                block.append(words)
    flush()
    return trace


def load(path: Path) -> Trace:
    """Read a trace from a file."""
    return parse(path.read_text())


def _row(trace: Trace, words: list[str], step: int, at_s: float) -> None:
    cells = words[-len(trace.nodes) :]
    head = words[: -len(trace.nodes)]
    for rank, cell in zip(sorted(trace.nodes), cells, strict=True):
        if cell == ".":
            continue
        if head[0] in _MEASURES:
            trace.measure(rank, _MEASURES[head[0]], float(cell), at_s + 0.01, step, *head[1:])
            continue
        began, ended = cell.split("-")
        called, plus, started = began.partition("+")
        times = at_s + float(called), 0.0 if ended in "?!" else at_s + float(ended)
        if head[0] in _PHASES:
            trace.phase(rank, _PHASES[head[0]], *times, step)
            continue
        name, operation, size, *options = head
        peers = [option for option in options if option.startswith(("->", "<-", "root="))]
        peer = (
            int(peers[0].removeprefix("root=").removeprefix("->").removeprefix("<-"))
            if peers
            else -1
        )
        dtype = next((option for option in options if option in DTYPES), "float32")
        nbytes = (
            int(size[:-1]) * {"k": 1024, "M": 2**20}[size[-1]] if size[-1] in "kM" else int(size)
        )
        trace.operation(
            rank,
            name,
            Operation[operation.upper()],
            *times,
            nbytes,
            step,
            peer,
            dtype,
            "async" in options,
            "failed" in options,
            (at_s + float(started) if started not in ("", "?") else 0.0) if plus else None,
            ended == "!",
            started != "",
        )
