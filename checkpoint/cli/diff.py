"""Implements `keepstep ckpt diff`: compares two checkpoints of any formats, tensor by tensor."""

from __future__ import annotations

import sys

import click

from keepstep.checkpoint.cli.convert import configuration_in
from keepstep.checkpoint.cli.output import echo, print_json
from keepstep.checkpoint.convert.write.comparison import compare_any
from keepstep.checkpoint.convert.write.opened import locate
from keepstep.checkpoint.convert.write.request import ConversionRequest
from keepstep.checkpoint.format.layout.location import Format


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--first-step", type=int, help="Step at FIRST. Default: the newest.")
@click.option("--second-step", type=int, help="Step at SECOND. Default: the newest.")
@click.option(
    "--rules",
    metavar="FILE|FAMILY:FROM:TO",
    help="Rename and lay out the tensors of FIRST by rules before: a file, or a preset.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    help="JSON file with the model's configuration, for rules. Default: that of FIRST.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def diff(
    first: str,
    second: str,
    first_step: int | None,
    second_step: int | None,
    rules: str | None,
    config: str | None,
    as_json: bool,
) -> None:
    """Compare two checkpoints of any formats, tensor by tensor. Exit status 1 if they differ.

    A format may precede a URL, as in deepspeed:/path.
    """
    locations = locate(first, step=first_step), locate(second, step=second_step)
    # Names are compared as `convert` gives them; those of two stored checkpoints as they are
    # stored.
    is_stored = all(location.format == Format.UNIVERSAL for location in locations) and rules is None
    before, after = (
        ConversionRequest(
            location=location,
            keeps_wrappers=is_stored,
            rules=rules if location is locations[0] else None,
            config=configuration_in(config),
        ).open()
        for location in locations
    )
    difference = compare_any(before.source, after.source)
    if as_json:
        print_json(
            {
                "only_first": difference.only_first,
                "only_second": difference.only_second,
                "changed": dict(difference.changed),
                "documents": difference.documents,
            }
        )
    else:
        for key in difference.only_first:
            echo(f"- {key}")
        for key in difference.only_second:
            echo(f"+ {key}")
        for key, change in difference.changed.items():
            echo(f"~ {key}: {change}")
        for name in difference.documents:
            echo(f"~ document {name}")
        changes = (
            f"{len(difference.only_first)} tensors only in the first",
            f"{len(difference.only_second)} only in the second",
            f"{len(difference.changed)} changed",
            f"{len(before.source.tensors)} and {len(after.source.tensors)} in all",
        )
        is_equal = not (
            difference.only_first
            or difference.only_second
            or difference.changed
            or difference.documents
        )
        echo(
            f"equal: tensors, {len(before.source.tensors)} in all, and documents"
            if is_equal
            else "; ".join(changes)
        )
    if (
        difference.only_first
        or difference.only_second
        or difference.changed
        or difference.documents
    ):
        sys.exit(1)
