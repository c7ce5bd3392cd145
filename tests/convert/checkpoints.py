"""Short ways to read checkpoints, and to run `keepstep ckpt` on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from keepstep.checkpoint.cli.ckpt import ckpt
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.source import BoxRequest, Source
from tests.opened_checkpoints import open_any


def tensors_in(source: Source) -> dict[str, torch.Tensor]:
    """Return all tensors of an opened checkpoint, by key."""
    tensors = {}
    for key, spec in source.tensors.items():
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        into = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        source.read([BoxRequest(key, Box.whole(spec.shape), into)])
        tensors[key] = tensor
    return tensors


def read(url: str | Path, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint in any format, by key.

    Args:
        url: where it is.
        names: names of the optimizer's parameters in the order of its groups.
    """
    return tensors_in(open_any(str(url), parameter_names=names).source)


def documents(url: str | Path) -> Mapping[str, Json]:
    """Return the documents of a checkpoint in any format."""
    return open_any(str(url)).source.documents


def left_out(url: str | Path, names: Sequence[str] | None = None) -> dict[str, str]:
    """Return what is not read of a checkpoint: reasons by names."""
    opened = open_any(str(url), parameter_names=names)
    return {item.name: item.reason for item in opened.left_out}


def of_model(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model's tensors of a checkpoint by the names that the module has for them."""
    return {
        key.removeprefix("model/"): tensor
        for key, tensor in tensors.items()
        if key.startswith("model/")
    }


def convert(source: str | Path, target: str | Path, *options: str | Path) -> dict[str, Any]:
    """Run `keepstep ckpt convert`, and return what it prints with `--json`.

    Raises:
        RuntimeError: it has failed; the message is what it printed.
    """
    printed: dict[str, Any] = json.loads(
        _ckpt("convert", str(source), str(target), *map(str, options), "--json")
    )
    return printed


def rules_check(source: str | Path, rules: str, *options: str | Path) -> None:
    """Run `keepstep ckpt rules check`.

    Raises:
        RuntimeError: a tensor is for no rule or for several; the message is what it printed.
    """
    _ckpt("rules", "check", str(source), "--rules", rules, *map(str, options))


def _ckpt(*arguments: str) -> str:
    done = CliRunner().invoke(ckpt, list(arguments))
    if done.exit_code != 0:
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        raise RuntimeError(f"keepstep ckpt {' '.join(arguments)}: {done.output[-1000:]}")
    return done.stdout
