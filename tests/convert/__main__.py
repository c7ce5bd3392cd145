"""Makes the environments, runs the modules, and sums up; see the package."""

from __future__ import annotations

import argparse
import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ops.environments import installed
from tests.convert.checks import NOT_RUN

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_PASSED = re.compile(r"[1-9]\d* passed, 0 failed")


@dataclass(frozen=True, slots=True)
class Module:
    """A module with checks: its name, what it needs, and the environment that has it."""

    name: str
    requirements: tuple[str, ...]
    environment: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a module has ended.

    Attributes:
        result: `passed`, `failed` or `not run`.
        checks: its last line, with the numbers of its checks or why it was not run.
        versions: its libraries.
        elapsed_s: how long it ran.
    """

    result: str
    checks: str
    versions: str = ""
    elapsed_s: float = 0.0


def modules() -> dict[str, Module]:
    """Return the modules with checks, by name; their constants are read without importing them."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        constants = {
            target.id: statement.value
            for statement in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        if "REQUIREMENTS" in constants:
            environment = constants.get("ENVIRONMENT")
            found[path.stem] = Module(
                path.stem,
                tuple(ast.literal_eval(constants["REQUIREMENTS"])),
                path.stem if environment is None else ast.literal_eval(environment),
            )
    return found


def run(module: Module, python: Path, timeout_s: float) -> Outcome:
    """Run a module, and print what it prints."""
    names = [re.split(r"[^\w.-]", requirement)[0] for requirement in module.requirements]
    asked = subprocess.run(
        [
            python,
            "-c",
            "import sys; from importlib.metadata import version\n"
            "print(', '.join(f'{name} {version(name)}' for name in sys.argv[1:]))",
            *names,
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    # The libraries find no network here, and would try it.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    start = time.monotonic()
    # A file, for what the libraries leave running would keep a pipe open.
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            [python, "-m", f"tests.convert.{module.name}"],
            cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status, ending = process.wait(timeout_s), ""
        except subprocess.TimeoutExpired:
            status, ending = 1, f"\nit had not ended after {timeout_s:.0f} s"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        printed.seek(0)
        output = printed.read() + ending
    print(output, flush=True)
    last = (output.strip().splitlines() or ["it printed nothing"])[-1]
    result = {0: "passed", NOT_RUN: "not run"}.get(status, "failed")
    if result == "passed" and not _PASSED.fullmatch(last):
        result, last = "failed", f"it has not counted its checks: {last}"
    return Outcome(result, last, asked.stdout.strip(), time.monotonic() - start)


def main() -> int:
    """Run the modules that the command line names, or all; return 1 if one has failed."""
    known = modules()
    parser = argparse.ArgumentParser(prog="python -m tests.convert", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--environments", type=Path, default=ROOT, help="folder for environments")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for a module")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"there is no module {unknown[0]}; there are {', '.join(known)}")
    outcomes: dict[str, Outcome] = {}
    for module in known.values():
        if options.names and module.name not in options.names:
            continue
        path = options.environments / f".venv-convert-{module.environment}"
        requirements = {
            requirement
            for other in known.values()
            if other.environment == module.environment
            for requirement in other.requirements
        }
        print(f"== {module.name}", flush=True)
        why_not = installed(path.absolute(), requirements)
        outcomes[module.name] = (
            run(module, path.absolute() / "bin" / "python", options.timeout)
            if why_not is None
            else Outcome("not run", why_not)
        )
    table = Table("module", "result", "checks", "libraries", "seconds")
    for name, outcome in outcomes.items():
        table.add_row(
            name, outcome.result, Text(outcome.checks), outcome.versions, f"{outcome.elapsed_s:.0f}"
        )
    Console().print(table)
    return int(any(outcome.result == "failed" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
