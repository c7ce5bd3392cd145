"""Which chunks a stored tensor has, and who writes each: the storage side of a layout.

Pure. Zarr chunks form a regular grid, so the grid is chosen to follow the shards: FSDP's split of a dimension
(pieces of ceil(n / ranks), the last smaller) *is* a regular grid, and so is a tensor-parallel split of
another dimension. Where shards form no grid, one of about their size is laid over them, and a chunk's writer
collects the pieces that others hold.

Every chunk has exactly one writer, chosen among those who hold most of it, the one with the least to write so
far: replicas are written once, and the work is balanced. All ranks compute the same plan from the same
indexes, at a cost linear in entries and in the overlaps of chunks with shards.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkpoint.dtypes import numpy_dtype
from checkpoint.errors import LayoutMismatch
from checkpoint.layout import Box, Entry, ShardIndex
from checkpoint.names import check_keys

CHUNK_NBYTES = 64 * 2**20

# A common step of the shards' boundaries is followed if it cuts the longest shard into at most this many
# pieces; for the same reason a chunk may be this much smaller than CHUNK_NBYTES to keep its edges on shard
# boundaries.
_MOST_PIECES = 4


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
    """Plan how the state that these holders have together is stored. Deterministic.

    Raises:
        LayoutMismatch: holders disagree about a tensor, part of one is held by nobody, or a name cannot be
            stored.
    """
    holders: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
    for holder, index in enumerate(indexes):
        for entry in index.entries:
            holders[entry.key].append((holder, entry))
    try:
        check_keys(holders)
    except ValueError as error:
        raise LayoutMismatch(f"{error}; rename it in the state to save") from error
    tensors: dict[str, StoredTensor] = {}
    load = [0] * len(indexes)
    chunks: list[list[Chunk]] = [[] for _ in indexes]
    # Large tensors first: what is small then evens out the load.
    for key in sorted(holders, key=lambda k: (-max(e.nbytes for _, e in holders[k]), k)):
        held = holders[key]
        shape, dtype = _agreed(key, held)
        itemsize = numpy_dtype(dtype).itemsize
        grid = chunk_shape(shape, [entry.box for _, entry in held], itemsize)
        tensors[key] = StoredTensor(dtype, shape, grid)
        shares = _shares(shape, grid, held)
        for chunk in chunks_over(key, shape, grid, Box.whole(shape)):
            share = shares.get(chunk.place)
            if share is None:
                raise LayoutMismatch(
                    f"{key}: no rank holds elements at offset {chunk.box.offset}, shape {chunk.box.shape}; "
                    "every rank must save its part"
                )
            writer = min(share, key=lambda holder: (-share[holder], load[holder], holder))
            load[writer] += chunk.box.size * itemsize
            chunks[writer].append(chunk)
    return ChunkPlan(tensors, tuple(tuple(mine) for mine in chunks))


def chunk_shape(shape: Sequence[int], boxes: Sequence[Box], itemsize: int) -> tuple[int, ...]:
    """Return the shape of the chunks that follow the boxes best, of at most `CHUNK_NBYTES` where possible.

    Every number is at least 1, also where the tensor has no elements.
    """
    chunk, is_split = [], []
    present = [box for box in boxes if box.size]
    for axis, extent in enumerate(shape):
        edges = {box.offset[axis] for box in present} | {box.offset[axis] + box.shape[axis] for box in present}
        inner = edges - {0, extent}
        step = math.gcd(*inner) if inner else extent
        longest = max((box.shape[axis] for box in present), default=extent)
        chunk.append(max(1, step if step * _MOST_PIECES >= longest else longest))
        is_split.append(bool(inner))
    for axis, extent in enumerate(shape):
        excess = math.prod(chunk) * itemsize / CHUNK_NBYTES
        if excess <= 1:
            break
        wanted = max(1, int(chunk[axis] / excess))
        if is_split[axis]:
            # A divisor keeps chunk edges on shard edges; if there is no good one, the next dimension is cut.
            divisors = (n for n in range(wanted, wanted // _MOST_PIECES, -1) if chunk[axis] % n == 0)
            chunk[axis] = next(divisors, chunk[axis])
        else:
            chunk[axis] = -(-extent // -(-extent // wanted))
    return tuple(chunk)


def chunks_over(key: str, shape: Sequence[int], grid: Sequence[int], box: Box) -> Iterator[Chunk]:
    """Yield the chunks that share elements with a box, in C order; none for an empty box."""
    if box.size == 0:
        return
    ranges = [
        range(start // step, -(-(start + extent) // step))
        for start, extent, step in zip(box.offset, box.shape, grid, strict=True)
    ]
    for place in itertools.product(*ranges):
        offset = tuple(number * step for number, step in zip(place, grid, strict=True))
        extents = tuple(min(step, whole - o) for step, whole, o in zip(grid, shape, offset, strict=True))
        yield Chunk(key, place, Box(offset, extents))


def _agreed(key: str, held: Sequence[tuple[int, Entry]]) -> tuple[tuple[int, ...], str]:
    """Return the shape and data type of a tensor on which all its holders agree."""
    rank, first = held[0]
    for other, entry in held:
        if (entry.global_shape, entry.dtype) != (first.global_shape, first.dtype):
            raise LayoutMismatch(
                f"{key}: rank {rank} has {first.dtype} {first.global_shape}, rank {other} has "
                f"{entry.dtype} {entry.global_shape}; are they running the same model?"
            )
    return first.global_shape, first.dtype


def _shares(
    shape: Sequence[int], grid: Sequence[int], held: Sequence[tuple[int, Entry]]
) -> dict[tuple[int, ...], dict[int, int]]:
    """Return, for every chunk that anybody holds part of, the number of its elements that each holder has."""
    shares: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for holder, entry in held:
        for chunk in chunks_over(entry.key, shape, grid, entry.box):
            common = chunk.box.intersect(entry.box)
            assert common is not None, "a chunk over a box shares elements with it"
            shares[chunk.place][holder] += common.size
    return shares
