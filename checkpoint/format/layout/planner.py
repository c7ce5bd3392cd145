"""Plans the reads that fill wanted boxes from the boxes that sources hold.

Pure. Boxes of one tensor may overlap between sources (replicas); each wanted element is planned
exactly once, from the earliest source that holds it. The cost is linear in the entries of the
requested tensors and in the pieces that result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box, Entry, ShardIndex


@dataclass(frozen=True, slots=True)
class Read:
    """Copies `box` (global coordinates) of `entry` from a source into a wanted box.

    `wanted` and `source` are positions in the planner's arguments.
    """

    wanted: int
    source: int
    entry: Entry
    box: Box


def plan_reads(
    wanted: Sequence[tuple[str, Box]], sources: Sequence[ShardIndex]
) -> tuple[Read, ...]:
    """Plan the reads that fill every wanted box.

    Args:
        wanted: tensor keys and the boxes of these tensors to fill.
        sources: the boxes that each source holds, preferred sources first.

    Raises:
        LayoutMismatch: no source holds part of a wanted box.
    """
    reads, missing = plan_available_reads(wanted, sources)
    if missing:
        position, box = missing[0]
        raise LayoutMismatch(
            f"{wanted[position][0]}: elements at offset {box.offset}, shape {box.shape}, are in "
            f"none of the {len(sources)} sources; the state to read is incomplete, or of another "
            "model"
        )
    return reads


def plan_available_reads(
    wanted: Sequence[tuple[str, Box]], sources: Sequence[ShardIndex]
) -> tuple[tuple[Read, ...], tuple[tuple[int, Box], ...]]:
    """Plan reads from the sources, and return the parts that no source holds.

    Args:
        wanted: as for `plan_reads`.
        sources: as for `plan_reads`.

    Returns:
        The reads, and the missing parts, each as (position in `wanted`, box).
    """
    keys = {key for key, _ in wanted}
    holders: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
    for source, index in enumerate(sources):
        for entry in index.entries:
            if entry.key in keys:
                holders[entry.key].append((source, entry))
    reads: list[Read] = []
    missing: list[tuple[int, Box]] = []
    for position, (key, box) in enumerate(wanted):
        unplanned = [box] if box.size else []
        for source, entry in holders[key]:
            if not unplanned:
                break
            remaining: list[Box] = []
            for part in unplanned:
                common = part.intersect(entry.box)
                if common is None:
                    remaining.append(part)
                else:
                    reads.append(Read(position, source, entry, common))
                    remaining.extend(subtract(part, common))
            unplanned = remaining
        missing.extend((position, part) for part in unplanned)
    return tuple(reads), tuple(missing)


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes that together are `box` without `hole`, which lies inside it."""
    parts: list[Box] = []
    offset, shape = list(box.offset), list(box.shape)
    for axis in range(len(shape)):
        start, stop = hole.offset[axis], hole.offset[axis] + hole.shape[axis]
        if start > offset[axis]:
            below = shape.copy()
            below[axis] = start - offset[axis]
            parts.append(Box(tuple(offset), tuple(below)))
        end = offset[axis] + shape[axis]
        if stop < end:
            above_offset, above = offset.copy(), shape.copy()
            above_offset[axis], above[axis] = stop, end - stop
            parts.append(Box(tuple(above_offset), tuple(above)))
        offset[axis], shape[axis] = start, hole.shape[axis]
    return parts
