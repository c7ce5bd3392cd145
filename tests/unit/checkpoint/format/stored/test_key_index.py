"""Tests of the index of arrays by key: its ranges are right, and what is no index is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.stored.key_index import BlockedJson, ByteRange, KeyIndex, blocks_of
from keepstep.checkpoint.format.stored.stored_json import encode

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\\"), min_size=1, max_size=4)
BLOCKS = st.lists(st.dictionaries(NAMES, st.integers() | st.text(max_size=3), max_size=3))


@given(BLOCKS)
def test_the_bytes_of_a_range_between_braces_are_its_members(
    blocks: list[dict[str, Any]],
) -> None:
    blocks = [{f"{n}{name}": v for name, v in block.items()} for n, block in enumerate(blocks)]
    made = BlockedJson.of(b'{"members":{', blocks, b"}}")
    whole = {name: value for block in blocks for name, value in block.items()}
    assert made.data == encode({"members": whole})
    for block, part in zip(blocks, made.ranges, strict=True):
        members = made.data[part.offset : part.offset + part.nbytes]
        assert json.loads(b"{%b}" % members) == block
        assert crc32c.crc32c(members) == part.crc32c


def index_of(*blocks: list[str]) -> KeyIndex:
    ranges = [ByteRange(10 * number, 9, number) for number in range(len(blocks))]
    return KeyIndex.of(blocks, ranges, [replace(part, nbytes=part.nbytes + 1) for part in ranges])


def test_an_index_round_trips() -> None:
    index = index_of(["model/a", "model/b"], ["optim/a/step"])
    assert KeyIndex.decode(index.encode(), "here") == index
    assert dict(index.numbers) == {"model/a": 0, "model/b": 0, "optim/a/step": 1}
    assert KeyIndex.decode(b"[]", "here").blocks == ()


RANGE = [0, 1, 2]


@pytest.mark.parametrize(
    "content",
    [
        {},
        7,
        [[]],
        [["a", RANGE, RANGE]],
        [[["a"], RANGE]],
        [[["a"], RANGE, RANGE, RANGE]],
        [[[], RANGE, RANGE]],
        [[[7], RANGE, RANGE]],
        [[["a"], RANGE, None]],
        [[["a"], RANGE, [0, 1]]],
        [[["a"], [-1, 1, 2], RANGE]],
        [[["a"], [0, 1.0, 2], RANGE]],
        [[["a"], [0, True, 2], RANGE]],
        [[["a"], [0, 1, 2**32], RANGE]],
        [[["a"], [0, 2**63, 2], RANGE]],
        [[["b", "a"], RANGE, RANGE]],
        [[["a"], RANGE, RANGE], [["a"], RANGE, RANGE]],
        [[["b"], RANGE, RANGE], [["a"], RANGE, RANGE]],
        [[["../a"], RANGE, RANGE]],
        [[["a", "a/b"], RANGE, RANGE]],
        [[["index.json/a"], RANGE, RANGE]],
        [[["a"], RANGE, RANGE], [["b"], RANGE, [1, 1, 2]]],
        [[["a"], RANGE, [1, 1, 2]], [["b"], [1, 1, 2], RANGE]],
    ],
)
def test_what_has_another_form_is_refused_as_damaged(content: Any) -> None:
    with pytest.raises(CheckpointDamaged, match="here is not an index of arrays"):
        KeyIndex.decode(encode(content), "here")


@given(st.lists(st.integers(0, 10**6), max_size=50))
def test_blocks_have_all_keys_in_order_and_are_bounded_by_what_one_key_has(
    counts: list[int],
) -> None:
    keys = [f"{number:03d}" for number in range(len(counts))]
    blocks = blocks_of(keys, lambda key: counts[int(key)])
    assert [key for block in blocks for key in block] == keys
    for block in blocks:
        before_last = sum(900 + 6 * counts[int(key)] for key in block[:-1])
        assert before_last < 2**18
