"""A real keepstep job, watched by a real monitor: the page's story is the coordinator's."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from elastic.story import story_of
from elastic.view import View

ROOT = Path(__file__).parents[3]
SCRIPT = """
import functools, torch, elastic
def build(world):
    return elastic.State(torch.nn.Linear(4, 4), functools.partial(torch.optim.SGD, lr=0.1))
with elastic.join(build) as job:
    data = torch.utils.data.TensorDataset(torch.randn(4096, 4))
    for (batch,) in job.batches(data, global_batch=4, epochs=1000):
        with job.step():
            job.model(batch).square().mean().backward()
            job.optimizer.step()
"""


def test_page_of_a_keepstep_job_tells_members_snapshots_and_goodput(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = os.environ | {
        "XDG_RUNTIME_DIR": str(tmp_path / "run"), "PYTHONPATH": str(ROOT),
        "KEEPSTEP_MONITOR_DIR": str(tmp_path / "rings"),
    }  # fmt: skip
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-m", "elastic.cli"]
    job = subprocess.Popen([*command, "run", "--job", "story", "--nproc-per-node", "2", str(script)], env=environment)
    monitor = None
    try:
        deadline_s = time.monotonic() + 90
        while not list((tmp_path / "run").rglob("story.json")):
            assert time.monotonic() < deadline_s
            assert job.poll() is None
            time.sleep(0.1)  # Another process is waited for.
        monitor = subprocess.Popen(
            [*command, "monitor", "--job", "story", "--port", "0", "--open-page"],
            env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert monitor.stdout is not None
        found = re.search(r"http://\S+", monitor.stdout.readline())
        assert found
        told: Any = None
        while not (told and told["snapshot_step"]):
            assert time.monotonic() < deadline_s, told
            with urllib.request.urlopen(f"{found[0]}v1/overview") as response:
                told = json.load(response)["story"]
            time.sleep(0.1)
        assert told["generation"] == 1
        assert [member["ranks"] for member in told["members"]] == [[0, 1]]
        assert 0 <= told["goodput"]["share"] <= 1
        assert sum(told["goodput"]["parts"].values()) == pytest.approx(told["goodput"]["wall_s"])
        assert told["goodput"]["wall_s"] > 0
        monitor.send_signal(signal.SIGTERM)
        assert monitor.wait(20) == 0
        # The job never knew.
        assert job.poll() is None
    finally:
        for process in (monitor, job):
            if process is not None and process.poll() is None:
                # The job's agent ends its workers when it is asked to.
                process.terminate()
                process.wait()


def test_job_without_a_generation_has_no_story() -> None:
    assert story_of(View()) is None
