"""Ends what workers have started, wherever it is, when their agent is killed.

The kernel ends an agent's workers with it, and an agent that ends in good order ends what its
workers started. But what a worker started in a session of its own, such as a data loader's server
or a debugger, would survive an agent's SIGKILL, and hold its GPU. So a small process outlives the
agent: it finds such processes by a variable in their environment.

    python -m keepstep.elastic.agent.orphans MARK

It reads one byte from standard input when the agent ends in good order, and nothing if it dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from keepstep.notices import leave_notices, notices_blocked
from keepstep.processes import module_command, set_title

VARIABLE = "KEEPSTEP_AGENT_RUN"

_ENDS_IN_GOOD_ORDER = b"."
_LIMIT_S = 10.0
_PAUSE_S = 0.05
# A process that is just being forked by one that is killed is found by the next look.
_LOOKS_WITHOUT_ANY = 3


@contextmanager
def orphans_ended() -> Iterator[Mapping[str, str]]:
    """End all processes that have this environment if the current process is killed meanwhile."""
    mark = uuid.uuid4().hex
    with notices_blocked():
        process = subprocess.Popen(
            module_command("keepstep.elastic.agent.orphans", mark),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
    with process:
        assert process.stdin is not None
        try:
            yield {VARIABLE: mark}
        finally:
            try:
                process.stdin.write(_ENDS_IN_GOOD_ORDER)
                process.stdin.flush()
            except BrokenPipeError:
                pass  # Somebody has ended it.


def marked_processes(mark: str) -> list[int]:
    """Return the ids of this user's processes that were started with the mark."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # It has ended, or is another user's.
    return found


def end_all(mark: str, limit_s: float = _LIMIT_S) -> None:
    """SIGKILL every process with the mark, until there is none or the time is up."""
    until_s = time.monotonic() + limit_s
    empty_looks = 0
    while empty_looks < _LOOKS_WITHOUT_ANY and time.monotonic() < until_s:
        marked = marked_processes(mark)
        empty_looks = 0 if marked else empty_looks + 1
        for process in marked:
            try:
                os.kill(process, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(_PAUSE_S)


def main() -> None:
    """Wait for the agent's end, and end what is left if it was killed."""
    leave_notices()
    mark = sys.argv[1]
    set_title("keepstep: ends what is left of a killed agent", "keepstep.elastic.agent.orphans")
    if sys.stdin.buffer.read(1) != _ENDS_IN_GOOD_ORDER:
        end_all(mark)


if __name__ == "__main__":
    main()
