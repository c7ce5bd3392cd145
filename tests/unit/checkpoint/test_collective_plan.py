"""Claims about when ranks follow the plan of the last save."""

from __future__ import annotations

import pytest
import torch

from keepstep.checkpoint import collective_plan
from keepstep.checkpoint.collective_plan import PlanCache, agree_on_save, signature_of
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, describe
from keepstep.checkpoint.stored import chunking
from keepstep.checkpoint.stored.shared_plan import plan_share


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


def test_names_that_lie_in_each_other_are_refused_though_no_planner_has_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blind(*arguments: object) -> tuple[object, object]:
        with monkeypatch.context() as patch:
            patch.setattr(chunking, "check_storable", lambda keys: None)
            return plan_share(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(collective_plan, "plan_share", blind)
    with pytest.raises(LayoutMismatch, match="'a' is a tensor, so 'a/b' cannot lie inside it"):
        agree_on_save(lambda: state(**{"a": (4,), "a/b": (3,)}), None, PlanCache())


def test_data_type_that_cannot_be_stored_is_refused_before_ranks_plan() -> None:
    tensor = torch.zeros(3, dtype=torch.complex32)
    with pytest.raises(LayoutMismatch, match="complex32 cannot be stored"):
        signature_of([describe("a", tensor)])


def test_of_equal_documents_the_last_rank_sends_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [{"values": "x"}, {"values": "y"}, {"values": "x"}]
    sent = []
    for rank, value in enumerate([1, 2, 1]):
        monkeypatch.setattr(collective_plan, "rank", lambda rank=rank: rank)
        sent.append(collective_plan._last_of({"values": value}, digests))
    assert sent == [{}, {"values": 2}, {"values": 1}]
