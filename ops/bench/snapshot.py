"""Measures the cost of a snapshot of all state after every step.

`python ops/bench/snapshot.py --json [--quick] [--device cuda]`. The last line is one JSON object.
The state is copied lazily, synchronously, or by DCP's async_save to memory. With `--device cuda`
there is one node with a larger model on its GPU, nothing is `protected`, and DCP's staging buffers
are page-locked. Else two nodes of one rank each train a sharded GPT on one thread per rank, with
real snapshot servers; this process acts as their agents, and commits as the leader does. Windows of
steps of each kind alternate, so that a drift of the machine affects all equally; `step_s` are
medians, `step_ratio` those of the ratios to the window without snapshots of the same round, and
`step_ratio_quartiles` their quartiles. `cpu_ratio` is the same of the processor seconds of all
workers, servers and this process. `protected` is `lazy` with parity for the other node; here the
same two cores train and do the exchange of both nodes. `transfer` is what TCP alone takes for the
same bytes, once a step (`loopback_transfer.py`). `sealed_s`, `encoded_s` and `committed_s` are
seconds from the beginning of a snapshot of all state on an otherwise idle machine.
`encode_bytes_per_s` counts bytes of input, on one thread, for groups of 4.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

# This directory has modules with the names of others, which it must not hide.
sys.path.remove(str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import click
import numpy as np
from rich.console import Console

from examples.local_cluster import process_tree
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.messages import Protected
from keepstep.checkpoint.snapshot.parity.erasure import Combination, parity_rows
from keepstep.checkpoint.snapshot.server.limits import RateLimits
from keepstep.elastic.agent.snapshot_process import SnapshotEvent, SnapshotProcess
from keepstep.elastic.rendezvous.records import Generation, Member
from ops.bench.processes import python_path
from ops.bench.processor_time import processor_s

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "ops" / "bench" / "snapshot_worker.py"
NODES = 2
MODES = ("none", "lazy", "sync", "protected", "dcp_async")
TILE_NBYTES = 2**18

Result = dict[str, Any]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="Fewer steps.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where to train.")
def main(as_json: bool, quick: bool, device: str) -> None:
    console = Console(stderr=as_json)
    result = asyncio.run(
        measure(device, rounds=2 if quick else 4, steps=3 if quick else 5, console=console)
    )
    if device == "cuda":
        console.print(result)
        print(json.dumps(result))
        return
    cpu_s = transfer_cpu_s(result["state_bytes_per_node"])
    result["transfer"] = {
        "cpu_s": cpu_s, "cpu_ratio": round(1 + cpu_s / result["cpu_s"]["none"], 4)
    }  # fmt: skip
    result |= kernels(2**26 if quick else 2**28)
    console.print(result)
    print(json.dumps(result))


class Nodes:
    """The nodes' snapshot servers with their workers; commits their snapshots."""

    def __init__(self, directory: Path, count: int, device: str) -> None:
        self.directory = directory
        self.count, self.device = count, device
        self.servers: list[SnapshotProcess] = []
        self.workers: list[asyncio.subprocess.Process] = []
        self.generation = 0
        self.protected: dict[SnapshotId, set[int]] = defaultdict(set)
        self.times: dict[int, Result] = defaultdict(dict)
        self.committing: set[asyncio.Task[None]] = set()
        self.commit_changed = asyncio.Condition()

    async def start(self, stack: AsyncExitStack) -> None:
        secret = secrets.token_bytes(32)
        for rank in range(self.count):
            node_directory = self.directory / f"node{rank}"
            node_directory.mkdir()
            server = await SnapshotProcess.start(
                f"n{rank}",
                1,
                node_directory,
                "127.0.0.1",
                secret,
                partial(self.on_event, rank),
                RateLimits(),
            )
            stack.push_async_callback(server.close)
            self.servers.append(server)
        environment = {
            **os.environ,
            "PYTHONPATH": python_path(ROOT, ROOT / "examples"),
            "OMP_NUM_THREADS": "1",
            "SECRET": secret.hex(),
        }
        for rank, server in enumerate(self.servers):
            worker = await asyncio.create_subprocess_exec(
                sys.executable, str(WORKER), str(rank), str(self.count),
                server.local_address, str(self.directory / "store"), str(self.directory),
                self.device,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                env=environment, limit=2**24,
            )  # fmt: skip
            self.workers.append(worker)
            stack.push_async_callback(self.end, worker)

    @staticmethod
    async def end(worker: asyncio.subprocess.Process) -> None:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()

    def on_event(self, rank: int, event: SnapshotEvent) -> None:
        if not isinstance(event, Protected):
            return
        snapshot = event.snapshot
        self.protected[snapshot].add(rank)
        self.times[snapshot.step]["encoded_s"] = time.monotonic()
        if len(self.protected[snapshot]) == self.count:
            task = asyncio.ensure_future(self.commit(snapshot))
            self.committing.add(task)
            task.add_done_callback(self.committing.discard)

    async def commit(self, snapshot: SnapshotId) -> None:
        await asyncio.gather(*(server.commit(snapshot) for server in self.servers))
        self.times[snapshot.step]["committed_s"] = time.monotonic()
        for worker in self.workers:
            self.send(worker, committed=snapshot.step)
        async with self.commit_changed:
            self.commit_changed.notify_all()

    async def committed(self, step: int) -> Result:
        """Wait until a snapshot is committed; return the end times of its phases."""
        async with self.commit_changed:
            await self.commit_changed.wait_for(lambda: "committed_s" in self.times[step])
        return self.times[step]

    @staticmethod
    def send(worker: asyncio.subprocess.Process, **request: Any) -> None:
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(request).encode() + b"\n")

    async def ask(self, **request: Any) -> list[Result]:
        """Send a request to all workers; return their answers."""
        answers = []
        for worker in self.workers:
            self.send(worker, **request)
        for worker in self.workers:
            assert worker.stdout is not None
            line = await worker.stdout.readline()
            if not line:
                raise RuntimeError("a worker ended; see its output above")
            answers.append(json.loads(line))
        return answers

    async def enter(self, parity: int) -> None:
        """Begin a generation with a number of parity nodes."""
        self.generation += 1
        members = tuple(
            Member(f"n{rank}", "127.0.0.1", 1, rank, "", server.address)
            for rank, server in enumerate(self.servers)
        )
        generation = Generation(self.generation, members, "", 0, "benchmark", parity=parity)
        for server in self.servers:
            await server.open_generation(generation)
            await server.commit(SnapshotId(self.generation, -1))
        await self.ask(do="enter", generation=self.generation)


