"""Claims about a snapshot server in its own process, with local writers and remote readers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.errors import SnapshotUnavailable, StateChanged
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.live.copier import Snapshotter
from keepstep.checkpoint.live.tensors import LiveTensor, as_bytes
from keepstep.checkpoint.snapshot.arena import Arena
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.checkpoint.snapshot.memory.memory_source import Holder, MemorySource
from keepstep.checkpoint.snapshot.memory.messages import (
    SNAPSHOT_PROTOCOL,
    EndPersist,
    EndServer,
    Holdings,
    ListHoldings,
    Persisted,
    PersistPart,
    PersistTask,
    RankHolder,
    ReadStripe,
    Refused,
    SealedRanks,
    ShardBox,
    StripeBytes,
)
from keepstep.transport import Codec, Identity, Message, Protocol, connect
from tests.adaptive_timeouts import patient
from tests.examples import examples
from tests.integration.checkpoint.servers import SECRET, Server

SHAPE = (12, 5)
RANKS = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), RANKS)
    yield server
    server.close()


_generations = iter(range(1, 10**6))


def new_generation(server: Server) -> int:
    """Begin one that resumes from nothing, as an agent does."""
    number = next(_generations)
    server.open_generation(number)
    return number


@pytest.fixture
def generation(server: Server) -> int:
    return new_generation(server)


def take(
    server: Server, generation: int, step: int, rank: int, data: torch.Tensor, box: Box
) -> None:
    client = SnapshotClient(server.local, SECRET)
    with contextlib.closing(client):
        snapshotter = Snapshotter(client, generation, rank, torch.device("cpu"))
        snapshotter.start(
            step, [LiveTensor("w", SHAPE, box, data)], {f"rank/{rank}/note": "x" * step}
        )
        try:
            snapshotter.wait()
        finally:
            snapshotter.close()


def halves(value: torch.Tensor) -> list[tuple[torch.Tensor, Box]]:
    return [(value[:6].clone(), Box((0, 0), (6, 5))), (value[6:].clone(), Box((6, 0), (6, 5)))]


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), near=st.sampled_from(["both", "first", "none"]))
def test_any_box_is_read_back_from_local_memory_and_from_peers(
    server: Server, data: st.DataObject, near: str
) -> None:
    number = new_generation(server)
    value = torch.randn(SHAPE)
    for rank, (part, box) in enumerate(halves(value)):
        take(server, number, 3, rank, part, box)
    offset = tuple(data.draw(st.integers(0, n)) for n in SHAPE)
    box = Box(
        offset, tuple(data.draw(st.integers(0, n - o)) for n, o in zip(SHAPE, offset, strict=True))
    )
    holders = [
        Holder(
            server.local if near == "both" or (near == "first" and rank == 0) else server.address,
            (rank,),
        )
        for rank in range(RANKS)
    ]
    source = MemorySource(SnapshotId(number, 3), holders, SECRET, rank=0)
    with contextlib.closing(source):
        into = torch.zeros(box.shape)
        source.read([BoxRequest("w", box, as_bytes(into))])
        assert torch.equal(into, value[box.slices])
        assert source.documents["rank/1/note"] == "xxx"
        assert source.local_nbytes + source.peer_nbytes == into.nbytes


def test_a_snapshot_is_reported_once_all_ranks_have_sealed(server: Server, generation: int) -> None:
    (first, box), (second, other) = halves(torch.zeros(SHAPE))
    take(server, generation, 1, 0, first, box)
    assert server.holdings().sealed == (SealedRanks(SnapshotId(generation, 1), (0,)),)
    take(server, generation, 1, 1, second, other)
    server.wait_until_protected(SnapshotId(generation, 1))


def test_an_uncommitted_snapshot_is_never_overwritten(server: Server, generation: int) -> None:
    data, box = halves(torch.ones(SHAPE))[0]
    take(server, generation, 1, 0, data, box)
    with pytest.raises(SnapshotUnavailable, match="step 1 is sealed and not committed"):
        take(server, generation, 2, 0, data, box)
    server.commit(SnapshotId(generation, 1))
    take(server, generation, 2, 0, data, box)


def write_in_place(data: torch.Tensor) -> None:
    data.add_(1)


def replace_memory(data: torch.Tensor) -> None:
    data.data = data + 1


@pytest.mark.parametrize(
    ("interfere", "error"),
    [
        (write_in_place, "w was written to while step 1 was being copied"),
        (replace_memory, "w was given other memory before step 1"),
    ],
)
def test_state_that_changes_while_it_is_copied_is_not_sealed(
    server: Server, generation: int, interfere: Callable[[torch.Tensor], None], error: str
) -> None:
    data, box = halves(torch.ones(SHAPE))[0]

    class InterferingClient(SnapshotClient):
        def begin(self, *arguments: Any, **options: Any) -> tuple[int, Arena]:
            interfere(data)
            return super().begin(*arguments, **options)

    with contextlib.closing(InterferingClient(server.local, SECRET)) as client:
        snapshotter = Snapshotter(client, generation, 0, torch.device("cpu"))
        snapshotter.start(1, [LiveTensor("w", SHAPE, box, data.detach(), data)], {})
        with pytest.raises(StateChanged, match=error):
            snapshotter.wait()
        snapshotter.close()
    assert server.holdings().sealed == ()


def test_a_snapshot_that_another_rank_did_not_seal_is_given_up(
    server: Server, generation: int
) -> None:
    data, box = halves(torch.ones(SHAPE))[0]
    take(server, generation, 1, 0, data, box)
    with contextlib.closing(SnapshotClient(server.local, SECRET)) as client:
        snapshotter = Snapshotter(client, generation, 0, torch.device("cpu"))
        snapshotter.start(2, [LiveTensor("w", SHAPE, box, data)], {}, discard_uncommitted=True)
        snapshotter.wait()
        snapshotter.close()
    assert server.holdings().sealed == (SealedRanks(SnapshotId(generation, 2), (0,)),)


def test_writers_of_an_older_generation_are_refused(server: Server, generation: int) -> None:
    data, box = halves(torch.ones(SHAPE))[0]
    server.open_generation(next(_generations))
    with pytest.raises(SnapshotUnavailable, match="it is over"):
        take(server, generation, 1, 0, data, box)


@pytest.mark.parametrize("where", ["local", "address"])
def test_a_client_without_the_secret_is_refused(server: Server, where: str) -> None:
    with pytest.raises(SnapshotUnavailable):
        SnapshotClient(getattr(server, where), b"t" * 32).holdings()


@pytest.mark.parametrize(
    "junk", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(300), b"KSF" + b"\xff" * 60]
)
def test_a_client_that_sends_garbage_is_dropped_and_others_are_served(
    server: Server, generation: int, junk: bytes
) -> None:
    host, _, port = server.address.removeprefix("tcp:").rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        # The server may have dropped it already.
        with contextlib.suppress(OSError):
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
    data, box = halves(torch.ones(SHAPE))[0]
    take(server, generation, 1, 0, data, box)


def test_a_request_that_cannot_be_met_is_refused_with_the_reason(
    server: Server, generation: int
) -> None:
    data, box = halves(torch.ones(SHAPE))[0]
    take(server, generation, 1, 0, data, box)
    snapshot = SnapshotId(generation, 1)
    with contextlib.closing(SnapshotClient(server.address, SECRET)) as client:
        with pytest.raises(SnapshotUnavailable, match="is not held here"):
            client.index(SnapshotId(generation, 999), 0)
        for wrong in [
            ShardBox(0, "v", box),
            ShardBox(0, "w", Box((5, 0), (2, 5))),
            ShardBox(0, "w", Box((0,), (6,))),
        ]:
            with pytest.raises(SnapshotUnavailable, match="does not have the box"):
                client.read(snapshot, [wrong], [memoryview(bytearray(40))])
        with pytest.raises(SnapshotUnavailable, match="has no stripe 7"):
            client._ask(ReadStripe(snapshot=snapshot, stripe=7), StripeBytes)
        assert client.holdings()[snapshot] == [0]


def test_a_seal_whose_index_is_not_in_the_buffer_is_refused(
    server: Server, generation: int
) -> None:
    with contextlib.closing(SnapshotClient(server.local, SECRET)) as client:
        client.begin(SnapshotId(generation, 1), 0, 4096)
        with pytest.raises(SnapshotUnavailable, match="beyond its buffer's end"):
            client.seal(SnapshotId(generation, 1), 0, 4000, 2**20)
    assert server.holdings().sealed == ()


class Sing(Message, frozen=True, kw_only=True):
    """A request that servers of this version do not know."""


def test_an_unknown_request_is_refused_and_the_connection_lives(server: Server) -> None:
    newer = Protocol(
        name="snapshot",
        versions=SNAPSHOT_PROTOCOL.versions,
        requests=Codec[Sing | ListHoldings](Sing, ListHoldings),
        replies=SNAPSHOT_PROTOCOL.replies,
    )
    with connect(server.address, newer, Identity("newer", SECRET)) as client:
        client.send(Sing())
        refused = client.receive()
        assert isinstance(refused, Refused)
        assert "run compatible versions of keepstep" in refused.reason
        client.send(ListHoldings())
        assert isinstance(client.receive(), Holdings)


def test_a_client_whose_request_timed_out_takes_no_late_reply(
    server: Server, generation: int
) -> None:
    client = SnapshotClient(server.address, SECRET, idle_s=0.2)
    with contextlib.closing(client):
        with pytest.raises(SnapshotUnavailable, match="no answer in time"):
            client.index(SnapshotId(generation, 5), 0, wait=True)
        with pytest.raises(SnapshotUnavailable):
            client.holdings()


def test_a_writer_killed_while_copying_leaves_nothing_and_another_takes_over(
    server: Server, generation: int
) -> None:
    code = (
        "import sys\n"
        "from keepstep.checkpoint.snapshot.memory.client import SnapshotClient\n"
        "from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId\n"
        f"client = SnapshotClient({server.local!r}, {SECRET!r})\n"
        f"number, arena = client.begin(SnapshotId({generation}, 1), 0, 4096)\n"
        "arena.buffer[:100] = b'x' * 100\n"
        "print('begun', flush=True); sys.stdin.read()\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begun\n"
        writer.send_signal(signal.SIGKILL)
    assert server.holdings().sealed == ()
    data, box = halves(torch.full(SHAPE, 2.0))[0]
    take(server, generation, 1, 0, data, box)
    source = MemorySource(SnapshotId(generation, 1), [Holder(server.local, (0,))], SECRET, rank=0)
    with contextlib.closing(source):
        into = torch.zeros(6, 5)
        source.read([BoxRequest("w", Box((0, 0), (6, 5)), as_bytes(into))])
    assert torch.equal(into, data)


def test_memory_holds_two_snapshots_of_the_state_at_most(server: Server, generation: int) -> None:
    data = torch.zeros(2**20)
    box = Box((0,), (2**20,))
    for step in range(1, 6):
        client = SnapshotClient(server.local, SECRET)
        with contextlib.closing(client):
            snapshotter = Snapshotter(client, generation, 0, torch.device("cpu"))
            snapshotter.start(step, [LiveTensor("big", (2**20,), box, data)], {})
            snapshotter.wait()
            snapshotter.close()
        held_nbytes = server.commit(SnapshotId(generation, step)).nbytes
    assert held_nbytes <= 2 * (data.nbytes + 2**17)


def test_a_rank_maps_a_third_buffer_only_while_a_snapshot_is_stored(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    server = Server(tmp_path / "node", 1)
    generation = new_generation(server)
    box = Box((0,), (2**18,))
    mapped = []
    with contextlib.closing(SnapshotClient(server.local, SECRET)) as client:
        snapshotter = Snapshotter(client, generation, 0, torch.device("cpu"))
        for step in range(1, 10):
            data = torch.full((2**18,), step, dtype=torch.float32)
            snapshotter.start(step, [LiveTensor("w", (2**18,), box, data)], {})
            snapshotter.wait()
            snapshot = SnapshotId(generation, step)
            if step == 4:  # What is stored is not freed by the commit.
                stored = SnapshotId(generation, 3)
                holders = (RankHolder(None, (0,)),)
                task = PersistTask(str(tmp_path / "stored"), stored, generation, "1-a", holders)
                server.ask(PersistPart(task=task, part=0))
            server.commit(snapshot)
            if step == 6:
                # Its writer has let go of it, too.
                server.wait_for_event(Persisted)
                server.ask(EndPersist(attempt="1-a"))
            mapped.append(len(client._arenas))
            reader = SnapshotClient(server.local, SECRET)
            with contextlib.closing(reader), contextlib.closing(reader.open(snapshot, 0)) as shard:
                assert (shard.bytes[: data.nbytes].view(np.float32) == step).all()
        snapshotter.close()
    server.close()
    assert max(mapped) == 3
    assert mapped[-1] == 2


def test_the_server_ends_when_its_agent_does(tmp_path: Path) -> None:
    server = Server(tmp_path, RANKS)
    server.control.close()
    assert server.process.wait(patient(10)) == 0
    assert not psutil.pid_exists(server.process.pid)
    server.close()


def seal_one(server: Server) -> SnapshotId:
    """Have all ranks seal a snapshot."""
    server.open_generation(1)
    for rank, (part, box) in enumerate(halves(torch.ones(SHAPE))):
        take(server, 1, 4, rank, part, box)
    server.wait_until_protected(SnapshotId(1, 4))
    return SnapshotId(1, 4)


def test_the_server_keeps_what_it_holds_for_the_next_agent(tmp_path: Path) -> None:
    server = Server(tmp_path, RANKS, "--keep", "600")
    snapshot = seal_one(server)
    before = server.holdings()
    server.control.close()
    server.connect()
    assert server.holdings() == before
    assert snapshot in before.protected
    server.ask(EndServer())
    assert server.process.wait(patient(10)) == 0


@pytest.mark.parametrize("ending", ["time", "signal"])
def test_the_server_ends_and_leaves_nothing_if_no_agent_returns(
    tmp_path: Path, ending: str
) -> None:
    directory = tmp_path / "state"
    directory.mkdir()
    server = Server(directory, RANKS, "--keep", "0.5" if ending == "time" else "600")
    seal_one(server)
    # The agent answers it while there is one.
    server.process.terminate()
    server.holdings()
    server.control.close()
    deadline_s = time.monotonic() + patient(10)
    while server.process.poll() is None:
        assert time.monotonic() < deadline_s
        if ending == "signal":
            # It ignores the signal until it has noticed that the agent is gone.
            server.process.terminate()
        time.sleep(0.05)
    assert server.process.returncode == 0
    assert not directory.exists()


def test_the_server_that_holds_nothing_ends_with_its_agent(tmp_path: Path) -> None:
    server = Server(tmp_path, RANKS, "--keep", "600")
    server.control.close()
    assert server.process.wait(patient(10)) == 0


def test_a_socket_path_longer_than_the_kernel_allows_is_served(tmp_path: Path) -> None:
    directory = tmp_path / ("as-some-clusters-name-their-scratch-directories-" * 4)
    directory.mkdir()
    with contextlib.closing(Server(directory, 1)) as server:
        SnapshotClient(server.local, SECRET).close()
