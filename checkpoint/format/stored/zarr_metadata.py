"""Zarr metadata of a stored checkpoint: arrays, groups, and the index of a chunk of cells. Pure.

Whatever was read from storage is checked here before it is used.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import crc32c

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.dtypes import is_in_zarr, numpy_dtype, zarr_data_type
from keepstep.checkpoint.format.stored.cell_codec import BLOSC_LEVEL
from keepstep.checkpoint.format.stored.chunking import COMPRESSED_CELL_NBYTES, StoredTensor
from keepstep.checkpoint.format.stored.manifest import (
    COMPRESSED_CELLS,
    VERSION,
    StoredObject,
    check_required,
    check_version,
)
from keepstep.checkpoint.format.stored.object_names import MODEL, StoredStep
from keepstep.checkpoint.format.stored.stored_json import decode, encode, is_count

_TORCH_DTYPE = "torch_dtype"
_ABSENT = 2**64 - 1
_MAX_CELLS = 2**20


def shard_index(tensor: StoredTensor, present: Sequence[int], sizes: Sequence[int]) -> bytes:
    """Return the index at the end of a chunk's object, as Zarr's codec `sharding_indexed` has it.

    The index is each cell's offset and size in bytes, followed by the crc32c of these numbers.

    Args:
        tensor: the chunk's tensor.
        present: the numbers of the cells that the chunk has, ascending.
        sizes: the size of each of them, with its checksum.
    """
    numbers = [_ABSENT] * (2 * cells_per_chunk(tensor))
    offset = 0
    for number, size in zip(present, sizes, strict=True):
        numbers[2 * number : 2 * number + 2] = [offset, size]
        offset += size
    index = struct.pack(f"<{len(numbers)}Q", *numbers)
    checksum: int = crc32c.crc32c(index)
    return index + checksum.to_bytes(4, "little")


def shard_index_nbytes(cells: int) -> int:
    """Return the size of the index at the end of a chunk of so many cells."""
    return 16 * cells + 4


def cells_per_chunk(tensor: StoredTensor) -> int:
    """Return the number of cells in a chunk, including those beyond the tensor's edge."""
    return math.prod(extent // cell for extent, cell in zip(tensor.chunk, tensor.cell, strict=True))


def array_metadata(key: str, tensor: StoredTensor) -> Json:
    """Return the Zarr v3 metadata of a tensor's array."""
    cell_codecs = _cell_codecs(tensor)
    codec: Json = {
        "name": "keepstep.packed",
        "configuration": {"key": key, "chunk_shape": list(tensor.chunk), "codecs": cell_codecs},
    }
    if not tensor.is_packed:
        codec = {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": list(tensor.cell),
                "codecs": cell_codecs,
                "index_codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": "crc32c"},
                ],
                "index_location": "end",
            },
        }
    attributes = dict(tensor.attributes)
    if not is_in_zarr(tensor.dtype):
        attributes["keepstep"] = {**attributes.get("keepstep", {}), _TORCH_DTYPE: tensor.dtype}
    name = key.rpartition("/")[2]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(tensor.shape),
        "data_type": zarr_data_type(tensor.dtype),
        "chunk_grid": {
            "name": "regular",
            "configuration": {
                "chunk_shape": list(tensor.cell if tensor.is_packed else tensor.chunk)
            },
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": _fill_value(zarr_data_type(tensor.dtype)),
        "codecs": [codec],
        # xarray requires names, and arrays of one group that share one must agree in the extent.
        "dimension_names": [f"{name}.{axis}" for axis in range(len(tensor.shape))],
        "attributes": attributes,
    }


def _cell_codecs(tensor: StoredTensor) -> list[Json]:
    itemsize = numpy_dtype(tensor.dtype).itemsize
    codecs: list[Json] = [{"name": "bytes"}]
    if itemsize > 1:
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if tensor.compression is not None:
        configuration = {
            "cname": tensor.compression,
            "clevel": BLOSC_LEVEL,
            "shuffle": "shuffle",
            "typesize": itemsize,
            "blocksize": tensor.cell_nbytes,
        }
        codecs.append({"name": "blosc", "configuration": configuration})
    return [*codecs, {"name": "crc32c"}]


def required_features(tensors: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    """Return the features that a reader of these tensors must know (FORMAT.md)."""
    is_compressed = any(tensor.compression is not None for tensor in tensors.values())
    return (COMPRESSED_CELLS,) if is_compressed else ()


def root_metadata(
    stored: StoredStep,
    listings: Sequence[StoredObject],
    tensors: Mapping[str, StoredTensor],
) -> bytes:
    """Return the root group's metadata with that of all nodes below it: opening takes one read.

    Args:
        stored: the checkpoint.
        listings: the entries of the parts, and of the object that tells which part lists a chunk:
            readers by way of Zarr open the attempt's directory, and do not see the manifest, which
            lies above it.
        tensors: all arrays by key.
    """
    nodes: dict[str, Json] = {}
    for key in sorted(tensors):
        names = key.split("/")
        for depth in range(1, len(names)):
            group = "/".join(names[:depth])
            if group not in nodes:
                nodes[group] = group_metadata(group)
        nodes[key] = array_metadata(key, tensors[key])
    root = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {
            "keepstep": {
                "format": VERSION,
                "required": list(required_features(tensors)),
                "step": stored.step,
                "generation": stored.generation,
                "listings": [listing.to_json() for listing in listings],
            },
            "description": "A PyTorch training checkpoint. model/: parameters and buffers by name; "
            "optim/<parameter>/<slot>: optimizer state; rank/: random number generators; "
            "documents.json: what is no tensor. Complete if and only if the manifest.json in the "
            "directory above names this directory.",
        },
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": nodes},
    }
    return encode(root)