async def measure(device: str, rounds: int, steps: int, console: Console) -> Result:
    count = NODES if device == "cpu" else 1
    # One node has none that keeps its parity.
    modes = [mode for mode in MODES if count > 1 or mode != "protected"]
    step_s: dict[str, list[float]] = {mode: [] for mode in modes}
    ratios: dict[str, list[float]] = {mode: [] for mode in modes}
    cpu_s: dict[str, list[float]] = {mode: [] for mode in modes}
    blocked: list[float] = []
    taken = 0
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-", dir="/dev/shm") as directory:
        async with AsyncExitStack() as stack:
            nodes = Nodes(Path(directory), count, device)
            await nodes.start(stack)
            await nodes.enter(0)
            await nodes.ask(do="window", mode="lazy", steps=2)
            for turn in range(rounds):
                for mode in modes:
                    await nodes.enter(1 if mode == "protected" else 0)
                    worker_mode = "lazy" if mode == "protected" else mode
                    before_s = processor_s(process_tree(os.getpid()))
                    answers = await nodes.ask(do="window", mode=worker_mode, steps=steps + 1)
                    cpu_s[mode].append(
                        (processor_s(process_tree(os.getpid())) - before_s) / (steps + 1)
                    )
                    # The slowest rank determines a step's time. The first step of a window is left
                    # out: it fills pages and caches.
                    by_rank = [answer["seconds"] for answer in answers]
                    seconds = [max(step) for step in zip(*by_rank, strict=True)][1:]
                    step_s[mode].append(statistics.median(seconds))
                    ratios[mode].append(step_s[mode][-1] / step_s["none"][-1])
                    if mode == "lazy":
                        for answer in answers:
                            blocked += answer["blocked"][1:]
                        taken += answers[0]["taken"]
                console.print(turn, {mode: round(values[-1], 4) for mode, values in step_s.items()})
            await nodes.enter(count - 1)
            singles = []
            for _ in range(5):
                answers = await nodes.ask(do="single")
                began_s = max(answer["began_s"] for answer in answers)
                times = await nodes.committed(answers[0]["step"])
                singles.append({
                    "sealed_s": max(answer["sealed_s"] for answer in answers) - began_s,
                    "encoded_s": times["encoded_s"] - began_s,
                    "committed_s": times["committed_s"] - began_s,
                })  # fmt: skip
            copies = await nodes.ask(do="memcpy")
            for server in nodes.servers:
                await server.refresh()
            memory_nbytes = max(server.memory_nbytes for server in nodes.servers)
    state_nbytes = copies[0]["nbytes"]
    return {
        "step_s": {mode: round(statistics.median(values), 4) for mode, values in step_s.items()},
        "step_ratio": {
            mode: round(statistics.median(values), 4) for mode, values in ratios.items()
        },
        "step_ratio_quartiles": {
            mode: [round(value, 4) for value in quartiles(values)]
            for mode, values in ratios.items()
        },
        "cpu_s": {mode: round(statistics.median(values), 4) for mode, values in cpu_s.items()},
        "cpu_ratio": {
            mode: round(statistics.median(map(truediv, values, cpu_s["none"])), 4)
            for mode, values in cpu_s.items()
            if mode != "none"
        },
        "snapshots_per_step": round(taken / (rounds * (steps + 1)), 3),
        "state_bytes_per_node": state_nbytes,
        "blocked_s": round(statistics.median(blocked), 6),
        "memcpy_s": round(statistics.median(copy["seconds"] for copy in copies), 6),
        **{
            name: round(statistics.median(single[name] for single in singles), 6)
            for name in singles[0]
        },
        # Two snapshots of the node's state, and two of its parity in a group of two.
        "memory_ratio": round(memory_nbytes / (2 * 2 * state_nbytes + 64 * 2**20), 4),
        "memory_bytes_per_state_byte": round(memory_nbytes / state_nbytes, 3),
    }


