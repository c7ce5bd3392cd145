"""Property tests of a restore by all ranks: any layout, every stored byte read once at most.

Threads play the ranks. Sizes are made small, so that there are many units, batches and rounds. Real
processes do the same in tests/integration.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError, RankFailed
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.live.fills import Fill
from keepstep.checkpoint.live.tensors import LiveTensor, torch_dtype
from keepstep.checkpoint.ranks import shared_restore
from keepstep.checkpoint.ranks.shared_restore import RestoreTraffic, fill_together
from tests.examples import examples
from tests.unit.checkpoint.test_any_layout import (
    ITEMSIZES,
    DictStorage,
    Layout,
    Tensor,
    layouts,
    small_sizes,
    store,
    tensors,
)
from tests.unit.checkpoint.thread_ranks import ThreadRanks

__all__ = ["small_sizes"]


@dataclass
class RecordingStorage(DictStorage):
    """Notes what is read of data objects, and fails or changes a byte at one of these reads."""

    reads: list[tuple[str, int, int]] = field(default_factory=list)
    failing_read: int | None = None
    damages: bool = False
    lock: Any = field(default_factory=threading.Lock)

    def read_into(self, name: str, buffers: Sequence[memoryview], offset: int = 0) -> int:
        count = super().read_into(name, buffers, offset)
        with self.lock:
            number = len(self.reads)
            self.reads.append((name, offset, offset + count))
        if number == self.failing_read and not self.damages:
            raise CheckpointError("the storage does not answer")
        if number == self.failing_read:
            buffers[0][0] ^= 1
        return count


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "UNIT_NBYTES": 128, "_BATCH_NBYTES": 300, "_MESSAGE_NBYTES": 200, "_GROUP_NBYTES": 64,
        "_UNASKED_NBYTES": 0,
    }  # fmt: skip
    for name, value in sizes.items():
        monkeypatch.setattr(shared_restore, name, value)


def fill_of(tensor: Tensor, box: Box, *, is_transposed: bool) -> Fill:
    """Return a live tensor to fill, whose memory is in C order or in the order of Fortran."""
    dtype = torch_dtype(tensor.dtype)
    data = torch.zeros(box.shape, dtype=dtype)
    if is_transposed:
        data = torch.zeros(box.shape[::-1], dtype=dtype).permute(
            tuple(reversed(range(len(box.shape))))
        )
    return Fill(LiveTensor(tensor.key, tensor.shape, box, data), tensor.dtype, box)


def fills_of(layout: Layout, *, is_transposed: bool) -> list[list[Fill]]:
    return [
        [fill_of(tensor, box, is_transposed=is_transposed) for tensor, box in shards if box.size]
        for shards in layout
    ]


def content(live: torch.Tensor) -> bytes:
    return live.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def wanted_nbytes(stored: Sequence[Tensor], layout: Layout) -> int:
    """Return the size of what at least one rank wants."""
    total = 0
    for tensor in stored:
        wanted = np.zeros(tensor.shape, bool)
        for shards in layout:
            for other, box in shards:
                if other == tensor:
                    wanted[box.slices] = True
        total += int(wanted.sum()) * ITEMSIZES[tensor.dtype]
    return total


def check_read_once(storage: RecordingStorage) -> None:
    """Check that no byte of a data object was read twice, whoever read it."""
    end: dict[str, int] = {}
    for name, start, stop in sorted(storage.reads):
        assert start >= end.get(name, 0), f"{name} is read twice"
        end[name] = stop


def saved(layout: Layout) -> RecordingStorage:
    storage = RecordingStorage()
    store(storage, layout)
    return storage


def restored(
    storage: RecordingStorage, ranks: ThreadRanks, fills: Sequence[Fill]
) -> RestoreTraffic:
    return fill_together(lambda: fills, StoredCheckpoint.open(storage), ranks.group)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    small_nbytes=st.sampled_from([0, 24, 10**9]),
    unasked_nbytes=st.sampled_from([0, 150, 2**20]),
)
def test_ranks_restore_any_layout_together_and_read_no_byte_twice(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject, small_nbytes: int, unasked_nbytes: int
) -> None:
    monkeypatch.setattr(shared_restore, "_small_read_nbytes", lambda url: small_nbytes)
    monkeypatch.setattr(shared_restore, "_UNASKED_NBYTES", unasked_nbytes)
    stored = data.draw(tensors)
    storage = saved(data.draw(layouts(stored)))
    layout = data.draw(layouts(stored))
    fills = fills_of(layout, is_transposed=data.draw(st.booleans()))
    ranks = ThreadRanks(len(layout))
    results = ranks.run(
        lambda rank: fill_together(lambda: fills[rank], StoredCheckpoint.open(storage), ranks.group)
    )
    values = {tensor.key: tensor.values for tensor in stored}
    for own_fills in fills:
        for item in own_fills:
            live = item.tensor
            assert content(live.data) == values[live.key][live.box.slices].tobytes()
    check_read_once(storage)
    traffic = results[0]
    assert isinstance(traffic, RestoreTraffic)
    assert set(results) == {traffic}
    assert traffic.tensor_nbytes == wanted_nbytes(stored, layout)
    assert traffic.read_nbytes == sum(stop - start for _, start, stop in storage.reads)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), failing_read=st.integers(0, 30), damages=st.booleans())
def test_a_read_that_fails_on_one_rank_is_raised_on_all(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject, failing_read: int, damages: bool
) -> None:
    stored = data.draw(tensors)
    storage = saved(data.draw(layouts(stored)))
    layout = data.draw(layouts(stored))
    fills = fills_of(layout, is_transposed=False)
    ranks = ThreadRanks(len(layout))
    sources = [StoredCheckpoint.open(storage) for _ in layout]
    storage.failing_read, storage.damages = failing_read, damages
    results = ranks.run(lambda rank: fill_together(lambda: fills[rank], sources[rank], ranks.group))
    if len(storage.reads) <= failing_read:
        assert all(isinstance(result, RestoreTraffic) for result in results)
    elif len(layout) == 1:
        assert isinstance(results[0], CheckpointDamaged if damages else CheckpointError)
    elif damages:
        assert all(isinstance(result, CheckpointDamaged) for result in results)
    else:
        own = [type(result) is CheckpointError for result in results]
        assert sum(own) >= 1
        assert all(
            is_own or isinstance(result, RankFailed)
            for is_own, result in zip(own, results, strict=True)
        )


def test_memory_that_is_lacking_on_one_rank_ends_the_restore_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = Tensor("model/t0.weight", "float32", (64, 8))
    layout = [[(tensor, Box.whole(tensor.shape))] for _ in range(3)]
    storage = saved(layout)
    fills = fills_of(layout, is_transposed=False)
    ranks = ThreadRanks(3)
    of_size = shared_restore._Memory.of_size

    def lacking(memory: Any, nbytes: int) -> torch.Tensor:
        if ranks.rank() == 1 and nbytes:
            raise MemoryError("out of memory")
        return of_size(memory, nbytes)

    monkeypatch.setattr(shared_restore._Memory, "of_size", lacking)
    results = ranks.run(
        lambda rank: fill_together(lambda: fills[rank], StoredCheckpoint.open(storage), ranks.group)
    )
    assert [type(result) for result in results] == [RankFailed, MemoryError, RankFailed]


@pytest.mark.parametrize("unasked_nbytes", [0, 2**20])
@pytest.mark.parametrize(
    "step", ["_groups", "_task_messages", "_prepare", "_accept", "_pack", "_unpack"]
)
def test_what_fails_between_two_messages_on_one_rank_ends_the_restore_on_all(
    monkeypatch: pytest.MonkeyPatch, step: str, unasked_nbytes: int
) -> None:
    monkeypatch.setattr(shared_restore, "_UNASKED_NBYTES", unasked_nbytes)
    tensor = Tensor("model/t0.weight", "float32", (64, 8))
    layout = [[(tensor, Box.whole(tensor.shape))] for _ in range(3)]
    storage = saved(layout)
    fills = fills_of(layout, is_transposed=False)
    ranks = ThreadRanks(3)
    act = getattr(shared_restore._Participant, step)

    def failing(*arguments: Any) -> Any:
        if ranks.rank() == 1:
            raise MemoryError("out of memory")
        return act(*arguments)

    monkeypatch.setattr(shared_restore._Participant, step, failing)
    results = ranks.run(
        lambda rank: fill_together(lambda: fills[rank], StoredCheckpoint.open(storage), ranks.group)
    )
    if step == "_accept" and unasked_nbytes:
        assert all(isinstance(result, RestoreTraffic) for result in results), "nobody asks"
    else:
        assert [type(result) for result in results] == [RankFailed, MemoryError, RankFailed]


def test_messages_and_buffers_stay_within_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve replicas want all: what they receive together is many times a message's limit."""
    tensor = Tensor("model/t0.weight", "uint8", (4096, 2))
    layout = [[(tensor, Box.whole(tensor.shape))] for _ in range(12)]
    storage = saved(layout)
    fills = fills_of(layout, is_transposed=True)
    ranks = ThreadRanks(12)
    sizes: list[int] = []
    of_size = shared_restore._Memory.of_size

    def noting(memory: Any, nbytes: int) -> torch.Tensor:
        sizes.append(nbytes)
        return of_size(memory, nbytes)

    monkeypatch.setattr(shared_restore._Memory, "of_size", noting)
    results = ranks.run(
        lambda rank: fill_together(lambda: fills[rank], StoredCheckpoint.open(storage), ranks.group)
    )
    nbytes = math.prod(tensor.shape)
    assert results[0].sent_nbytes == 11 * nbytes
    assert max(sizes) <= 300
    expected = tensor.values.tobytes()
    assert all(content(item.tensor.data) == expected for own in fills for item in own)


