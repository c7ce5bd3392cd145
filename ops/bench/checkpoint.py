"""Saving and loading a sharded state: keepstep, torch.distributed.checkpoint, torch.save, safetensors and Orbax, in one run.

`python ops/bench/checkpoint.py --json [--quick]`. The last line is one JSON object. Four gloo ranks save; four load the same layout, two
and four a changed one (`reshard_s` is the slowest of 4 -> 2, 2 -> 4 and rows -> columns). Files are dropped from the page cache before a
load where the system allows it; durable means flushed. A virtual disk's host has a cache of its own, which holds what was written through
this machine's cache and not what was written past it (as keepstep writes large files): `first_load_s` is the first load after saving, and
before all others the files are read once, so that they find every contender's in the same state. safetensors and torch.save cannot change
the layout. Orbax saves JAX's arrays, not torch's shards: one process saves and loads the whole state as NumPy arrays. `disk_ratio` is the
rate to durable over that of one big sequential write with fsync, of the same repetition.

The part `s3` is against moto's server over HTTP on this machine, a quarter of the state: what counts are requests, not the network.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "ops" / "bench" / "checkpoint_worker.py"
CONTENDERS = ("keepstep", "dcp", "dcp_async", "torch_save", "safetensors", "orbax")
RESHARDING = ("keepstep", "dcp", "dcp_async", "dcp_s3")
ALONE = ("orbax",)
ON_S3 = {"keepstep": "keepstep", "dcp": "dcp_s3"}
BUCKET = "bench"
COLUMNS = (
    "blocked_s", "durable_s", "disk_ratio", "first_load_s", "load_s", "reshard_s", "read_ratio", "peak_extra_bytes", "objects",
)  # fmt: skip

LOADS = 3  # of each layout: a single one wanders by half

Result = dict[str, Any]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Nothing on stdout but the last line.")
@click.option("--quick", is_flag=True, help="One repetition of a smaller state.")
@click.option("--megabytes", type=int, help="Size of the state.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="Where; default: the system's place for temporary files.",
)
def main(as_json: bool, quick: bool, megabytes: int | None, directory: Path | None) -> None:
    console = Console(stderr=as_json)
    size = megabytes or (200 if quick else 800)
    place = Path(tempfile.mkdtemp(prefix="keepstep-bench-", dir=directory))
    repeats = 1 if quick else 3
    try:
        # Contenders take turns, so that all see the machine's drift alike.
        runs: dict[str, list[Result]] = {name: [] for name in CONTENDERS}
        remote: dict[str, list[Result]] = {name: [] for name in ON_S3}
        rates: list[float] = []
        for _ in range(repeats):
            rates.append(disk_rate(place, size))
            for name, found in runs.items():
                one = measure(name, place, size)
                if "reason" not in one:
                    one["disk_ratio"] = one["nbytes"] / one["durable_s"] / rates[-1]
                found.append(one)
                console.print(name, one)
        with s3_server() as client:
            for _ in range(repeats):
                for name, worker in ON_S3.items():
                    remote[name].append(measure_s3(worker, place, max(50, size // 4), client))
                    console.print("s3", name, remote[name][-1])
    finally:
        shutil.rmtree(place, ignore_errors=True)
    parts: dict[str, Result] = {
        "local": {"disk_bytes_per_s": round(statistics.median(rates)), **summary(runs)},
        "s3": summary(remote),
    }
    for part, found in parts.items():
        table = Table(
            title=f"{part}: {size if part == 'local' else max(50, size // 4)} MB on 4 ranks"
        )
        for name in ("contender", *COLUMNS):
            table.add_column(name)
        for contender, row in found.items():
            if isinstance(row, dict):
                table.add_row(contender, *(str(row.get(name)) for name in COLUMNS))
        console.print(table)
    print(json.dumps(parts))


def summary(runs: dict[str, list[Result]]) -> Result:
    """Return the medians of each contender, or why there are none."""
    made: Result = {}
    for name, found in runs.items():
        reasons = [one["reason"] for one in found if "reason" in one]
        good = [one for one in found if "reason" not in one]
        if not good:
            made[name] = {"reason": reasons[0]}
            continue
        made[name] = {key: _median([one[key] for one in good]) for key in COLUMNS if key in good[0]}
    return made


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
    four.mkdir()
    two.mkdir()
    try:
        return _measure(
            name, str(four), str(two), place, megabytes,
            lambda: sum(1 for path in four.rglob("*") if path.is_file()),
            lambda source: read_all(Path(source)), lambda source: drop_caches(Path(source)),
        )  # fmt: skip
    except RuntimeError as error:
        return {"reason": str(error)[-400:]}
    finally:
        shutil.rmtree(four)
        shutil.rmtree(two)


def measure_s3(name: str, place: Path, megabytes: int, client: Any) -> Result:
    """As `measure`, in a bucket that is empty before and after."""

    def objects() -> list[str]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    try:
        return _measure(
            name, f"s3://{BUCKET}/four", f"s3://{BUCKET}/two", place, megabytes,
            lambda: len(objects()), lambda source: None, lambda source: None,
        )  # fmt: skip
    except RuntimeError as error:
        return {"reason": str(error)[-400:]}
    finally:
        for key in objects():
            client.delete_object(Bucket=BUCKET, Key=key)


def _measure(
    name: str,
    four: str,
    two: str,
    place: Path,
    megabytes: int,
    count: Callable[[], int],
    read: Callable[[str], None],
    drop: Callable[[str], None],
) -> Result:
    world = 1 if name in ALONE else 4
    saved = ranks("save", name, "fsdp", world, four, place, megabytes)
    objects = count()
    drop(four)
    first = ranks("load", name, "fsdp", world, four, place, megabytes)
    read(four)

    def load(layout: str, ranks_now: int, source: str) -> Result:
        loads = []
        for _ in range(LOADS):
            drop(source)
            loads.append(ranks("load", name, layout, ranks_now, source, place, megabytes))
        return {**loads[0], "load_s": statistics.median(one["load_s"] for one in loads)}

    same = load("fsdp", world, four)
    others: list[Result] = []
    if name in RESHARDING:
        ranks("save", name, "fsdp", 2, two, place, megabytes)
        read(two)
        others = [load("fsdp", 2, four), load("fsdp", 4, two), load("tp", 4, four)]
    ratios = [one["read_ratio"] for one in (same, *others)]
    return {
        "blocked_s": saved["blocked_s"],
        "durable_s": saved["durable_s"],
        "first_load_s": first["load_s"],
        "load_s": same["load_s"],
        "reshard_s": max(one["load_s"] for one in others) if others else None,
        "read_ratio": None if None in ratios else max(ratios),
        "peak_extra_bytes": max(one["peak_extra_bytes"] for one in (saved, same, *others)),
        "objects": objects,
        "nbytes": saved["nbytes"],
    }


@contextmanager
def s3_server() -> Iterator[Any]:
    """Serve S3 on a free port, with the environment by which AWS's tools, and so all contenders, find it; yield a client."""
    import boto3
    from moto.server import ThreadedMotoServer

    # One line for each request would slow all of them.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
    }  # fmt: skip
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    try:
        yield client
    finally:
        server.stop()


def ranks(
    action: str, name: str, layout: str, world: int, where: str, place: Path, megabytes: int
) -> Result:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    store = place / f"store-{uuid.uuid4().hex}"
    started = [
        subprocess.Popen(
            [
                sys.executable, str(WORKER), action, name, layout, str(rank), str(world), where, str(megabytes), str(store)
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=600) for process in started]
    failed = [
        error for process, (_, error) in zip(started, outputs, strict=True) if process.returncode
    ]
    if failed:
        raise RuntimeError(failed[0])
    return dict(json.loads(outputs[0][0].splitlines()[-1]))


def read_all(directory: Path) -> None:
    """Read every file once."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(2**24):
                    pass


def drop_caches(directory: Path) -> None:
    """Have the next read come from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
