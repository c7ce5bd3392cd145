"""Claims about the commands that the benchmarks' docstrings name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adaptive_timeouts import patient

ROOT = Path(__file__).parents[3]
COMMANDS = sorted(
    {
        named
        for path in (ROOT / "ops").rglob("*.py")
        for named in re.findall(r"`python (ops/\S+\.py)", path.read_text())
    }
)


def test_commands_are_found() -> None:
    assert "ops/bench/recovery.py" in COMMANDS
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("command", COMMANDS)
def test_command_starts_from_any_directory(command: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(ROOT / command), "--help"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patient(60),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Usage:" in done.stdout
