"""Whole jobs for tests: how they are started, and what their ranks wrote down."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from examples.local_cluster import LocalCluster
from keepstep.elastic.rendezvous.view import View

STEPS = 30
SCRIPT = Path(__file__).parent / "record.py"
Lines = dict[int, dict[int, dict[str, Any]]]


def cluster(
    directory: Path, nnodes: str = "1:2", store: str | None = None, **options: Any
) -> LocalCluster:
    (directory / "log").mkdir(parents=True, exist_ok=True)
    given = json.dumps({"steps": STEPS, "log": str(directory / "log"), **options})
    # Both nodes are to be in the first generation, however late the machine starts the second.
    return LocalCluster(
        "job",
        [str(SCRIPT), given],
        nnodes=nnodes,
        workers=2,
        log=directory / "agents",
        last_call_s=60.0,
        store=store,
    )


def last_run_of_each_step(directory: Path) -> Lines:
    """Return, by step and rank, what was recorded when the step was done for the last time."""
    done: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for path in (directory / "log").glob("rank-*.jsonl"):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            done[line["step"]][line["generation"]].append(line)
    return {
        step: {line["rank"]: line for line in generations[max(generations)]}
        for step, generations in done.items()
    }


def samples(lines: Lines) -> list[int]:
    """Return all samples in the order of steps, and of ranks within."""
    return [
        s
        for step in sorted(lines)
        for rank in sorted(lines[step])
        for s in lines[step][rank]["samples"]
    ]


def mean_losses(lines: Lines) -> list[float]:
    return [
        sum(float.fromhex(line["loss"]) for line in lines[step].values()) / len(lines[step])
        for step in sorted(lines)
    ]


def step_of(view: View) -> int:
    return max((joined.record.step for joined in view.nodes.values()), default=0)
