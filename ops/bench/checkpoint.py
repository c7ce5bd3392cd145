"""Compares saving and loading of a sharded state by keepstep and other checkpoint libraries.

`python ops/bench/checkpoint.py --json [--quick]`. The last line is one JSON object. The others are
torch.distributed.checkpoint (DCP), torch.save, safetensors and Orbax.

Four gloo ranks save; four load the same layout, two and four a changed one (`reshard_s` is the
slowest of 4 -> 2, 2 -> 4 and rows -> columns), and four replicas that want everything. Files are
dropped from the page cache before a load where the system allows it; durable means flushed. The
host of a virtual disk has its own cache: it holds what was written through this machine's cache,
and not direct writes (as keepstep writes large files). So `first_load_s` is the first load after
saving, and the files are read once before all other loads, so that every contender's files are
cached in the same way. safetensors and torch.save cannot change the layout. Orbax saves JAX's
arrays, not torch's shards: one process saves and loads the full state as NumPy arrays.

Saves are timed in turns of all contenders, each in an order by chance: what a disk takes at once
depends on what was written before. In each turn the ranks save four times: `durable_s` is of the
first save, with all that a process does once, and `again_s` of the later ones, as jobs go on to
save. `disk_ratio` and `again_disk_ratio` compare their rates with those of `raw`, which takes its
place in each turn as the contenders do: there one rank writes as many bytes to one file, and
flushes it. `save_peak_ratio` is the memory that saves take at most, of all ranks, over the state's
bytes (`peak_extra_bytes` is the most of a save and of the loads). A read ratio is the bytes that
all ranks read from files per byte of tensors, each tensor counted once.

The part `async` saves in the background, six times in one process group of four ranks, or of as
many as there are cores if that is fewer: ranks that share a core wait for each other's copies.
`first_blocked_s` is for how long the first save blocks the slowest rank, `blocked_s` the median of
the others, and `memcpy_s` how long the ranks take to copy the same bytes into memory that they have
written before, just before each save. `cpu_ratio` is the same ratio in processor time of the
training's process, which other load does not change. DCP's forms write in a thread or a process,
from memory of its own, which is new for each save or kept, shared or page-locked; `dcp_stager` is
DCP with keepstep's stager. keepstep's process writes at a low priority; from
the return of a save until it is durable takes `background_s`. `checksum_share` is the processor
time of a rank's checksums over that, `checksum_cpu_share` over the processor time of all writing:
how much longer chunks take to be encoded with checksums than without.

With `--device cuda` the state is on a GPU, in one process, and only this part is measured:
`memcpy_s` copies into page-locked memory then. Checksums are not measured there.

The part `s3` uses moto's server over HTTP on this machine, with a quarter of the state: it measures
requests, not the network.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
# This directory has modules whose names must not hide others.
sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(Path(__file__).parent))]

from ops.bench.checkpoint_worker import Work, run  # noqa: E402
from ops.bench.processes import python_path  # noqa: E402

FORK_SERVER = multiprocessing.get_context("forkserver")
LIMIT_S = 600.0
CONTENDERS = ("keepstep", "dcp", "dcp_async", "torch_save", "safetensors", "orbax")
RESHARDING = ("keepstep", "dcp", "dcp_async", "dcp_s3")
SINGLE_PROCESS = ("orbax",)
ON_S3 = {"keepstep": "keepstep", "dcp": "dcp_s3"}
DCP_FORMS = (
    "dcp_thread", "dcp_thread_kept", "dcp_process", "dcp_process_shared", "dcp_thread_pinned"
)  # fmt: skip
OUR_STAGER = "dcp_thread_keepstep"
IN_BACKGROUND = ("keepstep", OUR_STAGER, *DCP_FORMS, "torch_checkpointing")
BUCKET = "bench"
COLUMNS = (
    "blocked_s", "durable_s", "disk_ratio", "again_s", "again_disk_ratio", "first_load_s",
    "load_s", "reshard_s", "read_ratio", "replicas_s", "replicas_read_ratio", "save_peak_ratio",
    "peak_extra_bytes", "objects",
)  # fmt: skip

BACKGROUND_COLUMNS = (
    "first_blocked_s", "blocked_s", "memcpy_s", "ratio", "cpu_ratio",
    "background_s", "checksum_share", "checksum_cpu_share",
)  # fmt: skip

BACKGROUND_RANKS = min(4, os.cpu_count() or 1)

LOADS = 3  # for each layout: the time of a single load varies by half
TURNS = 5
SAVES = 4  # of each contender in a turn; the first one pays for a process's single costs
RAW = "raw"

Result = dict[str, Any]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="One repetition of a smaller state.")
@click.option("--megabytes", type=int, help="Size of the state.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    help="Where the state is; of a GPU's, saves in the background only are measured.",
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="Directory for the files; default: the system's directory for temporary files.",
)
def main(
    as_json: bool, quick: bool, megabytes: int | None, device: str, directory: Path | None
) -> None:
    console = Console(stderr=as_json)
    os.environ |= {"PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    FORK_SERVER.set_forkserver_preload([run.__module__])
    size = megabytes or (200 if quick else 800)
    workspace = Path(tempfile.mkdtemp(prefix="keepstep-bench-", dir=directory))
    repeats = 1 if quick else 3
    try:
        parts = {} if device == "cuda" else on_the_host(workspace, size, repeats, console)
        parts["async"] = in_background(workspace, size, repeats, device, console)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    print(json.dumps(parts))


def on_the_host(workspace: Path, size: int, repeats: int, console: Console) -> Result:
    """Save and load a state of `size` megabytes on the host, to files and to S3's interface."""
    # Contenders take turns, so that a drift of the machine affects all equally.
    runs: dict[str, list[Result]] = {name: [] for name in CONTENDERS}
    remote: dict[str, list[Result]] = {name: [] for name in ON_S3}
    rates: list[float] = []
    order = random.Random(0)
    sizes = {"local": size, "s3": max(50, size // 4)}
    for _ in range(repeats):
        saves = saves_in_turn(workspace, size, order, console)
        rates += [turn[RAW]["nbytes"] / turn[RAW]["durable_s"] for turn in saves]
        for name in CONTENDERS:
            result = measure(name, workspace, size)
            if "reason" not in result:
                result |= of_saves(name, saves)
            runs[name].append(result)
            console.print(name, result)
    with s3_server() as client:
        for _ in range(repeats):
            for name, worker in ON_S3.items():
                remote[name].append(measure_s3(worker, workspace, sizes["s3"], client))
                console.print("s3", name, remote[name][-1])
    parts: dict[str, Result] = {
        "local": {"disk_bytes_per_s": round(statistics.median(rates)), **summary(runs)},
        "s3": summary(remote),
    }
    for part, rows in parts.items():
        table = Table(title=f"{part}: {sizes[part]} MB on 4 ranks")
        for name in ("contender", *COLUMNS):
            table.add_column(name)
        for contender, row in rows.items():
            if isinstance(row, dict):
                table.add_row(contender, *(str(row.get(name)) for name in COLUMNS))
        console.print(table)
    return parts


def in_background(
    workspace: Path, size: int, repeats: int, device: str, console: Console
) -> Result:
    """Save a state of `size` megabytes in the background; return the figures by library."""
    runs: dict[str, list[Result]] = {name: [] for name in IN_BACKGROUND}
    for _ in range(repeats):
        for name, results in runs.items():
            results.append(measure_in_background(name, workspace, size, device))
            console.print("async", name, results[-1])
    medians = summary(runs, BACKGROUND_COLUMNS)
    console.print(medians)
    forms = {name.removeprefix("dcp_"): medians[name] for name in DCP_FORMS}
    return {
        "keepstep": medians["keepstep"],
        "dcp": with_best(forms),
        "dcp_stager": medians[OUR_STAGER],
        "torch_checkpointing": medians["torch_checkpointing"],
    }


def with_best(forms: Result) -> Result:
    """Return the figures of the form that blocks the least, with those of all forms."""
    blocked = {name: form["blocked_s"] for name, form in forms.items() if "blocked_s" in form}
    if not blocked:
        return {"forms": forms}
    best = min(blocked, key=blocked.__getitem__)
    return {"best": best, **forms[best], "forms": forms}


def summary(runs: dict[str, list[Result]], columns: Sequence[str] = COLUMNS) -> Result:
    """Return the medians of each contender, or the reason why it has none."""
    medians: Result = {}
    for name, results in runs.items():
        succeeded = [result for result in results if "reason" not in result]
        if not succeeded:
            medians[name] = {"reason": results[0]["reason"]}
            continue
        medians[name] = {
            key: _median([result[key] for result in succeeded])
            for key in columns
            if key in succeeded[0]
        }
    return medians


def _median(values: list[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return round(statistics.median(present), 4) if present else None


def saves_in_turn(
    workspace: Path, megabytes: int, order: random.Random, console: Console
) -> list[dict[str, Result]]:
    """Return, for some turns, how long each contender takes to save, and `RAW`."""
    turns = []
    for _ in range(TURNS):
        saves: dict[str, Result] = {}
        for name in order.sample((RAW, *CONTENDERS), len(CONTENDERS) + 1):
            directory = workspace / f"{name}-save"
            directory.mkdir()
            os.sync()
            world = 1 if name in SINGLE_PROCESS else 4
            try:
                saves[name] = ranks(
                    "save", name, "fsdp", world, str(directory), workspace, megabytes, SAVES
                )
            except RuntimeError as error:
                if name == RAW:
                    raise
                console.print(name, "cannot save:", str(error)[-400:])
            shutil.rmtree(directory)
        turns.append(saves)
    return turns


def of_saves(name: str, turns: Sequence[dict[str, Result]]) -> Result:
    """Return the medians of a contender's saves over the turns."""
    own = [(turn[name], turn[RAW]) for turn in turns if name in turn]
    if len(own) < len(turns):
        return {"reason": f"{len(turns) - len(own)} of {len(turns)} saves failed"}
    return {
        **{
            key: statistics.median(save[key] for save, _ in own)
            for key in ("blocked_s", "durable_s", "again_s")
        },
        "disk_ratio": statistics.median(raw["durable_s"] / save["durable_s"] for save, raw in own),
        "again_disk_ratio": statistics.median(
            raw["again_s"] / save["again_s"] for save, raw in own
        ),
        "save_peak_ratio": statistics.median(
            save["peak_extra_bytes"] / save["nbytes"] for save, _ in own
        ),
    }


def measure(name: str, workspace: Path, megabytes: int) -> Result:
    """Save on four ranks and load in the same and in other layouts."""
    four, two = workspace / f"{name}-4", workspace / f"{name}-2"
    four.mkdir()
    two.mkdir()
    try:
        return _measure(
            name, str(four), str(two), workspace, megabytes,
            lambda: sum(1 for path in four.rglob("*") if path.is_file()),
            lambda source: read_all(Path(source)), lambda source: drop_caches(Path(source)),
        )  # fmt: skip
    except RuntimeError as error:
        return {"reason": str(error)[-400:]}
    finally:
        shutil.rmtree(four)
        shutil.rmtree(two)


def measure_in_background(name: str, workspace: Path, megabytes: int, device: str) -> Result:
    """Save several times in the background."""
    directory = workspace / f"async-{name}"
    directory.mkdir()
    world = BACKGROUND_RANKS if device == "cpu" else 1
    try:
        return ranks(
            "async", name, "fsdp", world, str(directory), workspace, megabytes, device=device
        )
    except RuntimeError as error:
        return {"reason": str(error)[-400:]}
    finally:
        shutil.rmtree(directory)


def measure_s3(name: str, workspace: Path, megabytes: int, client: Any) -> Result:
    """Do as `measure`, in a bucket that is empty before and after."""

    def objects() -> list[str]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    try:
        return _measure(
            name, f"s3://{BUCKET}/four", f"s3://{BUCKET}/two", workspace, megabytes,
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
    workspace: Path,
    megabytes: int,
    count: Callable[[], int],
    read: Callable[[str], None],
    drop: Callable[[str], None],
) -> Result:
    world = 1 if name in SINGLE_PROCESS else 4
    saved = ranks("save", name, "fsdp", world, four, workspace, megabytes)
    objects = count()
    drop(four)
    first = ranks("load", name, "fsdp", world, four, workspace, megabytes)
    read(four)

    def load(layout: str, ranks_now: int, source: str) -> Result:
        loads = []
        for _ in range(LOADS):
            drop(source)
            loads.append(ranks("load", name, layout, ranks_now, source, workspace, megabytes))
        return {**loads[0], "load_s": statistics.median(result["load_s"] for result in loads)}

    same = load("fsdp", world, four)
    others: list[Result] = []
    replicas: Result = {}
    if name in RESHARDING:
        ranks("save", name, "fsdp", 2, two, workspace, megabytes)
        read(two)
        others = [load("fsdp", 2, four), load("fsdp", 4, two), load("tp", 4, four)]
        replicas = load("replicas", 4, four)
    ratios = [result["read_ratio"] for result in (same, *others)]
    return {
        "blocked_s": saved["blocked_s"],
        "durable_s": saved["durable_s"],
        "first_load_s": first["load_s"],
        "load_s": same["load_s"],
        "reshard_s": max(result["load_s"] for result in others) if others else None,
        "read_ratio": None if None in ratios else max(ratios),
        "replicas_s": replicas.get("load_s"),
        "replicas_read_ratio": replicas.get("read_ratio"),
        "peak_extra_bytes": max(result["peak_extra_bytes"] for result in (saved, same, *others)),
        "objects": objects,
        "nbytes": saved["nbytes"],
    }


@contextmanager
def s3_server() -> Iterator[Any]:
    """Serve S3 on a free port, set AWS's environment variables to it, and yield a client."""
    import boto3
    from moto.server import ThreadedMotoServer

    # A log line for each request would slow all contenders down.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
    }  # fmt: skip
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    try:
        yield client
    finally:
        server.stop()


def ranks(
    action: str,
    name: str,
    layout: str,
    world: int,
    where: str,
    workspace: Path,
    megabytes: int,
    saves: int = 1,
    device: str = "cpu",
) -> Result:
    """Run `checkpoint_worker.py` on some ranks; return rank 0's result."""
    store = str(workspace / f"store-{uuid.uuid4().hex}")
    # The process that forks the ranks has the environment of its start.
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    results: list[Connection] = []
    processes: list[ForkServerProcess] = []
    for rank in range(world):
        receiver, sender = FORK_SERVER.Pipe(duplex=False)
        work = Work(action, name, layout, rank, world, where, megabytes, store, saves, device)
        process = FORK_SERVER.Process(target=run, args=(work, environment, sender))
        process.start()
        sender.close()
        results.append(receiver)
        processes.append(process)
    try:
        answers = [_answer(receiver) for receiver in results]
    finally:
        for process in processes:
            process.join(LIMIT_S if sys.exc_info()[0] is None else 0)
            process.kill()
            process.join()
    failed = [answer for answer in answers if isinstance(answer, str)]
    if failed:
        raise RuntimeError(failed[0])
    return dict(answers[0])


def _answer(receiver: Connection) -> Result | str:
    """Return a rank's figures, or its error."""
    if not receiver.poll(LIMIT_S):
        return f"no answer within {LIMIT_S:.0f} s"
    try:
        return receiver.recv()  # type: ignore[no-any-return]
    except EOFError:
        return "the process ended without an answer"


def read_all(directory: Path) -> None:
    """Read every file once."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(2**24):
                    pass


def drop_caches(directory: Path) -> None:
    """Drop the files from the page cache, so that the next read comes from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
