"""Claims about when ranks follow the plan of the last save, and about failures of one of them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import pytest
import torch

from keepstep.checkpoint.errors import CheckpointError, LayoutMismatch, RankFailed
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.stored import chunking
from keepstep.checkpoint.format.stored.shared_plan import plan_share
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, describe
from keepstep.checkpoint.ranks import collective_plan, piece_exchange
from keepstep.checkpoint.ranks.collective_plan import (
    AgreedSave,
    PlanCache,
    SharedPlan,
    agree_on_save,
    signature_of,
)
from keepstep.checkpoint.ranks.control_group import ControlGroup
from keepstep.checkpoint.ranks.piece_exchange import exchange_pieces
from tests.unit.checkpoint.thread_ranks import ThreadRanks

ALONE = ControlGroup()


def state(**shapes: tuple[int, ...]) -> LiveState:
    tensors = [describe(key, torch.zeros(shape)) for key, shape in shapes.items()]
    return LiveState(tuple(tensors), {})


def test_a_plan_is_followed_while_the_boxes_stay_and_made_anew_when_they_change() -> None:
    cache = PlanCache()
    first = agree_on_save(lambda: state(a=(4, 3), b=()), None, cache, ALONE)
    again = agree_on_save(lambda: state(a=(4, 3), b=()), None, cache, ALONE)
    assert again.plan is first.plan
    assert again.attempt != first.attempt
    for changed in (state(a=(4, 3)), state(b=(), a=(4, 3)), state(a=(3, 4), b=())):
        assert agree_on_save(lambda s=changed: s, None, cache, ALONE).plan is not first.plan


def test_a_plan_is_made_anew_when_the_compression_changes() -> None:
    def plan(compression: Literal["zstd"] | None) -> SharedPlan:
        return agree_on_save(lambda: state(a=(512, 1024)), None, cache, ALONE, compression).plan

    cache = PlanCache()
    plain = plan(None)
    compressed = plan("zstd")
    assert (plain.own.tensors["a"].compression, plain.tensors.tensors["a"].compression) == (
        None, None
    )  # fmt: skip
    assert compressed.own.tensors["a"].compression == "zstd"
    assert compressed.tensors.tensors["a"].compression == "zstd"
    assert plan("zstd") is compressed
    assert plan(None).own.tensors["a"].compression is None


def test_a_compression_that_does_not_exist_is_refused_before_ranks_plan() -> None:
    with pytest.raises(ValueError, match=r"compression='gzip': give 'zstd', or None"):
        agree_on_save(lambda: state(a=(4,)), None, PlanCache(), ALONE, "gzip")  # type: ignore[arg-type]


def test_a_plan_that_failed_is_not_followed_later() -> None:
    cache = PlanCache()
    agree_on_save(lambda: state(a=(4, 3)), None, cache, ALONE)
    name = "a/../b"
    with pytest.raises(Exception, match="cannot be part of a name"):
        agree_on_save(lambda: state(**{name: (3,)}), None, cache, ALONE)
    assert cache.plan_for(signature_of(state(a=(4, 3)).tensors, ALONE)) is None


def test_a_process_that_becomes_another_rank_does_not_follow_its_plan() -> None:
    tensors: tuple[LiveTensor, ...] = state(a=(4, 3)).tensors
    ranks = ThreadRanks(4)
    signatures = ranks.run(lambda _: signature_of(tensors, ranks.group))
    assert len(set(signatures)) == 4


def test_names_that_lie_in_each_other_are_refused_though_no_planner_has_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blind(*arguments: object) -> tuple[object, object]:
        with monkeypatch.context() as patch:
            patch.setattr(chunking, "check_storable", lambda keys: None)
            return plan_share(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(collective_plan, "plan_share", blind)
    with pytest.raises(LayoutMismatch, match="'a' is a tensor, so 'a/b' cannot lie inside it"):
        agree_on_save(lambda: state(**{"a": (4,), "a/b": (3,)}), None, PlanCache(), ALONE)


def test_data_type_that_cannot_be_stored_is_refused_before_ranks_plan() -> None:
    tensor = torch.zeros(3, dtype=torch.complex32)
    with pytest.raises(LayoutMismatch, match="complex32 cannot be stored"):
        signature_of([describe("a", tensor)], ALONE)


@pytest.mark.parametrize("different", ["step", "generation", "block"])
def test_ranks_that_save_different_steps_all_raise_before_anything_is_planned(
    monkeypatch: pytest.MonkeyPatch, different: str
) -> None:
    def agree(rank: int) -> object:
        numbers = {"step": 7, "generation": 1}
        if different != "block":
            numbers[different] += rank
        return agree_on_save(
            lambda: shard(rank),
            None,
            PlanCache(),
            ranks.group,
            block=different == "block" and rank == 0,
            **numbers,
        )

    ranks = ThreadRanks(3)
    monkeypatch.delattr(collective_plan, "_plan")
    own, first = {"step": (8, 7), "generation": (2, 1), "block": (False, True)}[different]
    for result in ranks.run(agree):
        assert isinstance(result, CheckpointError)
        assert str(result) == (
            f"rank 1 gives {different}={own}, and rank 0 {different}={first}; all ranks save one "
            "step together"
        )


def test_of_equal_documents_the_last_rank_sends_its_own() -> None:
    held = [{"values": value} for value in (1, 2, 1)]
    ranks = ThreadRanks(3)

    def agree(rank: int) -> dict[str, object]:
        live = LiveState(state(a=(3,)).tensors, held[rank])
        documents = agree_on_save(lambda: live, None, PlanCache(), ranks.group).documents
        return {name: value for name, value in documents.items() if name == "values"}

    assert ranks.run(agree) == [{}, {"values": 2}, {"values": 1}]


def shard(rank: int) -> LiveState:
    """Return a third of a tensor that is so small that one rank writes all of it."""
    data = torch.full((4, 8), float(rank))
    return LiveState((LiveTensor("w", (12, 8), Box((4 * rank, 0), (4, 8)), data),), {})


def agree_and_exchange(
    ranks: ThreadRanks, rank: int, cache: PlanCache | None = None, live: LiveState | None = None
) -> tuple[AgreedSave, dict[tuple[str, Box], Any]]:
    held = live or shard(rank)
    agreed = agree_on_save(lambda: held, None, cache or PlanCache(), ranks.group)
    return agreed, exchange_pieces(agreed.plan.rounds, agreed.live.tensors, ranks.group)


def plan_and_gather(ranks: ThreadRanks) -> list[Any]:
    """Return what each of three ranks collects, or its error."""
    return ranks.run(lambda rank: agree_and_exchange(ranks, rank)[1])


def test_one_rank_collects_the_chunk_that_all_hold_a_part_of() -> None:
    collected = [item for result in plan_and_gather(ThreadRanks(3)) for item in result.items()]
    (((key, box), data),) = collected
    assert (key, box) == ("w", Box((0, 0), (12, 8)))
    expected = torch.cat([shard(rank).tensors[0].data for rank in range(3)])
    assert data.tobytes() == expected.numpy().tobytes()


def test_a_plan_has_no_rounds_if_no_rank_lacks_pieces() -> None:
    ranks = ThreadRanks(3)
    agreed = ranks.run(
        lambda _: agree_on_save(lambda: state(a=(4, 3)), None, PlanCache(), ranks.group)
    )
    assert [save.plan.rounds for save in agreed] == [()] * 3


@pytest.mark.parametrize("changed", [None, 0, 1, 2])
def test_pieces_have_the_values_of_the_second_save_whether_or_not_the_ranks_plan_anew(
    changed: int | None,
) -> None:
    ranks = ThreadRanks(3)
    caches = [PlanCache() for _ in range(3)]
    lives = [shard(rank) for rank in range(3)]
    first = ranks.run(lambda rank: agree_and_exchange(ranks, rank, caches[rank], lives[rank]))
    planned = len(ranks.collectives)
    ranks.collectives.clear()
    for live in lives:
        live.tensors[0].data.mul_(-1).sub_(7)
    if changed is not None:
        caches[changed].keep(None)
    second = ranks.run(lambda rank: agree_and_exchange(ranks, rank, caches[rank], lives[rank]))
    collected = {place: data for _, pieces in second for place, data in pieces.items()}
    expected = torch.cat([live.tensors[0].data for live in lives]).numpy().tobytes()
    assert [data.tobytes() for data in collected.values()] == [expected]
    followed = [
        again.plan is before.plan for (again, _), (before, _) in zip(second, first, strict=True)
    ]
    assert followed == [changed is None] * 3
    assert (len(ranks.collectives) < planned / 2) == (changed is None)


def test_lack_of_memory_for_the_exchange_is_an_error_that_a_save_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch's own is a RuntimeError, which ended the training of the rank that had it."""
    ranks = ThreadRanks(3)
    bytes_of = piece_exchange.bytes_of

    def lack(tensor: torch.Tensor) -> torch.Tensor:
        if ranks.rank() == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return bytes_of(tensor)

    monkeypatch.setattr(piece_exchange, "bytes_of", lack)
    results = plan_and_gather(ranks)
    assert [type(result) for result in results] == [RankFailed, CheckpointError, RankFailed]


@pytest.mark.parametrize(
    ("module", "step"),
    [
        (collective_plan, "plan_share"),
        (collective_plan, "merged_tensor_plan"),
        (collective_plan, "wanted_by_round"),
        (collective_plan, "rounds_of"),
    ],
)
def test_what_fails_between_two_messages_on_one_rank_is_raised_on_all(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, step: str
) -> None:
    act: Callable[..., Any] = getattr(module, step)
    failing_rank = 0 if step == "plan_share" else 1
    ranks = ThreadRanks(3)

    def failing(*arguments: Any) -> Any:
        if ranks.rank() == failing_rank:
            raise MemoryError("out of memory")
        return act(*arguments)

    monkeypatch.setattr(module, step, failing)
    results = plan_and_gather(ranks)
    expected = [RankFailed] * 3
    assert [type(result) for result in results] == [
        MemoryError if rank == failing_rank else error for rank, error in enumerate(expected)
    ]
