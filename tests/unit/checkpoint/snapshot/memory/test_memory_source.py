"""Claims about restoring from memory: whose indexes are fetched, and whose are waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from keepstep.checkpoint.format.layout.boxes import Box, Entry, Json, ShardIndex
from keepstep.checkpoint.format.layout.documents import GROUPS, SCALARS, TIED
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.live.allocation import allocate
from keepstep.checkpoint.live.capture import LiveStateReader
from keepstep.checkpoint.live.fills import fill
from keepstep.checkpoint.live.restore import plan_fills
from keepstep.checkpoint.snapshot.memory import memory_source
from keepstep.checkpoint.snapshot.memory.memory_source import Holder, MemorySource, nearest_first
from keepstep.checkpoint.snapshot.memory.messages import ShardBox

OLD_RANKS, ROWS = 64, 640
SLOTS = ("model/weight", "optim/weight/exp_avg")


class Servers:
    """Stands for all snapshot servers: answers by what each rank holds, and notes the questions."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = boxes
        self.documents: Sequence[Mapping[str, Json]] = [{SCALARS: {}, TIED: {}}] * len(boxes)
        self.asked: list[int] = []
        self.waited_for: list[int] = []

    def __call__(self, address: str, secret: bytes) -> Servers:
        return self

    def index(self, snapshot: SnapshotId, rank: int, *, wait: bool = False) -> ShardIndex:
        self.asked.append(rank)
        if wait:
            self.waited_for.append(rank)
        box = self.boxes[rank]
        entries = tuple(
            Entry(
                key=key,
                dtype="float32",
                global_shape=(ROWS,),
                box=box,
                byte_offset=number * box.size * 4,
                nbytes=box.size * 4,
            )
            for number, key in enumerate(SLOTS)
        )
        return ShardIndex(2 * box.size * 4, entries, self.documents[rank])

    def read(
        self, snapshot: SnapshotId, boxes: Sequence[ShardBox], into: Sequence[memoryview]
    ) -> None:
        for wanted, buffer in zip(boxes, into, strict=True):
            first = wanted.box.offset[0]
            values = np.arange(first, first + wanted.box.size, dtype=np.float32)
            buffer.cast("B")[:] = values.view(np.uint8).data

    def close(self) -> None:
        pass


