"""Prints the commands' output: tables, JSON, and a progress bar on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from keepstep.checkpoint.format.stored.stored_json import to_strict_json


@contextmanager
def progress(description: str, nbytes: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal; yield the function that advances it by bytes."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task(description, total=nbytes)
        yield lambda count: progress.advance(task, count)


def new_table(*names: str) -> Table:
    """Return an empty table; columns of numbers are right-aligned."""
    made = Table(box=box.SIMPLE_HEAD)
    for name in names:
        made.add_column(
            name,
            justify="left" if name in ("tensor", "data type", "stored in") else "right",
            overflow="fold",
        )
    return made


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a tensor's shape as people read it."""
    return " x ".join(map(str, shape)) or "scalar"


def echo(line: str, *, err: bool = False) -> None:
    """Print a line; escapes that a terminal would obey, such as in names, are shown instead."""
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    click.echo("".join(shown), err=err)


def print_json(content: Any) -> None:
    """Print one line of JSON."""
    click.echo(json.dumps(to_strict_json(content), allow_nan=False))
