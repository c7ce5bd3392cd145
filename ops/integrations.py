"""Runs the tests of each framework's integration with the framework, in an environment of its own.

    python -m ops.integrations [NAME ...] [--environments DIR] [--json]

A framework has an extra in pyproject.toml, whose versions its environment gets, and its tests in
`tests/integration/frameworks/test_NAME.py`. `attach` and torchrun need no more than PyTorch. Each
loses a worker and a node by SIGKILL, and ends with the losses of an undisturbed run.
"""

from __future__ import annotations

import json
import sys
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ops.environments import ROOT, Outcome, installed, run_tests

TESTS = "tests/integration/frameworks"
DOCUMENTED_LINES = f"{TESTS}/test_documented_lines.py"
OF_PYTORCH = ("attach", "torchrun")


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework: what its environment needs beyond what is here, and the file of its tests."""

    requirements: tuple[str, ...]
    test: str


def frameworks() -> dict[str, Framework]:
    """Return the frameworks by name: PyTorch's own, and each extra that has a file of tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        **{name: Framework((), f"tests/integration/job/test_{name}.py") for name in OF_PYTORCH},
        **{
            name: Framework(tuple(requirements), test)
            for name, requirements in project["optional-dependencies"].items()
            if (ROOT / (test := f"{TESTS}/test_{name}.py")).exists()
        },
    }


def environment(name: str, directory: Path) -> Path:
    """Return the folder of a framework's environment."""
    return (directory / f".venv-integration-{name}").absolute()


def run(name: str, framework: Framework, directory: Path) -> Outcome:
    """Run a framework's tests, and those of the lines that its page shows."""
    python = Path(sys.executable)
    if framework.requirements:
        place = environment(name, directory)
        why_not = installed(place, framework.requirements)
        if why_not is not None:
            return Outcome(passed=0, failed=1, skipped=0, failures=(why_not,))
        python = place / "bin" / "python"
    return run_tests(python, framework.test, DOCUMENTED_LINES, "-k", name)


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(list(frameworks())))
@click.option("--environments", type=click.Path(path_type=Path), default=ROOT)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(names: tuple[str, ...], environments: Path, as_json: bool) -> None:
    """Run the tests, and end with status 1 if one failed, or none ran."""
    outcomes: dict[str, Outcome] = {}
    table = Table("framework", "passed", "failed", "skipped", "seconds", "failures")
    for name, framework in frameworks().items():
        if names and name not in names:
            continue
        begin_s = time.monotonic()
        outcome = outcomes[name] = run(name, framework, environments)
        counts = (outcome.passed, outcome.failed, outcome.skipped, time.monotonic() - begin_s)
        table.add_row(name, *(f"{count:.0f}" for count in counts), "\n".join(outcome.failures))
    Console().print(table)
    if as_json:
        print(json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}))
    sys.exit(any(outcome.failed or not outcome.passed for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
