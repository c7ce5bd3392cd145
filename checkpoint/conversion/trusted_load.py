"""The process that loads a trusted file with PyTorch: `trusted_load FILE DIRECTORY`.

This is the one place where keepstep has code run that a checkpoint names, for
`keepstep ckpt convert --trust`. Tensors and plain values are written to DIRECTORY.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from keepstep.checkpoint.conversion.trusted import LEFT_OUT, TENSORS

_PLAIN = (type(None), bool, int, float, str, bytes)
_MOST_DEPTH = 100


class PlainValues:
    """Takes tensors and plain values out of objects, and lists what it cannot take."""

    def __init__(self) -> None:
        self.left_out: list[tuple[str, str]] = []

    def of(self, value: Any, name: str, depth: int = 0) -> Any:
        """Return a value with mappings in the places of objects; None for what is left out."""
        if depth > _MOST_DEPTH:
            return self._leave_out(value, name)
        if type(value) in (torch.Tensor, nn.Parameter, nn.Buffer):
            return value.detach()
        if isinstance(value, Enum):
            return self.of(value.value, name, depth + 1)
        if type(value) in _PLAIN or isinstance(value, np.ndarray):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Mapping):
            return {
                key: self.of(item, f"{name}/{key}", depth + 1)
                for key, item in value.items()
                if isinstance(key, str | int)
            }
        if isinstance(value, list | tuple):
            return [self.of(item, f"{name}/{place}", depth + 1) for place, item in enumerate(value)]
        # Modules, optimizers and schedulers have it, and some classes of training scripts.
        if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
            return self.of(value.state_dict(), name, depth + 1)
        if isinstance(value, argparse.Namespace) or (
            dataclasses.is_dataclass(value) and not isinstance(value, type)
        ):
            return self.of(vars(value), name, depth + 1)
        return self._leave_out(value, name)

    def _leave_out(self, value: object, name: str) -> None:
        kind = type(value)
        self.left_out.append((name.strip("/") or "it", f"{kind.__module__}.{kind.__qualname__}"))


def main(file: str, directory: Path) -> None:
    """Load a file, and write what it has of tensors and plain values."""
    # Its modules are likely beside it or here. Last: they hide no others.
    sys.path += [os.getcwd(), str(Path(file).absolute().parent)]
    loaded = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    values = PlainValues()
    torch.save(values.of(loaded, ""), directory / TENSORS)
    (directory / LEFT_OUT).write_text(json.dumps(values.left_out), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
