"""Claims about what agents and workers send each other, and what a worker is started with."""

from __future__ import annotations

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.rendezvous.records import Member, ShardRebuild, SnapshotCommit
from keepstep.elastic.worker.messages import (
    PROTOCOL,
    Assign,
    Command,
    CommandKind,
    Failed,
    sendable,
)
from keepstep.transport import MalformedMessage
from tests.unit.elastic.worker.places import assignment

COMMIT = SnapshotCommit(
    SnapshotId(1, 40),
    (Member("a", "h", 2, 0, "h:1", "tcp:h:2"),),
    parity=1,
    shard_rebuilds=(ShardRebuild(3, "a", "tcp:h:2"),),
)


def test_assignment_with_its_resume_point_survives_the_codec() -> None:
    place = assignment(
        2, rank=1, world_size=2, local_rank=1, local_world_size=2, resume=COMMIT,
        failures_per_s=1e-6,
    )  # fmt: skip
    message = Assign(assignment=place, serves_store=True)
    codec = PROTOCOL.replies
    assert codec.decode(codec.encode(message), "agent") == message


def test_message_of_the_other_direction_is_rejected() -> None:
    with pytest.raises(MalformedMessage, match="type"):
        PROTOCOL.replies.decode(PROTOCOL.requests.encode(Failed(error="", traceback="")), "agent")


def test_command_survives_the_environment() -> None:
    command = Command(CommandKind.MODULE, "package.module", ("--lr", "0.1"))
    assert Command.decode(command.encode()) == command


def test_text_that_json_cannot_carry_is_escaped() -> None:
    text = sendable("no such file: caf\udce9.py")
    assert text == "no such file: caf\\udce9.py"
    message = Failed(error="", traceback=text)
    codec = PROTOCOL.requests
    assert codec.decode(codec.encode(message), "worker") == message


def test_very_long_text_keeps_its_ends() -> None:
    text = sendable("first" + "x" * 10**8 + "last")
    assert text.startswith("first")
    assert text.endswith("last")
    assert len(text) < 10**5
    assert (
        len(PROTOCOL.requests.encode(Failed(error="", traceback=text))) < PROTOCOL.max_body_nbytes
    )
