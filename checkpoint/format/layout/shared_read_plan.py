"""Plans a restore in which one rank reads each stored byte and forwards it to the others. Pure.

The planner reads in units: whole cells of one chunk that lie one after the other, because a cell is
read completely anyway. Units that lie together in storage form a group, which one rank reads, so
that many small tensors do not become many small reads. A group's reader is one of the ranks that
want part of it. If ranks want different cells of a unit, it is split, so that each reads its own
and nothing is sent, unless that would cause many small reads.

No rank sees the wants of all ranks: every rank sends its wants of a group to the group's planner,
which follows from the group's name, and the planner sends the tasks to the reader. All planners
together assign equal groups that all ranks want to the ranks in turn: the ranks' numbers of groups
differ by one at most.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.integers import ceil_div

UNIT_NBYTES = 8 * 2**20
"""A large chunk is read in units of about this size, so that replicas share its reading."""


@dataclass(frozen=True, slots=True)
class ReadUnit:
    """Cells of a stored tensor that one rank reads, of shape `cell`, from the box's offset on.

    Units of one `group` should be read by the same rank, because they lie together in storage.
    Elements have `itemsize` bytes.
    """

    group: str
    key: str
    box: Box
    cell: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True, slots=True)
class Want:
    """The part of a unit that a rank wants: `box`, for its request of this number."""

    unit: ReadUnit
    number: int
    box: Box


@dataclass(frozen=True, slots=True)
class Delivery:
    """A box that a reader delivers to `rank`, for that rank's request of this number."""

    rank: int
    number: int
    box: Box


@dataclass(frozen=True, slots=True)
class ReadTask:
    """A unit to read, and the ranks that get its parts; the reader itself may be one of them."""

    unit: ReadUnit
    deliveries: tuple[Delivery, ...]

    @property
    def wanted_nbytes(self) -> int:
        """Bytes of the unit's elements that at least one rank wants."""
        return distinct_size([item.box for item in self.deliveries]) * self.unit.itemsize


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """Tasks for one reader. `nbytes` is the size of the parts that at least one rank wants."""

    name: str
    tasks: tuple[ReadTask, ...]
    nbytes: int


