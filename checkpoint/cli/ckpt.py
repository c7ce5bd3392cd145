"""Implements `keepstep ckpt`: lists, shows, verifies, copies and removes checkpoints."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from itertools import chain

import click
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from keepstep.checkpoint.cli.convert import convert_command, rules
from keepstep.checkpoint.cli.diff import diff
from keepstep.checkpoint.cli.other_formats import (
    FROM,
    list_others,
    other_format,
    show_other,
    verify_others,
    what_is_at,
)
from keepstep.checkpoint.cli.output import echo, new_table, print_json, progress, shape_text
from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointMissing,
    CheckpointTooNew,
    FormatUnsupported,
)
from keepstep.checkpoint.format.content_check import check_content
from keepstep.checkpoint.format.layout.documents import CONFIG, PROVENANCE
from keepstep.checkpoint.format.layout.retention import Retention
from keepstep.checkpoint.format.stored.housekeeping import (
    CheckpointSummary,
    collect_garbage,
    copy,
    metrics_of,
    remove,
    summarize,
)
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.pruning import (
    GRACE_S,
    RetentionPolicy,
    checkpoints_to_remove,
)
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import is_committed, list_steps, missing
from keepstep.checkpoint.format.stored.storage import Storage, open_storage
from keepstep.checkpoint.format.stored.stored_json import to_strict_json

_STEP = click.option("--step", type=int, help="The step. Default: the newest.")
_GENERATION = click.option(
    "--generation", type=int, help="The generation of the step. Default: the newest."
)
_JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of text."
)


@click.group()
def ckpt() -> None:
    """List, show, verify, compare, copy, remove and convert stored checkpoints.

    A URL is a path, file://, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, as given to `join` or
    `checkpoint.save`.
    """


ckpt.add_command(convert_command)
ckpt.add_command(diff)
ckpt.add_command(rules)


@ckpt.command()
@click.argument("url")
@FROM
@_JSON
def ls(url: str, form: str | None, as_json: bool) -> None:
    """List the checkpoints at URL, newest first. Exit status 1 if there is none.

    Checkpoints of other tools are listed if there is none of keepstep's, or if a format precedes
    the URL, as in deepspeed:/path.
    """
    if other := other_format(url, form):
        list_others(other, as_json=as_json)
        return
    summaries: list[CheckpointSummary] = []
    damaged: dict[str, str] = {}
    too_new: dict[str, str] = {}
    storage = open_storage(url)
    for stored in list_steps(storage):
        try:
            opened = StoredCheckpoint.open(storage, stored.step, stored.generation)
            summaries.append(summarize(opened))
        except CheckpointMissing:
            # Another process has removed it since it was listed.
            continue
        except CheckpointDamaged as error:
            damaged[stored.directory] = str(error)
        except CheckpointTooNew as error:
            too_new[stored.directory] = str(error)
    if as_json:
        listed = [
            {
                "step": summary.stored.step,
                "generation": summary.stored.generation,
                **_numbers(summary),
                "saved_at": summary.saved_at,
                "loss": summary.loss,
            }
            for summary in summaries
        ]
        print_json({"checkpoints": listed, "damaged": damaged, "too_new": too_new})
        if not summaries:
            sys.exit(1)
        return
    has_loss = any(summary.loss is not None for summary in summaries)
    loss = ("loss",) if has_loss else ()
    table = new_table("step", "generation", "saved at", *loss, "size", "objects", "tensors")
    for summary in summaries:
        table.add_row(
            str(summary.stored.step),
            str(summary.stored.generation),
            # `Text`: text of another program may look like Rich's markup.
            Text("-" if summary.saved_at is None else _shown_time(summary.saved_at)),
            *(["-" if summary.loss is None else f"{summary.loss:.5g}"] if has_loss else []),
            decimal(summary.nbytes),
            str(summary.objects),
            str(summary.tensors),
        )
    if summaries:
        Console().print(table)
    for message in damaged.values():
        echo(f"damaged: {message}", err=True)
    for message in too_new.values():
        echo(f"too new: {message}", err=True)
    if not summaries:
        if damaged or too_new:
            raise CheckpointMissing(f"there is no readable checkpoint at {url}")
        raise CheckpointMissing(f"there is no checkpoint at {url}: {what_is_at(url)}")


@ckpt.command()
@click.argument("url")
@_STEP
@_GENERATION
@FROM
@click.option("--documents", is_flag=True, help="Also show the documents (all but tensors).")
@_JSON
def show(
    url: str,
    step: int | None,
    generation: int | None,
    form: str | None,
    documents: bool,
    as_json: bool,
) -> None:
    """Show a checkpoint: its tensors, where it comes from, and the configuration saved with it.

    URL may be another tool's checkpoint, with its format before it or without.
    """
    if other := other_format(url, form):
        _refuse_step(url, step, generation)
        show_other(other, documents=documents, as_json=as_json)
        return
    source = StoredCheckpoint.open(open_storage(url), step, generation)
    total = summarize(source)
    if as_json:
        tensors = {
            key: {
                "dtype": t.dtype,
                "shape": t.shape,
                "chunk": t.chunk,
                "cell": t.cell,
                "packed": t.is_packed,
                "compression": t.compression,
            }
            for key, t in source.stored_tensors.items()
        }
        extra = {"documents": source.documents} if documents else {}
        print_json(
            {
                "step": source.stored.step,
                "generation": source.stored.generation,
                "directory": source.directory,
                **_numbers(total),
                PROVENANCE: source.documents.get(PROVENANCE),
                CONFIG: source.documents.get(CONFIG),
                "tensors": tensors,
            }
            | extra
        )
        return
    console = Console()
    console.print(
        f"step {total.stored.step}, generation {total.stored.generation}: {total.tensors} tensors, "
        f"{total.elements:,} elements, {decimal(total.nbytes)} in {total.objects} objects, in "
        f"{source.directory}"
    )
    table = new_table("tensor", "data type", "shape", "chunk", "stored in")
    for key, tensor in sorted(source.stored_tensors.items()):
        location = "packs" if tensor.is_packed else "own objects"
        if tensor.compression is not None:
            location += f", {tensor.compression}"
        # `Text`: a name may look like Rich's markup.
        table.add_row(
            Text(key), tensor.dtype, shape_text(tensor.shape), shape_text(tensor.chunk), location
        )
    console.print(table)
    if documents:
        console.print_json(json.dumps(to_strict_json(source.documents)))
    for name in (PROVENANCE, CONFIG):
        if name in source.documents:
            echo(f"{name}: {json.dumps(to_strict_json(source.documents[name]))}")


@ckpt.command()
@click.argument("url")
@_STEP
@_GENERATION
@click.option("--all", "everything", is_flag=True, help="Verify every checkpoint at URL.")
@click.option(
    "--content",
    is_flag=True,
    help="Read the tensors once more and compare them with the digest taken from memory, which "
    "checkpoints saved by save(..., block=False) have.",
)
@FROM
@_JSON
def verify(
    url: str,
    step: int | None,
    generation: int | None,
    everything: bool,
    content: bool,
    form: str | None,
    as_json: bool,
) -> None:
    """Read every byte of a checkpoint and check it. Exit status 1 if one is damaged or too new.

    Checkpoints that are removed meanwhile are left out of --all.

    In another tool's checkpoint, data with checksums are compared; the output says how much. Its
    files are also checked against each other and against its tensors' shapes.
    """
    if other := other_format(url, form):
        _refuse_step(url, step, generation)
        if content:
            raise FormatUnsupported(
                f"{url}: no other tool's checkpoint has a digest of its content"
            )
        verify_others(other, everything=everything, as_json=as_json)
        return
    results: dict[str, str | None] = {}
    storage = open_storage(url)
    listed: Sequence[StoredStep | None] = list_steps(storage) if everything else (None,)
    for stored in listed:
        if stored is None:
            chosen_step, name = (step, generation), "the newest" if step is None else f"step {step}"
        else:
            chosen_step, name = (stored.step, stored.generation), stored.directory
        try:
            source = StoredCheckpoint.open(storage, *chosen_step)
            name = source.stored.directory
            with progress(
                name, sum(item.nbytes for item in source.cell_index.objects), quiet=as_json
            ) as report:
                source.verify(report)
            if content and not check_content(source):
                Console(stderr=True).print(f"{name}: it has no digest of its content")
            results[name] = None
        except (CheckpointMissing, CheckpointDamaged, CheckpointTooNew) as error:
            if stored is not None and not is_committed(storage, stored):
                # Another process has removed it since it was listed.
                continue
            if isinstance(error, CheckpointMissing):
                raise
            results[name] = str(error)
        if not as_json:
            echo(f"{name}: {results[name] or 'intact'}")
    if not results:
        raise missing(storage, None)
    if as_json:
        print_json({"checkpoints": results})
    if any(results.values()):
        sys.exit(1)


@ckpt.command()
@click.argument("url")
@click.option(
    "--step", "steps", type=int, multiple=True, help="Remove this step; may be given several times."
)
@click.option(
    "--keep-last", type=click.IntRange(min=1), help="Remove all but this many of the newest."
)
@click.option(
    "--keep-every",
    type=click.IntRange(min=1),
    help="... but keep the steps that are multiples of this.",
)
@click.option(
    "--keep-best",
    nargs=3,
    metavar="N NAME min|max",
    help="... but keep the N best by a value saved as NAME.",
)
@click.option(
    "--pin", type=int, multiple=True, help="... but keep this step; may be given several times."
)
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@_JSON
def rm(
    url: str,
    steps: tuple[int, ...],
    keep_last: int | None,
    keep_every: int | None,
    keep_best: tuple[str, str, str] | None,
    pin: tuple[int, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove checkpoints by step, or all except those to keep.

    A later `gc` deletes their bytes, so that readers can finish.
    """
    storage = open_storage(url)
    present = list_steps(storage)
    if bool(steps) == (keep_last is not None):
        raise click.UsageError("give either --step or --keep-last")
    if not present:
        raise CheckpointMissing(f"there is no checkpoint at {url}: {what_is_at(url)}")
    if steps:
        absent = set(steps) - {stored.step for stored in present}
        if absent:
            raise click.UsageError(
                f"{url} has no checkpoint of step {min(absent)}; see `keepstep ckpt ls {url}`"
            )
        to_remove = tuple(
            stored for stored in present if stored.step in steps and stored.step not in pin
        )
    else:
        best, metric = None, {}
        if keep_best is not None:
            count, name, direction = keep_best
            if not count.isdigit() or direction not in ("min", "max"):
                raise click.UsageError(
                    "--keep-best takes a number, the name of a saved value, and min or max"
                )
            best = (int(count), direction)
            metric = _values_of(name, storage, present, at_least=int(count))
        assert keep_last is not None
        retention = Retention(last=keep_last, every=keep_every)
        policy = RetentionPolicy(retention, best=best, pinned=frozenset(pin))
        to_remove = checkpoints_to_remove(present, policy, metric)
    for stored in to_remove:
        if not dry_run:
            remove(storage, stored, now=time.time())
        if not as_json:
            click.echo(f"{'would remove' if dry_run else 'removed'} {stored.directory}")
    if as_json:
        print_json({"removed": [stored.directory for stored in to_remove], "dry_run": dry_run})


