"""Measures what frameworks lose with a worker, under keepstep and as their users have them today.

`python ops/bench/integrations.py --json [--quick] [--only NAME] [--environments DIR]`. The last
line is one JSON object. Each framework trains the same model on two gloo workers by two scripts in
`ops/bench/frameworks`: one stores a checkpoint every 50 steps by the framework's own means, resumes
from the newest, and runs under torchrun with c10d; the other is the same with keepstep's lines, and
runs under `keepstep run`, for `torchrun` under torchrun with `--rdzv-backend keepstep`. Both jobs
run side by side and take turns, one waiting while the other computes, so that the machine's drift
affects both. A worker of each is killed by SIGKILL at step 130 or the one after it, when warm
spares have long been ready.

`gap_s` is the time from the kill to the next completed step, the median of repetitions, as is
`healthy_ratio`, of the times of a step with keepstep and without. `lost_steps` were computed again;
`missing` and `repeated` count the samples of the steps that lasted. These are the worst of
repetitions. `lines_changed` are the lines that a diff of the scripts adds. `peer_` is the other.
A framework that is in no environment is named as not run; `make integrations-test` makes them.
torchtitan trains its own small Llama.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import click
import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from examples.local_cluster import process_tree, read_steps  # noqa: E402
from ops.bench.frameworks.plan import GATES, SAMPLES, STEPS, STEPS_PER_EPOCH  # noqa: E402
from ops.bench.processes import Processes, python_path  # noqa: E402
from ops.bench.recovery import Line, kill_rank, wait_for  # noqa: E402
from ops.bench.torchrun import endpoint  # noqa: E402
from ops.integrations import environment  # noqa: E402

SCRIPTS = ROOT / "ops" / "bench" / "frameworks"
WORLD = 2
KILL_AT = 130
LIMIT_S = 300.0
QUIET_S, QUIET_SHARE, QUIET_LIMIT_S = 0.5, 0.1, 60.0
MEASURES = ("gap_s", "lost_steps", "missing", "repeated")

Measure = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Contender:
    """A framework: its module, if it is not PyTorch's own, and what runs it.

    torchtitan reads its scripts as configs.
    """

    module: str | None
    plain: str
    with_keepstep: str
    launcher: Literal["keepstep run", "torchrun"] = "keepstep run"


CONTENDERS = {
    "attach": Contender(None, "loop.py", "loop_keepstep.py"),
    "torchrun": Contender(None, "loop.py", "loop_keepstep.py", "torchrun"),
    "transformers": Contender(
        "transformers", "hugging_face_trainer.py", "hugging_face_trainer_keepstep.py"
    ),
    "accelerate": Contender("accelerate", "accelerate_loop.py", "accelerate_loop_keepstep.py"),
    "lightning": Contender("lightning", "lightning_trainer.py", "lightning_trainer_keepstep.py"),
    "torchtitan": Contender("torchtitan", "torchtitan_config.py", "torchtitan_config_keepstep.py"),
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="One kill of each job instead of three.")
@click.option("--only", type=click.Choice(list(CONTENDERS)), multiple=True)
@click.option("--environments", type=click.Path(path_type=Path), default=ROOT)
def main(as_json: bool, quick: bool, only: tuple[str, ...], environments: Path) -> None:
    console = Console(stderr=as_json)
    os.environ["OMP_NUM_THREADS"] = "1"
    # torchtitan is made for accelerators: this lets it run on processors.
    on_cpus = ROOT / "tests" / "integration" / "frameworks" / "torchtitan_on_cpus"
    os.environ["PYTHONPATH"] = python_path(on_cpus, ROOT)
    results: dict[str, Measure] = {}
    for name in only or CONTENDERS:
        python = python_of(name, environments)
        if python is None:
            results[name] = {"not_run": f"{name} is not installed: make integrations-test"}
            continue
        repetitions = [repetition(name, python, console) for _ in range(1 if quick else 3)]
        results[name] = summary(repetitions) | {"lines_changed": lines_changed(CONTENDERS[name])}
    table = Table(title="one of two workers killed by SIGKILL; keepstep, peer")
    for column in ("framework", *MEASURES, "healthy_ratio", "lines_changed"):
        table.add_column(column)
    for name, measure in results.items():
        pairs = (f"{measure.get(key, '')}, {measure.get(f'peer_{key}', '')}" for key in MEASURES)
        table.add_row(
            name, *pairs, *(str(measure.get(key, "")) for key in ("healthy_ratio", "lines_changed"))
        )
    console.print(table)
    print(json.dumps(results))


def python_of(name: str, environments: Path) -> Path | None:
    """Return the Python that has a framework: that of its environment, or this one; else None."""
    module = CONTENDERS[name].module
    here = Path(sys.executable)
    for python in (environment(name, environments) / "bin" / "python", here):
        command = [python, "-c", f"import importlib.util as u; assert u.find_spec({module!r})"]
        if module is None:
            return here
        if python.exists() and subprocess.run(command, check=False).returncode == 0:
            return python
    return None


def lines_changed(contender: Contender) -> int:
    """Count the lines that the script with keepstep has, and the other one does not."""
    plain, changed = (
        (SCRIPTS / name).read_text().splitlines()
        for name in (contender.plain, contender.with_keepstep)
    )
    added = [line[1:] for line in difflib.unified_diff(plain, changed, n=0) if line[0] == "+"]
    return sum(bool(line.strip()) for line in added[1:])


def summary(repetitions: list[Measure]) -> Measure:
    """Return the medians of times and ratios, and the worst of what is counted."""
    succeeded = [result for result in repetitions if "failed" not in result]
    if len(succeeded) < len(repetitions):
        return {"failed": [result["failed"] for result in repetitions if "failed" in result]}
    return {
        key: round(statistics.median(values), 3) if isinstance(values[0], float) else max(values)
        for key in repetitions[0]
        for values in ([result[key] for result in succeeded],)
    }


def repetition(name: str, python: Path, console: Console) -> Measure:
    """Run both jobs of a framework, kill a worker of each, and return what came of it."""
    base = Path(tempfile.mkdtemp(prefix="keepstep-bench-"))
    try:
        measure = both_jobs(CONTENDERS[name], python, base)
    except Exception as error:  # noqa: BLE001 - the failure is this framework's result
        measure = {"failed": str(error)[-2000:]}
    finally:
        shutil.rmtree(base, ignore_errors=True)
    console.print(f"{name}: {measure}")
    return measure


def both_jobs(contender: Contender, python: Path, base: Path) -> Measure:
    with (
        job(contender, python, base / "keepstep", with_keepstep=True) as ours,
        job(contender, python, base / "peer", with_keepstep=False) as peers,
    ):
        jobs = {"keepstep": ours, "peer": peers}
        for name, running in jobs.items():
            wait_for(running, base / name, reached(GATES[0]), limit_s=LIMIT_S)
        for running in jobs.values():
            wait_until_quiet(running)
        step_s: dict[str, list[float]] = {name: [] for name in jobs}
        for number, (begin, end) in enumerate(pairwise(GATES)):
            for name in list(jobs)[:: 1 if number % 2 else -1]:
                (base / name / f"pass-{begin}").touch()
                lines = wait_for(jobs[name], base / name, reached(end), limit_s=LIMIT_S)
                step_s[name].append(step_between(lines, begin, end))
        measures = {name: killed(running, base / name) for name, running in jobs.items()}
    ratios = [a / b for a, b in zip(step_s["keepstep"], step_s["peer"], strict=True)]
    return {
        **measures["keepstep"],
        "healthy_ratio": statistics.median(ratios),
        "step_s": statistics.median(step_s["peer"]),
        **{f"peer_{key}": measures["peer"][key] for key in MEASURES},
    }


@contextmanager
def job(
    contender: Contender, python: Path, directory: Path, *, with_keepstep: bool
) -> Iterator[Processes]:
    """Run a framework's job of two workers."""
    directory.mkdir()
    name = contender.with_keepstep if with_keepstep else contender.plain
    script = command_of(contender.module, name, directory)
    if with_keepstep and contender.launcher == "keepstep run":
        command = [str(python), "-m", "keepstep", "run", "--nproc-per-node", str(WORLD), *script]
        with closing(Processes(directory)) as running:
            running.run(0, "job", command)
            yield running
        return
    back_end = "keepstep" if with_keepstep else "c10d"
    # By default c10d's rounds share a store, in which gloo reads addresses of the round before.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with endpoint(back_end) as address, closing(Processes(directory)) as running:
        command = [
            str(python), "-m", "torch.distributed.run", "--rdzv-backend", back_end,
            "--rdzv-endpoint", address, "--rdzv-id", "bench", "--nnodes", "1",
            "--nproc-per-node", str(WORLD), "--max-restarts", "3", "--local-addr", "127.0.0.1",
        ]  # fmt: skip
        running.run(0, "job", [*command, *script], **own_store)
        yield running


