"""Measures how long torchrun's survivors make no steps after a node is lost, by back end.

`python ops/bench/torchrun.py --json [--quick]`. The last line is one JSON object. Two agents of
torchrun with a gloo worker each run on one machine, with `--rdzv-backend keepstep` and with `c10d`.
The second one is killed by SIGKILL with all its processes, or all of them are stopped by SIGSTOP,
as a machine that freezes. The gap is the time from then to the first step of the survivor; null if
there is none within 90 s. keepstep has its default lease of 5 s. Both have last_call_timeout=1:
c10d waits 30 s by default for further nodes before each round.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from examples.local_cluster import process_tree  # noqa: E402
from keepstep.elastic.store.address import Access, Address  # noqa: E402
from keepstep.elastic.store.credentials import coordinator_secret  # noqa: E402
from keepstep.elastic.store.embedded import EmbeddedEtcd  # noqa: E402
from keepstep.elastic.store.ports import ReservedPort  # noqa: E402
from ops.bench.processes import Processes  # noqa: E402

WORKER = ROOT / "ops" / "bench" / "torchrun_worker.py"
BACK_ENDS = ("keepstep", "c10d")
LOSSES = ("killed", "frozen")
START_S, LIMIT_S = 120.0, 90.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="One loss of each kind instead of three.")
def main(as_json: bool, quick: bool) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    results: dict[str, dict[str, float | None]] = {name: {} for name in BACK_ENDS}
    for loss in LOSSES:
        for back_end in BACK_ENDS:
            gaps = [measure(back_end, loss) for _ in range(1 if quick else 3)]
            print(back_end, loss, gaps, file=sys.stderr if as_json else sys.stdout)
            results[back_end][loss] = None if math.isinf(gap := statistics.median(gaps)) else gap
    print(json.dumps(results))


def measure(back_end: str, loss: str) -> float:
    """Return the gap after one loss, in seconds; infinity: the survivor made no step in time."""
    with (
        tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name,
        endpoint(back_end) as address,
        closing(Processes(Path(name))) as job,
    ):
        directory = Path(name)
        for node in (0, 1):
            # The node that serves c10d's store is not the one that is lost.
            host = f",is_host={int(node == 0)}" if back_end == "c10d" else ""
            command = [
                sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", back_end,
                "--rdzv-endpoint", address, "--rdzv-id", "bench", "--nnodes", "1:2",
                "--max-restarts", "10", "--rdzv-conf", f"last_call_timeout=1{host}",
                "--local-addr", "127.0.0.1", str(WORKER), str(directory),
            ]  # fmt: skip
            job.run(node, f"node-{node}", command)
        first_step(directory, 2, 0.0, START_S)
        time.sleep(1.0)
        at_s = time.time()
        if loss == "killed":
            job.kill(1)
        else:
            for process in process_tree(job.pid(1, "node-1")):
                process.send_signal(signal.SIGSTOP)
        try:
            return round(first_step(directory, 1, at_s, LIMIT_S) - at_s, 2)
        except TimeoutError:
            return math.inf


@contextmanager
def endpoint(back_end: str) -> Iterator[str]:
    """Yield the endpoint of a back end; keepstep's is an etcd that is started."""
    if back_end == "keepstep":
        secret = coordinator_secret(Address(("127.0.0.1:0",), Access.SECRET), os.environ)
        with EmbeddedEtcd(secret) as etcd:
            yield etcd.url
    else:
        with ReservedPort() as port:
            yield f"127.0.0.1:{port.number}"


def first_step(directory: Path, world_size: int, since_s: float, limit_s: float) -> float:
    """Wait for a step of so many ranks and return when it was made, in wall-clock seconds.

    Raises:
        TimeoutError: there was none in time.
    """
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        for path in directory.glob("steps-*.jsonl"):
            for text in path.read_text().splitlines():
                if text.endswith("}"):
                    line = json.loads(text)
                    if line["at"] > since_s and line["world"] == world_size:
                        return float(line["at"])
        time.sleep(0.1)
    raise TimeoutError(f"no step of {world_size} ranks")


if __name__ == "__main__":
    main()
