"""Tests of Zarr metadata: what is read from storage conforms to the format or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointTooNew
from keepstep.checkpoint.format.layout.dtypes import _NUMPY
from keepstep.checkpoint.format.stored.chunking import StoredTensor
from keepstep.checkpoint.format.stored.manifest import FEATURES, VERSION, StoredObject
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.stored_arrays import StoredArrays
from keepstep.checkpoint.format.stored.stored_json import encode
from keepstep.checkpoint.format.stored.zarr_metadata import (
    parse_listings,
    root_metadata,
)


def packed(dtype: str, shape: tuple[int, ...], cell: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(dtype=dtype, shape=shape, chunk=cell, cell=cell, is_packed=True)


def large(dtype: str) -> StoredTensor:
    return StoredTensor(dtype=dtype, shape=(5, 3), chunk=(4, 3), cell=(2, 3), is_packed=False)


TENSORS = {
    **{f"model/{dtype}": packed(dtype, (5, 3), (2, 3)) for dtype in _NUMPY},
    **{f"large/{dtype}": large(dtype) for dtype in _NUMPY},
    **{f"compressed/{dtype}": replace(large(dtype), compression="zstd") for dtype in _NUMPY},
    "optim/w/step": packed("float32", (), ()),
    "model/empty": packed("float32", (0, 3), (1, 3)),
}


PARTS = (StoredObject("parts/000000.json", 10, 2**32 - 1), StoredObject("parts/000001.json", 3, 0))


def root_of(tensors: Mapping[str, StoredTensor]) -> Any:
    return json.loads(root_metadata(StoredStep(7, 1), PARTS, tensors))


def parse_root(root: Any) -> dict[str, StoredTensor]:
    """Return all tensors of root metadata, each parsed."""
    return dict(StoredArrays(encode(root), FEATURES, "here"))


def set_field(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda node: node.__setitem__(field, value)


def test_metadata_round_trips_for_every_data_type() -> None:
    assert parse_root(root_of(TENSORS)) == TENSORS


def test_attributes_that_name_a_type_are_kept_apart_from_others() -> None:
    tensor = replace(
        TENSORS["model/float4_e2m1fn_x2"], attributes={"keepstep": {"more": 1}, "other": "x"}
    )
    root = root_of({"model/w": tensor})
    node = root["consolidated_metadata"]["metadata"]["model/w"]
    assert node["data_type"] == "uint8"
    assert node["attributes"] == {
        "keepstep": {"more": 1, "torch_dtype": "float4_e2m1fn_x2"},
        "other": "x",
    }
    assert parse_root(root) == {"model/w": tensor}


def test_a_torch_dtype_that_is_not_known_is_ignored() -> None:
    tensor = replace(
        TENSORS["model/uint8"], attributes={"keepstep": {"torch_dtype": "of a later release"}}
    )
    root = root_of({"model/w": tensor})
    assert parse_root(root) == {"model/w": tensor}


def test_dimensions_have_names_that_arrays_of_a_group_do_not_share() -> None:
    nodes = root_of(TENSORS)["consolidated_metadata"]["metadata"]
    assert nodes["model/bool"]["dimension_names"] == ["bool.0", "bool.1"]
    assert nodes["optim/w/step"]["dimension_names"] == []


def test_the_fill_value_is_zero_where_a_type_has_one() -> None:
    nodes = root_of(TENSORS)["consolidated_metadata"]["metadata"]
    fill_values = {name: nodes[f"model/{name}"]["fill_value"] for name in _NUMPY}
    assert fill_values.pop("float8_e8m0fnu") == "NaN"
    assert fill_values.pop("complex64") == fill_values.pop("complex128") == [0.0, 0.0]
    assert not any(fill_values.values())


def test_the_root_lists_the_parts() -> None:
    assert parse_listings(encode(root_of(TENSORS)), "here") == PARTS


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
    content = root_of(TENSORS)
    change(content["consolidated_metadata"]["metadata"]["model/float32"])
    with pytest.raises(CheckpointDamaged, match="here does not describe model/float32"):
        parse_root(content)


def test_a_tensor_name_outside_the_directory_is_refused_as_damaged() -> None:
    content = root_of(TENSORS)
    nodes = content["consolidated_metadata"]["metadata"]
    nodes["../../etc/x"] = nodes["model/float32"]
    with pytest.raises(CheckpointDamaged, match="cannot be part of a name"):
        parse_root(content)


@pytest.mark.parametrize("change", [{"format": VERSION + 1}, {"required": ["x"]}])
def test_readers_by_way_of_zarr_refuse_what_is_newer(change: dict[str, Any]) -> None:
    metadata = root_of(TENSORS)
    metadata["attributes"]["keepstep"] |= change
    with pytest.raises(CheckpointTooNew, match="here"):
        parse_listings(encode(metadata), "here")
