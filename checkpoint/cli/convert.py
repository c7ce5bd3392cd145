"""Implements `keepstep ckpt convert`: writes a checkpoint of one format in another."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from keepstep.checkpoint.cli.output import echo, new_table, print_json, progress, shape_text
from keepstep.checkpoint.convert.read.foreign_source import LeftOut
from keepstep.checkpoint.convert.write.conversion import (
    Target,
    convert,
    documents_of,
    holds_models_only,
    left_out_of,
    target_at,
    work_nbytes,
)
from keepstep.checkpoint.convert.write.opened import Checkpoint, locate
from keepstep.checkpoint.convert.write.request import ConversionRequest, configuration
from keepstep.checkpoint.convert.write.rules_given import report
from keepstep.checkpoint.convert.write.selection import Selection
from keepstep.checkpoint.convert.write.trusted import code_in, run_code
from keepstep.checkpoint.convert.write.zero_layout import ZeroLayout
from keepstep.checkpoint.errors import CheckpointError, FormatUnsupported
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.documents import CONFIG
from keepstep.checkpoint.format.layout.location import Format, Location
from keepstep.checkpoint.format.layout.quantized import FLOATS

_MOST_BY_NAME = 3
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_LEAST_MEMORY_NBYTES = 2**20
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def size(text: str) -> int:
    """Parse a number of bytes with or without a unit.

    Raises:
        click.BadParameter: it is written in another way.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise click.BadParameter(f"{text!r} is no size; write 512MiB or 1GiB")
    return int(float(match[1]) * unit)


def memory_size(text: str) -> int:
    """Parse a size of memory that is enough for conversions.

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
    help="Format of SOURCE. Default: recognized from its files.",
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
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Processes that work at the same time and share --memory; keepstep's format only.",
)
@click.option(
    "--keep-wrapper-names",
    is_flag=True,
    help="Keep the names of modules that only wrap another one, as DistributedDataParallel does.",
)
@click.option(
    "--trust",
    is_flag=True,
    help="Load SOURCE, a file of torch.save, by the code that it names, run in another process.",
)
@click.option("--ranks", type=click.IntRange(1), help="Ranks of data parallelism, for deepspeed.")
@click.option(
    "--zero-stage",
    type=click.IntRange(1, 3),
    help="Stage of ZeRO, for deepspeed, and for deepspeed-universal if it is 3.",
)
@click.option(
    "--buffers",
    type=click.Path(exists=True, dir_okay=False),
    help="File with a name per line: the model's buffers, which deepspeed separates from "
    "parameters that are not trained.",
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
    workers: int,
    keep_wrapper_names: bool,
    trust: bool,
    ranks: int | None,
    zero_stage: int | None,
    buffers: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Convert the checkpoint at SOURCE to another format at TARGET.

    Tensors are streamed, and the result is read again and compared. Nothing at TARGET is replaced.
    Anything that the target's format cannot hold is listed by name. An interrupted conversion to
    keepstep's format, or to any format that is a folder, resumes when the same command is run
    again. Nothing in SOURCE is executed: pickles are read without running the code that they name,
    except with --trust.
    """
    to = target_at(target) if target_format is None else Target(target_format)
    if config is not None and given_rules is None:
        raise click.UsageError("--config is for rules; give --rules as well, or leave it out")
    for option, is_given, targets in (
        ("--ranks", ranks is not None, (Target.DEEPSPEED,)),
        ("--zero-stage", zero_stage is not None, (Target.DEEPSPEED, Target.DEEPSPEED_UNIVERSAL)),
        ("--buffers", buffers is not None, (Target.DEEPSPEED, Target.DEEPSPEED_UNIVERSAL)),
        ("--workers above 1", workers > 1, (Target.UNIVERSAL,)),
    ):
        if is_given and to not in targets:
            raise click.UsageError(
                f"{option} is for --to {' or '.join(targets)}, not for {to}; leave it out"
            )
    names = _names_in(parameter_names)
    request = ConversionRequest(
        location=locate(
            source, None if source_format is None else Format(source_format), step=step
        ),
        parameter_names=names,
        keeps_wrappers=keep_wrapper_names,
        rules=given_rules,
        config=configuration_in(config),
        only_model=only == "model" or holds_models_only(to),
        model_dtype=_SHORT.get(dtype or "", dtype),
    )
    with ExitStack() as trusted_file:
        made: tuple[LeftOut, ...] = ()
        code = code_in(request.location) if trust else ()
        if trust:
            echo(f"running code that {source} names: {', '.join(code) or 'none'}", err=True)
            trusted = trusted_file.enter_context(run_code(request.location))
            request, made = replace(request, location=trusted.location), trusted.left_out
        opened = _opened(request)
        opened = replace(opened, left_out=(*opened.left_out, *made))
        chosen = request.select(opened)
        if opened.without_wrappers and not as_json:
            echo(f"took names of wrappers off {opened.without_wrappers} tensors", err=True)
        if dry_run:
            _print_plan(opened, chosen, to, request, as_json=as_json)
            return
        with progress(f"to {to}", work_nbytes(chosen, to), quiet=as_json) as report_nbytes:
            done = convert(
                opened,
                source,
                target,
                to,
                chosen,
                memory_nbytes=memory,
                report=report_nbytes,
                workers=workers,
                zero=ZeroLayout(zero_stage, ranks, _names_in(buffers)),
                request=request,
            )
    if as_json:
        print_json(
            {
                "from": opened.format_name,
                "to": to,
                "step": done.step,
                "tensors": done.tensors,
                "nbytes": done.nbytes,
                "without_wrappers": opened.without_wrappers,
                "left_out": done.left_out,
                "checked_nbytes": done.checked.checked,
                "unchecked_nbytes": done.checked.read - done.checked.checked,
            }
        )
        return
    if kept := chosen.kept_of_quantized():
        echo(
            f"not rounded: {len(kept)} tensors of quantized weights, such as {kept[0]}; "
            "checkpoint.load(..., convert=True) dequantizes the known schemes",
            err=True,
        )
    for line in by_parts(done.left_out):
        echo(f"left out: {line}", err=True)
    if done.left_out and not trust and (names_of_code := _code_in(request.location)):
        echo(f"--trust would run code that it names: {', '.join(names_of_code)}", err=True)
    echo(
        f"converted {done.tensors} tensors ({decimal(done.nbytes)}) of step {done.step} from "
        f"{opened.format_name} to {to}; compared with what was read"
    )
    if unchecked := done.checked.read - done.checked.checked:
        echo(
            f"{decimal(unchecked)} of the tensors in {source} have no checksums: damage to them "
            "cannot be detected",
            err=True,
        )
    if to == Target.HUGGING_FACE and CONFIG not in chosen.documents:
        echo(
            f"{target} has no config.json, for the source has none: from_pretrained cannot load it "
            "until you copy config.json and the tokenizer's files there, from the model that was "
            "trained",
            err=True,
        )


