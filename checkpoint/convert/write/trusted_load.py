"""Loads a trusted file with PyTorch in a process: `trusted_load FILE DIRECTORY`.

This is the one place where keepstep has code run that a checkpoint names, for
`keepstep ckpt convert --trust`. Tensors and plain values are written to DIRECTORY.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from keepstep.checkpoint.convert.write.trusted import LEFT_OUT, TENSORS

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
            return self._items(value, name, depth)
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

    def _items(self, mapping: Mapping[Any, Any], name: str, depth: int) -> dict[Any, Any]:
        items: dict[Any, Any] = {}
        unkept: Counter[str] = Counter()
        for key, item in mapping.items():
            try:
                plain = _plain_key(key)
            except TypeError:
                unkept[_type_name(key)] += 1
                continue
            place = f"{name}/{plain}"
            if plain in items:
                self.left_out.append((place.strip("/"), "another entry has this key"))
            else:
                items[plain] = self.of(item, place, depth + 1)
        self.left_out += [
            (
                f"{name}/{kind}".strip("/"),
                f"{count} of its keys are such, and cannot be carried",
            )
            for kind, count in unkept.items()
        ]
        return items

    def _leave_out(self, value: object, name: str) -> None:
        reason = f"it is a {_type_name(value)}, and neither tensors nor plain values"
        self.left_out.append((name.strip("/") or "it", reason))


def _plain_key(key: Any) -> Any:
    """Return a key as whoever has not the code of its type can read it."""
    if isinstance(key, Enum):
        key = key.value
    if isinstance(key, np.generic):
        key = key.item()
    if type(key) in _PLAIN:
        return key
    if isinstance(key, tuple):
        return tuple(_plain_key(item) for item in key)
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int):
        return int.__int__(key)
    raise TypeError(f"a {_type_name(key)} is a key")


def _type_name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def main(file: str, directory: Path) -> None:
    """Load a file, and write what it has of tensors and plain values."""
    # Its modules are likely next to it or here. Last: they hide no others.
    sys.path += [os.getcwd(), str(Path(file).absolute().parent)]
    loaded = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    values = PlainValues()
    torch.save(values.of(loaded, ""), directory / TENSORS)
    (directory / LEFT_OUT).write_text(json.dumps(values.left_out), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
