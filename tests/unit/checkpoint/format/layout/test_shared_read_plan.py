"""Claims about the planner of a restore by all ranks: who reads what, and to whom it goes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.shared_read_plan import (
    ReadTask,
    ReadUnit,
    Want,
    assign_readers,
    distinct_size,
    groups_of,
    planner_of,
    unit_boxes,
)

NEVER_SPLIT = 10**9


def plan(
    wants: Sequence[tuple[int, Want]], world_size: int, small_nbytes: int = NEVER_SPLIT
) -> list[list[ReadTask]]:
    """Return what each rank reads, as all planners find it together."""
    tasks: list[list[ReadTask]] = [[] for _ in range(world_size)]
    first = 0
    for planner in range(world_size):
        own = [item for item in wants if planner_of(item[1].unit.group, world_size) == planner]
        groups = groups_of(own, small_nbytes)
        for reader, found in enumerate(assign_readers(groups, world_size, first)):
            tasks[reader] += found
        first += len(groups)
    return tasks


CELL = (1, 2)


@st.composite
def wanted_units(draw: st.DrawFn) -> tuple[int, list[tuple[int, Want]]]:
    """Draw what ranks want of tensors that are cut in units of 2 x 6 elements, some in groups."""
    world_size = draw(st.integers(1, 6))
    wants = []
    for number in range(draw(st.integers(0, 6))):
        shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 11)))
        grouped = draw(st.booleans())
        for rank in range(world_size):
            offset = draw(st.tuples(*(st.integers(0, n - 1) for n in shape)))
            extent = draw(
                st.tuples(*(st.integers(0, n - o) for n, o in zip(shape, offset, strict=True)))
            )
            for row in range(0, shape[0], 2):
                for column in range(0, shape[1], 6):
                    box = Box((row, column), (min(2, shape[0] - row), min(6, shape[1] - column)))
                    group = f"pack-{number // 3}" if grouped else f"{number} {row} {column}"
                    common = box.intersect(Box(offset, extent)) if all(extent) else None
                    if common:
                        unit = ReadUnit(group, f"t{number}", box, CELL, 4)
                        wants.append((rank, Want(unit, number, common)))
    return world_size, wants


@given(wanted_units(), st.randoms(), st.sampled_from([0, 9, NEVER_SPLIT]))
def test_every_wanted_element_arrives_once_and_every_cell_has_one_reader(
    case, random, small_nbytes: int
) -> None:
    world_size, wants = case
    tasks = plan(wants, world_size, small_nbytes)
    missing = {(rank, want.number): np.zeros((4, 11), int) for rank, want in wants}
    for rank, want in wants:
        missing[rank, want.number][want.box.slices] += 1
    readers: dict[tuple[str, int, int], int] = {}
    for reader, found in enumerate(tasks):
        for task in found:
            unit = task.unit
            for item in task.deliveries:
                assert unit.box.intersect(item.box) == item.box
                missing[item.rank, item.number][item.box.slices] -= 1
            for row, column in np.ndindex(unit.box.shape):
                cell = (unit.box.offset[0] + row, (unit.box.offset[1] + column) // CELL[1])
                assert readers.setdefault((unit.key, *cell), reader) == reader
        assert msgpack.decode(msgpack.encode(found), type=list[ReadTask]) == found
    assert not any(counts.any() for counts in missing.values())
    # What ranks tell arrives in any order, and as JSON.
    shuffled = msgpack.decode(msgpack.encode(wants), type=list[tuple[int, Want]])
    random.shuffle(shuffled)
    assert plan(shuffled, world_size, small_nbytes) == tasks


@pytest.mark.parametrize(
    ("small_nbytes", "sent"), [(2 * 8 * 4, 0), (2 * 8 * 4 + 1, 3 * 4 * 16 * 4)]
)
def test_ranks_read_their_own_columns_unless_these_are_small_reads(
    small_nbytes: int, sent: int
) -> None:
    """Four rows of eight cells, saved by rows; four ranks want two columns of cells each."""
    unit = ReadUnit("g", "t", Box((0, 0), (4, 64)), (1, 8), 4)
    wants = [(rank, Want(unit, 0, Box((0, 16 * rank), (4, 16)))) for rank in range(4)]
    tasks = plan(wants, 4, small_nbytes)
    assert sent == sum(
        item.box.size * 4
        for reader, found in enumerate(tasks)
        for task in found
        for item in task.deliveries
        if item.rank != reader
    )


def test_only_the_cells_on_the_border_between_two_ranks_are_sent() -> None:
    """As where four ranks have saved by rows, and three load."""
    unit = ReadUnit("g", "t", Box((0, 0), (64, 4)), (4, 4), 4)
    wants = [
        (0, Want(unit, 0, Box((0, 0), (22, 4)))),
        (1, Want(unit, 0, Box((22, 0), (42, 4)))),
    ]
    tasks = plan(wants, 2, small_nbytes=256)
    boxes = {task.unit.box: reader for reader, found in enumerate(tasks) for task in found}
    assert boxes[Box((0, 0), (20, 4))] == 0
    assert boxes[Box((24, 0), (40, 4))] == 1
    assert set(boxes) - {Box((20, 0), (4, 4))} == {Box((0, 0), (20, 4)), Box((24, 0), (40, 4))}


@given(wanted_units())
def test_one_rank_reads_a_group_and_wants_something_of_it(case) -> None:
    world_size, wants = case
    readers: dict[str, int] = {}
    for reader, tasks in enumerate(plan(wants, world_size)):
        for task in tasks:
            assert readers.setdefault(task.unit.group, reader) == reader
    for group, reader in readers.items():
        assert any(rank == reader for rank, want in wants if want.unit.group == group)


@given(st.integers(1, 40), st.integers(0, 120), st.integers(0, 99))
def test_equal_units_that_all_ranks_want_are_read_by_all_alike(
    world_size: int, count: int, seed: int
) -> None:
    box = Box((0,), (8,))
    wants = [
        (rank, Want(ReadUnit(f"{seed}/{number}", f"{number}", box, (8,), 4), number, box))
        for number in range(count)
        for rank in range(world_size)
    ]
    numbers = [len(tasks) for tasks in plan(wants, world_size)]
    assert max(numbers) - min(numbers) <= 1


def test_a_rank_reads_what_it_wants_itself() -> None:
    """As with FSDP in the layout of the checkpoint, where nothing has to be sent."""
    box = Box((0,), (8,))
    wants = [
        (number % 3, Want(ReadUnit(f"{number}", f"{number}", box, (8,), 4), number, box))
        for number in range(9)
    ]
    for rank, tasks in enumerate(plan(wants, 3)):
        assert len(tasks) == 3
        assert {item.rank for task in tasks for item in task.deliveries} == {rank}


def test_the_rank_that_wants_most_of_a_unit_reads_it() -> None:
    unit = ReadUnit("g", "t", Box((0,), (8,)), (8,), 4)
    wants = [(0, Want(unit, 0, Box((0,), (3,)))), (1, Want(unit, 0, Box((3,), (5,))))]
    assert [len(tasks) for tasks in plan(wants, 2)] == [0, 1]


@given(st.data())
def test_units_are_whole_cells_in_storage_order_and_cover_what_is_wanted(data) -> None:
    cell = tuple(data.draw(st.lists(st.integers(1, 3), max_size=3)))
    shape = tuple(n * data.draw(st.integers(1, 4)) for n in cell)
    offset = tuple(n * data.draw(st.integers(0, 2)) for n in shape)
    chunk, nbytes = Box(offset, shape), data.draw(st.integers(1, 40))
    wanted = data.draw(boxes_in(chunk))
    units = list(unit_boxes(chunk, cell, 2, wanted, nbytes))
    numbers = np.zeros(shape, int)
    per_chunk = [n // c for n, c in zip(shape, cell, strict=True)]
    for place in np.ndindex(shape):
        number = 0
        for position, extent, count in zip(place, cell, per_chunk, strict=True):
            number = number * count + position // extent
        numbers[place] = number
    covered = np.zeros(shape, int)
    for unit in units:
        found = numbers[unit.within(chunk).slices]
        cells = np.unique(found)
        assert cells.tolist() == list(range(cells[0], cells[-1] + 1))
        assert found.size == len(cells) * int(np.prod(cell))
        assert len(cells) == 1 or unit.size * 2 <= max(nbytes, layer_nbytes(chunk, cell))
        assert unit.intersect(wanted) is not None
        covered[unit.within(chunk).slices] += 1
    assert covered.max(initial=0) <= 1
    assert (covered[wanted.within(chunk).slices] == 1).all()
    assert set(units) <= set(unit_boxes(chunk, cell, 2, chunk, nbytes))


def layer_nbytes(chunk: Box, cell: Sequence[int]) -> int:
    """Return the size of one layer of cells, of elements of 2 bytes."""
    axis = next(a for a, n in enumerate(cell) if n < chunk.shape[a])
    return chunk.size // chunk.shape[axis] * cell[axis] * 2


@st.composite
def boxes_in(draw: st.DrawFn, outer: Box) -> Box:
    offset = tuple(
        draw(st.integers(o, o + n - 1)) for o, n in zip(outer.offset, outer.shape, strict=True)
    )
    shape = tuple(
        draw(st.integers(1, o + n - start))
        for start, o, n in zip(offset, outer.offset, outer.shape, strict=True)
    )
    return Box(offset, shape)


@given(st.lists(st.integers(1, 5), max_size=3).map(tuple), st.data())
def test_distinct_elements_are_counted_once(shape: tuple[int, ...], data) -> None:
    boxes = data.draw(st.lists(boxes_in(Box.whole(shape)), max_size=5))
    covered = np.zeros(shape, bool)
    for box in boxes:
        covered[box.slices] = True
    assert distinct_size(boxes) == covered.sum()


def test_planning_imports_nothing_when_it_is_first_done() -> None:
    """`np.unique` imports `numpy.ma`, for ten milliseconds of the first load."""
    code = (
        "import sys\n"
        "from keepstep.checkpoint.format.layout.boxes import Box\n"
        "from keepstep.checkpoint.format.layout.shared_read_plan import distinct_size\n"
        "before = set(sys.modules)\n"
        "assert distinct_size([Box((0,), (4,)), Box((2,), (4,))]) == 6\n"
        "assert set(sys.modules) == before, set(sys.modules) - before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
