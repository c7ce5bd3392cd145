"""Tests of listings: one read from storage conforms to the format or is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.stored.listings import (
    ChunkObject,
    Pack,
    PackedChunk,
    decode_chunk_parts,
    decode_part,
    encode_chunk_parts,
    encode_numbers,
    encode_part,
)
from keepstep.checkpoint.format.stored.stored_json import encode

CHECKSUMS = st.lists(st.integers(0, 2**32 - 1), max_size=5).map(encode_numbers)


@given(st.lists(st.tuples(st.integers(0, 9), CHECKSUMS, CHECKSUMS)), st.lists(CHECKSUMS))
def test_a_part_round_trips(chunks: list[tuple[int, bytes, bytes]], packed: list[bytes]) -> None:
    objects = (
        *(ChunkObject(f"model/w/c.{n}", n, checksums, sizes) for n, checksums, sizes in chunks),
        Pack(
            "packs/000000-0000",
            7,
            tuple(PackedChunk("model/b", (n,), checksums) for n, checksums in enumerate(packed)),
        ),
    )
    assert decode_part(encode_part(objects), "here") == objects


@pytest.mark.parametrize(
    "listing",
    [
        [["a/c.0", 1, "AAA"]],
        [["a/c.0", 1, "AAAA"]],
        [["a/c.0", 1, "!!!!AAAA"]],
        [["a/c.0", 1, 7]],
        [["a/c.0", -1, "AAAAAA=="]],
        [["a/c.0", 1, [2**32]]],
        [["a/c.0", 1, "AAAAAA==", 7]],
        [["a/c.0", 1, "AAAAAA==", "AAA="]],
        [["a/c.0", 1, "AAAAAA==", "AAAAAA==", ""]],
        [["packs/0", 1, [], "AAAAAA=="]],
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
