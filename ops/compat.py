"""Runs the tests that touch PyTorch with other versions of it, each in an environment of its own.

    python -m ops.compat 2.11.0 [2.14.1 ...] [--environments DIR] [--json]

An environment has that PyTorch, and everything else from the one that runs this. The builds from
PyPI bring several gigabytes of CUDA libraries; nothing here needs a GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
CHECKS = {
    "unit": ("-m", "not campaign and not slow", "tests/unit"),
    "jobs": (
        "tests/integration/job/test_attach.py",
        "tests/integration/job/test_recovery.py",
        "-k",
        "lost_worker or killed_worker or loss_of_a_node or random_numbers",
    ),
    "checkpoints": (
        "tests/integration/checkpoint/test_layout_changes.py",
        "tests/integration/checkpoint/test_dcp.py",
        "tests/integration/checkpoint/test_background_saves.py",
    ),
}
"""Arguments of pytest for each check: units, jobs that lose workers and nodes, saves and loads."""
_COUNT = re.compile(r"(\d+) (passed|failed|error)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one check with one version. `failures` are the names of failed tests."""

    torch: str
    check: str
    passed: int
    failed: int
    failures: tuple[str, ...]


def environment(version: str, directory: Path) -> Path:
    """Make an environment with a version of PyTorch, unless it is there; return its Python."""
    place = directory / f".venv-torch-{version}"
    python = place / "bin" / "python"
    if not (place / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"torch=={version}"], check=True)
        (place / "made").touch()
    # What PyTorch does not bring along is taken from here, and keepstep from this tree.
    shared = Path(sysconfig.get_path("purelib", vars={"base": str(place)}), "shared.pth")
    shared.write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    return python


def run(python: Path, version: str, check: str) -> Outcome:
    """Run one check's tests."""
    done = subprocess.run(
        [python, "-m", "pytest", "--numprocesses", "2", "-rfE", "-p", "no:cacheprovider",
         *CHECKS[check]],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    *_, last = done.stdout.strip().splitlines() or [done.stderr[-200:]]
    counts = {kind: int(number) for number, kind in _COUNT.findall(last)}
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    failed = counts.get("failed", 0) + counts.get("error", 0)
    if done.returncode and not failed:
        failures, failed = [f"{check}: {last[:200]}"], 1
    return Outcome(
        torch=version,
        check=check,
        passed=counts.get("passed", 0),
        failed=failed,
        failures=tuple(failures),
    )


@click.command(help=__doc__)
@click.argument("versions", nargs=-1, required=True)
@click.option("--environments", type=click.Path(path_type=Path), default=ROOT)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(versions: tuple[str, ...], environments: Path, as_json: bool) -> None:
    """Run the checks, and end with status 1 if a test failed."""
    outcomes = []
    for version in versions:
        python = environment(version, environments)
        outcomes += [run(python, version, check) for check in CHECKS]
    table = Table("PyTorch", "check", "passed", "failed", "failures")
    for outcome in outcomes:
        table.add_row(
            outcome.torch,
            outcome.check,
            str(outcome.passed),
            str(outcome.failed),
            "\n".join(outcome.failures),
        )
    Console().print(table)
    if as_json:
        print(json.dumps({"outcomes": [asdict(outcome) for outcome in outcomes]}))
    sys.exit(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    main()
