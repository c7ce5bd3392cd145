"""The wheel works by itself: outside the tree, isolated, and without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.adaptive_timeouts import patient

ROOT = Path(__file__).parents[3]

EVERY_MODULE = """
import importlib, pkgutil, sys
import keepstep
found = ["keepstep", *(m.name for m in pkgutil.walk_packages(keepstep.__path__, "keepstep."))]
# Each of these needs the framework that it attaches.
names = [name for name in found if not name.startswith("keepstep.integrations.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
files = [getattr(module, "__file__", None) or "" for module in sys.modules.values()]
own = [file for file in files if file.startswith(sys.argv[1])]
print(len(names), len(own))
"""

TRAINS = r"""
import sys, torch, torch.distributed as dist, keepstep
def build(world):
    return keepstep.State(torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.1))
with keepstep.join(build) as job:
    for batch in job.batches(torch.ones(16, 4), 4, steps=2):
        with job.step():
            job.model(batch).sum().backward()
            for parameter in job.model.parameters():
                dist.all_reduce(parameter.grad)
            job.optimizer.step()
    sys.stdout.write(f"rank {job.world.rank} ends after step {job.steps}\n")
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the tree: setuptools builds inside it, where another process may be building as well."""
    tree = tmp_path_factory.mktemp("source") / "keepstep"
    made = shutil.ignore_patterns(".*", "build", "dist", "demo-output", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=made)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel as `pip wheel` does."""
    place = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place, tree],
        check=True,
    )
    (built,) = place.glob("keepstep-*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, and the dependencies of this one."""
    place = tmp_path_factory.mktemp("environment")
    python = new_environment(place)
    # Of the same version: pip would be content with the one in editable mode.
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", wheel],
        check=True, cwd=place,
    )  # fmt: skip
    return python


def new_environment(place: Path) -> Path:
    """Make an environment that finds this one's dependencies; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    python = place / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    # Found after the environment's own; what is installed in editable mode there is not followed.
    dependencies = "".join(f"{path}\n" for path in sys.path if path.endswith("site-packages"))
    (Path(found.stdout.strip()) / "dependencies.pth").write_text(dependencies)
    return python


def outside(python: Path, *arguments: str, cwd: Path, **more: str) -> str:
    """Run the environment's Python outside the tree; return what it prints."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, *arguments],
        capture_output=True, text=True, cwd=cwd, timeout=patient(240),
        env={**inherited, "XDG_RUNTIME_DIR": str(cwd), **more}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_one_package_and_all_its_files(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"keepstep"}
    tracked = subprocess.run(
        ["git", "ls-files", "checkpoint", "elastic", "monitor"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert {f"keepstep/{name}" for name in tracked} - set(names) == set()


def test_every_module_is_imported_under_one_name(python: Path, tmp_path: Path) -> None:
    packages = str(python.parent.parent)
    # Isolated: neither the current folder nor the user's own site-packages are searched.
    names, loaded = outside(
        python, "-I", "-c", EVERY_MODULE, packages + os.sep + "lib", cwd=tmp_path
    ).split()
    assert int(names) > 150
    assert int(loaded) >= int(names) - 1
    for name in ("checkpoint", "elastic", "monitor"):
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({name!r}) is not None)"
        outside(python, "-c", code, cwd=tmp_path)


def test_job_runs_from_the_wheel_without_a_compiler(python: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    printed = outside(
        python, "-I", "-m", "keepstep", "run", "--nproc-per-node", "2", "--monitor", "train.py",
        cwd=tmp_path, PATH=str(python.parent), OMP_NUM_THREADS="1",
        KEEPSTEP_MONITOR_DIR=str(tmp_path / "rings"), XDG_CACHE_HOME=str(tmp_path / "cache"),
    )  # fmt: skip
    assert {f"rank {rank} ends after step 2" for rank in (0, 1)} <= set(printed.splitlines())


def test_packages_of_the_same_bare_names_live_next_to_it(python: Path, tmp_path: Path) -> None:
    for name in ("checkpoint", "elastic", "monitor"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'other'\n")
    code = (
        "import checkpoint, elastic, monitor, keepstep.checkpoint, keepstep.elastic\n"
        "print(checkpoint.OWNER, elastic.OWNER, monitor.OWNER, keepstep.checkpoint.__name__)"
    )
    assert outside(python, "-c", code, cwd=tmp_path) == "other other other keepstep.checkpoint\n"


def test_lines_of_the_readme_install_it(tree: Path, tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Install\n")[2]
    lines = section.split("```")[1].strip().splitlines()
    from_checkout, *by_wheel = [line.partition("#")[0].strip() for line in lines]
    for number, commands in enumerate(([from_checkout], by_wheel)):
        python = new_environment(tmp_path / f"environment{number}")
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        for command in commands:
            subprocess.run(
                ["sh", "-ec", command], check=True, cwd=tree, env={**os.environ, "PATH": path}
            )
        place = outside(python, "-c", "import keepstep; print(keepstep.__file__)", cwd=tmp_path)
        assert place.startswith(f"{tmp_path}{os.sep}environment{number}")
        version = outside(python, "-m", "keepstep", "--version", cwd=tmp_path)
        assert metadata.version("keepstep") in version
