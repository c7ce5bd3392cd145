"""Claims about the cluster that tests and the demonstration start on one machine."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.local_cluster import JobOver
from tests.patient_cluster import PatientCluster


@pytest.fixture
def running(tmp_path: Path) -> Iterator[PatientCluster]:
    with PatientCluster("job", [], nnodes="1", workers=1, log=tmp_path) as cluster:
        yield cluster


def agent(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


def test_wait_for_what_a_finished_job_does_not_show_any_more_ends_at_once(
    running: PatientCluster,
) -> None:
    """The last node that leaves deletes the job's keys: a wait that begins later sees nothing."""
    running.agents["a"] = agent("")
    with pytest.raises(JobOver, match="all agents have ended"):
        running.wait_until(lambda view: view.result is not None, 60)


def test_wait_goes_on_while_an_agent_lives(running: PatientCluster) -> None:
    running.agents["a"] = agent("")
    running.agents["b"] = agent("import time; time.sleep(600)")
    running.agents["a"].wait()
    with pytest.raises(TimeoutError, match="not within"):
        running.wait_until(lambda view: view.result is not None, 2)
