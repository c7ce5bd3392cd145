"""Tests of the chunk planner: grids follow the shards, and a rank that holds a chunk writes it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.stored import chunking
from keepstep.checkpoint.format.stored.chunking import (
    CELL_NBYTES,
    CHUNK_NBYTES,
    Cell,
    Piece,
    StoredTensor,
    _divisor,
    cell_shape,
    cells_over,
    chunk_shape,
    chunks_over,
    plan_chunks,
    stored_tensor,
)
from keepstep.checkpoint.format.stored.writer import PackJob, write_jobs


def entry(key: str, shape: tuple[int, ...], box: Box, dtype: str = "float32") -> Entry:
    return Entry(
        key=key, dtype=dtype, global_shape=shape, box=box, byte_offset=0, nbytes=box.size * 4
    )


def fsdp(shape: tuple[int, ...], ranks: int) -> list[Box]:
    piece = math.ceil(shape[0] / ranks)
    starts = [min(rank * piece, shape[0]) for rank in range(ranks)]
    return [
        Box((s, *(0 for _ in shape[1:])), (min(piece, shape[0] - s), *shape[1:])) for s in starts
    ]


@pytest.fixture
def never_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let shards of any size have a chunk of their own."""
    monkeypatch.setattr(chunking, "PACKED_NBYTES", 1)


@given(st.integers(0, 40), st.integers(0, 5), st.integers(1, 9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("never_packed")
def test_an_fsdp_split_has_one_chunk_per_shard_even_if_uneven(
    rows: int, columns: int, ranks: int
) -> None:
    shape = (rows, columns)
    boxes = fsdp(shape, ranks)
    plan = plan_chunks([ShardIndex(0, (entry("w", shape, box),), {}) for box in boxes])
    for box, chunks in zip(boxes, plan.chunks, strict=True):
        assert [chunk.box for chunk in chunks] == ([box] if box.size else [])
        assert not any(chunk.pieces for chunk in chunks)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_small_shards_share_chunks_that_are_large_enough(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, ranks: int
) -> None:
    monkeypatch.setattr(chunking, "PACKED_NBYTES", 1000)
    shape, itemsize = (rows, columns), 4
    boxes = fsdp(shape, ranks)
    plan = plan_chunks([ShardIndex(0, (entry("w", shape, box),), {}) for box in boxes])
    chunks = [chunk for chunks in plan.chunks for chunk in chunks]
    whole = rows * columns * itemsize
    assert plan.tensors["w"].is_packed == (whole < 1000)
    if whole < 1000:
        assert len(chunks) == 1
    *inner, _ = sorted(chunks, key=lambda chunk: chunk.place)
    assert all(chunk.box.size * itemsize >= 1000 for chunk in inner)
    for chunk in chunks:
        assert sum(piece.box.size for piece in chunk.pieces) in (0, chunk.box.size)


def test_pieces_of_a_chunk_come_from_the_writer_first_and_cover_it_once() -> None:
    shape = (8, 4)
    boxes = fsdp(shape, 4)
    replicas = [*boxes, *boxes]
    plan = plan_chunks([ShardIndex(0, (entry("w", shape, box),), {}) for box in replicas])
    ((writer, chunk),) = [
        (writer, chunk) for writer, chunks in enumerate(plan.chunks) for chunk in chunks
    ]
    assert chunk.box == Box.whole(shape)
    assert chunk.pieces[0] == Piece(writer, replicas[writer])
    count = np.zeros(shape, int)
    for piece in chunk.pieces:
        assert piece.box.intersect(replicas[piece.holder]) == piece.box
        count[piece.box.slices] += 1
    assert (count == 1).all()


@given(
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.data(),
)
def test_chunks_cover_a_tensor_once_and_one_holder_writes_each(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    whole = Box.whole(shape)
    cuts = [sorted(data.draw(st.lists(st.integers(0, n), max_size=2))) for n in shape]
    boxes = [whole]
    for axis, inner in enumerate(cuts):
        edges = [0, *inner, shape[axis]]
        boxes = [
            Box(
                (*box.offset[:axis], start, *box.offset[axis + 1 :]),
                (*box.shape[:axis], stop - start, *box.shape[axis + 1 :]),
            )
            for box in boxes
            for start, stop in itertools.pairwise(edges)
        ]
    indexes = [ShardIndex(0, (entry("w", shape, box),), {}) for box in boxes]
    plan = plan_chunks(indexes + indexes)  # Two replicas.
    count = np.zeros(shape, int)
    for writer, chunks in enumerate(plan.chunks):
        for chunk in chunks:
            assert chunk.box.intersect(boxes[writer % len(boxes)]) is not None
            count[chunk.box.slices] += 1
    assert (count == 1).all()
    assert plan == plan_chunks(indexes + indexes)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=2), st.data()
)
def test_chunks_over_a_box_are_those_that_intersect_it(axes, data: st.DataObject) -> None:
    shape, grid = zip(*axes, strict=True)
    offset = tuple(data.draw(st.integers(0, n)) for n in shape)
    box = Box(
        offset, tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
    )
    all_chunks = chunks_over("w", shape, grid, Box.whole(shape))
    expected = [chunk for chunk in all_chunks if chunk.box.intersect(box)]
    assert list(chunks_over("w", shape, grid, box)) == expected


def cell_box(tensor: StoredTensor, cell: Cell) -> Box:
    offset = tuple(place * extent for place, extent in zip(cell.place, tensor.cell, strict=True))
    extents = zip(tensor.cell, tensor.shape, offset, strict=True)
    return Box(offset, tuple(min(cell, extent - start) for cell, extent, start in extents))


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3)), min_size=0, max_size=3
    ),
    st.data(),
)
def test_cells_over_a_box_are_those_that_intersect_it(axes, data: st.DataObject) -> None:
    shape = tuple(n for n, _, _ in axes)
    cell = tuple(c for _, c, _ in axes)
    tensor = StoredTensor(
        dtype="float32",
        shape=shape,
        chunk=tuple(c * m for _, c, m in axes),
        cell=cell,
        is_packed=False,
    )
    offset = tuple(data.draw(st.integers(0, n)) for n in shape)
    box = Box(
        offset, tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
    )
    count = np.zeros(shape, int)
    for chunk in chunks_over("w", shape, tensor.chunk, box):
        cells = list(cells_over(tensor, chunk, box))
        all_cells = list(cells_over(tensor, chunk, chunk.box))
        assert cells == [c for c in all_cells if cell_box(tensor, c).intersect(box)]
        # In a chunk's object cells lie in C order.
        numbers = [c.number for c in all_cells]
        assert numbers == sorted(set(numbers))
        for c in cells:
            count[cell_box(tensor, c).slices] += 1
    assert (count <= 1).all()
    assert (count[box.slices] == 1).all()


