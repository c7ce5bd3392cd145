"""Claims about the Slurm cluster that tests and a benchmark run on this machine."""

from pathlib import Path

import psutil
import pytest

from ops.local_slurm import LocalSlurm, not_installed
from tests.adaptive_timeouts import patient

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(not_installed() is not None, reason=not_installed() or ""),
]


def test_job_runs_a_task_on_each_of_two_nodes_and_the_end_leaves_no_process(tmp_path: Path) -> None:
    script, output = tmp_path / "job.sh", tmp_path / "output"
    script.write_text("#!/bin/bash\nsrun bash -c 'echo on $SLURMD_NODENAME; sleep 600'\n")
    with LocalSlurm(tmp_path / "slurm") as slurm:
        slurm.submit("--nodes=2", "--ntasks-per-node=1", "--output", output, script)
        slurm.wait_until(
            lambda: output.exists() and output.read_text().count("on n") == 2,
            patient(60),
            "output of two tasks",
        )
        assert sorted(output.read_text().split()) == ["n1", "n2", "on", "on"]
        step_daemons = [it for it in slurm.processes_of() if it.name().startswith("slurmstepd")]
        assert len(step_daemons) == 3, "the batch script's, and one for each task"
        assert len([it for it in step_daemons if it in slurm.processes_of("n2")]) == 1
    assert slurm.processes_of() == []
    assert not any(it.is_running() and it.status() != psutil.STATUS_ZOMBIE for it in step_daemons)