def test_parts_that_overlap_are_cut_from_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = Tensor("model/t0.weight", "uint8", (64, 2))
    storage = saved([[(tensor, Box.whole(tensor.shape))]])
    layout = [[(tensor, Box((rank, 0), (64 - rank, 2)))] for rank in range(8)]
    fills = fills_of(layout, is_transposed=False)
    ranks = ThreadRanks(8)
    staged: list[int] = []
    read = StoredCheckpoint.read

    def noting(source: StoredCheckpoint, requests: Sequence[Any], *, past_cache: bool) -> None:
        staged.append(sum(request.into.nbytes for request in requests))
        read(source, requests, past_cache=past_cache)

    monkeypatch.setattr(StoredCheckpoint, "read", noting)
    ranks.run(
        lambda rank: fill_together(lambda: fills[rank], StoredCheckpoint.open(storage), ranks.group)
    )
    assert sum(staged) <= math.prod(tensor.shape)
    check_read_once(storage)
    for (item,) in fills:
        assert content(item.tensor.data) == tensor.values[item.tensor.box.slices].tobytes()


def test_small_tensors_of_one_pack_are_read_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by another rank would be many small reads instead of one."""
    monkeypatch.setattr(shared_restore, "_GROUP_NBYTES", 4096)
    stored = [Tensor(f"model/t{number}.bias", "float32", (2,)) for number in range(9)]
    layout = [[(tensor, Box.whole(tensor.shape)) for tensor in stored] for _ in range(4)]
    storage = saved(layout)
    fills = fills_of(layout, is_transposed=False)
    ranks = ThreadRanks(4)
    ranks.run(
        lambda rank: fill_together(lambda: fills[rank], StoredCheckpoint.open(storage), ranks.group)
    )
    packs = {name for name in storage.objects if "/packs/" in name}
    assert sorted(name for name, _, _ in storage.reads) == sorted(packs)


def test_a_rest_that_the_checkpoint_lacks_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = Tensor("model/t0.weight", "float32", (5, 4))
    storage = saved([[(tensor, Box.whole(tensor.shape))]])
    fills = []
    for first in (0, 3, 6):
        box = Box((first, 0), (3, 4))
        live = LiveTensor(tensor.key, (9, 4), box, torch.ones(3, 4))
        fills.append([Fill(live, "float32", box.intersect(Box.whole(tensor.shape)))])
    ranks = ThreadRanks(3)
    ranks.run(
        lambda rank: fill_together(lambda: fills[rank], StoredCheckpoint.open(storage), ranks.group)
    )
    padded = np.zeros((9, 4, 4), np.uint8)
    padded[:5] = tensor.values
    got = b"".join(content(item.tensor.data) for (item,) in fills)
    assert got == padded.tobytes()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_each_tensor_that_takes_the_same_stored_box_gets_its_values(
    monkeypatch: pytest.MonkeyPatch, is_transposed: bool
) -> None:
    """Tied weights are stored once, and loaded into modules where they are not tied."""
    tensor = Tensor("model/t0.weight", "uint8", (64, 8))
    box = Box.whole(tensor.shape)
    storage = saved([[(tensor, box)]])

    def of_another_type() -> Fill:
        data = torch.zeros(tensor.shape, dtype=torch.int32)
        return Fill(LiveTensor(tensor.key, tensor.shape, box, data), tensor.dtype, box)

    fills = [
        [
            of_another_type(),
            fill_of(tensor, box, is_transposed=is_transposed),
            fill_of(tensor, box, is_transposed=False),
        ]
        for _ in range(2)
    ]
    ranks = ThreadRanks(2)
    ranks.run(
        lambda rank: fill_together(lambda: fills[rank], StoredCheckpoint.open(storage), ranks.group)
    )
    for item in (item for own in fills for item in own):
        assert content(item.tensor.data.to(torch.uint8)) == tensor.values.tobytes()
    check_read_once(storage)
