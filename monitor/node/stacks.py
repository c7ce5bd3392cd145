"""Dumps the stacks of a process's threads from outside, with py-spy.

The process is not paused (`--nonblocking`): the threads of a hung process do not move, and the
monitor must not stop a process that does. A few frames may therefore be wrong.

Anyone who may ask a daemon for stacks can ask often, so only a few dumps run at a time, and one of
a process at most. Only this user's processes are looked into, whatever a ring contains: a monitor
may have the capability to look into others'.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil

TIMEOUT_S = 10.0
_FRAMES = 60
_MOST_AT_A_TIME = 4


class StackDumps:
    """The dumps that a daemon has under way."""

    def __init__(self) -> None:
        self._running: dict[int, asyncio.Task[dict[str, Any]]] = {}

    async def dump(self, pid: int) -> dict[str, Any]:
        """Return the threads of a process as `dump` does; requests for the same one share a dump.

        Beyond a number of dumps at a time, an error is returned at once.
        """
        task = self._running.get(pid)
        if task is None:
            if len(self._running) >= _MOST_AT_A_TIME:
                return {"error": "too many stacks are being dumped; ask again in some seconds"}
            task = self._running[pid] = asyncio.create_task(dump(pid))
            task.add_done_callback(lambda _: self._running.pop(pid))
        # One of several who wait may be cancelled, which must not cancel the others' dump.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End all dumps."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def dump(pid: int, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Return the threads of a Python process as JSON: `{"threads": [...]}` or `{"error": reason}`.

    Does not raise when the dump fails: a verdict without stacks is still a verdict.
    """
    if not _is_own(pid):
        return {"error": f"process {pid} is not this user's; run the monitor as the job's user"}
    program = _program()
    if program is None:
        return {"error": "py-spy is not installed with keepstep; pip install py-spy"}
    process = await asyncio.create_subprocess_exec(
        *(program, "dump", "--nonblocking", "--json", "--pid", str(pid)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, error_output = await process.communicate()
    except TimeoutError:
        return {"error": f"py-spy gave no answer within {timeout_s:g} s"}
    finally:
        if process.returncode is None:
            process.kill()
            # Reads the pipes to their end, which closes them.
            await process.communicate()
    if process.returncode != 0:
        return {"error": _explain(pid, error_output.decode(errors="replace").strip())}
    try:
        return {"threads": [_thread(thread) for thread in json.loads(output)]}
    except (ValueError, KeyError, TypeError) as error:
        return {"error": f"py-spy's output cannot be parsed: {error}"}


def _is_own(pid: int) -> bool:
    """Return whether a process runs as this user; also if there is no such process."""
    try:
        return bool(psutil.Process(pid).uids().real == os.getuid())
    except (psutil.Error, ValueError):
        return True


def _program() -> str | None:
    """Return py-spy's path: next to this interpreter, where pip puts it, else on PATH."""
    installed = Path(sys.executable).parent / "py-spy"
    return str(installed) if installed.exists() else shutil.which("py-spy")


def _thread(thread: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": str(thread.get("thread_name") or f"thread {thread['thread_id']}"),
        "active": bool(thread["active"]),
        "owns_gil": bool(thread["owns_gil"]),
        "frames": [
            f"{frame['name']} ({frame['filename']}:{frame['line']})"
            for frame in thread["frames"][:_FRAMES]
        ],
    }


def _explain(pid: int, error_output: str) -> str:
    if "ermission" in error_output:
        return (
            f"no permission to inspect process {pid}: run the monitor as the job's user "
            "with CAP_SYS_PTRACE"
        )
    last_line = error_output.splitlines()[-1] if error_output else "no reason given"
    return f"py-spy could not inspect process {pid}: {last_line}"
