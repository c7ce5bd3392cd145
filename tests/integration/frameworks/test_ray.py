"""Claims about the example under Ray Train: a worker and a node are lost, and the losses stay."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from keepstep.checkpoint.format.stored.steps import newest
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.adaptive_timeouts import patient

pytest.importorskip("ray")
from ray.cluster_utils import Cluster

from examples.ray_train import initialized, share, train_step

ROOT = Path(__file__).parents[3]
STEPS = 60
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    running = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        yield running
    finally:
        running.shutdown()


class Step(NamedTuple):
    """A step, as the first of its workers printed it."""

    pid: int
    loss: float
    workers: int


class Training:
    """The example, which runs on a cluster."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.url = str(directory / "run")
        self.log = directory / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, ROOT / "examples/ray_train.py", "--checkpoint", self.url,
                    "--steps", str(STEPS), "--checkpoint-every", "5",
                ],
                env={**os.environ, "RAY_ADDRESS": cluster.address, "RAY_DEDUP_LOGS": "0"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait_until(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + patient(180)
        while not condition():
            assert self.process.poll() is None, f"training has ended\n{self.log.read_text()}"
            assert time.monotonic() < limit, self.log.read_text()
            time.sleep(0.05)

    def has_stored(self, step: int) -> bool:
        found = newest(open_storage(self.url))
        return found is not None and found.step >= step

    def steps(self) -> dict[int, Step]:
        """Wait for the end; return the steps with a checkpoint, as the workers printed them."""
        assert self.process.wait(patient(300)) == 0, self.log.read_text()
        return steps_in(self.log.read_text())


def steps_in(log: str) -> dict[int, Step]:
    """Return the steps that a log has; each was computed by one worker, or not printed at all."""
    lines = re.findall(r"pid=(\d+)\)\S* step (\d+): loss (\S+), (\d) workers", log)
    steps: dict[int, Step] = {}
    for pid, step, loss, workers in lines:
        found = Step(int(pid), float(loss), int(workers))
        # Ray may print a line twice.
        assert steps.setdefault(int(step), found) == found, log
    return steps


@contextmanager
def training(cluster: Cluster, directory: Path) -> Iterator[Training]:
    running = Training(cluster, directory)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def workers_of(cluster: Cluster) -> list[psutil.Process]:
    """Return the processes of the training's workers."""
    processes = [
        child
        for node in cluster.list_all_nodes()
        for info in node.all_processes["raylet"]
        for child in psutil.Process(info.process.pid).children(recursive=True)
    ]
    return [p for p in processes if "RayTrainWorker" in " ".join(p.cmdline())]


def losses_of_one_process() -> list[float]:
    model = initialized()
    optimizer = torch.optim.AdamW(model.parameters())
    return [train_step(model, optimizer, share(step, 0, 1)).item() for step in range(STEPS)]


def test_training_goes_on_after_the_loss_of_a_worker_and_on_fewer_after_that_of_a_node(
    cluster: Cluster, tmp_path: Path
) -> None:
    other: Any = cluster.add_node(**NODE)
    with training(cluster, tmp_path) as running:
        running.wait_until(lambda: running.has_stored(10))
        workers_of(cluster)[0].kill()
        running.wait_until(lambda: running.has_stored(25))
        cluster.remove_node(other, allow_graceful=False)
        steps = running.steps()
    check(steps)


def check(steps: dict[int, Step]) -> None:
    expected = losses_of_one_process()
    for number, step in steps.items():
        assert step.loss == pytest.approx(expected[number - 1], rel=1e-4), number
    # What a worker prints last may be lost with it.
    assert {20, *range(40, STEPS + 1, 5)} <= steps.keys()
    assert steps[5].pid != steps[20].pid != steps[STEPS].pid
    assert steps[20].workers == 2
    assert steps[STEPS].workers == 1