def parse_listings(root: bytes, where: str) -> tuple[StoredObject, ...]:
    """Return the listings' entries in the root metadata.

    Raises:
        CheckpointDamaged: the metadata has another form.
        CheckpointTooNew: this release does not read the format, or lacks a required feature.
    """
    content = decode(root, where)
    try:
        attributes = content["attributes"]["keepstep"]
        check_version(attributes["format"], where)
        check_required(attributes["required"], where)
        return tuple(StoredObject.from_json(listing) for listing in attributes["listings"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(
            f"{where} does not list the parts of a checkpoint: {error!r}; load an older step"
        ) from error


def group_metadata(path: str) -> Json:
    """Return the metadata of a group below the root."""
    meaning = {
        MODEL: "parameters and persistent buffers, each a whole tensor under its name "
        "in the module",
        "optim": "one group per parameter, one array per optimizer slot",
        "rank": "what belongs to one rank only",
    }
    attributes = {"description": meaning[path]} if path in meaning else {}
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def parse_array(key: str, node: Json, where: str) -> StoredTensor:
    """Return the tensor that an array's metadata describes, checked.

    Args:
        key: its key.
        node: the metadata.
        where: the object that has the metadata.

    Raises:
        CheckpointDamaged: the array does not conform to this format.
    """
    try:
        return _parse_array(key, node)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(
            f"{where} does not describe {key}: {error!r}; load an older step"
        ) from error


def _parse_array(key: str, node: Any) -> StoredTensor:
    """Parse the fields that may vary, and check that the others are what this format writes."""
    shape, chunk = node["shape"], node["chunk_grid"]["configuration"]["chunk_shape"]
    if not (isinstance(shape, list) and isinstance(chunk, list) and len(shape) == len(chunk)):
        raise ValueError(f"{key}: shape {shape} with chunks {chunk}")
    if not (all(is_count(n) for n in (*shape, *chunk)) and all(chunk)):
        raise ValueError(f"{key}: shape {shape} with chunks {chunk}")
    (codec,) = node["codecs"]
    configuration = codec["configuration"]
    is_packed = codec["name"] == "keepstep.packed"
    # Zarr's chunks are the cells of a packed array, and its chunks of cells the codec's.
    cell = configuration["chunk_shape"]
    if is_packed:
        cell, chunk = chunk, cell
    attributes = node.get("attributes", {})
    if not isinstance(attributes, dict):
        raise ValueError(f"{key}: attributes {attributes!r:.200}")
    if not (
        isinstance(chunk, list)
        and len(chunk) == len(shape)
        and all(is_count(n) and n for n in chunk)
    ):
        raise ValueError(f"{key}: chunks {chunk}")
    if not (
        isinstance(cell, list) and len(cell) == len(chunk) and all(is_count(n) and n for n in cell)
    ):
        raise ValueError(f"{key}: cells {cell}")
    if any(extent % part for extent, part in zip(chunk, cell, strict=True)):
        raise ValueError(f"{key}: cells {cell} do not divide chunks {chunk}")
    dtype, attributes = _parse_data_type(key, node["data_type"], attributes)
    # What else the codecs say is compared with what this format has, below.
    is_compressed = any(inner["name"] == "blosc" for inner in configuration["codecs"])
    tensor = StoredTensor(
        dtype=dtype,
        shape=tuple(shape),
        chunk=tuple(chunk),
        cell=tuple(cell),
        is_packed=is_packed,
        attributes=attributes,
        compression="zstd" if is_compressed else None,
    )
    numpy_dtype(tensor.dtype)
    if is_compressed and (is_packed or tensor.cell_nbytes > COMPRESSED_CELL_NBYTES):
        raise ValueError(f"{key}: compressed cells of {tensor.cell_nbytes} bytes")
    if not is_packed and cells_per_chunk(tensor) > _MAX_CELLS:
        raise ValueError(f"{key}: {cells_per_chunk(tensor)} cells in a chunk")
    expected = array_metadata(key, tensor)
    for field in (
        "zarr_format",
        "shape",
        "data_type",
        "chunk_grid",
        "chunk_key_encoding",
        "codecs",
    ):
        if node[field] != expected[field]:
            raise ValueError(
                f"{key}: {field} is {node[field]!r:.200}, this format has {expected[field]!r:.200}"
            )
    return tensor


def _parse_data_type(
    key: str, data_type: Json, attributes: dict[str, Json]
) -> tuple[str, dict[str, Json]]:
    """Return the data type that an array holds, and the attributes without what names it."""
    own = attributes.get("keepstep")
    if not isinstance(own, dict):
        return str(data_type), attributes
    named = own.get(_TORCH_DTYPE)
    if not isinstance(named, str) or is_in_zarr(named):
        return str(data_type), attributes
    if data_type != zarr_data_type(named):
        raise ValueError(f"{key}: {_TORCH_DTYPE} {named} with data type {data_type!r:.200}")
    rest = {name: value for name, value in own.items() if name != _TORCH_DTYPE}
    others = {name: value for name, value in attributes.items() if name != "keepstep"}
    return named, {**others, "keepstep": rest} if rest else others


def _fill_value(dtype: str) -> Json:
    if dtype == "bool":
        return False
    if dtype == "float8_e8m0fnu":
        return "NaN"  # It has no zero.
    return [0.0, 0.0] if dtype.startswith("complex") else 0.0 if "float" in dtype else 0
