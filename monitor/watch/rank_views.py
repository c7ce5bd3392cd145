"""Answers what pages and metrics ask about ranks, from what a daemon keeps of them.

Called on the thread that diagnoses, so each answer costs little: it looks at open records, at one
step or at the newest operations, and never sorts all records of a rank. Returned records are
copies, and may be used on other threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from keepstep.monitor.records import Communicator, Phase, RankRecords
from keepstep.monitor.telemetry.record_history import RankHistory
from keepstep.monitor.tree.node_clocks import NodeClocks
from keepstep.monitor.watch.rank_store import RankStore
from keepstep.monitor.watch.step_times import (
    HeatMap,
    RankProgress,
    StepTable,
    heat_map,
    typical_step_s,
)


class RankViews:
    """The ranks of one daemon, for reading.

    Args:
        store: keeps the ranks.
        clocks: of the nodes.
        now_s: monotonic clock.
        records_age_s: how much older a rank's records are than its daemon's last answer.
    """

    def __init__(
        self,
        store: RankStore,
        clocks: NodeClocks,
        now_s: Callable[[], float],
        records_age_s: Callable[[int], float],
    ) -> None:
        self._records_age_s = records_age_s
        self._store = store
        self._clocks = clocks
        self._now_s = now_s

    @property
    def tables(self) -> Mapping[int, StepTable]:
        """The step times of every rank."""
        return self._store.tables

    @property
    def communicators(self) -> Mapping[int, Communicator]:
        """The process groups, by identity."""
        return self._store.history.communicators

    def progress(self) -> list[RankProgress]:
        """Return how far each rank is."""
        return self._store.progress()

    def records_of_step(
        self, ranks: Sequence[int], step: int, *, include_later_open: bool
    ) -> dict[int, RankRecords]:
        """Return copies of the records of a step of some ranks, with clocks as aligned last.

        Args:
            ranks: those that are not known are left out.
            step: its number.
            include_later_open: whether to add open records of later steps.
        """
        return self._aligned(
            ranks, lambda rank: rank.of_step(step, include_later_open=include_later_open)
        )

    def newest_operations(self, ranks: Sequence[int], count: int) -> dict[int, RankRecords]:
        """Return copies of the newest `count` operations of ranks, with clocks as aligned last."""
        return self._aligned(ranks, lambda rank: rank.newest_operations(count))

    def _aligned(
        self, ranks: Sequence[int], records_of: Callable[[RankHistory], np.ndarray]
    ) -> dict[int, RankRecords]:
        now_s = self._now_s()
        stored = [self._store.ranks[rank] for rank in ranks if rank in self._store.ranks]
        nodes = {rank.state.node for rank in stored}
        clocks = {node: self._clocks.of(node, now_s) for node in nodes}
        return {
            rank.state.rank: RankRecords(
                rank=rank.state.rank,
                node=rank.state.node,
                records=records_of(rank),
                read_at_s=rank.state.read_at_s,
                is_alive=rank.state.is_alive,
                ending=rank.state.ending,
                offset_s=clocks[rank.state.node].offset_s,
                offset_error_s=clocks[rank.state.node].error_s,
            )
            for rank in stored
        }

    def ranks(self) -> list[RankHistory]:
        """Return every rank's history, by rank."""
        return [self._store.ranks[rank] for rank in sorted(self._store.ranks)]

    def group_name(self, identity: int) -> str:
        """Return the name of a process group; its identity if the name is not known."""
        group = self._store.history.communicators.get(identity)
        return group.name if group else f"{identity:08x}"

    def silence_s(self, rank: int) -> float:
        """Return how many seconds ago a new reading of a rank's ring was received.

        The time for which its records were not asked for does not count.
        """
        age_s = self._now_s() - self._store.received_at_s(rank)
        return max(0.0, age_s - self._records_age_s(rank))

    def heat(self, columns: int, rows: int, phase: Phase) -> HeatMap:
        """Return times of steps or of one phase of them, ranks by steps."""
        return heat_map(self._store.tables, columns, rows, phase)

    def typical_step_s(self) -> float | None:
        """Return the median duration of the newest steps."""
        return typical_step_s(self._store.tables)
