"""Counts what a reader of this tree meets: lines, rooms, long functions, loaded modules, words.

    python ops/house.py [--since REVISION] [--json]

With `--since`, the same is counted at that revision of git, and each count is given before and
after. Lines are physical lines of Python files under version control. The modules that a training
worker and a save load are counted in a fresh interpreter that imports `keepstep.join`'s and
`checkpoint.save`'s modules.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
SOURCES = ("keepstep", "elastic", "checkpoint", "monitor")
LONG_FUNCTION = 60
MANY_METHODS = 15
ODD_BEGINNING = re.compile(r"\s*(What|That|Of)\b")
ODD_WORDS = re.compile(r"(?<![a-z])(told|anew|beside|alike)(?![a-z])", re.IGNORECASE)
DOCUMENTS = ("README.md", "CHANGELOG.md", "docs/limits.md")
ENTRIES = {
    "join": "keepstep.elastic.trainer.join",
    "checkpoint.save": "keepstep.checkpoint.api",
}
_COUNT_LOADED = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps(sorted(name for name in sys.modules if name.startswith("keepstep"))))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of one tree. `rooms` maps a folder to its number of files and of lines."""

    lines: int
    test_lines: int
    ops_lines: int
    files: int
    functions: int
    long_functions: int
    classes_of_many_methods: int
    odd_docstrings: int
    odd_words: int
    worker_modules: int
    save_modules: int
    worker_converters: int
    save_converters: int
    words: dict[str, int]
    rooms: dict[str, tuple[int, int]]


@click.command()
@click.option("--since", metavar="REVISION", help="Count a revision of git, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(since: str | None, as_json: bool) -> None:
    """Count the tree, and compare it with a revision."""
    after = asdict(count(ROOT))
    before = None
    if since is not None:
        with tempfile.TemporaryDirectory() as directory:
            extract(since, Path(directory))
            before = asdict(count(Path(directory)))
    result = compared(before, after) if before is not None else after
    if as_json:
        print(json.dumps(result))
        return
    table = Table("count", *(("before", "after") if before is not None else ("now",)))
    for name, value in result.items():
        if name == "rooms":
            continue
        values = value.values() if before is not None else (value,)
        table.add_row(name, *(json.dumps(each) for each in values))
    Console().print(table)


def compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return each count before and after."""
    return {name: {"before": before[name], "after": after[name]} for name in after}


def extract(revision: str, directory: Path) -> None:
    """Write the files of a revision into a directory."""
    archive = subprocess.run(
        ["git", "archive", revision], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(directory, filter="tar")


def count(tree: Path) -> Counts:
    """Count one tree."""
    sources = [path for folder in SOURCES for path in python_files(tree / folder)]
    parsed = {path: ast.parse(path.read_text()) for path in sources}
    functions = [
        node
        for module in parsed.values()
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    rooms: dict[str, tuple[int, int]] = {}
    for path in sources:
        room = str(path.parent.relative_to(tree))
        files, lines = rooms.get(room, (0, 0))
        rooms[room] = files + 1, lines + lines_of(path)
    loaded = {name: loaded_modules(tree, entry) for name, entry in ENTRIES.items()}
    return Counts(
        lines=sum(map(lines_of, sources)),
        test_lines=sum(map(lines_of, python_files(tree / "tests"))),
        ops_lines=sum(map(lines_of, python_files(tree / "ops"))),
        files=len(sources),
        functions=len(functions),
        long_functions=sum(
            (each.end_lineno or each.lineno) - each.lineno + 1 > LONG_FUNCTION for each in functions
        ),
        classes_of_many_methods=sum(
            methods(node) > MANY_METHODS
            for module in parsed.values()
            for node in ast.walk(module)
            if isinstance(node, ast.ClassDef)
        ),
        odd_docstrings=sum(
            bool(ODD_BEGINNING.match(text))
            for module in parsed.values()
            for text in docstrings(module)
        ),
        odd_words=sum(len(ODD_WORDS.findall(path.read_text())) for path in sources),
        worker_modules=len(loaded["join"]),
        save_modules=len(loaded["checkpoint.save"]),
        worker_converters=converters(loaded["join"]),
        save_converters=converters(loaded["checkpoint.save"]),
        words={name: len((tree / name).read_text().split()) for name in DOCUMENTS},
        rooms=dict(sorted(rooms.items())),
    )


def python_files(folder: Path) -> list[Path]:
    """Return the Python files below a folder; links to folders are not followed."""
    return sorted(folder.rglob("*.py"))


def lines_of(path: Path) -> int:
    """Return a file's number of lines."""
    return len(path.read_text().splitlines())


def methods(node: ast.ClassDef) -> int:
    """Return how many functions a class defines."""
    return sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)


def docstrings(module: ast.Module) -> Iterator[str]:
    """Yield all docstrings of a module, and the texts that follow its constants."""
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield text


def loaded_modules(tree: Path, entry: str) -> list[str]:
    """Return the names of keepstep's modules that are loaded by importing one."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT_LOADED, entry],
        capture_output=True,
        text=True,
        cwd=tree,
        check=True,
    )
    names: list[str] = json.loads(done.stdout)
    return names


def converters(names: list[str]) -> int:
    """Return how many of the modules read or write formats of other tools."""
    rooms = re.compile(r"keepstep\.checkpoint\.(convert|foreign|conversion|rules)\b")
    return sum(bool(rooms.match(name)) for name in names)


if __name__ == "__main__":
    main()
