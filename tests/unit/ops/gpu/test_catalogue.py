"""Claims about the list of checks, and about what the modules of checks may need."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.gpu.catalogue import CHECKS
from ops.gpu.check import Check

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "ops" / "gpu"
# Started, or imported, once it is known that keepstep can be used.
NEED_KEEPSTEP = ("keepstep_worker.py", "recorded_process.py")


def test_every_check_is_listed_once() -> None:
    ids = [*(f"G{number}" for number in range(1, 16)), *(f"N{number}" for number in range(1, 8))]
    assert [check.id for check in CHECKS] == ids


def test_checks_of_one_gpu_end_within_a_minute_each() -> None:
    assert [check.id for check in CHECKS if not 0 < check.limit_s < 60] == []
    assert {check.id for check in CHECKS if check.gpus == 1} == {
        check.id for check in CHECKS if check.id.startswith("G")
    }


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_check_says_what_it_shows_and_what_a_pass_is(check: Check) -> None:
    if not check.module:
        assert check.unavailable
        return
    module = importlib.import_module(check.module)
    described = " ".join((module.__doc__ or "").split())
    assert described.startswith(check.id)
    assert "Passes if" in described
    assert callable(getattr(module, check.function))


def imported_at_once(path: Path) -> Iterator[str]:
    """Yield the modules that importing a file imports."""
    for statement in ast.parse(path.read_text()).body:
        match statement:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module)):
                yield module


def test_modules_need_nothing_but_pytorch() -> None:
    of_checks = [path for path in FOLDER.glob("*.py") if path.name not in NEED_KEEPSTEP]
    elastic = ROOT / "elastic"
    # A module's folders are imported before it.
    of_keepstep = [
        ROOT / "keepstep" / "__init__.py",
        ROOT / "keepstep" / "torch_internals.py",
        elastic / "__init__.py",
        elastic / "trainer" / "__init__.py",
        elastic / "trainer" / "back_ends.py",
        elastic / "worker" / "__init__.py",
        elastic / "worker" / "device_environment.py",
    ]
    foreign = {
        (path.name, module)
        for path in [*of_checks, *of_keepstep]
        for module in imported_at_once(path)
        if module.partition(".")[0] not in {*sys.stdlib_module_names, "torch", "ops"}
    }
    assert foreign == {
        # They import nothing else in turn, and are what the checks and keepstep have in common.
        ("environment.py", "keepstep.elastic.worker.device_environment"),
        ("groups.py", "keepstep.elastic.trainer.back_ends"),
        ("back_ends.py", "keepstep.torch_internals"),
    }


def test_variables_are_those_of_keepstep_and_need_no_package_at_all() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import ops.gpu.environment"
    # Without the folder of installed packages.
    assert subprocess.run([sys.executable, "-I", "-S", "-c", code], check=False).returncode == 0


def test_the_command_itself_needs_no_pytorch() -> None:
    code = "import sys, ops.gpu.catalogue, ops.gpu.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
