"""Claims about a watch that receives summaries: of whom, and of what, it knows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from keepstep.monitor.diagnosis.tables import Digest
from keepstep.monitor.records import RECORD, Ending
from keepstep.monitor.telemetry import record_history
from keepstep.monitor.telemetry.record_history import RankState
from keepstep.monitor.tree.summary import Summary
from keepstep.monitor.watch import watch as watch_module
from keepstep.monitor.watch.watch import Watch
from tests.integration.monitor.parts import FixedDiagnosis, Probe
from tests.integration.monitor.sample import Plan, SampleReader

PLAN = Plan(ranks=4, steps=40, step_s=0.1)


class Clock:
    """Begins when the job does."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Reader(SampleReader):
    """Reads the rings of ranks as they are at a time, created at a time, alive or not.

    What is dead was so before anybody has read it.
    """

    def __init__(
        self, clock: Clock, node: str, ranks: Sequence[int], created_s: float, *, is_alive: bool
    ) -> None:
        super().__init__(PLAN, 1000.0, node, ranks, clock)
        self._created_s = created_s
        self._is_alive = is_alive

    def read(self) -> Any:
        return [
            replace(
                one,
                created_s=self._created_s,
                incarnation=self.node,
                records=replace(one.records, is_alive=self._is_alive),
            )
            for one in super().read()
        ]


def daemon(
    clock: Clock, node: str, ranks: Sequence[int], created_s: float = 999.0, is_alive: bool = True
) -> Watch:
    reader = Reader(clock, node, ranks, created_s, is_alive=is_alive)
    return Watch(node, reader, Probe(), None, now_s=clock)


def poll(root: Watch, child: Watch, *, records: bool = True) -> None:
    """Have a root receive what a child has new, as its cursor says."""
    (cursor,) = root.child_registry.cursors([child.node], 1000 if records else 0).values()
    child.read()
    child.digest()
    root.receive(child.node, child.summary(cursor, 64))


def root_of(clock: Clock) -> tuple[Watch, FixedDiagnosis]:
    diagnosis = FixedDiagnosis()
    return Watch("root", None, Probe(), diagnosis, now_s=clock), diagnosis


def digested(root: Watch, diagnosis: FixedDiagnosis) -> list[Digest]:
    """Return the digests that reach the diagnosis in the next round."""
    diagnosis.digests.clear()
    root.digest()
    root.diagnose()
    return diagnosis.digests


def test_groups_of_a_child_that_was_silent_are_known_again_when_it_answers() -> None:
    """Collectives of a group that was dropped were invisible for the rest of the job."""
    clock = Clock()
    root, _ = root_of(clock)
    child = daemon(clock, "a", range(4))
    clock.now_s += 1.0
    poll(root, child)
    assert root.rank_views.communicators
    clock.now_s += 61.0
    root.digest()
    assert not root.rank_views.communicators
    poll(root, child)
    assert root.rank_views.communicators


@pytest.mark.parametrize("is_alive", [True, False], ids=["both alive", "both dead"])
def test_two_nodes_with_rings_of_one_rank_do_not_take_it_from_each_other(is_alive: bool) -> None:
    """Each time all waiting digests were dropped, those of others too."""
    for order in itertools.permutations(("old", "new", "other")):
        clock = Clock()
        root, diagnosis = root_of(clock)
        children = {
            "old": daemon(clock, "old", [0], created_s=900.0, is_alive=is_alive),
            "new": daemon(clock, "new", [0], created_s=999.0, is_alive=is_alive),
            "other": daemon(clock, "other", [1, 2, 3]),
        }
        clock.now_s += 1.0
        for name in order:
            poll(root, children[name])
        for _ in range(3):
            clock.now_s += 1.0
            for name in order:
                poll(root, children[name])
            assert root.locate_rank(0) == (None, "new")
            ranks = {int(row["rank"]) for one in digested(root, diagnosis) for row in one.ranks}
            assert {1, 2, 3} <= ranks


def test_rank_that_has_moved_is_not_taken_from_a_summary_without_states() -> None:
    """The dead process of a departed node was diagnosed as that of the node that has the rank."""
    clock = Clock()
    root, diagnosis = root_of(clock)
    old = daemon(clock, "old", [0], created_s=900.0, is_alive=False)
    new = daemon(clock, "new", [0, 1, 2, 3], created_s=999.0)
    clock.now_s += 1.0
    poll(root, old)
    poll(root, new)
    digested(root, diagnosis)
    clock.now_s += 1.0
    poll(root, old, records=False)
    rows = [int(row["rank"]) for one in digested(root, diagnosis) for row in one.ranks]
    assert 0 not in rows
    assert root.locate_rank(0) == (None, "new")


def test_summary_costs_a_root_no_more_the_more_ranks_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each summary looked at every known rank: the square of their number in every round."""
    visited = 0
    newest_of = record_history.newest_of

    def count(states: Iterable[RankState]) -> RankState | None:
        def counted() -> Iterator[RankState]:
            nonlocal visited
            for state in states:
                visited += 1
                yield state

        return newest_of(counted())

    for module in (record_history, watch_module):
        monkeypatch.setattr(module, "newest_of", count)

    def visited_by_a_round(nodes: int) -> int:
        nonlocal visited
        root, _ = root_of(Clock())
        for read_at_s in (1.0, 2.0):
            visited = 0
            for rank in range(nodes):
                root.receive(f"node-{rank}", summary_of_rank(rank, read_at_s))
        return visited

    # The state in each summary, the newest known one, and at most once those of all ranks.
    assert 0 < visited_by_a_round(8) <= 3 * 8
    assert 0 < visited_by_a_round(64) <= 3 * 64


def summary_of_rank(rank: int, read_at_s: float) -> Summary:
    """Return what a daemon reports that runs one rank; rings were created in the order of ranks."""
    state = RankState(
        rank=rank, node=f"node-{rank}", pid=1, incarnation="i", is_alive=True, ending=Ending.NONE,
        read_at_s=read_at_s, progress_at_s=0.0, created_at_s=float(rank),
    )  # fmt: skip
    return Summary(
        incarnation="i", number=int(read_at_s), present=(rank,),
        ranks=((state, np.empty(0, RECORD)),), communicators=(), nodes=(),
    )  # fmt: skip
