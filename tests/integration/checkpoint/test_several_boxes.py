"""Tests of ranks that have several boxes of a tensor: in memory, rebuilt, restored and stored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.live.copier import Snapshotter
from keepstep.checkpoint.live.fills import fill
from keepstep.checkpoint.live.restore import plan_fills
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.checkpoint.snapshot.memory.memory_source import Holder, MemorySource
from keepstep.checkpoint.snapshot.memory.messages import (
    Persisted,
    PersistPart,
    PersistTask,
    Published,
    PublishManifest,
    RankHolder,
)
from tests.integration.checkpoint.servers import SECRET, Cluster

WHOLE = torch.arange(64.0).view(8, 8)

# Two ranks' slices of two parts, as of a gate and an up projection.
HELD = [[Box((2 * r, 0), (2, 8)), Box((4 + 2 * r, 0), (2, 8))] for r in range(2)]


def live(boxes: Sequence[Box], whole: torch.Tensor = WHOLE) -> list[LiveTensor]:
    return [LiveTensor("model/w", (8, 8), box, whole[box.slices].clone()) for box in boxes]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with one rank each, and a committed snapshot of step 3."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), 2, 1)
    with contextlib.closing(cluster):
        generation = cluster.begin(1)
        for rank, server in enumerate(cluster.living):
            with contextlib.closing(SnapshotClient(server.local, SECRET)) as client:
                snapshotter = Snapshotter(client, generation, rank, torch.device("cpu"))
                snapshotter.start(3, live(HELD[rank]), {"model/tied": {}})
                snapshotter.wait()
                snapshotter.close()
        cluster.commit(3)
        yield cluster


def check_restored(cluster: Cluster, holders: Sequence[Holder]) -> None:
    """Restore into boxes of which one overlaps what each rank had of each part."""
    source = MemorySource(SnapshotId(cluster.generation, 3), holders, SECRET, rank=0)
    boxes = [Box((1, 0), (2, 8)), Box((3, 0), (4, 3))]
    state = live(boxes, torch.zeros(8, 8))
    with contextlib.closing(source):
        fill(plan_fills(LiveState(tuple(state), {}), source), source)
    for tensor in state:
        assert torch.equal(tensor.data, WHOLE[tensor.box.slices])


@pytest.mark.parametrize("near", [True, False])
def test_several_boxes_are_restored_from_memory(cluster: Cluster, near: bool) -> None:
    check_restored(
        cluster,
        [
            Holder(server.local if near and rank == 0 else server.address, (rank,))
            for rank, server in enumerate(cluster.living)
        ],
    )


def test_several_boxes_are_stored_from_memory(cluster: Cluster, tmp_path: Path) -> None:
    snapshot = SnapshotId(cluster.generation, 3)
    for part, server in enumerate(cluster.living):
        holders = tuple(
            RankHolder(None if other is server else other.address, (rank,))
            for rank, other in enumerate(cluster.living)
        )
        task = PersistTask(str(tmp_path), snapshot, snapshot.generation, "a-1", holders)
        server.ask(PersistPart(task=task, part=part))
    listings = tuple(server.wait_for_event(Persisted).listing for server in cluster.living)
    publisher = cluster.living[1]
    publisher.ask(PublishManifest(task=task, listings=listings))
    publisher.wait_for_event(Published)
    model = torch.nn.ParameterDict({"w": torch.zeros(8, 8)})
    assert checkpoint.load(str(tmp_path), {"model": model}) == 3
    assert torch.equal(model["w"], WHOLE)


def test_several_boxes_of_a_lost_node_are_rebuilt(cluster: Cluster) -> None:
    addresses = [server.address for server in cluster.living]
    check_restored(cluster, cluster.rebuild(3, addresses, lost=[1]))


def test_several_fragments_are_saved_and_loaded(tmp_path: Path) -> None:
    """Also into other fragments, and where the boxes together are less than their surroundings."""
    buffer = WHOLE.reshape(-1)
    state = {"w": checkpoint.FlatFragment(buffer.clone(), (8, 8))}
    checkpoint.save(str(tmp_path), state, step=1)
    into = torch.zeros(20)
    checkpoint.load(str(tmp_path), {"w": checkpoint.FlatFragment(into, (8, 8), 13)})
    assert torch.equal(into, buffer[13:33])
    whole = torch.zeros(8, 8)
    checkpoint.load(str(tmp_path), {"w": whole})
    assert torch.equal(whole, WHOLE)


def test_a_fragment_next_to_the_whole_tensor_is_refused_by_name(tmp_path: Path) -> None:
    state = {"a": {"w": torch.ones(8, 8)}, "a/w": checkpoint.FlatFragment(torch.ones(9), (8, 8), 5)}
    with pytest.raises(LayoutMismatch, match="a/w is in the state in boxes that overlap"):
        checkpoint.save(str(tmp_path), state, step=1)
    twice = {"a": {"w": torch.ones(8, 8)}, "a/w": torch.ones(8, 8)}
    with pytest.raises(LayoutMismatch, match="a/w is in the state twice"):
        checkpoint.save(str(tmp_path), twice, step=1)
