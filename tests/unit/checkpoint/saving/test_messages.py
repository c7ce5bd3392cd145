"""Tests of what the writing process is sent, which passes through the rank as bytes."""

from __future__ import annotations

import math

from keepstep.checkpoint.format.layout.boxes import Box, Entry
from keepstep.checkpoint.format.stored.shared_plan import entries_by_planner, plan_share
from keepstep.checkpoint.saving.messages import PartPlan


def test_a_plan_is_the_same_after_it_was_sent() -> None:
    entries = tuple(
        Entry(
            key=key,
            dtype="float32",
            global_shape=shape,
            box=Box.whole(shape),
            byte_offset=64 * position,
            nbytes=4 * math.prod(shape),
        )
        for position, (key, shape) in enumerate({"matrix": (700, 600), "scalar": ()}.items())
    )
    held = entries_by_planner(entries, 1)
    plans, tensors = plan_share([held[0], held[0]], 0)
    for rank, own in plans.items():
        plan = PartPlan(rank=rank, own=own, tensors=tensors, entries=entries)
        assert PartPlan.decode(plan.encode()) == plan