def by_parts(left_out: Sequence[str]) -> list[str]:
    """Return lines on left-out names, one for all names of a part with one reason if many."""
    parts: dict[tuple[str, str], list[str]] = defaultdict(list)
    for line in left_out:
        name, _, reason = line.partition(": ")
        parts[name.partition("/")[0], reason].append(line)
    return [
        shown
        for (part, reason), lines in parts.items()
        for shown in (
            lines
            if len(lines) <= _MOST_BY_NAME
            else [f"{part}/...: {len(lines)} names, which --json lists: {reason}"]
        )
    ]


def _opened(request: ConversionRequest) -> Checkpoint:
    """Return the checkpoint; the error for one that needs code to be read names the code.

    Raises:
        CheckpointError: it cannot be opened.
    """
    try:
        return request.open()
    except FormatUnsupported as error:
        code = _code_in(request.location)
        if not code:
            raise
        raise FormatUnsupported(
            f"{error}; or give --trust, which runs the code that it names: {', '.join(code)}"
        ) from None


def _code_in(location: Location) -> tuple[str, ...]:
    """Return the result of `code_in`; nothing for a file in which the code is not known."""
    try:
        return code_in(location)
    except CheckpointError:
        return ()


def _names_in(path: str | None) -> tuple[str, ...] | None:
    """Return the names in a file, one a line; None without a file."""
    if path is None:
        return None
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return tuple(line.strip() for line in lines if line.strip())


@click.group()
def rules() -> None:
    """Inspect rules, by which `convert --rules` renames tensors and changes their layout."""


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

    Exit status 1 if a tensor matches no rule, or several.
    """
    request = ConversionRequest(
        location=locate(source, step=step), rules=given, config=configuration_in(config)
    )
    opened = request.open_before_rules()
    outcome = report(given, opened.source, configuration(opened, request.config))
    for line in outcome.lines():
        echo(line)
    if not outcome.is_complete:
        sys.exit(1)


def configuration_in(path: str | None) -> Mapping[str, Json] | None:
    """Return the configuration in a file; None without a file.

    Raises:
        click.BadParameter: the file has no JSON object.
    """
    if path is None:
        return None
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise click.BadParameter(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise click.BadParameter("the configuration is no JSON object")
    return content


def _print_plan(
    opened: Checkpoint, chosen: Selection, to: Target, request: ConversionRequest, *, as_json: bool
) -> None:
    left_out = left_out_of(opened, chosen, to, request)
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
                "without_wrappers": opened.without_wrappers,
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
    for line in by_parts(left_out):
        echo(f"left out: {line}", err=True)
