"""Metadata of a checkpoint with an index: tensors by key, and which part lists their chunks.

It is read and parsed when it is needed. To go over the keys needs nothing but the index.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.source import TensorSpec
from keepstep.checkpoint.format.stored.chunking import StoredTensor
from keepstep.checkpoint.format.stored.indexed_object import IndexedObject
from keepstep.checkpoint.format.stored.key_index import KeyIndex
from keepstep.checkpoint.format.stored.listings import parse_chunk_parts
from keepstep.checkpoint.format.stored.manifest import Manifest
from keepstep.checkpoint.format.stored.object_names import CHUNKS, ROOT
from keepstep.checkpoint.format.stored.storage import Storage
from keepstep.checkpoint.format.stored.zarr_metadata import check_required, parse_array


class IndexedTensors(Mapping[str, StoredTensor]):
    """The tensors that root metadata with an index describe. Thread-safe.

    Args:
        index: the index.
        storage: has the checkpoint.
        manifest: the checkpoint's.
        contents: objects that were read already, verified.

    Raises:
        CheckpointDamaged: the index is not that of the manifest's objects.
    """

    def __init__(
        self,
        index: KeyIndex,
        storage: Storage,
        manifest: Manifest,
        contents: Mapping[str, bytes],
    ) -> None:
        def parse(key: str, node: Json, where: str) -> StoredTensor:
            tensor = parse_array(key, node, where)
            check_required({key: tensor}, manifest.required, where)
            return tensor

        self._keys = index.numbers
        self._where = f"{storage.url}/{manifest.directory}/{ROOT}"
        self._arrays = IndexedObject(
            storage,
            manifest,
            ROOT,
            numbers=index.numbers,
            ranges=index.arrays,
            parse=parse,
            content=contents.get(ROOT),
        )
        self._chunks = IndexedObject(
            storage,
            manifest,
            CHUNKS,
            numbers=index.numbers,
            ranges=index.chunks,
            parse=lambda key, numbers, where: parse_chunk_parts(numbers, where),
            content=contents.get(CHUNKS),
        )

    def __getitem__(self, key: str) -> StoredTensor:
        """Return a tensor.

        Raises:
            CheckpointDamaged: its metadata, or that of another one in its block, is not what was
                written, or does not conform to the format.
            CheckpointError: it cannot be read.
        """
        if key not in self._keys:
            raise KeyError(key)
        tensor = self._arrays.get(key)
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

    def items(self) -> ItemsView[str, StoredTensor]:
        """Return all tensors with their keys. Raises as for one tensor."""
        self.load(self._keys)
        return super().items()

    def values(self) -> ValuesView[StoredTensor]:
        """Return all tensors. Raises as for one tensor."""
        self.load(self._keys)
        return super().values()

    def load(self, keys: Iterable[str]) -> None:
        """Read the metadata of these tensors at once. Raises as for one tensor."""
        self._arrays.load(keys)

    def chunk_parts(self, key: str) -> int | tuple[int, ...] | None:
        """Return the numbers of the parts that list a tensor's chunks, as `parse_chunk_parts` does.

        Raises:
            CheckpointDamaged: the metadata is not what was written.
            CheckpointError: it cannot be read.
        """
        return self._chunks.get(key)

    def load_chunk_parts(self, keys: Iterable[str]) -> None:
        """Read at once what `chunk_parts` tells of these tensors. Raises as it does."""
        self._chunks.load(keys)


class Specs(Mapping[str, TensorSpec]):
    """Data types and shapes of stored tensors."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, key: str) -> TensorSpec:
        tensor = self._tensors[key]
        return TensorSpec(tensor.dtype, tensor.shape)

    def items(self) -> ItemsView[str, TensorSpec]:
        """Return all with their keys. Raises as for one tensor."""
        self._tensors.items()
        return super().items()

    def values(self) -> ValuesView[TensorSpec]:
        """Return all. Raises as for one tensor."""
        self._tensors.values()
        return super().values()

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
