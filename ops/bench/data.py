"""Checks that failures and changes of ranks and loader processes neither repeat nor lose a sample.

`python ops/bench/data.py --json [--quick]`. The last line is one JSON object: for each kind of
source how many schedules were played, how many samples were missing, repeated or out of order in
what a job counts as done, compared with an undisturbed run, and how long it took to read the first
batch at a stored position (median, seconds).

Each kind has 20 schedules that its seed alone decides. In 19 of them many worlds are played in this
process: `data_runs.py` says what is real there (the data code, its loader processes, what is stored
and restored) and what is not (no process group, no agents). The last one of each kind is a pass of
one real job: two nodes of two workers under `keepstep run`, of which in each pass a worker, a node
that then returns, or everything but the coordinator is killed with SIGKILL; the last time the job
resumes from storage. There the gradients, of uneven shares, are compared as
well with those that one rank computes of the whole batches, in float64 (`gradient_error`, relative,
the largest).
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# This directory has modules with the names of others, which it must not hide.
HERE = str(Path(__file__).parent)
if HERE in sys.path:
    sys.path.remove(HERE)
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import click  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from examples.local_cluster import LocalCluster  # noqa: E402
from keepstep.elastic.data.data_pass import DataPass  # noqa: E402
from keepstep.elastic.data.position import Position  # noqa: E402
from ops.bench.data_kinds import (  # noqa: E402
    KINDS,
    as_list,
    losses_of,
    mode_of,
    name_of,
    source,
    tokens_of,
    write_shards,
)
from ops.bench.data_runs import Run, play  # noqa: E402

WORKER = ROOT / "ops" / "bench" / "data_worker.py"
STEPS = 48
JOB_SEED, JOB_GLOBAL_BATCH, JOB_WORKERS = 5, 7, 2
DEADLINE_S = 300.0
MEASURES = (
    "schedules", "missing", "repeated", "out_of_order", "resume_s", "kills", "gradient_error",
)  # fmt: skip

Line = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How much is played."""

    schedules: int
    job_steps: int
    kills: int


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="2 schedules of each kind, and 2 kills.")
def main(as_json: bool, quick: bool) -> None:
    console = Console(stderr=as_json)
    # Worlds with more ranks than partitions are played on purpose.
    logging.getLogger("keepstep").setLevel(logging.ERROR)
    size = Size(2, 6, 2) if quick else Size(20, 16, len(KINDS))
    with tempfile.TemporaryDirectory(prefix="keepstep-data-") as path:
        directory = Path(path)
        write_shards(directory / "shards")
        results = {
            kind: played(kind, directory / "shards", size.schedules - 1, console) for kind in KINDS
        }
        for kind, found in in_a_job(directory, size, console).items():
            for name, value in found.items():
                results[kind][name] = results[kind].get(name, 0) + value
    table = Table(title="samples")
    for name in ("kind", *MEASURES):
        table.add_column(name)
    for kind, result in results.items():
        table.add_row(kind, *(str(result[name]) for name in MEASURES))
    console.print(table)
    print(json.dumps(results))
    if any(result[key] for result in results.values() for key in MEASURES[1:4]):
        sys.exit(1)


def played(kind: str, shards: Path, schedules: int, console: Console) -> dict[str, Any]:
    """Return what schedules in this process found."""
    found: Counter[str] = Counter()
    resume_s: list[float] = []
    for seed in range(schedules):
        rng = random.Random(f"{kind}/{seed}")
        global_batch = rng.choice((4, 6, 7, 12))
        runs = [
            Run(
                world_size=rng.randint(1, min(5, global_batch)),
                # torchdata's loader has processes of its own.
                workers=0 if kind == "loader" else rng.choice((0, 0, 1, 2)),
                read=rng.randint(2, 16),
                lost=rng.randint(0, 4),
            )
            for _ in range(rng.randint(3, 5))
        ]

        def make() -> Any:
            return source(kind, shards)

        undisturbed = play(make, global_batch, STEPS, []).batches
        disturbed = play(make, global_batch, STEPS, runs)
        resume_s += disturbed.resume_s
        found += compare(
            [batch[-1] for batch in undisturbed], [batch[-1] for batch in disturbed.batches]
        )
        # Also what was read and lost again must have been right.
        found["out_of_order"] += sum(
            list(map(name_of, reading)) != list(map(name_of, batch[-1]))
            for batch in disturbed.batches
            for reading in batch
        )
    console.print(f"{kind}: {schedules} schedules {dict(found)}")
    return {
        "schedules": schedules,
        **{name: found[name] for name in ("missing", "repeated", "out_of_order")},
        "resume_s": round(statistics.median(resume_s), 4),
    }


def compare(expected: Sequence[list[Any]], found: Sequence[list[Any]]) -> Counter[str]:
    """Count how the samples of global batches differ from those expected."""
    expected_names = [name_of(sample) for batch in expected for sample in batch]
    names = [name_of(sample) for batch in found for sample in batch]
    missing = Counter(expected_names) - Counter(names)
    repeated = Counter(names) - Counter(expected_names)
    differing = sum(map(lambda one, other: one != other, expected_names, names))
    return Counter(
        missing=missing.total(),
        repeated=repeated.total(),
        out_of_order=0 if missing or repeated else differing,
    )


