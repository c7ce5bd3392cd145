"""Extensions of zarr-python that read keepstep's checkpoints: the packed codec, and data types.

Entry points register them, so `zarr.open(path)` works wherever keepstep is installed, without any
import. FORMAT.md specifies them. They only read.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import crc32c
import ml_dtypes
import numpy as np
from zarr.abc.codec import ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin
from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, NDBuffer, default_buffer_prototype
from zarr.core.dtype import data_type_registry
from zarr.core.dtype.common import DataTypeValidationError, HasItemSize
from zarr.core.dtype.wrapper import ZDType

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError
from keepstep.checkpoint.format.stored.cell_index import CellIndex
from keepstep.checkpoint.format.stored.listings import decode_part
from keepstep.checkpoint.format.stored.manifest import FEATURES
from keepstep.checkpoint.format.stored.object_names import ROOT
from keepstep.checkpoint.format.stored.stored_arrays import StoredArrays
from keepstep.checkpoint.format.stored.zarr_metadata import parse_listings

_CACHE_SIZE = 4


@dataclass(frozen=True)
class _CachedIndex:
    """The cell index of the checkpoint below `root` of a store, whose objects never change."""

    store: Store
    root: str
    index: CellIndex


class _CellIndexCache:
    """The cell indexes of the checkpoints that were read last."""

    def __init__(self) -> None:
        self._entries: deque[_CachedIndex] = deque(maxlen=_CACHE_SIZE)

    async def of(self, store: Store, root: str) -> CellIndex:
        """Return the cell index of the checkpoint below `root`."""
        for entry in self._entries:
            if entry.root == root and entry.store == store:
                return entry.index
        made = await _make_index(store, root)
        self._entries.append(made)
        return made.index


async def _make_index(store: Store, root: str) -> _CachedIndex:
    metadata = await _get(store, f"{root}{ROOT}")
    listings = parse_listings(metadata, f"{root}{ROOT}")
    index = CellIndex(StoredArrays(metadata, FEATURES, f"{root}{ROOT}"), root)
    for entry in listings:
        if entry.is_part:
            path = f"{root}{entry.name}"
            data = await _get(store, path)
            if (len(data), crc32c.crc32c(data)) != (entry.nbytes, entry.crc32c):
                raise CheckpointDamaged(f"{path} was changed; load an older step")
            index.add(decode_part(data, path))
    return _CachedIndex(store, root, index)


# Codecs cannot hold it: zarr makes one for each array, and makes them again.
_cell_indexes = _CellIndexCache()


@dataclass(frozen=True)
class PackedCodec(ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin):
    """The codec `keepstep.packed`, which reads a chunk from a pack.

    `key` is the array's path below the checkpoint.
    """

    is_fixed_size = True

    key: str
    codecs: tuple[Any, ...]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Make the codec from its metadata."""
        configuration = data["configuration"]
        return cls(
            configuration["key"], tuple(json.dumps(codec) for codec in configuration["codecs"])
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the codec's metadata."""
        codecs = [json.loads(codec) for codec in self.codecs]
        return {"name": "keepstep.packed", "configuration": {"key": self.key, "codecs": codecs}}

    def compute_encoded_size(self, input_byte_length: int, _chunk_spec: Any) -> int:
        """Return the size of a cell with its checksum."""
        return input_byte_length + 4

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: Any) -> NDBuffer:
        raise CheckpointError(
            f"{self.key}: a packed chunk is not an object of its own; read the array through zarr, "
            "with no codec added to its own"
        )

    async def _decode_partial_single(
        self, byte_getter: Any, selection: Any, chunk_spec: Any
    ) -> NDBuffer:
        path = byte_getter.path
        root, separator, place = path.rpartition(f"{self.key}/c")
        if not separator:
            raise CheckpointDamaged(f"{path} is not a chunk of {self.key}; was the array moved?")
        numbers = tuple(int(number) for number in place.split(".") if number)
        span = (await _cell_indexes.of(byte_getter.store, root)).find_packed(self.key, numbers)
        if span is None:
            raise CheckpointDamaged(f"{path}: no listing has this chunk; load an older step")
        data = await _get(byte_getter.store, f"{root}{span.object_name}", span.offset, span.nbytes)
        if not span.is_intact(memoryview(data)):
            raise CheckpointDamaged(
                f"{root}{span.object_name}: the data of {self.key} was changed; load an older step"
            )
        dtype = chunk_spec.dtype.to_native_dtype()
        values = (
            np.frombuffer(data[:-4], dtype.newbyteorder("<"))
            .astype(dtype, copy=False)
            .reshape(chunk_spec.shape)
        )
        return cast(
            NDBuffer, chunk_spec.prototype.nd_buffer.from_numpy_array(np.asarray(values[selection]))
        )


