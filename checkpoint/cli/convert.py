"""`keepstep ckpt convert`: writes a checkpoint of one format in another."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import click
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from keepstep.checkpoint.cli.output import echo, new_table, print_json, progress, shape_text
from keepstep.checkpoint.conversion.conversion import (
    Target,
    convert,
    documents_of,
    left_out_of,
    nbytes_of,
    selection,
    target_at,
)
from keepstep.checkpoint.conversion.opened import Opened, open_any
from keepstep.checkpoint.conversion.rules_given import report, respell
from keepstep.checkpoint.conversion.selection import FLOATS, Selection
from keepstep.checkpoint.conversion.zero_layout import ZeroLayout
from keepstep.checkpoint.foreign.megatron_settings import MEGATRON
from keepstep.checkpoint.foreign.recognition import Format
from keepstep.checkpoint.layout.boxes import Json
from keepstep.checkpoint.layout.documents import CONFIG

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_LEAST_MEMORY_NBYTES = 2**20
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def size(text: str) -> int:
    """Return a number of bytes that is written with a unit or without.

    Raises:
        click.BadParameter: it is written in another way.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise click.BadParameter(f"{text!r} is no size; write 512MiB or 1GiB")
    return int(float(match[1]) * unit)


def memory_size(text: str) -> int:
    """Return the bytes of a memory that conversions can work in.

    Raises:
        click.BadParameter: it is too little, or no size.
    """
    nbytes = size(text)
    if nbytes < _LEAST_MEMORY_NBYTES:
        raise click.BadParameter(f"{text} is too little; give 1MiB or more")
    return nbytes


