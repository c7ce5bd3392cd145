"""Writes the entries and `.metadata` of a folder of PyTorch's DCP, around the elements.

Each chunk of a tensor, and each other value, is an entry: a complete file of `torch.save` in a
range of a file. `.metadata` says which tensors there are and where their entries lie; it is a
pickle of classes of PyTorch. `keepstep.checkpoint.convert.read.dcp_metadata` reads it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from keepstep.checkpoint.convert.write.pieces_of_files import Piece, StoredTensor
from keepstep.checkpoint.convert.write.torch_pieces import file_around_tensor, torch_bytes
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.source import TensorSpec
from keepstep.checkpoint.live.tensors import torch_dtype
from keepstep.torch_internals import dcp_storage_info

Path = tuple[str | int, ...]
"""Where a value is in the state: keys of mappings, and indices of lists."""


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """The range of a file that has an entry: `offset` and `nbytes` in bytes."""

    file_name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """A box of a tensor, and the entry that has its elements."""

    box: Box
    place: EntryPlace


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor of a folder.

    Attributes:
        name: its flat name.
        path: where it is in the state.
        spec: its data type and global shape.
        chunks: disjoint boxes that cover it.
    """

    name: str
    path: Path
    spec: TensorSpec
    chunks: tuple[WrittenChunk, ...]


@dataclass(frozen=True, slots=True)
class WrittenValue:
    """A value of a folder that is no tensor, by its flat name."""

    name: str
    path: Path
    place: EntryPlace


def tensor_entry(chunk: StoredTensor, *, is_transposed: bool = False) -> tuple[Piece, ...]:
    """Return the pieces of the entry of a chunk.

    Args:
        chunk: its data type, its shape and its elements.
        is_transposed: the elements are in the order of its transpose.
    """
    around = file_around_tensor(chunk.dtype, chunk.shape, is_transposed)
    if len(around) == 1:
        return around
    before, after = around
    return (before, *chunk.pieces, after)


def value_entry(value: object) -> bytes:
    """Return the entry of a value without tensors."""
    return torch_bytes(value)


def metadata_file(
    tensors: Sequence[WrittenTensor], values: Sequence[WrittenValue], *, has_paths: bool = True
) -> bytes:
    """Return the content of `.metadata`.

    Args:
        tensors: the tensors, by distinct names.
        values: the other values, by further names.
        has_paths: note the paths, by which loaders make the flat state nested again;
            Megatron-Core's folders do not have them.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, object] = {}
    for tensor in tensors:
        described[tensor.name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=torch_dtype(tensor.spec.dtype)),
            size=torch.Size(tensor.spec.shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(chunk.box.offset), torch.Size(chunk.box.shape))
                for chunk in tensor.chunks
            ],
        )
        for number, chunk in enumerate(tensor.chunks):
            stored[MetadataIndex(tensor.name, chunk.box.offset, number)] = _info(chunk.place)
    for value in values:
        described[value.name] = BytesStorageMetadata()
        stored[MetadataIndex(value.name)] = _info(value.place)
    paths = {tensor.name: tensor.path for tensor in tensors}
    paths |= {value.name: value.path for value in values}
    metadata = Metadata(
        state_dict_metadata=described,
        planner_data=paths if has_paths else None,
        storage_data=stored,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
    return pickle.dumps(metadata)


def _info(place: EntryPlace) -> object:
    return dcp_storage_info(place.file_name, place.offset, place.nbytes)
