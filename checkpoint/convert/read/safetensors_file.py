"""Reads files of safetensors: a header of JSON, then the tensors' bytes.

Read by ourselves, for the library reads no ranges of object stores; its format is described at
https://github.com/huggingface/safetensors. Files that the library refuses are refused here, too.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.checkpoint.convert.read.arrays import FileArray
from keepstep.checkpoint.convert.read.files import Extent, ForeignFile, damaged
from keepstep.checkpoint.format.layout.boxes import Json

_LENGTH = struct.Struct("<Q")
_MOST_HEADER_NBYTES = 100_000_000
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}

SAFETENSORS_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""The data types that the format has, with its names for them."""


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The content of one file.

    Attributes:
        arrays: the tensors by name, in the order of the header.
        metadata: text by name, such as `format`.
        unsupported: data types that keepstep does not store, by the names of their tensors.
    """

    arrays: Mapping[str, FileArray]
    metadata: Mapping[str, str]
    unsupported: Mapping[str, str]


def is_safetensors(head: bytes, nbytes: int) -> bool:
    """Return whether a file of this beginning and size may be one of safetensors."""
    if len(head) < _LENGTH.size + 1:
        return False
    (header_nbytes,) = _LENGTH.unpack_from(head)
    return head[_LENGTH.size : _LENGTH.size + 1] == b"{" and header_nbytes <= min(
        nbytes - _LENGTH.size, _MOST_HEADER_NBYTES
    )


def read_safetensors(file: ForeignFile) -> SafetensorsFile:
    """Return the tensors of a file; only its header is read.

    Raises:
        CheckpointDamaged: the header is not what safetensors writes, or contradicts the file.
    """
    (header_nbytes,) = _LENGTH.unpack(file.whole.part(0, _LENGTH.size).read())
    if header_nbytes > _MOST_HEADER_NBYTES:
        raise damaged(file.location, f"its header claims to have {header_nbytes} bytes")
    header = _parsed(file.whole.part(_LENGTH.size, header_nbytes))
    begin = _LENGTH.size + header_nbytes
    data = file.whole.part(begin, file.nbytes - begin)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise damaged(file.location, "its __metadata__ is not text by name")
    arrays: dict[str, FileArray] = {}
    unsupported: dict[str, str] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, description in header.items():
        dtype, shape, start, stop = _described(file, name, description)
        ranges.append((start, stop, name))
        content = data.part(start, stop - start)
        if dtype in _DTYPES:
            arrays[name] = FileArray.contiguous(content, _DTYPES[dtype], shape)
        else:
            unsupported[name] = dtype
    end = 0
    for start, stop, name in sorted(ranges):
        if start != end:
            raise damaged(
                file.location,
                f"{name} begins at byte {start} of the data, and what is before it ends at {end}",
            )
        end = stop
    if end != data.nbytes:
        raise damaged(file.location, f"its tensors have {end} bytes, and {data.nbytes} are there")
    return SafetensorsFile(arrays, metadata, unsupported)


def _parsed(extent: Extent) -> dict[str, Json]:
    def distinct(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            raise ValueError("a name is there twice")
        return dict(pairs)

    try:
        header = json.loads(extent.read(_MOST_HEADER_NBYTES), object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise damaged(extent.location, f"its header is no JSON: {str(error)[:200]}") from None
    if not isinstance(header, dict):
        raise damaged(extent.location, "its header is no JSON object")
    return header


def _described(
    file: ForeignFile, name: str, description: Json
) -> tuple[str, tuple[int, ...], int, int]:
    match description:
        case {
            "dtype": str(dtype),
            "shape": list(shape),
            "data_offsets": [int(start), int(stop)],
        } if (
            len(description) == 3
            and all(type(n) is int and 0 <= n < 2**60 for n in shape)
            and len(shape) <= 32
            and type(start) is int
            and type(stop) is int
            and 0 <= start <= stop
            and math.prod(shape) < 2**60
        ):
            return dtype, tuple(shape), start, stop
    raise damaged(file.location, f"its header has {str(description)[:200]} for {name[:200]!r}")
