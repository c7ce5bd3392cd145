"""Sends a worker's output to files named by generation and rank (`--redirects`, `--tee`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TextIO

from keepstep.elastic.worker.messages import Assignment
from keepstep.notices import notices_blocked

VARIABLE = "KEEPSTEP_OUTPUTS"
"""The environment variable by which an agent passes the settings to its workers."""

_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
_RANKS = re.compile(r"(\d+(,\d+)*)?")
_NAME = re.compile(r"generation-(\d+)-rank-(\d+)-std(out|err)\.log")

DEFAULT_DIRECTORY = "keepstep-logs"
"""The directory, in the current one, that holds a directory of files for each job."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Destinations of workers' outputs, in the form of torchrun's options.

    Args:
        directory: of the files.
        redirects: to files instead of the previous destination: `0` to `3` for all workers (none,
            stdout, stderr, both), or `LOCAL_RANK:0..3,...` for some.
        tee: to files and to the previous destination, in the same form.
        shown: local ranks whose output may go to the previous destination, comma-separated; "":
            all.

    Raises:
        ValueError: a text has another form.
    """

    directory: str
    redirects: str = "0"
    tee: str = "0"
    shown: str = ""

    def __post_init__(self) -> None:
        for name, text in (("redirects", self.redirects), ("tee", self.tee)):
            if not _STREAMS.fullmatch(text):
                raise ValueError(
                    f"--{name} {text}: give 0, 1, 2 or 3 (none, stdout, stderr, both), or that for "
                    "each local rank, such as 0:3,1:2"
                )
        if not _RANKS.fullmatch(self.shown):
            raise ValueError(f"--local-ranks-filter {self.shown}: give local ranks, such as 0,1")

    @classmethod
    def decode(cls, text: str) -> Outputs:
        """Parse a text that `encode` returned."""
        return cls(**json.loads(text))

    def encode(self) -> str:
        """Return this as a text for the environment."""
        return json.dumps(asdict(self))

    @property
    def has_files(self) -> bool:
        """Whether any worker writes to a file."""
        return {self.redirects, self.tee} != {"0"}

    def is_shown(self, local_rank: int) -> bool:
        """Whether any output of this worker goes to its previous destination."""
        return not self.shown or str(local_rank) in self.shown.split(",")


def output_directory(environment: Mapping[str, str]) -> Path | None:
    """Return the directory of the files that workers with this environment write; None: none."""
    outputs = Outputs.decode(environment[VARIABLE]) if VARIABLE in environment else None
    return Path(outputs.directory) if outputs is not None and outputs.has_files else None


def chosen_streams(text: str, local_rank: int) -> int:
    """Return 0 to 3 for a worker, from a text that `Outputs` takes."""
    if ":" not in text:
        return int(text)
    by_rank = dict(part.split(":") for part in text.split(","))
    return int(by_rank.get(str(local_rank), "0"))


def redirect(outputs: Outputs, assignment: Assignment) -> None:
    """Redirect stdout and stderr, with files named by generation and rank."""
    local_rank = assignment.local_rank
    tee = chosen_streams(outputs.tee, local_rank)
    to_files = tee | chosen_streams(outputs.redirects, local_rank)
    for bit, stream, name in ((1, sys.stdout, "stdout"), (2, sys.stderr, "stderr")):
        stream.flush()
        is_shown = outputs.is_shown(local_rank) and bool(tee & bit or not to_files & bit)
        directory = Path(outputs.directory)
        path = log_file(directory, assignment.generation, assignment.rank, name)
        if to_files & bit:
            directory.mkdir(parents=True, exist_ok=True)
        if to_files & bit and is_shown:
            _copy(stream, path)
        elif to_files & bit or not is_shown:
            target = path if to_files & bit else Path(os.devnull)
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)


def _copy(stream: TextIO, path: Path) -> None:
    """Send a stream to a file and to its previous destination."""
    # It ends by itself when the last writer has closed the pipe. It has a session of its own:
    # processes left in the worker's session are killed when the worker has ended, and the worker's
    # last output would be lost.
    with notices_blocked():
        copier = subprocess.Popen(
            ["tee", "-a", path], stdin=subprocess.PIPE, stdout=stream, start_new_session=True
        )
    assert copier.stdin is not None
    os.dup2(copier.stdin.fileno(), stream.fileno())
    copier.stdin.close()


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file that `redirect` has made."""

    path: Path
    generation: int
    rank: int
    stream: Literal["stdout", "stderr"]


def log_file(directory: Path, generation: int, rank: int, stream: str) -> Path:
    """Return the path of the file that has a worker's stdout or stderr."""
    return directory / f"generation-{generation}-rank-{rank}-{stream}.log"


def log_files(directory: Path) -> list[LogFile]:
    """Return the files of workers' output in a directory; none if there is no such directory."""
    matches = ((path, _NAME.fullmatch(path.name)) for path in directory.glob("*.log"))
    return [
        LogFile(path, int(match[1]), int(match[2]), "stdout" if match[3] == "out" else "stderr")
        for path, match in matches
        if match
    ]


def copies_output(command: Sequence[str]) -> bool:
    """Return whether this is the command line of a process that `redirect` has started."""
    return (
        len(command) == 3
        and command[0] == "tee"
        and _NAME.fullmatch(os.path.basename(command[2])) is not None
    )
