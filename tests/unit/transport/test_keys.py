"""Claims about the tags that a connection's keys give."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.transport.keys import GmacKey, Purpose

KEY = bytes(range(32))


@given(st.binary(max_size=300), st.integers(0, 300), st.integers(0, 2**64 - 1))
def test_a_tag_is_the_same_whether_the_data_comes_whole_or_in_parts(
    data: bytes, cut: int, sequence: int
) -> None:
    key = GmacKey(KEY)
    whole = key.tag(Purpose.HEAD, sequence, data)
    in_parts = key.begin(Purpose.HEAD, sequence)
    in_parts.update(data[:cut])
    in_parts.update(data[cut:])
    assert in_parts.is_tag(whole)


def test_tags_differ_by_key_purpose_sequence_and_data() -> None:
    key, other = GmacKey(KEY), GmacKey(KEY[::-1])
    tags = {
        key.tag(Purpose.HEAD, 1, b"data"),
        other.tag(Purpose.HEAD, 1, b"data"),
        key.tag(Purpose.PAYLOAD, 1, b"data"),
        key.tag(Purpose.HEAD, 2, b"data"),
        key.tag(Purpose.HEAD, 1, b"Data"),
    }
    assert len(tags) == 5
