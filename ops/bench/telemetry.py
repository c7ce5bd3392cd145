"""Measures the cost of recording in a worker: per operation, and as a share of a training step.

`python ops/bench/telemetry.py --json [--quick]`. The last line is one JSON object.

`operation_us` is the time of an all-reduce of 16 bytes in a group of one rank, the cheapest
operation, called repeatedly on one thread: processor time of the process with its backend's
threads, so that neither waiting nor other processes count. `phase_us` is the time of a mark,
`measure_us` of a measure, `read_us` of reading the last 4,096 records of each lane in another
process. `step` is a step of a small GPT with FSDP2 on two ranks with one thread each; windows of
steps with and without recording alternate. The share of recording in a step is given twice:
`overhead_share` as measured (the median of the ratios of neighbouring windows' processor times,
minus one, with quartiles that show the noise of a shared machine), and `overhead_share_computed`
from the numbers of operations and marks in a step and the cost of each.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# This directory has modules with the names of others, which it must not hide.
sys.path.remove(str(Path(__file__).parent))

import click

from keepstep.elastic.store.ports import ReservedPort

ROOT = Path(__file__).parents[2]
WORLD = 2

Result = dict[str, Any]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="Fewer repeats.")
def main(as_json: bool, quick: bool) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="keepstep-bench-", dir="/dev/shm") as directory,
        ReservedPort() as port,
    ):
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "worker"],
                env={
                    **os.environ, "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
                    "RANK": str(rank), "WORLD_SIZE": str(WORLD),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number),
                    "KEEPSTEP_MONITOR_DIR": directory, "KEEPSTEP_JOB": "bench",
                    "BENCH_QUICK": "1" if quick else "",
                },
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit("a worker failed; see its output above")
    result = json.loads(outputs[0].splitlines()[-1])
    if not as_json:
        print(json.dumps(result, indent=2))
    print(json.dumps(result))


def best_us(act: Callable[[], object], repeats: int, count: int = 1000) -> float:
    """Return the processor time of one call in microseconds: the minimum of several runs."""
    times_us = []
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(count):
            act()
        times_us.append(1e6 * (time.process_time() - began) / count)
    return min(times_us)


def work() -> None:
    """Run one rank; rank 0 prints the result."""
    import torch
    import torch.distributed as dist
    from gpt import GPT, GPTConfig, initialize
    from torch.distributed.fsdp import fully_shard

    from keepstep import monitor
    from keepstep.monitor.records import Kind, Measure, Phase
    from keepstep.monitor.telemetry.attachment import detach
    from keepstep.monitor.telemetry.job_rings import JobRings
    from keepstep.monitor.telemetry.ring_files import job_directory

    torch.set_num_threads(1)
    quick = bool(os.environ["BENCH_QUICK"])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own_group = [dist.new_group([member]) for member in range(WORLD)][rank]
    result: Result = {}

    if rank == 0:
        repeats = 5 if quick else 15
        values = torch.ones(4)
        operation_us: dict[str, list[float]] = {"with": [], "without": []}
        for _ in range(3):
            for variant, change in (("without", detach), ("with", monitor.attach)):
                change()
                best_us(lambda: dist.all_reduce(values, group=own_group), 1)
                operation_us[variant].append(
                    best_us(lambda: dist.all_reduce(values, group=own_group), repeats)
                )
        recorder = monitor.attach()
        rings = JobRings(job_directory("bench"))
        result = {
            "operation_us": {
                variant: round(min(times_us), 2) for variant, times_us in operation_us.items()
            },
            "phase_us": round(
                best_us(lambda: recorder.end(recorder.begin(Phase.CHECKPOINT)), repeats), 2
            ),
            "measure_us": round(best_us(lambda: recorder.measure(Measure.LOSS, 1.5), repeats), 2),
            "read_us": round(best_us(lambda: rings.read(4096), repeats, 10), 1),
        }
        rings.close()

    config = GPTConfig(width=128, layers=6, heads=4, context=64)
    model = GPT(config)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    initialize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, config.vocabulary, (2, config.context))

    def window(steps: int) -> tuple[float, float]:
        """Return the seconds and processor seconds of a step."""
        dist.barrier()
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        for _ in range(steps):
            loss = model((tokens, tokens))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.monotonic() - began_s) / steps, (time.process_time() - began_cpu_s) / steps

    windows, steps = (4, 10) if quick else (12, 10)
    monitor.attach()
    window(5)
    durations: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    for turn in range(windows):
        # Each goes first equally often.
        for variant in ("with", "without") if turn % 2 else ("without", "with"):
            (monitor.attach if variant == "with" else detach)()
            window(1)
            durations[variant].append(window(steps))
    monitor.attach()
    window(steps)
    dist.barrier()
    if rank == 0:
        records = JobRings(job_directory("bench")).read(2**14).ranks[0].records
        step_records = records[records["step"] == records["step"].max() - 2]
        operations = int((step_records["kind"] == Kind.OPERATION).sum())
        marks = len(step_records) - operations
        step_s = statistics.median(seconds for seconds, _ in durations["without"])
        cpu_s = statistics.median(seconds for _, seconds in durations["without"])
        pairs = zip(durations["with"], durations["without"], strict=True)
        shares = sorted(recorded_s / plain_s - 1 for (_, recorded_s), (_, plain_s) in pairs)
        added_us = result["operation_us"]["with"] - result["operation_us"]["without"]
        result["step"] = {
            "step_s": round(step_s, 5),
            "processor_s": round(cpu_s, 5),
            "operations": operations,
            "marks": marks,
            "operations_per_s": round(operations / step_s),
        }
        result["overhead_share"] = {
            "median": round(statistics.median(shares), 4),
            "lower_quartile": round(shares[len(shares) // 4], 4),
            "upper_quartile": round(shares[-1 - len(shares) // 4], 4),
        }
        result["overhead_share_computed"] = round(
            (operations * added_us + marks * result["phase_us"]) / 1e6 / step_s, 6
        )
        print(json.dumps(result), flush=True)
    dist.barrier()
    # gloo's threads may abort the process at the interpreter's exit.
    os._exit(0)


if __name__ == "__main__":
    work() if sys.argv[1:] == ["worker"] else main()
