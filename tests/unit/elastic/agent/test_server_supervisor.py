"""Claims about when a node's snapshot server is replaced."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from keepstep.elastic.agent import server_supervisor
from keepstep.elastic.agent.config import AgentConfig
from keepstep.elastic.agent.server_supervisor import ServerSupervisor
from keepstep.elastic.agent.snapshot_process import ServerGone, SnapshotProcess
from keepstep.elastic.rendezvous.kept_state import Keeping


class Config:
    """The part of an agent's configuration that a supervisor reads."""

    node, workers, host, limits, keeping = "a", 1, "127.0.0.1", None, Keeping()


class Server:
    """A server that answers as long as it lives."""

    def __init__(self) -> None:
        self.is_alive = True
        self.is_closed = False

    async def refresh(self) -> None:
        if not self.is_alive or self.is_closed:
            raise ServerGone("it is gone")

    async def close(self, *, keep: bool = False) -> None:
        self.is_closed = True


class LooksAtOnce:
    """`asyncio` without its pauses."""

    def __init__(self, sleep: Any) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


def test_server_whose_replacement_starts_slowly_is_replaced_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look at the old one in the meantime had the new one replaced, too."""
    started: list[Server] = []

    async def scenario() -> None:
        may_start, is_lost = asyncio.Event(), asyncio.Event()

        async def start(*_: Any) -> Server:
            if started:
                await may_start.wait()
            started.append(Server())
            return started[-1]

        async def next_look(_: float) -> None:
            await asyncio.sleep(0)

        monkeypatch.setattr(SnapshotProcess, "start", start)
        monkeypatch.setattr(server_supervisor, "asyncio", LooksAtOnce(next_look))
        supervisor = ServerSupervisor(cast(AgentConfig, Config()), lambda event: None, is_lost.set)
        await supervisor.start(b"secret")
        watching = asyncio.create_task(supervisor.watch())
        started[0].is_alive = False
        await is_lost.wait()
        replacing = asyncio.create_task(supervisor.replace())
        for _ in range(20):  # Some looks at the server that has died.
            await asyncio.sleep(0)
        may_start.set()
        await replacing
        assert not supervisor.has_died
        assert supervisor.server is cast(Any, started[1])
        started[1].is_alive = False
        is_lost.clear()
        await is_lost.wait()
        watching.cancel()

    asyncio.run(scenario())
    assert len(started) == 2