def command_of(module: str | None, script: str, directory: Path) -> list[str]:
    """Return the end of a launcher's command line, which names a script."""
    if module != "torchtitan":
        return [str(SCRIPTS / script), str(directory)]
    return [
        *("-m", "torchtitan.train", "--module", f"ops.bench.frameworks.{Path(script).stem}"),
        *("--config", "bench", "--dump_folder", str(directory)),
    ]


def killed(running: Processes, directory: Path) -> Measure:
    """Kill a worker, let the job end, and return what it has lost."""
    (directory / f"pass-{GATES[-1]}").touch()
    wait_for(running, directory, reached(KILL_AT), every_s=0.01, limit_s=LIMIT_S)
    at_s = kill_rank(directory, 1)
    wait_for(
        running,
        directory,
        lambda lines: reached(STEPS)(lines) and running.is_over,
        limit_s=LIMIT_S,
    )
    # Lines of the processes that have died may have come after the kill.
    lines = read_steps(directory)
    old = {line["pid"] for line in lines if line["at_s"] <= at_s}
    new = [line for line in lines if line["pid"] not in old]
    reached_before = max(line["step"] for line in lines if line["pid"] in old)
    missing, repeated = samples_of(lines)
    return {
        "gap_s": new[0]["at_s"] - at_s,
        "lost_steps": int(max(0, reached_before - min(line["step"] for line in new) + 1)),
        "missing": missing,
        "repeated": repeated,
    }


