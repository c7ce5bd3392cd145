"""Measures how jobs end that stand still, and whether healthy ones are left alone.

`python ops/bench/standstill.py --json [--quick] [--only KIND] [--limit S] [--lumpy-minutes M]`. The
last line is one JSON object.

Each job is `keepstep run` with two ranks, `--monitor` and `--standstill-limit`, with a `keepstep
monitor --act restart`. In `hangs` rank 1 hangs in one of eight ways, once or again after each
restart: `ended` is `recovery` if training went on, `evidence` if the job ended with the ranks'
stacks, and `nothing` if neither came within four limits; `seconds` count from the (first) hang to
the next step, or to the end. `generations` are those that the job had.

`lumpy` are healthy jobs with pauses of half the limit, all at once: irregular steps, evaluations by
one rank and by all, a long save, slow data. `actions` counts restarts by agents and monitor.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.remove(str(HERE))
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

import click  # noqa: E402

sys.path.insert(1, str(HERE))
from standstill_worker import HABITS, HANGS, HANGS_AT  # noqa: E402

sys.path.remove(str(HERE))

_AT_A_TIME = 4
_START_S = 120.0
_ENDLESS = 10**6
_KEEPSTEP = (sys.executable, "-P", "-m", "keepstep")


@dataclass(frozen=True)
class Ending:
    """How a job with a hang ended; see the module."""

    kind: str
    again: bool
    ended: str
    seconds: float | None
    generations: int


class Run:
    """A job, its monitor, and the output of both."""

    def __init__(
        self, directory: Path, kind: str, when: str, steps: int, limit_s: float, pause_s: float
    ) -> None:
        directory.mkdir()
        self.steps_log, self._agent, self._monitor = (
            directory / name for name in ("steps", "agent", "monitor")
        )
        self.steps_log.touch()
        job = directory.name
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_RUNTIME_DIR": str(directory.parent),
            "KEEPSTEP_MONITOR_DIR": str(directory / "rings"),
            "STANDSTILL_PAUSE_S": str(pause_s),
        }
        worker = (str(HERE / "standstill_worker.py"), str(self.steps_log), kind, when, str(steps))
        limit = ("--standstill-limit", str(limit_s / 60))
        self.agent = _start(
            (
                *_KEEPSTEP,
                "run",
                "--job",
                job,
                "--nproc-per-node",
                "2",
                "--monitor",
                *limit,
                *worker,
            ),
            environment,
            self._agent,
        )
        self._watching = _start(
            (*_KEEPSTEP, "monitor", "--job", job, "--port", "0", "--act", "restart"),
            environment,
            self._monitor,
        )

    @property
    def printed(self) -> str:
        """Output of the agent and of the workers."""
        return self._agent.read_text(errors="replace")

    @property
    def generations(self) -> int:
        """How many generations the job had."""
        return max((int(n) for n in re.findall(r"generation (\d+): ", self.printed)), default=0)

    @property
    def actions(self) -> int:
        """How often ranks were restarted, or their restart requested."""
        return max(0, self.generations - 1) + self._monitor.read_text().count("; requested")

    def events(self) -> list[tuple[float, str]]:
        """Return what the ranks have noted, with the wall clock's time."""
        lines = self.steps_log.read_text().splitlines()
        return [(float(at), event) for at, _, event in (line.partition(" ") for line in lines)]

    def end(self) -> None:
        """End both."""
        for process in (self._watching, self.agent):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(
    command: Sequence[str], environment: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


@contextmanager
def running(directory: Path, *options: Any) -> Iterator[Run]:
    """Run a job while the context lasts."""
    run = Run(directory, *options)
    try:
        yield run
    finally:
        run.end()


def measure_hang(directory: Path, kind: str, again: bool, limit_s: float) -> Ending:
    """Return how a job with a hanging rank ended.

    Args:
        directory: for its files; must not exist.
        kind: how it hangs.
        again: whether it hangs again after each restart.
        limit_s: how long the job may stand still.
    """
    when, steps = ("always", _ENDLESS) if again else ("once", HANGS_AT + 20)
    with running(directory, kind, when, steps, limit_s, 0.0) as run:
        until_s, hung_s = time.time() + _START_S, None
        while time.time() < until_s:
            time.sleep(0.2)
            events = run.events()
            if hung_s is None:
                hung_s = next((at_s for at_s, event in events if event == "hangs"), None)
                until_s = time.time() + 4 * limit_s + 60 if hung_s is not None else until_s
            if run.agent.poll() is not None:
                break
        hung_s = hung_s or time.time()
        is_done = f"step {HANGS_AT + 20}" in (event for _, event in run.events())
        if is_done and not again:
            after_s = next(at_s for at_s, event in run.events() if event == f"step {HANGS_AT + 1}")
            return Ending(kind, again, "recovery", round(after_s - hung_s, 1), run.generations)
        has_evidence = (
            run.agent.poll() == 1 and "stands at:" in run.printed.rpartition("keepstep: ")[2]
        )
        if has_evidence:
            return Ending(kind, again, "evidence", round(time.time() - hung_s, 1), run.generations)
        return Ending(kind, again, "nothing", None, run.generations)


def measure_lumpy(directory: Path, limit_s: float, minutes: float) -> dict[str, Any]:
    """Return what was done to healthy jobs with pauses."""
    began_s, runs = time.time(), list[Run]()
    try:
        for number, habit in enumerate(HABITS):
            runs.append(
                Run(directory / f"lumpy{number}", habit, "never", _ENDLESS, limit_s, limit_s / 2)
            )
        time.sleep(minutes * 60)
        ended = [run for run in runs if run.agent.poll() is not None]
        jobs = [
            {"habit": habit, "steps": len(run.events()), "actions": run.actions}
            for habit, run in zip(HABITS, runs, strict=True)
        ]
        hours = len(runs) * (time.time() - began_s) / 3600
    finally:
        for run in runs:
            run.end()
    actions = sum(int(job["actions"]) for job in jobs) + len(ended)
    return {"jobs": jobs, "job_hours": round(hours, 2), "actions": actions}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="A limit of 15 s, two kinds, and one lumpy minute.")
@click.option("--only", "kinds", multiple=True, type=click.Choice([*HANGS]), help="Kind of hang.")
@click.option("--limit", default=60.0, show_default=True, help="Seconds a job may stand still.")
@click.option("--lumpy-minutes", default=12.0, show_default=True, help="0: no lumpy jobs.")
def main(
    as_json: bool, quick: bool, kinds: tuple[str, ...], limit: float, lumpy_minutes: float
) -> None:
    """Measure how jobs end that stand still."""
    chosen = kinds or tuple(HANGS)[: 2 if quick else len(HANGS)]
    limit_s, minutes = (15.0, 1.0) if quick else (limit, lumpy_minutes)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(_AT_A_TIME) as pool:
        directory = Path(name)
        measured = [
            pool.submit(measure_hang, directory / f"hang{number}", kind, again, limit_s)
            for number, (kind, again) in enumerate(
                (kind, again) for kind in chosen for again in (False, True)
            )
        ]
        endings = [each.result() for each in measured]
        lumpy = measure_lumpy(directory, limit_s, minutes) if minutes else None
    if not as_json:
        for ending in endings:
            click.echo(f"{ending.kind:24} {'again' if ending.again else 'once':6} {ending.ended}")
    result = {
        "benchmark": "standstill",
        "limit_s": limit_s,
        "hangs": [asdict(ending) for ending in endings],
        "unended": sum(ending.ended == "nothing" for ending in endings),
        "lumpy": lumpy,
    }
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