def unit_boxes(
    chunk: Box, cell: Sequence[int], itemsize: int, wanted: Box, nbytes: int
) -> Iterator[Box]:
    """Yield the boxes of a chunk's units that share elements with a wanted box.

    Args:
        chunk: the chunk's box, cut off at the tensor's edge.
        cell: shape of its cells, which divides the chunk's shape but for that edge.
        itemsize: bytes of an element.
        wanted: the wanted box.
        nbytes: the size that units have if cells are not larger.
    """
    common = chunk.intersect(wanted)
    if common is None:
        return
    # Cells lie in C order: only along the first dimension that has several do layers of them lie
    # one after the other.
    axis = next((a for a, n in enumerate(cell) if n < chunk.shape[a]), None)
    if axis is None:
        yield chunk
        return
    layer_nbytes = chunk.size // chunk.shape[axis] * cell[axis] * itemsize
    step = max(1, nbytes // layer_nbytes) * cell[axis]
    first = common.offset[axis] - chunk.offset[axis]
    stop = first + common.shape[axis]
    for start in range(first // step * step, stop, step):
        offset, shape = list(chunk.offset), list(chunk.shape)
        offset[axis] += start
        shape[axis] = min(step, chunk.shape[axis] - start)
        yield Box(tuple(offset), tuple(shape))


def planner_of(group: str, world_size: int) -> int:
    """Return the rank that plans a group, by its name."""
    return zlib.crc32(group.encode()) % world_size


def groups_of(wants: Iterable[tuple[int, Want]], small_nbytes: int) -> list[ReadGroup]:
    """Return the groups of a planner's wants; equal for the same wants in any order.

    Args:
        wants: the ranks' wants, each with its rank.
        small_nbytes: a unit is split if its parts are then read by this many bytes at once, or
            more.
    """
    deliveries: dict[str, dict[ReadUnit, list[Delivery]]] = defaultdict(lambda: defaultdict(list))
    for rank, want in wants:
        delivery = Delivery(rank, want.number, want.box)
        deliveries[want.unit.group][want.unit].append(delivery)
    groups = []
    for name, units in sorted(deliveries.items()):
        tasks = [
            ReadTask(unit, tuple(sorted(units[unit], key=lambda item: (item.rank, item.number))))
            for unit in sorted(units, key=lambda unit: (unit.key, unit.box.offset))
        ]
        parts = _split(tasks[0], small_nbytes) if len(tasks) == 1 else []
        for each in [[part] for part in parts] or [tasks]:
            nbytes = sum(task.wanted_nbytes for task in each)
            groups.append(ReadGroup(f"{name} {each[0].unit.box.offset}", tuple(each), nbytes))
    return groups


def _split(task: ReadTask, small_nbytes: int) -> list[ReadTask]:
    """Split a unit into boxes of cells, each wanted by the same ranks throughout.

    Returns nothing if the reads of the parts would be small, or if there is only one part.
    """
    unit = task.unit
    wanted_boxes = dict.fromkeys(item.box for item in task.deliveries)
    boxes = list(_grid([_cells_of(unit, box) for box in wanted_boxes]))
    counts = _cells_of(unit, unit.box).shape
    parts: list[ReadTask] = []
    reads = 0
    for box in boxes:
        part = _elements_of(unit, box)
        pieces = (
            Delivery(item.rank, item.number, common)
            for item in task.deliveries
            if (common := item.box.intersect(part)) is not None
        )
        deliveries = tuple(pieces)
        if deliveries:
            parts.append(ReadTask(replace(unit, box=part), deliveries))
            reads += box.size // _adjacent(box.shape, counts)
    wanted_nbytes = sum(part.unit.box.size for part in parts) * unit.itemsize
    return parts if len(parts) > 1 and wanted_nbytes >= reads * small_nbytes else []


def _cells_of(unit: ReadUnit, box: Box) -> Box:
    """Return the cells that overlap a box of a unit, as a box of the grid of the unit's cells."""
    inner = box.within(unit.box)
    starts = [start // n for start, n in zip(inner.offset, unit.cell, strict=True)]
    shape = [
        ceil_div(start + extent, n) - first
        for start, extent, n, first in zip(
            inner.offset, inner.shape, unit.cell, starts, strict=True
        )
    ]
    return Box(tuple(starts), tuple(shape))


def _elements_of(unit: ReadUnit, cells: Box) -> Box:
    """Return the elements of a box of cells, cut off at the unit's edge."""
    offset, shape = [], []
    for first, count, extent, start, stop in zip(
        cells.offset, cells.shape, unit.cell, unit.box.offset, unit.box.shape, strict=True
    ):
        offset.append(start + first * extent)
        shape.append(min(count * extent, stop - first * extent))
    return Box(tuple(offset), tuple(shape))


def _grid(boxes: Sequence[Box]) -> Iterator[Box]:
    """Yield boxes that are cut wherever one of these boxes begins or ends, in C order."""
    edges = [
        sorted({n for box in boxes for n in (box.offset[a], box.offset[a] + box.shape[a])})
        for a in range(len(boxes[0].shape))
    ]
    for intervals in itertools.product(*(itertools.pairwise(edge) for edge in edges)):
        yield Box(
            tuple(start for start, _ in intervals), tuple(stop - start for start, stop in intervals)
        )


def _adjacent(shape: Sequence[int], counts: Sequence[int]) -> int:
    """Return how many cells of a box of cells lie one after the other in a grid of `counts`."""
    adjacent = 1
    for extent, count in zip(reversed(shape), reversed(counts), strict=True):
        adjacent *= extent
        if extent < count:
            break
    return adjacent


def assign_readers(
    groups: Sequence[ReadGroup], world_size: int, first: int
) -> list[list[ReadTask]]:
    """Return each rank's tasks of a planner's groups. Deterministic.

    A reader is a rank that wants part of the group: the one with the least to read so far, and to
    send of this group.

    Args:
        groups: the planner's groups.
        world_size: the number of ranks.
        first: approximate number of groups of the planners before this one. Among ranks that are
            equal otherwise, the turn begins here, so that planners with few groups choose different
            ones.
    """
    tasks: list[list[ReadTask]] = [[] for _ in range(world_size)]
    load: dict[int, int] = defaultdict(int)
    # Large groups first: the small ones then even out the load.
    for group in sorted(groups, key=lambda group: (-group.nbytes, group.name)):
        wanted_nbytes: dict[int, int] = defaultdict(int)
        for task in group.tasks:
            for item in task.deliveries:
                wanted_nbytes[item.rank] += item.box.size * task.unit.itemsize
        reader = min(
            wanted_nbytes,
            key=lambda rank: (
                load[rank] + group.nbytes - wanted_nbytes[rank],
                (rank - first) % world_size,
            ),
        )
        load[reader] += group.nbytes
        tasks[reader] += group.tasks
    return tasks


def distinct_size(boxes: Sequence[Box]) -> int:
    """Return the number of elements that are in at least one of a tensor's boxes."""
    unique = list(dict.fromkeys(boxes))
    if len(unique) < 2:
        return sum(box.size for box in unique)
    edges = [
        # `np.unique` would import `numpy.ma` when it is first called, for ten milliseconds.
        np.array(sorted({
            edge
            for box in unique
            for edge in (box.offset[axis], box.offset[axis] + box.shape[axis])
        }))
        for axis in range(len(unique[0].shape))
    ]  # fmt: skip
    covered = np.zeros([len(edge) - 1 for edge in edges], bool)
    for box in unique:
        covered[
            tuple(
                slice(*np.searchsorted(edge, (start, start + extent)))
                for edge, start, extent in zip(edges, box.offset, box.shape, strict=True)
            )
        ] = True
    sizes = functools.reduce(np.multiply.outer, [np.diff(edge) for edge in edges])
    return int(sizes[covered].sum())
