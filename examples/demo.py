"""Runs the demo (`make demo`): of two nodes that train a GPT, one is killed and returns."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import click
import matplotlib
from rich.console import Console

from examples.local_cluster import LocalCluster, read_steps, script
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.elastic.cli.status import recoveries
from keepstep.elastic.rendezvous.records import Recovery
from keepstep.elastic.rendezvous.view import View

matplotlib.use("Agg")
from matplotlib import pyplot as plt

STEPS, KILL_AT, RETURN_AT = 120, 35, 45


@click.command()
@click.option(
    "--output",
    default=Path("demo-output"),
    type=Path,
    help="Directory for logs, checkpoint and plot.",
)
def main(output: Path) -> None:
    console = Console()
    shutil.rmtree(output, ignore_errors=True)
    console.rule("1. two nodes of two workers train a GPT with FSDP2; node-b is killed and returns")
    history = run(console, output / "disturbed", disturb=True)
    console.rule("2. the same job without a failure")
    run(console, output / "undisturbed", disturb=False)
    console.rule("results")
    console.print(recoveries(history))
    plot(output, history)
    stored = StoredCheckpoint.open(open_storage(str(output / "disturbed" / "checkpoint")))
    console.print(
        f"checkpoint of step {stored.step}: {len(stored.tensors)} tensors "
        f"in {stored.storage.url}/{stored.stored.directory}"
    )
    console.print(f"loss over steps: {output / 'loss.png'}")


def run(console: Console, directory: Path, *, disturb: bool) -> Sequence[Recovery]:
    """Run the job, with or without the loss of a node; return its recoveries."""
    directory.mkdir(parents=True)
    job = script(
        "train.py", "--steps", str(STEPS), "--log", str(directory),
        "--checkpoint", str(directory / "checkpoint"), "--checkpoint-every", "10",
        "--pause", "0.05",
    )  # fmt: skip
    nodes = ["node-a", "node-b"]
    with LocalCluster("demo", job, nnodes="1:2", workers=2, log=directory / "agents") as cluster:
        print_event = TimedPrinter(console)
        for node in nodes:
            cluster.start(node, "--rdzv-conf", "last_call_timeout=30")
        cluster.wait_until(lambda view: step_of(view) > 0, 120)
        print_event("both nodes train")
        final_view: View | None = None
        if disturb:
            cluster.wait_until(lambda view: step_of(view) >= KILL_AT, 120)
            cluster.kill("node-b")
            print_event(
                f"step {KILL_AT}: node-b killed (agent, workers and snapshot server, with SIGKILL)"
            )
            cluster.wait_until(
                lambda view: view.generation_number == 2 and len(view.history.recoveries) == 2, 60
            )
            print_event("node-a continues alone")
            cluster.wait_until(lambda view: step_of(view) >= RETURN_AT, 120)
            cluster.start("node-b", "--rdzv-conf", "last_call_timeout=30")
            print_event("node-b starts again")
            view = cluster.wait_until(
                lambda view: len(view.history.recoveries) == 3 or is_stored(view), 120
            )
            if len(view.history.recoveries) == 3:
                print_event("node-b has joined again")
            else:
                print_event(
                    "node-a finished before node-b was ready: "
                    "this machine is too busy to show the return"
                )
                nodes.remove("node-b")
                final_view = view
        history = (final_view or cluster.wait_until(is_stored, 120)).history.recoveries
        for node in nodes:
            if cluster.wait(node, 60) != 0:
                raise click.ClickException(cluster.output())
        print_event(f"finished at step {STEPS}")
    return history


class TimedPrinter:
    """Prints events with the seconds since its creation."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_s = time.monotonic()

    def __call__(self, text: str) -> None:
        self._console.print(f"[{time.monotonic() - self._began_s:6.1f} s] {text}", markup=False)


def is_stored(view: View) -> bool:
    """Whether the last step's checkpoint is stored; the job's keys are deleted soon after."""
    return view.checkpoint is not None and view.checkpoint.step == STEPS


def step_of(view: View) -> int:
    return max((joined.record.step for joined in view.nodes.values()), default=0)


def losses(directory: Path) -> list[tuple[float, int, float]]:
    """Return (seconds since the first step, step, loss) of each step, also of repeated ones."""
    parts: dict[tuple[float, float], list[dict[str, float]]] = defaultdict(list)
    for line in read_steps(directory):
        parts[line["generation"], line["step"]].append(line)
    begin = min(line["at_s"] for lines in parts.values() for line in lines)
    return sorted(
        (
            max(line["at_s"] for line in lines) - begin,
            int(step),
            sum(line["loss"] for line in lines) / len(lines),
        )
        for (_, step), lines in parts.items()
    )


def plot(output: Path, history: Sequence[Recovery]) -> None:
    """Draw the loss of both runs over steps, and the disturbed run's steps over time."""
    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(12, 4.5))
    for name, style in (
        ("undisturbed", {"lw": 5, "alpha": 0.35}),
        ("disturbed", {"lw": 1.2, "color": "crimson"}),
    ):
        steps = losses(output / name)
        last_losses = {step: loss for _, step, loss in steps}
        by_step.plot(list(last_losses), list(last_losses.values()), label=name, **style)
        by_time.plot(
            [at_s for at_s, _, _ in steps], [step for _, step, _ in steps], label=name, **style
        )
    bottom, top = by_step.get_ylim()
    # At different heights, because the two steps may be near each other.
    heights = (top, top - (top - bottom) / 6)
    for recovery, event, height in zip(
        history[1:], ("node-b killed", "node-b back"), heights, strict=False
    ):
        by_step.axvline(recovery.resumed_step, ls=":", color="grey")
        by_step.annotate(
            f"{event}:\nresumed at step {recovery.resumed_step}\nfrom {recovery.source}",
            (recovery.resumed_step, height), fontsize=8, va="top",
            ha="right" if recovery.resumed_step > by_step.get_xlim()[1] / 2 else "left",
        )  # fmt: skip
    by_step.set(xlabel="step", ylabel="loss", title="loss over steps")
    by_time.set(xlabel="seconds since the first step", ylabel="step", title="steps over time")
    by_step.legend(loc="lower left")
    by_time.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(output / "loss.png", dpi=110)


if __name__ == "__main__":
    main()
