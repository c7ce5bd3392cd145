"""Claims about dumps of stacks: few at a time, and only of this user's processes."""

import asyncio
import os
import subprocess
from typing import Any

import pytest

from keepstep.monitor.node import stacks
from keepstep.monitor.node.stacks import StackDumps, dump


def test_requests_for_one_process_share_a_dump_and_few_run_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []

    async def check() -> None:
        may_end = asyncio.Event()

        async def slow_dump(pid: int) -> dict[str, Any]:
            begun.append(pid)
            await may_end.wait()
            return {"threads": [pid]}

        monkeypatch.setattr(stacks, "dump", slow_dump)
        dumps = StackDumps()
        waiting = [asyncio.create_task(dumps.dump(pid)) for pid in (1, 1, 2, 3, 4)]
        await asyncio.sleep(0)
        assert "too many" in (await dumps.dump(5))["error"]
        waiting[0].cancel()
        may_end.set()
        assert [(await task)["threads"] for task in waiting[1:]] == [[1], [2], [3], [4]]
        assert await dumps.dump(5) == {"threads": [5]}
        await dumps.close()

    asyncio.run(check())
    assert sorted(begun) == [1, 2, 3, 4, 5]


def test_dumps_end_with_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async def endless(pid: int) -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

        monkeypatch.setattr(stacks, "dump", endless)
        dumps = StackDumps()
        waiting = asyncio.create_task(dumps.dump(1))
        await asyncio.sleep(0)
        await dumps.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(check())


@pytest.mark.skipif(os.getuid() != 0, reason="only root may start another user's process")
def test_process_of_another_user_is_not_looked_into() -> None:
    with subprocess.Popen(["sleep", "60"], user=12345) as process:
        try:
            assert "not this user's" in asyncio.run(dump(process.pid))["error"]
        finally:
            process.kill()
