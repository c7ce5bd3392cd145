"""The code in the guides: keepstep has the names that it uses, and they take its arguments."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import keepstep
from keepstep.checkpoint import SaveHandle

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
NAMED: dict[str, Any] = {
    "keepstep": keepstep,
    "checkpoint": keepstep.checkpoint,
    "job": keepstep.Job,
    "step": keepstep.Step,
    "guard": keepstep.Guard,
    "world": keepstep.World,
    "handle": SaveHandle,
    **{name: getattr(keepstep, name) for name in keepstep.__all__},
}
"""The objects that names in the documents stand for; for a variable, its class."""
VALUE = object()
"""Objects of keepstep that the documents neither call nor give names of their own."""


def code_of(document: Path) -> Iterator[ast.AST]:
    text = document.read_text()
    for source in [*BLOCK.findall(text), *INLINE.findall(re.sub(BLOCK, "", text))]:
        if source.endswith(".py"):
            continue
        try:
            yield ast.parse(source)
        except SyntaxError:
            continue  # Commands and files are marked as code, too.


def resolve(node: ast.expr) -> Any:
    """Return what an expression means, perhaps VALUE; None if it is not keepstep's.

    Raises:
        AttributeError: keepstep has no such name.
    """
    if isinstance(node, ast.Name):
        return NAMED.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = resolve(node.value)
    if owner is None or owner is VALUE:
        return None
    is_package = inspect.ismodule(owner) and hasattr(owner, "__path__")
    if is_package and importlib.util.find_spec(f"{owner.__name__}.{node.attr}"):
        return importlib.import_module(f"{owner.__name__}.{node.attr}")
    if inspect.isclass(owner) and f"self.{node.attr}" in inspect.getsource(owner):
        return VALUE
    found = getattr(owner, node.attr)
    return found if callable(found) or inspect.ismodule(found) else VALUE


def faults_of(document: Path) -> tuple[set[str], list[str]]:
    """Return what keepstep's names were read in a document's code, and what is wrong with it."""
    read, faults = set[str](), list[str]()
    for node in (node for tree in code_of(document) for node in ast.walk(tree)):
        if not isinstance(node, (ast.Attribute, ast.Call)):
            continue
        named = node.func if isinstance(node, ast.Call) else node
        try:
            meant = resolve(named)
        except AttributeError as error:
            faults.append(f"{ast.unparse(node)}: {error}")
            continue
        if meant is None:
            continue
        read.add(ast.unparse(named))
        if isinstance(node, ast.Call) and callable(meant):
            parameters = inspect.signature(meant).parameters
            takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            faults += [
                f"{ast.unparse(node)}: takes no {keyword.arg}"
                for keyword in node.keywords
                if keyword.arg not in parameters and not takes_any
            ]
    return read, faults


@pytest.mark.parametrize("document", GUIDES, ids=lambda path: path.name)
def test_names_and_arguments_in_code_are_keepsteps(document: Path) -> None:
    assert faults_of(document)[1] == []


def test_guide_to_porting_a_loop_says_how_what_a_loop_has_is_written() -> None:
    """Trials had to guess these (T11)."""
    read, _ = faults_of(ROOT / "docs" / "run-a-job.md")
    assert read >= {
        "job.batches", "job.guard", "job.model", "job.optimizer", "job.optimizers", "job.scheduler",
        "job.step", "job.stop", "keepstep.State", "keepstep.join", "step.completed",
        "step.loss_scale", "step.mean_over", "step.report",
    }  # fmt: skip
    keywords = {
        keyword.arg
        for tree in code_of(ROOT / "docs" / "run-a-job.md")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    }
    assert keywords >= {
        "collate", "extra", "initialize", "mesh", "micro_batch", "scheduler", "steps", "workers"
    }  # fmt: skip