async def _get(store: Store, path: str, offset: int | None = None, nbytes: int = 0) -> bytes:
    data = await _get_if_present(store, path, offset, nbytes)
    if data is None:
        raise CheckpointDamaged(f"{path} is missing; load an older step")
    return data


async def _get_if_present(
    store: Store, path: str, offset: int | None = None, nbytes: int = 0
) -> bytes | None:
    prototype: BufferPrototype = default_buffer_prototype()
    byte_range = RangeByteRequest(offset, offset + nbytes) if offset is not None else None
    data = await store.get(path, prototype, byte_range)
    return None if data is None else bytes(data.to_bytes())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Extension(ZDType[Any, Any], HasItemSize):
    """A Zarr data type for a floating-point type of ml_dtypes, with the methods of `ZDType`."""

    _zarr_v3_name: ClassVar[str]
    _scalar: ClassVar[Any]

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """Return the data type, if it is that of a NumPy dtype."""
        if dtype != np.dtype(cls._scalar):
            raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}")
        return cls()

    def to_native_dtype(self) -> Any:
        """Return the NumPy dtype."""
        return np.dtype(self._scalar)

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError(f"{cls._zarr_v3_name} is a data type of Zarr v3 only")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name}")
        return cls()

    def to_json(self, zarr_format: Any) -> Any:
        """Return the data type's name in array metadata."""
        if zarr_format != 3:
            raise ValueError(f"{self._zarr_v3_name} is a data type of Zarr v3 only")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, int | float | np.number | self._scalar)

    def cast_scalar(self, data: object) -> Any:
        """Convert a number to the data type's scalar."""
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} is not a {self._zarr_v3_name}")
        return self._scalar(data)

    def default_scalar(self) -> Any:
        """Return zero, or what a type without zero has instead."""
        return self._scalar(0)

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:
        """Parse a fill value."""
        return self.cast_scalar(float(data))

    def to_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:
        """Return a fill value as JSON."""
        number = float(data)
        if np.isfinite(number):
            return number
        return {np.inf: "Infinity", -np.inf: "-Infinity"}.get(number, "NaN")

    @property
    def item_size(self) -> int:
        """Size of an element in bytes."""
        return int(np.dtype(self._scalar).itemsize)


def _extension(name: str) -> type[_Extension]:
    return type(
        name,
        (_Extension,),
        {"_zarr_v3_name": name, "_scalar": getattr(ml_dtypes, name), "__slots__": ()},
    )


BFloat16 = _extension("bfloat16")
Float8E4M3FN = _extension("float8_e4m3fn")
Float8E4M3FNUZ = _extension("float8_e4m3fnuz")
Float8E5M2 = _extension("float8_e5m2")
Float8E5M2FNUZ = _extension("float8_e5m2fnuz")
Float8E8M0FNU = _extension("float8_e8m0fnu")

# zarr 3.1 collects the entry points of data types but never loads them. It loads those of buffers
# before it reads any metadata, so this module is also an entry point of that kind, and registers
# the types itself.
for _data_type in (
    BFloat16,
    Float8E4M3FN,
    Float8E4M3FNUZ,
    Float8E5M2,
    Float8E5M2FNUZ,
    Float8E8M0FNU,
):
    data_type_registry.register(_data_type._zarr_v3_name, _data_type)