def samples_of(lines: list[Any]) -> tuple[int, int]:
    """Count the samples that no lasting step of an epoch has, and those that it has more than once.

    A step that was computed again lasts as it was computed last.
    """
    lasting = {(line["step"], line["rank"]): line["samples"] for line in lines}
    missing = repeated = 0
    for begin in range(0, STEPS, STEPS_PER_EPOCH):
        samples = [
            sample
            for (step, _), read in lasting.items()
            if begin < step <= begin + STEPS_PER_EPOCH
            for sample in read
        ]
        missing += SAMPLES - len(set(samples))
        repeated += len(samples) - len(set(samples))
    return missing, repeated


def reached(step: int) -> Any:
    """Return whether all ranks have completed a step."""
    return lambda lines: len({line["rank"] for line in lines if line["step"] >= step}) == WORLD


def step_between(lines: list[Line], begin: int, end: int) -> float:
    """Return the median time of rank 0's steps between two of them, in seconds."""
    at_s = [line["at_s"] for line in lines if line["rank"] == 0 and begin < line["step"] <= end]
    return statistics.median(later - sooner for sooner, later in pairwise(at_s))


def wait_until_quiet(running: Processes) -> None:
    """Wait until a job's processes take no processor time, as all of its workers wait."""
    until_s = time.monotonic() + QUIET_LIMIT_S
    while time.monotonic() < until_s:
        before = processor_s(running)
        time.sleep(QUIET_S)
        if processor_s(running) - before < QUIET_SHARE * QUIET_S:
            return
    raise TimeoutError(f"the job's processes still compute after {QUIET_LIMIT_S:.0f} s")


def processor_s(running: Processes) -> float:
    total = 0.0
    for process in process_tree(running.pid(0, "job")):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


if __name__ == "__main__":
    main()
