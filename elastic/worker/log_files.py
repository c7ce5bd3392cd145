"""Sends a worker's output to files named by generation and rank (`--redirects`, `--tee`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from keepstep.elastic.worker.messages import Assignment
from keepstep.notices import notices_blocked

_NAME = re.compile(r"generation-\d+-rank-\d+-std(out|err)\.log")


def redirect(directory: Path, assignment: Assignment, *, tee: bool) -> None:
    """Send stdout and stderr to files named by generation and rank.

    With `tee`, they also go where they went before.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        stream.flush()
        path = directory / f"generation-{assignment.generation}-rank-{assignment.rank}-{name}.log"
        if tee:
            # It ends by itself when the last writer has closed the pipe. Until then it has a
            # session of its own: what is left in the worker's is killed when the worker has ended,
            # and so would be its last output.
            with notices_blocked():
                copier = subprocess.Popen(
                    ["tee", "-a", path],
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    start_new_session=True,
                )
            assert copier.stdin is not None
            os.dup2(copier.stdin.fileno(), stream.fileno())
            copier.stdin.close()
        else:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)


def copies_output(command: Sequence[str]) -> bool:
    """Whether this is the command line of a process that `redirect` has started."""
    return (
        len(command) == 3
        and command[0] == "tee"
        and _NAME.fullmatch(os.path.basename(command[2])) is not None
    )
