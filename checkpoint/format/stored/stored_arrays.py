"""Reads which tensors a checkpoint has from its root metadata. Pure.

The metadata of one array is parsed and checked when it is first used: a reader of some of very many
tensors pays for those only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import msgspec

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.names import check_keys
from keepstep.checkpoint.format.layout.source import TensorSpec
from keepstep.checkpoint.format.stored.chunking import StoredTensor
from keepstep.checkpoint.format.stored.stored_json import decode
from keepstep.checkpoint.format.stored.zarr_metadata import parse_array, required_features


class _Consolidated(msgspec.Struct):
    metadata: dict[str, msgspec.Raw]


class _Root(msgspec.Struct):
    consolidated_metadata: _Consolidated


class _Node(msgspec.Struct):
    node_type: str


_decode_root = msgspec.json.Decoder(_Root).decode
_decode_node = msgspec.json.Decoder(_Node).decode


class StoredArrays(Mapping[str, StoredTensor]):
    """The tensors that root metadata describe, by key. Thread-safe.

    Args:
        root: the root metadata.
        required: the features that the manifest requires.
        where: the object that has the metadata.

    Raises:
        CheckpointDamaged: it is not root metadata, or has a key that cannot name an array.
    """

    def __init__(self, root: bytes, required: Collection[str], where: str) -> None:
        self._required = frozenset(required)
        self._where = where
        self._parsed: dict[str, StoredTensor] = {}
        try:
            nodes = _decode_root(root).consolidated_metadata.metadata
            self._nodes = {
                key: node for key, node in nodes.items() if _decode_node(node).node_type == "array"
            }
            check_keys(self._nodes)
        except (ValueError, RecursionError) as error:
            raise CheckpointDamaged(
                f"{where} is not a checkpoint's root metadata: {error}; load an older step"
            ) from error

    def __getitem__(self, key: str) -> StoredTensor:
        """Return a tensor.

        Raises:
            CheckpointDamaged: its metadata does not conform to the format, or it needs a feature
                that the manifest does not require.
        """
        tensor = self._parsed.get(key)
        if tensor is None:
            tensor = self._parsed[key] = self._parse(key)
        return tensor

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def encoded(self, key: str) -> bytes:
        """Return the metadata of an array as they are stored."""
        return bytes(self._nodes[key])

    def _parse(self, key: str) -> StoredTensor:
        tensor = parse_array(key, decode(self.encoded(key), self._where), self._where)
        if unnamed := set(required_features({key: tensor})) - self._required:
            raise CheckpointDamaged(
                f"{self._where}: {key} needs {', '.join(sorted(unnamed))}, which the manifest does "
                "not require; load an older step"
            )
        return tensor


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
