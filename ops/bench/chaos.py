"""Injects random faults into a real job, and checks that it keeps its promises.

`python ops/bench/chaos.py --minutes 30 --seed 1 --seed 2 --json [--quick]`. The last line is one
JSON object. The exit status is 1 if anything was lost, repeated, left over or unexplained.

Each seed is a job of three nodes over gloo, with an etcd of three members and storage in files or
in S3 (moto behind a proxy), to which faults happen that the seed alone decides. The package
`ops/bench/chaos` says how; `--help` lists the kinds. Kinds that this machine does not permit are
not drawn: `left_out` names them with what is missing. As root on Linux all are permitted.

An undisturbed run of the same job gives the right losses and samples. `unexplained` lists all
deviations. Logs and records of a seed that failed are kept, and their place is printed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

# This directory has modules with the names of others, which it must not hide.
HERE = str(Path(__file__).parent)
if HERE in sys.path:
    sys.path.remove(HERE)
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
# Everything that is started here has the same sums on every machine.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "examples")])

import click  # noqa: E402
from rich.console import Console  # noqa: E402

from ops.bench.chaos.campaign import Limits, Outcome, play  # noqa: E402
from ops.bench.chaos.machine import isolate  # noqa: E402
from ops.bench.chaos.report import as_json, table  # noqa: E402
from ops.bench.chaos.schedule import KINDS  # noqa: E402

QUICK_MINUTES = 2.0


@click.command()
@click.option("--minutes", default=30.0, show_default=True, help="Minutes of faults per seed.")
@click.option("--seed", "seeds", type=int, multiple=True, default=(1,), show_default=True)
@click.option("--json", "only_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help=f"{QUICK_MINUTES:.0f} minutes.")
@click.option("--faults", type=int, help="End after this many faults.")
@click.option(
    "--kind", "kinds", type=click.Choice(list(KINDS)), multiple=True,
    help="Draw only from this kind; may be repeated.",
)  # fmt: skip
@click.option("--lease-ttl", default=5.0, show_default=True, help="As for keepstep run.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep all logs in this directory.")
def main(
    minutes: float,
    seeds: tuple[int, ...],
    only_json: bool,
    quick: bool,
    faults: int | None,
    kinds: tuple[str, ...],
    lease_ttl: float,
    keep: Path | None,
) -> None:
    console = Console(stderr=only_json)
    is_isolated = isolate()
    # All contexts end as after an error, so that nothing of the job outlives this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    limits = Limits(
        minutes=QUICK_MINUTES if quick else minutes,
        faults=faults,
        kinds=kinds,
        lease_ttl_s=lease_ttl,
    )
    base = keep or Path(tempfile.mkdtemp(prefix="keepstep-chaos-"))
    outcomes = []
    for seed in seeds:
        directory = base / f"seed-{seed}"
        directory.mkdir(parents=True)
        # Each seed has networks of its own, and threads of libraries stay in their first one.
        with multiprocessing.get_context("fork").Pool(1) as pool:
            outcome = pool.apply(_play, (seed, limits, directory, is_isolated, only_json))
        outcomes.append(outcome)
        (directory / "outcome.json").write_text(json.dumps(outcome.summary(), indent=1))
        for text in outcome.complaints():
            console.print(f"    {text}", style="red", highlight=False, markup=False)
        if outcome.failed:
            console.print(f"seed {seed} failed; its logs are kept in {directory}", style="red")
        elif keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    if not any(base.iterdir()):
        base.rmdir()
    console.print(table(outcomes))
    print(json.dumps(as_json(outcomes)))
    sys.exit(any(outcome.failed for outcome in outcomes))


def _play(seed: int, limits: Limits, directory: Path, isolated: bool, only_json: bool) -> Outcome:
    return play(seed, limits, directory, isolated=isolated, console=Console(stderr=only_json))


if __name__ == "__main__":
    main()
