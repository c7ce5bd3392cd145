"""Tests of a snapshot that three nodes' servers plan and store together, from memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.format.content_check import check_content
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.live.copier import Snapshotter
from keepstep.checkpoint.live.tensors import LiveTensor
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.checkpoint.snapshot.memory.messages import (
    EndPersist,
    Persisted,
    PersistFailed,
    PersistPart,
    PersistTask,
    Published,
    PublishManifest,
    RankHolder,
)
from tests.integration.checkpoint.servers import SECRET, Cluster, Server

NODES, RANKS_PER_NODE = 3, 4
RANKS = NODES * RANKS_PER_NODE
"""Two planners: ranks 0 and 8, on the first node and on the last."""

WHOLE = {
    # A chunk of 1 MiB has the rows of six ranks, on two nodes.
    **{f"model/rows{number}": torch.randn(RANKS * 48, 1024) for number in range(3)},
    "model/columns": torch.randn(64, RANKS * 8),
    "model/all": torch.randn(5, 7),
    "model/expert": torch.randn(9),
}
EXPERT = 6
"""The one rank that has the expert."""


def live(rank: int) -> list[LiveTensor]:
    """Return a rank's rows, its columns, what all ranks have, and the expert if it has that."""
    tensors = []
    for key, whole in WHOLE.items():
        if "expert" in key and rank != EXPERT:
            continue
        box = Box.whole(whole.shape)
        if "rows" in key:
            box = Box((rank * 48, 0), (48, 1024))
        elif "columns" in key:
            box = Box((0, rank * 8), (64, 8))
        tensors.append(LiveTensor(key, tuple(whole.shape), box, whole[box.slices].clone()))
    return tensors


def take(cluster: Cluster, step: int) -> None:
    for position, server in enumerate(cluster.living):
        for rank in cluster.ranks(position):
            with contextlib.closing(SnapshotClient(server.local, SECRET)) as client:
                snapshotter = Snapshotter(client, cluster.generation, rank, torch.device("cpu"))
                documents = {"values": {"epoch": step}, f"rank/{rank}/note": rank}
                snapshotter.start(step, live(rank), documents)
                snapshotter.wait()
                snapshotter.close()
    cluster.commit(step)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, NODES, RANKS_PER_NODE)
    with contextlib.closing(cluster):
        cluster.begin(1)
        take(cluster, 1)
        yield cluster


def task(cluster: Cluster, server: Server, url: Path, step: int, attempt: str) -> PersistTask:
    holders = tuple(
        RankHolder(None if other is server else other.address, tuple(cluster.ranks(position)))
        for position, other in enumerate(cluster.living)
    )
    snapshot = SnapshotId(cluster.generation, step)
    return PersistTask(str(url), snapshot, snapshot.generation, attempt, holders)


def begin(cluster: Cluster, position: int, url: Path, step: int = 1, attempt: str = "a-1") -> None:
    server = cluster.living[position]
    server.ask(PersistPart(task=task(cluster, server, url, step, attempt), part=position))


def store(cluster: Cluster, url: Path, step: int, attempt: str) -> None:
    """Store a snapshot; the node in the middle, which plans no share, publishes it."""
    for position in range(NODES):
        begin(cluster, position, url, step, attempt)
    listings = []
    for server in cluster.living:
        ended: Persisted | PersistFailed = server.wait_for_event(Persisted, PersistFailed)
        # An attempt that was given up before may end now.
        while ended.attempt != attempt:
            ended = server.wait_for_event(Persisted, PersistFailed)
        assert isinstance(ended, Persisted), ended.reason
        listings.append(ended.listing)
    publisher = cluster.living[1]
    publisher.ask(
        PublishManifest(task=task(cluster, publisher, url, step, attempt), listings=tuple(listings))
    )
    publisher.wait_for_event(Published)
    for server in cluster.living:
        server.ask(EndPersist(attempt=attempt))


def check_stored(url: Path, step: int) -> None:
    source = StoredCheckpoint.open(open_storage(str(url)))
    source.verify()
    model = torch.nn.ParameterDict(
        {key.removeprefix("model/"): torch.zeros_like(whole) for key, whole in WHOLE.items()}
    )
    assert checkpoint.load(str(url), {"model": model}) == step
    for key, whole in WHOLE.items():
        assert torch.equal(model[key.removeprefix("model/")], whole)
    assert check_content(source)
    assert source.documents["values"] == {"epoch": step}
    assert [source.documents[f"rank/{rank}/note"] for rank in range(RANKS)] == list(range(RANKS))


def test_three_nodes_store_what_they_hold_together_and_again_after_a_step(
    cluster: Cluster, tmp_path: Path
) -> None:
    url = tmp_path / "stored"
    store(cluster, url, 1, "a-1")
    check_stored(url, 1)
    parts = [
        part
        for part in StoredCheckpoint.open(open_storage(str(url))).manifest.objects
        if part.is_part
    ]
    assert len(parts) == NODES
    take(cluster, 2)
    store(cluster, url, 2, "b-1")
    check_stored(url, 2)


def test_parts_fail_when_a_holder_is_gone(cluster: Cluster, tmp_path: Path) -> None:
    address = cluster.living[2].address
    tasks = [
        PersistPart(task=task(cluster, server, tmp_path / "stored", 1, "a-1"), part=position)
        for position, server in enumerate(cluster.living[:2])
    ]
    cluster.kill(2)
    for server, part in zip(cluster.living, tasks, strict=True):
        server.ask(part)
        failed = server.wait_for_event(PersistFailed)
        assert failed.attempt == "a-1"
        assert address in failed.reason


def test_parts_fail_when_a_planner_vanishes_while_others_wait_for_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Its agent has not begun the attempt, so that the others wait when it dies."""
    for position in (0, 1):
        begin(cluster, position, tmp_path / "stored")
    # They serve others meanwhile.
    snapshot = SnapshotId(cluster.generation, 1)
    for position, server in enumerate(cluster.living):
        with contextlib.closing(SnapshotClient(server.address, SECRET)) as client:
            assert client.index(snapshot, cluster.ranks(position)[0]).entries
    waiting = cluster.living[:2]
    cluster.kill(2)
    for server in waiting:
        assert "snapshot server" in server.wait_for_event(PersistFailed).reason


def test_an_attempt_is_given_up_while_it_waits_and_the_next_one_stores(
    cluster: Cluster, tmp_path: Path
) -> None:
    url = tmp_path / "stored"
    for position in (0, 1):
        begin(cluster, position, url)
    for server in cluster.living:
        server.ask(EndPersist(attempt="a-1"))
    store(cluster, url, 1, "b-1")
    check_stored(url, 1)
