"""A claim about how many files workers may open."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

from keepstep.processes import module_command
from tests.adaptive_timeouts import patient

LEAST = 2048


def test_workers_may_open_more_files_than_the_shell_that_starts_the_job(tmp_path: Path) -> None:
    """gloo has a connection to every other rank, for each process group."""
    script = tmp_path / "shown.py"
    script.write_text(
        "import resource\nprint('may open', resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert most >= LEAST, "this machine allows no more"
    done = subprocess.run(
        module_command("keepstep", "run", "--nproc-per-node", "1", str(script)),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, LEAST)),
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert done.returncode == 0, done.stderr
    assert f"may open {LEAST}" in done.stdout + done.stderr
