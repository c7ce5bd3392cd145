"""Claims about what an agent knows of its snapshot server's holdings."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from unittest.mock import Mock

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.messages import (
    CONTROL_PROTOCOL,
    AgentReply,
    NodeHoldings,
    Protected,
    SealedRanks,
)
from keepstep.elastic.agent.snapshot_process import SnapshotProcess
from keepstep.transport import Connection, StreamConnection
from tests.unit.elastic.agent.test_worker_group import play


def test_what_is_protected_just_after_a_reply_is_not_forgotten(tmp_path: Path) -> None:
    """It was: the reply was noted after the event that followed it, and no commit ever came."""
    before, after = SnapshotId(2, 9), SnapshotId(3, 9)

    async def scenario() -> None:
        agent_end, server_end = socket.socketpair()
        server = Connection.over_pair(server_end, CONTROL_PROTOCOL.server, "agent")
        process = SnapshotProcess(
            Mock(),
            StreamConnection.over_pair(agent_end, CONTROL_PROTOCOL.client, "server"),
            tmp_path,
            node="a",
            workers=1,
            secret=bytes(16),
            on_event=lambda _: None,
        )
        asked = asyncio.create_task(process.refresh())
        await asyncio.sleep(0)
        request = server.receive()
        assert request is not None
        sealed = (SealedRanks(before, (0,)),)
        held = NodeHoldings(sealed=sealed, protected=(before,), nbytes=1, committed=before)
        server.send(AgentReply(number=request.number, result=held))
        server.send(Protected(snapshot=after, nbytes=2))
        await asked
        assert process.sealed == process.protected == (before, after)
        assert process.memory_nbytes == 2
        assert process.committed == before
        server.close()
        await process.close()

    play(scenario())
