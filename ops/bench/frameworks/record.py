"""Records the steps of a rank of integrations.py, and lets it wait where the benchmark says."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ops.bench.frameworks.plan import GATES

read: list[int] = []
"""The samples that were read since the last step."""


def end_step(directory: Path, step: int) -> None:
    """Append a completed step to the file of this process, with its samples."""
    line = {
        "rank": int(os.environ["RANK"]),
        "step": step,
        "pid": os.getpid(),
        "at_s": time.monotonic(),
        "samples": read.copy(),
    }
    read.clear()
    with (directory / f"rank-{line['rank']}.{line['pid']}.jsonl").open("a") as lines:
        lines.write(json.dumps(line) + "\n")
    while step in GATES and not (directory / f"pass-{step}").exists():
        time.sleep(0.005)
