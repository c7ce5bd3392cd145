"""Claims about metadata that one rank reads for all; the ranks are threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMissing,
    RankFailed,
)
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.live.fills import Fill
from keepstep.checkpoint.live.tensors import LiveTensor
from keepstep.checkpoint.ranks import shared_metadata
from keepstep.checkpoint.ranks.shared_metadata import open_together
from keepstep.checkpoint.ranks.shared_restore import RestoreTraffic, fill_together
from tests.unit.checkpoint.test_any_layout import DictStorage, Tensor, small_sizes, store
from tests.unit.checkpoint.thread_ranks import ThreadRanks

__all__ = ["small_sizes"]

SMALL = [Tensor(f"model/s{number}", "float32", (5,)) for number in range(4)]
LARGE = [Tensor(f"model/l{number}", "float32", (64, 5)) for number in range(4)]


@dataclass
class CountingStorage(DictStorage):
    """Counts the reads of whole objects, which are metadata; some fail."""

    reads: Counter[str] = field(default_factory=Counter)
    failing: str = "nothing"
    lock: Any = field(default_factory=threading.Lock)

    def read(self, name: str, nbytes: int = 0) -> bytes:
        with self.lock:
            self.reads[name] += 1
        if self.failing in name:
            raise CheckpointError("the storage does not answer")
        return super().read(name, nbytes)

    def read_into(self, name: str, buffers: Sequence[memoryview], offset: int = 0) -> int:
        return DictStorage(objects=self.objects).read_into(name, buffers, offset)


@pytest.fixture
def storage() -> CountingStorage:
    """Storage in which four writers have stored a large and a small tensor each."""
    counting = CountingStorage()
    store(
        counting,
        [
            [(tensor, Box.whole(tensor.shape)) for tensor in (small, large)]
            for small, large in zip(SMALL, LARGE, strict=True)
        ],
    )
    counting.reads.clear()
    return counting


def load_all(count: int, storage: CountingStorage) -> list[Any]:
    """Load all tensors on so many ranks; check them."""
    ranks = ThreadRanks(count)

    def load(_: int) -> Any:
        source = open_together(storage, ranks.group, 1, 0)
        fills = []
        for tensor in (*SMALL, *LARGE):
            box = Box.whole(tensor.shape)
            live = LiveTensor(tensor.key, tensor.shape, box, torch.zeros(tensor.shape))
            fills.append(Fill(live, tensor.dtype, box))
        traffic = fill_together(lambda: fills, source, ranks.group)
        for tensor, item in zip((*SMALL, *LARGE), fills, strict=True):
            assert item.tensor.data.numpy().tobytes() == tensor.values.tobytes()
        return traffic

    return ranks.run(load)


@pytest.fixture(params=[0, 2**20], ids=["listings when needed", "listings at once"])
def listings_nbytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How large listings may be that rank 0 reads with the other metadata."""
    nbytes: int = request.param
    monkeypatch.setattr(shared_metadata, "_LISTINGS_NBYTES", nbytes)
    return nbytes


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_each_object_is_read_once_by_all_ranks_together(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    assert all(isinstance(result, RestoreTraffic) for result in load_all(count, storage))
    leaves = Counter({name.rpartition("/")[2]: reads for name, reads in storage.reads.items()})
    names = ["manifest.json", "zarr.json", "documents.json", "chunks.json"]
    listings = [f"{writer:06d}.json" for writer in range(4)]
    assert leaves == Counter([*names, *listings])


@pytest.mark.parametrize("count", [1, 3])
def test_large_listings_are_read_by_the_ranks_that_need_them(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(shared_metadata, "_LISTINGS_NBYTES", 0)
    assert all(isinstance(result, RestoreTraffic) for result in load_all(count, storage))
    assert {reads for name, reads in storage.reads.items() if "/parts/" in name} == {count}
    assert sum("/parts/" in name for name in storage.reads) == 4


def test_a_checkpoint_that_is_missing_is_so_for_all_ranks(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ThreadRanks(3)
    results = ranks.run(lambda _: open_together(storage, ranks.group, 2, 0))
    assert [type(result) for result in results] == [CheckpointMissing] * 3
    assert {str(result) for result in results} == {
        "dict://: there is no checkpoint of step 2 (steps there: 1)"
    }


@pytest.mark.usefixtures("listings_nbytes")
@pytest.mark.parametrize("leaf", ["documents.json", "chunks.json", "parts/000001.json"])
def test_damage_is_found_by_all_ranks(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch, leaf: str
) -> None:
    name = next(name for name in storage.objects if name.endswith(leaf))
    storage.objects[name] = storage.objects[name][:-1] + b" "
    results = load_all(3, storage)
    assert [type(result) for result in results] == [CheckpointDamaged] * 3
    assert all("does not match its checksum" in str(result) for result in results)


def test_a_listing_that_nobody_needs_may_be_damaged(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(name for name in storage.objects if name.endswith("parts/000001.json"))
    storage.objects[name] = storage.objects[name][:-1] + b" "
    ranks = ThreadRanks(2)
    tensor = SMALL[0]
    box = Box.whole(tensor.shape)

    def load(_: int) -> Any:
        live = LiveTensor(tensor.key, tensor.shape, box, torch.zeros(tensor.shape))
        source = open_together(storage, ranks.group, 1, 0)
        return fill_together(lambda: [Fill(live, tensor.dtype, box)], source, ranks.group)

    assert all(isinstance(result, RestoreTraffic) for result in ranks.run(load))


def test_storage_that_fails_for_rank_0_fails_the_load_of_all(storage: CountingStorage) -> None:
    storage.failing = "zarr.json"
    results = load_all(3, storage)
    assert [type(result) for result in results] == [CheckpointError, RankFailed, RankFailed]
    assert str(results[1]) == "rank 0: the storage does not answer"


@pytest.mark.usefixtures("listings_nbytes")
def test_a_listing_that_cannot_be_read_fails_the_load_of_all(storage: CountingStorage) -> None:
    storage.failing = "parts/000002.json"
    results = load_all(3, storage)
    assert [str(result) for result in results] == ["the storage does not answer"] * 3
