"""The documents: links lead somewhere, paths exist, lines and documents have their length."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops import protocol

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "ops" / "bench" / "RESULTS.md"]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)\s]*)?\)")
PATH = re.compile(r"`((?:elastic|checkpoint|monitor|keepstep|tests|ops|docs|examples)/[\w./-]+)`")
SOURCES = ("checkpoint", "elastic", "monitor", "keepstep/transport")
OTHERS_MESSAGES = ("collective", "--abort-timeout", "terminate called without an active exception")
"""Quoted in headings of docs/troubleshooting.md, and not keepstep's own messages."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_exist(document: Path) -> None:
    text = document.read_text()
    links = [target for target, _ in LINK.findall(text) if "://" not in target]
    assert [target for target in links if not (document.parent / target).exists()] == []
    assert [path for path in PATH.findall(text) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_lines_wrap_at_100_columns_outside_tables_and_code(document: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    long = [line for line in prose.splitlines() if len(line) > 100 and not line.startswith("|")]
    assert long == []


def test_tables_of_the_protocol_are_as_the_types_define_them() -> None:
    text = protocol.DOCUMENT.read_text()
    assert protocol.rewritten(text) == text, "run `python -m ops.protocol`, and read what changed"


def test_readme_is_short() -> None:
    prose = re.sub(r"^```.*?^```", "", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    assert len(prose.split()) < 700


def test_results_are_tables_of_the_last_runs_whose_numbers_are_in_files() -> None:
    bench = ROOT / "ops" / "bench"
    assert len((bench / "RESULTS.md").read_text().split()) < 3450
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 60
    for path in (bench / "results").glob("*.json"):
        run = json.loads(path.read_text())
        assert run["date"], path
        assert run["command"], path
        assert run["result"], path


def test_loop_in_the_readme_is_the_example_that_runs() -> None:
    (sample,) = re.findall(
        r"^```python\n(import functools\n.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert (ROOT / "examples" / "minimal.py").read_text().endswith(f'"""\n\n{sample}')


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    headings = re.findall(r"^### (.*)", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    quoted = [message for heading in headings for message in re.findall(r"`([^`]+)`", heading)]
    own = [message for message in quoted if message not in OTHERS_MESSAGES]
    sources = [path for room in SOURCES for path in (ROOT / room).rglob("*.py")]
    text = "\n".join(constant for path in sources for constant in strings_of(path))
    parts = [part for message in own for part in re.split(r" ?\.\.\. ?", message) if part]
    assert [part for part in parts if part not in text] == []


def strings_of(path: Path) -> Iterator[str]:
    """Return the texts in a module, without what is formatted into them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.replace("`", "").split(" "))


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
