"""Claims about checksums of pieces: joined, they are the checksum of the whole."""

from __future__ import annotations

import crc32c
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.layout.joined_checksums import joined_crc32c


@given(data=st.binary(max_size=3000), nbytes=st.integers(1, 700))
def test_checksums_of_pieces_join_to_that_of_the_whole(data: bytes, nbytes: int) -> None:
    count = len(data) // nbytes
    pieces = [data[nbytes * number : nbytes * (number + 1)] for number in range(count)]
    whole = crc32c.crc32c(data[: nbytes * count])
    assert joined_crc32c([crc32c.crc32c(piece) for piece in pieces], nbytes) == whole


def test_no_pieces_are_no_bytes() -> None:
    assert joined_crc32c([], 5) == crc32c.crc32c(b"")
