"""Helps the other modules here: checks that print, and short ways to read and convert."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from click.testing import CliRunner

from keepstep.checkpoint.cli.ckpt import ckpt
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.source import BoxRequest, Source
from tests.opened_checkpoints import open_any

NOT_RUN = 77
"""Exit status of a module that cannot be run here; its last line says why."""


class Checks:
    """Counts checks, and prints a line for each."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0

    @contextmanager
    def __call__(self, claim: str) -> Iterator[None]:
        """Print whether a block has shown a claim: an error in it says that it has not."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (whatever it is, the check has failed)
            self.failed += 1
            at = traceback.extract_tb(error.__traceback__)[-1]
            reason = str(error) or at.line or type(error).__name__
            print(f"FAILED {claim}: {type(error).__name__}: {reason}", flush=True)
            traceback.print_exc(limit=-4)
        else:
            self.passed += 1
            print(f"ok     {claim}", flush=True)

    @contextmanager
    def all_of(self, subject: str) -> Iterator[None]:
        """Count an error between checks as a failed one, and go on behind the block."""
        try:
            yield
        except Exception:  # noqa: BLE001 (other subjects are checked all the same)
            self.failed += 1
            print(f"FAILED {subject}: it ended before all was checked", flush=True)
            traceback.print_exc()

    def finish(self) -> NoReturn:
        """Print the numbers of checks, and exit: with 1 if one has failed, or none was made."""
        print(f"{self.passed} passed, {self.failed} failed", flush=True)
        sys.exit(int(self.failed > 0 or self.passed == 0))


@contextmanager
def refused(error: type[Exception], part: str = "") -> Iterator[None]:
    """Check that a block raises an error whose message has some text.

    Raises:
        AssertionError: it raises none, or one with another message.
    """
    try:
        yield
    except error as raised:
        if part not in str(raised):
            raise AssertionError(f"it was refused for another reason: {raised}") from raised
    else:
        raise AssertionError("it was not refused")


def not_run(reason: str) -> NoReturn:
    """Exit because the module cannot be run here."""
    print(reason, flush=True)
    sys.exit(NOT_RUN)


def assert_equal(actual: object, expected: object, where: str = "") -> None:
    """Compare values, and tensors in them bit for bit.

    Raises:
        AssertionError: they differ; the message says where.
    """
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"{where}: {type(actual).__name__}, not a tensor"
        assert actual.dtype == expected.dtype, f"{where}: {actual.dtype}, not {expected.dtype}"
        assert actual.shape == expected.shape, (
            f"{where}: {tuple(actual.shape)}, not {tuple(expected.shape)}"
        )
        same = torch.equal(_bits(actual), _bits(expected))
        assert same, f"{where}: its elements differ"
    elif isinstance(expected, Mapping):
        assert isinstance(actual, Mapping), f"{where}: {type(actual).__name__}, not a mapping"
        missing, more = set(expected) - set(actual), set(actual) - set(expected)
        assert not missing, f"{where} lacks {sorted(map(str, missing))[:5]}"
        assert not more, f"{where} has {sorted(map(str, more))[:5]} besides what is expected"
        for key, value in expected.items():
            assert_equal(actual[key], value, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert isinstance(actual, list | tuple), f"{where}: {type(actual).__name__}, not a list"
        assert len(actual) == len(expected), f"{where}: {len(actual)} items, not {len(expected)}"
        for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert_equal(ours, theirs, f"{where}/{number}")
    else:
        assert actual == expected, f"{where}: {actual!r:.200}, not {expected!r:.200}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_close(
    actual: torch.Tensor | Mapping[str, torch.Tensor],
    expected: torch.Tensor | Mapping[str, torch.Tensor],
) -> None:
    """Compare what was computed from equal tensors: its last bits depend on where they lie.

    Raises:
        AssertionError: it differs by more than these.
    """
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


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


def adam_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return a copy of an optimizer's tensors under the keys that keepstep has for them."""
    return {
        f"optim/{name}/{slot}": value.detach().clone()
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }
