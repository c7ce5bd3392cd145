"""Starts the ranks of a check as processes of their own, and collects what each of them found.

The check's process holds the stores through which its ranks meet, one for each generation of
process groups, so that they outlive any rank. It does not use a GPU itself.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from ops.gpu.check import Figures, NotRun
from ops.gpu.environment import on_one_gpu

SHOW_STACKS = signal.SIGUSR1
"""Makes a rank print where its threads are."""

_STORE_TIMEOUT = timedelta(seconds=50)
_OUTPUT_CHARACTERS = 6000
_SHOWING_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A rank's place, as its function receives it.

    Args:
        rank, world_size: in the check's groups.
        device: index of its GPU.
        store_ports: ports of the stores on this machine, one for each generation.
        options: whatever the check passes to it.
    """

    rank: int
    world_size: int
    device: int
    store_ports: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Rank:
        fields = json.loads(text)
        return cls(**{**fields, "store_ports": tuple(fields["store_ports"])})

    def store(self, generation: int = 0) -> TCPStore:
        """Return a connection to the store of a generation."""
        port = self.store_ports[generation]
        return TCPStore("127.0.0.1", port, is_master=False, timeout=_STORE_TIMEOUT)

    def meet(self, store: TCPStore, place: str) -> None:
        """Wait until all ranks have come to a place that is named so."""
        store.set(f"{place}/{self.rank}", "here")
        store.wait([f"{place}/{rank}" for rank in range(self.world_size)])


RankFunction = Callable[[Rank], Figures]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """The outcome of a rank.

    Args:
        figures: the result of its function; None if it did not return.
        error: the exception, if it raised one.
        status: exit status; negative: the signal that ended it.
        timed_out: whether it was killed because it had not ended in time.
        output: its whole output.
    """

    figures: Figures | None
    error: str
    status: int
    timed_out: bool
    output: str


def run_ranks(
    function: RankFunction,
    world_size: int,
    *,
    limit_s: float,
    present: Sequence[int] | None = None,
    generations: int = 1,
    devices: Sequence[int] | None = None,
    environment: Callable[[int], Mapping[str, str]] = on_one_gpu,
    options: Mapping[str, Any] | None = None,
) -> list[RankResult]:
    """Run a function in one process per rank; return what became of each, in the order of ranks.

    Args:
        function: a function of a module; it is imported there again.
        world_size: number of ranks that the groups have.
        limit_s: ranks that have not ended after this time are killed.
        present: the ranks to start; default: all.
        generations: number of stores.
        devices: GPU of each rank; default: the first for all.
        environment: variables of a rank, besides this process's own.
        options: passed to the function.
    """
    stores = [
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(generations)
    ]
    started = range(world_size) if present is None else present
    with tempfile.TemporaryDirectory(prefix="keepstep-ranks-") as name:
        directory = Path(name)
        processes = []
        try:
            for number in started:
                rank = Rank(
                    rank=number,
                    world_size=world_size,
                    device=0 if devices is None else devices[number],
                    store_ports=tuple(store.port for store in stores),
                    options=options or {},
                )
                processes.append(_start(function, rank, directory, environment(number)))
            deadline_s = time.monotonic() + limit_s
            late = [_is_late(process, deadline_s) for process in processes]
            _show_stacks(list(itertools.compress(processes, late)))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [
            _collect(directory, number, process.returncode, is_late)
            for number, process, is_late in zip(started, processes, late, strict=True)
        ]


def figures_of(results: Sequence[RankResult]) -> list[Figures]:
    """Return the figures of all ranks.

    Raises:
        NotRun: a rank had too little memory.
        RuntimeError: a rank failed or was killed; the message says how it ended.
    """
    for number, result in enumerate(results):
        if result.figures is not None:
            continue
        print(f"--- output of rank {number}\n{result.output[-_OUTPUT_CHARACTERS:]}")
        if result.error.startswith("OutOfMemoryError"):
            raise NotRun(f"too little memory on the GPU: {result.error}")
        ending = "was not done in time" if result.timed_out else f"ended with {result.status}"
        raise RuntimeError(f"rank {number} {result.error or ending}")
    return [result.figures for result in results if result.figures is not None]


def _start(
    function: RankFunction, rank: Rank, directory: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "ops.gpu.rank_process",
        function.__module__, function.__name__, rank.to_json(),
        str(directory / f"{rank.rank}.json"),
    ]  # fmt: skip
    with (directory / f"{rank.rank}.txt").open("wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )


def _is_late(process: subprocess.Popen[bytes], deadline_s: float) -> bool:
    try:
        process.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return True
    return False


def _show_stacks(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let processes print where they are; they are killed next, however far they have come."""
    for process in processes:
        process.send_signal(SHOW_STACKS)
    if processes:
        time.sleep(_SHOWING_S)


def _collect(directory: Path, rank: int, status: int, is_late: bool) -> RankResult:
    path = directory / f"{rank}.json"
    fields = json.loads(path.read_text()) if path.exists() else {}
    return RankResult(
        figures=fields.get("figures"),
        error=fields.get("error", ""),
        status=status,
        timed_out=is_late,
        output=(directory / f"{rank}.txt").read_text(errors="replace"),
    )