@given(st.lists(st.integers(1, 6000), max_size=3), st.sampled_from([1, 2, 4, 8]))
def test_cells_divide_a_chunk_and_pieces_of_rows_are_not_too_short(
    chunk: list[int], itemsize: int
) -> None:
    cell = cell_shape(chunk, itemsize)
    assert all(extent % part == 0 for extent, part in zip(chunk, cell, strict=True))
    if len(chunk) > 1 and cell[-1] != chunk[-1] and math.prod(cell[:-1]) > 1:
        assert cell[-1] * itemsize >= 256
        assert chunk[-1] // cell[-1] <= 8


@pytest.mark.parametrize(
    ("shape", "itemsize"),
    [
        ((3072, 1024), 4),
        ((1024, 4096), 4),
        ((4096, 4096), 2),
        ((50257, 1600), 4),
        ((14336, 4096), 2),
        ((8, 1024, 2048), 2),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_cells_of_rows_end_at_eighths_of_columns_and_at_halves_of_shards(
    shape: tuple[int, ...], itemsize: int, ranks: int
) -> None:
    boxes = fsdp(shape, ranks)
    tensor = stored_tensor(
        "bfloat16" if itemsize == 2 else "float32", shape, chunk_shape(shape, boxes, itemsize)
    )
    assert [shape[-1] // 8 % tensor.cell[-1], shape[-1] // 4 % tensor.cell[-1]] == [0, 0]
    assert boxes[0].shape[0] % 2 or boxes[0].shape[0] // 2 % tensor.cell[0] == 0


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        ((50257, 1600), 1),
        ((50257, 1600), 4),
        ((4096, 4096), 8),
        ((151936, 896), 2),
        ((4, 2**24), 4),
    ],
)
def test_cells_of_common_shapes_are_small_and_end_at_halves_of_shards(
    shape: tuple[int, int], ranks: int
) -> None:
    boxes = fsdp(shape, ranks)
    tensor = stored_tensor("float32", shape, chunk_shape(shape, boxes, 4))
    assert CELL_NBYTES[0] / 5 <= tensor.cell_nbytes <= 5 * CELL_NBYTES[1]
    if boxes[0].shape[0] % 2 == 0:
        assert boxes[0].shape[0] // 2 % tensor.cell[0] == 0


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "complex128"])
@pytest.mark.parametrize("shape", [(1024, 1024), (4096, 4096), (4, 2**24), (1024, 1025)])
def test_compressed_cells_have_128_KiB_for_each_byte_of_an_element(
    shape: tuple[int, int], dtype: str
) -> None:
    """zstd finds one code for as much: it should be for bytes of one significance."""
    itemsize = numpy_dtype(dtype).itemsize
    chunk = chunk_shape(shape, fsdp(shape, 2), itemsize)
    tensor = stored_tensor(dtype, shape, chunk, "zstd")
    assert tensor.compression == (None if tensor.is_packed else "zstd")
    if tensor.compression is not None:
        least = min(2**17 * itemsize, 2**20, math.prod(chunk) * itemsize)
        assert least <= tensor.cell_nbytes <= max(2**20, 2 * least)


