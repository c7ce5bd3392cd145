"""Files of safetensors are read as the library reads them; what contradicts itself is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.convert.read.safetensors_file import (
    SafetensorsFile,
    is_safetensors,
    read_safetensors,
)
from keepstep.checkpoint.errors import CheckpointDamaged
from tests.unit.checkpoint.convert.read.written import extent_of

CODES = {
    "bool": "BOOL", "int8": "I8", "uint8": "U8", "int16": "I16", "uint16": "U16", "int32": "I32",
    "uint32": "U32", "int64": "I64", "uint64": "U64", "float16": "F16", "float32": "F32",
    "float64": "F64", "complex64": "C64", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def content_of(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def read(directory: Path, content: bytes) -> SafetensorsFile:
    return read_safetensors(extent_of(directory, content, "m.safetensors").file)


def test_all_types_are_read_by_names(tmp_path: Path) -> None:
    values = np.arange(6).reshape(2, 3)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, code in CODES.items():
        encoded = values.astype(getattr(ml_dtypes, name, name)).tobytes()
        header[name] = {
            "dtype": code,
            "shape": [2, 3],
            "data_offsets": [len(data), len(data) + len(encoded)],
        }
        data += encoded
    header["four_bits"] = {"dtype": "F4", "shape": [2], "data_offsets": [len(data), len(data) + 1]}
    found = read(tmp_path, content_of(header, data + b"?"))
    assert found.metadata == {"format": "pt"}
    assert found.unsupported == {"four_bits": "F4"}
    assert list(found.arrays) == list(CODES)
    for name, array in found.arrays.items():
        assert array.dtype == name
        expected = values.astype(getattr(ml_dtypes, name, name))
        np.testing.assert_array_equal(array.read(), expected)


def test_file_of_the_library_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    tensors = {"a": np.arange(4, dtype=np.int64), "b": np.ones((2, 0), np.float32)}
    found = read(tmp_path, library.save(tensors))
    for name, values in tensors.items():
        np.testing.assert_array_equal(found.arrays[name].read(), values)


def described(dtype: object, shape: object, start: object, stop: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


W = described("F32", [2], 0, 8)
REFUSED = {
    "empty": (b"", "refers to 8 bytes"),
    "header beyond": (content_of({}, length=1000), "refers to 1000 bytes"),
    "absurd header": (content_of({}, length=2**63), "claims to have 9223372036854775808"),
    "no JSON": (content_of(b"{'w"), "no JSON"),
    "no object": (content_of([1]), "no JSON object"),
    "deep": (content_of(b"[" * 10**5), "no JSON"),
    "twice": (content_of(b'{"w": 1, "w": 2}'), "twice"),
    "short": (content_of({"w": W}, bytes(7)), "8 bytes from 0 on"),
    "longer": (content_of({"w": W}, bytes(9)), "have 8 bytes, and 9 are there"),
    "gap": (content_of({"w": described("F32", [1], 4, 8)}, bytes(8)), "begins at byte 4"),
    "overlap": (content_of({"w": W, "v": described("F32", [1], 4, 8)}, bytes(8)), "at byte 4"),
    "size": (content_of({"w": described("F32", [3], 0, 8)}, bytes(8)), "needs 12 bytes"),
    "absurd shape": (content_of({"w": described("F32", [2**59, 2**59], 0, 8)}), "header has"),
    "negative": (content_of({"w": described("F32", [-2], 0, 8)}, bytes(8)), "header has"),
    "negative offset": (content_of({"w": described("F32", [2], -8, 0)}, bytes(8)), "header has"),
    "true": (content_of({"w": described("F32", [True], 0, 4)}, bytes(4)), "header has"),
    "no text": (content_of({"w": described(32, [1], 0, 4)}, bytes(4)), "header has"),
    "metadata": (content_of({"__metadata__": {"a": 1}}), "no text by name|not text by name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_file_that_contradicts_itself_is_refused(tmp_path: Path, name: str) -> None:
    content, reason = REFUSED[name]
    with pytest.raises(CheckpointDamaged, match=f"{tmp_path}/m.safetensors.*({reason})"):
        read(tmp_path, content)


def test_files_are_told_by_their_beginning() -> None:
    content = content_of({"w": W}, bytes(8))
    assert is_safetensors(content[:32], len(content))
    assert not is_safetensors(content[:32], 20)
    assert not is_safetensors(b"PK\x03\x04" + bytes(28), 32)
    assert not is_safetensors(b"", 0)


@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_bytes_are_read_or_refused(tmp_path: Path, at: int, changed: bytes) -> None:
    content = content_of({"__metadata__": {"a": "b"}, "w": W}, bytes(8))
    at %= len(content)
    try:
        for array in read(
            tmp_path, content[:at] + changed + content[at + len(changed) :]
        ).arrays.values():
            array.read()
    except CheckpointDamaged:
        pass
