"""Planner of the chunks of stored tensors: their shapes, their writers, and their cells.

Pure. Zarr chunks form a regular grid, so the grid is chosen to follow the shards: FSDP's split of a
dimension (pieces of ceil(n / ranks), the last smaller) *is* a regular grid, and so is a
tensor-parallel split of another dimension. Where shards form no grid, the chunks have about the
shards' size, and a chunk's writer collects the pieces that other ranks hold.

A chunk is cut into cells, blocks that have a checksum each, so that a reader that needs some rows
or columns reads and verifies little more than these. Many ranks' small shards of a large tensor
make one chunk, which is an object; small tensors are one chunk each and share objects, called
packs. So the number of objects grows with the bytes, neither with the ranks nor with the tensors.

Every chunk has exactly one writer: among the ranks that hold most of it, the one with the least to
write so far. So replicas are written once, and the work is balanced. All ranks compute the same
plan from the same indexes, at a cost linear in entries and in the overlaps of chunks with shards.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, get_args

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box, Entry, Json, ShardIndex
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.integers import ceil_div, round_up
from keepstep.checkpoint.format.layout.names import check_keys
from keepstep.checkpoint.format.layout.planner import subtract

CHUNK_NBYTES = 64 * 2**20
"""The largest size of a chunk, where its shard can be cut so."""

PACKED_NBYTES = 2**20
"""A tensor below this size goes into a pack; the chunks of any other have at least this size."""

PACK_NBYTES = 64 * 2**20
"""A pack is closed once it is this large."""

CELL_NBYTES = (32 * 2**10, 2**20)
"""The smallest and the largest size of a cell, where the chunk's extents have such divisors."""

Compression: TypeAlias = Literal["zstd"]
"""How cells may be compressed."""

COMPRESSED_CELL_NBYTES = 64 * 2**20
"""The largest size of a cell that is compressed: readers need memory for all of it at once."""

_COMPRESSED_AT_ONCE = 128 * 2**10
"""The block for which zstd chooses one code. The bytes of a cell that tell the exponents should
fill it."""

_CELLS_PER_CHUNK = 32

_COLUMN_CUTS = 8
"""The most pieces that a row is cut into: the usual tensor-parallel degree within a node."""

SEGMENT_NBYTES = 256
"""The smallest piece of a row: to gather shorter pieces would cost more than to copy them."""

