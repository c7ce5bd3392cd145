"""Claims about when ranks follow the plan of the last save."""

from __future__ import annotations

import pytest
import torch

from keepstep.checkpoint import collective_plan
from keepstep.checkpoint.collective_plan import PlanCache, agree_on_save, signature_of
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, describe


def state(**shapes: tuple[int, ...]) -> LiveState:
    tensors = [describe(key, torch.zeros(shape)) for key, shape in shapes.items()]
    return LiveState(tuple(tensors), {})


def test_a_plan_is_followed_while_the_boxes_stay_and_made_anew_when_they_change() -> None:
    cache = PlanCache()
    first = agree_on_save(lambda: state(a=(4, 3), b=()), None, cache)
    again = agree_on_save(lambda: state(a=(4, 3), b=()), None, cache)
    assert again.plan is first.plan
    assert again.attempt != first.attempt
    for changed in (state(a=(4, 3)), state(b=(), a=(4, 3)), state(a=(3, 4), b=())):
        assert agree_on_save(lambda s=changed: s, None, cache).plan is not first.plan


def test_a_plan_that_failed_is_not_followed_later() -> None:
    cache = PlanCache()
    agree_on_save(lambda: state(a=(4, 3)), None, cache)
    name = "a/../b"
    with pytest.raises(Exception, match="cannot be part of a name"):
        agree_on_save(lambda: state(**{name: (3,)}), None, cache)
    assert cache.name_for(signature_of(state(a=(4, 3)).tensors)) is None


def test_a_process_that_becomes_another_rank_does_not_follow_its_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors: tuple[LiveTensor, ...] = state(a=(4, 3)).tensors
    before = signature_of(tensors)
    monkeypatch.setattr(collective_plan, "rank", lambda: 3)
    assert signature_of(tensors) != before
