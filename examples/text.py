"""Reads a text dataset that every machine has: Python's standard library, as bytes."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch


@cache
def standard_library() -> torch.Tensor:
    """Return the sources, concatenated in the order of their names, as a uint8 tensor."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(
        bytearray(b"\n".join(path.read_bytes() for path in paths)), dtype=torch.uint8
    )


class Windows:
    """Consecutive windows of a text: samples (inputs, targets), each int64 of shape (length,)."""

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self._text = text
        self._length = length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = index * self._length
        window = self._text[begin : begin + self._length + 1].long()
        return window[:-1], window[1:]