def test_a_cell_that_cannot_be_made_small_is_not_compressed() -> None:
    prime = 2**24 + 43
    for extent, compression in ((prime, None), (2**24, "zstd")):
        tensor = stored_tensor("float32", (extent,), (extent,), "zstd")
        assert tensor.compression == compression


def test_replicas_write_equal_shares() -> None:
    tensors = tuple(entry(f"w{i}", (100 + i, 10), Box.whole((100 + i, 10))) for i in range(16))
    plan = plan_chunks([ShardIndex(0, tensors, {}) for _ in range(4)])
    loads = [sum(chunk.box.size for chunk in chunks) for chunks in plan.chunks]
    assert max(loads) < 1.05 * min(loads)


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        ((50257, 1600), 1),
        ((50257, 1600), 2),
        ((131101, 1024), 1),
        ((8192, 28672), 8),
        ((3, 2**26), 1),
    ],
)
def test_chunks_of_large_shards_end_on_shard_edges(shape: tuple[int, int], ranks: int) -> None:
    boxes = fsdp(shape, ranks)
    chunk = chunk_shape(shape, boxes, 4)
    assert CHUNK_NBYTES / 8 < math.prod(chunk) * 4 <= CHUNK_NBYTES
    if ranks > 1:
        assert boxes[0].shape[0] % chunk[0] == 0


