"""Measures the processor time of a node's `keepstep monitor` while ranks write to their rings.

Each rank makes ten steps per second, with a given number of all-reduces each. The daemon is the
real command, which reads twice and diagnoses once per second, or with --relay only forwards. Its
start is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from keepstep.monitor.records import Communicator, Kind, Operation, Phase
from keepstep.monitor.telemetry.ring import Ring, WorkerIdentity
from keepstep.monitor.telemetry.ring_files import create_ring

ROOT = Path(__file__).parents[2]
STEP_S = 0.1
PHASES = (Phase.STEP, Phase.DATA_WAIT, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def write(rings: list[Ring], operations: int, stop: threading.Event) -> None:
    """Write steps of all ranks to their rings until stopped."""
    step, number = 0, 0
    due_s = time.monotonic()
    while not stop.is_set():
        step += 1
        now_s = time.monotonic()
        for ring in rings:
            ring.step = step
            for phase in PHASES:
                ring.marks.begin(
                    Kind.PHASE, phase, number=step, step=step,
                    enqueued_s=now_s, ended_s=now_s + STEP_S * 0.9,
                )  # fmt: skip
            for place in range(operations):
                at_s = now_s + STEP_S * 0.8 * place / operations
                ring.operations.begin(
                    Kind.OPERATION, Operation.ALL_REDUCE, number=number + place + 1, step=step,
                    enqueued_s=at_s, ended_s=at_s + 1e-4, nbytes=1 << 22, communicator=7, dtype=9,
                )  # fmt: skip
        number += operations
        due_s += STEP_S
        stop.wait(max(0.0, due_s - time.monotonic()))


def measure(ranks: int, operations: int, seconds: float, *, relay: bool) -> float:
    """Return the share of one processor that the daemon uses."""
    rings = [
        create_ring(WorkerIdentity("bench", rank, "node-a", world_size=ranks))
        for rank in range(ranks)
    ]
    for ring in rings:
        ring.add_communicator(Communicator(7, "world", tuple(range(ranks))))
    stop = threading.Event()
    writer = threading.Thread(target=write, args=(rings, operations, stop))
    writer.start()
    command = [
        sys.executable, "-P", "-m", "keepstep", "monitor",
        "--job", "bench", "--node", "node-a", "--port", "0",
    ]  # fmt: skip
    daemon = subprocess.Popen(
        [*command, *(["--relay"] if relay else [])], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert daemon.stdout is not None
        assert re.search("http", daemon.stdout.readline())
        # Work at the start, such as the allocation of memory, is not counted.
        time.sleep(5)
        process = psutil.Process(daemon.pid)
        before, began_s = process.cpu_times(), time.monotonic()
        time.sleep(seconds)
        after = process.cpu_times()
        processor_s = after.user + after.system - before.user - before.system
        return processor_s / (time.monotonic() - began_s)
    finally:
        daemon.terminate()
        daemon.wait()
        stop.set()
        writer.join()
        for ring in rings:
            ring.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--operations", type=int, default=20, help="all-reduces per step, at ten steps per second"
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-", dir="/dev/shm") as directory:
        os.environ["KEEPSTEP_MONITOR_DIR"] = os.environ["XDG_RUNTIME_DIR"] = directory
        shares = {
            role: measure(
                arguments.ranks, arguments.operations, arguments.seconds, relay=role == "relay"
            )
            for role in ("relay", "root")
        }
    result = {
        "ranks": arguments.ranks,
        "operations_per_s": arguments.ranks * arguments.operations / STEP_S,
        "processors": os.cpu_count(),
        "load": os.getloadavg()[0],
        "relay_share_of_one_processor": shares["relay"],
        "root_share_of_one_processor": shares["root"],
        "relay_share_of_node": shares["relay"] / (os.cpu_count() or 1),
        "root_share_of_node": shares["root"] / (os.cpu_count() or 1),
    }
    if not arguments.json:
        for role, share in shares.items():
            node_share = share / (os.cpu_count() or 1)
            print(f"{role}: {share:.2%} of one processor, {node_share:.2%} of this node's")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