def _values_of(
    name: str, storage: Storage, present: Sequence[StoredStep], at_least: int
) -> dict[StoredStep, float]:
    """Return the value of this name in each checkpoint that has one.

    Raises:
        click.UsageError: too few have one, so that the best would be removed with those without.
    """
    metrics = {
        stored: metrics_of(StoredCheckpoint.open(storage, stored.step, stored.generation))
        for stored in present
    }
    values = {stored: numbers[name] for stored, numbers in metrics.items() if name in numbers}
    if len(values) < min(at_least, len(present)):
        known = ", ".join(sorted(set(chain(*metrics.values())))) or "none"
        raise click.UsageError(
            f"{len(values)} of {len(present)} checkpoints have a number called {name!r}, and "
            f"--keep-best {at_least} was asked for; nothing was removed; numbers there: {known}"
        )
    return values


@ckpt.command()
@click.argument("url")
@click.option(
    "--grace",
    default=GRACE_S,
    show_default=True,
    help="Seconds that readers and writers may take to finish.",
)
@_JSON
def gc(url: str, grace: float, as_json: bool) -> None:
    """Delete the data of removed checkpoints and of writers that died, after a grace time.

    `gc` records files that no manifest names when it first finds them, because a writer may be at
    work on them. A later `gc` marks them as abandoned if nothing was added since, and another one
    deletes them.
    """
    storage = open_storage(url)
    if not storage.names():
        raise CheckpointMissing(f"there is no checkpoint at {url}: {what_is_at(url)}")
    deleted = collect_garbage(storage, now=time.time(), grace_s=grace)
    if as_json:
        print_json({"deleted": deleted})
    else:
        for directory in deleted:
            click.echo(f"deleted {directory}")
        click.echo(
            f"deleted {len(deleted)}; {len(list_steps(storage))} checkpoints stay; what was "
            f"removed or left unfinished less than {grace:.0f} s ago waits for a later gc"
        )


