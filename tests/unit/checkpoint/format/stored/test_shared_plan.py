"""Claims about plans made by several planners: they fit together, and share the work."""

from __future__ import annotations

import math
from collections import Counter

from keepstep.checkpoint.format.layout.boxes import Box, Entry
from keepstep.checkpoint.format.stored.shared_plan import (
    entries_by_planner,
    merged_tensor_plan,
    plan_share,
    planner_count,
)

RANKS = 64
SHAPE = (512, 1024)


def test_replicas_share_what_several_planners_give_them() -> None:
    entries = [
        Entry(
            key=f"w{number}",
            dtype="float32",
            global_shape=SHAPE,
            box=Box.whole(SHAPE),
            byte_offset=0,
            nbytes=4 * math.prod(SHAPE),
        )
        for number in range(256)
    ]
    planners = planner_count(RANKS)
    held = entries_by_planner(entries, planners)
    written: Counter[int] = Counter()
    tensors = []
    for planner in range(planners):
        plans, own = plan_share([held[planner]] * RANKS, planner)
        written.update({rank: len(plan.chunks) for rank, plan in plans.items()})
        tensors.append(own)
    merged = merged_tensor_plan(tensors)
    assert sorted(merged.tensors) == sorted(entry.key for entry in entries)
    assert sum(written.values()) == 256
    assert len(written) == RANKS
    assert max(written.values()) <= 3 * 256 / RANKS