def transfer_cpu_s(nbytes: int) -> float:
    """Return the processor seconds in which TCP alone moves `nbytes` of each node."""
    command = [sys.executable, str(ROOT / "ops" / "bench" / "loopback_transfer.py"), str(nbytes)]
    output = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=300
    ).stdout
    return float(json.loads(output.splitlines()[-1])["cpu_s"])


def quartiles(values: list[float]) -> tuple[float, float]:
    """Return the first and third quartile."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def kernels(nbytes: int) -> Result:
    """Return the rates of copying and encoding, on one thread, with buffers allocated before."""
    random = np.random.default_rng(0)
    sources = [random.integers(0, 256, nbytes, np.uint8) for _ in range(3)]
    target, second_target = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    def encode(parity: int) -> None:
        data = 4 - parity
        rows = [Combination(row) for row in parity_rows(data, parity)]
        for start in range(0, nbytes, TILE_NBYTES):
            tiles = [source[start : start + TILE_NBYTES] for source in sources[:data]]
            for row, parity_block in zip(rows, (target, second_target), strict=False):
                row.into(parity_block[start : start + TILE_NBYTES], tiles)

    copy_s = median_s(lambda: np.copyto(target, sources[0]))
    return {
        "memcpy_bytes_per_s": round(nbytes / copy_s),
        "encode_bytes_per_s": {
            "m1": round(3 * nbytes / median_s(lambda: encode(1))),
            "m2": round(2 * nbytes / median_s(lambda: encode(2))),
        },
    }


def median_s(act: Callable[[], None], repeats: int = 7) -> float:
    """Return the median duration of a call, in seconds."""
    times = []
    for _ in range(repeats):
        began = time.monotonic()
        act()
        times.append(time.monotonic() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
