"""Measures jobs on clusters, a storage and a trace.

`python ops/bench/clusters.py --json [--quick]`. The last line is one JSON object:

    slurm       task_kill_gap_s, node_down_gap_s: from the loss to the next completed step;
                requeue_lost_steps: computed again after `scontrol requeue`
    kubernetes  pod_kill_gap_s; drain_lost_steps: computed again after a node was drained
    azure       save_s, load_s: a checkpoint in a container of Azurite
    trace       events, seconds: of the trace of some steps, and to write it

A part whose programs are not installed has `not_run` and the reason instead. `--quick` measures
once what is otherwise the median of three.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import click
from rich.console import Console

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from ops.bench import clusters  # noqa: E402

PARTS = sorted(module.name for module in iter_modules(clusters.__path__))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="Once instead of three times.")
@click.option("--only", type=click.Choice(PARTS), multiple=True)
def main(as_json: bool, quick: bool, only: tuple[str, ...]) -> None:
    console = Console(stderr=as_json)
    results: dict[str, Any] = {}
    for name in only or PARTS:
        results[name] = measured(name, quick=quick)
        console.print(f"{name}: {results[name]}")
    print(json.dumps(results))
    sys.exit(any("failed" in result for result in results.values()))


def measured(name: str, *, quick: bool) -> dict[str, Any]:
    """Return a part's figures, why it was not run, or how it failed."""
    part = import_module(f"{clusters.__name__}.{name}")
    reason = part.not_installed()
    if reason is not None:
        return {"not_run": reason}
    directory = Path(tempfile.mkdtemp(prefix=f"keepstep-{name}-"))
    try:
        figures: dict[str, Any] = part.measure(directory, quick=quick)
    except Exception as error:  # noqa: BLE001 - the failure is this part's result
        return {"failed": f"{type(error).__name__}: {error}"[-2000:]}
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return figures


if __name__ == "__main__":
    main()
