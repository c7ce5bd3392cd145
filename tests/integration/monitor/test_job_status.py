"""Claims about a real keepstep job with a real monitor, which shows the coordinator's status."""

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keepstep.elastic.monitor_bridge.job_status import job_status_of
from keepstep.elastic.rendezvous.view import View
from tests.adaptive_timeouts import patient
from tests.integration.monitor.running import get, until
from tests.patient_cluster import PatientCluster

ROOT = Path(__file__).parents[3]
SCRIPT = """
import functools, keepstep, torch
def build(world):
    return keepstep.State(torch.nn.Linear(4, 4), functools.partial(torch.optim.SGD, lr=0.1))
with keepstep.join(build) as job:
    data = torch.utils.data.TensorDataset(torch.randn(4096, 4))
    for (batch,) in job.batches(data, global_batch=4, epochs=1000):
        with job.step():
            job.model(batch).square().mean().backward()
            job.optimizer.step()
"""


def test_overview_of_a_keepstep_job_has_members_snapshots_and_goodput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("KEEPSTEP_MONITOR_DIR", str(tmp_path / "rings"))
    with PatientCluster(
        "job_status", [str(script)], nnodes="1", workers=2, log=tmp_path / "agents"
    ) as cluster:
        cluster.start("node-a")
        cluster.wait_until(lambda view: view.snapshot is not None, 90)
        command = [
            sys.executable,
            "-P",
            "-m",
            "keepstep",
            "monitor",
            "--store",
            cluster.url,
            "--job",
            "job_status",
        ]
        monitor = subprocess.Popen(
            [*command, "--port", "0", "--open-page"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert monitor.stdout is not None
            address = re.search(r"http://\S+", monitor.stdout.readline())
            assert address
            status = asyncio.run(job_status_at(address[0].rstrip("/")))
            monitor.send_signal(signal.SIGTERM)
            assert monitor.wait(patient(20)) == 0
        finally:
            monitor.kill()
            monitor.communicate()
        assert status["generation"] == 1
        assert [member["ranks"] for member in status["members"]] == [[0, 1]]
        goodput = status["goodput"]
        assert 0 <= goodput["share"] <= 1
        assert sum(goodput["parts"].values()) == pytest.approx(goodput["wall_s"])
        assert goodput["wall_s"] > 0
        # The monitor has not disturbed the job.
        assert cluster.agents["node-a"].poll() is None


async def job_status_at(url: str) -> dict[str, Any]:
    """Return the job's status from a monitor once it includes a snapshot."""
    status: dict[str, Any] = {}

    async def has_snapshot() -> bool:
        status.update((await (await get(url, "/v1/overview")).json())["job_status"] or {})
        return bool(status.get("snapshot_step"))

    await until(has_snapshot)
    return status


def test_job_without_a_generation_has_no_status() -> None:
    assert job_status_of(View()) is None
