"""Measures the bytes of a save of a state that has hardly changed since the last save.

`python ops/bench/unchanged.py --json [--quick]`. The last line is one JSON object.

One process saves 16 frozen matrices, and a hundredth of their bytes that are trained, as adapters
(LoRA) or one part of a model are: to a directory, and to moto's S3 server over HTTP on this
machine. keepstep, DCP and torch.save (by s3fs, as DCP too, to S3) each save every state of four
steps in turn. For each of them and each storage: `first_s` and `first_bytes` are those of the first
save; `again_s` and `again_bytes` the medians of the others. Bytes are those of the files that the
save made and no other save has, or those that it sent over the loopback interface. S3 is served by
threads of this process: seconds compare, and are not those of a remote store.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import fsspec
import psutil
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from keepstep import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2]))

from ops.bench.checkpoint import BUCKET, s3_server

FROZEN, STEPS = 16, 4

State = dict[str, torch.Tensor]
Save = Callable[[str, State, int], None]


def save_by_keepstep(url: str, state: State, step: int) -> None:
    checkpoint.save(url, dict(state), step=step)


def save_by_dcp(url: str, state: State, step: int) -> None:
    kind = FsspecWriter if "://" in url else dcp.FileSystemWriter
    dcp.save(state, storage_writer=kind(f"{url}/{step}"))


def save_by_torch(url: str, state: State, step: int) -> None:
    with fsspec.open(f"{url}/{step}.pt", "wb", auto_mkdir=True) as file:
        torch.save(state, file)


SAVES: dict[str, Save] = {
    "keepstep": save_by_keepstep,
    "dcp": save_by_dcp,
    "torch_save": save_by_torch,
}


def bytes_of_files(directory: Path) -> int:
    """Return the bytes that all files take, each counted once whatever names it has."""
    files = {path.stat().st_ino: path.stat() for path in directory.rglob("*") if path.is_file()}
    return sum(512 * file.st_blocks for file in files.values())


def bytes_sent() -> int:
    """Return the bytes that were sent over the loopback interface."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def measure(save: Save, url: str, nbytes: int, count: Callable[[], int]) -> dict[str, Any]:
    torch.manual_seed(0)
    rows = nbytes // FROZEN // 4 // 1024
    state = {f"frozen.{number}": torch.randn(rows, 1024) for number in range(FROZEN)}
    state["trained"] = torch.randn(rows * FROZEN // 100, 1024)
    seconds, written = [], []
    for step in range(STEPS):
        state["trained"].add_(1)
        before, begun_s = count(), time.perf_counter()
        save(url, state, step)
        seconds.append(time.perf_counter() - begun_s)
        written.append(count() - before)
    return {
        "first_s": round(seconds[0], 3),
        "first_bytes": written[0],
        "again_s": round(statistics.median(seconds[1:]), 3),
        "again_bytes": round(statistics.median(written[1:])),
    }


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="64 MB instead of 512.")
def main(as_json: bool, quick: bool) -> None:
    console = Console(stderr=as_json)
    nbytes = (64 if quick else 512) * 10**6
    results: dict[str, Any] = {"nbytes": nbytes, "files": {}, "s3": {}}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(s3_server())
        for name, save in SAVES.items():
            own = directory / name
            results["files"][name] = measure(
                save, str(own), nbytes, lambda own=own: bytes_of_files(own)
            )
            results["s3"][name] = measure(save, f"s3://{BUCKET}/{name}", nbytes, bytes_sent)
    table = Table(title=f"{nbytes / 1e6:.0f} MB, 99 % of them frozen")
    for column in ("storage", "", "first_s", "first_bytes", "again_s", "again_bytes"):
        table.add_column(column)
    for storage in ("files", "s3"):
        for name, row in results[storage].items():
            table.add_row(storage, name, *(f"{value:,}" for value in row.values()))
    console.print(table)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
