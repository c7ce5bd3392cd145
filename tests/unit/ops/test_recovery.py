"""Tests of recovery.py's waits, and of their ends."""

from contextlib import closing
from pathlib import Path

import pytest

from examples.local_cluster import JobOver
from ops.bench.processes import Processes
from ops.bench.recovery import wait_for


def test_steps_of_a_job_that_has_ended_are_not_waited_for(tmp_path: Path) -> None:
    with closing(Processes(tmp_path)) as job:
        job.run(0, "worker", ["sh", "-c", "echo its last words; exit 1"])
        with pytest.raises(JobOver, match="its last words"):
            wait_for(job, tmp_path, lambda lines: len(lines) > 0)


def test_steps_that_a_job_has_made_count_although_it_has_ended(tmp_path: Path) -> None:
    record = f"""echo '{{"rank": 0, "step": 1, "at_s": 0.0}}' > {tmp_path}/rank-0.jsonl"""
    with closing(Processes(tmp_path)) as job:
        job.run(0, "worker", ["sh", "-c", record])
        assert wait_for(job, tmp_path, lambda lines: job.is_over and len(lines) > 0)
