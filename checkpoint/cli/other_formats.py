"""Prints checkpoints of other tools for `ls`, `show` and `verify`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from keepstep.checkpoint.cli.output import echo, new_table, print_json, progress, shape_text
from keepstep.checkpoint.convert.read.files import open_files
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.opening import (
    all_foreign,
    files_of,
    find_foreign,
    locate_foreign,
    open_located,
)
from keepstep.checkpoint.convert.write.conversion import nbytes_of
from keepstep.checkpoint.convert.write.verification import nbytes_of_files, verify_foreign
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointMissing, FormatUnsupported
from keepstep.checkpoint.format.layout.documents import CONFIG
from keepstep.checkpoint.format.layout.location import Format, Location, split_format_prefix
from keepstep.checkpoint.format.stored.steps import newest
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.format.stored.stored_json import to_strict_json

_MOST_LOOKED_AT = 200

FROM = click.option(
    "--from",
    "form",
    type=click.Choice([known.value for known in Format]),
    help="Its format. Default: recognized from its files.",
)


def other_format(url: str, form: str | None) -> Location | None:
    """Return the checkpoint that a user names if it is another tool's; None if it is keepstep's.

    Args:
        url: its URL, maybe preceded by its format.
        form: its format, if it was given.

    Raises:
        FormatUnsupported: two formats are given.
    """
    named = split_format_prefix(url, None if form is None else Format(form))
    if named.format is not None:
        return None if named.format == Format.UNIVERSAL else named
    is_foreign = newest(open_storage(url)) is None and find_foreign(url) is not None
    return named if is_foreign else None


def what_is_at(url: str) -> str:
    """Describe the content of a URL that has no checkpoint of any format."""
    try:
        files = open_files(url)
    except CheckpointMissing:
        return "there is no such file or folder, or it is empty"
    alone = [
        name
        for name in files.names[:_MOST_LOOKED_AT]
        if "/" not in name and find_foreign(f"{url}/{name}") is not None
    ]
    if alone:
        more = f" and {len(alone) - 3} more" if len(alone) > 3 else ""
        return (
            f"give one of the checkpoint files in the folder, {', '.join(alone[:3])}{more}, "
            f"as in {url.rstrip('/')}/{alone[0]}"
        )
    shown = ", ".join(files.names[:3]) + (", ..." if len(files.names) > 3 else "")
    return f"the folder has {len(files.names)} files of no known format: {shown}"


def list_others(named: Location, *, as_json: bool) -> None:
    """Print the checkpoints of other tools at a URL; the one that the URL opens comes first.

    Raises:
        CheckpointMissing: none of them can be read.
    """
    opened: list[tuple[Location, ForeignCheckpoint]] = []
    damaged: dict[str, str] = {}
    unsupported: dict[str, str] = {}
    for found in _all(named):
        try:
            opened.append((found, open_located(found)))
        except (CheckpointDamaged, CheckpointMissing) as error:
            if not _is_removed(found):
                damaged[_name(found)] = str(error)
        except FormatUnsupported as error:
            unsupported[_name(found)] = str(error)
    if as_json:
        listed = [
            {
                "format": found.format,
                "directory": found.directory,
                "file": found.file_name,
                "step": checkpoint.step,
                **_numbers(checkpoint),
            }
            for found, checkpoint in opened
        ]
        print_json({"checkpoints": listed, "damaged": damaged, "unsupported": unsupported})
        if not opened:
            sys.exit(1)
        return
    table = new_table("checkpoint", "format", "step", "size", "tensors", "elements")
    for found, checkpoint in opened:
        numbers = _numbers(checkpoint)
        table.add_row(
            Text(_name(found)),
            found.format,
            str(checkpoint.step),
            decimal(numbers["nbytes"]),
            str(numbers["tensors"]),
            f"{numbers['elements']:,}",
        )
    if opened:
        Console().print(table)
    for message in damaged.values():
        echo(f"damaged: {message}", err=True)
    for message in unsupported.values():
        echo(f"not read: {message}", err=True)
    if not opened:
        raise CheckpointMissing(f"there is no readable checkpoint at {named.url}")


def show_other(named: Location, *, documents: bool, as_json: bool) -> None:
    """Print the tensors of a checkpoint of another tool, and the parts that are not carried."""
    found = locate_foreign(named)
    checkpoint = open_located(found)
    numbers = _numbers(checkpoint)
    left_out = [f"{item.name}: {item.reason}" for item in checkpoint.left_out]
    if as_json:
        extra = {"documents": checkpoint.documents} if documents else {}
        print_json(
            {
                "format": found.format,
                "format_name": checkpoint.format_name,
                "directory": found.directory,
                "step": checkpoint.step,
                **numbers,
                CONFIG: checkpoint.documents.get(CONFIG),
                "tensors": {
                    key: {
                        "dtype": tensor.spec.dtype,
                        "shape": tensor.spec.shape,
                        "pieces": len(tensor.pieces),
                    }
                    for key, tensor in checkpoint.foreign_tensors.items()
                },
                "left_out": left_out,
            }
            | extra
        )
        return
    echo(
        f"{checkpoint.format_name}, step {checkpoint.step}: {numbers['tensors']} tensors, "
        f"{numbers['elements']:,} elements, {decimal(numbers['nbytes'])}, in {checkpoint.url}"
    )
    table = new_table("tensor", "data type", "shape", "pieces")
    for key, tensor in sorted(checkpoint.foreign_tensors.items()):
        # `Text`: a name may look like Rich's markup.
        table.add_row(
            Text(key), tensor.spec.dtype, shape_text(tensor.spec.shape), str(len(tensor.pieces))
        )
    console = Console()
    console.print(table)
    if documents:
        console.print_json(json.dumps(to_strict_json(dict(checkpoint.documents))))
    for line in left_out:
        echo(f"left out: {line}")


def verify_others(named: Location, *, everything: bool, as_json: bool) -> None:
    """Read every byte of checkpoints of other tools; exit status 1 if one is damaged or not read.

    Args:
        named: the checkpoint that the user named.
        everything: verify all checkpoints there, and not only the one that is opened.
        as_json: print JSON.

    Raises:
        CheckpointMissing: there is none.
    """
    results: dict[str, str | None] = {}
    unsupported: dict[str, str] = {}
    checked: dict[str, object] = {}
    wanted = _all(named) if everything else (locate_foreign(named),)
    for found in wanted:
        name = _name(found)
        try:
            nbytes = nbytes_of_files(found)
            with progress(name, nbytes, quiet=as_json) as report:
                verified = verify_foreign(found, report)
            results[name] = None
            checked[name] = {
                "format": found.format,
                "files": verified.files,
                "nbytes": verified.nbytes,
                "checked_nbytes": verified.checked_nbytes,
                "left_out": verified.left_out,
            }
            line = verified.line()
        except (CheckpointDamaged, CheckpointMissing) as error:
            if _is_removed(found):
                continue
            results[name] = line = str(error)
        except FormatUnsupported as error:
            unsupported[name] = str(error)
            line = f"not read: {error}"
        if not as_json:
            echo(f"{name}: {line}")
    if not results and not unsupported:
        raise CheckpointMissing(f"there is no checkpoint at {named.url}")
    if as_json:
        print_json({"checkpoints": results, "checked": checked, "unsupported": unsupported})
    if unsupported or any(results.values()):
        sys.exit(1)


def _all(named: Location) -> Sequence[Location]:
    found = [each for each in all_foreign(named.url) if named.format in (None, each.format)]
    return found or [locate_foreign(named)]


def _is_removed(found: Location) -> bool:
    """Return whether a checkpoint is gone: another process has removed it."""
    try:
        return not files_of(found).names
    except CheckpointMissing:
        return True


def _name(found: Location) -> str:
    return found.file_name or found.directory.rstrip("/") or "."


def _numbers(checkpoint: ForeignCheckpoint) -> dict[str, int]:
    specs = checkpoint.tensors.values()
    return {
        "nbytes": nbytes_of(specs),
        "tensors": len(specs),
        "elements": sum(math.prod(spec.shape) for spec in specs),
    }
