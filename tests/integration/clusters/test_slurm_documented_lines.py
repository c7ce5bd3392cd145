"""Claims about the commands that docs/slurm.md shows: they work as they stand, in this order."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.local_slurm import LocalSlurm, not_installed
from ops.slurm_training import ROOT, environment
from tests.adaptive_timeouts import patient

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(not_installed() is not None, reason=not_installed() or ""),
]
ENDED = ":ended:"


class Shell:
    """A shell on a node, as on a node for logins, with its variables from line to line."""

    def __init__(self, slurm: LocalSlurm, directory: Path) -> None:
        (directory / "examples").symlink_to(ROOT / "examples")
        variables = {**os.environ, **environment(directory), "HOME": str(directory)}
        # What the guide leaves out; and where control groups follow processes, none stays.
        del variables["KEEPSTEP_SECRET_FILE"], variables["NODES"]
        variables["PET_KEEP_STATE"] = "0"
        self._bash = subprocess.Popen(
            slurm.on_node("n1", "bash"),
            env={**variables, "SLURM_CONF": str(slurm.configuration)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.run(f"cd {directory}")

    def run(self, lines: str) -> str:
        """Run lines, and return what they print; each succeeds."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f"{lines}\necho {ENDED} $?\n")
        self._bash.stdin.flush()
        output = ""
        for line in self._bash.stdout:
            if line.startswith(ENDED):
                assert line.split() == [ENDED, "0"], f"{lines}\n{output}"
                return output
            output += line
        raise AssertionError(f"the shell has ended: {lines}\n{output}")

    def close(self) -> None:
        self._bash.kill()
        self._bash.wait()


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[LocalSlurm]:
    with LocalSlurm(tmp_path / "slurm", ("n1", "n2", "n3")) as cluster:
        yield cluster


def test_lines_of_the_guide_work_as_they_stand(tmp_path: Path, slurm: LocalSlurm) -> None:
    text = (ROOT / "docs" / "slurm.md").read_text()
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    commands = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    shell = Shell(slurm, tmp_path)

    log = tmp_path / "no job yet"

    def wait_for(pattern: str, count: int = 1) -> None:
        def is_there() -> bool:
            return log.exists() and len(re.findall(pattern, log.read_text(), re.MULTILINE)) >= count

        try:
            slurm.wait_until(is_there, patient(120), f"{pattern!r} in the log")
        except TimeoutError as error:
            error.add_note(log.read_text())
            raise

    def run(start: str) -> str:
        """Run the next line of the guide, which begins so."""
        line = commands.pop(0)
        assert line.startswith(start)
        return shell.run(line)

    try:
        run("job=$(sbatch --parsable examples/slurm/train.sbatch ")
        job = shell.run("echo $job").strip()
        log = tmp_path / f"train-{job}.log"
        assert "train" in run("squeue ")
        wait_for("^step 10 ")
        commands[0] = f"timeout 2 {commands[0]} || [[ $? == 124 ]]"
        assert "generation 1: 2 ranks on 2 nodes" in run("timeout 2 tail ")
        run("coordinator=")
        assert re.search(r"job slurm-\d+ +generation 1 +ranks 2", run("keepstep status "))
        run("scontrol requeue ")
        assert "KillWait" in run("scontrol show config ")
        wait_for(r"goes on after step \d+, from storage")
        run("added=$(JOIN=$job sbatch --parsable ")
        wait_for("n3 joins")
        wait_for("training goes on after step .* with 3 ranks; 0 steps computed again")
        run("scancel ")
        wait_for("training goes on after step .* with 2 ranks; 0 steps computed again")
        assert "1 to 1 nodes from now on" in run("keepstep scale ")
        wait_for("training goes on after step .* with 1 rank; 0 steps computed again")
        run("scancel ")
        slurm.wait_until(lambda: job not in shell.run("squeue"), patient(60), "end of the job")
        left = re.findall(r"left after step (\d+); step (\d+) is stored", log.read_text())
        assert max(int(step) for step, _ in left) == max(int(step) for _, step in left)
        assert commands == []
    finally:
        shell.close()
