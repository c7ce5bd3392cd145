"""Claims about the text in which a rank's index lies behind its shard."""

from __future__ import annotations

import math

import pytest

from keepstep.checkpoint.format.layout.boxes import (
    Box,
    Entry,
    decode_index,
    encode_boxes,
    encode_index,
)


def entry(key: str) -> Entry:
    return Entry(
        key=key, dtype="float32", global_shape=(4, 2), box=Box((2, 0), (2, 2)), byte_offset=0,
        nbytes=16,
    )  # fmt: skip


def encoded(nbytes: int, *keys: str) -> bytes:
    return encode_boxes(nbytes, [entry(key) for key in keys])


def test_index_comes_back_as_it_was() -> None:
    documents = {"data": {"lines": "a\nb", "losses": [1.5, math.inf]}, "rank/0/rng": [1, 2]}
    index = decode_index(encode_index(encoded(99, "a", "b"), documents)).index
    assert (index.nbytes, index.entries) == (99, (entry("a"), entry("b")))
    assert index.documents == documents


def test_boxes_that_are_known_are_not_parsed_again() -> None:
    first = decode_index(encode_index(encoded(99, "a"), {"step": 1}))
    alike = decode_index(encode_index(encoded(99, "a"), {"step": 2}), first)
    assert alike.index.entries is first.index.entries
    assert alike.index.documents == {"step": 2}


@pytest.mark.parametrize("changed", [encode_index(encoded(98, "a"), {}),
                                     encode_index(encoded(99, "b"), {})])  # fmt: skip
def test_other_boxes_are_not_taken_for_the_known_ones(changed: bytes) -> None:
    known = decode_index(encode_index(encoded(99, "a"), {}))
    assert decode_index(changed, known) == decode_index(changed)


@pytest.mark.parametrize(
    "text",
    [b"", b"\n", b'{"nbytes": 8, "entries": []}', b"[]\n{}", b'{"nbytes": 8}\n{}', b"{}\n[1]"],
)
def test_other_text_is_no_index(text: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode_index(text)
