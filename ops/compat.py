"""Runs the tests that touch PyTorch with other versions of it, each in an environment of its own.

    python -m ops.compat 2.11.0 [2.14.1 ...] [--python PATH] [--environments DIR] [--json]

An environment has that PyTorch, and everything else from the one that runs this. One of another
Python has everything from PyPI. The builds from PyPI bring several gigabytes of CUDA libraries;
nothing here needs a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ops.environments import ROOT, Outcome, run_tests, share

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
        "tests/integration/checkpoint/test_dcp_stager.py",
        "tests/integration/checkpoint/test_background_saves.py",
    ),
}
"""Arguments of pytest for each check: units, jobs that lose workers and nodes, saves and loads."""


def environment(version: str, directory: Path, base: Path | None) -> Path:
    """Make an environment with a version of PyTorch, unless it is there; return its Python.

    Args:
        version: of PyTorch.
        directory: where environments are.
        base: another Python, whose environment shares nothing with this one.
    """
    name = f".venv-torch-{version}"
    if base is not None:
        asked = [base, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        shown = subprocess.run(asked, capture_output=True, text=True, check=True)
        name += f"-python-{shown.stdout.strip()}"
    place = directory.absolute() / name
    python = place / "bin" / "python"
    if not (place / "made").exists():
        wanted = [f"torch=={version}"]
        if base is not None:
            wanted += ["--editable", f"{ROOT}[dev]"]
        subprocess.run([base or sys.executable, "-m", "venv", "--clear", place], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        (place / "made").touch()
    if base is None:
        # What PyTorch does not bring along is taken from here.
        share(place)
    return python


@click.command(help=__doc__)
@click.argument("versions", nargs=-1, required=True)
@click.option(
    "--python",
    "base",
    type=click.Path(exists=True, path_type=Path),
    help="Run the checks with another Python, which gets everything from PyPI.",
)
@click.option("--environments", type=click.Path(path_type=Path), default=ROOT)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(versions: tuple[str, ...], base: Path | None, environments: Path, as_json: bool) -> None:
    """Run the checks, and end with status 1 if a test failed."""
    outcomes: dict[tuple[str, str], Outcome] = {}
    for version in versions:
        python = environment(version, environments, base)
        for check, arguments in CHECKS.items():
            outcomes[version, check] = run_tests(python, *arguments)
    table = Table("PyTorch", "check", "passed", "failed", "failures")
    for (version, check), outcome in outcomes.items():
        table.add_row(
            version, check, str(outcome.passed), str(outcome.failed), "\n".join(outcome.failures)
        )
    Console().print(table)
    if as_json:
        rows = [
            {"torch": version, "check": check, **asdict(outcome)}
            for (version, check), outcome in outcomes.items()
        ]
        print(json.dumps({"outcomes": rows}))
    sys.exit(any(outcome.failed for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