def in_a_job(directory: Path, size: Size, console: Console) -> dict[str, dict[str, Any]]:
    """Run a job with a pass over each kind, kill workers and nodes, and return what was found."""
    log = directory / "log"
    log.mkdir()
    options = {
        "log": str(log), "shards": str(directory / "shards"), "kinds": KINDS, "seed": JOB_SEED,
        "steps": size.job_steps, "global_batch": JOB_GLOBAL_BATCH, "workers": JOB_WORKERS,
        "pause_s": 0.05, "checkpoint": str(directory / "checkpoints"),
    }  # fmt: skip
    rng = random.Random(JOB_SEED)
    kills: Counter[str] = Counter()
    script = [str(WORKER), json.dumps(options)]
    logs = directory / "agents"
    with LocalCluster("data", script, nnodes="1:2", workers=2, log=logs, last_call_s=60) as cluster:
        cluster.start("a")
        cluster.start("b")
        for number, kind in enumerate(KINDS):
            # Quick ones are spread over the passes.
            if number * size.kills // len(KINDS) == (number - 1) * size.kills // len(KINDS):
                continue
            begin = number * size.job_steps
            after = begin + rng.randint(1, size.job_steps - 3)
            line = wait_for_step(cluster, log, after)
            victims = ("worker", "node", "all")[kills.total() % 3]
            kill(cluster, victims, line["pid"])
            kills[kind] += 1
            console.print(f"{kind}: {victims} killed after step {line['step']}, pass from {begin}")
            if line["step"] > begin + size.job_steps:
                raise RuntimeError(
                    f"the pass over {kind} was over before its kill; {cluster.output()}"
                )
        status = cluster.wait("a", DEADLINE_S)
        if status != 0:
            raise RuntimeError(f"the job ended with status {status}:\n{cluster.output()}")
    sizes = sorted({line["world_size"] for path in log.glob("*") for line in lines_of(path)})
    console.print(f"the job had {sizes} ranks")
    return {
        kind: {"schedules": 1, "kills": kills[kind], **found}
        for kind, found in judged(directory, size.job_steps)
    }


def kill(cluster: LocalCluster, victims: str, pid: int) -> None:
    """Kill a worker by its pid, node b, or both nodes; nodes are started again."""
    if victims == "worker":
        os.kill(pid, signal.SIGKILL)
        return
    nodes = ("b",) if victims == "node" else ("a", "b")
    for node in nodes:
        cluster.kill(node)
    for node in nodes:
        cluster.start(node)


def wait_for_step(cluster: LocalCluster, log: Path, step: int) -> Line:
    """Wait until a rank has computed a step; return the newest line."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        lines = [line for path in log.glob("rank-*.jsonl") for line in lines_of(path)[-1:]]
        newest = max(lines, key=lambda line: (line["generation"], line["step"]), default=None)
        if newest is not None and newest["step"] >= step:
            return newest
        if cluster.agents["a"].poll() is not None:
            break
        time.sleep(0.01)
    raise RuntimeError(f"step {step} was not reached:\n{cluster.output()}")


def lines_of(path: Path) -> list[Line]:
    """Return the complete lines of a file that may be written to."""
    return [json.loads(text) for text in path.read_text().split("\n")[:-1]]


def judged(directory: Path, steps: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield, by kind, how the job's samples and gradients differ from those of one rank."""
    recorded: dict[int, dict[int, dict[int, Line]]] = defaultdict(lambda: defaultdict(dict))
    for path in (directory / "log").glob("rank-*.jsonl"):
        for line in lines_of(path):
            recorded[line["step"]][line["generation"]][line["rank"]] = line
    weight = torch.full((1, 4), 0.5, dtype=torch.float64)
    for number, kind in enumerate(KINDS):
        data: DataPass[Any] = DataPass(
            number, number * steps, JOB_SEED, source(kind, directory / "shards"), JOB_GLOBAL_BATCH,
            steps=steps, collate=as_list,
        )  # fmt: skip
        begin = Position(number * steps, number * steps)
        expected, found, error = [], [], 0.0
        for step, batch in enumerate(data.from_position(begin, 0, 1), begin.step + 1):
            ranks = recorded[step][max(recorded[step])]
            expected.append([name_of(sample) for sample in batch])
            found.append([name for rank in sorted(ranks) for name in ranks[rank]["samples"]])
            gradient = gradient_of(weight, batch, mode_of(number))
            recorded_gradient = torch.tensor(ranks[0]["gradient"], dtype=torch.float64)
            error = max(error, float((recorded_gradient - gradient).norm() / gradient.norm()))
            weight -= 0.05 * gradient
        differing = compare(expected, found)
        measures = {name: differing[name] for name in ("missing", "repeated", "out_of_order")}
        yield kind, {**measures, "gradient_error": error}


def gradient_of(weight: torch.Tensor, batch: list[Any], mode: str) -> torch.Tensor:
    """Return the gradient that one rank computes of a whole batch."""
    weight = weight.clone().requires_grad_()
    losses = losses_of(lambda x: x @ weight.T, batch)
    tokens = tokens_of(batch)
    loss = (losses * tokens).sum() / tokens.sum() if mode == "tokens" else losses.mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    return gradient


if __name__ == "__main__":
    main()
