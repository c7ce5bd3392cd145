"""Keeps the tree's English plain: how docstrings begin, and words that are no terms of the field.

A room that is done has none of the words: in names, docstrings, comments, messages and documents.
`REMAINING` lists the other rooms with their present numbers: a number may only fall.
"""

from __future__ import annotations

import ast
from pathlib import Path

from ops.house import ODD_BEGINNING, ODD_WORDS, docstrings, python_files

ROOT = Path(__file__).parents[2]
FOLDERS = ("keepstep", "elastic", "checkpoint", "monitor", "ops", "examples", "tests")
HOUSE = ROOT / "ops" / "house.py"
"""Has the words, to count them."""
REMAINING = {
    "tests/integration/checkpoint": 33,
    "tests/unit/checkpoint": 99,
}


def files() -> list[Path]:
    """Return the tree's Python files and documents, but the one that lists the words."""
    python = [path for folder in FOLDERS for path in python_files(ROOT / folder)]
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "ops").rglob("*.md")]
    return [path for path in [*python, *documents] if path != HOUSE]


def room_of(path: Path) -> str:
    """Return the longest room of `REMAINING` that a file is in; its folder if it is in none."""
    name = path.relative_to(ROOT).as_posix()
    rooms = [room for room in REMAINING if name == room or name.startswith(f"{room}/")]
    return max(rooms, key=len, default=name.rpartition("/")[0])


def findings() -> dict[str, list[str]]:
    """Return the lines with the words, by room, each as often as it has one."""
    found: dict[str, list[str]] = {}
    for path in files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            place = f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
            for _ in ODD_WORDS.finditer(line):
                found.setdefault(room_of(path), []).append(place)
    return found


def test_docstrings_begin_with_what_something_is_or_does() -> None:
    odd = [
        f"{path.relative_to(ROOT)}: {text.strip().splitlines()[0]}"
        for path in files()
        if path.suffix == ".py"
        for text in docstrings(ast.parse(path.read_text()))
        if ODD_BEGINNING.match(text)
    ]
    assert odd == [], "begin with a verb, or with a noun for a value"


def test_words_that_are_no_terms_do_not_come_back() -> None:
    found = findings()
    for room in sorted({*found, *REMAINING}):
        lines, limit = found.get(room, []), REMAINING.get(room, 0)
        places = "\n".join(lines[-20:])
        assert len(lines) <= limit, (
            f"{room}: {len(lines)} of such words, at most {limit}:\n{places}"
        )
        assert len(lines) == limit, f"{room} has {len(lines)} left: lower its number in REMAINING"
