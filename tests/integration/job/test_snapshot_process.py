"""Claims about how an agent runs its snapshot server."""

import asyncio
import secrets
import signal
from pathlib import Path

import psutil
import pytest

from keepstep.checkpoint.snapshot.server.limits import RateLimits
from keepstep.elastic.agent import snapshot_process
from keepstep.elastic.agent.snapshot_process import ServerDied, ServerGone, SnapshotProcess
from tests.adaptive_timeouts import patient


def test_server_that_hangs_is_ended_and_its_agent_informed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        events: list[object] = []
        server = await SnapshotProcess.start(
            "a", 1, tmp_path, "127.0.0.1", secrets.token_bytes(32), events.append, RateLimits()
        )
        try:
            await server.refresh()
            monkeypatch.setattr(snapshot_process, "_ANSWER_S", 0.5)
            server._process.send_signal(signal.SIGSTOP)
            with pytest.raises(ServerGone):
                await server.refresh()
            async with asyncio.timeout(patient(60)):
                await asyncio.to_thread(server._process.wait)
                await asyncio.wait([server._receiving])
            assert events == [ServerDied()]
            with pytest.raises(ServerGone):
                await server.refresh()
        finally:
            await server.close()

    asyncio.run(scenario())


def test_server_whose_start_is_cancelled_ends_and_another_one_takes_its_place(
    tmp_path: Path,
) -> None:
    """It went on, and the next one found its socket in the way."""

    async def start() -> SnapshotProcess:
        return await SnapshotProcess.start(
            "a", 1, tmp_path, "127.0.0.1", secrets.token_bytes(32), lambda _: None, RateLimits()
        )

    async def scenario() -> None:
        # Other tests in this process may have left a helper of Python's own.
        before = set(psutil.Process().children())
        for _ in range(2):
            starting = asyncio.create_task(start())
            await asyncio.sleep(0)  # It runs until it waits for its process.
            (server_process,) = set(psutil.Process().children()) - before
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert not server_process.is_running()
        server = await start()
        await server.refresh()
        await server.close()

    asyncio.run(scenario())