# Chunks follow the greatest common divisor of the shards' boundaries if this cuts the longest shard
# into at most this many pieces; for the same reason a chunk may be this many times smaller than
# CHUNK_NBYTES to keep its edges on shard boundaries.
_MOST_PIECES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as stored: data type, shape, and the shapes of its chunks and of their cells.

    The cells of a chunk lie one after the other: in an object of its own, or in a pack.
    `attributes` are those of the array's metadata, which tell what the tensor means (FORMAT.md).
    `compression` is that of the cells; None: they are not compressed.
    """

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    cell: tuple[int, ...]
    is_packed: bool
    attributes: Mapping[str, Json] = field(default_factory=dict)
    compression: Compression | None = None

    @property
    def cell_nbytes(self) -> int:
        """Size of a cell's payload, also at the tensor's edges, where it is padded."""
        return math.prod(self.cell) * numpy_dtype(self.dtype).itemsize

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each dimension."""
        return tuple(ceil_div(n, step) for n, step in zip(self.shape, self.chunk, strict=True))

    def position_of(self, place: Sequence[int]) -> int:
        """Return the number of a chunk in C order, by its place in the grid."""
        position = 0
        for number, count in zip(place, self.grid, strict=True):
            position = position * count + number
        return position


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk: its place in the grid and the box it covers (cut off at the tensor's edge)."""

    key: str
    place: tuple[int, ...]
    box: Box


class Cell(NamedTuple):
    """One cell: its number within its chunk, in C order, and its place in the grid of all cells."""

    number: int
    place: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a chunk, and which of the ranks holds it, by its position among the indexes."""

    holder: int
    box: Box


@dataclass(frozen=True, slots=True)
class PlannedChunk(Chunk):
    """A chunk to write; `pieces` make it up, and are empty if one shard of the writer has it."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """All tensors, and the chunks of each writer, by its position in the list of indexes."""

    tensors: dict[str, StoredTensor]
    chunks: tuple[tuple[PlannedChunk, ...], ...]

    def chunk_parts(self) -> dict[str, list[int]]:
        """Return, for each tensor, the number of each chunk's writer, in C order."""
        numbers = {key: [0] * math.prod(tensor.grid) for key, tensor in self.tensors.items()}
        for writer, chunks in enumerate(self.chunks):
            for chunk in chunks:
                numbers[chunk.key][self.tensors[chunk.key].position_of(chunk.place)] = writer
        return numbers


def plan_chunks(
    indexes: Sequence[ShardIndex],
    *,
    within_shards: bool = False,
    first_writer: int = 0,
    compression: Compression | None = None,
) -> ChunkPlan:
    """Plan how the state that these ranks hold together is stored. Deterministic.

    Args:
        indexes: what each rank holds.
        within_shards: cut chunks, however small, so that none needs the pieces of two ranks; for
            ranks that cannot exchange pieces.
        first_writer: which rank is taken first where several could write a chunk as well.
        compression: how cells are compressed, except those in packs; None: not at all.

    Raises:
        LayoutMismatch: ranks disagree about a tensor, no rank holds part of one, or a name cannot
            be stored.
    """
    holders: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
    for holder, index in enumerate(indexes):
        for entry in index.entries:
            holders[entry.key].append((holder, entry))
    check_storable(holders)
    tensors: dict[str, StoredTensor] = {}
    load = [0] * len(indexes)
    chunks: list[list[PlannedChunk]] = [[] for _ in indexes]
    # Large tensors first: the small ones then even out the load.
    for key in sorted(holders, key=lambda k: (-max(e.nbytes for _, e in holders[k]), k)):
        shards = holders[key]
        shape, dtype = _common_shape_and_dtype(key, shards)
        itemsize = numpy_dtype(dtype).itemsize
        grid = chunk_shape(
            shape, [entry.box for _, entry in shards], itemsize, within_shards=within_shards
        )
        tensors[key] = stored_tensor(dtype, shape, grid, compression)
        held = _held_by_chunk(shape, grid, shards)
        for chunk in chunks_over(key, shape, grid, Box.whole(shape)):
            parts = held.get(chunk.place, ())
            share: dict[int, int] = defaultdict(int)
            for part in parts:
                share[part.holder] += part.box.size
            writer = min(
                share,
                key=lambda holder: (
                    -share[holder],
                    load[holder],
                    (holder - first_writer) % len(indexes),
                ),
                default=0,
            )
            pieces = _pieces(chunk, writer, parts, len(indexes))
            load[writer] += chunk.box.size * itemsize
            chunks[writer].append(PlannedChunk(chunk.key, chunk.place, chunk.box, pieces))
    return ChunkPlan(tensors, tuple(tuple(own_chunks) for own_chunks in chunks))


def check_storable(keys: Collection[str]) -> None:
    """Check that tensors of these keys can be stored together.

    Raises:
        LayoutMismatch: a name cannot be stored, or lies inside another tensor's.
    """
    try:
        check_keys(keys)
    except ValueError as error:
        raise LayoutMismatch(f"{error}; rename it in the state to save") from error


def check_compression(compression: str | None) -> None:
    """Check that cells can be compressed so.

    Raises:
        ValueError: they cannot.
    """
    if compression is not None and compression not in get_args(Compression):
        choices = ", ".join(map(repr, get_args(Compression)))
        raise ValueError(f"compression={compression!r}: give {choices}, or None")


def stored_tensor(
    dtype: str,
    shape: tuple[int, ...],
    chunk: tuple[int, ...],
    compression: Compression | None = None,
) -> StoredTensor:
    """Return how a tensor with chunks of this shape is stored.

    Small cells gain little by compression, and packs are read without knowing their cells' sizes.
    """
    itemsize = numpy_dtype(dtype).itemsize
    # A tensor without elements has no chunk that would be an object.
    is_packed = math.prod(chunk) * itemsize < PACKED_NBYTES or 0 in shape
    cell = cell_shape(chunk, itemsize, is_compressed=compression is not None)
    is_compressed = not is_packed and math.prod(cell) * itemsize <= COMPRESSED_CELL_NBYTES
    return StoredTensor(
        dtype=dtype,
        shape=shape,
        chunk=chunk,
        cell=cell,
        is_packed=is_packed,
        compression=compression if is_compressed else None,
    )


def cell_shape(
    chunk: Sequence[int], itemsize: int, *, is_compressed: bool = False
) -> tuple[int, ...]:
    """Return the shape of a chunk's cells, which divide it evenly.

    The last dimension (a row) is cut into up to `_COLUMN_CUTS` pieces, of no less than
    `SEGMENT_NBYTES` each, and into no more pieces than the dimensions before it together. So what
    is saved by rows can be read by columns, and rows can still be halved and quartered. The
    dimensions before it are then cut one after the other, until cells have the wanted size. Powers
    of two are preferred: halves and quarters of a shard then end where cells end.

    Args:
        chunk: shape of the chunk, in elements.
        itemsize: bytes of an element.
        is_compressed: the cells are compressed; small ones would hardly shrink.
    """
    least, most = CELL_NBYTES
    if is_compressed:
        least = min(_COMPRESSED_AT_ONCE * itemsize, most)
    nbytes = math.prod(chunk) * itemsize
    wanted = min(max(nbytes // _CELLS_PER_CHUNK, least), most)
    cell = list(chunk)
    if len(chunk) > 1:
        cell[-1] //= _column_cuts(chunk[-1], itemsize, nbytes // wanted)
    for axis, extent in enumerate(cell):
        nbytes = math.prod(cell) * itemsize
        if nbytes <= wanted:
            break
        inner = nbytes // extent
        if inner >= wanted:
            cell[axis] = 1
            continue
        count = _power_of_two(nbytes // wanted)
        while extent % count:
            count //= 2
        if count * 4 < nbytes // wanted:
            count = _divisor_near(extent, nbytes / wanted)
        cell[axis] = extent // count
        break
    return tuple(cell)


def _column_cuts(extent: int, itemsize: int, cells: int) -> int:
    """Return the number of pieces that a row is cut into.

    Args:
        extent: elements of the row.
        itemsize: bytes of an element.
        cells: the wanted number of cells in the chunk.
    """
    if extent * itemsize < 2 * SEGMENT_NBYTES or cells < 2:
        return 1
    # Half of the powers of two that `cells` consists of, rounded up, go to the row.
    count = min(
        _COLUMN_CUTS,
        1 << cells.bit_length() // 2,
        _power_of_two(extent * itemsize // SEGMENT_NBYTES),
    )
    while extent % count:
        count //= 2
    return count


def _power_of_two(limit: int) -> int:
    """Return the largest power of two that is not above `limit`, at least 1."""
    return 1 << max(0, limit.bit_length() - 1)


def _divisor_near(number: int, wanted: float) -> int:
    """Return the divisor nearest to `wanted` by ratio, within a factor of 4; 1 if there is none."""
    near = range(int(wanted / 4) or 1, min(number, int(wanted * 4)) + 1)
    divisors = [n for n in near if number % n == 0]
    return min(divisors, key=lambda n: abs(math.log(n / wanted)), default=1)


def cells_over(tensor: StoredTensor, chunk: Chunk, box: Box) -> Iterator[Cell]:
    """Yield the cells of a chunk that share elements with a box, in C order."""
    common = chunk.box.intersect(box)
    if common is None:
        return
    ranges = [
        range(start // cell, ceil_div(start + extent, cell))
        for start, extent, cell in zip(common.offset, common.shape, tensor.cell, strict=True)
    ]
    per_chunk = [extent // cell for extent, cell in zip(tensor.chunk, tensor.cell, strict=True)]
    for place in itertools.product(*ranges):
        number = 0
        # Neither a check of lengths nor Box objects: this runs once for every cell that is read.
        for position, count in zip(place, per_chunk):  # noqa: B905
            number = number * count + position % count
        yield Cell(number, place)


def chunk_shape(
    shape: Sequence[int], boxes: Sequence[Box], itemsize: int, *, within_shards: bool = False
) -> tuple[int, ...]:
    """Return the chunk shape that follows the shards best, of at most `CHUNK_NBYTES` if possible.

    Every extent is at least 1, also where the tensor has no elements.

    Args:
        shape: global shape of the tensor.
        boxes: its shards.
        itemsize: bytes of an element.
        within_shards: as for `plan_chunks`.
    """
    chunk, is_split = [], []
    present = [box for box in boxes if box.size]
    for axis, extent in enumerate(shape):
        edges = {box.offset[axis] for box in present} | {
            box.offset[axis] + box.shape[axis] for box in present
        }
        inner = edges - {0, extent}
        step = math.gcd(*inner) if inner else extent
        longest = max((box.shape[axis] for box in present), default=extent)
        follows = within_shards or step * _MOST_PIECES >= longest
        chunk.append(max(1, step if follows else longest))
        is_split.append(bool(inner))
    for axis, extent in enumerate(shape):
        excess = math.prod(chunk) * itemsize / CHUNK_NBYTES
        if excess <= 1:
            break
        if extent == 0:
            continue  # A tensor without elements has no chunks, whatever their shape.
        wanted = max(1, int(chunk[axis] / excess))
        if is_split[axis]:
            # A divisor keeps chunk edges on shard edges; if none fits, the next dimension is cut.
            chunk[axis] = _divisor(chunk[axis], wanted) or chunk[axis]
        else:
            pieces = ceil_div(extent, wanted)
            power_of_two = 1 << (pieces - 1).bit_length()
            # Halves and quarters of the tensor then end where chunks end.
            chunk[axis] = ceil_div(extent, pieces if extent % power_of_two else power_of_two)
    if not within_shards:
        _grow(chunk, shape, itemsize)
    excess = math.prod(chunk) * itemsize / CHUNK_NBYTES
    if excess > 1 and 0 not in shape:
        # No dimension could be cut so that chunks end on shard edges. A chunk without limit would
        # exceed what an object store takes at once (5 GiB), and the writers' memory.
        axis = max(range(len(chunk)), key=lambda axis: chunk[axis])
        chunk[axis] = _cut(chunk[axis], excess, itemsize * math.prod(chunk), within_shards)
    if shape and not is_split[0]:
        # A vocabulary's prime number of rows would be one indivisible cell; a chunk may reach over
        # the tensor's edge.
        cells = _power_of_two(math.prod(chunk) * itemsize // CELL_NBYTES[1])
        if cells * _CELLS_PER_CHUNK <= chunk[0]:
            chunk[0] = round_up(chunk[0], cells)
    return tuple(chunk)


def _divisor(extent: int, wanted: int) -> int | None:
    """Return the greatest divisor up to `wanted`; None if that is a fourth of it or less."""
    # Pieces are few where the extent's divisors may be any of millions.
    for pieces in itertools.count(ceil_div(extent, wanted)):
        divisor = extent // pieces
        if divisor <= wanted // _MOST_PIECES:
            return None
        if extent % pieces == 0:
            return divisor
    raise AssertionError("pieces become as many as elements")


def _grow(chunk: list[int], shape: Sequence[int], itemsize: int) -> None:
    """Let a chunk cover more shards, until it has `PACKED_NBYTES`, or all of the tensor.

    The last dimensions first: tensor parallelism splits them, and its ranks are near each other.
    """
    for axis in range(len(chunk) - 1, -1, -1):
        nbytes = math.prod(chunk) * itemsize
        if nbytes >= PACKED_NBYTES or nbytes == 0:
            return
        if chunk[axis] < shape[axis]:
            wanted = chunk[axis] * ceil_div(PACKED_NBYTES, nbytes)
            # A little more is better than a small rest at the edge.
            chunk[axis] = shape[axis] if wanted * 2 > shape[axis] else wanted


def _cut(extent: int, excess: float, nbytes: int, within_shards: bool) -> int:
    """Return a chunk's extent, cut so that the chunk has `CHUNK_NBYTES` at most, if possible.

    Args:
        extent: the chunk's extent, which is that of a shard.
        excess: how many times too large the chunk is.
        nbytes: the chunk's size.
        within_shards: only a divisor is possible: each chunk has to lie within a shard. It may be
            smaller than wanted, but chunks are not made so small that they would be packed.
    """
    if within_shards:
        pieces = range(math.ceil(excess), max(1, nbytes // PACKED_NBYTES) + 1)
        return next((extent // n for n in pieces if extent % n == 0), extent)
    # Chunks reach over shard edges: one of each shard is collected from two ranks. A multiple of a
    # power of two can be cut into cells.
    wanted = max(1, int(extent / excess))
    return wanted // _CELLS_PER_CHUNK * _CELLS_PER_CHUNK or wanted


def chunks_over(key: str, shape: Sequence[int], grid: Sequence[int], box: Box) -> Iterator[Chunk]:
    """Yield the chunks that share elements with a box, in C order; none for an empty box."""
    if box.size == 0:
        return
    ranges = [
        range(start // step, ceil_div(start + extent, step))
        for start, extent, step in zip(box.offset, box.shape, grid, strict=True)
    ]
    for place in itertools.product(*ranges):
        yield _chunk_at(key, shape, grid, place)


def chunk_at(key: str, tensor: StoredTensor, place: tuple[int, ...]) -> Chunk:
    """Return the chunk at a place of a tensor's grid."""
    return _chunk_at(key, tensor.shape, tensor.chunk, place)


def _chunk_at(key: str, shape: Sequence[int], grid: Sequence[int], place: tuple[int, ...]) -> Chunk:
    offset = tuple(number * step for number, step in zip(place, grid, strict=True))
    extents = tuple(
        min(step, extent - start) for step, extent, start in zip(grid, shape, offset, strict=True)
    )
    return Chunk(key, place, Box(offset, extents))


def _common_shape_and_dtype(
    key: str, shards: Sequence[tuple[int, Entry]]
) -> tuple[tuple[int, ...], str]:
    """Return the global shape and data type on which all ranks agree."""
    rank, first = shards[0]
    for other, entry in shards:
        if (entry.global_shape, entry.dtype) != (first.global_shape, first.dtype):
            raise LayoutMismatch(
                f"{key}: rank {rank} has {first.dtype} {first.global_shape}, rank {other} has "
                f"{entry.dtype} {entry.global_shape}; are they running the same model?"
            )
    return first.global_shape, first.dtype


def _held_by_chunk(
    shape: Sequence[int], grid: Sequence[int], shards: Sequence[tuple[int, Entry]]
) -> dict[tuple[int, ...], list[Piece]]:
    """Return, by chunk place, the parts of the chunk that ranks hold; they may overlap."""
    held: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
    for holder, entry in shards:
        box = entry.box
        if box.size == 0:
            continue
        first = tuple(map(operator.floordiv, box.offset, grid))
        last = tuple(
            (start + extent - 1) // step
            for start, extent, step in zip(box.offset, box.shape, grid, strict=True)
        )
        # Nearly always: the grid follows the shards.
        if first == last:
            held[first].append(Piece(holder, box))
            continue
        for chunk in chunks_over(entry.key, shape, grid, box):
            common = chunk.box.intersect(entry.box)
            assert common is not None, "a chunk over a box shares elements with it"
            held[chunk.place].append(Piece(holder, common))
    return held


def _tile(box: Box, parts: Collection[Box]) -> bool:
    """Return whether parts of a box make it up as slices along one dimension do."""
    sliced = {
        axis
        for part in parts
        for axis, (extent, whole) in enumerate(zip(part.shape, box.shape, strict=True))
        if extent != whole
    }
    if len(sliced) != 1:
        return False
    (axis,) = sliced
    end = box.offset[axis]
    for start, extent in sorted((part.offset[axis], part.shape[axis]) for part in parts):
        if start != end:
            return False
        end += extent
    return end == box.offset[axis] + box.shape[axis]


def _pieces(chunk: Chunk, writer: int, parts: Sequence[Piece], ranks: int) -> tuple[Piece, ...]:
    """Return disjoint pieces that make up a chunk; none if one shard of the writer has all of it.

    The writer's own shards come first, then those of the ranks that follow it, so that not all
    writers read from the same replica.

    Raises:
        LayoutMismatch: no rank holds some of the elements.
    """
    if any(part.holder == writer and part.box == chunk.box for part in parts):
        return ()
    ordered = sorted(parts, key=lambda part: (part.holder - writer) % ranks)
    distinct: dict[Box, Piece] = {}
    for part in ordered:
        distinct.setdefault(part.box, part)
    if _tile(chunk.box, distinct.keys()):
        return tuple(distinct.values())
    pieces: list[Piece] = []
    missing = [chunk.box]
    for part in ordered:
        remaining: list[Box] = []
        for box in missing:
            common = box.intersect(part.box)
            if common is None:
                remaining.append(box)
            else:
                pieces.append(Piece(part.holder, common))
                remaining += subtract(box, common)
        missing = remaining
        if not missing:
            return tuple(pieces)
    raise LayoutMismatch(
        f"{chunk.key}: no rank holds elements at offset {missing[0].offset}, shape "
        f"{missing[0].shape}; every rank must save its part"
    )
