"""Runs cases in worker processes, and kills what does not come to an end."""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Of processor time, for other processes may keep the processors busy; and of any.
_MOST_CPU_S = 10.0
_MOST_S = 120.0
# A process that waits for the next case waits for a processor too.
_AT_ONCE = 16

Case = tuple[str, str]
"""The name of a format or decoder, and the seed of its random numbers."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A case that ended neither in a result nor in an error of keepstep's."""

    name: str
    number: str
    result: str
    error: str


@dataclass(slots=True)
class Outcomes:
    """The outcome of all cases.

    Attributes:
        counts: by name, how many cases were read and how many refused.
        findings: the others.
    """

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def add(self, name: str, result: str) -> None:
        """Count a case."""
        self.counts.setdefault(name, Counter())[result] += 1


class _Worker:
    """One process, and the case that it is at."""

    def __init__(self, place: Path, kept: Path, origins: Mapping[str, str]) -> None:
        place.mkdir(parents=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", str(place), str(kept),
             json.dumps(dict(origins))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            # Each arena of a thread has 64 MiB of addresses, which are limited.
            env={**os.environ, "MALLOC_ARENA_MAX": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()
        if self._lines.get() != "ready\n":
            raise RuntimeError("a worker could not read what was not changed; see above")

    def _receive(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def results_of(self, cases: Sequence[Case]) -> Iterator[dict[str, str | None]]:
        """Yield what came of cases, fewer than all if the process ended or had to be killed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("".join(json.dumps(case) + "\n" for case in cases))
            self._process.stdin.flush()
        except BrokenPipeError:
            # The line that says so is read below.
            pass
        for name, number in cases:
            own = {"name": name, "number": number}
            begin_s, begin_cpu_s = time.monotonic(), self._cpu_s()
            while True:
                try:
                    line = self._lines.get(timeout=0.5)
                    break
                except queue.Empty:
                    took_s = time.monotonic() - begin_s
                    if took_s > _MOST_S or self._cpu_s() - begin_cpu_s > _MOST_CPU_S:
                        self.end()
                        yield {**own, "result": "hang", "error": f"no end after {took_s:.0f} s"}
                        return
            if not line:
                status = self._process.wait()
                yield {**own, "result": "crash", "error": f"the process ended: {status}"}
                return
            result: dict[str, str | None] = json.loads(line)
            yield result

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _cpu_s(self) -> float:
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def run(cases: Iterator[Case], seeds: Mapping[str, Path], kept: Path, workers: int) -> Outcomes:
    """Run cases until there are no more.

    Args:
        cases: their names and numbers.
        seeds: the directories of the seeds, by name.
        kept: where the files of findings go.
        workers: how many processes.
    """
    outcomes = Outcomes()
    lock = threading.Lock()
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    origins = {name: str(path) for name, path in seeds.items()}
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

    def next_cases() -> list[Case]:
        with lock:
            return list(itertools.islice(cases, _AT_ONCE))

    def serve(place: Path) -> None:
        numbers = itertools.count()
        worker: _Worker | None = None
        try:
            while batch := next_cases():
                if worker is None or not worker.is_alive:
                    worker = _Worker(place / str(next(numbers)), kept, origins)
                for case, result in zip(batch, worker.results_of(batch), strict=False):
                    with lock:
                        outcomes.add(case[0], str(result["result"]))
                        if result["error"] is not None:
                            outcomes.findings.append(
                                Finding(*case, str(result["result"]), str(result["error"]))
                            )
        except BaseException as error:  # noqa: BLE001 - it is raised by the thread that waits
            failures.put(error)
        finally:
            if worker is not None:
                worker.end()

    with tempfile.TemporaryDirectory(dir=memory) as directory:
        threads = [
            threading.Thread(target=serve, args=(Path(directory) / f"worker-{number}",))
            for number in range(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if not failures.empty():
        raise failures.get()
    return outcomes


def cases_of(names: Sequence[str], seed: int, count: int | None) -> Iterator[Case]:
    """Yield cases, of each name in turn: so many of each, or without end."""
    numbers = itertools.count() if count is None else range(count)
    for number in numbers:
        for name in names:
            yield name, f"{seed}/{name}/{number}"
