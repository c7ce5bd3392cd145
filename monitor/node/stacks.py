"""What the threads of a process are doing, seen from outside with py-spy.

The process is not stopped for it (`--nonblocking`): whoever hangs does not move, and whoever does move must not be touched
by its monitor. The few frames that may then be wrong are the price.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

TIMEOUT_S = 10.0
_FRAMES = 60


async def dump(pid: int, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Return the threads of a Python process as JSON: `{"threads": [...]}`, or `{"error": why not}`.

    Never raises for what is the process's or the system's doing: a verdict without stacks is still a verdict.
    """
    program = _program()
    if program is None:
        return {"error": "py-spy is not installed beside keepstep; pip install py-spy"}
    process = await asyncio.create_subprocess_exec(
        program, "dump", "--nonblocking", "--json", "--pid", str(pid),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s):
            output, complaint = await process.communicate()
    except TimeoutError:
        return {"error": f"py-spy gave no answer within {timeout_s:g} s"}
    finally:
        if process.returncode is None:
            process.kill()
            # To the end of its pipes, which would be left open otherwise.
            await process.communicate()
    if process.returncode != 0:
        return {"error": _explain(pid, complaint.decode(errors="replace").strip())}
    try:
        return {"threads": [_thread(told) for told in json.loads(output)]}
    except (ValueError, KeyError, TypeError) as error:
        return {"error": f"py-spy's answer is not understood: {error}"}


def _program() -> str | None:
    """Return py-spy's path: beside this interpreter, where pip puts it, else on the path."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _thread(told: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": str(told.get("thread_name") or f"thread {told['thread_id']}"),
        "active": bool(told["active"]),
        "owns_gil": bool(told["owns_gil"]),
        "frames": [
            f"{frame['name']} ({frame['filename']}:{frame['line']})"
            for frame in told["frames"][:_FRAMES]
        ],
    }


def _explain(pid: int, complaint: str) -> str:
    if "ermission" in complaint:
        return f"no permission to look into process {pid}: run the monitor as the job's user with CAP_SYS_PTRACE"
    last = complaint.splitlines()[-1] if complaint else "no reason given"
    return f"py-spy could not look into process {pid}: {last}"
