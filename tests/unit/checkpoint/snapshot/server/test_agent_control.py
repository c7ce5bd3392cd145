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
    Serving,
)
from keepstep.checkpoint.snapshot.server.agent_control import AgentChannel
from keepstep.transport import Connection

NOTHING = SnapshotId(0, -1)


def test_a_reply_that_follows_an_event_does_not_lack_what_the_event_has_told() -> None:
    """A thread that was to send the event while the reply was made came between the two."""
    agent_end, server_end = socket.socketpair()
    channel = AgentChannel()
    serving = Serving(address="tcp:127.0.0.1:9", pid=1)
    channel.open(Connection.over_pair(server_end, CONTROL_PROTOCOL.server, "agent"), serving)
    agent = Connection.over_pair(agent_end, CONTROL_PROTOCOL.client, "server")
    protected: list[SnapshotId] = []

    def protect() -> None:
        protected.append(SnapshotId(1, 5))
        channel.send(Protected(snapshot=SnapshotId(1, 5), nbytes=0))

    thread = threading.Thread(target=protect)

    def result() -> NodeHoldings:
        held = NodeHoldings(sealed=(), protected=tuple(protected), nbytes=0, committed=NOTHING)
        thread.start()
        while thread.is_alive() and not channel._sending.locked():
            pass  # The event is sent in between if nothing keeps it.
        return held

    channel.reply(0, result)
    thread.join()
    assert agent.receive() == serving
    first, second = agent.receive(), agent.receive()
    assert isinstance(first, AgentReply)
    assert isinstance(second, Protected)
    channel.close()
    agent.close()
