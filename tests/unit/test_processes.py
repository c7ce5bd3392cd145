"""Claims about helper processes: which keepstep and which modules they import."""

import os
import subprocess
from pathlib import Path

import pytest

import keepstep
from keepstep.processes import module_command

TREE = Path(keepstep.__file__).absolute().parent.parent
is_installed = TREE.name in ("site-packages", "dist-packages")


def output_of_helper(directory: Path, code: str) -> list[str]:
    """Run a module with this code as a helper, with a directory on PYTHONPATH; return its lines."""
    (directory / "shown.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    completed = subprocess.run(
        module_command("shown", "argument"),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return completed.stdout.split()


@pytest.mark.skipif(is_installed, reason="keepstep runs from an installation")
def test_helper_imports_the_source_tree_that_starts_it_not_another_installed_keepstep(
    tmp_path: Path,
) -> None:
    (tmp_path / "keepstep").mkdir()
    (tmp_path / "keepstep" / "__init__.py").write_text("")
    code = "import keepstep, sys\nprint(keepstep.__file__, *sys.argv[1:])"
    assert output_of_helper(tmp_path, code) == [str(TREE / "keepstep" / "__init__.py"), "argument"]


def test_folders_of_the_source_tree_hide_no_module_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.py").write_text("")
    code = "import checkpoint\nprint(checkpoint.__file__)"
    assert output_of_helper(tmp_path, code) == [str(tmp_path / "checkpoint.py")]


@pytest.mark.parametrize("title", ["keepstep rank 1 of run7: train.py", "x" * 10_000])
def test_process_is_shown_by_its_title_and_its_module(tmp_path: Path, title: str) -> None:
    code = (
        "from keepstep.processes import set_title\n"
        f"set_title({title!r}, 'keepstep.a.module')\n"
        "shown = open('/proc/self/cmdline', 'rb').read().split(bytes(1))\n"
        "print(shown[0].decode(), shown[1].decode(), open('/proc/self/comm').read(), sep=chr(10))"
    )
    (tmp_path / "shown.py").write_text(code)
    completed = subprocess.run(
        module_command("shown", "argument" * 9),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    shown, module, name, *_ = completed.stdout.splitlines()
    assert title.startswith(shown)
    assert len(shown) > 30
    assert module == "keepstep.a.module"
    assert name == title.removeprefix("keepstep ")[:15]
