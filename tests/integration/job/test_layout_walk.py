"""Every layout changes into every other one in the middle of a run, from memory."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.snapshot.memory.erasure_group import ErasureGroup
from keepstep.checkpoint.snapshot.memory.memory_source import Holder, MemorySource
from keepstep.checkpoint.snapshot.memory.messages import OpenGeneration
from tests.integration.checkpoint.servers import SECRET, Server
from tests.integration.job.layout_ranks import LAYOUTS, Visit, run_rank, undisturbed_losses
from tests.ranks import run_ranks

RANKS_OF_A = 3
TOLERANCE = 1e-4
"""Relative: layouts add in another order. A wrong share or state shows a hundred times as much."""


def tour(layouts: Sequence[str]) -> list[str]:
    """Return a tour on which every layout changes into every other one, and back at once.

    Only where it goes on from the next layout, it returns later.
    """
    first, *others = layouts
    if not others:
        return [first]
    visited = [first, *tour(others), first]
    for other in others[1:]:
        visited += [other, first]
    return visited


def visits_of(names: Sequence[str]) -> list[Visit]:
    """Return visits that show for each layout that comes back what it computes in both of them.

    Before it is left for another one and back, it tries the step that it commits when it is back.
    """
    visits = []
    for number, name in enumerate(names):
        goes_and_comes = names[number + 2 : number + 3] == [name]
        is_between = number > 0 and names[number - 1 : number] == names[number + 1 : number + 2]
        visits.append(
            Visit(layout=name, commits=not is_between, tries=goes_and_comes or is_between)
        )
    return visits


def test_tour_has_every_change_and_both_ways_of_each_at_once_but_for_one_a_layout() -> None:
    names = tour("abcdefgh")
    changes = list(itertools.pairwise(names))
    assert sorted(changes) == sorted(itertools.permutations("abcdefgh", 2))
    back = {(a, b) for a, b, c in zip(names, names[1:], names[2:], strict=False) if a == c}
    assert len(back) == 22


class Nodes:
    """Two nodes' snapshot servers, and what the job's leader does with them."""

    def __init__(self, directory: Path) -> None:
        self.servers: list[Server] = []
        for name, ranks in (("a", RANKS_OF_A), ("b", 1)):
            (directory / name).mkdir()
            self.servers.append(Server(directory / name, ranks))
        self.generation = 0
        self.ranks = 0
        self.committed: SnapshotId | None = None
        self.holders: list[Holder] = []

    def open(self, ranks: int) -> dict[str, Any]:
        """Open a generation that resumes from the last snapshot; return what its ranks hear."""
        resume, holders = self.committed, self.holders
        self.generation += 1
        self.ranks = ranks
        for server in self._present:
            group = ErasureGroup(
                generation=self.generation, addresses=(server.address,), position=0, parity=0
            )
            server.ask(OpenGeneration(group=group))
            server.commit(resume or SnapshotId(self.generation, -1))
        return {
            "servers": [server.local for server in self.servers],
            "secret": SECRET.hex(),
            "ranks_of_a": RANKS_OF_A,
            "resume": [resume.generation, resume.step] if resume else None,
            "holders": [
                {
                    "node": "ab"[number], "host": "", "nproc": len(holder.ranks),
                    "first_rank": holder.ranks[0], "agent": "", "server": holder.address,
                }
                for number, holder in enumerate(holders)
            ],
        }  # fmt: skip

    def commit(self, step: int) -> None:
        """Commit a snapshot that all ranks have sealed."""
        snapshot = SnapshotId(self.generation, step)
        for server in self._present:
            server.wait_until_protected(snapshot)
            server.commit(snapshot)
        self.committed = snapshot
        self.holders = [
            Holder(server.local, tuple(range(first, min(first + RANKS_OF_A, self.ranks))))
            for first, server in zip((0, RANKS_OF_A), self._present, strict=False)
        ]

    def state(self) -> dict[str, bytes]:
        """Return all of the model's and the optimizers' state in the last snapshot."""
        assert self.committed is not None
        with contextlib.closing(
            MemorySource(self.committed, self.holders, SECRET, rank=0)
        ) as source:
            specs = {key: spec for key, spec in source.tensors.items() if key[:5] != "rank/"}
            values = {
                key: np.empty((*spec.shape, numpy_dtype(spec.dtype).itemsize), np.uint8)
                for key, spec in specs.items()
            }
            source.read([
                BoxRequest(key, Box.whole(specs[key].shape), value.reshape(-1).data)
                for key, value in values.items()
            ])  # fmt: skip
            documents = {
                f"options of {name}": json.dumps(group["options"]).encode()
                for group in source.documents["optim/groups"]
                for name in group["parameters"]
            }
        return {key: value.tobytes() for key, value in values.items()} | documents

    @property
    def _present(self) -> list[Server]:
        return self.servers if self.ranks > RANKS_OF_A else self.servers[:1]

    def close(self) -> None:
        for server in self.servers:
            server.close()


def lead(nodes: Nodes, store: TCPStore, visits: Sequence[Visit]) -> Iterator[str]:
    """Lead the ranks through all generations; yield what is wrong."""
    steps = 0
    for generation, visit in enumerate(visits, 1):
        before = nodes.state() if nodes.committed else None
        opened = nodes.open(visit.ranks)
        store.set(f"opened/{generation}", json.dumps(opened))
        for step in (steps, steps + 1) if visit.commits else (steps,):
            if step == 0:
                continue
            store.wait([f"sealed/{generation}/{step}/{rank}" for rank in range(visit.ranks)])
            nodes.commit(step)
            if step == steps:
                after = nodes.state()
                wrong = {
                    name for name in after if before is None or after[name] != before.get(name)
                }
                if wrong or (before is not None and before.keys() != after.keys()):
                    previous = visits[generation - 2].layout
                    yield f"{previous} to {visit.layout}: {sorted(wrong)[:3]} differ"
            store.set(f"committed/{generation}/{step}", "")
        steps += visit.commits


# What was restored is compared at a low priority in each visit, before anything is committed.
@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_every_layout_changes_into_every_other_one_in_the_middle_of_a_run(tmp_path: Path) -> None:
    first, by_way_of, *_, last = LAYOUTS
    # Once more, so that the last one comes back, too, and others go on from what it computed.
    names = [*tour(list(LAYOUTS)), last, by_way_of, last, first]
    visits = visits_of(names)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wrong: list[str] = []
    with contextlib.closing(Nodes(tmp_path)) as nodes:

        def lead_all() -> None:
            try:
                wrong.extend(lead(nodes, store, visits))
            except Exception as error:  # noqa: BLE001 - the ranks would wait for it
                wrong.append(repr(error))
                nodes.close()

        leader = threading.Thread(target=lead_all, daemon=True)
        leader.start()
        run_ranks(run_rank, (store.port, visits), nprocs=4)
        leader.join()
    assert not wrong
    check_losses(store, visits)


def check_losses(store: TCPStore, visits: Sequence[Visit]) -> None:
    expected = undisturbed_losses(sum(visit.commits for visit in visits) + 1)
    steps = 0
    tried: dict[tuple[str, int], str] = {}
    came_back = set()
    for generation, visit in enumerate(visits, 1):
        for number in range(1, 1 + visit.commits + visit.tries):
            step = steps + number
            loss = store.get(f"loss/{generation}/{step}").decode()
            where = (generation, visit, step)
            assert float.fromhex(loss) == pytest.approx(expected[step - 1], rel=TOLERANCE), where
            before = tried.setdefault((visit.layout, step), loss)
            if before is not loss:
                came_back.add(visit.layout)
                # It came back by way of another layout, which had all of the state meanwhile.
                assert loss == before, where
        steps += visit.commits
    assert came_back == set(LAYOUTS)
