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

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0


class Job:
    """`size` processes that run the scenario of that name in `scenarios.py`, and what their rings tell."""

    def __init__(
        self, base: Path, scenario: str, size: int, *prefix: str, **environment: str
    ) -> None:
        self._port = ReservedPort()
        self.workers: list[subprocess.Popen[str]] = []
        for rank in range(size):
            self.workers.append(
                subprocess.Popen(
                    [sys.executable, *prefix, str(Path(__file__).with_name("scenarios.py")), scenario],
                    env={
                        **os.environ, "KEEPSTEP_MONITOR_DIR": str(base),
                        "RANK": str(rank), "WORLD_SIZE": str(size), "KEEPSTEP_JOB": "test", "KEEPSTEP_NODE": "here",
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port.number), "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": str(ROOT), **environment,
                    },
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
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
                raise AssertionError(f"rank {rank} ended without saying {word!r}")

    def proceed(self, *ranks: int) -> None:
        """Let ranks that wait go on."""
        for rank in ranks or range(len(self.workers)):
            stdin = self.workers[rank].stdin
            assert stdin is not None
            stdin.write("go\n")
            stdin.flush()

    def read_until(self, condition: Callable[[JobRecords], bool]) -> JobRecords:
        """Read the rings until they tell what is waited for."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition(told := self.rings.read(2**14)):
            assert time.monotonic() < deadline_s, told
            assert len(told.ranks) < len(self.workers) or any(
                one.is_alive for one in told.ranks.values()
            ), told
        return told

    def finish(self) -> None:
        """Wait for all to end in good order."""
        for worker in self.workers:
            worker.communicate()
            assert worker.returncode == 0


def operations(records: Records, step: int | None = None) -> Records:
    """Return the operations among records, of one step if given."""
    is_wanted = records["kind"] == Kind.OPERATION
    return records[is_wanted if step is None else is_wanted & (records["step"] == step)]


def names(records: Records) -> list[str]:
    """Return what operations they are."""
    return [Operation(code).name for code in records["code"]]


def is_pair(records: Records) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Return which are sends and receives."""
    return np.isin(records["code"], (Operation.SEND, Operation.RECEIVE))
