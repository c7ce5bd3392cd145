"""Measures what training keeps of its speed while workers and nodes are killed at random.

`python ops/bench/goodput.py --json [--quick] [--minutes M] [--every S] [--seed N]`. The last line
is one JSON object. keepstep, torchrun with DCP's `async_save`, and torchft train the same GPT with
the same global batches on two "nodes" of two gloo workers each. The same processes are killed after
the same seconds, drawn from the seed, and a lost node is started again two seconds later, as its
operator would.

Each contender trains undisturbed before and after the failures. `goodput` is the steps per second
that were kept of those amid the failures, over those of the undisturbed time. `lost_steps` were
computed in vain. The ranks record which samples they compute each step from: `missing_samples` and
`repeated_samples` are those of kept steps. `all_returned` tells whether all ranks trained again
within a minute after the last failure; if not, only the time before counts as undisturbed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from ops.bench.contenders import CONTENDERS, NODES, WORKERS, Contender  # noqa: E402

GLOBAL_BATCH = 8
RETURN_S, START_S, POLL_S = 2.0, 60.0, 0.1
MEASURES = (
    "goodput", "steps_per_s", "undisturbed", "lost_steps", "missing_samples", "repeated_samples",
    "all_returned",
)  # fmt: skip

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kill:
    """A failure: SIGKILL of a worker, or of everything on a node, some seconds after the start."""

    at_s: float
    kind: str
    number: int


def draw(seed: int, seconds: float, every_s: float) -> list[Kill]:
    """Return failures about every `every_s` seconds, half of them of workers, half of nodes."""
    drawn = random.Random(seed)
    kills: list[Kill] = []
    at_s = every_s / 2
    while at_s < seconds - every_s / 4:
        kind = drawn.choice(("worker", "node"))
        kills.append(Kill(at_s, kind, drawn.randrange(NODES * WORKERS)))
        at_s += every_s * drawn.uniform(0.5, 1.5)
    return kills


def read_lines(directory: Path) -> list[Line]:
    """Return what the ranks have recorded, but for a line that is not complete yet."""
    lines: list[Line] = []
    for path in directory.glob("rank-*.jsonl"):
        texts = path.read_bytes().split(b"\n")[:-1]
        # A worker that was killed while it wrote has left a part of a line before a whole one.
        whole = (text[text.rindex(b'{"rank"') :] for text in texts if b'{"rank"' in text)
        lines.extend(json.loads(text) for text in whole)
    return sorted(lines, key=lambda line: line["at_s"])


def reached(lines: Sequence[Line], until_s: float) -> int:
    """Return the step that the newest incarnation of the job had completed at a time."""
    past = [line for line in lines if line["at_s"] <= until_s]
    if not past:
        return 0
    epoch = max(line["epoch"] for line in past)
    return max(int(line["step"]) for line in past if line["epoch"] == epoch)


@dataclass(frozen=True, slots=True)
class Times:
    """When a contender was undisturbed, and when it was not; monotonic seconds."""

    before: tuple[float, float]
    failures: tuple[float, float]
    after: tuple[float, float] | None


def judge(lines: Sequence[Line], times: Times) -> dict[str, Any]:
    """Compute a contender's result from what all its ranks recorded, in the order of time."""

    def steps_in(span: tuple[float, float]) -> int:
        return reached(lines, span[1]) - reached(lines, span[0])

    def seconds_of(span: tuple[float, float]) -> float:
        return span[1] - span[0]

    calm = [times.before, times.after] if times.after is not None else [times.before]
    undisturbed = sum(map(steps_in, calm)) / sum(map(seconds_of, calm))
    kept = steps_in(times.failures) / seconds_of(times.failures)
    epochs_of: dict[int, set[int]] = defaultdict(set)
    for line in lines:
        epochs_of[line["step"]].add(line["epoch"])
    begin, end = (reached(lines, at_s) for at_s in times.failures)
    samples: Counter[int] = Counter()
    for step in range(begin + 1, end + 1):
        newest = max(epochs_of[step], default=0)
        of_ranks = {
            line["rank"]: line["samples"]
            for line in lines
            if line["step"] == step and line["epoch"] == newest
        }
        samples.update(sample for taken in of_ranks.values() for sample in taken)
    expected = range(begin * GLOBAL_BATCH, end * GLOBAL_BATCH)
    return {
        "goodput": round(kept / undisturbed, 4),
        "steps_per_s": round(kept, 3),
        "undisturbed": round(undisturbed, 3),
        "lost_steps": sum(
            len(epochs) - 1 for step, epochs in epochs_of.items() if begin < step <= end
        ),
        "missing_samples": sum(sample not in samples for sample in expected),
        "repeated_samples": sum(count - 1 for count in samples.values()),
        "all_returned": times.after is not None,
    }


