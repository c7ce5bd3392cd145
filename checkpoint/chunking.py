"""Which chunks a stored tensor has, and who writes each: the storage side of a layout.

Pure. Zarr chunks form a regular grid, so the grid is chosen to follow the shards: FSDP's split of a dimension (pieces of ceil(n / ranks), the last
smaller) *is* a regular grid, and so is a tensor-parallel split of another dimension. Where shards form no grid, a grid of about their size is
laid over them, and a chunk's writer collects the pieces that others hold.

Every chunk has exactly one writer, chosen among those who hold it, the one with the least to write so far: replicas are written once, and the
work is balanced. All ranks compute the same plan from the same indexes.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from checkpoint.dtypes import numpy_dtype
from checkpoint.layout import Box, Entry, ShardIndex

CHUNK_NBYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it will be stored: its data type, shape, and the shape of its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk: its place in the grid and the box it covers (cut off at the tensor's edge)."""

    key: str
    place: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """All tensors, and for each writer (position in the list of indexes) its chunks."""

    tensors: dict[str, StoredTensor]
    chunks: tuple[tuple[Chunk, ...], ...]


def plan_chunks(indexes: Sequence[ShardIndex]) -> ChunkPlan:
    """Plan how the state that these holders have together is stored. Deterministic."""
    holders: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
    for holder, index in enumerate(indexes):
        for entry in index.entries:
            holders[entry.key].append((holder, entry))
    tensors: dict[str, StoredTensor] = {}
    load = [0] * len(indexes)
    chunks: list[list[Chunk]] = [[] for _ in indexes]
    # Large tensors first: what is small then evens out the load.
    for key in sorted(holders, key=lambda k: (-max(e.nbytes for _, e in holders[k]), k)):
        held = holders[key]
        first = held[0][1]
        shape, itemsize = first.global_shape, numpy_dtype(first.dtype).itemsize
        grid = chunk_shape(shape, [entry.box for _, entry in held], itemsize)
        tensors[key] = StoredTensor(first.dtype, shape, grid)
        for chunk in chunks_of(key, shape, grid):
            writer = _choose(chunk, held, load)
            load[writer] += chunk.box.size * itemsize
            chunks[writer].append(chunk)
    return ChunkPlan(tensors, tuple(tuple(mine) for mine in chunks))


def chunk_shape(shape: Sequence[int], boxes: Sequence[Box], itemsize: int) -> tuple[int, ...]:
    """Return the chunks' shape that follows the boxes best, with chunks of at most about `CHUNK_NBYTES`."""
    chunk = []
    present = [box for box in boxes if box.size]
    for axis, extent in enumerate(shape):
        starts = sorted({box.offset[axis] for box in present if box.offset[axis] > 0})
        step = math.gcd(*starts) if starts else extent
        longest = max((box.shape[axis] for box in present), default=extent)
        # Boundaries without a useful common step: chunks of the shards' size, put together by their writers.
        chunk.append(max(1, step if step * 4 >= longest else longest))
    axis = 0
    while math.prod(chunk) * itemsize > CHUNK_NBYTES and axis < len(chunk):
        rest = math.prod(chunk[axis + 1 :]) * itemsize * math.prod(chunk[:axis])
        wanted = max(1, CHUNK_NBYTES // rest)
        # A divisor keeps chunk boundaries on shard boundaries.
        chunk[axis] = next(n for n in range(min(wanted, chunk[axis]), 0, -1) if chunk[axis] % n == 0)
        axis += 1
    return tuple(chunk)


def chunks_of(key: str, shape: Sequence[int], grid: Sequence[int]) -> list[Chunk]:
    """Return every chunk of a tensor, in C order. A tensor without elements has none."""
    counts = [-(-extent // step) if step else 0 for extent, step in zip(shape, grid, strict=True)]
    found = []
    for place in itertools.product(*(range(count) for count in counts)):
        offset = tuple(p * step for p, step in zip(place, grid, strict=True))
        extents = tuple(
            min(step, extent - o) for step, extent, o in zip(grid, shape, offset, strict=True)
        )
        found.append(Chunk(key, place, Box(offset, extents)))
    return found


def _choose(chunk: Chunk, held: Sequence[tuple[int, Entry]], load: Sequence[int]) -> int:
    """Return the holder of most of the chunk; among equals the one with the least to write."""
    best: dict[int, int] = defaultdict(int)
    for holder, entry in held:
        common = chunk.box.intersect(entry.box)
        best[holder] += common.size if common else 0
    return min(best, key=lambda holder: (-best[holder], load[holder], holder))