PRIME = 1_500_000_001


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_divisor_is_the_greatest_that_is_wanted(extent: int, wanted: int) -> None:
    wanted = min(extent, wanted)
    divisors = (n for n in range(wanted, wanted // 4, -1) if extent % n == 0)
    assert _divisor(extent, wanted) == next(divisors, None)


class CountedExtent(int):
    """An extent that counts how many divisors are tried."""

    tries = 0

    def __mod__(self, other: int) -> int:
        type(self).tries += 1
        return int(self) % other


def test_few_divisors_of_a_large_extent_are_tried() -> None:
    """All ranks wait for it: for a thousand million elements millions were."""
    assert _divisor(CountedExtent(1_000_000_007), 2**24) is None
    assert 0 < CountedExtent.tries < 300


@pytest.mark.parametrize("shape", [(PRIME * 2,), (PRIME * 2, 1), (2, PRIME * 2), (PRIME * 2, 2, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_large_shard_without_divisors_is_cut_all_the_same(
    shape: tuple[int, ...], axis: int
) -> None:
    """A chunk that is too large for one PUT could not be stored in an object store."""
    axis = min(axis, len(shape) - 1)
    half = -(-shape[axis] // 2)
    boxes = [
        Box(
            tuple(start if a == axis else 0 for a in range(len(shape))),
            tuple(stop - start if a == axis else n for a, n in enumerate(shape)),
        )
        for start, stop in ((0, half), (half, shape[axis]))
    ]
    chunk = chunk_shape(shape, boxes, 4)
    assert CHUNK_NBYTES / 8 <= math.prod(chunk) * 4 <= CHUNK_NBYTES
    tensor = stored_tensor("float32", shape, chunk)
    assert tensor.cell_nbytes <= 4 * CELL_NBYTES[1]


@pytest.mark.parametrize("extent", [1_000_003 * 1009, 2 * 1_000_003 * 1009])
def test_chunks_within_shards_are_cut_at_their_divisors_only(extent: int) -> None:
    boxes = [Box((0,), (extent,)), Box((extent,), (extent,))]
    (chunk,) = chunk_shape((2 * extent,), boxes, 4, within_shards=True)
    assert extent % chunk == 0
    assert 2**20 <= chunk * 4 <= CHUNK_NBYTES


@pytest.mark.usefixtures("never_packed")
def test_chunks_follow_a_tensor_parallel_split_of_columns() -> None:
    boxes = [Box((0, column), (6, 4)) for column in (0, 4)]
    assert chunk_shape((6, 8), boxes, 4) == (6, 4)


@pytest.mark.usefixtures("never_packed")
def test_shards_without_a_common_divisor_get_chunks_of_the_largest_size() -> None:
    boxes = [Box((0,), (101,)), Box((101,), (100,)), Box((201,), (101,)), Box((302,), (100,))]
    assert chunk_shape((402,), boxes, 4) == (101,)


def test_an_empty_tensor_with_huge_rows_has_a_chunk_shape_but_no_chunks() -> None:
    plan = plan_chunks(
        [ShardIndex(0, (entry("w", (0, 2**14, 2**14), Box.whole((0, 2**14, 2**14))),), {})]
    )
    assert plan.chunks == ((),)
    assert all(plan.tensors["w"].chunk)
    assert plan.tensors["w"].is_packed, "it has no chunk whose writer would write its metadata"


def test_a_part_that_no_rank_holds_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match=r"w: no rank holds elements at offset \(2,\)"):
        plan_chunks([ShardIndex(0, (entry("w", (4,), Box((0,), (2,))),), {})])


def test_ranks_that_disagree_about_a_tensor_are_refused() -> None:
    first = ShardIndex(0, (entry("w", (4,), Box((0,), (4,))),), {})
    second = ShardIndex(0, (entry("w", (5,), Box((0,), (5,))),), {})
    with pytest.raises(LayoutMismatch, match="w: rank 0 has float32"):
        plan_chunks([first, second])


@pytest.mark.parametrize(
    "key", ["", "a//b", "../up", "model/..", "parts/x", "zarr.json", "a/__b", "a\n", "x" * 300]
)
def test_names_that_are_not_safe_paths_are_refused(key: str) -> None:
    with pytest.raises(LayoutMismatch, match="rename it"):
        plan_chunks([ShardIndex(0, (entry(key, (4,), Box((0,), (4,))),), {})])


def test_a_tensor_named_inside_another_is_refused() -> None:
    box = Box.whole((4,))
    with pytest.raises(LayoutMismatch, match="'a' is a tensor"):
        plan_chunks([ShardIndex(0, (entry("a", (4,), box), entry("a/b", (4,), box)), {})])


def test_planners_take_different_ranks_first() -> None:
    shape = (1000, 600)
    index = ShardIndex(0, (entry("w", shape, Box.whole(shape)),), {})
    for first in range(5):
        plan = plan_chunks([index] * 5, first_writer=first)
        assert [bool(chunks) for chunks in plan.chunks] == [rank == first for rank in range(5)]


def test_a_pack_is_written_when_it_is_full_and_the_last_one_with_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keepstep.checkpoint.format.stored.writer.PACK_NBYTES", 1000)
    box = Box((0,), (50,))
    for count, expected in ((12, [5, 5, 2]), (10, [5, 5]), (4, [4])):
        entries = tuple(entry(f"w{number}", (50,), box) for number in range(count))
        plan = plan_chunks([ShardIndex(0, entries, {})])
        packs = [job for job in write_jobs(plan, [0], name=3) if isinstance(job, PackJob)]
        assert [len(pack.chunks) for pack in packs] == expected
        assert len({pack.name for pack in packs}) == len(packs)
