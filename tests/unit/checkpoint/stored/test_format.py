"""What is read from outside is either exactly as the format has it, or refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.layout.dtypes import _NUMPY
from keepstep.checkpoint.stored.chunking import StoredTensor
from keepstep.checkpoint.stored.format import (
    Manifest,
    StoredObject,
    StoredStep,
    encode,
    parse_root,
    root_metadata,
)

TENSORS = {f"model/{name}": StoredTensor(name, (5, 3), (2, 3), (2, 3), True) for name in _NUMPY} | {
    f"large/{name}": StoredTensor(name, (5, 3), (4, 3), (2, 3), False) for name in _NUMPY
} | {
    "optim/w/step": StoredTensor("float32", (), (), (), True),
    "model/empty": StoredTensor("float32", (0, 3), (1, 3), (1, 3), True),
}  # fmt: skip


def test_metadata_round_trips_for_every_data_type() -> None:
    assert parse_root(encode(root_metadata(7, 1, TENSORS)), "here") == TENSORS


def test_a_manifest_round_trips() -> None:
    manifest = Manifest(
        7, 2, (StoredObject("parts/000000.json", 10, 2**32 - 1), StoredObject("zarr.json", 3, 0))
    )
    assert Manifest.decode(manifest.encode(), "here") == manifest


@given(st.integers(0, 10**8 - 1), st.integers(0, 10**6 - 1))
def test_a_directory_means_one_step_and_generation(step: int, generation: int) -> None:
    assert StoredStep.parse(StoredStep(step, generation).directory) == StoredStep(step, generation)


@pytest.mark.parametrize(
    "name", ["step-1-2", "step-00000001-000002x", "other", "step-00000001", ""]
)
def test_other_directories_mean_none(name: str) -> None:
    assert StoredStep.parse(name) is None


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
        lambda node: node.pop("shape"),
    ],
)
def test_array_metadata_of_another_kind_is_damage_and_names_the_tensor(change: Any) -> None:
    content = copy.deepcopy(root_metadata(7, 1, TENSORS))
    change(content["consolidated_metadata"]["metadata"]["model/float32"])
    with pytest.raises(CheckpointDamaged, match="here is not a checkpoint's root metadata"):
        parse_root(encode(content), "here")


def test_a_tensor_name_that_leaves_the_directory_is_damage() -> None:
    content = root_metadata(7, 1, TENSORS)
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
        json.dumps({"format": 99, "step": 1, "generation": 0, "objects": []}).encode(),
        json.dumps({"format": 1, "step": "1", "generation": 0, "objects": []}).encode(),
        json.dumps({"format": 1, "step": 1, "generation": 0, "objects": [["a", 1]]}).encode(),
        json.dumps({"format": 1, "step": 1, "generation": 0, "objects": [["../a", 1, 2]]}).encode(),
        json.dumps({"format": 1, "step": 1, "generation": 0, "objects": [["a", -1, 2]]}).encode(),
    ],
)
def test_a_manifest_of_another_kind_is_damage(content: bytes) -> None:
    with pytest.raises(CheckpointDamaged):
        Manifest.decode(content, "here")
