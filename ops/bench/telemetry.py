"""What recording costs a worker: microseconds an operation, and the share of a training step.

`python ops/bench/telemetry.py --json [--quick]`. The last line is one JSON object.

`operation_us` is one all-reduce of 16 bytes in a group of one, the cheapest there is, called again and again on one thread: processor time
of the process with its backend's threads, so that neither waiting nor other processes count. `phase_us` is a mark, `measure_us` a measure,
`read_us` what another process needs for the last 4,096 records of each lane. `step` is a small GPT under FSDP2 on two ranks with one
thread each; windows of steps with and without recording take turns. The share that recording takes of a step is given twice: `overhead_share`
as measured (the median of the ratios of neighbouring windows' processor times, less one, with their spread: the noise of a shared
machine), and `overhead_share_computed` from the step's operations and marks and what one of each costs.
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

# The benchmark beside this file is called as the package is.
sys.path.remove(str(Path(__file__).parent))

import click

from keepstep.elastic.store.ports import ReservedPort

ROOT = Path(__file__).parents[2]
WORLD = 2

Result = dict[str, Any]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Nothing on stdout but the last line.")
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
                    **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]), "OMP_NUM_THREADS": "1",
                    "RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number),
                    "KEEPSTEP_MONITOR_DIR": directory, "KEEPSTEP_JOB": "bench", "BENCH_QUICK": "1" if quick else "",
                },
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        told = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit("a worker failed; what it printed is above")
    result = json.loads(told[0].splitlines()[-1])
    if not as_json:
        print(json.dumps(result, indent=2))
    print(json.dumps(result))


def best_us(act: Callable[[], object], repeats: int, count: int = 1000) -> float:
    """Return the processor time of one call in microseconds: the least of several runs."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(count):
            act()
        found.append(1e6 * (time.process_time() - began) / count)
    return min(found)


def work() -> None:
    """Be one rank; rank 0 prints the result."""
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
    alone = [dist.new_group([one]) for one in range(WORLD)][rank]
    result: Result = {}

    if rank == 0:
        repeats = 5 if quick else 15
        one = torch.ones(4)
        operation_us: dict[str, list[float]] = {"with": [], "without": []}
        for _ in range(3):
            for way, change in (("without", detach), ("with", monitor.attach)):
                change()
                best_us(lambda: dist.all_reduce(one, group=alone), 1)
                operation_us[way].append(
                    best_us(lambda: dist.all_reduce(one, group=alone), repeats)
                )
        recorder = monitor.attach()
        rings = JobRings(job_directory("bench"))
        result = {
            "operation_us": {way: round(min(found), 2) for way, found in operation_us.items()},
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
        """Return seconds and processor seconds of a step."""
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
    found: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    for turn in range(windows):
        # Either goes first as often as the other.
        for way in ("with", "without") if turn % 2 else ("without", "with"):
            (monitor.attach if way == "with" else detach)()
            window(1)
            found[way].append(window(steps))
    monitor.attach()
    window(steps)
    dist.barrier()
    if rank == 0:
        records = JobRings(job_directory("bench")).read(2**14).ranks[0].records
        mine = records[records["step"] == records["step"].max() - 2]
        operations = int((mine["kind"] == Kind.OPERATION).sum())
        marks = len(mine) - operations
        step_s = statistics.median(seconds for seconds, _ in found["without"])
        cpu_s = statistics.median(seconds for _, seconds in found["without"])
        shares = sorted(
            a[1] / b[1] - 1 for a, b in zip(found["with"], found["without"], strict=True)
        )
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
    # gloo's threads abort some interpreters that end in good order.
    os._exit(0)


if __name__ == "__main__":
    work() if sys.argv[1:] == ["worker"] else main()
