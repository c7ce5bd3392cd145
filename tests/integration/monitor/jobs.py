"""Real jobs of a few gloo processes, whose rings the tests read from outside while they run."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np

from keepstep.elastic.store.ports import ReservedPort
from keepstep.monitor.records import JobRecords, Kind, Operation
from keepstep.monitor.telemetry.job_rings import JobRings
from keepstep.monitor.telemetry.ring_reader import Records
from tests.adaptive_timeouts import patient

ROOT = Path(__file__).parents[3]
SCENARIOS = Path(__file__).with_name("scenarios.py")
DEADLINE_S = 60.0


class Job:
    """`size` processes that run a scenario of `scenarios.py`, and their rings."""

    def __init__(
        self, base: Path, scenario: str, size: int, *prefix: str, **environment: str
    ) -> None:
        self._port = ReservedPort()
        self.workers: list[subprocess.Popen[str]] = []
        for rank in range(size):
            self.workers.append(
                subprocess.Popen(
                    [sys.executable, *prefix, str(SCENARIOS), scenario],
                    env={
                        **os.environ,
                        "KEEPSTEP_MONITOR_DIR": str(base),
                        "RANK": str(rank),
                        "WORLD_SIZE": str(size),
                        "KEEPSTEP_JOB": "test",
                        "KEEPSTEP_NODE": "here",
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(self._port.number),
                        "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": str(ROOT),
                        **environment,
                    },
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        self.rings = JobRings(base / "test")

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.rings.close()
        for worker in self.workers:
            worker.kill()
            worker.communicate()
        self._port.close()

    def expect(self, word: str, *ranks: int) -> None:
        """Wait until these ranks (all, if none are named) print a word."""
        for rank in ranks or range(len(self.workers)):
            stdout = self.workers[rank].stdout
            assert stdout is not None
            for line in stdout:
                if line.strip() == word:
                    break
            else:
                raise AssertionError(f"rank {rank} ended without printing {word!r}")

    def proceed(self, *ranks: int) -> None:
        """Let waiting ranks continue."""
        for rank in ranks or range(len(self.workers)):
            stdin = self.workers[rank].stdin
            assert stdin is not None
            stdin.write("go\n")
            stdin.flush()

    def read_until(self, condition: Callable[[JobRecords], bool]) -> JobRecords:
        """Read the rings until a condition holds."""
        deadline_s = time.monotonic() + patient(DEADLINE_S)
        while not condition(records := self.rings.read(2**14)):
            assert time.monotonic() < deadline_s, records
            is_any_alive = any(rank.is_alive for rank in records.ranks.values())
            assert len(records.ranks) < len(self.workers) or is_any_alive, records
        return records

    def finish(self) -> None:
        """Wait until all have ended normally."""
        for worker in self.workers:
            worker.communicate()
            assert worker.returncode == 0


def operations(records: Records, step: int | None = None) -> Records:
    """Return the operations among records, of one step if given."""
    is_wanted = records["kind"] == Kind.OPERATION
    return records[is_wanted if step is None else is_wanted & (records["step"] == step)]


def names(records: Records) -> list[str]:
    """Return the names of operations."""
    return [Operation(code).name for code in records["code"]]


def is_pair(records: Records) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Return which operations are sends or receives."""
    return np.isin(records["code"], (Operation.SEND, Operation.RECEIVE))
