"""Measures jobs of Kubernetes' manifests, in pods that are namespaces of this machine.

    pod_kill_gap_s    from the kill of a pod's container to the next completed step of the others
drain_lost_steps  computed again after a machine was drained
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.local_cluster import read_steps
from ops.local_kubernetes.cluster import Cluster
from ops.local_kubernetes.trial import WORKERS, not_possible, overlay, running

_WAIT_S = 300.0


def not_installed() -> str | None:
    return not_possible()


def measure(directory: Path, *, quick: bool) -> dict[str, Any]:
    gaps, lost = [], []
    for number in range(1 if quick else 3):
        gap_s, lost_steps = _measure_once(directory / str(number))
        gaps.append(gap_s)
        lost.append(lost_steps)
    return {"pod_kill_gap_s": round(statistics.median(gaps), 2), "drain_lost_steps": max(lost)}


def _measure_once(directory: Path) -> tuple[float, int]:
    arguments = ["train.py", "--steps=1000000", "--log=/records/log", "--pause=0.05"]
    manifests = overlay(directory / "overlay", arguments=arguments)
    with running(directory, manifests) as cluster:

        def lines() -> list[dict[str, float]]:
            return read_steps(directory / "records" / "log")

        def wait_until(holds: Callable[[dict[str, float]], bool]) -> float:
            """Return when the first line for which it holds was written."""
            cluster.wait_until(lambda: any(map(holds, lines())), _WAIT_S)
            return next(line["at_s"] for line in lines() if holds(line))

        wait_until(lambda line: line["step"] >= 20 and line["world_size"] == 2)
        generation, killed_at_s = lines()[-1]["generation"], time.monotonic()
        cluster.kill_container(cluster.pod(WORKERS, 1), "node")
        gap_s = wait_until(lambda line: line["generation"] > generation)
        wait_until(lambda line: line["generation"] > generation and line["world_size"] == 2)
        generation = lines()[-1]["generation"]
        cluster.drain(cluster.pod(WORKERS, 0).identity.machine)
        wait_until(lambda line: line["generation"] > generation)
        after = [it for it in _recoveries(cluster) if it["generation"] > generation]
    return gap_s - killed_at_s, sum(recovery["lost_steps"] for recovery in after)


def _recoveries(cluster: Cluster) -> list[dict[str, Any]]:
    command = "keepstep status --store $STORE --job $JOB --once --json"
    printed = cluster.execute(cluster.pod(WORKERS, 1), "node", "sh", "-c", command)
    recoveries: list[dict[str, Any]] = json.loads(printed)["recoveries"]
    return recoveries
