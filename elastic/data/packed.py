"""Packs documents of any length into rows of one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.elastic.data.datasets import PartitionReader
from keepstep.elastic.data.partitions import Partition
from keepstep.elastic.data.sources import AnySource, as_source
from keepstep.elastic.errors import UsageError

Document = Sequence[int] | torch.Tensor
"""The tokens of a document; also an array of NumPy's."""


_MOST_EMPTY = 10_000


class PackedRow(NamedTuple):
    """One sample of `Packed`.

    Attributes:
        tokens: int64, of the row's length.
        documents: int64, of the same length: the number, from 0, of each token's document in the
            row; for an attention mask and for positions.
    """

    tokens: torch.Tensor
    documents: torch.Tensor


class Packed:
    """A stream of rows of `length` tokens, filled with a source's documents one after another.

    A document that does not fit is continued in the next row; no token is left out, and none added.
    Put separators into the documents.

    Args:
        source: gives documents, each a sequence of tokens: a dataset with an index, an iterable, or
            another source, such as a `Mixture`.
        length: tokens per row.
    """

    def __init__(self, source: AnySource[Document], length: int) -> None:
        if length < 1:
            raise UsageError(f"Packed(length={length}): give at least 1")
        self._source = as_source(source)
        self._length = length

    def most_partitions(self) -> int | None:
        """Return the source's number."""
        return self._source.most_partitions()

    def open_partition(self, partition: Partition, state: Json) -> _PackedReader:
        """See `Source`."""
        before = None if state is None else state["before"]
        reader = self._source.open_partition(partition, before)
        return _PackedReader(reader, self._length, before, 0 if state is None else state["used"])


class _PackedReader:
    """Keeps the current document, and the source's position before it."""

    def __init__(
        self, documents: PartitionReader[Document], length: int, before: Json, used: int
    ) -> None:
        self._documents = documents
        self._length = length
        self._document: torch.Tensor | None = None
        self._before = before
        self._used = used

    def read(self) -> PackedRow:
        pieces: list[torch.Tensor] = []
        missing, empty = self._length, 0
        while missing:
            document = self._current_document()
            empty = 0 if len(document) else empty + 1
            if empty == _MOST_EMPTY:
                raise UsageError(
                    f"Packed: {empty} documents in a row are empty; give documents that have tokens"
                )
            piece = document[self._used : self._used + missing]
            self._used += len(piece)
            missing -= len(piece)
            if len(piece):
                pieces.append(piece)
        lengths = torch.tensor([len(piece) for piece in pieces])
        return PackedRow(
            torch.cat(pieces), torch.repeat_interleave(torch.arange(len(pieces)), lengths)
        )

    def state(self) -> Json:
        """Return where the next row begins: its document, and the offset in that."""
        return {"before": self._before, "used": self._used}

    def _current_document(self) -> torch.Tensor:
        """Return the document of the next token, or an empty one."""
        if self._document is None:
            # The first one, or the one that a resumed reader was in.
            self._document = _tokens(self._documents.read())
        elif self._used >= len(self._document):
            self._before = self._documents.state()
            self._document, self._used = _tokens(self._documents.read()), 0
        return self._document


def _tokens(document: Any) -> torch.Tensor:
    tokens = torch.as_tensor(document)
    if tokens.dim() != 1 or (len(tokens) and tokens.dtype.is_floating_point):
        raise UsageError(
            f"Packed: a document of shape {tuple(tokens.shape)} and {tokens.dtype}; give sequences "
            "of whole numbers, one a token"
        )
    return tokens.to(torch.int64)
