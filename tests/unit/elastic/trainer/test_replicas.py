"""Which replicas differ, and which of them are wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from keepstep import monitor
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.live.digest import checksums, content_digest, layout_digest
from keepstep.checkpoint.live.tensors import LiveTensor, describe
from keepstep.checkpoint.ranks.control_group import ControlGroup
from keepstep.elastic.trainer.process_groups import World
from keepstep.elastic.trainer.replicas import Divergence, ReplicaCheck, find_divergences
from keepstep.elastic.trainer.replicas import describe as describe_divergence


@pytest.mark.parametrize(
    ("layouts", "contents", "expected"),
    [
        ("aaaa", "xxxx", ()),
        ("abcd", "wxyz", ()),
        ("aaaa", "xxyx", (Divergence((0, 1, 2, 3), (0, 2), (2,)),)),
        ("aaaa", "yxxz", (Divergence((0, 1, 2, 3), (1, 0)),)),
        ("aa", "xy", (Divergence((0, 1), (0, 1)),)),
        ("aaaa", "xyyx", (Divergence((0, 1, 2, 3), (0, 1)),)),
        ("abab", "xyxy", ()),
        ("ababab", "xyxzxy", (Divergence((1, 3, 5), (1, 3), (3,)),)),
        ("aab", "xyz", (Divergence((0, 1), (0, 1)),)),
    ],
)
def test_the_minority_is_odd_and_without_a_majority_nobody(
    layouts: str, contents: str, expected: tuple[Divergence, ...]
) -> None:
    assert find_divergences(list(layouts), list(contents)) == expected


@given(st.integers(3, 40), st.data())
def test_any_minority_is_named_exactly(size: int, data: st.DataObject) -> None:
    wrong = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=(size - 1) // 2))
    contents = [str(rank) if rank in wrong else "right" for rank in range(size)]
    (found,) = find_divergences(["a"] * size, contents)
    assert found.odd == tuple(sorted(wrong))
    assert found.pair[0] not in wrong
    assert found.pair[1] in wrong


def test_the_message_names_ranks_tensors_and_what_to_do() -> None:
    odd = describe_divergence(Divergence((0, 1, 2), (0, 1), (1,)), ["model/w"], 40)
    assert odd == ("after step 40 rank 1 differs from 2 replicas that agree; first in model/w")
    tied = describe_divergence(Divergence((0, 1), (0, 1)), [], 1)
    assert "ranks 0, 1 hold different states" in tied
    assert "wrap it in DistributedDataParallel or fully_shard" in tied


def state(offset: int = 0, value: float = 0.0) -> list[LiveTensor]:
    shard = LiveTensor("model/w", (8, 2), Box((offset, 0), (4, 2)), torch.arange(8.0).view(4, 2))
    return [shard, describe("optim/w/step", torch.tensor(value))]


def test_layouts_are_equal_if_the_boxes_are_and_contents_if_every_bit_is() -> None:
    assert layout_digest(state()) == layout_digest(list(reversed(state(value=3.0))))
    assert layout_digest(state()) != layout_digest(state(offset=4))
    assert content_digest(checksums(state())) == content_digest(checksums(state()))
    # Equal by `==`, but not to the bit.
    assert content_digest(checksums(state())) != content_digest(checksums(state(value=-0.0)))


def test_a_transposed_tensor_is_compared_by_its_elements() -> None:
    values = torch.arange(6.0).view(2, 3)
    transposed = values.t().contiguous().t()
    assert checksums([describe("model/w", values)]) == checksums([describe("model/w", transposed)])


def test_check_holds_nothing_of_a_generation_that_it_has_left() -> None:
    """It kept the model and DDP's process groups alive."""

    class Generation:
        def tensors(self) -> Sequence[LiveTensor]:
            return ()

    generation = Generation()
    check = ReplicaCheck(1, "report")
    check.enter(cast(World, None), generation.tensors)
    held = weakref.ref(generation)
    del generation
    assert held() is not None
    check.leave()
    assert held() is None


class TwoRanks:
    """The messages of two ranks, of which one is real and the other answers by a function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, other: Callable[[Any], Any]) -> None:
        self.sent: list[Any] = []
        self._other = other
        monkeypatch.setattr(ControlGroup, "gather", lambda _, sent: self._gather(sent))

    def _gather(self, sent: Any) -> list[Any]:
        self.sent.append(sent)
        return [sent, self._other(sent)]


def entered_check(every: int | None = 1) -> ReplicaCheck:
    check = ReplicaCheck(every, "report")
    mesh = SimpleNamespace(get_all_groups=tuple)
    check.enter(cast(World, SimpleNamespace(rank=0, mesh=mesh)), state)
    return check


def test_ranks_that_know_they_share_nothing_do_not_meet_after_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else all of them wait for a new process, whose first optimizer step takes long."""
    ranks = TwoRanks(monkeypatch, lambda sent: f"not {sent}")
    check = entered_check()
    check.learn_layouts()
    assert ranks.sent == [layout_digest(state())]
    assert check.run_if_due(8, precedes_snapshot=False) is None
    assert len(ranks.sent) == 1


def test_the_first_step_of_a_generation_is_compared_also_if_the_layouts_were_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = TwoRanks(monkeypatch, lambda sent: sent)
    check = entered_check(every=100)
    check.learn_layouts()
    comparison = check.run_if_due(7, precedes_snapshot=False)
    assert comparison is not None
    assert comparison.replicas == 2
    assert ranks.sent == [layout_digest(state()), content_digest(checksums(state()))]
    assert check.run_if_due(8, precedes_snapshot=False) is None
    # The next generation has ranks that may hold other parts.
    entered_again = SimpleNamespace(rank=0, mesh=SimpleNamespace(get_all_groups=tuple))
    check.enter(cast(World, entered_again), state)
    assert check.run_if_due(8, precedes_snapshot=False) is not None
    assert len(ranks.sent) == 4


def test_a_job_that_compares_nothing_learns_no_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = TwoRanks(monkeypatch, lambda sent: sent)
    check = entered_check(every=None)
    check.learn_layouts()
    assert ranks.sent == []


def test_replicas_report_what_they_hold_to_the_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the monitor names one that is wrong also where the loop reports no checksum."""
    reported: list[tuple[monitor.Measure, float, object]] = []
    monkeypatch.setattr(monitor, "measure", lambda *values: reported.append(values))
    # The other of two ranks tells what this one does.
    monkeypatch.setattr(ControlGroup, "gather", lambda _, sent: [sent, sent])
    tensors = [describe("model/w", torch.arange(4.0))]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        check = ReplicaCheck(1, "report")
        check.enter(cast(World, SimpleNamespace(rank=0, mesh=mesh)), lambda: tensors)
        assert check.run_if_due(1, precedes_snapshot=False) is not None
        group = dist.group.WORLD
    finally:
        dist.destroy_process_group()
    digest = content_digest(checksums(tensors))
    assert reported == [(monitor.Measure.REPLICA_CHECKSUM, float(int(digest[:8], 16)), group)]