@click.command("convert")
@click.argument("source")
@click.argument("target")
@click.option(
    "--from",
    "source_format",
    type=click.Choice([known.value for known in Format]),
    help="Format of SOURCE. Default: told from its files.",
)
@click.option(
    "--to",
    "target_format",
    type=click.Choice([known.value for known in Target]),
    help="Format of TARGET. Default: by its ending (.pt, .pth, .bin, .safetensors), else keepstep.",
)
@click.option("--step", type=int, help="The step of SOURCE, if it is keepstep's. Default: newest.")
@click.option("--only", type=click.Choice(["model"]), help="Leave out all but this.")
@click.option(
    "--dtype",
    type=click.Choice([*_SHORT, *FLOATS]),
    help="Round the model's floating-point tensors to this type. Optimizer state is never rounded.",
)
@click.option(
    "--rules",
    "given_rules",
    metavar="FILE|FAMILY:FROM:TO",
    help="Rename and lay out the tensors by rules: a file, or a preset, as llama:hf:megatron.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    help="JSON file with the model's configuration, for rules. Default: that of the checkpoint.",
)
@click.option(
    "--parameter-names",
    type=click.Path(exists=True, dir_okay=False),
    help="File with a name per line: the optimizer's parameters in the order of its groups, for "
    "formats that number them.",
)
@click.option(
    "--memory",
    type=memory_size,
    default="1GiB",
    show_default=True,
    help="How much memory tensors may take.",
)
@click.option("--ranks", type=click.IntRange(1), help="Ranks of data parallelism, for deepspeed.")
@click.option(
    "--zero-stage",
    type=click.IntRange(1, 3),
    help="Stage of ZeRO, for deepspeed, and for deepspeed-universal if it is 3.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be written.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def convert_command(
    source: str,
    target: str,
    source_format: str | None,
    target_format: str | None,
    step: int | None,
    only: str | None,
    dtype: str | None,
    given_rules: str | None,
    config: str | None,
    parameter_names: str | None,
    memory: int,
    ranks: int | None,
    zero_stage: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Convert the checkpoint at SOURCE to another format at TARGET.

    Tensors are streamed, and what was written is read again and compared. Nothing at TARGET is
    replaced. What the target's format cannot hold is listed by name. An interrupted conversion to
    keepstep's format or to a Hugging Face folder goes on where it ended when it is given again.
    Nothing in SOURCE is executed: pickles are read without running what they ask for.
    """
    names = None
    if parameter_names is not None:
        with open(parameter_names, encoding="utf-8") as file:
            names = [line.strip() for line in file.read().splitlines() if line.strip()]
    form = None if source_format is None else Format(source_format)
    opened = open_any(source, form, step=step, parameter_names=names)
    if given_rules is not None:
        opened = respell(opened, given_rules, _config(config, opened))
    to = target_at(target) if target_format is None else Target(target_format)
    chosen = selection(
        opened, to, only_model=only == "model", model_dtype=_SHORT.get(dtype or "", dtype)
    )
    if dry_run:
        _print_plan(opened, chosen, to, as_json=as_json)
        return
    with progress(f"to {to}", nbytes_of(chosen.tensors.values()), quiet=as_json) as report:
        done = convert(
            opened,
            source,
            target,
            to,
            chosen,
            memory_nbytes=memory,
            zero=ZeroLayout(zero_stage, ranks),
            report=report,
        )
    if as_json:
        print_json(
            {
                "from": opened.format_name,
                "to": to,
                "step": done.step,
                "tensors": done.tensors,
                "nbytes": done.nbytes,
                "left_out": done.left_out,
            }
        )
        return
    for line in done.left_out:
        echo(f"left out: {line}", err=True)
    echo(
        f"converted {done.tensors} tensors ({decimal(done.nbytes)}) of step {done.step} from "
        f"{opened.format_name} to {to}; compared with what was read"
    )


@click.group()
def rules() -> None:
    """Look at rules, by which `convert --rules` renames tensors and lays them out."""


@rules.command()
@click.argument("source")
@click.option(
    "--rules",
    "given",
    metavar="FILE|FAMILY:FROM:TO",
    required=True,
    help="The rules: a file, or a preset, as llama:hf:megatron.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    help="JSON file with the model's configuration. Default: that of the checkpoint.",
)
@click.option("--step", type=int, help="The step of SOURCE, if it is keepstep's. Default: newest.")
def check(source: str, given: str, config: str | None, step: int | None) -> None:
    """Show which rule takes which tensor of SOURCE.

    Exit status 1 if a tensor is for no rule, or for several.
    """
    opened = open_any(source, step=step)
    found = report(given, opened.source, _config(config, opened))
    for line in found.lines():
        echo(line)
    if not found.is_complete:
        sys.exit(1)


def _config(path: str | None, opened: Opened) -> Mapping[str, Json]:
    """Return the configuration in a file, or that of the checkpoint; empty if it has none.

    What only Megatron's checkpoints say, such as to how much the vocabulary is padded, is added.
    """
    if path is None:
        content = opened.source.documents.get(CONFIG, {})
    else:
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise click.BadParameter(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise click.BadParameter("the configuration is no JSON object")
    megatron = opened.source.documents.get(MEGATRON) or {}
    return {**megatron.get("model", {}), **content}


def _print_plan(opened: Opened, chosen: Selection, to: Target, *, as_json: bool) -> None:
    left_out = left_out_of(opened, chosen, to)
    documents = documents_of(chosen, to)
    if as_json:
        print_json(
            {
                "from": opened.format_name,
                "to": to,
                "step": chosen.step,
                "tensors": {
                    key: {"dtype": spec.dtype, "shape": spec.shape}
                    for key, spec in chosen.tensors.items()
                },
                "documents": documents,
                "left_out": left_out,
            }
        )
        return
    table = new_table("tensor", "data type", "shape")
    for key, spec in chosen.tensors.items():
        was = opened.source.tensors[key].dtype
        dtype = spec.dtype if was == spec.dtype else f"{was} -> {spec.dtype}"
        table.add_row(Text(key), dtype, shape_text(spec.shape))
    Console().print(table)
    echo(f"from {opened.format_name} to {to}, step {chosen.step}")
    echo(f"documents: {', '.join(documents) or 'none'}")
    for line in left_out:
        echo(f"left out: {line}", err=True)
