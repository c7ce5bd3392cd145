"""Claims about replies of the snapshot server: what it sends without a copy, and what it copies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np
import pytest

from keepstep.checkpoint.format.layout.boxes import Box, Entry
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.messages import (
    BoxBytes,
    ClientRequest,
    ReadBoxes,
    Refused,
    Seal,
    Sealed,
    ShardBox,
)
from keepstep.checkpoint.snapshot.server import client_session
from keepstep.checkpoint.snapshot.server.client_session import ClientSession
from keepstep.checkpoint.snapshot.server.plan_outbox import PlanOutbox
from keepstep.checkpoint.snapshot.server.protection import Protection
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory
from keepstep.transport import Connection, FileRange
from tests.unit.checkpoint.snapshot.server.sealed import open_memory, seal_bytes

SNAPSHOT = SnapshotId(1, 1)
SHAPE = (64, 32, 2)
VALUES = np.arange(64 * 32 * 2, dtype=np.int32).reshape(SHAPE)


class Client:
    """The server's end of a connection: one request, and what is sent in reply."""

    peer = "test"

    def __init__(self, request: ClientRequest) -> None:
        self._requests: Iterator[ClientRequest | None] = iter([request, None])
        self.pieces: list[FileRange | memoryview] = []
        self.sent: list[Any] = []

    def receive(self) -> ClientRequest | None:
        return next(self._requests)

    def limit(self, bytes_per_s: int) -> None:
        pass

    def send(self, message: Any, *arguments: Any) -> None:
        self.sent.append(message)

    def send_pieces(
        self, message: Any, nbytes: int, pieces: Iterable[FileRange | memoryview]
    ) -> None:
        self.sent.append(message)
        self.pieces = list(pieces)
        assert nbytes == len(self.payload)

    @property
    def payload(self) -> bytes:
        return b"".join(
            bytes(piece.view if isinstance(piece, FileRange) else piece) for piece in self.pieces
        )


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    memory = open_memory()
    entry = Entry(
        key="w",
        dtype="int32",
        global_shape=SHAPE,
        box=Box.whole(SHAPE),
        byte_offset=0,
        nbytes=VALUES.nbytes,
    )
    seal_bytes(memory, SNAPSHOT, 0, [entry], VALUES.tobytes())
    yield memory
    memory.close()


def answer(memory: SnapshotMemory, *boxes: Box) -> Client:
    request = ReadBoxes(
        snapshot=SNAPSHOT, boxes=tuple(ShardBox(0, "w", box) for box in boxes), background=False
    )
    client = Client(request)
    connection = cast(Connection[Any, Any], client)
    ClientSession(
        connection,
        memory,
        cast(Protection, None),
        PlanOutbox(),
        lambda snapshot, sealed: None,
        lambda: 0,
    ).run()
    return client


ROWS = Box((8, 0, 0), (16, 32, 2))
COLUMNS = Box((0, 8, 0), (64, 16, 2))


def test_one_scattered_box_does_not_have_the_others_copied(memory: SnapshotMemory) -> None:
    client = answer(memory, ROWS, COLUMNS, ROWS)
    assert client.payload == b"".join(VALUES[box.slices].tobytes() for box in (ROWS, COLUMNS, ROWS))
    in_files = [isinstance(piece, FileRange) for piece in client.pieces]
    assert (in_files[0], in_files[-1], all(in_files)) == (True, True, False)


@pytest.mark.parametrize("nbytes", [1, 100, 128, 1000, 4096, 10**6])
def test_a_scattered_box_is_copied_tile_by_tile(
    memory: SnapshotMemory, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(client_session, "_COPIED_NBYTES", nbytes)
    for box in (COLUMNS, Box((3, 2, 1), (20, 7, 1)), Box((0, 0, 0), (0, 3, 2))):
        client = answer(memory, box)
        assert client.payload == VALUES[box.slices].tobytes()
        # The smallest tile is a row that lies together.
        assert all(
            memoryview(piece).nbytes <= max(nbytes, 4 * 32 * 2)
            for piece in client.pieces
            if not isinstance(piece, FileRange)
        )


def test_nothing_of_a_reply_is_sent_if_a_box_is_not_held(memory: SnapshotMemory) -> None:
    client = answer(memory, ROWS, Box((60, 0, 0), (5, 32, 2)))
    assert [type(message) for message in client.sent] == [Refused]
    assert not any(isinstance(message, BoxBytes) for message in client.sent)


def test_of_ranks_that_seal_at_the_same_time_one_completes_the_snapshot() -> None:
    """Else it would be protected once for each of them."""
    memory = open_memory()
    for rank in (0, 1):
        given = memory.begin(SNAPSHOT, rank, 100, (), discard_uncommitted=False)
        assert given.descriptor is not None
        os.close(given.descriptor)
    sealed: list[frozenset[int]] = []

    class SealingClient(Client):
        def __init__(self, rank: int, before_reply: Callable[[], None]) -> None:
            super().__init__(
                Seal(
                    snapshot=SNAPSHOT,
                    rank=rank,
                    index_offset=0,
                    index_nbytes=0,
                )
            )
            self._before_reply = before_reply

        def send(self, message: Any, *arguments: Any) -> None:
            assert isinstance(message, Sealed)
            self._before_reply()

    def seal(rank: int, before_reply: Callable[[], None] = lambda: None) -> None:
        ClientSession(
            cast(Connection[Any, Any], SealingClient(rank, before_reply)),
            memory,
            cast(Protection, None),
            PlanOutbox(),
            lambda snapshot, ranks: sealed.append(ranks),
            lambda: 0,
        ).run()

    seal(0, before_reply=lambda: seal(1))
    memory.close()
    assert sorted(map(len, sealed)) == [1, 2]
