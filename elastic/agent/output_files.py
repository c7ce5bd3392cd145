"""Sends the output files of a node's workers to `keepstep logs`, over the agents' protocol.

Only files that `keepstep.elastic.worker.log_files` has named are read, in the directory that this
node's workers write to. A client lists them and reads one piece at a time, so nothing is buffered
for a client that reads slowly.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from keepstep.elastic.worker.log_files import LogFile, log_file, log_files
from keepstep.transport import Message

_PIECE_NBYTES = 2**18
_MAX_FILES = 1024
_LAST_READ_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """A file with a worker's output: one stream of one rank in one generation."""

    generation: int
    rank: int
    stream: Literal["stdout", "stderr"]
    nbytes: int


class ListOutput(Message, frozen=True, kw_only=True):
    """Asks for a node's output files: of a rank, of a generation and later ones."""

    rank: int | None
    since: int


class OutputFiles(Message, frozen=True, kw_only=True):
    """The newest output files, and whether the agent waits for the client's last reads to end."""

    files: tuple[OutputFile, ...]
    is_ending: bool


class ReadOutput(Message, frozen=True, kw_only=True):
    """Asks for the bytes of an output file from an offset on."""

    file: OutputFile
    offset: int


class OutputPiece(Message, frozen=True, kw_only=True):
    """Bytes of an output file; none at its end."""

    data: bytes


OutputRequest: TypeAlias = ListOutput | ReadOutput
OutputReply: TypeAlias = OutputFiles | OutputPiece


class OutputReader:
    """Answers clients of one node.

    Args:
        directory: of the workers' files; None: this node's workers write none.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._clients: set[object] = set()
        self._has_none = asyncio.Event()
        self._has_none.set()
        self._is_ending = False

    async def answer(self, client: object, request: OutputRequest) -> OutputReply:
        """Return the answer to a client, which is remembered until `forget`."""
        self._clients.add(client)
        self._has_none.clear()
        # In a thread: the directory may be on a file system of other machines.
        if isinstance(request, ReadOutput):
            return OutputPiece(data=await asyncio.to_thread(self._read, request))
        is_ending = self._is_ending
        files = await asyncio.to_thread(self._list, request)
        return OutputFiles(files=files, is_ending=is_ending)

    def forget(self, client: object) -> None:
        """Note that a client's connection has ended."""
        self._clients.discard(client)
        if not self._clients:
            self._has_none.set()

    async def finish(self) -> None:
        """Let those who follow read the workers' last lines, for two seconds at most."""
        self._is_ending = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_READ_S):
                await self._has_none.wait()

    def _list(self, request: ListOutput) -> tuple[OutputFile, ...]:
        if self._directory is None:
            return ()
        wanted = [
            file
            for file in log_files(self._directory)
            if request.rank in (None, file.rank) and file.generation >= request.since
        ]
        wanted.sort(key=lambda file: (file.generation, file.rank, file.stream))
        return tuple(filter(None, map(_described, wanted[-_MAX_FILES:])))

    def _read(self, request: ReadOutput) -> bytes:
        if self._directory is None:
            return b""
        file = request.file
        path = log_file(self._directory, file.generation, file.rank, file.stream)
        try:
            with path.open("rb") as opened:
                opened.seek(max(0, request.offset))
                return opened.read(_PIECE_NBYTES)
        except FileNotFoundError:
            return b""  # Somebody has removed it.


def _described(file: LogFile) -> OutputFile | None:
    try:
        nbytes = file.path.stat().st_size
    except FileNotFoundError:
        return None  # Somebody has just removed it.
    return OutputFile(generation=file.generation, rank=file.rank, stream=file.stream, nbytes=nbytes)
