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
from keepstep.checkpoint.format.stored.stored_json import encode

PARTS = (StoredObject("parts/000000.json", 10, 2**32 - 1), StoredObject("parts/000001.json", 3, 0))


def with_checksum(content: dict[str, Any]) -> bytes:
    return encode({**content, "crc32c": crc32c.crc32c(encode(content))})


CONTENT = {
    "format": VERSION, "required": [], "step": 1, "generation": 0, "attempt": "a", "objects": [],
}  # fmt: skip


def changed(**members: Any) -> bytes:
    """Return a manifest with other members, and a checksum that matches them."""
    return with_checksum({**CONTENT, **members})


def test_the_manifest_that_others_are_changed_from_is_one() -> None:
    assert Manifest.decode(changed(), "here") == Manifest(1, 0, "a", ())


def test_a_manifest_round_trips() -> None:
    manifest = Manifest(
        7,
        2,
        "90f3c1",
        (StoredObject("parts/000000.json", 10, 2**32 - 1), StoredObject("zarr.json", 3, 0)),
    )
    assert Manifest.decode(manifest.encode(), "here") == manifest


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
        changed(format=0),
        changed(format="1"),
        changed(format=True),
        changed(step="1"),
        changed(objects=[["a", 1]]),
        changed(objects=[["../a", 1, 2]]),
        changed(objects=[["a", -1, 2]]),
        changed(attempt="../x"),
        changed(attempt=7),
        changed(attempt=None),
        changed(required=[7]),
        changed(required=None),
        encode(CONTENT),
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
