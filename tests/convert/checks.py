"""Checks that print, and comparisons."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch

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
    def all_of(self, subject: str) -> Iterator[Path]:
        """Yield a directory that is removed later; count an error between checks as a failed one.

        The program goes on behind the block.
        """
        try:
            with tempfile.TemporaryDirectory() as directory:
                yield Path(directory)
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


def adam_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return a copy of an optimizer's tensors under the keys that keepstep has for them."""
    return {
        f"optim/{name}/{slot}": value.detach().clone()
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }
