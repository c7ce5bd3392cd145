"""Keeps what is known of every rank: its newest records, and the times of its steps.

Ranks of this node keep many records, for digests and timelines. Records of other nodes come in
samples, and a daemon above many nodes has many ranks: these share a fixed amount of memory, so that
each keeps fewer, the more there are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.records import RECORD
from keepstep.monitor.telemetry.record_history import RankHistory, RankState, RecordHistory
from keepstep.monitor.watch.step_times import RankProgress, StepTable

_KEPT_NBYTES = 2 * 2 * (RECORD.itemsize + 16)
"""Bytes for each record of capacity: two lanes, each in a buffer of twice its capacity, with
stamps."""
_STEP_NBYTES = 48
_LEAST_RECORDS, _LEAST_STEPS = 64, 64
"""Least records kept of a rank of another node: some steps' phases, and a sample of operations."""


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """The limits of what a watch keeps.

    Args:
        records: newest records kept of each rank of this node, 320 bytes each.
        steps: newest steps whose times are kept of each rank, 48 bytes each.
        relayed_records: as `records`, of a rank of another node, at most.
        relayed_nbytes: memory for records of all ranks of other nodes, and the same again for times
            of steps; exceeded where there are more than about 25,000 of them.
        forget_s: seconds after which the ranks and nodes of a silent child daemon are dropped.
        aligned_nodes: clocks of more nodes are not aligned: the cost is the square of their number.
    """

    records: int = 4096
    steps: int = 1024
    relayed_records: int = 512
    relayed_nbytes: int = 512 << 20
    forget_s: float = 60.0
    aligned_nodes: int = 512

    def records_of_relayed(self, ranks: int) -> int:
        """Return how many records to keep of each rank of other nodes, given their number."""
        share = self.relayed_nbytes // (max(1, ranks) * _KEPT_NBYTES)
        return max(_LEAST_RECORDS, min(self.relayed_records, share))

    def steps_of_relayed(self, ranks: int) -> int:
        """Return how many steps to keep of each rank of other nodes, given their number."""
        share = self.relayed_nbytes // (max(1, ranks) * _STEP_NBYTES)
        return max(_LEAST_STEPS, min(self.steps, share))


class RankStore:
    """The ranks of one daemon. Not thread-safe.

    Args:
        node: name of this node.
        limits: of what is kept.
    """

    def __init__(self, node: str, limits: WatchLimits) -> None:
        self.history = RecordHistory(limits.records)
        self.tables: dict[int, StepTable] = {}
        self._node = node
        self._limits = limits
        self._received_at_s: dict[int, float] = {}

    @property
    def ranks(self) -> dict[int, RankHistory]:
        """Every rank's history."""
        return self.history.ranks

    def merge(self, state: RankState, records: np.ndarray, now_s: float) -> bool:
        """Merge records of a rank; return whether it replaces an earlier writer of the rank."""
        before = self.ranks.get(state.rank)
        if before is None or before.state.read_at_s != state.read_at_s:
            self._received_at_s[state.rank] = now_s
        limits, ranks = self._limits, max(len(self.ranks), state.world_size)
        is_local = state.node == self._node
        capacity = None if is_local else limits.records_of_relayed(ranks)
        changed = self.history.merge(state, records, capacity)
        is_same_writer = before is self.ranks[state.rank]
        goes_on = before is not None and 0 < before.state.generation < state.generation
        if not (is_same_writer or goes_on) or state.rank not in self.tables:
            # A later generation of a job counts its steps on; other writers may begin again.
            steps = limits.steps if is_local else limits.steps_of_relayed(ranks)
            self.tables[state.rank] = StepTable(steps)
        self.tables[state.rank].feed(changed)
        return before is not None and not is_same_writer

    def drop(self, ranks: Collection[int]) -> None:
        """Forget ranks."""
        self.history.keep_only(self.ranks.keys() - ranks)
        for rank in ranks:
            self.tables.pop(rank, None)
            self._received_at_s.pop(rank, None)

    def received_at_s(self, rank: int) -> float:
        """Return when a new reading of a rank's ring was received last."""
        return self._received_at_s[rank]

    def progress(self) -> list[RankProgress]:
        """Return how far each rank is."""
        return [
            RankProgress(
                step=history.highest_step,
                last_step=self.tables[rank].last_step,
                last_step_s=self.tables[rank].last_step_s,
                last_ended_s=self.tables[rank].last_ended_s,
                read_at_s=history.state.read_at_s,
                is_alive=history.state.is_alive,
                ending=history.state.ending,
            )
            for rank, history in self.ranks.items()
        ]
