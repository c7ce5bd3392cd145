"""A user's own modules next to the script stay theirs, however the job is started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from keepstep.elastic.store.ports import ReservedPort
from keepstep.monitor.telemetry.job_rings import JobRings
from tests.adaptive_timeouts import patient

OWN = ("checkpoint", "monitor", "elastic", "data", "worker", "transport", "records")

COMMON = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import checkpoint, data, elastic, monitor, records, transport, worker

for module in (checkpoint, data, elastic, monitor, records, transport, worker):
    assert module.OWNER == "user", module.__file__

import keepstep

assert keepstep.checkpoint is not checkpoint
assert keepstep.monitor is not monitor
url, steps = sys.argv[1], int(sys.argv[2])
"""

JOINED = (
    COMMON
    + """
def build(world):
    torch.manual_seed(0)
    return keepstep.State(nn.Linear(4, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1))

with keepstep.join(build, checkpoint=url) as job:
    # In one piece, for the ranks share the terminal.
    sys.stdout.write(f"begins after step {job.steps}\\n")
    for batch in job.batches(data.dataset(), 4, steps=steps):
        with job.step():
            job.model(batch).sum().backward()
            for parameter in job.model.parameters():
                dist.all_reduce(parameter.grad)
            job.optimizer.step()
"""
)

ALONE = (
    COMMON
    + """
if __name__ == "__main__":
    model = nn.Linear(4, 1)
    # Before the process group, for a reason that docs/troubleshooting.md gives.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.init_process_group("gloo")
    state = {"model": model, "optimizer": optimizer}
    try:
        begun = keepstep.checkpoint.load(url, state)
    except keepstep.checkpoint.CheckpointMissing:
        begun = 0
    sys.stdout.write(f"begins after step {begun}\\n")
    for step in range(begun, steps):
        with keepstep.monitor.phase(keepstep.monitor.Phase.FORWARD):
            loss = model(data.dataset()[step]).sum()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    keepstep.checkpoint.save(url, state, step=steps)
    dist.destroy_process_group()
"""
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder, with modules of the names that keepstep uses inside."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in OWN:
        (folder / f"{name}.py").write_text('OWNER = "user"\n')
    with (folder / "data.py").open("a") as file:
        file.write("import torch\n\n\ndef dataset():\n    return torch.ones(64, 4)\n")
    (folder / "joined.py").write_text(JOINED)
    (folder / "alone.py").write_text(ALONE)
    return folder


def environment(folder: Path, **more: str) -> Mapping[str, str]:
    """Return an environment in which nothing but the installation leads to keepstep."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**inherited, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder), **more}


def program(name: str) -> str:
    """Return the path of a command of this Python's environment."""
    return str(Path(sys.executable).with_name(name))


def run_ranks(commands: list[tuple[list[str], Mapping[str, str]]], folder: Path) -> str:
    """Run the processes of one job side by side; return what they print."""
    running = [
        subprocess.Popen(
            command, cwd=folder, env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for command, env in commands
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=patient(240))[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(printed)
    return "".join(printed)


def start(way: str, folder: Path, url: Path, steps: int) -> str:
    """Run the user's job with two workers to a number of steps; return what it prints."""
    arguments = [str(url), str(steps)]
    torchrun = [program("torchrun"), "--standalone", "--nproc-per-node", "2", "alone.py"]
    if way == "keepstep run":
        command = [program("keepstep"), "run", "--nproc-per-node", "2", "joined.py"]
        return run_ranks([([*command, *arguments], environment(folder))], folder)
    if way == "torchrun":
        return run_ranks([([*torchrun, *arguments], environment(folder))], folder)
    if way == "KEEPSTEP_MONITOR=1":
        recorded = environment(
            folder,
            KEEPSTEP_MONITOR="1",
            KEEPSTEP_JOB="own",
            KEEPSTEP_MONITOR_DIR=str(folder / "rings"),
        )
        return run_ranks([([*torchrun, *arguments], recorded)], folder)
    port = ReservedPort()
    try:
        return run_ranks(
            [
                (
                    [sys.executable, "alone.py", *arguments],
                    environment(
                        folder,
                        RANK=str(rank),
                        WORLD_SIZE="2",
                        MASTER_ADDR="127.0.0.1",
                        MASTER_PORT=str(port.number),
                    ),
                )
                for rank in (0, 1)
            ],
            folder,
        )
    finally:
        port.close()


def test_own_modules_are_not_shadowed_by_keepstep_run_and_the_job_resumes(
    project: Path, tmp_path: Path
) -> None:
    url = tmp_path / "checkpoints"
    assert start("keepstep run", project, url, 3).count("begins after step 0") == 2
    assert start("keepstep run", project, url, 5).count("begins after step 3") == 2


@pytest.mark.long
def test_own_modules_are_not_shadowed_by_other_launchers_and_each_resumes_anothers_job(
    project: Path, tmp_path: Path
) -> None:
    url = tmp_path / "checkpoints"
    for way, begun, steps in (("torchrun", 0, 3), ("python", 3, 5), ("KEEPSTEP_MONITOR=1", 5, 7)):
        printed = start(way, project, url, steps)
        assert printed.count(f"begins after step {begun}") == 2, (way, printed)
    rings = JobRings(project / "rings" / "own")
    recorded = rings.read(1)
    rings.close()
    assert set(recorded.ranks) == {0, 1}
