"""Makes environments of other libraries, and runs tests in them.

An environment shares all else with the one that runs this. A library that it needs, and that is
here in a fitting version, is taken from here: nothing replaces PyTorch's build for CPUs.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
_STAMP = ".installed"
_FOLDERS = ("site-packages", "dist-packages")
_COUNT = re.compile(r"(\d+) (passed|failed|error|skipped)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of tests; `failures` are the names of those that failed."""

    passed: int
    failed: int
    skipped: int
    failures: tuple[str, ...]


def share(path: Path) -> None:
    """Let an environment import what this one has, and keepstep from this tree."""
    here = [place for place in sys.path if Path(place).name in _FOLDERS]
    shared = Path(sysconfig.get_path("purelib", vars={"base": str(path)}), "shared.pth")
    shared.write_text("".join(f"{place}\n" for place in (*here, ROOT)))


def installed(path: Path, requirements: Iterable[str]) -> str | None:
    """Make an environment with libraries, unless it is there; return why it cannot be made."""
    libraries = sorted(requirements)
    wanted = "\n".join([*libraries, CONSTRAINTS.read_text(encoding="utf-8"), sys.prefix])
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    stamp = path / _STAMP
    if stamp.exists() and stamp.read_text() == digest:
        share(path)
        return None
    print(f"installing {', '.join(libraries)} in {path}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(path)], check=True)
    share(path)
    done = subprocess.run(
        [path / "bin" / "python", "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS,
         *libraries],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return f"pip: {(errors or done.stderr.splitlines() or ['no output'])[0][:200]}"
    stamp.write_text(digest)
    return None


def run_tests(python: Path, *arguments: str) -> Outcome:
    """Run tests by an environment's Python; `arguments` are pytest's."""
    done = subprocess.run(
        [python, "-m", "pytest", "--numprocesses", "2", "-rfE", "-p", "no:cacheprovider",
         *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    *_, last = done.stdout.strip().splitlines() or [done.stderr[-200:]]
    counts = {kind: int(number) for number, kind in _COUNT.findall(last)}
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    failed = counts.get("failed", 0) + counts.get("error", 0)
    if done.returncode and not failed:
        failures, failed = [last[:200]], 1
    return Outcome(
        passed=counts.get("passed", 0),
        failed=failed,
        skipped=counts.get("skipped", 0),
        failures=tuple(failures),
    )