@ckpt.command()
@click.argument("source")
@click.argument("target")
@_STEP
@_GENERATION
@_JSON
def cp(source: str, target: str, step: int | None, generation: int | None, as_json: bool) -> None:
    """Copy a checkpoint from one URL to another, and verify every byte."""
    opened = StoredCheckpoint.open(open_storage(source), step, generation)
    nbytes = sum(item.nbytes for item in opened.cell_index.objects)
    with progress(opened.stored.directory, nbytes, quiet=as_json) as report:
        copy(opened, open_storage(target), report)
    if as_json:
        print_json({"copied": opened.stored.directory, "nbytes": nbytes})
    else:
        click.echo(f"copied {opened.stored.directory} ({decimal(nbytes)}) to {target}")


def _shown_time(text: str) -> str:
    """Return a time of ISO 8601 in this machine's zone; any other text as it is."""
    try:
        return datetime.fromisoformat(text).astimezone().isoformat(" ", "seconds")
    except ValueError:
        return text


def _refuse_step(url: str, step: int | None, generation: int | None) -> None:
    if step is not None or generation is not None:
        raise FormatUnsupported(
            f"{url} is another tool's checkpoint: give the URL of the step itself instead of "
            "--step or --generation"
        )


def _numbers(summary: CheckpointSummary) -> dict[str, int]:
    return {
        "nbytes": summary.nbytes,
        "objects": summary.objects,
        "tensors": summary.tensors,
        "elements": summary.elements,
    }
