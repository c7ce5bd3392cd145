"""Which bytes to read from where: the reads that fill wanted boxes from the boxes that sources hold.

Pure. Boxes of one tensor may overlap between sources (replicas); each wanted element is planned exactly once,
from the earliest source that holds it. Cost is linear in the entries of the tensors asked for, and in the
pieces that result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Box, Entry, ShardIndex


@dataclass(frozen=True, slots=True)
class Read:
    """Copy `box` (global coordinates) of `entry`, held by source `source`, into wanted box `wanted`."""

    wanted: int
    source: int
    entry: Entry
    box: Box


def plan_reads(
    wanted: Sequence[tuple[str, Box]], sources: Sequence[ShardIndex]
) -> tuple[Read, ...]:
    """Plan the reads that fill every wanted box.

    Args:
        wanted: tensor keys and boxes of them.
        sources: what each source holds, preferred ones first.

    Raises:
        LayoutMismatch: part of a wanted box is held by nobody.
    """
    reads, missing = plan_available_reads(wanted, sources)
    if missing:
        position, box = missing[0]
        raise LayoutMismatch(
            f"{wanted[position][0]}: elements at offset {box.offset}, shape {box.shape}, are in none of the "
            f"{len(sources)} sources; the state to read is incomplete, or of another model"
        )
    return reads


def plan_available_reads(
    wanted: Sequence[tuple[str, Box]], sources: Sequence[ShardIndex]
) -> tuple[tuple[Read, ...], tuple[tuple[int, Box], ...]]:
    """As `plan_reads`, but return what no source holds, as (wanted number, box), instead of raising."""
    keys = {key for key, _ in wanted}
    holders: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
    for source, index in enumerate(sources):
        for entry in index.entries:
            if entry.key in keys:
                holders[entry.key].append((source, entry))
    reads: list[Read] = []
    missing: list[tuple[int, Box]] = []
    for position, (key, box) in enumerate(wanted):
        open_boxes = [box] if box.size else []
        for source, entry in holders[key]:
            if not open_boxes:
                break
            still_open: list[Box] = []
            for part in open_boxes:
                common = part.intersect(entry.box)
                if common is None:
                    still_open.append(part)
                else:
                    reads.append(Read(position, source, entry, common))
                    still_open.extend(subtract(part, common))
            open_boxes = still_open
        missing.extend((position, part) for part in open_boxes)
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
