"""Claims about an erasure group: any loss up to the parity is rebuilt bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.live.copier import Snapshotter
from keepstep.checkpoint.live.tensors import LiveTensor, as_bytes
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.checkpoint.snapshot.memory.memory_source import Holder, MemorySource
from keepstep.checkpoint.snapshot.memory.messages import (
    SNAPSHOT_PROTOCOL,
    FinishProtection,
    ReadStripe,
    StripeBytes,
    Verify,
)
from keepstep.checkpoint.snapshot.parity.stripes import Stripes
from keepstep.checkpoint.snapshot.server.blocks import SnapshotIncomplete, receive_head
from keepstep.transport import Identity, connect
from tests.integration.checkpoint.servers import SECRET, Cluster, Server

RANKS_PER_NODE = 2


def take(
    cluster: Cluster, step: int, position: int, shards: Sequence[torch.Tensor], ranks: int = 2
) -> None:
    """Have the first ranks of a node take a snapshot."""
    node = cluster.nodes[position]
    assert node is not None
    for rank in cluster.ranks(position)[:ranks]:
        with contextlib.closing(SnapshotClient(node.local, SECRET)) as client:
            snapshotter = Snapshotter(client, cluster.generation, rank, torch.device("cpu"))
            tensor = LiveTensor(
                f"w{rank}", tuple(shards[rank].shape), Box.whole(shards[rank].shape), shards[rank]
            )
            snapshotter.start(step, [tensor], {f"rank/{rank}/note": "x" * (step + rank)})
            try:
                snapshotter.wait()
            finally:
                snapshotter.close()


def take_and_commit(cluster: Cluster, step: int, shards: Sequence[torch.Tensor]) -> None:
    for position in range(cluster.size):
        take(cluster, step, position, shards)
    cluster.commit(step)


def check(
    cluster: Cluster,
    step: int,
    holders: Sequence[Holder],
    shards: Sequence[torch.Tensor],
    only: Collection[int] = (),
) -> MemorySource:
    """Read everything back (or only these ranks' shards) and compare it bit for bit."""
    source = MemorySource(SnapshotId(cluster.generation, step), holders, SECRET, rank=0)
    with contextlib.closing(source):
        for rank, shard in enumerate(shards):
            if only and rank not in only:
                continue
            into = torch.empty_like(shard)
            source.read([BoxRequest(f"w{rank}", Box.whole(shard.shape), as_bytes(into))])
            assert torch.equal(into.view(torch.uint8), shard.view(torch.uint8))
            assert source.documents[f"rank/{rank}/note"] == "x" * (step + rank)
    return source


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), 4, RANKS_PER_NODE)
    yield cluster
    cluster.close()


