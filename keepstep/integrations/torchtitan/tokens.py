"""Reads datasets that are tokenized already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchtitan.components.tokenizer import BaseTokenizer

from keepstep.elastic.errors import UsageError


class TokenFile:
    """Divides a file of NumPy's into rows, each of which begins with the last token before it.

    Args:
        path: of token ids in one dimension. Only what is read comes to memory.
        length: tokens per row.

    Raises:
        UsageError: the file has something else.
    """

    def __init__(self, path: str, length: int) -> None:
        tokens = np.load(path, mmap_mode="r")
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise UsageError(
                f"{path} has {tokens.dtype} in {tokens.ndim} dimensions: give token ids, which are "
                "integers, in one dimension"
            )
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        """Return the number of whole rows."""
        return (len(self._tokens) - 1) // (self._length - 1)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a row."""
        begin = index * (self._length - 1)
        return torch.from_numpy(self._tokens[begin : begin + self._length].astype(np.int64))


class TokenIds(BaseTokenizer):  # type: ignore[misc]
    """Takes the place of a tokenizer, which torchtitan always makes; its text is token ids."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """Has no options."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the numbers in a text."""
        return [int(word) for word in text.split()]

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        """Return numbers as text."""
        return " ".join(map(str, tokens))

    def get_vocab_size(self) -> int:
        """Refuse: the dataset determines it."""
        raise UsageError("token ids have no vocabulary: give config.tokenizer the dataset's own")