def sharded(ranks: int) -> list[Box]:
    """Return equal pieces, as FSDP has them."""
    return [
        Box((ROWS * r // ranks,), (ROWS * (r + 1) // ranks - ROWS * r // ranks,))
        for r in range(ranks)
    ]


def source_of(
    monkeypatch: pytest.MonkeyPatch,
    boxes: Sequence[Box],
    rank: int,
    world_size: int,
    rebuilt: Sequence[int] = (),
) -> tuple[Servers, MemorySource]:
    servers = Servers(boxes)
    monkeypatch.setattr(memory_source, "SnapshotClient", servers)
    holders = [Holder(f"tcp:{r}", (r,), rebuilds=r in rebuilt) for r in range(len(boxes))]
    return servers, MemorySource(SnapshotId(1, 1), holders, b"", rank=rank, world_size=world_size)


def test_a_rank_whose_layout_has_not_changed_fetches_one_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here each rank holds all of the tensor, as with DDP."""
    whole = [Box((0,), (ROWS,))] * OLD_RANKS
    servers, source = source_of(monkeypatch, whole, 5, OLD_RANKS, rebuilt=[9])
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(ROWS))
    optimizer = torch.optim.AdamW(model.parameters())
    allocate(model, [optimizer], source)
    fill(plan_fills(LiveStateReader(model, [optimizer]).capture(), source), source)
    assert model.weight.tolist() == list(range(ROWS))
    assert optimizer.state[model.weight]["exp_avg"].tolist() == list(range(ROWS))
    assert (servers.asked, servers.waited_for) == ([5], [])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_nobody_is_asked_for_slots_that_the_nearest_rank_says_do_not_exist(
    monkeypatch: pytest.MonkeyPatch, momentum: float
) -> None:
    """All ranks were asked, and lost ones waited for: of frozen parameters, and under plain SGD."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(ROWS))
    model.frozen = nn.Parameter(torch.zeros(ROWS), requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    # Another rank may have updated it, and hold its slots.
    model.elsewhere = nn.Parameter(torch.zeros(ROWS))
    optimizer.add_param_group({"params": [model.elsewhere]})
    model.weight.grad = torch.ones(ROWS)
    optimizer.step()
    documents = LiveStateReader(model, [optimizer]).capture().documents
    whole = [Box((0,), (ROWS,))] * OLD_RANKS
    servers, source = source_of(monkeypatch, whole, 5, OLD_RANKS, rebuilt=[9])
    servers.documents = [documents] * OLD_RANKS
    slotless = ("frozen",) if momentum else ("weight", "frozen", "elsewhere")
    assert documents["optim/without slots"] == slotless
    assert set(source.slots(["weight", "frozen"])) == {"weight"}
    assert (servers.asked, servers.waited_for) == ([5], [])


def test_nobody_waits_for_a_rebuild_of_what_another_rank_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = [Box((0,), (ROWS,))] * 4
    for rank in range(4):
        servers, source = source_of(monkeypatch, whole, rank, 4, rebuilt=[2])
        assert set(source.slots(["weight"])) == {"weight"}
        read(source, whole[0])
        assert servers.waited_for == []


def read(source: MemorySource, box: Box) -> None:
    into = np.zeros(box.size, np.float32)
    source.read([BoxRequest("model/weight", box, into.view(np.uint8).data)])
    assert into.tolist() == list(range(box.offset[0], box.offset[0] + box.size))


def test_a_lost_shard_that_nobody_else_holds_is_waited_for_after_one_other_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boxes = sharded(OLD_RANKS)
    servers, source = source_of(monkeypatch, boxes, 7, OLD_RANKS, rebuilt=[7, 8])
    read(source, boxes[7])
    assert len(servers.asked) == 2
    assert servers.waited_for == [7]


@pytest.mark.parametrize("new_ranks", [8, 32, 60, 63, 65, 96, 128])
def test_ranks_of_another_number_fetch_about_as_many_indexes_as_they_need(
    monkeypatch: pytest.MonkeyPatch, new_ranks: int
) -> None:
    old = sharded(OLD_RANKS)
    for rank, box in enumerate(sharded(new_ranks)):
        servers, source = source_of(monkeypatch, old, rank, new_ranks)
        read(source, box)
        needed = sum(other.intersect(box) is not None for other in old)
        assert len(servers.asked) <= needed + 3, (rank, sorted(servers.asked))


@given(st.integers(1, 20), st.integers(0, 30), st.integers(1, 30), st.sets(st.integers(0, 19)))
def test_each_rank_is_asked_once_and_rebuilt_ones_last(
    ranks: int, rank: int, world_size: int, rebuilt: set[int]
) -> None:
    holders = {
        r: Holder("unix:x" if r % 3 else "tcp:x", (r,), rebuilds=r in rebuilt) for r in range(ranks)
    }
    ordered = nearest_first(holders, rank, world_size)
    assert sorted(ordered) == list(range(ranks))
    others = [r in rebuilt for r in ordered if r != rank]
    assert others == sorted(others)
    if rank in holders:
        assert ordered.index(rank) <= (1 if rank in rebuilt else 0)


def test_what_ranks_say_of_their_own_tensors_is_merged_over_those_that_were_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that takes over the parameters of two pipeline stages needs the options of both."""
    servers, source = source_of(monkeypatch, sharded(4), 1, 2)
    servers.documents = [
        {
            GROUPS: [{"parameters": [f"layer{rank}"], "options": {"lr": rank}}],
            SCALARS: {f"layer{rank}/step": rank},
            "trainer": {"step": rank},
        }
        for rank in range(4)
    ]
    read(source, Box((ROWS // 2,), (ROWS // 2,)))
    groups = {tuple(group["parameters"]): group["options"] for group in source.documents[GROUPS]}
    assert servers.asked == [1, 2, 3]
    assert groups == {(f"layer{rank}",): {"lr": rank} for rank in servers.asked}
    assert source.documents[SCALARS] == {f"layer{rank}/step": rank for rank in servers.asked}
    assert source.documents["trainer"] == {"step": 1}
