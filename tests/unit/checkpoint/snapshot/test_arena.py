"""Claims about arenas: which boxes are contiguous, and what a range may be."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.format.layout.boxes import Box, Entry
from keepstep.checkpoint.snapshot.arena import Arena, box_bytes, contiguous_range

ITEMSIZE = 2
BYTE_OFFSET = 6


@st.composite
def entries_and_boxes(draw: st.DrawFn) -> tuple[Entry, Box]:
    """Draw an entry of a part of a tensor, and a box in it."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    origin = tuple(draw(st.integers(0, 3)) for _ in shape)
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    lengths = tuple(draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True))
    outer = Box(origin, shape)
    entry = Entry(
        key="w",
        dtype="int16",
        global_shape=tuple(n + 9 for n in shape),
        box=outer,
        byte_offset=BYTE_OFFSET,
        nbytes=outer.size * ITEMSIZE,
    )
    return entry, Box(tuple(o + s for o, s in zip(origin, start, strict=True)), lengths)


@given(entries_and_boxes())
def test_a_contiguous_range_has_exactly_the_boxs_bytes(drawn: tuple[Entry, Box]) -> None:
    entry, box = drawn
    memory = np.arange(BYTE_OFFSET + entry.nbytes, dtype=np.uint64).astype(np.uint8)
    view = box_bytes(entry, memory, box)
    contiguous = contiguous_range(entry, box)
    assert (contiguous is not None) == view.flags.c_contiguous
    if contiguous is not None:
        offset, count = contiguous
        assert memory[offset : offset + count].tobytes() == view.tobytes()


@pytest.mark.parametrize(("offset", "count"), [(-1, 2), (0, 101), (90, 11), (5, -1)])
def test_a_range_outside_the_buffer_is_rejected(offset: int, count: int) -> None:
    with closing(Arena.create(100)) as arena, pytest.raises(ValueError, match="not in a buffer"):
        arena.range(offset, count)
