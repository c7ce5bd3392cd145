"""Tensors of a checkpoint by key, whose metadata is read and parsed when it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.layout.source import TensorSpec
from keepstep.checkpoint.stored.chunking import StoredTensor
from keepstep.checkpoint.stored.indexed_object import IndexedObject
from keepstep.checkpoint.stored.key_index import KeyIndex


class IndexedTensors(Mapping[str, StoredTensor]):
    """The tensors that root metadata with an index describe. Thread-safe.

    To go over the keys needs nothing but the index.

    Args:
        index: the index.
        metadata: the root metadata.
        where: its URL, for error messages.
    """

    def __init__(self, index: KeyIndex, metadata: IndexedObject[StoredTensor], where: str) -> None:
        self._keys = index.numbers
        self._metadata = metadata
        self._where = where

    def __getitem__(self, key: str) -> StoredTensor:
        """Return a tensor.

        Raises:
            CheckpointDamaged: its metadata, or that of another one in its block, is not what was
                written, or does not conform to the format.
            CheckpointError: it cannot be read.
        """
        if key not in self._keys:
            raise KeyError(key)
        tensor = self._metadata.get(key)
        if tensor is None:
            raise CheckpointDamaged(
                f"{self._where} does not describe {key} where the index says; load an older step"
            )
        return tensor

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class Specs(Mapping[str, TensorSpec]):
    """Data types and shapes of stored tensors."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, key: str) -> TensorSpec:
        tensor = self._tensors[key]
        return TensorSpec(tensor.dtype, tensor.shape)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
