"""Finds the tables of a TOML text, and the lines of these and of their keys. Pure.

tomllib says no lines of what it parsed; they are found again by scanning the text for headers and
keys.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NoReturn

from keepstep.checkpoint.errors import RulesInvalid
from keepstep.checkpoint.format.layout.boxes import Json

_HEADER = re.compile(r"\s*\[")


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its file, what is in it, its line, and the lines of its keys."""

    file: str
    content: Mapping[str, Json]
    line: int
    lines: Mapping[str, int]

    @property
    def place(self) -> str:
        """File and line, `name:line`."""
        return f"{self.file}:{self.line}"

    def refuse(self, key: str, why: object) -> NoReturn:
        """Refuse the table for what is wrong at a key of it.

        Raises:
            RulesInvalid: always; the message begins with file and line.
        """
        raise RulesInvalid(f"{self.place_of(key)}: {key}: {why}")

    def place_of(self, key: str) -> str:
        """Return file and line of a key, or of the table where it has no line of its own."""
        return f"{self.file}:{self.lines.get(key, self.line)}"


def parse_toml(text: str, file: str) -> dict[str, Json]:
    """Return what a TOML text holds.

    Raises:
        RulesInvalid: it is no TOML; the message has line and column.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RulesInvalid(f"{file}: {error}") from None


def table_of(document: Mapping[str, Json], name: str, text: str, file: str) -> Table:
    """Return a table at the top of a document, empty if it is not there.

    Raises:
        RulesInvalid: there is something else of that name.
    """
    content = document.get(name, {})
    line = line_of(text, name)
    if not isinstance(content, Mapping):
        raise RulesInvalid(f"{file}:{line}: [{name}] is a table, not {content!r}")
    return Table(file, content, line, _lines_of_keys(text, line))


def tables_of(document: Mapping[str, Json], name: str, text: str, file: str) -> list[Table]:
    """Return the tables of an array at the top of a document.

    Raises:
        RulesInvalid: they are not written each with a header of its own.
    """
    tables = document[name]
    header = re.compile(rf"\s*\[\[\s*[\"']?{re.escape(name)}[\"']?\s*\]\]")
    lines = [n for n, line in enumerate(text.splitlines(), 1) if header.match(line)]
    # tomllib says no lines. Where headers and tables do not agree, none would be right.
    if not isinstance(tables, list) or len(lines) != len(tables):
        raise RulesInvalid(
            f"{file}:{line_of(text, name)}: write each rule as a table with the header "
            f"[[{name}]] in a line of its own"
        )
    return [
        Table(file, content, line, _lines_of_keys(text, line))
        for content, line in zip(tables, lines, strict=True)
    ]


def line_of(text: str, name: str) -> int:
    """Return the line of a header or key at the top of a file, or 1."""
    start = re.compile(rf"\s*(\[+\s*[\"']?{re.escape(name)}\b|[\"']?{re.escape(name)}[\"']?\s*=)")
    return next((n for n, line in enumerate(text.splitlines(), 1) if start.match(line)), 1)


def _lines_of_keys(text: str, header: int) -> dict[str, int]:
    """Return the lines of the keys of the table whose header is in a line."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines()[header:], header + 1):
        if _HEADER.match(line):
            break
        key = re.match(r"\s*[\"']?([A-Za-z_]\w*)[\"']?\s*[=.]", line)
        if key is not None:
            found.setdefault(key[1], number)
    return found


def unknown(name: str, known: Collection[str]) -> str:
    """Return a message that a name is unknown, with the known one that it resembles."""
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"{name!r} is unknown; did you mean {near[0]!r}?"
    return f"{name!r} is unknown; known are {', '.join(known)}"
