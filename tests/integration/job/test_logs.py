"""Claims about `keepstep logs` of a job that runs on several nodes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import pytest

from tests.adaptive_timeouts import patient
from tests.patient_cluster import PatientCluster

SCRIPT = """
import os, sys, time
from pathlib import Path
rank = os.environ["RANK"]
print("begins as rank", rank, flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.02)
print("the end of rank", rank, flush=True)
os.write(2, b"x" * 600_000 + b"\\n")
"""


@pytest.fixture
def end(tmp_path: Path) -> Path:
    return tmp_path / "end"


@pytest.fixture
def cluster(tmp_path: Path, end: Path) -> Iterator[PatientCluster]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with PatientCluster(
        "job", [str(script), str(end)], nnodes="1:2", workers=1, log=tmp_path / "agents",
        last_call_s=60.0, spares=0,
    ) as running:  # fmt: skip
        for node in ("a", "b"):
            running.start(node, "--redirects", "3", "--log-dir", str(tmp_path / f"output-{node}"))
        running.wait_until(lambda view: view.generation is not None, 60)
        yield running


def command(cluster: PatientCluster, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "keepstep", "logs", "--store", cluster.url, "--job", "job", *options
    ]  # fmt: skip


def test_output_of_any_node_is_read_and_followed_over_a_recovery_to_the_last_line(
    cluster: PatientCluster, end: Path
) -> None:
    view = cluster.wait_until(lambda view: view.generation is not None, 60)
    assert view.generation is not None
    node_of = {rank: member.node for member in view.generation.members for rank in member.ranks}
    with subprocess.Popen(
        command(cluster, "--rank", "0", "--follow"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as following:  # fmt: skip
        assert following.stdout is not None
        assert following.stderr is not None
        timer = Timer(patient(120), following.kill)
        timer.start()
        try:
            assert following.stdout.readline() == b"begins as rank 0\n"
            others = subprocess.run(
                command(cluster, "--node", node_of[1]), capture_output=True, text=True, check=True
            )
            assert others.stdout == "begins as rank 1\n"
            assert f"rank 1, generation 1, node {node_of[1]}, stdout" in others.stderr
            cluster.kill(node_of[0])
            assert following.stdout.readline() == b"begins as rank 0\n"
            end.touch()
            rest = following.stdout.read()
            notes = following.stderr.read().decode()
        finally:
            following.kill()
            timer.cancel()
    assert rest == b"the end of rank 0\n" + b"x" * 600_000 + b"\n"
    assert f"rank 0, generation 1, node {node_of[0]}, stdout" in notes
    assert f"rank 0, generation 2, node {node_of[1]}, stdout" in notes
    assert following.returncode == 0
