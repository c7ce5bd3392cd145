"""Strikes jobs whose device and back end behave as CUDA and NCCL do, and counts what came of it.

`python ops/bench/device_semantics.py --json [--quick] [--seed N] [--without-fence]`. The last line
is one JSON object. There is no GPU: device and back end are those of `tests/queued_device`, which
says what they imitate. Each schedule strikes a running job once, by a kind of fault that the seed
draws, and waits until the job makes steps again; ten schedules share a job, which `keepstep monitor
--act restart` watches. `--without-fence` shows what the fence prevents: workers abort and seal as
they would without it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from examples.local_cluster import LocalCluster  # noqa: E402
from keepstep.monitor.telemetry.attachment import attach, detach  # noqa: E402
from tests.queued_device.process_group import BACK_END, register  # noqa: E402
from tests.queued_device.queue import DEVICE  # noqa: E402
from tests.queued_device.schedules import SCRIPT, Outcome, QueuedJob, draw  # noqa: E402
from tests.queued_device.tensor import QueuedTensor  # noqa: E402

SCHEDULES_PER_JOB = 10
WEIGHTS = {"kill": 30, "lost": 25, "slow": 20, "entry": 10, "build": 5, "hang": 10}
LIMIT_S = 180.0
OPERATIONS, ROUNDS = 1000, 5


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="One job of ten schedules instead of ten.")
@click.option("--seed", default=1, show_default=True)
@click.option("--without-fence", is_flag=True, help="Abort and seal as if there were no fence.")
def main(as_json: bool, quick: bool, seed: int, without_fence: bool) -> None:
    console = Console(stderr=as_json)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = str(ROOT)
    schedules = draw(seed, SCHEDULES_PER_JOB * (1 if quick else 10), WEIGHTS)
    outcomes = []
    for first in range(0, len(schedules), SCHEDULES_PER_JOB):
        part = schedules[first : first + SCHEDULES_PER_JOB]
        outcome = run_job(part, fence=not without_fence)
        console.print(f"{', '.join(f'{kind} {rank}' for kind, rank in part)}: {outcome}")
        outcomes.append(outcome)
    recoveries = [seconds for outcome in outcomes for seconds in outcome.recovery_s]
    print(
        json.dumps(
            {
                "schedules": sum(outcome.schedules for outcome in outcomes),
                "poisoned_sealed": sum(outcome.poisoned_sealed for outcome in outcomes),
                "poisoned_resumed": sum(outcome.poisoned_resumed for outcome in outcomes),
                "recovered": sum(outcome.recovered for outcome in outcomes),
                "replaced_processes": sum(outcome.replaced_processes for outcome in outcomes),
                "hangs_found": f"{sum(outcome.hangs_found for outcome in outcomes)}/"
                f"{sum(outcome.hangs for outcome in outcomes)}",
                "recovery_s": {
                    "median": round(statistics.median(recoveries), 2),
                    "worst": round(max(recoveries), 2),
                },
                "overhead_us_per_op": round(overhead_us_per_op(), 2),
            }
        )
    )


def run_job(faults: Sequence[tuple[str, int]], *, fence: bool) -> Outcome:
    """Strike one job by these faults, one after the other."""
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        directory = Path(name)
        log = directory / "log"
        log.mkdir()
        os.environ["KEEPSTEP_MONITOR_DIR"] = os.fspath(directory / "rings")
        options = json.dumps({"log": os.fspath(log), "fence": fence})
        with (
            LocalCluster(
                "job",
                [os.fspath(SCRIPT), options],
                nnodes="2:2",
                workers=1,
                log=directory / "agents",
                last_call_s=60.0,
            ) as running,
            monitored(running.url, directory / "monitor.log"),
        ):
            job = QueuedJob(running, log, LIMIT_S)
            job.start("--monitor")
            for kind, rank in faults:
                job.strike(kind, rank)
            job.finish()
        return job.outcome


@contextmanager
def monitored(url: str, log: Path) -> Iterator[None]:
    """Run `keepstep monitor` of the job, which may restart workers."""
    command = [
        sys.executable, "-P", "-m", "keepstep", "monitor",
        "--job", "job", "--port", "0", "--store", url, "--act", "restart",
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def overhead_us_per_op() -> float:
    """Return what recording a collective costs, by the median of paired rounds, in microseconds."""
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        os.environ["KEEPSTEP_MONITOR_DIR"] = name
        register(Path(name))
        store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        dist.init_process_group(BACK_END, store=store, rank=0, world_size=1)
        values = QueuedTensor(torch.zeros(256))

        def round_s() -> float:
            began_s = time.perf_counter()
            for _ in range(OPERATIONS):
                dist.all_reduce(values)
            DEVICE.synchronize()
            return time.perf_counter() - began_s

        round_s()
        differences = []
        for _ in range(ROUNDS):
            plain_s = round_s()
            attach(job="bench", rank=0)
            differences.append(round_s() - plain_s)
            detach()
        dist.destroy_process_group()
    return 1e6 * statistics.median(differences) / OPERATIONS


if __name__ == "__main__":
    main()
