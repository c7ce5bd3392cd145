"""Claims about the order of what a snapshot server tells its agent."""

from __future__ import annotations

import socket
import threading

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.messages import (
    CONTROL_PROTOCOL,
    AgentReply,
    NodeHoldings,
    Protected,
)
from keepstep.checkpoint.snapshot.server.agent_control import AgentChannel
from keepstep.transport import Connection


def test_a_reply_that_follows_an_event_does_not_lack_what_the_event_has_told() -> None:
    """A thread that was to send the event while the reply was made came between the two."""
    agent_end, server_end = socket.socketpair()
    channel = AgentChannel(server_end)
    agent = Connection.over_pair(agent_end, CONTROL_PROTOCOL.client, "server")
    protected: list[SnapshotId] = []

    def protect() -> None:
        protected.append(SnapshotId(1, 5))
        channel.send(Protected(snapshot=SnapshotId(1, 5), nbytes=0))

    thread = threading.Thread(target=protect)

    def result() -> NodeHoldings:
        held = NodeHoldings(sealed=(), protected=tuple(protected), nbytes=0)
        thread.start()
        while thread.is_alive() and not channel._sending.locked():
            pass  # The event is sent in between if nothing keeps it.
        return held

    channel.reply(0, result)
    thread.join()
    first, second = agent.receive(), agent.receive()
    assert isinstance(first, AgentReply)
    assert isinstance(second, Protected)
    channel.close()
    agent.close()