def random_shards(seed: int, largest: int = 200_000) -> list[torch.Tensor]:
    """Unequal shards, some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, largest, (4 * RANKS_PER_NODE,), generator=generator)
    sizes[seed % len(sizes)] = 0
    return [torch.randn(int(n), generator=generator) for n in sizes]


LOSSES = [
    (parity, lost)
    for parity in (1, 2, 3)
    for count in range(1, parity + 1)
    for lost in itertools.combinations(range(4), count)
]


@pytest.mark.parametrize(("parity", "lost"), LOSSES)
def test_any_loss_up_to_the_parity_is_rebuilt_bit_for_bit(
    cluster: Cluster, parity: int, lost: tuple[int, ...]
) -> None:
    cluster.revive()
    cluster.begin(parity)
    shards = random_shards(parity * 100 + sum(2**position for position in lost))
    addresses = [server.address for server in cluster.living]
    take_and_commit(cluster, 5, shards)
    for position in lost:
        cluster.kill(position)
    source = check(cluster, 5, cluster.rebuild(5, addresses), shards)
    gone = [rank for position in lost for rank in range(position * 2, position * 2 + 2)]
    assert source.rebuilt_nbytes == sum(shards[rank].nbytes for rank in gone)


def damage(server: Server, shard: torch.Tensor) -> None:
    """Flip a bit in the middle of a shard in a server's memory."""
    wanted = bytes(as_bytes(shard))
    for path in Path(f"/proc/{server.process.pid}/fd").iterdir():
        if os.readlink(path).startswith("/memfd:keepstep-arena"):
            with path.open("r+b") as memory:
                at = memory.read().find(wanted)
                if at >= 0:
                    memory.seek(at + len(wanted) // 2)
                    memory.write(bytes([wanted[len(wanted) // 2] ^ 1]))
                    return
    raise AssertionError("the shard is not there")


def test_memory_that_changed_after_the_seal_is_rebuilt_from_parity(
    cluster: Cluster,
) -> None:
    cluster.revive()
    generation = cluster.begin(1)
    shards = random_shards(11)
    shards[3] = torch.randn(1000)
    addresses = [server.address for server in cluster.living]
    take_and_commit(cluster, 1, shards)
    snapshot = SnapshotId(generation, 1)
    for server in cluster.living:
        assert snapshot in server.ask(Verify()).protected
    damaged = cluster.nodes[1]
    assert damaged is not None
    damage(damaged, shards[3])
    holdings = damaged.ask(Verify())
    assert snapshot not in [sealed.snapshot for sealed in holdings.sealed]
    assert snapshot not in holdings.protected
    check(cluster, 1, cluster.rebuild(1, addresses, lost=[1]), shards)


def test_the_exchange_obeys_its_limit_and_rebuilding_has_none(tmp_path: Path) -> None:
    limit, nbytes = 20 * 10**6, 8 * 10**6
    with contextlib.closing(
        Cluster(tmp_path, 2, 1, options=("--exchange-limit", str(limit)))
    ) as cluster:
        cluster.begin(1)
        shards = [torch.randn(nbytes // 4) for _ in range(2)]
        addresses = [server.address for server in cluster.living]
        for position in range(2):
            take(cluster, 1, position, shards)
        began_s = time.monotonic()
        cluster.commit(1)
        # The kernel may let the first burst pass.
        assert time.monotonic() - began_s > 0.5 * nbytes / limit
        cluster.kill(1)
        check(cluster, 1, cluster.rebuild(1, addresses), shards)


def test_a_node_that_has_not_sealed_only_delays_the_others(cluster: Cluster) -> None:
    cluster.revive()
    generation = cluster.begin(1)
    shards = random_shards(7)
    for position in range(3):
        take(cluster, 1, position, shards)
    protected = [server.ask(FinishProtection()).protected for server in cluster.living[:3]]
    assert protected == [(), (), ()]
    take(cluster, 1, 3, shards)
    for server in cluster.living:
        server.wait_until_protected(SnapshotId(generation, 1))


def test_what_a_node_has_not_sealed_at_its_generations_end_is_not_waited_for(
    cluster: Cluster,
) -> None:
    """A recovery waited a second for it, whenever a rank was lost before it had sealed."""
    cluster.revive()
    snapshot = SnapshotId(cluster.begin(1), 1)
    server, *_ = cluster.living
    shards = random_shards(8)
    # What one of its two ranks has sealed is not of the node.
    take(cluster, 1, 0, shards, ranks=1)
    stripes = Stripes(cluster.size, 1)
    with connect(server.address, SNAPSHOT_PROTOCOL, Identity("peer", SECRET)) as peer:
        for stripe in range(cluster.size):
            if stripes.number(stripe, 0) < stripes.data:
                peer.send(ReadStripe(snapshot=snapshot, stripe=stripe))
                server.ask(FinishProtection())
                with pytest.raises(SnapshotIncomplete, match="step 1 was not sealed here before"):
                    receive_head(peer, StripeBytes)


def test_parity_follows_the_step_and_memory_does_not_grow(cluster: Cluster) -> None:
    cluster.revive()
    cluster.begin(1)
    addresses = [server.address for server in cluster.living]
    shards = [torch.zeros(2**18) for _ in range(4 * RANKS_PER_NODE)]
    state_nbytes = RANKS_PER_NODE * shards[0].nbytes
    for step in range(1, 6):
        shards = [torch.full((2**18,), float(step * 10 + rank)) for rank in range(len(shards))]
        take_and_commit(cluster, step, shards)
    held_nbytes = max(server.holdings().nbytes for server in cluster.living)
    assert held_nbytes <= 2 * state_nbytes * 4 / 3 + 2 * 2**20
    cluster.kill(2)
    check(cluster, 5, cluster.rebuild(5, addresses), shards)


def test_a_loss_beyond_the_parity_is_refused_with_the_reason(cluster: Cluster) -> None:
    cluster.revive()
    cluster.begin(1)
    addresses = [server.address for server in cluster.living]
    shards = random_shards(3)
    take_and_commit(cluster, 1, shards)
    cluster.kill(0)
    cluster.kill(1)
    with pytest.raises(SnapshotUnavailable, match="2 nodes of a group are lost, 1 can be rebuilt"):
        check(cluster, 1, cluster.rebuild(1, addresses), shards)


def test_a_shard_rebuilt_from_a_damaged_block_is_refused(cluster: Cluster) -> None:
    cluster.revive()
    generation = cluster.begin(1)
    addresses = [server.address for server in cluster.living]
    shards = [torch.randn(1000) for _ in range(4 * RANKS_PER_NODE)]
    take_and_commit(cluster, 1, shards)
    survivor = cluster.nodes[1]
    assert survivor is not None
    # A stray write into the survivor's own shard, from which the lost node's is rebuilt.
    with contextlib.closing(SnapshotClient(survivor.local, SECRET)) as client:
        arena = client.open(SnapshotId(generation, 1), RANKS_PER_NODE)
        os.pwrite(arena.descriptor, b"\xff" * 4000, 0)
        arena.close()
    cluster.kill(0)
    with pytest.raises(SnapshotUnavailable, match="its checksum is wrong"):
        check(cluster, 1, cluster.rebuild(1, addresses), shards, only=(0, 1))
