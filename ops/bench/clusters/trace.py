"""Measures `keepstep monitor trace`: some steps of four ranks, from the command to the file.

The job trains on this machine's processors, and has a monitor; the steps are past. `events` is the
number of the trace's events, `seconds` the median of the repetitions.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
RANKS, FIRST, LAST = 4, 20, 119
_LIMIT_S = 300.0

SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.02)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[1])):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
print("trained", flush=True)
time.sleep(3600)
"""


def not_installed() -> str | None:
    return None


def measure(directory: Path, *, quick: bool) -> dict[str, float]:
    """Return the number of events, and the median of the command's durations."""
    environment = {
        **os.environ,
        "KEEPSTEP_MONITOR_DIR": str(directory / "rings"),
        "KEEPSTEP_MONITOR": "1",
        "KEEPSTEP_JOB": "trace",
        "KEEPSTEP_SECRET": "of this measurement",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    script = directory / "train.py"
    script.write_text(SCRIPT)
    workers = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(RANKS), str(script), str(LAST + 1),
    ]  # fmt: skip
    monitor = [sys.executable, "-P", "-m", "keepstep", "monitor"]
    with (
        _running(workers, environment, ["trained"] * RANKS),
        _running([*monitor, "--port", "0"], environment, ["http"]) as lines,
    ):
        url = lines[0].split()[-1].rstrip("/")
        path = directory / "trace.json.gz"
        command = [*monitor, "trace", "--steps", f"{FIRST}:{LAST}", "-o", str(path), "--url", url]
        seconds, events = [], 0
        for _ in range(1 if quick else 3):
            began_s = time.monotonic()
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            )
            seconds.append(time.monotonic() - began_s)
            if done.stderr:
                raise RuntimeError(f"the trace is not complete: {done.stderr}")
            unpacked = subprocess.run(["gzip", "-dc", str(path)], capture_output=True, check=True)
            events = len(json.loads(unpacked.stdout)["traceEvents"])
    return {"events": events, "seconds": round(statistics.median(seconds), 2)}


@contextmanager
def _running(
    command: list[str], environment: dict[str, str], words: list[str]
) -> Iterator[list[str]]:
    """Run a command; yield the lines with these words once it has printed all of them."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        lines: list[str] = []
        deadline_s = time.monotonic() + _LIMIT_S
        assert process.stdout is not None
        for line in process.stdout:
            lines += [line] if any(word in line for word in words) else []
            if len(lines) == len(words):
                break
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{command} did not print {words} within {_LIMIT_S:g} s")
        else:
            raise RuntimeError(f"{command} ended before it had printed {words}")
        yield lines
    finally:
        process.terminate()
        process.communicate()
