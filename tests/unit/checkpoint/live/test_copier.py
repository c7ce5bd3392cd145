"""Claims about the copy of live state into shared memory: it holds no memory that was released."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from keepstep.checkpoint.errors import StateChanged
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.live.copier import Snapshotter
from keepstep.checkpoint.live.tensors import describe
from keepstep.checkpoint.snapshot.arena import Arena
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient


class ScriptedClient:
    """Gives buffers by a script: which one to write next, and which ones are left then."""

    def __init__(self, script: list[tuple[int, set[int]]]) -> None:
        self._script = script
        self.sealed: list[tuple[object, ...]] = []
        self._arenas: dict[int, Arena] = {}

    def begin(
        self,
        snapshot: SnapshotId,
        rank: int,
        nbytes: int,
        *,
        discard_uncommitted: bool,
        before_unmap: Callable[[int], None],
    ) -> tuple[int, Arena]:
        number, left = self._script.pop(0)
        for dropped in self._arenas.keys() - left:
            before_unmap(dropped)
            self._arenas.pop(dropped).close()
        if number not in self._arenas:
            self._arenas[number] = Arena.create(nbytes)
        return number, self._arenas[number]

    def seal(self, *arguments: object) -> None:
        self.sealed.append(arguments)

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()


def mapped_buffers() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:keepstep-arena")


def test_a_buffer_that_the_server_released_is_unmapped() -> None:
    """A third buffer is used while a checkpoint is stored, and released afterwards."""
    before = mapped_buffers()
    client = ScriptedClient([(1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (1, {1, 2}), (2, {1, 2})])
    snapshotter = Snapshotter(cast(SnapshotClient, client), 1, 0, torch.device("cpu"))
    tensors = [describe("w", torch.ones(2**18))]
    counts = []
    for step in range(5):
        snapshotter.start(step, tensors, {})
        snapshotter.wait()
        counts.append(mapped_buffers() - before)
    snapshotter.close()
    client.close()
    assert counts == [1, 2, 3, 2, 2]
    assert mapped_buffers() == before


def test_whatever_a_copy_raises_is_raised_to_who_waits_for_it() -> None:
    """Another kind of error ended the thread, and who waited did so for ever."""
    client = ScriptedClient([(1, {1})])
    snapshotter = Snapshotter(cast(SnapshotClient, client), 1, 0, torch.device("cpu"))
    tensors = [describe("w", torch.ones(8))]
    snapshotter.start(0, tensors, {"unknown": cast(Json, object())})
    with pytest.raises(TypeError, match="object"):
        snapshotter.wait()
    snapshotter.start(1, tensors, {})
    snapshotter.wait()
    snapshotter.close()
    client.close()


@pytest.mark.parametrize("writes_here", [True, False])
def test_a_copy_that_is_torn_on_any_rank_is_sealed_on_none_that_agrees(writes_here: bool) -> None:
    """And the rank that knows it takes part in the agreement: the others wait for it there."""
    client = ScriptedClient([(1, {1})])
    snapshotter = Snapshotter(cast(SnapshotClient, client), 1, 0, torch.device("cpu"))
    data = torch.ones(8)
    told: list[bool] = []

    def begin(*arguments: Any, **options: Any) -> tuple[int, Arena]:
        if writes_here:
            data.add_(1)
        return ScriptedClient.begin(client, *arguments, **options)

    client.begin = begin  # type: ignore[method-assign]

    def agree(is_unchanged: bool) -> bool:
        told.append(is_unchanged)
        return False

    snapshotter.start(0, [describe("w", data)], {}, agree=agree)
    with pytest.raises(StateChanged):
        snapshotter.wait()
    assert told == [not writes_here]
    assert client.sealed == []
    snapshotter.close()
    client.close()
