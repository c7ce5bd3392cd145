"""Tests of parsing: objects read from storage either conform to the format or are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointTooNew
from keepstep.checkpoint.layout.dtypes import _NUMPY
from keepstep.checkpoint.stored.chunking import StoredTensor
from keepstep.checkpoint.stored.format import (
    VERSION,
    Attempt,
    ChunkObject,
    Manifest,
    Pack,
    PackedChunk,
    StoredObject,
    StoredStep,
    decode_chunk_parts,
    decode_part,
    encode,
    encode_checksums,
    encode_chunk_parts,
    encode_part,
    parse_listings,
    parse_root,
    root_metadata,
)


def packed(dtype: str, shape: tuple[int, ...], cell: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(dtype=dtype, shape=shape, chunk=cell, cell=cell, is_packed=True)


def large(dtype: str) -> StoredTensor:
    return StoredTensor(dtype=dtype, shape=(5, 3), chunk=(4, 3), cell=(2, 3), is_packed=False)


TENSORS = {
    **{f"model/{dtype}": packed(dtype, (5, 3), (2, 3)) for dtype in _NUMPY},
    **{f"large/{dtype}": large(dtype) for dtype in _NUMPY},
    "optim/w/step": packed("float32", (), ()),
    "model/empty": packed("float32", (0, 3), (1, 3)),
}


PARTS = (StoredObject("parts/000000.json", 10, 2**32 - 1), StoredObject("parts/000001.json", 3, 0))


def test_metadata_round_trips_for_every_data_type() -> None:
    assert parse_root(encode(root_metadata(StoredStep(7, 1), PARTS, TENSORS)), "here") == TENSORS


def test_attributes_that_name_a_type_are_kept_apart_from_others() -> None:
    tensor = replace(
        TENSORS["model/float4_e2m1fn_x2"], attributes={"keepstep": {"more": 1}, "other": "x"}
    )
    root = root_metadata(StoredStep(7, 1), PARTS, {"model/w": tensor})
    node = root["consolidated_metadata"]["metadata"]["model/w"]
    assert node["data_type"] == "uint8"
    assert node["attributes"] == {
        "keepstep": {"more": 1, "torch_dtype": "float4_e2m1fn_x2"},
        "other": "x",
    }
    assert parse_root(encode(root), "here") == {"model/w": tensor}


def test_a_torch_dtype_that_is_not_known_is_ignored() -> None:
    tensor = replace(
        TENSORS["model/uint8"], attributes={"keepstep": {"torch_dtype": "of a later release"}}
    )
    root = root_metadata(StoredStep(7, 1), PARTS, {"model/w": tensor})
    assert parse_root(encode(root), "here") == {"model/w": tensor}


def test_dimensions_have_names_that_arrays_of_a_group_do_not_share() -> None:
    nodes = root_metadata(StoredStep(7, 1), PARTS, TENSORS)["consolidated_metadata"]["metadata"]
    assert nodes["model/bool"]["dimension_names"] == ["bool.0", "bool.1"]
    assert nodes["optim/w/step"]["dimension_names"] == []


def test_the_fill_value_is_zero_where_a_type_has_one() -> None:
    nodes = root_metadata(StoredStep(7, 1), PARTS, TENSORS)["consolidated_metadata"]["metadata"]
    fill_values = {name: nodes[f"model/{name}"]["fill_value"] for name in _NUMPY}
    assert fill_values.pop("float8_e8m0fnu") == "NaN"
    assert fill_values.pop("complex64") == fill_values.pop("complex128") == [0.0, 0.0]
    assert not any(fill_values.values())


def test_a_manifest_round_trips() -> None:
    manifest = Manifest(
        7,
        2,
        "90f3c1",
        (StoredObject("parts/000000.json", 10, 2**32 - 1), StoredObject("zarr.json", 3, 0)),
    )
    assert Manifest.decode(manifest.encode(), "here") == manifest


@given(st.integers(0, 10**8 - 1), st.integers(0, 10**6 - 1))
def test_a_directory_name_round_trips(step: int, generation: int) -> None:
    assert StoredStep.parse(StoredStep(step, generation).directory) == StoredStep(step, generation)


@pytest.mark.parametrize(
    "name", ["step-1-2", "step-00000001-000002x", "other", "step-00000001", ""]
)
def test_other_directory_names_are_not_steps(name: str) -> None:
    assert StoredStep.parse(name) is None


def test_the_root_lists_the_parts_from_format_2_on() -> None:
    metadata = root_metadata(StoredStep(7, 1), PARTS, TENSORS)
    assert parse_listings(encode(metadata), "here") == PARTS
    listed = [part.to_json() for part in PARTS]
    metadata["attributes"]["keepstep"] = {"format": 2, "step": 7, "generation": 1, "parts": listed}
    assert parse_listings(encode(metadata), "here") == PARTS
    metadata["attributes"]["keepstep"] = {"format": 1, "step": 7, "generation": 1}
    assert parse_listings(encode(metadata), "here") is None


def test_a_manifest_of_format_1_names_the_directory_of_the_step() -> None:
    content = {"format": 1, "step": 7, "generation": 2, "objects": [["zarr.json", 3, 0]]}
    manifest = Manifest.decode(encode(content), "here")
    assert manifest == Manifest(7, 2, None, (StoredObject("zarr.json", 3, 0),))
    assert manifest.directory == StoredStep(7, 2).directory


@given(st.from_regex(r"[0-9a-z][0-9a-z-]{0,63}", fullmatch=True))
def test_attempts_have_directories_of_their_own_below_the_step(name: str) -> None:
    attempt = Attempt(StoredStep(7, 2), name)
    step, _, leaf = attempt.directory.rpartition("/")
    assert step == StoredStep(7, 2).directory
    assert Attempt.is_directory(leaf)
    assert Manifest(7, 2, name, ()).directory == attempt.directory


@pytest.mark.parametrize("name", ["", "../x", "a/b", "A", "-a", "a" * 65, "a.b", "a\n"])
def test_other_names_of_attempts_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name an attempt"):
        Attempt(StoredStep(7, 2), name)
    assert not Attempt.is_directory(f"attempt-{name}")


def with_checksum(content: dict[str, Any]) -> bytes:
    return encode({**content, "crc32c": crc32c.crc32c(encode(content))})


@given(st.data())
def test_a_manifest_in_which_a_bit_was_flipped_is_refused_as_damaged(data: st.DataObject) -> None:
    manifest = Manifest(7, 2, "90f3c1", (*PARTS, StoredObject("zarr.json", 3, 0)))
    encoded = bytearray(manifest.encode())
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CheckpointDamaged, match="here is not"):
        Manifest.decode(bytes(encoded), "here")


def set_field(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda node: node.__setitem__(field, value)


@pytest.mark.parametrize(
    "change",
    [
        set_field("data_type", "r16"),
        set_field("data_type", "float31"),
        set_field("data_type", ["float32"]),
        set_field("shape", [5]),
        set_field("shape", [5, -3]),
        set_field("shape", [5, 3.0]),
        set_field("shape", [5, True]),
        set_field("shape", [5, 2**63]),
        set_field("shape", "53"),
        set_field("chunk_grid", {"name": "rectilinear", "configuration": {"chunk_shape": [2, 3]}}),
        set_field("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [0, 3]}}),
        set_field("chunk_key_encoding", {"name": "v2"}),
        set_field(
            "codecs", [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "crc32c"}]
        ),
        set_field("codecs", [{"name": "gzip"}]),
        set_field("zarr_format", 2),
        set_field("data_type", "float4_e2m1fn_x2"),
        set_field("attributes", {"keepstep": {"torch_dtype": "float4_e2m1fn_x2"}}),
        lambda node: node.pop("shape"),
    ],
)
def test_array_metadata_of_another_form_is_refused_as_damaged(change: Any) -> None:
    content = copy.deepcopy(root_metadata(StoredStep(7, 1), PARTS, TENSORS))
    change(content["consolidated_metadata"]["metadata"]["model/float32"])
    with pytest.raises(CheckpointDamaged, match="here is not a checkpoint's root metadata"):
        parse_root(encode(content), "here")


def test_a_tensor_name_outside_the_directory_is_refused_as_damaged() -> None:
    content = root_metadata(StoredStep(7, 1), PARTS, TENSORS)
    nodes = content["consolidated_metadata"]["metadata"]
    nodes["../../etc/x"] = nodes["model/float32"]
    with pytest.raises(CheckpointDamaged, match="cannot be part of a name"):
        parse_root(encode(content), "here")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"{}",
        json.dumps({"format": 0, "step": 1, "generation": 0, "objects": []}).encode(),
        json.dumps({"format": "2", "step": 1, "generation": 0, "objects": []}).encode(),
        json.dumps({"format": True, "step": 1, "generation": 0, "objects": []}).encode(),
        json.dumps({"format": 1, "step": "1", "generation": 0, "objects": []}).encode(),
        json.dumps({"format": 1, "step": 1, "generation": 0, "objects": [["a", 1]]}).encode(),
        json.dumps({"format": 1, "step": 1, "generation": 0, "objects": [["../a", 1, 2]]}).encode(),
        json.dumps({"format": 1, "step": 1, "generation": 0, "objects": [["a", -1, 2]]}).encode(),
        with_checksum({"format": 2, "step": 1, "generation": 0, "objects": []}),
        with_checksum({"format": 2, "step": 1, "generation": 0, "attempt": "../x", "objects": []}),
        with_checksum({"format": 2, "step": 1, "generation": 0, "attempt": 7, "objects": []}),
        encode({"format": 2, "step": 1, "generation": 0, "attempt": "a", "objects": []}),
        with_checksum({"format": 3, "step": 1, "generation": 0, "attempt": "a", "objects": []}),
        with_checksum(
            {
                "format": 3,
                "required": [7],
                "step": 1,
                "generation": 0,
                "attempt": "a",
                "objects": [],
            }
        ),
    ],
)
def test_a_manifest_of_another_form_is_refused_as_damaged(content: bytes) -> None:
    with pytest.raises(CheckpointDamaged):
        Manifest.decode(content, "here")


@given(st.integers(VERSION + 1, 2**62))
def test_a_newer_format_is_not_taken_for_damage(version: int) -> None:
    with pytest.raises(CheckpointTooNew, match=f"here has format {version}, this keepstep reads"):
        Manifest.decode(json.dumps({"format": version}).encode(), "here")


def test_a_required_feature_that_is_not_known_is_named_and_not_taken_for_damage() -> None:
    manifest = replace(Manifest(7, 2, "a", PARTS), required=("compressed-cells", "x"))
    with pytest.raises(CheckpointTooNew, match="here requires 'compressed-cells', 'x', which this"):
        Manifest.decode(manifest.encode(), "here")


def test_members_that_are_not_known_are_ignored() -> None:
    content = json.loads(Manifest(7, 2, "a", PARTS).encode())
    del content["crc32c"]
    manifest = Manifest.decode(with_checksum({**content, "written_by": "a later release"}), "here")
    assert manifest == Manifest(7, 2, "a", PARTS)


CHECKSUMS = st.lists(st.integers(0, 2**32 - 1), max_size=5).map(encode_checksums)


@given(st.lists(st.tuples(st.integers(0, 9), CHECKSUMS), max_size=3), st.lists(CHECKSUMS))
def test_a_part_round_trips(chunks: list[tuple[int, bytes]], packed: list[bytes]) -> None:
    objects = (
        *(ChunkObject(f"model/w/c.{n}", n, checksums) for n, checksums in chunks),
        Pack(
            "packs/000000-0000",
            7,
            tuple(PackedChunk("model/b", (n,), checksums) for n, checksums in enumerate(packed)),
        ),
    )
    assert decode_part(encode_part(objects), "here") == objects


def test_a_part_of_an_older_format_is_read() -> None:
    old = [
        ["model/w/c.0.1", 9, [7, None, 2**32 - 1]],
        ["packs/000000-0000", 8, [["model/b", [0, 812], [1, 7]], ["step", [5]]]],
    ]
    assert decode_part(encode(old), "here") == (
        ChunkObject("model/w/c.0.1", 9, encode_checksums([7, 2**32 - 1])),
        Pack(
            "packs/000000-0000",
            8,
            (
                PackedChunk("model/b", (0,), encode_checksums([812])),
                PackedChunk("model/b", (1,), encode_checksums([7])),
                PackedChunk("step", (), encode_checksums([5])),
            ),
        ),
    )


@pytest.mark.parametrize(
    "listing",
    [
        [["a/c.0", 1, "AAA"]],
        [["a/c.0", 1, "AAAA"]],
        [["a/c.0", 1, "!!!!AAAA"]],
        [["a/c.0", 1, 7]],
        [["a/c.0", -1, "AAAAAA=="]],
        [["a/c.0", 1, [2**32]]],
        [["packs/0", 1, "AAAAAA=="]],
        [["packs/0", 1, [["a", [-1], "AAAAAA=="]]]],
        [["packs/0", 1, [["a", 0, "AAAAAA=="]]]],
        [["packs/0", 1, [[7, [0], "AAAAAA=="]]]],
        [["packs/0", 1, [["a", []]]]],
    ],
)
def test_a_part_of_another_form_is_refused_as_damaged(listing: Any) -> None:
    with pytest.raises(CheckpointDamaged, match="here is not a listing"):
        decode_part(encode(listing), "here")


@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 2**32 - 1), max_size=4)))
def test_the_parts_of_chunks_round_trip(parts: dict[str, list[int]]) -> None:
    decoded = decode_chunk_parts(encode_chunk_parts(parts), "here")
    spread = {
        key: list(numbers) if isinstance(numbers, tuple) else [numbers] * len(parts[key])
        for key, numbers in decoded.items()
    }
    assert spread == {key: numbers for key, numbers in parts.items() if numbers}


@pytest.mark.parametrize("content", [[], {"a": -1}, {"a": "AAA"}, {"a": "AAAA"}, {"a": None}])
def test_parts_of_chunks_of_another_form_are_refused_as_damaged(content: Any) -> None:
    with pytest.raises(CheckpointDamaged, match="here does not tell which part"):
        decode_chunk_parts(encode(content), "here")


@pytest.mark.parametrize("change", [{"format": VERSION + 1}, {"required": ["x"]}])
def test_readers_by_way_of_zarr_refuse_what_is_newer(change: dict[str, Any]) -> None:
    metadata = root_metadata(StoredStep(7, 1), PARTS, TENSORS)
    metadata["attributes"]["keepstep"] |= change
    with pytest.raises(CheckpointTooNew, match="here"):
        parse_listings(encode(metadata), "here")


def test_a_manifest_that_lists_an_object_twice_is_refused_as_damaged() -> None:
    with pytest.raises(CheckpointDamaged, match="lists an object twice"):
        Manifest.decode(Manifest(7, 2, "a", (*PARTS, PARTS[0])).encode(), "here")


def test_a_part_has_one_name_only() -> None:
    assert not StoredObject("parts/0000001.json", 1, 1).is_part
