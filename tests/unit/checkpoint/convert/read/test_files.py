"""Ranges of files are read once, into memory of their own size."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from tests.unit.checkpoint.convert.read.written import extent_of


def test_bytes_are_in_memory_once(tmp_path: Path) -> None:
    nbytes = 2**24
    extent = extent_of(tmp_path, bytes([7]) * nbytes).part(1, nbytes - 2)
    tracemalloc.start()
    content = extent.read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert type(content) is bytes
    assert content == bytes([7]) * (nbytes - 2)
    assert peak < 1.25 * nbytes
