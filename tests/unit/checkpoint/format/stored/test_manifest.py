"""Tests of manifests: one read from storage conforms to the format or is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointTooNew
from keepstep.checkpoint.format.stored.manifest import (
    COMPRESSED_CELLS,
    VERSION,
    Manifest,
    StoredObject,
)
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.stored_json import encode

PARTS = (StoredObject("parts/000000.json", 10, 2**32 - 1), StoredObject("parts/000001.json", 3, 0))


def with_checksum(content: dict[str, Any]) -> bytes:
    return encode({**content, "crc32c": crc32c.crc32c(encode(content))})


def test_a_manifest_round_trips() -> None:
    manifest = Manifest(
        7,
        2,
        "90f3c1",
        (StoredObject("parts/000000.json", 10, 2**32 - 1), StoredObject("zarr.json", 3, 0)),
    )
    assert Manifest.decode(manifest.encode(), "here") == manifest


def test_a_manifest_of_format_1_names_the_directory_of_the_step() -> None:
    content = {"format": 1, "step": 7, "generation": 2, "objects": [["zarr.json", 3, 0]]}
    manifest = Manifest.decode(encode(content), "here")
    assert manifest == Manifest(7, 2, None, (StoredObject("zarr.json", 3, 0),))
    assert manifest.directory == StoredStep(7, 2).directory


@given(st.data())
def test_a_manifest_in_which_a_bit_was_flipped_is_refused_as_damaged(data: st.DataObject) -> None:
    manifest = Manifest(7, 2, "90f3c1", (*PARTS, StoredObject("zarr.json", 3, 0)))
    encoded = bytearray(manifest.encode())
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CheckpointDamaged, match="here is not"):
        Manifest.decode(bytes(encoded), "here")


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
    manifest = replace(Manifest(7, 2, "a", PARTS), required=(COMPRESSED_CELLS, "x", "y"))
    with pytest.raises(CheckpointTooNew, match="here requires 'x', 'y', which this"):
        Manifest.decode(manifest.encode(), "here")


def test_members_that_are_not_known_are_ignored() -> None:
    content = json.loads(Manifest(7, 2, "a", PARTS).encode())
    del content["crc32c"]
    manifest = Manifest.decode(with_checksum({**content, "written_by": "a later release"}), "here")
    assert manifest == Manifest(7, 2, "a", PARTS)


def test_a_manifest_that_lists_an_object_twice_is_refused_as_damaged() -> None:
    with pytest.raises(CheckpointDamaged, match="lists an object twice"):
        Manifest.decode(Manifest(7, 2, "a", (*PARTS, PARTS[0])).encode(), "here")
