"""Pieces of files: bytes that follow each other are one piece, and are copied once for it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

from keepstep.checkpoint.convert.write.pieces_of_files import Elements, Piece, joined
from keepstep.checkpoint.format.layout.boxes import Box
from tests.unit.checkpoint.convert.write.sources import checkpoint_of


def elements(*shape: int) -> Elements:
    boxes = (Box.whole(shape),)
    return Elements(checkpoint_of(is_tied=False), "model/odd.weight", boxes, "float32")


def test_bytes_that_follow_each_other_are_one_piece() -> None:
    first, second, nothing = elements(7, 5), elements(2, 5), elements(0, 5)
    assert joined([]) == ()
    assert joined([nothing]) == ()
    assert joined([b"a", b"", nothing, b"b", first, second, b"c", nothing]) == (
        b"ab", first, second, b"c",
    )  # fmt: skip
    assert joined([first, b"a", b"b"]) == (first, b"ab")


def test_bytes_are_copied_once_all_that_follow_each_other_are_known() -> None:
    """Each was added to a copy of all before it."""
    values = [bytes([number % 251]) * 1100 for number in range(2000)]
    held_nbytes: list[int] = []

    def pieces() -> Iterator[Piece]:
        before, _ = tracemalloc.get_traced_memory()
        yield from values
        held_nbytes.append(tracemalloc.get_traced_memory()[0] - before)

    tracemalloc.start()
    try:
        result = joined(pieces())
    finally:
        tracemalloc.stop()
    assert result == (b"".join(values),)
    # References to the pieces, and no copy of their bytes.
    assert held_nbytes[0] < len(result[0]) // 20