def wait_for_full_strength(directory: Path, contender: Contender) -> None:
    """Wait until all ranks together have made some more steps."""
    began_s = time.monotonic()
    while time.monotonic() < began_s + START_S:
        for node in contender.tend():
            contender.kill(node)
            contender.start(node)
        full = [
            line
            for line in read_lines(directory)
            if line["at_s"] > began_s and line["world_size"] == NODES * WORKERS
        ]
        if len({line["step"] for line in full}) >= 20:
            return
        time.sleep(POLL_S)
    raise TimeoutError(f"no twenty steps of all ranks within {START_S:.0f} s")


def measure(
    name: str, kills: Sequence[Kill], undisturbed_s: float, seconds: float, console: Console
) -> dict[str, Any]:
    """Let a contender train undisturbed, then through the failures; return its result."""
    directory = Path(tempfile.mkdtemp(prefix="keepstep-goodput-"))
    try:
        with CONTENDERS[name](directory) as contender:
            for node in range(NODES):
                contender.start(node)
            before = undisturbed(contender, directory, undisturbed_s)
            began_s = time.monotonic()
            fail(contender, directory, kills, began_s, seconds, console)
            failures = (began_s, time.monotonic())
            try:
                after = undisturbed(contender, directory, undisturbed_s)
            except TimeoutError:
                after = None
        return judge(read_lines(directory), Times(before, failures, after))
    except (RuntimeError, TimeoutError) as error:
        logs = " ".join(p.read_text(errors="replace")[-400:] for p in directory.rglob("*.log"))
        return {"goodput": None, "reason": f"{error} {logs}"[-1500:]}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def undisturbed(contender: Contender, directory: Path, seconds: float) -> tuple[float, float]:
    """Let a job train for some seconds once all its ranks do; return when that was."""
    wait_for_full_strength(directory, contender)
    began_s = time.monotonic()
    time.sleep(seconds)
    return began_s, time.monotonic()


def fail(
    contender: Contender,
    directory: Path,
    kills: Sequence[Kill],
    began_s: float,
    seconds: float,
    console: Console,
) -> None:
    """Kill what is due, and start again what has ended, until `seconds` are over."""
    due = list(kills)
    returning: dict[int, float] = {}
    while (now_s := time.monotonic()) < began_s + seconds:
        if due and now_s >= began_s + due[0].at_s:
            kill = due.pop(0)
            node = kill.number // WORKERS
            if kill.kind == "worker":
                kill_worker(directory, kill.number)
            elif node not in returning:
                contender.kill(node)
                returning[node] = now_s + RETURN_S
            console.print(f"{now_s - began_s:6.1f} s: {kill.kind} {kill.number} killed")
        for node in contender.tend():
            if node not in returning:
                contender.kill(node)
                returning[node] = now_s + RETURN_S
        for node, at_s in list(returning.items()):
            if now_s >= at_s:
                del returning[node]
                contender.start(node)
        time.sleep(POLL_S)


def kill_worker(directory: Path, number: int) -> None:
    """Kill the worker that computes a rank, or the last one if there are fewer ranks now."""
    lines = read_lines(directory)
    newest = [line for line in lines if line["epoch"] == lines[-1]["epoch"]]
    rank = min(number, max(line["rank"] for line in newest))
    pid = next(line["pid"] for line in reversed(lines) if line["rank"] == rank)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # It died with its job, which is starting again.


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="One minute of failures instead of --minutes.")
@click.option("--minutes", default=4.0, help="How long failures go on, for each contender.")
@click.option("--every", default=20.0, help="Seconds between failures, on average.")
@click.option("--seed", default=1, help="Draws the failures.")
@click.option(
    "--only", "names", multiple=True, type=click.Choice(list(CONTENDERS)), help="Only these."
)
def main(
    as_json: bool, quick: bool, minutes: float, every: float, seed: int, names: tuple[str, ...]
) -> None:
    console = Console(stderr=as_json)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    seconds = 60.0 if quick else minutes * 60
    kills = draw(seed, seconds, every)
    results: dict[str, Any] = {}
    for name in names or tuple(CONTENDERS):
        console.print(f"[bold]{name}")
        results[name] = measure(name, kills, seconds / 8, seconds, console)
        console.print(results[name])
    table = Table(title=f"{len(kills)} failures in {seconds:.0f} s")
    table.add_column("")
    for measured in MEASURES:
        table.add_column(measured)
    for name, result in results.items():
        table.add_row(name, *(str(result.get(measured)) for measured in MEASURES))
    console.print(table)
    kinds = Counter(kill.kind for kill in kills)
    print(json.dumps({**results, "seed": seed, "seconds": seconds, "kills": dict(kinds)}))


if __name__ == "__main__":
    main()
