"""Saving and loading a sharded state: keepstep, torch.distributed.checkpoint, torch.save and safetensors on one disk, in one run.

`python ops/bench/checkpoint.py --json [--quick]`. The last line is one JSON object. Four gloo ranks save; four load the same layout, two
and four a changed one (`reshard_s` is the slowest of 4 -> 2, 2 -> 4 and rows -> columns). Files are dropped from the page cache
before a load where the system allows it; durable means flushed. safetensors and torch.save cannot change the layout.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "ops" / "bench" / "checkpoint_worker.py"
CONTENDERS = ("keepstep", "dcp", "dcp_async", "torch_save", "safetensors")
RESHARDING = ("keepstep", "dcp", "dcp_async")

Result = dict[str, Any]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Nothing on stdout but the last line.")
@click.option("--quick", is_flag=True, help="One repetition of a smaller state.")
@click.option("--megabytes", type=int, help="Size of the state.")
@click.option(
    "--directory", type=click.Path(path_type=Path), help="Where; default: the system's place for temporary files."
)
def main(as_json: bool, quick: bool, megabytes: int | None, directory: Path | None) -> None:
    console = Console(stderr=as_json)
    size = megabytes or (200 if quick else 800)
    place = Path(tempfile.mkdtemp(prefix="keepstep-bench-", dir=directory))
    repeats = 1 if quick else 3
    try:
        # Contenders take turns, so that all see the machine's drift alike.
        runs: dict[str, list[Result]] = {name: [] for name in CONTENDERS}
        rates: list[float] = []
        for _ in range(repeats):
            rates.append(disk_rate(place, size))
            for name in CONTENDERS:
                runs[name].append(measure(name, place, size))
                console.print(name, runs[name][-1])
    finally:
        shutil.rmtree(place, ignore_errors=True)
    local: Result = {"disk_bytes_per_s": round(statistics.median(rates))}
    for name, found in runs.items():
        reasons = [one["reason"] for one in found if "reason" in one]
        good = [one for one in found if "reason" not in one]
        if not good:
            local[name] = {"reason": reasons[0]}
            continue
        local[name] = {key: _median([one[key] for one in good]) for key in good[0]}
    table = Table(title=f"{size} MB on 4 ranks; disk {local['disk_bytes_per_s'] / 1e9:.2f} GB/s")
    names = ("contender", "blocked_s", "durable_s", "load_s", "reshard_s", "read_ratio", "peak_extra_bytes", "objects")
    for name in names:
        table.add_column(name)
    for contender in CONTENDERS:
        table.add_row(contender, *(str(local[contender].get(name)) for name in names[1:]))
    console.print(table)
    print(json.dumps({"local": local}))


def _median(values: list[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return round(statistics.median(present), 4) if present else None


def disk_rate(place: Path, megabytes: int) -> float:
    """Return bytes a second of one big sequential write with fsync."""
    block = os.urandom(2**24)
    path = place / "raw"
    os.sync()
    began = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for _ in range(megabytes * 2**20 // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.monotonic() - began
    path.unlink()
    return megabytes * 2**20 / seconds


def measure(name: str, place: Path, megabytes: int) -> Result:
    """Save on four ranks and load in the same and in other layouts."""
    four, two = place / f"{name}-4", place / f"{name}-2"
    try:
        saved = ranks("save", name, "fsdp", 4, four, megabytes)
        objects = sum(1 for path in four.rglob("*") if path.is_file())
        drop_caches(four)
        same = ranks("load", name, "fsdp", 4, four, megabytes)
        others: list[Result] = []
        if name in RESHARDING:
            ranks("save", name, "fsdp", 2, two, megabytes)
            for layout, world, source in (("fsdp", 2, four), ("fsdp", 4, two), ("tp", 4, four)):
                drop_caches(source)
                others.append(ranks("load", name, layout, world, source, megabytes))
    except RuntimeError as error:
        return {"reason": str(error)[-400:]}
    finally:
        for path in place.glob(f"{name}-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {
        "blocked_s": saved["blocked_s"],
        "durable_s": saved["durable_s"],
        "load_s": same["load_s"],
        "reshard_s": max(one["load_s"] for one in others) if others else None,
        "read_ratio": max(one["read_ratio"] for one in (same, *others)),
        "peak_extra_bytes": max(one["peak_extra_bytes"] for one in (saved, same, *others)),
        "objects": objects,
    }


def ranks(action: str, name: str, layout: str, world: int, directory: Path, megabytes: int) -> Result:
    directory.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), action, name, layout, str(rank), str(world), str(directory), str(megabytes)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=600) for process in started]
    failed = [error for process, (_, error) in zip(started, outputs, strict=True) if process.returncode]
    if failed:
        raise RuntimeError(failed[0])
    return dict(json.loads(outputs[0][0].splitlines()[-1]))


def drop_caches(directory: Path) -> None:
    """Have the next read come from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
