"""The documents: links lead somewhere, paths exist, lines and the README have their length."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)\s]*)?\)")
PATH = re.compile(r"`((?:elastic|checkpoint|monitor|keepstep|tests|ops|docs|examples)/[\w./-]+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_exist(document: Path) -> None:
    text = document.read_text()
    links = [target for target, _ in LINK.findall(text) if "://" not in target]
    assert [target for target in links if not (document.parent / target).exists()] == []
    if document.name != "CHANGELOG.md":
        assert [path for path in PATH.findall(text) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_lines_wrap_at_100_columns_outside_tables_and_code(document: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    long = [line for line in prose.splitlines() if len(line) > 100 and not line.startswith("|")]
    assert long == []


def test_readme_is_short() -> None:
    prose = re.sub(r"^```.*?^```", "", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    assert len(prose.split()) < 850


def test_loop_in_the_readme_is_the_example_that_runs() -> None:
    (sample,) = re.findall(
        r"^```python\n(import functools\n.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert (ROOT / "examples" / "minimal.py").read_text().endswith(f'"""\n\n{sample}')


def test_every_guide_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [p.name for p in ROOT.glob("docs/*.md") if f"docs/{p.name}" not in readme] == []


def test_range_of_pytorch_is_that_which_the_limits_name_as_tried() -> None:
    limits = (ROOT / "docs" / "limits.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (name for name in project["dependencies"] if name.startswith("torch>"))
    (tried,) = re.findall(r"^\| PyTorch \| ([^|]*)\|", limits, re.MULTILINE)
    minors = [int(minor) for minor in re.findall(r"\b2\.(\d+)", tried)]
    assert torch == f"torch>=2.{min(minors)},<2.{max(minors) + 1}"
